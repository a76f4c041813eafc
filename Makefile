# make setup   environment in .venv with pinned versions; the second time it is instant
# make run     the page on http://127.0.0.1:7860          make run ARGS="--port 8000"
# make test    lint, types, and every test, real pair and real browser included
# make bench   the table of the benchmark                 make bench ARGS="--quick --json out.json"
#
# PYTHON=...   the interpreter to build with (3.11 or newer)
# PIP_ARGS=... more options for pip, such as another index; changing them needs `make clean` first

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-test run test lint bench fetch clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup: $(VENV)/.setup
setup-test: $(VENV)/.setup-test

$(VENV)/.created:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Python 3.11 or newer was not found. Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "error: $(PYTHON) lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.setup: $(INPUTS) $(VENV)/.created
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.setup-test: $(INPUTS) $(VENV)/.created
	$(PIP_INSTALL) -e '.[test]'
	@touch $(VENV)/.setup $@

run: setup
	$(BIN)/python app.py $(ARGS)

bench: setup fetch
	$(BIN)/python -m saguaro_core.bench $(ARGS)

fetch: setup
	$(BIN)/python -m saguaro_core.models.fetch

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m saguaro_core.models.fetch
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not alone"
	$(BIN)/python -m pytest -m alone
else
	$(BIN)/python -m pytest $(ARGS)
endif

clean:
	rm -rf $(VENV)
