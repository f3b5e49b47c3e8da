# make compare   train a small DeepSeek-V3-style model with alltoall and with MoK, side by side
# make test      formatting checks and the test suite
# make setup     .venv with the package and its engines (the others do it by themselves)
#
# PYTHON=...     the Python (>= 3.12) to make .venv with
# MOK_CUDA=0|1   never build the CUDA engine, or fail without nvcc

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/tiny_deepseek_v3.yaml
NATIVE := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)

.PHONY: compare test test-gpu lint format setup clean

compare: setup
	$(BIN)/megatron-mok compare $(CONFIG)

test: lint
	$(BIN)/python -m pytest

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

setup: $(VENV)/.installed $(VENV)/.built

# Dependencies: again only when their lists change.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { python=$$(./.ci/find-python) && "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=77' wheel
	MOK_CUDA=$${MOK_CUDA:-auto} $(BIN)/python -m pip install --quiet --no-build-isolation \
		--constraint constraints.txt --editable '.[test]'
	@touch $@

# Engines: again only when their sources change.
$(VENV)/.built: $(VENV)/.installed setup.py $(NATIVE)
	$(BIN)/python setup.py --quiet build_py --editable-mode 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info megatron_mok/lib
