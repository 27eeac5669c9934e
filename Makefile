# Everything below runs in one virtual environment, .venv, that the first command makes. Needed beforehand: make, Python 3.11 or
# later with its venv module, and a package index that pip can reach.
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n $(WORKERS) --timeout 600 --durations 30 --durations-min 5
MADE := $(VENV)/.made
EXAMPLES := $(VENV)/.installed-examples
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
ENGINES := $(VENV)/.installed-engines

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-all test-deep test-versions lint format types docs docs-serve notebooks bench bench-gpu engines clean clean-all

help: ## print this list
	@echo 'usage: make <target> [ARGS="..."] [PYTHON=python3.12] [WORKERS=2]'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: $(EXAMPLES) ## train a small GPT with Muon and with AdamW on this machine (ARGS="--help" lists the options)
	@TRAIN_GPT_MAKE='$(MAKE) $(if $(findstring x$(PWD)x,x$(CURDIR)x),,-C "$(CURDIR)" )train' $(PY) examples/train_gpt.py $(ARGS)

test: $(DEV) ## run the tests that prove the project, doctests among them: minutes
	@$(PYTEST) -m 'not slow and not engines' $(ARGS)

test-slow: $(DEV) ## run all others: long ones, and those of engines (skipped before make engines)
	@$(PYTEST) -m 'slow or engines' $(ARGS)

test-all: test ## run both, one after the other
	@$(MAKE) --no-print-directory test-slow

test-deep: $(DEV) ## run all with many more random examples: minutes become hours
	@MUONFX_HYPOTHESIS_PROFILE=deep $(PY) -m pytest -n $(WORKERS) $(ARGS)

test-versions: ## run the core tests on the oldest torch that muonfx accepts and on the newest (GPU builds take 3 GB each)
	@$(PYTHON) scripts/test_versions.py $(ARGS)

lint: $(DEV) ## ruff: lint and format check
	@$(PY) -m ruff check --output-format concise .
	@$(PY) -m ruff format --check .

format: $(DEV) ## ruff: mend what it can mend by itself
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(DEV) ## basedpyright, strict, over muonfx/
	@$(PY) -m basedpyright --pythonpath $(PY)

docs: $(DEV) ## build the documentation into site/; a warning is an error
	@rm -rf site  # a page that is no more would stay
	@$(PY) -m sphinx -b html -W -n --keep-going -q -d build/doctrees docs site $(ARGS)
	@echo 'open site/index.html'

docs-serve: docs ## serve the built documentation on this machine, at port 8000
	@$(PY) -m http.server --directory site --bind 127.0.0.1 8000

notebooks: $(DEV) ## execute the notebooks (ARGS=--write keeps the new outputs)
	@$(PY) scripts/run_notebooks.py $(ARGS)

bench: $(BENCH) ## run the benchmarks, against other packages
	@$(PY) -m benchmarks $(ARGS)

bench-gpu: ## on a machine with an NVIDIA GPU: run the GPU tests, then all GPU benchmarks, under 15 minutes on one H200
	@nvidia-smi -L 2>/dev/null | grep -q GPU || { \
	  echo 'error: found no NVIDIA GPU (nvidia-smi -L lists none), and nothing here is worth measuring without one' >&2; exit 2; }
	@$(MAKE) --no-print-directory $(BENCH)
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit(f"error: torch {torch.__version__} finds no CUDA device: install its CUDA build into $(VENV)")'
	@$(PY) -m pytest -q --timeout 600 -m 'not slow and not engines' tests/test_gpu.py tests/polar/test_kernels.py; tested=$$?; \
	  $(PY) -m benchmarks.gpu $(ARGS) && exit $$tested

setup: $(DEV) ## make the development environment and nothing else

engines: $(ENGINES) ## add what the tests marked `engines` import (transformers, deepspeed, lightning, ...)

clean: ## remove what the commands above wrote, but not .venv
	rm -rf site build jupyter_execute docs/notebooks dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean ## remove .venv too
	rm -rf $(VENV)

# The environment, and a stamp for each set of packages in it. A changed pyproject.toml or constraints.txt makes a stamp stale;
# an up-to-date stamp costs nothing.
$(MADE):
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo 'error: no "$(PYTHON)" on this machine: install Python 3.11 or later, or say make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: muonfx needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1): say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@[ ! -e $(VENV) ] || { \
	  echo 'error: there is a $(VENV) here that make did not finish, or did not make: move it away, or say make clean-all' >&2; exit 1; }
	@echo '==> making a virtual environment in $(VENV) ('"$$($(PYTHON) -V 2>&1)"')'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# $(call install,extra,what it amounts to). Chatty on a terminal, so that a person sees the downloads move; quiet in a log.
define install
@echo '==> installing muonfx[$(1)] and its dependencies: $(2)'
@if [ -t 1 ]; then quiet=; else quiet=-qq; fi; $(PY) -m pip install $$quiet -c constraints.txt -e '.[$(1)]'
endef

$(EXAMPLES): $(MADE) pyproject.toml constraints.txt
	$(call install,examples,a minute or two$(comma) about 300 MB where torch comes as its CPU build)
	@touch $@

$(DEV): $(MADE) pyproject.toml constraints.txt
	$(call install,dev,two to four minutes$(comma) about 700 MB where torch comes as its CPU build)
	@touch $(EXAMPLES) $@

$(BENCH): $(DEV)
	$(call install,bench,the packages to compare with$(comma) a few MB)
	@touch $@

$(ENGINES): $(DEV) requirements/engines.txt requirements/engines-no-deps.txt
	@echo '==> installing the packages of requirements/engines*.txt: two minutes$(comma) 150 MB'
	@$(PY) -m pip install -qq -c constraints.txt -r requirements/engines.txt
	@$(PY) -m pip install -qq --no-deps -r requirements/engines-no-deps.txt
	@touch $@

comma := ,
