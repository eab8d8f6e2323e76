# Two commands for a fresh machine (Debian, Python 3.11, make): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# The version that is tested. Where the registry's wheel of this version is a CUDA build and you have no GPU, install the
# CPU wheel into $(VENV) first, as pytorch.org describes; it is then kept.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Test workers run side by side with one torch thread each.
WORKERS ?= 2

.PHONY: demo test lint types claims bench clean install install-dev

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

demo: install
	$(BIN)/forethought demo --out runs/demo --overwrite

test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# Slow claims: the mini profiles, whose results pages are committed under docs/results.
claims: install
	$(BIN)/forethought run one-shot-rlvr --profile mini --out runs/one-shot-rlvr --overwrite
	$(BIN)/python -m forethought.recipes.page runs/one-shot-rlvr docs/results/one-shot-rlvr.md \
	  "forethought run one-shot-rlvr --profile mini --out runs/one-shot-rlvr --overwrite"

bench: install-dev
	$(BIN)/python benchmarks/grpo_step.py --peer none
	$(BIN)/python benchmarks/sampling.py

clean:
	rm -rf $(VENV) runs .pytest_cache .hypothesis .ruff_cache
