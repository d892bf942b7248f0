# Two commands: `make demo` and `make test`. Each sets up .venv first, which takes minutes once and a second afterwards.
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs
SEED ?= 0
DEMO ?= configs/demo.toml
TORCH := 2.13.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu
READY := $(VENV)/ready

.PHONY: demo test lint format setup clean

demo: $(READY)
	$(BIN)/echo2 train $(DEMO) run.seed=$(SEED) run.directory=$(RUNS) run.name=demo-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S)

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml
	@echo "== setting up $(VENV) for the learner's side (about 2 GB; minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi > /dev/null; then \
	  echo "== a GPU was found: torch with CUDA"; $(BIN)/pip install --quiet "torch>=$(TORCH)"; \
	else \
	  echo "== no GPU was found: the CPU build of torch $(TORCH)"; \
	  $(BIN)/python -c 'import torch' 2> /dev/null \
	    || $(BIN)/pip install --quiet --retries 1 --extra-index-url $(CPU_WHEELS) "torch==$(TORCH)+cpu"; \
	fi
	@echo "== ECHO-2 with its learner, flows and test extras"
	@$(BIN)/pip install --quiet --editable '.[learner,lora,flows,test]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
