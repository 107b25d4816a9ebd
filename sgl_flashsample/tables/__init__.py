"""Tuned tables and the built-in choices: ``schema.py`` defines a table, ``lookup.py`` finds the one that serves."""
