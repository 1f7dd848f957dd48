# Everything runs in a virtual environment of its own, .venv; PYTHON chooses the interpreter that it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# constraints.txt pins torch, so pip takes that version or none.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
WORKERS := 2
# Threads that wait sleep instead of spinning: on a machine with other work, spinning makes torch many times slower.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test docs clean

help:  ## say what can be made (the default)
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*##/  make \1\t/'

demo: $(VENV)/.cli  ## train a small network, certify test images: under three minutes on two cores
	$(BIN)/locallip demo

docs: $(VENV)/.dev  ## build the documentation into site/, where a dead link is an error
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet --strict
	@echo 'site/index.html; for its search: $(BIN)/python -m http.server -d site'

test: $(VENV)/.dev  ## lint, types, import contracts and tests, which build the documentation too
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The package is installed in place, so the files below are all that calls for a new installation.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cli: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[cli]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.cli
