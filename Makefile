# plait: `make demo` trains a model and shows that it got better; `make test` runs the tests.
VENV    := .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STEPS   ?=
# Two OpenMP threads on a busy machine are hundreds of times slower than one: tests use one per process. What these
# processes import is compiled once, also where the environment says that Python is to write no such files.
ONE     := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
WORKERS ?= 2
# In the order of tests/conftest.py, not by how many tests a file has: few may take long.
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help demo quick test test-all lint types style setup setup-test clean

help:
	@echo "make demo [STEPS=2]   train SmolLM2-135M-Instruct with GRPO; before/after table (8 minutes with AMX, 20 to 25 with AVX2)"
	@echo "make quick            the tests that need neither processes nor a real model (about a minute)"
	@echo "make test             lint, types, floors and the default tests (about 10 minutes on 2 cores with AVX-512)"
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
	@$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) types style

types: setup-test
	$(BIN)/pyright

style: setup-test
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/lint-imports

quick: setup-test
	$(ONE) $(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not process" @tests/quick.txt

# Types are checked beside the tests, on one core, for as long as a tenth of the tests; what is wrong is said at the end.
test: setup-test style
	@types=$$(mktemp); $(BIN)/pyright >$$types 2>&1 & checker=$$!; \
	$(ONE) $(BIN)/pytest -n $(WORKERS) $(BY_FILE) -m "not slow"; tests=$$?; \
	wait $$checker; checked=$$?; cat $$types; rm $$types; [ $$tests$$checked = 00 ]

test-all: setup-test lint
	$(ONE) COLD=1 HYPOTHESIS_PROFILE=random $(BIN)/pytest -n $(WORKERS) $(BY_FILE)

clean:
	rm -rf $(VENV) build dist
