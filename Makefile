# `make demo` and `make test` each work as the first command on a machine with Python 3.11 and pip.
PYTHON ?= python3
VENV ?= .venv
READY := $(VENV)/.ready

.PHONY: demo test lint format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## the main job on the bundled reference model, offline
	$(VENV)/bin/i2cl demo

test: $(READY)  ## every test, offline
	$(VENV)/bin/pytest -n 2

lint: $(READY)  ## ruff and mypy --strict
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## rewrite in the house format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
