# Everything starts here. `make help` lists the targets.
#   PYTHON      interpreter that makes .venv (3.11 or newer)          PYTHON=python3.12
#   DEMO        0 leaves out the demo shop of `make up`               DEMO=0
#   UP_ARGS     further arguments of `stormline up`                   UP_ARGS="--nats nats://127.0.0.1:4222"
#   TEST_ARGS   further arguments of pytest                           TEST_ARGS="-x tests/unit"
#   TEST_JOBS   test files at once; most tests wait more than they work   TEST_JOBS=1
#   LAB_ARGS    further arguments of `make lab`                       LAB_ARGS="--duration 120 --seed 2"
#   SOAK_S      how long `make soak` runs, in seconds                 SOAK_S=600
#   LOCK_ARGS   further arguments of `make lock`                      LOCK_ARGS=--upgrade
# Package indexes are the machine's own settings (environment and pip/uv configuration); no file here names one.

PYTHON ?= python3
DEMO ?= 1
UP_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 3
LAB_ARGS ?=
SOAK_S ?= 600
LOCK_ARGS ?=

# Those whose subject is the client; the laboratory and the platform are Linux'.
PORTABLE_TESTS := tests/unit tests/property tests/loopback tests/sim tests/regressions

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
# What the installed state depends on; the folder is part of it because scripts in .venv hold absolute paths.
LOCKED := requirements/tools.txt requirements/dev.txt pyproject.toml
# command:package; tests that need one skip where it is missing.
SYSTEM_TOOLS := chromium:chromium nft:nftables ip:iproute2 \
	nginx:nginx-light caddy:caddy haproxy:haproxy nghttpd:nghttp2-server \
	tinyproxy:tinyproxy-bin mosquitto:mosquitto microsocks:microsocks kdig:knot-dnsutils
# Those whose package would also start it as a service of the machine, now and at each boot.
SERVICES := nginx caddy haproxy mosquitto
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-annotate --no-header $(LOCK_ARGS)

# $(call need_command,NAME): end with one honest line where this version of stormline has no such command.
need_command = if ! $(BIN)/stormline $(1) --help >/dev/null 2>&1; then \
	echo "make: 'stormline $(1)' is not in this version yet (docs/features.md says what works)" >&2; exit 2; fi

.PHONY: help setup peers system-tools up test test-portable check format docs bench lab soak lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv and install what the lock names (instant when nothing changed)
	@key="$$( { pwd; cat $(LOCKED); } | sha256sum | cut -d' ' -f1)"; \
	usable() { grep -qsF "$$PWD/.venv" .venv/bin/activate && $(BIN)/python -c '' 2>/dev/null; }; \
	if [ "$$(cat $(STAMP) 2>/dev/null || true)" = "$$key" ] && usable; then exit 0; fi; \
	rm -f $(STAMP); \
	if ! usable; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "make: $(PYTHON) is missing or older than Python 3.11; try: make PYTHON=python3.12 ..." >&2; exit 2; }; \
		echo "setup: making .venv with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear .venv || { \
			echo "make: cannot make .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }; \
	fi; \
	echo "setup: installing what requirements/ names"; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/tools.txt; \
	export VIRTUAL_ENV="$$PWD/.venv"; \
	$(BIN)/uv pip sync --quiet --require-hashes requirements/tools.txt requirements/dev.txt; \
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .; \
	echo "$$key" > $(STAMP)

peers: setup  ## make .venv-peers with the clients that the laboratory compares with (instant when nothing changed)
	@key="$$( { pwd; cat requirements/peers.txt; } | sha256sum | cut -d' ' -f1)"; \
	if [ "$$(cat $(PEERS_STAMP) 2>/dev/null || true)" = "$$key" ] && $(PEERS)/bin/python -c '' 2>/dev/null; then exit 0; fi; \
	echo "peers: installing what requirements/peers.txt names"; \
	rm -f $(PEERS_STAMP); \
	if $(BIN)/python -m venv --clear $(PEERS) && \
		$(BIN)/uv pip sync --quiet --python $(PEERS)/bin/python --require-hashes requirements/peers.txt; then \
		echo "$$key" > $(PEERS_STAMP); \
	else \
		rm -rf $(PEERS); \
		echo "peers: could not be installed; the laboratory leaves out those it does not find, their tests skip" >&2; \
	fi

system-tools:
	@missing=""; services=""; for pair in $(SYSTEM_TOOLS); do \
		PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null && continue; \
		missing+=" $${pair##*:}"; \
		[[ " $(SERVICES) " != *" $${pair%%:*} "* ]] || services+=" $${pair%%:*}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "system-tools: missing:$$missing (installed only as root with apt-get); going on without"; exit 0; fi; \
	echo "system-tools: installing$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	policy=/usr/sbin/policy-rc.d; \
	if [ -n "$$services" ] && [ ! -e "$$policy" ]; then \
		trap 'rm -f "$$policy"' EXIT; printf '#!/bin/sh\nexit 101\n' >"$$policy"; chmod 755 "$$policy"; fi; \
	install() { apt-get install -qq -y --no-install-recommends "$$@" >/dev/null; }; \
	install $$missing 2>/dev/null || { apt-get update -qq && install $$missing; } || for package in $$missing; do \
		install "$$package" || echo "system-tools: apt-get could not install $$package; going on without"; done; \
	for service in $$services; do systemctl disable "$$service" >/dev/null 2>&1 || true; done

up: setup  ## set up and run the whole platform with the demo shop (DEMO=0: without)
	@exec $(BIN)/stormline up $(if $(filter 0 no false,$(DEMO)),,--demo) $(UP_ARGS)

test: setup peers system-tools  ## set up and run all tests
	@exec $(BIN)/pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-portable: setup  ## the tests without what only Linux has: TCP_INFO, MPTCP, the routing socket, its files and clocks
	@STORMLINE_PORTABLE=1 exec $(BIN)/pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(or $(TEST_ARGS),$(PORTABLE_TESTS))

check: setup  ## format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## write the reference pages that are made from the code
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/make_protocol.py

bench: setup  ## measure this machine; results go to bench/results/
	@$(call need_command,bench)
	@exec $(BIN)/stormline bench

lab: setup peers system-tools  ## run the weak-network laboratory's standard set, as root, in ten minutes
	@exec $(BIN)/stormline lab $(LAB_ARGS)

soak: setup  ## property tests, simulated storms with new seeds, the engine on a cluster, for SOAK_S seconds
	@end=$$(( $$(date +%s) + $(SOAK_S) )); round=0; \
	while [ "$$(date +%s)" -lt "$$end" ]; do \
		round=$$(( round + 1 )); echo "soak: round $$round, $$(( end - $$(date +%s) )) s left"; \
		$(BIN)/pytest -q --timeout=1800 --hypothesis-profile=soak --hypothesis-seed="$$RANDOM$$RANDOM" tests/property; \
		$(BIN)/stormline sim all --seconds 60; \
		STORMLINE_CLUSTER=1 $(BIN)/pytest -q --timeout=1800 tests/loopback/engine -k cluster; \
	done

lock: setup  ## write requirements/*.txt anew from pyproject.toml (LOCK_ARGS=--upgrade for newer versions)
	$(COMPILE) requirements/tools.in -o requirements/tools.txt
	$(COMPILE) pyproject.toml --extra dev -o requirements/dev.txt
	$(COMPILE) requirements/peers.in -o requirements/peers.txt

clean:  ## remove .venv and all caches; the platform's state folder stays
	rm -rf .venv $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
