"""SGLang and Triton on a machine without a GPU, and draft models: for tests, benchmarks and ``make demo``.

Nothing here is installed: a program that imports it has ``tests/`` on its path.
"""
