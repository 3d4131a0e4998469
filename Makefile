# make alone shows the targets. Everything runs in .venv, which "make setup" creates.
.DEFAULT_GOAL := help
.PHONY: help setup engine demo test lint bench doctor constraints clean distclean

BIN := .venv/bin
BENCH ?= --contexts 4k,32k --model local/a --model local/a-mla --repeats 5 --output-tokens 128
PYTEST ?=

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: ## create .venv and install k3eval (nothing to do when nothing changed)
	@scripts/setup.sh

engine: setup ## make sure that a Docker engine answers and the base image is there
	@scripts/ensure-docker.sh
	@$(BIN)/python -m k3eval_harness.sandbox.base_image

demo: engine ## run real coding tasks end to end: oracle, nop, and the k3 agent on the local backend
	@scripts/ensure-compiler.sh --if-possible
	@scripts/demo.sh

test: lint engine ## check style, types and imports, then run every test
	@scripts/ensure-compiler.sh
	$(BIN)/python -m pytest $(PYTEST)

lint: setup ## ruff, mypy --strict, import-linter, rendered task files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/repo_fix_tasks.py --check

bench: setup ## every benchmark, tables to results/ (about three quarters of an hour; each script runs alone too)
	$(BIN)/python benchmarks/sdk_stream.py --out results
	$(BIN)/python benchmarks/engine.py --out results
	$(BIN)/python benchmarks/server.py --out results
	$(BIN)/python benchmarks/native_cpu.py --out results
	$(BIN)/python benchmarks/model_checks.py --out results
	$(BIN)/python -m k3eval_local.kernels.compile --out results/kernels-aot
	$(BIN)/k3eval bench decode $(BENCH) --out results/decode.json

doctor: setup ## what this machine has: engine, base image, disk, keys, torch, GPU
	$(BIN)/k3eval doctor

constraints: setup ## pin what .venv has now in constraints.txt
	scripts/pin.sh

clean: ## remove caches and build outputs
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
