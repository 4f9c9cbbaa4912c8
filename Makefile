# Everything from a fresh machine: `make demo`, `make test`. Both set up the environment once and reuse it.
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --constraint constraints.txt
# Test processes and demo workers run side by side, one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

.PHONY: demo test test-torch check lint format browser docs wheel clean

demo: $(VENV)/demo
	$(BIN)/crossbn demo

test: lint browser
	$(PYTEST)

# The library's tests on another torch, in an environment of its own: `make test-torch VERSION=2.15.0`.
TORCH_VENV := .venv-torch-$(VERSION)
# constraints.txt names one torch and what belongs to it; only the tools of the tests are taken from it.
TORCH_TOOLS = $(shell grep -E '^(numpy|pytest|pytest-xdist)==' constraints.txt)
TORCH_TESTS := tests/functional tests/ops tests/nn tests/pairing tests/distributed tests/test_convert.py tests/test_folding.py \
	tests/test_recalibrate.py tests/test_swap.py tests/test_torch_internals.py
# These need torchvision or timm, which come with a torch of their own.
WITHOUT_TORCHVISION := --ignore tests/pairing/test_architectures.py \
	--deselect tests/nn/norms/test_frozen.py::test_as_torchvision \
	--deselect tests/test_folding.py::test_timm_activation_survives

# A copy of the sources is installed: building it in place would replace the library that the other environment loads.
test-torch:
	@test -n "$(VERSION)" || { echo "Say which torch: make test-torch VERSION=2.15.0" >&2; exit 1; }
	test -x $(TORCH_VENV)/bin/python || python3 -m venv $(TORCH_VENV)
	rm -rf $(TORCH_VENV)/source && mkdir $(TORCH_VENV)/source
	cp -r pyproject.toml setup.py README.md LICENSE src $(TORCH_VENV)/source
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==$(VERSION) $(TORCH_TOOLS) ./$(TORCH_VENV)/source
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest --numprocesses auto $(WITHOUT_TORCHVISION) $(TORCH_TESTS)

check: lint
	$(PYTEST) -m "not slow"

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The documentation site, into build/site.
docs: $(VENV)/docs
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site
	@echo "Open build/site/index.html"

# The sources, a wheel with compiled code for this platform and a pure one for all others, in dist/. Each wheel is
# installed into a bare environment, with torch alone, and tried there.
WHEEL_VENV := .venv-wheel
wheel:
	rm -rf dist build $(WHEEL_VENV) && python3 -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	$(WHEEL_VENV)/bin/python -m build
	CROSSBN_NATIVE=0 $(WHEEL_VENV)/bin/python -m build --wheel
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		dist/*-$$(uname -s | tr A-Z a-z)_*.whl
	$(WHEEL_VENV)/bin/python tools/smoke.py --compiled
	$(WHEEL_VENV)/bin/crossbn --version
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*-any.whl
	$(WHEEL_VENV)/bin/python tools/smoke.py
	$(WHEEL_VENV)/bin/crossbn --version

# Tests look at the pages in a browser. Where none is found and one may, Debian's is installed.
browser:
	@for name in $(BROWSERS); do if command -v $$name >/dev/null; then exit 0; fi; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium; \
	else \
		echo "The tests open pages in a browser: install one of $(BROWSERS)." >&2; exit 1; \
	fi

$(VENV)/demo: pyproject.toml setup.py constraints.txt $(wildcard src/crossbn/ops/csrc/*)
	@echo "Installing torch and what the demo needs into $(VENV): some minutes, mostly the download of torch."
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/demo
	@echo "Installing what the tests need as well (torchvision, Lightning and others): some minutes."
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/demo
	$(INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(WHEEL_VENV) build dist .mypy_cache .pytest_cache .ruff_cache
