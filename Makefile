PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=
BENCH_ARGS ?=
NIGHTLY_RUNS ?= 20
NIGHTLY_SEED ?= $(shell date +%s)

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install -c constraints.txt $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup check test train exhaustive nightly format clean bench bench-peers

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Shardwise needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev,digits,hf,tensorboard]'
	touch $@

# One thread per process: ranks of a test share the cores of one machine.
check test exhaustive nightly: export OMP_NUM_THREADS = 1

check: setup ## Formatting, lint, types, layers, doctests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -p no:randomly --doctest-modules src/shardwise

test: setup ## All tests but the slow ones, in file order
	$(PYTEST) tests -m 'not slow' -p no:randomly $(PYTEST_ARGS)

train: setup ## A byte-level GPT at stage 3 on 2 ranks, in about two minutes (TRAIN_ARGS="--help" lists its options)
	$(BIN)/shardwise train gpt --stage 3 --ranks 2 $(TRAIN_ARGS)

bench: setup ## Step times, memory and growth beside every peer that is installed (BENCH_ARGS="--help" lists its options)
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: setup ## The same with DeepSpeed, which it installs
	$(PIP) -e '.[bench]' deepspeed
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

exhaustive: setup ## Every combination that small worlds allow (slow)
	$(PYTEST) tests/distributed/test_exhaustive.py -m slow -p no:randomly $(PYTEST_ARGS)

nightly: setup ## The whole suite NIGHTLY_RUNS times in random order, up to the first failure
	@for run in $$(seq 1 $(NIGHTLY_RUNS)); do \
		seed=$$(( ($(NIGHTLY_SEED) + run) % 4294967296 )); \
		echo "nightly: run $$run of $(NIGHTLY_RUNS), seed $$seed"; \
		$(PYTEST) tests -x --randomly-seed=$$seed $(PYTEST_ARGS) || { \
			echo "nightly: failed in run $$run; repeat with: $(PYTEST) tests --randomly-seed=$$seed" >&2; exit 1; }; \
	done

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build output (.venv stays)
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
