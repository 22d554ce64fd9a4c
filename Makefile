# One command each: `make train` trains the default job on two ranks, `make test` tests everything.
# Both set themselves up: a virtual environment in .venv, and bigtrain in it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-full check gpu setup system clean help

help:
	@echo "make train   train a small language model on two ranks (four to five minutes on two cores)"
	@echo "make test    run the tests"
	@echo "make test-full  run those, too, that prove the same at greater length (EVERY=--every: all cases)"
	@echo "make check   style and types only"
	@echo "make gpu     what bigtrain promises, run on this machine: a table and one JSON file"

setup: $(READY)

$(READY): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed, $(PYTHON) is older. Run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv module is missing. Run: sudo apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

train: $(READY)
	$(BIN)/deepspeed --num_accelerators 2 bigtrain/train.py --strategy zero2

# The launcher tests run the real programs, so these come from the system.
system:
	@missing=""; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	command -v ninja >/dev/null || test -x $(BIN)/ninja || missing="$$missing ninja-build"; \
	command -v mpiexec.openmpi >/dev/null || missing="$$missing openmpi-bin"; \
	command -v mpiexec.hydra >/dev/null || missing="$$missing mpich"; \
	command -v slurmctld >/dev/null || missing="$$missing slurm-wlm"; \
	command -v munged >/dev/null || missing="$$missing munge"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	ldconfig -p | grep -q libtcmalloc_minimal || missing="$$missing libtcmalloc-minimal4"; \
	if [ -n "$$missing" ]; then \
		echo "Not on this machine:$$missing. The tests that need them are skipped here (never in CI)."; \
		echo "Run: sudo apt-get install$$missing"; \
	fi

# Tests that measure time, memory or signals run last and alone; only their files are collected.
# FULL=--full takes in the longer proofs; of the heaviest, some cases are drawn by the commit.
test: $(READY) system check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not alone" $(FULL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone $(FULL) $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

test-full: FULL := --full $(EVERY)
test-full: test

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell --skip benchmarks/results bigtrain strategies configs benchmarks examples docs *.md *.py Makefile
	$(BIN)/mypy -n 2
	MYPYPATH=benchmarks $(BIN)/mypy -n 2 benchmarks

gpu: $(READY)
	$(BIN)/bigtrain doctor --check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
