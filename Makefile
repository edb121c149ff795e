# `make train` and `make test` need Python 3.11 or newer with its venv module; they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
PIP := -m pip install --quiet --no-compile --disable-pip-version-check
BIN := $(VENV)/bin
ARGS ?=
MPI ?= mpich
OFTEN := not slow and not peers and not mpi and not arm
# tests that are named run although they are long
MARKED ?= $(if $(findstring tests/,$(ARGS)),,not long and )$(OFTEN)
PEERS ?= $(VENV)-peers/bin/python
LLAMA_CPP ?= $(VENV)-llama-cpp/bin/python

.DEFAULT_GOAL := help
.PHONY: help replay gate mutants train train-ranks test check lint docs smoke test-slow test-faults test-oldest test-peers test-mpi test-arm results clean
# two tests at a time and more where there are cores; whoever is done takes over what is left
PYTEST := python -m pytest -n auto --maxprocesses 8 --dist worksteal

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

# ends with a text of the model and the commands that may follow
train: $(VENV)/.installed ## train GPT-2 124M for 40 steps in .venv, and say what to do next
	$(BIN)/cpuopt train --sample-every 40 $(ARGS)

# the same on two ranks, which are two processes with half of the cores each
train-ranks: $(VENV)/.mpi ## the same on two ranks
	$(BIN)/cpuopt train --ranks 2 $(ARGS)

# kernels are compiled first, on all cores; a test would compile them one after another
test: $(VENV)/.dev ## the quick tests, on all cores
	$(BIN)/cpuopt kernels --compile
	$(BIN)/$(PYTEST) -m "$(MARKED)" $(ARGS)

# the environment with MPI is made while ruff and mypy, which take one core, run
check: ## what CI runs: lint, a small run, the quick tests and the long ones, those with MPI
	$(MAKE) -j2 lint $(VENV)-$(MPI)/.installed
	$(MAKE) test MARKED="$(OFTEN)"
	$(MAKE) -j2 smoke test-mpi

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# a refactor that replays has the same machine code, so it needs no timing
REV ?= main
replay: $(VENV)/.dev ## machine code and programs beside those of a commit, REV=main
	$(BIN)/python tests/replay.py $(REV)

gate: $(VENV)/.dev ## kernels whose machine code differs from that of a commit, checked and compared, REV=main
	$(BIN)/cpuopt gate --base $(REV) $(ARGS)

# in a copy of the tree; ARGS='-k WORD' tries some
mutants: $(VENV)/.dev ## 50 broken versions, each found by a test that CI runs
	$(BIN)/python tests/mutants.py $(ARGS)

# the site, in build/site, with what the examples print on this machine; only the installation needs a network
docs: $(VENV)/.docs ## the site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# the main job at a small size, with one kernel swapped
smoke: $(VENV)/.installed ## the main job at a small size, with one kernel swapped
	$(BIN)/cpuopt train --model gpt2-tiny -B 4 -T 32 --steps 20 --swap 'matmul@h.0.*=blas' --runs $(VENV)/smoke-runs
	$(BIN)/cpuopt profile --model gpt2-tiny -B 4 -T 32 --steps 3

# the slow tests that stand between a user and a lost run: 260 kills, a full disk, one that becomes read-only
test-faults: $(VENV)/.dev ## checkpoints under kills and full disks
	$(BIN)/python -m pytest -m slow tests/test_checkpoint.py $(ARGS)

# all slow tests, those among them
test-slow: $(VENV)/.dev ## the tests marked slow
	$(BIN)/$(PYTEST) -m "slow" $(ARGS)

# with the oldest versions that pyproject.toml admits, in an environment and with kernels of their own
test-oldest: $(VENV)-oldest/.installed ## the tests with the oldest libraries that pyproject.toml allows
	CPUOPT_CACHE_DIR=$(CURDIR)/$(VENV)-oldest/cache $(VENV)-oldest/bin/cpuopt kernels --compile
	CPUOPT_CACHE_DIR=$(CURDIR)/$(VENV)-oldest/cache $(VENV)-oldest/bin/$(PYTEST) -m "$(OFTEN)" $(ARGS)

# a model of every family and GPT-2 124M against transformers, files and adapters exchanged with it and PEFT, in an
# environment of their own; `make test-peers PEERS=/path/to/python` takes one that has these already;
# RUN_C=/path/to/run.c compares greedy text with llama2.c's program too. llama.cpp, which pip builds from source in a
# quarter of an hour, has an environment of its own; LLAMA_CPP=/path/to/python takes another, and LLAMA_CPP= none
test-peers: $(VENV)/.dev $(PEERS) $(LLAMA_CPP) ## whole models beside PyTorch, transformers, PEFT and llama.cpp
	$(BIN)/python tests/golden/compare.py --python $(PEERS) $(ARGS)
	$(if $(LLAMA_CPP),$(BIN)/python tests/golden/compare_llama_cpp.py --python $(LLAMA_CPP))
	$(if $(RUN_C),$(BIN)/python tests/golden/compare_run_c.py $(RUN_C))

# several ranks over real MPI, in an environment of its own; `make test-mpi MPI=openmpi` takes the other library
test-mpi: $(VENV)-$(MPI)/.installed ## the tests of several ranks with real MPI
	PATH=$(CURDIR)/$(VENV)-$(MPI)/bin:$$PATH $(VENV)-$(MPI)/bin/python -m pytest -m mpi tests/test_mpi.py $(ARGS)

# whole steps beside PyTorch on this machine: its records, its page in docs/results/, the overview and README's chart
results: $(VENV)/.installed ## whole steps beside PyTorch on this machine: records, page, chart
	$(BIN)/python benchmarks/results.py --measure --peer-python $(PEERS) $(ARGS)

# on aarch64 under qemu, with Debian's Python in the user's cache; what it compiles stays there too
test-arm: $(VENV)/.dev ## the kernels on aarch64 under qemu
	nice $(BIN)/python -m pytest -m arm -rs --durations=0 tests/arm $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python $(PIP) -e '.[dev,docs]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python $(PIP) -e '.[docs]'
	touch $@

$(VENV)/.mpi: $(VENV)/.installed
	$(BIN)/python $(PIP) -e '.[mpi]'
	touch $@

$(VENV)-$(MPI)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$(MPI)
	$(VENV)-$(MPI)/bin/python $(PIP) \
		-e . 'pytest>=8.0' 'hypothesis>=6.100' 'mpi4py>=4.0' $(MPI)
	touch $@

$(VENV)-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	sed -n 's/^ *"\([A-Za-z][A-Za-z0-9_]*\)>=\([0-9.]*\)[^"]*",$$/\1==\2/p; /^dev = /s/[^"]*"\([A-Za-z-]*\)>=\([0-9.]*\)"[^"]*/\1==\2\n/gp' \
		pyproject.toml > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python $(PIP) -e '.[dev]' -c $(VENV)-oldest/constraints.txt
	touch $@

$(VENV)-llama-cpp/bin/python:
	$(PYTHON) -m venv $(VENV)-llama-cpp
	$@ $(PIP) 'llama-cpp-python>=0.3.16'

$(VENV)-peers/bin/python:
	$(PYTHON) -m venv $(VENV)-peers
	$@ $(PIP) torch==2.13.0 'transformers>=5.23' 'peft>=0.18' numpy

clean: ## remove the environments and what was built
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-peers $(VENV)-llama-cpp $(VENV)-mpich $(VENV)-openmpi build *.egg-info
