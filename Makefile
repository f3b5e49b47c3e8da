# make compare   train a small DeepSeek-V3-style model with alltoall and with MoK, side by side
# make test      formatting checks and the test suite
# make test-gpu  the tests that need a Hopper GPU
# make test-matrix  the tests of the plugin with each Megatron-Core that it supports
# make format    formats everything
#
# Each sets up what it needs: a .venv with the package, its dependencies and its engines.
#
# PYTHON=...     the Python (>= 3.12) to make .venv with
# MOK_CUDA=0|1   never build the CUDA engine, or fail without nvcc
# CONFIG=...     what to compare

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

BIN := .venv/bin
# Setuptools warns at every editable installation.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --quiet
CONFIG ?= configs/tiny_deepseek_v3.yaml
# Besides the one in constraints.txt.
MEGATRON_VERSIONS := 0.17.1 0.18.2
NATIVE := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; \
	done)

.PHONY: compare test test-gpu test-matrix lint format setup clean

compare: setup
	$(BIN)/megatron-mok compare $(CONFIG)

test: lint
	$(BIN)/python -m pytest

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

test-matrix: setup $(MEGATRON_VERSIONS:%=.matrix/%/done)
	$(BIN)/python -m pytest tests/megatron
	for version in $(MEGATRON_VERSIONS); do \
		PYTHONPATH=.matrix/$$version MOK_TEST_MEGATRON=$$version \
			$(BIN)/python -m pytest tests/megatron; \
	done

# Over the environment's own: found first, with no dependencies of its own.
.matrix/%/done: .venv/dependencies
	rm -rf .matrix/$*
	$(PIP) install --target .matrix/$* --no-deps megatron-core==$*
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

setup: .venv/dependencies .venv/engines

.venv/dependencies: pyproject.toml constraints.txt
ifeq ($(PYTHON),)
	$(error No Python >= 3.12 found (Megatron-Core needs it). Install one, or name it: make PYTHON=/path/to/python3.12)
endif
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade pip 'setuptools>=77' wheel
	$(PIP) install --no-build-isolation \
		--constraint constraints.txt --editable '.[test]'
	touch $@

.venv/engines: .venv/dependencies setup.py $(NATIVE)
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf .venv .matrix build *.egg-info megatron_mok/lib
