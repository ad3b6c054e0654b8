# Each target sets up what it needs: a virtual environment with the locked packages, and from the
# system what `scripts/system-packages` lists for it.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= python3
ARGS ?=
# What Python has compiled is kept, or each server that a test starts would take a second longer.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-changed test-all test-docker test-kubernetes chaos fuzz check bench bench-records bench-backends bench-streams bench-files bench-pool bench-lifecycle bench-embedded bench-docker bench-kubernetes bench-peers bench-profile bench-scaling bench-page manifests lock clean

run: $(STAMP)
	@scripts/system-packages run
	@exec $(BIN)/atoll serve $(ARGS)

# How many processes share the tests; they wait more than they compute.
export WORKERS ?= 4

# What needs nothing but bubblewrap, and a smoke test of each server that is installed.
test: $(STAMP)
	@scripts/system-packages run
	@exec $(BIN)/python -m tests.run --quick $(ARGS)

# What of it the changes since the main branch can break; since another commit with SINCE=….
export SINCE ?=
test-changed: $(STAMP)
	@scripts/system-packages run
	@exec $(BIN)/python -m tests.run --changed $(ARGS)

# Everything, with every server.
test-all: $(STAMP)
	@scripts/system-packages test-all
	@exec $(BIN)/python -m tests.run $(ARGS)

# All that goes through the API, with a Docker engine in place of the local driver.
test-docker: $(STAMP)
	@scripts/system-packages test-all
	@TEST_DRIVER=docker exec $(BIN)/python -m tests.run tests/e2e $(ARGS)

# What needs a Kubernetes cluster, which is built once: that takes some minutes.
test-kubernetes: $(STAMP)
	@scripts/system-packages test-all
	@exec $(BIN)/python -m tests.run tests/kubernetes $(ARGS)

# How long in seconds, and the first seed; a random one when it is not given.
FOR ?= 300
SEED ?=

chaos: $(STAMP)
	@scripts/system-packages test-all
	@TEST_DRIVER=$(or $(TEST_DRIVER),local) exec $(BIN)/python -m tests.e2e.chaos --seconds $(FOR) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Plays executor against the link and against a server, with what Hypothesis makes up.
fuzz: $(STAMP)
	@scripts/system-packages $(if $(filter docker,$(TEST_DRIVER)),test-all,run)
	@TEST_DRIVER=$(or $(TEST_DRIVER),local) exec $(BIN)/python -m tests.fuzz --seconds $(FOR) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	@scripts/system-packages run
	@exec $(BIN)/python -m bench $(ARGS)

bench-embedded: $(STAMP)
	@scripts/system-packages run
	@exec $(BIN)/python -m bench.embedded $(ARGS)

bench-records bench-backends bench-streams bench-files bench-pool bench-lifecycle bench-docker bench-kubernetes bench-peers bench-profile bench-scaling: $(STAMP)
	@scripts/system-packages test-all
	@exec $(BIN)/python -m bench.$(@:bench-%=%) $(ARGS)

# Makes the page on performance of the results of the benchmarks that have run.
bench-page: $(STAMP)
	@exec $(BIN)/python -m bench.page $(or $(ARGS),$(wildcard bench/results/*.json))

# Makes the manifests for clusters without Helm of the chart. HELM=… is a program; if not set, Helm is
# built from source once.
HELM ?= $(abspath $(BIN))/python -m tests.servers.kubernetes.helm
manifests: $(STAMP)
	@HELM="env PYTHONPATH=$(CURDIR) $(HELM)" deploy/kubernetes/render > deploy/kubernetes/atoll.yaml.part
	@mv deploy/kubernetes/atoll.yaml.part deploy/kubernetes/atoll.yaml

lock: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --generate-hashes \
	    --no-emit-index-url --no-header --upgrade --output-file requirements.lock

$(STAMP): pyproject.toml requirements.lock scripts/setup
	@PYTHON=$(PYTHON) scripts/setup $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) dist
