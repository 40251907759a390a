# make train: a virtual environment, then a race: the same GPT, 4 workers on a network of 100 Mbit/s, trained by DDP and by oktopk.
# make test: a virtual environment, then lint, types and tests.
# make torture: an hour of killed processes, cut links, full disks and odd inputs (docs/torture.md).
# make docs: a virtual environment, then the documentation site in site/.
# Nothing else is needed beforehand. ARGS="--network 50mbit --name slower" goes to oktopk compare.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

ARGS ?=

.PHONY: train test lint types pytest test-slow torture bench-selection docs clean

train: $(VENV)/.train
	$(BIN)/oktopk compare --config race --methods local_steps,oktopk,ddp_dense --name race $(ARGS)

test: lint types pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(VENV)/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# ARGS="--only kill --seed 42" repeats one trial
torture: $(VENV)/.installed
	$(BIN)/python -m torture $(ARGS)

bench-selection: $(VENV)/.installed
	$(BIN)/python benchmarks/selection.py

# Dead links and anchors are errors (mkdocs.yml), but with --quiet they would not be. The variable
# silences news about the theme.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html (its search needs a server: python3 -m http.server -d site)"

# what training needs; the rest comes with make test
$(VENV)/.train: pyproject.toml constraints.txt
	$(call install,train)
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt
	$(call install,docs)
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,all)
	touch $(VENV)/.train $(VENV)/.docs $@

define install
	$(PYTHON) -m venv $(VENV)
	@echo "installing oktopk[$(1)] into $(VENV): a minute or two"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
endef

clean:
	rm -rf $(VENV) build site .pytest_cache .ruff_cache .hypothesis
