# `make demo` needs Python 3.10 or later and a package index; `make test` also installs torch, for the tests that
# compare recipes with real PyTorch code on fake tensors. Neither needs a GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The job that the README opens with: Llama 3 8B under FSDP on 8 H100s.
JOB := llama-3-8b-8gpu
FLAGS :=
# Hundreds of tests start processes of their own: each finds compiled what the one before has read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test golden golden-record lint types docs picture accuracy speed clean

# Exit code 1 is an answer (the job does not fit), not a failure.
demo: $(VENV)/.installed
	@$(BIN)/memplan estimate $(JOB) $(FLAGS) || test $$? -eq 1

# mypy runs beside the tests; what it says comes behind theirs, and either of the two can fail the whole.
test: lint
	@$(BIN)/python -m mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder; tested=$$?; \
	wait $$types; typed=$$?; \
	echo "mypy:"; cat $(VENV)/types.txt; \
	test $$tested -eq 0 && test $$typed -eq 0

# Every recorded answer; `make golden ONLY=deepspeed` checks those with this text in their command.
golden: $(VENV)/.installed
	$(BIN)/python -m tests.golden $(ONLY)

# Sentences that changed, and new cases; figures only with `python -m tests.golden --record-figures`.
golden-record: $(VENV)/.installed
	$(BIN)/python -m tests.golden --record $(ONLY)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

# The site, in site/: every link and every page of the navigation checked.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The README's picture: a real run, drawn.
picture: $(VENV)/.installed
	$(BIN)/python -m benchmarks.picture $(JOB) docs/estimate.svg $(FLAGS)

accuracy: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/verdicts.py

speed: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed
