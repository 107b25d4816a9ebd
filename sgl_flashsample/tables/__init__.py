"""Tuned tables and the built-in choices: ``schema.py`` says what one is, ``lookup.py`` finds the one that serves."""
