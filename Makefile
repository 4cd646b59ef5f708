# Everything runs from .venv, which `make setup` prepares. `make help` lists the targets.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu or cuda: which build of vLLM to install.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

# 0.32 or 0.33. The newer one lives beside, in .venv-vllm-0.33; on a CPU it is there to be tested
# only (docs/vllm-0.33.md).
VLLM ?= 0.32
ifeq ($(filter 0.32 0.33,$(VLLM)),)
$(error VLLM is 0.32 or 0.33, not $(VLLM))
endif
OF_VLLM := $(filter-out -0.32,-$(VLLM))
VENV := .venv$(if $(OF_VLLM),-vllm$(OF_VLLM))

DEMO_MODEL := .demo-model
PORT ?= 8000
PYTEST_ARGS ?=
# Processes that share the tests: more than cores, since half of their time is waiting. Each needs 4 GB.
TEST_PROCESSES ?= 4
BENCH_ARGS ?=
CHAOS_ARGS ?=
FAMILIES_ARGS ?=
# For example --seed 1, and --minutes 2 for fuzz-engines, --seconds 60 for fuzz-http.
FUZZ_ARGS ?=
GPU_ARGS ?=
# Where the archive for a machine with a GPU goes.
KIT ?= .gpu-kit
RUN_VARIABLES := MODEL WORKERS PORT ROUTER_MODE ENGINE_ARGS FRONTEND_ARGS

# Only `run` hands these on: a test must not depend on the caller's MODEL or PORT. Compiled files are
# kept, or each of some hundred processes would compile all of ours again.
unexport PYTHONDONTWRITEBYTECODE
unexport DEVICE VLLM PYTHON PYTEST_ARGS TEST_PROCESSES BENCH_ARGS CHAOS_ARGS FAMILIES_ARGS FUZZ_ARGS GPU_ARGS KIT $(RUN_VARIABLES)

VENV_PYTHON := $(VENV)/bin/python
# In the order of the files, so that engines start first.
PYTEST_PARALLEL = -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder
LOCK := locks/$(DEVICE)$(OF_VLLM).txt
PIP_INSTALL := $(VENV_PYTHON) -m pip install --disable-pip-version-check --no-deps
# A lock has all that is needed, so nothing is resolved; a file whose hash it lacks is refused, and
# nothing is built, since a build would fetch what it needs unchecked.
PIP_INSTALL_LOCK := $(PIP_INSTALL) --require-hashes --only-binary :all: -r
ENVIRONMENT := $(VENV)/.mmrouter-$(DEVICE)
SETUP_LOG := $(VENV)/setup.log
BENCH_ENVIRONMENT := $(ENVIRONMENT)-bench
DOCS_ENVIRONMENT := $(ENVIRONMENT)-docs
CLIENTS_ENVIRONMENT := .venv-clients/.mmrouter

.PHONY: help setup run test test-version test-gpuless clients fuzz families fuzz-engines fuzz-http chaos check fix docs site locks demo-model clean distclean check-simgpu
.PHONY: test-gpu-rehearsal gpu-kit
.PHONY: bench-router bench-router-scale bench-join bench-transfer bench-last-hop
.PHONY: bench-preprocess bench-processes bench-fleet bench-tokens bench-serving bench-charts

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "%-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "make run takes MODEL, WORKERS, PORT, ENGINE_ARGS (any vLLM engine flags), FRONTEND_ARGS and ROUTER_MODE"
	@echo "(kv, round-robin); everything that"
	@echo "examples/launch/agg_multimodal_router.sh --help lists works as an environment variable."
	@echo "DEVICE=cpu or cuda chooses the build of vLLM (here: $(DEVICE)), VLLM=0.32 or 0.33 the version."

setup: $(ENVIRONMENT) ## prepare .venv, or .venv-vllm-0.33 with VLLM=0.33

$(VENV_PYTHON):
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$python" -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); exit 1; \
	    fi; \
	done; \
	echo "Python 3.11 or later is needed; name one with PYTHON=" >&2; exit 1

