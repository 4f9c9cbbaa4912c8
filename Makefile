# Everything from a fresh machine: `make demo`, `make test`. Both set up the environment once and reuse it.
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Test processes and demo workers run side by side, one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

.PHONY: demo test check lint format clean

demo: $(VENV)/demo
	$(BIN)/crossbn demo

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow"

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

$(VENV)/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/demo
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
