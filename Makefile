.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

VENV := $(CURDIR)/.venv
HOME_DIR ?= .roostream
ARGS ?=
EXPORT := --quiet --frozen --no-emit-project --no-annotate --no-header

# The environment comes first on PATH everywhere: Flink's thread mode starts whatever `python3` PATH names.
export PATH := $(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(VENV)
# Without byte code every process compiles torch and the project anew: seconds of CPU each.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-dev demo test check coverage e2e chaos soak fuzz gpu bench k8s containers docs reset format lock promtool

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup:  ## what the demo needs, from a bare CPython 3.11 or 3.12
	@PYTHON="$(PYTHON)" infra/setup.sh

setup-dev:  ## the same, and what tests, checks and benchmarks need
	@PYTHON="$(PYTHON)" infra/setup.sh dev

demo: setup  ## the whole loop with simulated users, until Ctrl-C (DEMO_SECONDS=120: ends by itself)
	@roostream demo --home $(HOME_DIR) $(ARGS)

test: setup-dev  ## all tests but the long ones; what CI runs
	@pytest -q -n auto --maxprocesses 3 --dist loadscope --no-loadscope-reorder -m "not chaos and not slow and not containers" $(ARGS)

check: setup-dev  ## format, lint, types, import rules, style of prose, links of the documentation
	@ruff format --check .
	@ruff check .
	@mypy
	@pytest -q -m "not e2e" tests/contract
	@NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict

coverage: setup-dev  ## line coverage of all tests but e2e, chaos, slow and containers; fails below 90 %
	@rm -rf build/coverage && mkdir -p build/coverage
	@coverage run -m pytest -q -m "not e2e and not chaos and not slow and not containers" $(ARGS)
	@coverage combine -q
	@coverage report --fail-under=90 --skip-covered --sort=cover

e2e: setup-dev  ## the long runs: a full week, two stacks side by side, history, Prometheus over a stack, a savepoint
	@pytest -q -m slow tests $(ARGS)

chaos: setup-dev  ## kill -9 of every process of a running stack; thousands of schedules of the simulator
	@pytest -q -m chaos tests/chaos tests/trainer $(ARGS)

soak: setup-dev  ## half an hour at 40 requests/s under random kills, a full disk and garbage (SOAK_SEED=2, SOAK_SERVING=2, SOAK_REPORT=soak.json)
	@SOAK_SECONDS=$${SOAK_SECONDS:-1800} pytest -q -m chaos tests/chaos/test_soak.py $(ARGS)

fuzz: setup-dev  ## a million nearly right inputs for each decoder (ARGS="--only rank --executions 10000")
	@python -m tests.fuzz.fuzzing $(ARGS)

gpu: setup-dev  ## tests and benchmarks that need a CUDA device; build/gpu/report.md (ARGS="--report docs/benchmarks/gpu.md")
	@python -m benchmarks.gpu_report $(ARGS)

k8s: setup-dev  ## the manifests: schemas, policies, arrows, a real API server and controllers (built once, minutes), every pod's program started here
	@BUILD_KUBERNETES=1 pytest -q tests/k8s $(ARGS)

containers: setup-dev  ## the images built by Docker, infra/compose.yaml, the units under systemd, both overlays on Kubernetes nodes (needs Docker with Compose and Buildx)
	@pytest -q -m containers tests/containers $(ARGS)

bench: setup-dev  ## every benchmark; its rows as a table
	@roostream bench all $(ARGS)

promtool:  ## get promtool into .tools/bin and test the alert rules
	@infra/promtool.sh
	@.tools/bin/promtool test rules infra/alerts/roostream.test.yml

docs: setup-dev  ## the documentation as a site in build/site, with reference pages from the code; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict

reset: setup  ## delete the demo's home: data, checkpoints, logs
	@roostream reset --home $(HOME_DIR) --yes

format: setup-dev  ## format and sort imports
	@ruff format .
	@ruff check --fix .

lock: setup-dev  ## resolve pyproject.toml anew; read the diff of the two lock files, which come from one resolution
	@.tools/bin/uv lock
	@.tools/bin/uv export $(EXPORT) --all-extras -o requirements-dev.lock
	@.tools/bin/uv export $(EXPORT) --no-dev --extra demo --no-emit-package triton -o requirements.lock