ifeq ($(DEVICE)$(OF_VLLM),cpu-0.33)
.PHONY: beside
beside:
	@$(MAKE) --no-print-directory setup VLLM=0.32 DEVICE=cpu

# Only what is another version than in .venv; the rest is taken from there.
$(ENVIRONMENT): $(LOCK) setup/vllm_vehicle.py | beside
	@rm -rf $(VENV)
	@.venv/bin/python -m venv --without-pip $(VENV)
	@.venv/bin/python -m pip --python $(VENV_PYTHON) install --disable-pip-version-check --no-deps \
	    --require-hashes --only-binary :all: --no-compile --quiet -r $(LOCK)
	@$(VENV_PYTHON) setup/vllm_vehicle.py .venv
	@touch $@
else
$(ENVIRONMENT): pyproject.toml $(LOCK) setup/cpu_torch.py setup/torchvision_hook.py | $(VENV_PYTHON)
	@echo "Installing for $(DEVICE): several gigabytes, so this takes minutes."
	@$(VENV_PYTHON) setup/pip_progress.py $(SETUP_LOG) $(LOCK) -- $(PIP_INSTALL_LOCK) $(LOCK) || { \
	    echo; \
	    echo "The installation failed; all that pip said is in $(SETUP_LOG). If it found no torch with"; \
	    echo "'+cpu' in its version, which PyPI does not have, name PyTorch's own page of it and repeat:"; \
	    echo; \
	    echo "    export PIP_FIND_LINKS=https://download.pytorch.org/whl/cpu/torch/"; \
	    exit 1; } >&2
	@$(PIP_INSTALL) --quiet --no-index --no-build-isolation -e .
	@$(VENV_PYTHON) setup/cpu_torch.py
	@touch $@
endif

demo-model: $(ENVIRONMENT) ## make the tiny random model that `make run` serves
	@$(VENV_PYTHON) examples/demo_model.py $(DEMO_MODEL)

# Those that are set; the script has the defaults, the demo's model among them.
$(foreach each,$(RUN_VARIABLES),$(if $($(each)),$(eval run: export $(each) := $$($(each)))))
run: $(ENVIRONMENT) ## start workers and the frontend, until Ctrl-C
	@MMROUTER_PYTHON="$(CURDIR)/$(VENV_PYTHON)" exec examples/launch/agg_multimodal_router.sh

test: $(ENVIRONMENT) $(CLIENTS_ENVIRONMENT) ## run the whole test suite
	@$(VENV_PYTHON) -m pytest $(PYTEST_PARALLEL) --durations=10 $(PYTEST_ARGS)

# The CUDA build on a machine without a GPU; GPULESS_PYTHON names an environment that really has it.
GPULESS := tests/e2e/test_gpuless.py

# Its surfaces without engines, then workers whose caches and media are another's in each version.
OF_A_VERSION := $(GPULESS) tests/e2e/test_last_hop.py tests/e2e/clients/test_sdks.py \
    tests/unit/test_vllm_*.py tests/unit/common/test_vllm_*.py tests/unit/common/test_shell_completion.py \
    tests/unit/common/test_engine_*.py tests/unit/backend_worker/test_engine_*.py \
    tests/unit/frontend/fetch/test_decode.py \
    tests/unit/frontend/http/test_*_streams.py tests/unit/frontend/http/test_stream_comments.py \
    tests/unit/backend_worker/test_encodings.py tests/unit/simgpu \
    tests/unit/frontend/router/test_block_hasher.py tests/unit/frontend/router/test_vllm_hits.py \
    tests/unit/backend_worker/test_render.py

test-version: $(ENVIRONMENT) ## run the tests that tell versions of vLLM apart; with VLLM=0.33
	@$(VENV_PYTHON) -m pytest $(PYTEST_PARALLEL) $(OF_A_VERSION) $(PYTEST_ARGS)

test-gpuless: $(ENVIRONMENT) ## run frontends of the CUDA build without a GPU; with VLLM=0.33 too
	@$(VENV_PYTHON) -m pytest $(PYTEST_PARALLEL) $(GPULESS) tests/unit/common/test_vllm_platform.py $(PYTEST_ARGS)

clients: $(ENVIRONMENT) ## install what people ask with, newest versions, and drive each; needs npm
	@$(VENV_PYTHON) -m tests.real_clients

fuzz: $(ENVIRONMENT) ## run the unit tests with inputs that nobody has tried yet
	@$(VENV_PYTHON) -m pytest $(PYTEST_PARALLEL) -m "not e2e" --hypothesis-profile=explore $(PYTEST_ARGS)

families: $(ENVIRONMENT) ## hold every model family against plain vLLM; goes on where it was stopped
	@$(VENV_PYTHON) -m tests.families --page docs/families.md $(FAMILIES_ARGS)

fuzz-engines: $(ENVIRONMENT) ## send requests that nobody would write to engines of tiny families
	@$(VENV_PYTHON) -m tests.families.fuzz $(FUZZ_ARGS)

fuzz-http: $(ENVIRONMENT) ## send hostile requests of all schemas to a frontend; FUZZ_ARGS="--seconds 60 --seed 1"
	@$(VENV_PYTHON) -m tests.fuzz_http $(FUZZ_ARGS)

test-gpu-rehearsal: $(ENVIRONMENT) ## rehearse a run on a GPU, without one: tests/gpu/README.md
	@PYTHONPATH="$(CURDIR)/tests/gpu/kit/stubs" $(VENV_PYTHON) -m tests.gpu --device cpu --seconds 900 $(GPU_ARGS)

gpu-kit: $(ENVIRONMENT) ## make an archive for a machine with a GPU and no network, in KIT
	@PYTHON=$(VENV_PYTHON) tests/gpu/kit/make_kit.sh $(KIT)

check: $(ENVIRONMENT) $(DOCS_ENVIRONMENT) ## locks, lint, format, imports between folders, types, duplicate code, links, site
	$(VENV_PYTHON) setup/locks.py
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	.venv/bin/lint-imports --no-logo --no-cache
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m pylint backend_worker common frontend setup
	$(VENV_PYTHON) setup/links.py
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build

fix: $(ENVIRONMENT) ## format, and mend what the linter can mend
	$(VENV_PYTHON) -m ruff check --fix
	$(VENV_PYTHON) -m ruff format

docs: $(ENVIRONMENT) ## remake the pages that are made from code
	$(VENV_PYTHON) -m setup.known_flags
	$(VENV_PYTHON) setup/lifecycle_page.py docs/lifecycle.md
	$(VENV_PYTHON) setup/diagrams.py docs/diagrams
	$(VENV_PYTHON) setup/settings_page.py docs/settings.md
	$(VENV_PYTHON) setup/metrics_page.py docs/metrics.md
	$(VENV_PYTHON) setup/limits_page.py docs/limits.md
	$(VENV_PYTHON) setup/vllm_map.py docs/architecture.md
	$(VENV_PYTHON) setup/tests_map.py docs/tests.md
	$(VENV_PYTHON) setup/house.py --write

$(DOCS_ENVIRONMENT): $(ENVIRONMENT) locks/docs.txt
	@$(PIP_INSTALL_LOCK) locks/docs.txt --quiet
	@touch $@

site: $(DOCS_ENVIRONMENT) ## make the pages a site in .site; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build

locks: $(ENVIRONMENT) ## make the lists of packages again, from pyproject.toml
	$(VENV_PYTHON) setup/locks.py --make

$(BENCH_ENVIRONMENT): $(ENVIRONMENT) locks/bench.txt
	@$(PIP_INSTALL_LOCK) locks/bench.txt --quiet
	@touch $@

# Quiet but for what is wrong: it is 90 small packages.
$(CLIENTS_ENVIRONMENT): locks/clients.txt | $(ENVIRONMENT)
	@echo "Installing the clients that the tests try."
	@rm -rf .venv-clients
	@$(VENV_PYTHON) -m venv --without-pip .venv-clients
	@$(VENV_PYTHON) -m pip --python .venv-clients/bin/python install --disable-pip-version-check \
	    --no-deps --require-hashes --only-binary :all: --quiet -r locks/clients.txt
	@touch $@

bench-router: $(BENCH_ENVIRONMENT) ## measure routing decisions against the peer's router
	@$(VENV_PYTHON) -m tests.benchmarks.bench_router $(BENCH_ARGS)

bench-router-scale: $(BENCH_ENVIRONMENT) ## measure routing with many workers and blocks
	@$(VENV_PYTHON) -m tests.benchmarks.bench_router_scale $(BENCH_ARGS)

bench-join: $(ENVIRONMENT) ## measure a frontend that joins a warm fleet
	@$(VENV_PYTHON) -m tests.benchmarks.bench_join $(BENCH_ARGS)

bench-transfer: $(BENCH_ENVIRONMENT) ## measure each way of moving tensors
	@$(VENV_PYTHON) -m tests.benchmarks.bench_transfer $(BENCH_ARGS)

bench-preprocess: $(BENCH_ENVIRONMENT) ## measure getting media ready, beside vLLM's renderer
	@$(VENV_PYTHON) -m tests.benchmarks.bench_preprocess $(BENCH_ARGS)

bench-last-hop: $(BENCH_ENVIRONMENT) ## measure each of vLLM's ways from a worker to its engine
	@$(VENV_PYTHON) -m tests.benchmarks.bench_last_hop $(BENCH_ARGS)

bench-processes: $(ENVIRONMENT) ## measure a frontend of two processes beside one of one
	@$(VENV_PYTHON) -m tests.benchmarks.bench_processes $(BENCH_ARGS)

bench-tokens: $(ENVIRONMENT) ## measure the CPU time of a streamed token, beside vLLM's own server
	@$(VENV_PYTHON) -m tests.benchmarks.bench_tokens $(BENCH_ARGS)

bench-fleet: $(ENVIRONMENT) ## measure 1, 2 and 4 frontends over the same workers, and kill one
	@$(VENV_PYTHON) -m tests.benchmarks.bench_fleet $(BENCH_ARGS)

bench-serving: $(ENVIRONMENT) ## race routers and servers over engines whose GPU is the clock
	@$(VENV_PYTHON) -m tests.benchmarks.serving $(BENCH_ARGS)

# The figures that docs/benchmarks.md shows; CHARTS_OF=FILE.csv draws those of another race.
CHARTS_OF :=
CHARTS := docs/benchmarks
CHART := $(VENV_PYTHON) -m tests.benchmarks.serving.charts

bench-charts: $(BENCH_ENVIRONMENT) ## draw what a race's CSV shows
ifeq ($(CHARTS_OF),)
	@$(CHART) docs/benchmarks/reuse.csv $(CHARTS) throughput
	@$(CHART) docs/benchmarks/peers.csv $(CHARTS) cpu-streams
	@$(CHART) docs/benchmarks/rates.csv $(CHARTS) first-token
else
	@$(CHART) $(CHARTS_OF) $(CHARTS)
endif

check-simgpu: $(ENVIRONMENT) ## check the engines whose GPU is the clock, with one of them
	@$(VENV_PYTHON) -m tests.simgpu.check

chaos: $(ENVIRONMENT) ## break everything at random under load, and count what users notice
	@$(VENV_PYTHON) -m tests.chaos $(CHAOS_ARGS)

clean: ## remove what running and testing left
	rm -rf .runs .site $(DEMO_MODEL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find backend_worker common examples frontend setup tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## and .venv, .venv-vllm-0.33, .venv-clients
	rm -rf .venv .venv-vllm-0.33 .venv-clients
