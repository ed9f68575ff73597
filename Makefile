# Needs python3 (3.10 to 3.13), g++ and make. `make PYTHON=python3.12 ...` takes another Python.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --no-warn-script-location --no-input --constraint constraints.txt
# STORM="--kill engine gateway": more options of benchmarks.storm
DISTURBED = --mp-num 2 --kill engine rank fork grammar stub tritonserver gateway health supervisor \
  --stop engine fork grammar stub tritonserver gateway
STORM_SECONDS ?= 300
SOAK_SECONDS ?= 14400
TRITONSERVER = nvidia-pytriton==0.7.0
NIXL = nixl-cu13==1.5.1

# A stamp says that a step is done; it is older than what the step depends on when it has to be done again.
MADE = $(VENV)/.made
RUNTIME = $(VENV)/.runtime
TESTS = $(VENV)/.tests
KERNELS = $(VENV)/.kernels
OPS = $(VENV)/.ops
# For this machine; empty, as in images: for every machine.
ISAS ?= --supported
OP_SOURCES = $(wildcard engine/ops/*.py engine/ops/cpu/*)

# Before gigabytes are installed for one.
define check_gpu
@command -v nvidia-smi >/dev/null || { echo "error: no nvidia-smi on the PATH: this machine has no NVIDIA GPU" >&2; exit 1; }
endef

# Only a virtual environment is ever deleted.
define check_venv
@[ ! -e $(VENV) ] || [ -e $(VENV)/pyvenv.cfg ] || [ -d $(VENV) -a -z "$$(ls -A $(VENV))" ] || \
  { echo "error: $(VENV) exists and is no virtual environment; name another folder: make VENV=..." >&2; exit 1; }
endef

.PHONY: demo demo-images demo-gpu install install-cuda test test-all quick coverage test-clients test-gpu image-steps sanitize lint docs wheel bench bench-gpu bench-peers storm soak clean

# pip has one core busy for half a minute, the compiler another. The rest of the ops is compiled by the start.
demo:  ## starts the server with the bundled model and asks it three questions
	@$(MAKE) --no-print-directory --jobs 2 $(RUNTIME) $(KERNELS)
	@$(BIN)/python -m server_scripts.demo

demo-images:  ## the same with the bundled model that reads images, about three pictures
	@$(MAKE) --no-print-directory --jobs 2 $(RUNTIME) $(KERNELS)
	@$(BIN)/python -m server_scripts.demo --images

demo-gpu:  ## the same on an NVIDIA GPU
	$(check_gpu)
	@$(MAKE) install install-cuda
	@DEVICE=gpu $(BIN)/python -m server_scripts.demo

install: $(RUNTIME) $(OPS)  ## .venv with start_server, stop_server and run_batch

test: SELECTED = -m "not thorough"
test: test-all  ## the tests that do not need a GPU, quick ones first, without those that are marked thorough

# Collecting the tests takes each worker 20 s, so that the quick ones are not a run of their own. `load` hands tests out
# in their order (tests/conftest.py).
test-all: install $(TESTS)  ## the same with the thorough tests
	$(BIN)/python -m pytest tests/pure tests/engines $(SELECTED) $(WORKERS) --dist load
	$(BIN)/python -m pytest tests --ignore tests/pure --ignore tests/engines $(SELECTED) --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Some wait for processes, so that half as many again as there are cores are busy. Python keeps what it has compiled:
# each of them, and each process that they start, would do it again.
test test-all coverage quick: export PYTHONDONTWRITEBYTECODE =
# The matrices of the tests are small, and the cores are taken by other workers, so that more threads only wait for them.
test test-all coverage quick: export OPENBLAS_NUM_THREADS = 1
WORKERS = --numprocesses $$(($$(nproc) * 3 / 2)) --maxprocesses 8
QUICK = -m "not slow and not thorough"
quick: install $(TESTS)  ## the tests that need no server and take no more than two minutes, on all cores
	$(BIN)/python -m pytest tests/pure $(QUICK) $(COVERAGE) $(WORKERS) --dist worksteal

coverage: QUICK =
coverage: COVERAGE = --cov --cov-report term
coverage: quick  ## which lines and branches tests/pure reaches; takes twice as long
	@rm -f .coverage.*  # Processes that are killed leave damaged files of measurements behind.
	@for package in engine gateway server_scripts; do \
	  echo "lines and branches of $$package: $$($(BIN)/coverage report --include "$$package/*" --format total)%"; done

CLIENTS = build/clients
CLIENTS_WANTED = tests/triton/requirements-clients.txt
test-clients: install $(TESTS)  ## the whole server with LangChain, litellm, instructor and lm-eval, 1.3 GB of an environment
	[ $(CLIENTS)/.made -nt $(CLIENTS_WANTED) ] || { $(BIN)/python -m venv --clear $(CLIENTS) && \
	  $(CLIENTS)/bin/python -m pip install -q -r $(CLIENTS_WANTED) && touch $(CLIENTS)/.made; }
	$(BIN)/python -m pytest tests/triton/test_clients.py

install-cuda: $(RUNTIME)  ## torch, for DEVICE=gpu; also where an image is built for machines with one
	$(PIP) --no-build-isolation --editable .[cuda]

test-gpu:  ## the tests that need an NVIDIA GPU, then those of the whole server, there
	$(check_gpu)
	@$(MAKE) install install-cuda $(TESTS)
	$(BIN)/python -m pytest tests/cuda
	DEVICE=gpu $(BIN)/python -m pytest tests/triton --deselect tests/triton/test_machines.py

# IMAGE_BINDS="/etc/pip.conf ...": more files of this machine that the steps see, for packages. 2 GB in build/image.
DOCKERFILE = dockerfiles/Dockerfile.cpu
image-steps: install $(TESTS)  ## executes the steps of a Dockerfile without Docker, and tests what they have made
	@[ "$$(id -u)" = 0 ] && command -v mmdebstrap >/dev/null || \
	  { echo "error: needs root and mmdebstrap: apt-get install mmdebstrap" >&2; exit 1; }
	$(BIN)/python -m tests.image.steps $(DOCKERFILE) build/image
	IMAGE=build/image $(BIN)/python -m pytest tests/image

# After the flags of engine/ops/build.py, so that these win. Checks as calls, as otherwise compiling takes ten times as
# long. Without what Paddle itself does: casts of types that another library has as well, new[] with delete. Tile
# registers of plain code, whose every byte is checked.
SANITIZERS = -O1 -g1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined \
  --param asan-instrumentation-with-call-threshold=0 -DLLM_SOFT_TILES
SANITIZED = ENGINE_BUILD_DIR=build/sanitized CXX="sh -c 'exec g++ \"\$$@\" $(SANITIZERS)' g++"
RUNTIMES = $(foreach name,libasan.so libubsan.so,$(shell g++ -print-file-name=$(name)))
sanitize: install $(TESTS)  ## the CPU ops against numpy, compiled with AddressSanitizer and UBSan: g++ alone has it all
	$(SANITIZED) $(BIN)/python -m engine.ops.build
	$(SANITIZED) LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 \
	  $(BIN)/python -m pytest --capture no -k "not exported_and_served" \
	  $(addprefix tests/pure/ops/test_,cpu.py attention.py sampling.py invariance.py threads.py errors.py group.py paddle.py) \
	  $(addprefix tests/pure/executors/test_,cpu_program.py batch_invariance.py)

lint: $(TESTS)  ## style, types, which part may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint dockerfiles/Dockerfile*
	$(BIN)/shellcheck .ci/run server_scripts/start_server server_scripts/stop_server server_scripts/*.sh

SITE = build/site-env
docs:  ## the documentation as a searchable site in build/site
	@$(PYTHON) server_scripts/interpreter.py
	[ $(SITE)/.made -nt requirements-docs.txt -a $(SITE)/.made -nt constraints.txt ] || { $(PYTHON) -m venv --clear $(SITE) && \
	  $(SITE)/bin/python -m pip install -q --constraint constraints.txt -r requirements-docs.txt && touch $(SITE)/.made; }
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --site-dir build/site
	@echo "== build/site/index.html"

# Without what earlier versions have left in build/lib, which would become a part of it.
wheel: $(RUNTIME)  ## build/wheel: a wheel of the server with the C++ sources, the page and the demo models
	rm -rf build/lib build/bdist.* build/wheel
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation --wheel-dir build/wheel .
	@ls build/wheel/*.whl

bench: install
	$(BIN)/python -m benchmarks.bench

PEERS = llama openvino vllm
ROUNDS = 5
bench-peers: install  ## this engine and others on the same weights in turn; make bench-peers PEERS=llama ROUNDS=2
	$(BIN)/python -m benchmarks.peers --peers $(PEERS) --rounds $(ROUNDS)

storm: install  ## kills and stops processes of every kind under load for STORM_SECONDS, and compares every answer
	$(BIN)/python -m benchmarks.storm --seconds $(STORM_SECONDS) --every 5 $(DISTURBED) $(STORM)

soak: install  ## the same for hours, in which no process may grow
	$(BIN)/python -m benchmarks.storm --seconds $(SOAK_SECONDS) --every 60 $(DISTURBED) --max-growth 0.02 $(STORM)

SHAPE = llama-3-8b
bench-gpu: test-gpu  ## the engine on one GPU, random weights; make bench-gpu SHAPE=qwen2.5-0.5b
	$(BIN)/python -m benchmarks.gpu $(SHAPE) --sampled

clean:
	$(check_venv)
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) on the PATH" >&2; exit 1; }
	@$(PYTHON) server_scripts/interpreter.py
	$(check_venv)
	@echo "== making $(VENV)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): requirements.txt constraints.txt pyproject.toml | $(MADE)
	@echo "== installing what the server needs, 1 GB on disk"
	$(PIP) --requirement requirements.txt
	$(PIP) --no-deps $(TRITONSERVER)
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(TESTS): requirements-test.txt constraints.txt | $(RUNTIME)
	@echo "== installing what the tests need"
	$(PIP) --requirement requirements-test.txt
	$(PIP) --no-deps $(NIXL)
	@touch $@

$(KERNELS): $(OP_SOURCES) | $(MADE)
	@echo "== compiling the kernels of the CPU ops for this machine"
	@$(BIN)/python -m engine.ops.build --kernels
	@touch $@

$(OPS): $(OP_SOURCES) $(RUNTIME)
	@echo "== compiling the CPU ops"
	$(BIN)/python -m engine.ops.build $(ISAS)
	@touch $@
