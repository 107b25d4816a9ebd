"""Commands that a person runs: bench, demo, doctor; and what they share, SGLang servers as child processes."""
