# plait: `make demo` trains a model and shows that it got better; `make test` runs the tests.
VENV    := .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STEPS   ?=
# Two OpenMP threads on a busy machine are hundreds of times slower than one: tests use one per process. What these
# processes import is compiled once, also where the environment says that Python is to write no such files.
ONE     := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
WORKERS ?= 2

# Plain Python, numbers and files: no process is started (a test that does fails) and no real model read.
QUICK   := $(addprefix tests/,algorithms cost data dataflow layout observe policy recipes schedule simulator \
	test_errors.py test_output.py test_shape.py cli/test_report.py cli/test_staleness_report.py \
	docs/test_algorithms.py docs/test_layouts.py models/test_working_weights.py \
	generation/test_settings.py generation/test_stopping.py planner/test_plan_search.py planner/test_stage_layers.py \
	speculation/test_choice.py speculation/test_pool.py speculation/test_speculation.py \
	$(addprefix launch/test_,keys.py wire.py) $(addprefix launch/nodes/test_,place.py room.py) \
	$(addprefix rewards/test_,group.py statistics.py) \
	$(addprefix training/test_,loss_batch.py loss_split.py micro_batches.py) \
	$(addprefix workers/test_,announcer.py lockstep_engine.py messages.py remote_engine.py remote_moves.py staged_move.py \
		transport.py))
NOT_QUICK := $(addprefix --ignore=tests/,algorithms/test_toys.py algorithms/test_trl_given.py data/test_examples.py data/test_sources.py)

.PHONY: help demo quick test test-all lint setup setup-test clean

help:
	@echo "make demo [STEPS=2]   train SmolLM2-135M-Instruct with GRPO; before/after table (about 8 minutes)"
	@echo "make quick            the tests that need neither processes nor a real model (about a minute)"
	@echo "make test             lint, types, floors and the default tests (about 6 minutes on 2 cores)"
	@echo "make test-all         the slow suites as well"

setup: $(VENV)/.ready
setup-test: $(VENV)/.ready-test

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	bash scripts/setup.sh $(VENV) $(PYTHON) rewards
	@touch $@

$(VENV)/.ready-test: pyproject.toml scripts/setup.sh
	bash scripts/setup.sh $(VENV) $(PYTHON) test
	@touch $@ $(VENV)/.ready

demo: setup
	$(BIN)/plait train recipes/demo.yaml --run_dir runs/demo --overwrite true $(if $(STEPS),--steps $(STEPS) --evaluation.items $(if $(filter 2,$(STEPS)),16,200))

lint: setup-test
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright
	$(BIN)/lint-imports

quick: setup-test
	$(ONE) QUICK=1 $(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not process" $(QUICK) $(NOT_QUICK)

test: setup-test lint
	$(ONE) $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-all: setup-test lint
	$(ONE) COLD=1 HYPOTHESIS_PROFILE=random $(BIN)/pytest -n $(WORKERS) --dist loadfile

clean:
	rm -rf $(VENV) build dist
