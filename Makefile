# make tune      tunes the block of ARGS (default: --dim 64 --heads 4) and writes its module under generated/
# make test      passes the tests;  make lint  runs ruff and mypy;  make doctor  says what this machine can do
# ARGS goes to the program that runs:  make tune ARGS="--dim 128 --heads 8 --budget 60",  make test ARGS="-k layout"
# On two cores or more, make test ARGS="-n auto" is quicker; not beside GPU tests, which would measure each other.
# PYTHON is the interpreter the environment is made with, VENV where it lies.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SPEC ?= --dim 64 --heads 4
RUN := $(VENV)/bin/python

.PHONY: tune test lint doctor install install-test clean

tune: install
	@$(RUN) cli.py tune $(SPEC) $(ARGS)

test: install-test
	@$(RUN) -m pytest $(ARGS)

lint: install-test
	@status=0; $(RUN) -m ruff check . || status=1; $(RUN) -m mypy || status=1; exit $$status

doctor: install
	@$(RUN) cli.py doctor

install:
	@$(PYTHON) tools/install.py --venv "$(VENV)"

install-test:
	@$(PYTHON) tools/install.py --venv "$(VENV)" --extra test

clean:
	rm -rf "$(VENV)" build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
