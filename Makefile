# Each target sets up .venv by itself; a second run starts at once.
PYTHON ?= python3
BOOTSTRAP = $(PYTHON) sgl_flashsample/demo/bootstrap.py

.PHONY: demo test lint clean

demo:  ## serve a generated checkpoint with SGLang and the backend on; send real requests
	@$(BOOTSTRAP) demo

test:  ## all tests that this machine can run
	@$(BOOTSTRAP) test

lint:  ## ruff, formatting, types
	@$(BOOTSTRAP) lint

clean:  ## remove what the targets above made
	rm -rf .venv .cache
