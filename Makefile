# Everything from a fresh machine: `make demo`, `make test`. Both set up the environment once and reuse it.
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Test processes and demo workers run side by side, one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

.PHONY: demo test check lint format browser clean

demo: $(VENV)/demo
	$(BIN)/crossbn demo

test: lint browser
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

# Tests look at the pages in a browser. Where none is found and one may, Debian's is installed.
browser:
	@for name in $(BROWSERS); do if command -v $$name >/dev/null; then exit 0; fi; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium; \
	else \
		echo "The tests open pages in a browser: install one of $(BROWSERS)." >&2; exit 1; \
	fi

$(VENV)/demo: pyproject.toml constraints.txt $(wildcard src/crossbn/functional/compiled/*)
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/demo
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
