# Every target sets up its own virtual environment first, once: only Python 3.11 or newer is needed.
#
#   make demo         train a model with one parameter server and two trainers
#   make test         lint and the tests, side by side
#   make test-more    the examples, models and benchmarks, devices, simulated groups, random programs and fuzzing, and
#                     PyTorch/XLA's names, of which `make test` has some
#   make test-fast    the tests that need no processes of their own
#   make test-nightly what is slow and rarely finds anything: more examples of each kind, 3,000 random programs
#   make lint         ruff and mypy
#   make test-newest  unit tests, group tests and the guide on the newest Python and PyTorch that the index has,
#                     in an environment of its own, .venv-newest; downloads them
#   make test-grpc    the tests of groups of workers, over the backend GRPC
#   make test-devices the group tests of calls, references, autograd, optimizers, collectives and tensor parallelism,
#                     with their tensors on the simulated accelerator, in each of its modes
#   make test-engines on real Slurm, MPI, torchx, Ray and sshd, which it installs; as root, under 10 minutes
#   make conformance  PyTorch's own test suites of RPC and of process groups, against farcall;
#                     BACKEND=grpc: over the backend GRPC
#   make test-gpu     on a machine with a CUDA device: the tests of devices, PyTorch's tests of RPC with GPUs, and
#                     figures beside TensorPipe; GPU_PYTHON=... names an interpreter that has PyTorch with CUDA
#   make proto        the code of the schemas in proto/
#   make docs         the documentation as a site, in build/site; installs mkdocs. `make pictures` makes its pictures
#   make bench        farcall beside torch.distributed.rpc
#   make clean        remove caches and builds; `make distclean` removes the environment too
#
# Another interpreter:        make test PYTHON=/path/to/python3.12
# Arguments for pytest:       make test PYTEST_ARGS="-k shutdown -x" (which then runs once, not in parts)
# A CPU build of PyTorch where PyPI's would bring CUDA along:
#                             PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
CONSTRAINTS := requirements/constraints.txt
# Downloads show their progress on a terminal; what pip says otherwise is left out.
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(MAKE_TERMOUT),,--quiet --quiet)
PYTEST_ARGS ?=
BACKEND ?=
GPU_PYTHON ?= python3

# The first interpreter that is new enough and can make a virtual environment: that of an active one, if any.
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(if $(VIRTUAL_ENV),python3) python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && { echo $$python; break; }; done)

.PHONY: demo test test-more test-fast test-nightly test-newest test-newest-smoke test-devices test-engines test-grpc test-gpu lint conformance proto docs pictures bench clean distclean setup

demo: $(RUNS)
	@$(BIN)/python examples/parameter_server.py

# Parts of the tests run side by side, as groups of processes often wait; each is printed when it has ended.
MORE := tests/fuzz tests/simulation tests/group/devices tests/unit/benchmarks \
	tests/group/farcall/xla tests/group/farcall/test_xla_names.py \
	$(addprefix tests/group/spmd/,collectives/test_faults_in_each_collective.py engine/test_spmd_memory.py) \
	tests/group/spmd/engine/test_six_models.py tests/group/spmd/tensor_parallel/test_tensor_parallel_llama.py \
	$(filter-out %/test_guide.py,$(wildcard tests/group/examples/test_*.py))
PARTS := farcall others spmd
FOLDERS_unit := tests/unit tests/group/rref tests/group/dist_autograd tests/group/dist_optim
FOLDERS_farcall := tests/group/farcall
FOLDERS_spmd := tests/group/spmd
FOLDERS_others := tests $(addprefix --ignore ,$(FOLDERS_unit) $(FOLDERS_farcall) $(FOLDERS_spmd))
PARTS_OF_MORE := more-simulated more-examples more-others
FOLDERS_more-simulated := tests/simulation tests/group/devices
FOLDERS_more-examples := $(filter tests/group/examples/%,$(MORE))
FOLDERS_more-others := $(filter-out $(FOLDERS_more-simulated) tests/group/examples/%,$(MORE))
SIDE_BY_SIDE = @$(MAKE) --no-print-directory --jobs 4 --keep-going --output-sync=target

