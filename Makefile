# make train: a virtual environment, a spoken corpus, 4 workers with Ok-Topk on a small model.
# make test: a virtual environment, then lint, types and tests.
# Nothing else is needed beforehand. ARGS="--epochs 3" goes to oktopk train.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

ARGS ?=

.PHONY: train test lint types pytest test-slow bench-selection clean

train: $(VENV)/.train
	$(BIN)/oktopk train $(ARGS)

test: lint types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

bench-selection: $(VENV)/.installed
	$(BIN)/python benchmarks/selection.py

# what training needs; the rest comes with make test
$(VENV)/.train: pyproject.toml constraints.txt
	$(call install,train)
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,all)
	touch $(VENV)/.train $@

define install
	$(PYTHON) -m venv $(VENV)
	@echo "installing oktopk[$(1)] into $(VENV): a minute or two"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
endef

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
