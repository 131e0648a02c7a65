# Everything a user or CI needs. The first target that is asked for sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup test test-all lint demo clean

setup: $(STAMP)

# Torch goes first and pinned: nothing that follows may choose another one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Fathom needs Python 3.10 or newer (set PYTHON=...)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m 'not slow'

test-all: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
