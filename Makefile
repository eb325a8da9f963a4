# `make demo` and `make test` work in an empty clone: they check the machine, make .venv, install into it and run.
# Overridable: PYTHON (an interpreter), CXX (a C++ compiler), VENV (where the environment lies),
# DEMO_ARGS (options of the GPT-2 case study), COMPARE_ARGS (of the comparison), PYTEST_ARGS, and PYTEST_WORKERS, the
# processes that share the tests (0: this one alone).

VENV ?= .venv
DEMO_ARGS ?=
COMPARE_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

# Inductor takes $CXX, else g++. Where only clang++ is there, say so to it.
ifeq ($(origin CXX),default)
  ifeq ($(shell command -v g++ 2>/dev/null),)
    ifneq ($(shell command -v clang++ 2>/dev/null),)
      CXX := clang++
      export CXX
    endif
  endif
else
  export CXX
endif
export PYTHON

BIN := $(VENV)/bin
DEMO_EXTRAS := case-studies
TEST_EXTRAS := case-studies,test,browser,dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo compare test test-all lint bench venv clean

help: ## this list
	@echo "usage: make TARGET [PYTHON=python3.12] [CXX=clang++]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/  \1	\2/p' Makefile | expand -t 14

demo: ## makes .venv and runs the GPT-2 case study: where the time goes, what was changed, and the comparison
	@sh tools/make_venv.sh $(VENV) $(DEMO_EXTRAS)
	@echo "Running the GPT-2 case study"
	@KINETO_LOG_LEVEL=$${KINETO_LOG_LEVEL:-99} $(BIN)/python -m case_studies.gpt2 $(DEMO_ARGS)

compare: ## makes .venv and runs every workload in every column (COMPARE_ARGS="mlp --small" is a quick look)
	@sh tools/make_venv.sh $(VENV) $(DEMO_EXTRAS)
	@KINETO_LOG_LEVEL=$${KINETO_LOG_LEVEL:-99} $(BIN)/python -m case_studies.compare $(COMPARE_ARGS)

test: venv lint ## makes .venv and runs the linters and the tests that need neither a GPU nor minutes
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all: venv lint ## the long tier: every test; those for a GPU are skipped where there is none
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: venv ## ruff and mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

bench: venv ## the benchmarks alone (pytest-benchmark)
	$(BIN)/python -m pytest tests/benchmarks --benchmark-only --benchmark-disable-gc $(PYTEST_ARGS)

venv: ## the environment that tests and linters use
	@sh tools/make_venv.sh $(VENV) $(TEST_EXTRAS)

clean: ## removes what make made: the environment, caches and build outputs
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
