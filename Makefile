# make run | install | test | bench. Everything lives in .venv.
# make run-simulated: the page with simulated GPUs; make test-cuda: the CUDA tests on them. They live in
# .venv-cudasim.
PYTHON ?= python3
VENV   := .venv
CUDASIM := .venv-cudasim
BIN    := $(VENV)/bin
INSTALL := python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=
# Which tests `make test` takes, such as TESTS=tests/unit
TESTS  ?= tests/unit tests/app tests/integration
# Test processes at a time: auto is one a core, 0 runs all tests in the process of pytest.
JOBS   ?= auto
XDIST  := -n $(JOBS) --maxprocesses 8 --dist loadgroup
# What more to give pytest, such as PYTEST_ARGS=--durations=25
PYTEST_ARGS ?=
PYTEST := -m pytest $(XDIST) $(PYTEST_ARGS)
# Tests that are neither slow nor CUDA tests; QUICK= takes all, as on a real GPU.
QUICK  := -m "not slow and not cuda"
# Node of the environment, where the machine has none.
WITH_NODE := PATH=$(CURDIR)/$(BIN):$$PATH
# The families of tests/families.py that `test-landing` runs whole.
FAMILIES ?=

# Hundreds of test processes import our modules: with their bytecode, none has to compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run run-simulated install install-test test test-browser test-slow test-landing test-all test-random \
	coverage explore test-cuda test-cuda-core test-python test-torch lint format bench wheel gpu-report \
	examples screenshots mutate clean

run: install
	$(BIN)/streamlit run app.py $(ARGS)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

# PyTorch first and by its pin: anything that needs torch is then content with it.
$(VENV)/.installed: requirements.txt constraints.txt pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) "$$(grep '^torch==' requirements.txt)"
	$(BIN)/$(INSTALL) -r requirements.txt -e .
	touch $@

# Dependency groups need pip 25.1; Python 3.11 to 3.13 bring an older one.
$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/$(INSTALL) "pip>=25.1"
	$(BIN)/$(INSTALL) --group dev
	touch $@

node_modules/.installed: package.json $(VENV)/.installed-test
	$(WITH_NODE) npm install --silent --no-package-lock --no-audit --no-fund
	touch $@

lint: install-test node_modules/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(WITH_NODE) npm run --silent prettier -- --check

format: install-test node_modules/.installed
	$(BIN)/ruff format .
	$(WITH_NODE) npm run --silent prettier -- --write

# Unit, app and fast integration tests; lint beside them, its output at the end. One process more than cores, as many
# of these tests wait for other processes.
test: JOBS = $(shell expr $$(nproc) + 1)
test: install-test
	@make --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; failed=0; \
	$(BIN)/python $(PYTEST) $(QUICK) $(TESTS) || failed=1; \
	wait $$lint || failed=1; cat $(VENV)/lint.log; exit $$failed

# The fast browser tests; they need chromium.
test-browser: install-test
	$(BIN)/python $(PYTEST) $(QUICK) tests/browser

# All slow tests: real jobs, sweeps, frameworks, lessons, all pages at once.
test-slow: install-test
	$(BIN)/python $(PYTEST) -m "slow and not cuda" tests

# The core of each slow family, and all of those in FAMILIES.
test-landing: install-test
	$(BIN)/python $(PYTEST) $$($(PYTHON) -m tests.families tests slow $(FAMILIES))

# Everything, as .ci/run does with all families.
test-all:
	.ci/run all

# `make test` and `make test-browser` without lint, in a random order; PYTEST_ARGS=--randomly-seed=N repeats one.
test-random: install-test
	$(BIN)/python $(PYTEST) -p randomly $(QUICK) $(TESTS) tests/browser

# `make test` with the share of lines that it runs, in child processes as well.
coverage: install-test
	$(BIN)/python $(PYTEST) $(QUICK) --cov --cov-report=term:skip-covered $(TESTS)

# Properties on new examples each time; `make test` replays the same ones.
explore: install-test
	$(BIN)/python $(PYTEST) -m hypothesis --hypothesis-profile=explore tests/unit \
		tests/integration/test_hostile_folders.py

# The CUDA build of torch on simulated NVIDIA libraries (simulator/README.md); needs gcc and g++.
$(CUDASIM)/.installed: requirements.txt constraints.txt pyproject.toml \
		simulator/setup.sh $(wildcard simulator/src/* simulator/python/*)
	PYTHON=$(PYTHON) simulator/setup.sh $(CUDASIM) "$$(sed -n 's/^torch==//p' requirements.txt)"
	$(CUDASIM)/bin/$(INSTALL) -r requirements.txt -e .
	touch $@

$(CUDASIM)/.installed-test: $(CUDASIM)/.installed
	$(CUDASIM)/bin/$(INSTALL) "pip>=25.1"
	$(CUDASIM)/bin/$(INSTALL) --group dev
	touch $@

# The page for those who have no GPU, such as make run-simulated GPUS=4 MEMORY=1G; up to 8, in host memory.
GPUS   ?= 2
MEMORY ?= 2G
run-simulated: $(CUDASIM)/.installed
	CUDASIM_DEVICES=$(GPUS) CUDASIM_MEMORY=$(MEMORY) $(CUDASIM)/bin/streamlit run app.py $(ARGS)

test-cuda: $(CUDASIM)/.installed-test
	$(CUDASIM)/bin/python $(PYTEST) --require-gpu $(or $(TESTS_CUDA),tests/simulator tests/gpu $(wildcard tests/browser/test_cuda_*.py))

# The core of it, in some minutes, and all of the CUDA families in FAMILIES.
test-cuda-core:
	$(MAKE) test-cuda TESTS_CUDA="$$($(PYTHON) -m tests.families tests cuda $(FAMILIES))"

# The unit tests under another Python, with the simulator's build of torch: make test-python PYTHON=python3.13
test-python:
	CUDASIM_BUILD=$(CURDIR)/$(CUDASIM)-newer/cudasim $(MAKE) test-cuda CUDASIM=$(CUDASIM)-newer TESTS_CUDA=tests/unit

# What concerns torch under another version of it, on the simulator: make test-torch VERSION=2.11.0
test-torch:
	PYTHON=$(PYTHON) tests/torch_versions.sh $(VERSION) $(TESTS_TORCH)

bench: install-test
	$(BIN)/python -m benchmarks.recorder
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.sampler
	$(BIN)/python -m benchmarks.reader
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.loop --workload images --epochs 5
	$(BIN)/python -m benchmarks.live_page

# dist/: the sdist, and the wheel built from it.
wheel: install-test
	$(BIN)/python -m build

# All that needs a real GPU, with $(PYTHON) as it is; call it again to run what is left (docs/gpu/README.md).
OUT     ?= gpu-report
MINUTES ?= 9
gpu-report:
	$(PYTHON) -m benchmarks.gpu_report --out $(OUT) --minutes $(MINUTES)

# The two runs that an empty page offers, recorded again; the second one on the simulator.
examples: install-test $(CUDASIM)/.installed-test
	$(BIN)/python -m examples.record

# docs/images from those examples, in light and dark; needs chromium.
screenshots: install-test
	$(BIN)/python -m docs.screenshots

# Which changes of the code no test notices; takes an hour.
mutate: install-test
	$(BIN)/pip install --quiet --disable-pip-version-check mutmut==3.8.1
	tests/mutate.sh $(MUTANTS)

clean:
	rm -rf $(VENV) .venv-* node_modules simulator/build benchmarks/.venv-* .pytest_cache .mypy_cache .ruff_cache
