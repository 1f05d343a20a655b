# make run | install | test | bench. Everything lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# pytest arguments for `make test`, such as TESTS=tests/unit
TESTS  ?= tests

.PHONY: run install install-test test lint bench clean

run: install
	$(BIN)/streamlit run app.py $(ARGS)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

# PyTorch first and by its pin: anything that needs torch is then content with it.
$(VENV)/.installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(TESTS)

bench: install-test
	$(BIN)/python -m benchmarks.recorder
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.reader
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.interference
	$(BIN)/python -m benchmarks.live_page

clean:
	rm -rf $(VENV) benchmarks/.venv-peers .pytest_cache .mypy_cache .ruff_cache
