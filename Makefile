# Every target works on a fresh clone: it first makes .venv if that is missing or out of date.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# How many processes run the tests; 0 for one that a debugger can stop in.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench campaign slow lock docs sync clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(STAMP) ## create .venv with everything pinned; does nothing the second time

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) tools/preflight.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: $(STAMP) ## an order shop in nine processes, two of which are killed; no order is lost, and Spark counts them
	@$(BIN)/python tools/preflight.py java
	@$(BIN)/python -m examples.demo

# Tests start Python a thousand times, which would compile Penstock anew each time if it kept nothing of it.
test slow: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## run the tests (PYTEST="-k name" to choose, --slow for the long ones); those of Spark need Java 17
	@$(BIN)/python tools/preflight.py java
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST)

check: $(STAMP) ## format, lint, types, import contracts, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory docs

bench: $(STAMP) ## measure every area; results go to bench/results/
	$(BIN)/penstock bench all --keep bench/results

campaign: $(STAMP) ## try to break the log, in full (CAMPAIGN="c2 c5", ROUNDS=1000, SEED=7 to choose)
	$(BIN)/python -m penstock.testing.campaigns $(CAMPAIGN) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(SEED),--seed $(SEED)) --json build/campaigns.json \
	  --record bench/results/campaigns.json --page docs/guide/how-tested.md

slow: $(STAMP) ## the long tests: more examples, every test marked slow
	HYPOTHESIS_PROFILE=campaign $(BIN)/python -m pytest --slow --timeout 3600 $(PYTEST)

docs: $(STAMP) ## build the documentation, warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

sync: $(STAMP) ## write the synchronous bus anew, from the asynchronous one
	$(BIN)/python tools/sync_facade.py

lock: $(STAMP) ## pin the newest versions anew: names, versions and hashes only
	$(BIN)/uv pip compile -q pyproject.toml --group dev --extra cli --extra spark --extra metrics --extra otel --universal --python-version 3.11 \
	  --generate-hashes --no-header --upgrade -o requirements.lock

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
