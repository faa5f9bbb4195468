# The one definition of every check; CI and people call these.
# `make install` makes .venv with the `shardkeep` command in it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What runs in parallel; the machine's cores by default.
JOBS ?= auto

.PHONY: install demo demo-spot test test-all lint format types layers bench docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group test --group dev
	touch $(STAMP)

demo: install
	$(BIN)/shardkeep demo

demo-spot: install
	$(BIN)/shardkeep demo --spot $(ARGS)

test: install
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) $(ARGS)

test-all: install
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

docs: install
	$(BIN)/python -m pytest tests/docs $(ARGS)

bench: install
	$(BIN)/shardkeep bench --size 3GiB --rounds 7 $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
