# make test: a virtual environment, then lint, types and tests. Nothing else is needed beforehand.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: test lint types pytest bench-selection clean

test: lint types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest

bench-selection: $(VENV)/.installed
	$(BIN)/python benchmarks/selection.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
