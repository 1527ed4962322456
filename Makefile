PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow install clean

demo: install  ## Train and compare four methods on scikit-learn's digits
	$(BIN)/tailor compare local fedavg fedavg-ft fedper data=digits clients=20 evaluate_every=2 --out runs/demo --force

test: install  ## Lint, type-check and test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto

slow: install  ## The tests that take longer
	$(BIN)/pytest -n auto -m slow

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
