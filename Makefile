# make run | install | test | bench. Everything lives in .venv.
# make run-simulated: the page with simulated GPUs; make test-cuda: the CUDA tests on them. They live in
# .venv-cudasim.
PYTHON ?= python3
VENV   := .venv
CUDASIM := .venv-cudasim
PRETTIER := 3.10.1
BIN    := $(VENV)/bin
ARGS   ?=
# pytest arguments for `make test`, such as TESTS=tests/unit
TESTS  ?= tests
# Test processes at a time; JOBS=0 runs all tests in one.
JOBS   ?= 2
XDIST  := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What more to give pytest, such as PYTEST_ARGS=--durations=25, and what `make test` does before it.
PYTEST_ARGS ?=
LINT   ?= lint
# Which tests `make test` takes of those; QUICK= takes all, as on a real GPU.
PYTEST := -m pytest $(XDIST) $(PYTEST_ARGS)
QUICK  := -m "not slow and not cuda"

.PHONY: run run-simulated install install-test test test-slow coverage explore test-cuda test-cuda-core test-python test-torch lint bench wheel gpu-report examples screenshots mutate clean

run: install
	$(BIN)/streamlit run app.py $(ARGS)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

# PyTorch first and by its pin: anything that needs torch is then content with it.
$(VENV)/.installed: requirements.txt pyproject.toml hatch_build.py
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
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH npx --yes prettier@$(PRETTIER) --check 'dashboard/**/*.{js,css}'

# All tiers but the slow files and CUDA: about 12 minutes on two cores.
test: $(LINT) install-test
	$(BIN)/python $(PYTEST) $(QUICK) $(TESTS)

# The slow files: jobs of several processes, sweeps, frameworks, lessons, all pages at once.
test-slow: install-test
	$(BIN)/python $(PYTEST) -m "slow and not cuda" $(TESTS)

# `make test` with the share of lines that it runs, in child processes as well.
coverage: install-test
	$(BIN)/python $(PYTEST) $(QUICK) --cov --cov-report=term:skip-covered $(TESTS)

# Properties on new examples each time; `make test` replays the same ones.
explore: install-test
	$(BIN)/python $(PYTEST) -m hypothesis --hypothesis-profile=explore tests/unit \
		tests/integration/test_hostile_folders.py

# The CUDA build of torch on simulated NVIDIA libraries (simulator/README.md); needs gcc and g++.
$(CUDASIM)/.installed: requirements.txt pyproject.toml \
		simulator/setup.sh $(wildcard simulator/src/* simulator/python/*)
	PYTHON=$(PYTHON) simulator/setup.sh $(CUDASIM) "$$(sed -n 's/^torch==//p' requirements.txt)"
	$(CUDASIM)/bin/pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	touch $@

$(CUDASIM)/.installed-test: $(CUDASIM)/.installed requirements-test.txt
	$(CUDASIM)/bin/pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

# The page for those who have no GPU, such as make run-simulated GPUS=4 MEMORY=1G; up to 8, in host memory.
GPUS   ?= 2
MEMORY ?= 2G
run-simulated: $(CUDASIM)/.installed
	CUDASIM_DEVICES=$(GPUS) CUDASIM_MEMORY=$(MEMORY) $(CUDASIM)/bin/streamlit run app.py $(ARGS)

test-cuda: $(CUDASIM)/.installed-test
	$(CUDASIM)/bin/python $(PYTEST) --require-gpu $(or $(TESTS_CUDA),tests/simulator tests/gpu $(wildcard tests/browser/test_cuda_*.py))

# The core of it, in some minutes.
CUDA_CORE := tests/simulator/test_nccl.py $(addprefix tests/gpu/test_,training_gpu.py values_gpu.py watch_gpu.py \
	ledger_gpu.py fit_gpu.py parallel_gpu.py) tests/browser/test_cuda_page.py
test-cuda-core:
	$(MAKE) test-cuda TESTS_CUDA="$(CUDA_CORE)"

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
	$(BIN)/python -m benchmarks.interference
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
	rm -rf $(VENV) .venv-* simulator/build benchmarks/.venv-* .pytest_cache .mypy_cache .ruff_cache
