# Two commands are all a newcomer needs:  make demo   and   make test.
# Everything is installed into .venv; nothing else on the machine is touched, except that `make test`
# run as root on Debian installs chromium (and python3-venv) where they are missing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 3 ? n + 1 : 4)))
CHROMIUM = command -v chromium || command -v chromium-browser || command -v google-chrome

.PHONY: help install kernels demo test test-gpu bench-gpu lint format types check browser bench clean

help:
	@echo "make demo    install, then train five small GPTs and watch them in the browser (DEMO_ARGS=--exit to stop by itself)"
	@echo "make test    install, then run every test                                      (TEST_ARGS='-k name')"
	@echo "make check   lint, types and Django's own checks"
	@echo "make bench   every benchmark, one JSON line each"
	@echo "make clean   remove what make made"

install: $(INSTALLED)

# The CPU's kernels are built by the installation: with the machine's C++ compiler, else with one from PyPI.
KERNELS := setup.py $(wildcard build_backend/*.py kernels/fp8scope_kernels/cpu/levels.py kernels/fp8scope_kernels/cpu/csrc/*)
$(INSTALLED): pyproject.toml constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fp8scope needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
		{ echo "Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dashboard,dev]'
	@touch $@

# The kernels alone, into the source tree: any Python will do, with a C++ compiler or the package ziglang.
kernels:
	$(PYTHON) build_backend/kernel_libraries.py

demo: $(INSTALLED)
	$(BIN)/fp8scope demo $(DEMO_ARGS)

# One test process more than cores (many wait for servers), at most four, each on one core: JOBS=0 runs all in one.
test: $(INSTALLED) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(TEST_ARGS)

# On a machine with a CUDA device; elsewhere the GPU tests are skipped with a line that says so.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu

bench-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_kernels.py

# The browser tests need Debian's chromium. Root installs it; others are told, and those tests are skipped with
# a line that says so (with CI=true they fail instead).
browser:
	@{ $(CHROMIUM); } >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo "chromium is not installed: the browser tests will be skipped (Debian: apt-get install chromium)"

check: lint types
	$(BIN)/python manage.py check --deploy --fail-level WARNING
	$(BIN)/python manage.py makemigrations --check --dry-run

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

# All but two: calibration.py needs a directory of loss curves, gpu_kernels.py a GPU (make bench-gpu). It takes hours.
BENCHMARKS = agent_overhead bisection chaos compaction crash deletion eager_fallback fp6 growth ingest kill linear optimizer_state outage quantize query recipes spikes storage watching web_server
bench: $(INSTALLED)
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf kernels/fp8scope_kernels/cpu/*.so .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
