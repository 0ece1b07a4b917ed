# `make demo` needs Python 3.10 or later and a package index; `make test` also installs torch, for the tests that
# compare recipes with real PyTorch code on fake tensors. Neither needs a GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The job that the README opens with: BigScience's 104B with mt5's vocabulary, at the micro-batch that ran out of memory.
JOB := bigscience-104b-250k
FLAGS := --mbs 8

.PHONY: demo test lint types picture accuracy speed clean

# Exit code 1 is an answer (the job does not fit), not a failure.
demo: $(VENV)/.installed
	@$(BIN)/memplan estimate $(JOB) $(FLAGS) || test $$? -eq 1

test: lint types
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

# The README's picture: a real run, drawn.
picture: $(VENV)/.installed
	$(BIN)/python -m memplan.report.svg $(JOB) docs/estimate.svg $(FLAGS)

accuracy: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py

speed: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed
