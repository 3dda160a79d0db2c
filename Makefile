# make serve | test | test-engines | check | test-page | fuzz | test-gpu | test-emulated | test-harness | test-clients | lint | bench | kernels | sanitize | hip-check | check-deploy | check-cluster
# JOBS=4 tests run in four processes, JOBS=0 in make's own. PYTHON=python3.12 picks the interpreter; REQUIREMENTS=requirements-base.txt leaves the torch alone that is in .venv.
PYTHON ?= python3
VENV   ?= .venv
REQUIREMENTS ?= requirements.txt
BIN    := $(VENV)/bin
ARGS   ?=
JOBS   ?= 2
# Tests start hundreds of processes. Where the environment forbids bytecode, each of them would compile the product.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-all test-others test-beside test-engines check with-tools browser test-page fuzz fuzz-minute test-gpu test-emulated emulated-gfx942 emulated-gfx1100 emulated-gfx1201 test-harness test-clients lint bench kernels sanitize hip-check check-deploy check-cluster clean

serve: $(VENV)/.installed
	$(BIN)/python app.py $(ARGS)

# One thread a process. Those of tests that ask for more wait asleep: at a spin they take cores from the others.
CALMLY := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PYTEST := $(CALMLY) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev  # what proves the server to its users; ARGS="test/unit": all tests that are named
	$(PYTEST) $(if $(ARGS),$(ARGS),--quick)

test-all: $(VENV)/.installed-dev  # all that run here
	$(PYTEST) $(ARGS)

# Tests of one engine, over two or three; make check runs those of CHEAP. ARGS="--engines 3 test/server"
CHEAP := test/server/test_pause.py test/test_openai_adapter.py
test-engines: $(VENV)/.installed-dev
	$(PYTEST) $(if $(ARGS),$(ARGS),--engines 2 $(CHEAP))

# Tests that wait for nothing: make check runs them in one process behind what else runs beside the others, so
# that both take about as long.
BESIDE := test/unit test/state test/engine/test_batch_invariant.py

check:  # everything, as CI runs it; about 19 minutes on two cores
	$(MAKE) --no-print-directory with-tools
	$(MAKE) --no-print-directory -j2 test-others lint hip-check $(EMULATED_GPUS) test-engines fuzz-minute test-beside
	$(MAKE) --no-print-directory check-cluster

test-others: $(VENV)/.installed-dev
	$(PYTEST) $(BESIDE:%=--ignore=%) $(ARGS)

test-beside: $(VENV)/.installed-dev
	$(PYTEST) -n 0 $(BESIDE) $(ARGS)

fuzz-minute:
	$(MAKE) --no-print-directory fuzz ARGS="--minutes 1"

with-tools: $(VENV)/.installed-dev  # one after the other, as each may install something
	$(BIN)/python deploy/check.py
	$(BIN)/python test/helpers/chromium.py
	$(BIN)/python test/helpers/postgres_server.py

browser: $(VENV)/.installed-dev  # Chromium for the tests of the page; installed where this is Debian and root's
	$(BIN)/python test/helpers/chromium.py

test-page: browser  # the page in a browser; make check runs these too. ARGS="-k picture --pictures"
	$(BIN)/python -m pytest test/page $(ARGS)

fuzz: $(VENV)/.installed-dev  # ten minutes of generated requests to every route; ARGS="--minutes 1"
	PYTHONPATH=.:test/helpers $(BIN)/python test/fuzz_openapi.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror cuda/*.cu cuda/*.cuh hip/*.cu hip/*.cuh hip/*.h rwkv_batch/ops/cpu/*.cpp rwkv_batch/ops/cpu/*.h rwkv_batch/text/*.cpp test/emulator/*
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.installed-dev
	$(BIN)/python bench/serve.py $(ARGS)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; name one with PYTHON=python3.12 make ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt requirements-base.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	touch $@

$(VENV)/.installed-dev: requirements.txt requirements-base.txt requirements-cluster.txt requirements-dev.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS) -r requirements-dev.txt
	touch $@ $(VENV)/.installed

kernels: $(VENV)/.installed  # for the GPUs here; ARGS="80 90a" for others
	$(BIN)/python -m rwkv_batch.ops.cuda.build $(ARGS)

test-gpu: $(VENV)/.installed-dev  # the tests that need a GPU; writes gpu-report.md
	$(BIN)/python test/gpu_report.py $(ARGS)

EMULATED_GPUS := emulated-gfx942 emulated-gfx1100 emulated-gfx1201
EMULATED := $(CALMLY) $(BIN)/python -m pytest -m "gpu and not many_launches" --most-cases
WKV := test/kernels/test_wkv_prefill.py test/kernels/test_wkv_decode.py test/kernels/test_wkv_sequence.py test/kernels/test_wkv_flush.py test/kernels/test_wkv6.py
MORE := test/kernels/test_gemm_codes.py test/kernels/test_decode_*.py test/kernels/test_block_gemms.py test/kernels/test_rwkv6_mix.py test/kernels/test_deep_embed.py test/kernels/test_sample_filter.py test/kernels/test_stages_cuda.py
# The kernels for AMD GPUs on a CPU; needs a C++ compiler. Two of the three at once.
test-emulated: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j2 $(EMULATED_GPUS)

emulated-gfx942: $(VENV)/.installed-dev
	$(EMULATED) 2 --emulated gfx942 $(WKV) test/kernels/test_gemm_[rs]*.py test/kernels/test_norm*.py test/kernels/test_adapter.py $(MORE) $(ARGS)

emulated-gfx1100 emulated-gfx1201: $(VENV)/.installed-dev
	$(EMULATED) 8 --emulated $(@:emulated-%=%) test/kernels/test_wkv_prefill.py $(ARGS)

HARNESS := $(VENV)-harness
$(HARNESS)/.installed: requirements-harness.txt
	$(PYTHON) -m venv $(HARNESS)
	$(HARNESS)/bin/pip install --quiet --disable-pip-version-check -r requirements-harness.txt
	touch $@

test-harness: $(VENV)/.installed-dev $(HARNESS)/.installed  # the lm-evaluation-harness against a server; every night
	$(BIN)/python test/harness_report.py $(HARNESS)/bin/lm_eval

# Their own environment, in a folder that stays when this one goes.
CLIENTS ?= $(HOME)/.cache/rwkv-batch/clients
$(CLIENTS)/.installed: test/clients/requirements.txt test/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install --quiet --disable-pip-version-check -r test/clients/requirements.txt
	cp test/clients/package.json $(CLIENTS)
	cd $(CLIENTS) && PATH=$(CLIENTS)/python/bin:$$PATH npm install --silent --no-audit --no-fund --no-package-lock
	touch $@

test-clients: $(VENV)/.installed $(CLIENTS)/.installed  # agents, SDKs and generated clients against a server; ARGS="-k ollama"
	cd test/clients && OMP_NUM_THREADS=1 $(CLIENTS)/python/bin/python -m pytest -c pytest.ini --confcutdir=. \
		--server-python=$(abspath $(BIN))/python --node-modules=$(CLIENTS)/node_modules $(ARGS)

sanitize: $(VENV)/.installed-dev  # needs a GPU and compute-sanitizer
	$(BIN)/python bench/sanitize.py $(ARGS)

hip-check: $(VENV)/.installed-dev  # compiles the kernels for AMD GPUs; ARGS=--table shows what each takes
	$(BIN)/python hip/check.py $(ARGS)

check-deploy: $(VENV)/.installed-dev  # the Dockerfile and deploy/ by nginx, promtool, systemd-analyze, hadolint and a schema
	$(BIN)/python deploy/check.py

# Ray has an environment of its own, in a folder that stays when this one goes.
CLUSTER ?= $(HOME)/.cache/rwkv-batch/cluster
$(CLUSTER)/.installed: deploy/cluster/requirements.txt
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/pip install --quiet --disable-pip-version-check -r deploy/cluster/requirements.txt
	touch $@

# Three servers under Ray behind HAProxy, of which some are killed. ARGS="--sessions 20"
check-cluster: $(VENV)/.installed-dev $(CLUSTER)/.installed
	$(BIN)/python -c "from deploy import check; check.install()"
	$(BIN)/python test/helpers/postgres_server.py
	$(CLUSTER)/bin/python test/cluster/check.py --server-python $(abspath $(BIN))/python $(ARGS)

clean:
	rm -rf $(VENV) $(HARNESS) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
