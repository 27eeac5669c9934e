# All targets run in one virtual environment, .venv, which the first target creates. They require make, Python 3.11 or later with
# its venv module, and a package index that pip can reach.
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout 600 --durations 30 --durations-min 5
MADE := $(VENV)/.made
EXAMPLES := $(VENV)/.installed-examples
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
ENGINES := $(VENV)/.installed-engines

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-all test-deep test-versions lint format types docs docs-serve notebooks dist bench bench-gpu engines clean clean-all

help: ## print this help
	@echo 'usage: make <target> [ARGS="..."] [PYTHON=python3.12] [WORKERS=2]'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: $(EXAMPLES) ## train a small GPT with Muon and with AdamW on this machine (ARGS="--help" lists the options)
	@TRAIN_GPT_MAKE='$(MAKE) $(if $(findstring x$(PWD)x,x$(CURDIR)x),,-C "$(CURDIR)" )train' $(PY) examples/train_gpt.py $(ARGS)

test: $(DEV) ## run the main tests, including doctests; takes minutes
	@$(PYTEST) -m 'not slow and not engines' $(ARGS)

test-slow: $(DEV) ## run all other tests: long ones, and tests of engines (skipped before make engines)
	@$(PYTEST) -m 'slow or engines' $(ARGS)

test-all: test ## run test, then test-slow
	@$(MAKE) --no-print-directory test-slow

test-deep: $(DEV) ## run all tests with many more random examples; takes hours
	@MUONFX_HYPOTHESIS_PROFILE=deep $(PY) -m pytest -n $(WORKERS) $(ARGS)

test-versions: ## run the core tests on the oldest supported torch and on the newest (3 GB each for GPU builds); writes docs/tested-versions.md
	@$(PYTHON) scripts/test_versions.py $(ARGS)

lint: $(DEV) ## check lint and format with ruff
	@$(PY) -m ruff check --output-format concise .
	@$(PY) -m ruff format --check .

format: $(DEV) ## fix lint and format with ruff
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(DEV) ## check the types of muonfx/ with basedpyright in strict mode
	@$(PY) -m basedpyright --pythonpath $(PY)

docs: $(DEV) ## build the documentation into site/; a warning is an error
	@rm -rf site  # remove pages that no longer exist
	@$(PY) -m sphinx -b html -W -n --keep-going -q -d build/doctrees docs site $(ARGS)
	@echo 'open site/index.html'

docs-serve: docs ## serve the built documentation on localhost, port 8000
	@$(PY) -m http.server --directory site --bind 127.0.0.1 8000

notebooks: $(DEV) ## execute the notebooks (ARGS=--write saves the new outputs)
	@$(PY) scripts/run_notebooks.py --workers $(WORKERS) $(ARGS)

dist: $(DEV) ## build the wheel and the sdist into dist/
	@rm -rf dist
	@$(PY) -m hatchling build

bench: $(BENCH) ## run the benchmarks and compare with other packages
	@$(PY) -m benchmarks $(ARGS)

bench-gpu: ## run the GPU tests and benchmarks with the packages of $(PYTHON); installs nothing
	@$(PYTHON) -m pytest -q tests/test_gpu.py; tested=$$?; \
	  $(PYTHON) -m benchmarks.gpu $(ARGS) && exit $$tested

setup: $(DEV) ## create the development environment only

engines: $(ENGINES) ## install the packages that tests of engines import (transformers, deepspeed, lightning, ...)

clean: ## remove the output of all targets, but not .venv
	rm -rf site build jupyter_execute docs/notebooks dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean ## remove .venv as well
	rm -rf $(VENV)

# The virtual environment, and a stamp file for each set of installed packages. A change of pyproject.toml or constraints.txt
# makes a stamp out of date.
$(MADE):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo 'error: found no "$(PYTHON)" on this machine: install Python 3.11 or later, or run make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), expected 3.11 or later: run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot create virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@[ ! -e $(VENV) ] || { \
	  echo 'error: found a $(VENV) that make did not create or did not complete: move it away, or run make clean-all' >&2; exit 1; }
	@echo '==> creating a virtual environment in $(VENV) ('"$$($(PYTHON) -V 2>&1)"')'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# $(call install,extra,time and size). It shows the progress of downloads on a terminal, and is quiet in a log.
define install
@echo '==> installing muonfx[$(1)] and its dependencies: $(2)'
@if [ -t 1 ]; then quiet=; else quiet=-qq; fi; $(PY) -m pip install $$quiet -c constraints.txt -e '.[$(1)]'
endef

$(EXAMPLES): $(MADE) pyproject.toml constraints.txt
	$(call install,examples,one or two minutes$(comma) about 300 MB with a CPU build of torch)
	@touch $@

$(DEV): $(MADE) pyproject.toml constraints.txt
	$(call install,dev,two to four minutes$(comma) about 700 MB with a CPU build of torch)
	@touch $(EXAMPLES) $@

$(BENCH): $(DEV)
	$(call install,bench,packages to compare with$(comma) a few MB)
	@touch $@

$(ENGINES): $(DEV) requirements/engines.txt requirements/engines-no-deps.txt
	@echo '==> installing the packages of requirements/engines*.txt: two minutes$(comma) 150 MB'
	@$(PY) -m pip install -qq -c constraints.txt -r requirements/engines.txt
	@$(PY) -m pip install -qq --no-deps -r requirements/engines-no-deps.txt
	@touch $@

comma := ,