test: $(READY)
ifdef PYTEST_ARGS
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -m "not nightly" $(PYTEST_ARGS)
else
	$(SIDE_BY_SIDE) test-part-unit lint $(addprefix test-part-,$(PARTS))
endif

test-more: $(READY)
	$(SIDE_BY_SIDE) $(addprefix test-part-,$(PARTS_OF_MORE))

test-part-more-%: $(READY)
	$(BIN)/python -m pytest -m "not nightly" $(FOLDERS_more-$*)

test-part-%: $(READY)
	$(BIN)/python -m pytest -m "not nightly" $(FOLDERS_$*) $(addprefix --ignore ,$(MORE))

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not processes and not nightly" $(PYTEST_ARGS)

test-nightly: $(READY)
	FARCALL_TEST_EFFORT=20 $(BIN)/python -m pytest --timeout 900 $(PYTEST_ARGS)
	$(MAKE) test-grpc
	$(MAKE) test-devices
	$(BIN)/python -m tests.fuzz.autograd.programs --count 3000
	$(BIN)/python -m tests.fuzz.autograd.programs --count 300 --errors

# Real Slurm, MPI, torchx and Ray; installs packages, as root. Not a part of `make test`.
test-engines: $(READY)
	$(BIN)/python -m tests.engines $(PYTEST_ARGS)

test-grpc: $(READY)
	FARCALL_TEST_BACKEND=grpc $(BIN)/python -m pytest tests/group --timeout 180 \
		--ignore tests/group/farcall --ignore tests/group/spmd $(PYTEST_ARGS)

test-devices: $(READY)
	for mode in lazy random eager; do \
		FARCALL_TEST_ON_DEVICES=$$mode $(BIN)/python -m pytest -m "not nightly" --timeout 180 \
			$(addprefix tests/group/,rpc/agent rref dist_autograd dist_optim spmd/collectives spmd/tensor_parallel) \
			$(PYTEST_ARGS) || exit; \
	done

test-newest: $(READY)
	$(BIN)/python -m tests.newest

# What CI runs of it: downloads nothing, and is skipped where there is no newer PyTorch on this machine.
test-newest-smoke: $(READY)
	@$(BIN)/python -m tests.newest --smoke

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

conformance: $(READY)
	FARCALL_TEST_BACKEND=$(BACKEND) $(BIN)/python -m pytest tests/conformance/suites.py $(PYTEST_ARGS)
	FARCALL_TEST_BACKEND=$(BACKEND) $(BIN)/python -m pytest tests/conformance/gpu.py $(PYTEST_ARGS)

# On a machine with a CUDA device, whose interpreter has a PyTorch with CUDA: nothing is installed for this but
# farcall itself. Each part ends by itself, and the next one begins whatever came of it.
test-gpu:
	@GPU_PYTHON='$(GPU_PYTHON)' tests/accelerator/gpu.sh

proto: $(READY)
	$(BIN)/python proto/generate.py

docs: $(READY)
	@$(PIP) install --no-build-isolation --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# From real runs; needs Chromium and Playwright.
pictures: $(READY)
	$(BIN)/python docs/site/pictures.py

bench: $(READY)
	$(BIN)/python -m benchmarks --chart benchmarks/results/latest.svg

setup: $(READY)

# What the demo needs. PyTorch goes first, alone and pinned: anything that asks for "torch" later finds it there. The
# stamp is written last, so that an installation that failed or was interrupted is done again.
$(RUNS): pyproject.toml $(CONSTRAINTS)
	@rm -f $(RUNS) $(READY)
	@python='$(PYTHON)'; \
	if [ -z "$$python" ] || ! "$$python" -c '$(SUITABLE)'; then \
		echo "farcall needs Python 3.11 or newer, with the module venv; $${python:-none} will not do." >&2; \
		echo "Name another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$python" --version) (once; a few minutes at most)"; \
	"$$python" -m venv --clear $(VENV)
	@echo "  1. PyTorch"
	@$(PIP) install --constraint $(CONSTRAINTS) setuptools torch
	@echo "  2. farcall, and scikit-learn for the examples' data"
	@$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable . scikit-learn
	@touch $(RUNS)

# The rest of what development needs.
$(READY): $(RUNS)
	@echo "  3. the tools for tests"
	@$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -m pip --disable-pip-version-check check
	@touch $(READY)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-newest .venv-engines
