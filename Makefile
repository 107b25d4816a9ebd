# Each target sets up .venv by itself; a second run starts at once. ARGS: further arguments, of pytest or of the demo.
PYTHON ?= python3
BOOTSTRAP = $(PYTHON) tests/lab/bootstrap.py

.PHONY: demo test test-fast test-full coverage lint clean

demo:  ## serve a generated checkpoint with SGLang and the backend on; send real requests
	@$(BOOTSTRAP) demo $(ARGS)

test:  ## every contract on every path, on what this machine has
	@$(BOOTSTRAP) test $(ARGS)

test-fast:  ## what needs no server and no compiler
	@$(BOOTSTRAP) test-fast $(ARGS)

test-full:  ## all combinations, all SGLang releases, all compile targets
	@$(BOOTSTRAP) test-full $(ARGS)

coverage:  ## branch coverage of the host code that a server runs, by the tests that start none
	@$(BOOTSTRAP) coverage $(ARGS)

lint:  ## ruff, formatting, types
	@$(BOOTSTRAP) lint

clean:  ## remove what the targets above made
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
