# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Also where ONNX Runtime is loaded before xrlflow, in benchmarks and tests. See SECURITY.md.
export ORT_DISABLE_TELEMETRY ?= 1

.PHONY: install demo docs check test test-all lint types contracts quick pytest proofs test-python test-runtimes cross browser postgres bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,docs,dev]"
	touch $@

demo: install
	mkdir -p out
	$(BIN)/python -m models build lstm-unrolled -o out/lstm.onnx
	$(BIN)/xrlflow optimize out/lstm.onnx -o out/lstm.fast.onnx --cost roofline --backend onnxruntime

# The pages are in docs/, the site goes to build/site.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tests multiply small matrices: threads of NumPy and PyTorch would cost more than they save. (TVM's kernels and ONNX
# Runtime have numbers of threads of their own.) Continuous integration runs the core's tests with those threads, too.
ALONE := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := PYTHONDONTWRITEBYTECODE= $(ALONE) $(BIN)/pytest -n 2 --dist worksteal
# Kinds of tests that take long: pyproject.toml says what each is. At least one test of each is marked quick.
LONG := proof or corpus or process or measures or learns or cluster

# What one runs while one works: nothing in it measures, so that all of it runs at the same time.
check: install
	$(MAKE) -j 4 -O lint types contracts quick

# What continuous integration runs. Tests, some of which measure, run alone.
test: install
	$(MAKE) -j 3 -O lint types contracts
	$(MAKE) pytest

# Everything, with what `make test` leaves out (CONTRIBUTING.md says why).
test-all: install
	$(MAKE) -j 3 -O lint types contracts
	$(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

# Hundreds of processes start: they compile the sources once, also where the environment says not to keep that.
quick: install
	$(PYTEST) -m "not whole and (quick or not ($(LONG)))"

pytest: install
	$(PYTEST) -m "not whole"

# Proves all rules again, with the seeds of their certificates and a fresh one, and writes the certificates. A release
# needs it. `make proofs ARGS=--stale` proves what has changed.
proofs: install
	$(BIN)/python -m tests.rules.certificates $(ARGS)

# The core's tests with another Python and the newest packages that it has: `make test-python PY=3.13`.
test-python:
	test -x .venv-$(PY)/bin/python || python$(PY) -m venv .venv-$(PY)
	.venv-$(PY)/bin/pip install --quiet --disable-pip-version-check -e ".[test]"
	.venv-$(PY)/bin/python -m pytest -n 2 -m "not whole"

# Models with libraries of kernels in several ONNX Runtimes, each in an environment of its own.
RUNTIMES := 1.16.3 1.17.3 1.20.1 1.23.2 1.27.0 1.31.1

test-runtimes: install
	rm -rf build/runtimes
	$(BIN)/python -m tests.backends.tvm.library.carried build/runtimes
	set -e; for version in $(RUNTIMES); do \
	  there=$(VENV)-onnxruntime-$$version; \
	  test -x $$there/bin/python || $(PYTHON) -m venv $$there; \
	  $$there/bin/pip install --quiet --disable-pip-version-check onnxruntime==$$version "numpy<2"; \
	  $$there/bin/python tests/backends/tvm/library/in_a_runtime.py build/runtimes; \
	done

# What tests of libraries for another processor need, and are skipped without (Debian and Ubuntu).
cross:
	apt-get install --yes --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user valgrind

# What tests of report pages need, and are skipped without (Debian and Ubuntu).
browser:
	apt-get install --yes --no-install-recommends chromium fonts-dejavu-core

# What tests of a shared store need, and are skipped without (Debian and Ubuntu).
postgres:
	apt-get install --yes --no-install-recommends postgresql

bench: install
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/agents.py valleys --quick 4 --seconds 2
	$(BIN)/python bench/agents.py networks
	$(BIN)/python bench/latency.py
	$(BIN)/python bench/lowering.py operators
	$(BIN)/python bench/lowering.py models
	$(BIN)/python bench/tuning.py --seeds 1 --operators "512x512x512,12 x 128x64,14x14,Softmax"

# What the tests of `make test` run of the package, in their processes and in those that they start: a summary, and pages
# in build/coverage/html. `make coverage ARGS=tests/ir` is of some tests.
.PHONY: coverage
coverage: install
	rm -rf build/coverage
	$(PYTEST) -m "not whole" --cov --cov-report=term --cov-report=html --cov-report=xml:build/coverage/coverage.xml $(ARGS)

# The core's tests with the newest ONNX Runtime, though pyproject.toml may not allow it yet.
.PHONY: test-newest
test-newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check -e ".[test]"
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade onnxruntime
	.venv-newest/bin/pip show onnxruntime | head -2
	.venv-newest/bin/python -m pytest -n 2 -m "not whole"

# The files of a release, in dist/, from what is committed or not; and checks of them.
.PHONY: dist
dist: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Writes the version and its section of the changelog: `make release VERSION=0.2.0`. docs/releasing.md says what comes
# before and after it.
.PHONY: release
release: install
	$(BIN)/python tools/release.py $(VERSION)
	$(MAKE) dist

clean:
	rm -rf $(VENV) $(VENV)-* out build dist *.egg-info
