# One word per task. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
UV ?= $(BIN)/uv
STACK := $(VENV)/.stack
SPARK := $(VENV)/.spark
STAMP := $(VENV)/.complete
SERVICES := ingest router broker janitor console scaler
SOURCES := $(wildcard slatemq libs services tests examples benchmarks)

# Tests start hundreds of processes: what one has compiled the others load.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup spark demo up test test-slow proofs lint types protos lock faults fuzz mutants nightly simulate bench bench-page compose-test clean

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with every pinned dependency (quick when it is there already)

# The stamps come last, so that an interrupted set-up starts over. No build isolation: the build
# backend is pinned and hash-checked like everything else. What users run needs $(STACK) alone.
$(STACK): requirements/stack.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"SlateMQ needs Python 3.11 to 3.13, not {v.major}.{v.minor}: make PYTHON=…" if not (3, 11) <= v < (3, 14) else 0)'
	@echo 'Setting up $(VENV), once: the services and the command, 200 MB'
	@$(PYTHON) -m venv $(VENV)
	@requirements/install $(BIN)/python requirements/stack.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMP): requirements/dev.txt pyproject.toml | $(STACK)
	@echo 'Adding to $(VENV), once: Spark, and all that builds and tests, 1.4 GB'
	@requirements/install $(BIN)/python requirements/dev.txt
	@touch $@

spark: $(SPARK) ## Add what the janitor's jobs need to .venv: Spark, and a Java

$(SPARK): requirements/janitor.txt | $(STACK)
	@echo 'Adding to $(VENV), once: Spark, Java and Arrow, 800 MB'
	@requirements/install $(BIN)/python requirements/janitor.txt
	@touch $@

demo: $(STACK) ## Show it all: publish, route, consume, kill a broker, lose nothing (ARGS=--events: through Redis)
	$(BIN)/python -m examples.demo $(ARGS)

up: $(STACK) ## Run the whole stack on this machine, data in ./data
	$(BIN)/python -m services --data data --ports 7420 $(ARGS)

# Six files at a time, also on two cores: most tests wait for processes and disks. Of proofs four,
# since some compare how long something takes. In the order of their folders, since the longest come
# first then, and what is short comes last; before all, and in one process, what has Spark
# (tests/side_by_side.py).
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest -m 'not compose and not proof' -n 6 $(BY_FILE)

# What takes as long as all else together: whole stacks, commands, the console in a browser, queue
# files between processes, what is observed of a stack, the janitor with its Spark, and gigabytes
# that are sent to a process for the sake of its memory.
SLOW := tests/acceptance $(addprefix tests/integration/,stack cli console observability janitor \
  textqueue broker/delivery/test_memory.py ingest/test_memory.py \
  serving/test_large_requests_at_once.py)

test: setup ## Run all tests but the slow ones, proofs in their short form; one after the other with ARGS='-n 0'
	$(PYTEST) tests $(addprefix --ignore=,$(SLOW)) $(ARGS)

test-slow: setup ## Run the slow tests: whole stacks and their metrics, commands, the console, queue files, Spark
	$(PYTEST) $(SLOW) $(ARGS)

# All that these two leave out, and what tries a number of examples once more with all of them.
# Hypothesis marks its own tests; a worker's name and what is done stand before each. The longest
# take minutes on an idle machine. Some of it alone (ARGS) plants no bugs.
proofs: setup ## Run what the other tests are the short forms of: every kill, long histories, many examples, planted bugs
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest tests -m '(proof or repeated or hypothesis) and not compose' \
	  -n 4 $(BY_FILE) --timeout 1800 -o faulthandler_timeout=1900 -v $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.planted)

lint: setup ## Check style, import contracts and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --cache-dir $(VENV)/import-linter
	if [ -d protos ]; then $(BIN)/buf lint; fi

types: setup ## Check types, strictly
	$(BIN)/mypy $(SOURCES)

# The Python path of a stub is the path of its .proto below -I: protos/slatemq/v1/x.proto gives
# slatemq/v1/x_pb2.py, with nothing to rewrite. Those of KEDA's proto are in the one service that
# serves it.
protos: setup ## Generate the Python stubs from protos/
	find slatemq/v1 services/scaler/stubs -name '*_pb2*.py*' -delete
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. \
	  $$(cd protos && find slatemq -name '*.proto' | LC_ALL=C sort)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I services/scaler/stubs=protos/keda \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. \
	  services/scaler/stubs/externalscaler.proto

# dev.txt holds everything in one resolution; each service's file is a part of it, so that tests run
# what images run. What is already pinned stays: `make lock ARGS=--upgrade` moves on.
lock: ## Pin all dependencies with hashes into requirements/
	$(UV) pip compile pyproject.toml --all-extras --group dev -o requirements/dev.txt $(LOCK_FLAGS) $(ARGS)
	$(UV) pip compile pyproject.toml --extra cli --group stack -o requirements/stack.txt \
	  --constraints requirements/dev.txt $(LOCK_FLAGS) $(ARGS)
	$(UV) pip compile pyproject.toml --group s3 -o deploy/compose/s3/requirements.txt \
	  --constraints requirements/dev.txt $(LOCK_FLAGS) $(ARGS)
	for service in $(SERVICES) bench activemq fuzz mutants; do \
	  $(UV) pip compile pyproject.toml --group $$service -o requirements/$$service.txt \
	    --constraints requirements/dev.txt $(LOCK_FLAGS) $(ARGS); \
	done

LOCK_FLAGS := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
  --no-emit-index-url --no-emit-find-links --quiet

simulate: setup ## Run worlds with all services in one process, each from a seed (SEEDS=20)
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),20) $(ARGS)

# Each with as much of its fault as takes minutes.
FAULTS := 'kills --command' ingest-down chains histories janitor 'zombies --changes 10000' \
  'frozen --seconds 440 --rounds 1' 'failover --kills 100' 'disk --rounds 20' 'network --seconds 120' \
  'restarts --rounds 10' 'overload --seconds 60' 'soak --hours 0.2' upgrade 'store --seconds 60' \
  'reads --messages 6000' \
  'events --publishes 20000 --down-seconds 60' hostile 'hostile --secured' 'rot --rounds 150'

faults: setup ## Long runs under faults: kills, frozen and fenced owners, full disks, stores that fail, damaged files, hostile clients
	@failed=(); for form in $(FAULTS); do \
	  $(BIN)/python -m tests.faults $$form $(ARGS) || { [ $$? != 130 ] || exit 130; failed+=("$$form"); }; \
	done; \
	if [ $${#failed[@]} != 0 ]; then printf 'failed: %s\n' "$${failed[@]}"; exit 1; fi

fuzz: setup ## Fuzz what reads bytes of others, guided by coverage (SECONDS=60 for each target)
	@$(PIP_INSTALL) --require-hashes -r requirements/fuzz.txt
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

# Worlds that were not run before: their numbers begin at that of the day.
nightly: setup ## Run for some hours what finds more with time: new worlds (SEEDS=250), fuzzing (SECONDS=120 each)
	@mkdir -p build; failed=(); \
	$(MAKE) --silent simulate SEEDS=$(or $(SEEDS),250) \
	  ARGS="--first $$(($$(date +%s) / 86400 * 1000)) --tally build/worlds.jsonl $(ARGS)" || failed+=(simulate); \
	$(MAKE) --silent fuzz SECONDS=$(or $(SECONDS),120) ARGS= || failed+=(fuzz); \
	if [ $${#failed[@]} != 0 ]; then printf 'failed: %s\n' "$${failed[@]}"; exit 1; fi

mutants: setup ## Change the code that decides, one place at a time: a test must fail (ARGS='--sample 100')
	@$(PIP_INSTALL) --require-hashes -r requirements/mutants.txt
	$(BIN)/python -m tests.mutants $(ARGS)

bench: setup ## Compare with Redis, PostgreSQL, NATS and RabbitMQ, as far as they are installed
	@$(PIP_INSTALL) --require-hashes -r requirements/bench.txt
	$(BIN)/python -m benchmarks.suite $(ARGS)

bench-page: ## The same, and write its table and picture into docs/performance.md
	@$(MAKE) --silent bench ARGS='--write docs/performance $(ARGS)'

compose-test: setup ## Build the images, run a workload through the containers, kill one, check
	$(BIN)/python -m pytest -m compose -o faulthandler_timeout=1900 tests $(ARGS)

clean: ## Remove everything that can be made again
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find slatemq libs services tests -name __pycache__ -type d -prune -exec rm -rf {} +
