# make demo and make test need nothing but Python (and this file): they create .venv and install into it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-portable lint types docs package bench showcase clean

help:
	@echo "make demo      set up, repair a deep network, rebuild a trained one from random weights"
	@echo "make test      set up and run every test (slow ones and the browser test included)"
	@echo "make test-fast  the quick tests of the library, without evidence and commands"
	@echo "make test-portable  the numerical tests, rounded as an older processor does it (7 minutes)"
	@echo "make lint      ruff, format check"
	@echo "make types     mypy"
	@echo "make docs      build the documentation into site/"
	@echo "make package   build wheel and sdist; run the demo from the wheel in an empty environment"
	@echo "make bench     the solver beside LU, Cholesky, QR and LSMR (about 25 minutes; QUICK=1 for 4)"
	@echo "make showcase  a trained ResNet-20 from eight kinds of frozen features (long; QUICK=1 for a minute)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[evidence]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev,docs]"
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	$(BIN)/onlynorm demo

# A process for every core, one thread each. Some tests start Python many times, which is faster with compiled files.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV)/.dev
	$(PYTEST)

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow" \
	  --ignore=tests/cli --ignore=tests/docs --ignore=tests/evidence --ignore=tests/test_bad_calls.py --ignore=tests/test_fuzz.py

# Without AVX, fused multiplications and threads, sums are rounded in another order: no threshold may depend on it.
test-portable: $(VENV)/.dev
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	  xargs $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" < tests/numerical.txt

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# With the types of the oldest and the newest Python; tests run on the one that is installed.
types: $(VENV)/.dev
	$(BIN)/mypy --python-version 3.10
	$(BIN)/mypy --python-version 3.13

docs: $(VENV)/.dev
	$(BIN)/python -m tools.docs

# Wheel and source distribution, and the demo from the wheel in an environment of its own.
package: $(VENV)/.dev
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/wheel && bin/onlynorm demo

bench: $(VENV)/.run
	$(BIN)/onlynorm bench solve $(if $(QUICK),--quick)

showcase: $(VENV)/.run
	$(BIN)/onlynorm bench reconstruct $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) build site onlynorm-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
