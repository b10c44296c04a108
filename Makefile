# Every target sets up what it needs first: an environment in .venv, the build tools, PyTorch, the package. GNU make.
#
#   make train ARGS="--stage 2 --steps 50" DATA=~/books      make test      make help
#
# PYTHON=python3.12 chooses the interpreter, TORCH="torch==2.11.0" the PyTorch to install where none is there yet,
# JOBS=N the compilers at a time, DEEPC_CUDA=ON the CUDA kernels where there is no GPU (with one they are built wherever nvcc is),
# DEEPC_NATIVE=OFF kernels for all instruction sets (ON: for this processor's; a wheel has all).

.DEFAULT_GOAL := help
.PHONY: help setup build format lint train test test-full test-thread test-levels test-gpu bench bench-full wheel sdist docs clean distclean

export PYTHON ?= python3
export TORCH ?=
export JOBS ?= $(shell nproc)
export DATA ?=
export DEEPC_CUDA ?=
VPY := .venv/bin/python

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## the environment only: .venv with PyTorch and the build tools
	@scripts/setup

build: setup  ## compile, and install the package into .venv
	@scripts/install

train: build  ## train a GPT on real text (at most 3 minutes); options: ARGS="--help"
	@scripts/python examples/gpt/train.py --ranks auto $(ARGS)

test: setup  ## all quick tests, C (under sanitizers) and Python
	@scripts/test quick $(ARGS)

test-full: setup  ## the slow ones too: faults, fuzzing, large worlds
	@scripts/test full $(ARGS)

test-thread: setup  ## the C tests of what has threads, under ThreadSanitizer
	@scripts/test thread

test-levels: setup  ## the C tests of kernels at instruction sets that this processor has not
	@scripts/test levels

test-gpu: setup  ## every op and the quickstart on a GPU against the CPU
	@scripts/test gpu $(ARGS)

bench: build  ## measure against PyTorch and DeepSpeed, the short form
	@scripts/bench $(ARGS)

bench-full: build  ## the same at all sizes, as in docs/bench.md
	@scripts/bench --full $(ARGS)

wheel: setup  ## dist/*.whl: one py3-none wheel for every torch >= 2.10, named by the oldest glibc that it runs on
	@scripts/wheel

sdist: setup  ## dist/*.tar.gz: the sources, from which pip builds the same wheel
	@scripts/wheel sdist

docs: build  ## build/site: the documentation as web pages
	@scripts/docs

format: setup  ## lay out all sources: ruff (Python) and clang-format (C, C++, CUDA), 120 columns
	@scripts/lint format

lint: setup  ## check the layout and the rules of pyproject.toml, changing nothing
	@scripts/lint check

clean:  ## remove what was built; .venv stays
	rm -rf build dist

distclean: clean  ## remove .venv as well
	rm -rf .venv
