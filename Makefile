# `make train` and `make test` need Python 3.11 or newer with its venv module; they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test check lint smoke test-slow test-faults test-peers clean

train: $(VENV)/.installed
	$(BIN)/cpuopt train $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not peers" $(ARGS)

check: lint test test-faults smoke

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the main job at a small size, with one kernel swapped
smoke: $(VENV)/.installed
	$(BIN)/cpuopt train --model gpt2-tiny -B 4 -T 32 --steps 20 --swap 'matmul@h.0.*=blas' --runs $(VENV)/smoke-runs
	$(BIN)/cpuopt profile --model gpt2-tiny -B 4 -T 32 --steps 3

# the slow tests that stand between a user and a lost run: 200 kills, a full disk, one that becomes read-only
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/test_checkpoint.py $(ARGS)

# all slow tests, those among them
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow" $(ARGS)

# the full 124M against PyTorch, and weights exchanged with transformers, in an environment of their own
test-peers: $(VENV)/.installed $(VENV)-peers/.installed
	$(BIN)/python tests/golden/compare_124m.py --torch-python $(VENV)-peers/bin/python $(ARGS)
	$(BIN)/python tests/golden/compare_transformers.py --python $(VENV)-peers/bin/python

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)-peers/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'transformers>=4.50' numpy
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-peers build *.egg-info
