# Everything runs from .venv, which `make setup` prepares. `make help` lists the targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu or cuda: which build of vLLM to install.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

DEMO_MODEL := .demo-model
MODEL ?= $(DEMO_MODEL)
WORKERS ?= 2
PORT ?= 8000
ROUTER_MODE ?= kv
ifeq ($(MODEL),$(DEMO_MODEL))
ENGINE_ARGS ?= --served-model-name demo
endif
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
RUN_VARIABLES := MODEL WORKERS PORT ROUTER_MODE ENGINE_ARGS

# Only `run` hands these on: a test must not depend on the caller's MODEL or PORT.
unexport DEVICE PYTHON PYTEST_ARGS BENCH_ARGS CHAOS_ARGS $(RUN_VARIABLES)

VENV_PYTHON := .venv/bin/python
LOCK := locks/$(DEVICE).txt
PIP_INSTALL := $(VENV_PYTHON) -m pip install --disable-pip-version-check -c $(LOCK)
ENVIRONMENT := .venv/.mmrouter-$(DEVICE)
BENCH_ENVIRONMENT := $(ENVIRONMENT)-bench

.PHONY: help setup run test fuzz chaos check fix docs demo-model clean distclean
.PHONY: bench-router bench-router-scale bench-transfer bench-last-hop bench-preprocess

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "%-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "make run takes MODEL, WORKERS, PORT, ROUTER_MODE (kv, round-robin, random) and ENGINE_ARGS"
	@echo "(any vLLM engine flags); everything examples/launch/agg_multimodal_router.sh --help lists works"
	@echo "as an environment variable. DEVICE=cpu or cuda chooses the build of vLLM (here: $(DEVICE))."

setup: $(ENVIRONMENT) ## prepare .venv

$(VENV_PYTHON):
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$python" -m venv .venv && exit 0; \
	        rm -rf .venv; exit 1; \
	    fi; \
	done; \
	echo "Python 3.11 or later is needed; name one with PYTHON=" >&2; exit 1

ifeq ($(DEVICE),cuda)
EXTRAS := cuda,nixl,test
else
EXTRAS := cpu,test
endif

$(ENVIRONMENT): pyproject.toml $(LOCK) $(wildcard setup/*.py) | $(VENV_PYTHON)
	@echo "Installing for $(DEVICE): several gigabytes, so this takes minutes."
	@$(PIP_INSTALL) -e '.[$(EXTRAS)]' || { \
	    echo; \
	    echo "The installation failed. If pip found no torch with '+cpu' in its version: put PyTorch's CPU"; \
	    echo "wheel index into the environment variable PIP_EXTRA_INDEX_URL and repeat (see README.md)."; \
	    exit 1; } >&2
ifneq ($(DEVICE),cuda)
	@# Their own dependencies would bring a CUDA build of torch.
	@$(PIP_INSTALL) --quiet --no-deps nixl nixl-cu12
endif
	@$(VENV_PYTHON) setup/cpu_torch.py
	@touch $@

demo-model: $(ENVIRONMENT) ## make the tiny random model that `make run` serves
	@$(VENV_PYTHON) examples/demo_model.py $(DEMO_MODEL)

run: export MODEL := $(MODEL)
run: export WORKERS := $(WORKERS)
run: export PORT := $(PORT)
run: export ROUTER_MODE := $(ROUTER_MODE)
run: export ENGINE_ARGS := $(ENGINE_ARGS)
run: $(ENVIRONMENT) $(if $(filter $(DEMO_MODEL),$(MODEL)),demo-model) ## start workers and the frontend, until Ctrl-C
	@exec examples/launch/agg_multimodal_router.sh

test: $(ENVIRONMENT) ## run the whole test suite
	@$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

fuzz: $(ENVIRONMENT) ## run the unit tests with inputs that nobody has tried yet
	@$(VENV_PYTHON) -m pytest -m "not e2e" --hypothesis-profile=explore $(PYTEST_ARGS)

check: $(ENVIRONMENT) ## lint, format check and types
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy

fix: $(ENVIRONMENT) ## format, and mend what the linter can mend
	$(VENV_PYTHON) -m ruff check --fix
	$(VENV_PYTHON) -m ruff format

docs: $(ENVIRONMENT) ## remake the pages that are made from code
	$(VENV_PYTHON) -m common.lifecycle_page docs/lifecycle.md

$(BENCH_ENVIRONMENT): $(ENVIRONMENT)
	@$(PIP_INSTALL) --quiet -e '.[bench]'
	@touch $@

bench-router: $(BENCH_ENVIRONMENT) ## measure routing decisions against the peer's router
	@$(VENV_PYTHON) -m tests.benchmarks.bench_router $(BENCH_ARGS)

bench-router-scale: $(BENCH_ENVIRONMENT) ## measure routing with many workers and blocks
	@$(VENV_PYTHON) -m tests.benchmarks.bench_router_scale $(BENCH_ARGS)

bench-transfer: $(BENCH_ENVIRONMENT) ## measure each way of moving tensors
	@$(VENV_PYTHON) -m tests.benchmarks.bench_transfer $(BENCH_ARGS)

bench-preprocess: $(BENCH_ENVIRONMENT) ## measure getting media ready, beside vLLM's renderer
	@$(VENV_PYTHON) -m tests.benchmarks.bench_preprocess $(BENCH_ARGS)

bench-last-hop: $(BENCH_ENVIRONMENT) ## measure each of vLLM's ways from a worker to its engine
	@$(VENV_PYTHON) -m tests.benchmarks.bench_last_hop $(BENCH_ARGS)

chaos: $(ENVIRONMENT) ## break everything at random under load, and count what users notice
	@$(VENV_PYTHON) -m tests.chaos $(CHAOS_ARGS)

clean: ## remove what running and testing left
	rm -rf .runs $(DEMO_MODEL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find backend_worker common examples frontend setup tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## and .venv
	rm -rf .venv
