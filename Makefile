# Two commands are all a newcomer needs:  make demo   and   make test.
# Everything is installed into .venv; nothing else on the machine is touched, except that `make test`
# run as root on Debian installs chromium (and python3-venv) where they are missing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Where this is set, each of the many processes of tests, demo and server would compile this package again, and each
# test process all tests.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles a module when it is first imported: compiling all 18,000 files of torch and the frameworks takes longer
# than installing them.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
# Three steps into one environment: the package with what the demo needs, the tools of `make check`, then what
# tests and benchmarks need besides.
PACKAGE := .venv/.package
DEV := .venv/.dev
TOOLS := .venv/.tools
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 3 ? n + 2 : 4)))
CHROMIUM = command -v chromium || command -v chromium-browser || command -v google-chrome

.PHONY: help install kernels demo up test collect test-gpu bench-gpu rehearsal site lint format types django messages check browser bench lowest clean

help:
	@echo "To see it:"
	@echo "  make demo    install, then train five small GPTs and watch them in the browser (DEMO_ARGS=--exit to stop by itself)"
	@echo "  make up      install, then run the dashboard on this machine until Ctrl-C      (UP_ARGS='--port 8001')"
	@echo "To change it:"
	@echo "  make check   ruff, djangofmt, mypy, Django's own checks and commit messages; make format repairs what it can"
	@echo "  make test TEST_ARGS=tests/agent/delivery      the tests of what you changed"
	@echo "  make test TEST_ARGS=\"-k name -x\"            the tests whose name has \"name\", up to the first failure"
	@echo "  make test    every test; the goal is 20 minutes on two cores"
	@echo "  make test TEST_ARGS=\"-m 'not slow'\"         without installations, demos, torchrun and other projects' trainers"
	@echo "  .ci/run      what continuous integration runs: make check, and make test"
	@echo "Now and then:"
	@echo "  make kernels the CPU kernels, after a change to their C++"
	@echo "  make test-gpu, make bench-gpu   the GPU's tests and benchmark, on a machine with a CUDA device"
	@echo "  make rehearsal  faults of a deployment over several machines, as root (REHEARSAL_ARGS='--scene disk_full')"
	@echo "  make bench   every benchmark (hours); docs/benchmarks.md gets the results"
	@echo "  make site    the documents as a site, in build/site"
	@echo "  make collect finds the tests, and compiles their files for make test; .ci/run does it while mypy runs"
	@echo "  make lowest  the tests with the oldest dependencies that pyproject.toml allows"
	@echo "  make clean   remove what make made"

install: $(TOOLS)

# The installation builds the CPU kernels: with the machine's C++ compiler, else with one from PyPI.
KERNELS := setup.py $(wildcard build_backend/*.py kernels/fp8scope_kernels/cpu/levels.py kernels/fp8scope_kernels/cpu/csrc/*)
$(PACKAGE): pyproject.toml constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fp8scope needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq python3-venv; } || \
		{ echo "Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[demo]'
	@touch $@

# The package is there already: pip adds what its other extras name, and builds nothing again.
$(DEV): $(PACKAGE)
	$(PIP) 'fp8scope[dev,benchmarks]'
	@touch $@

$(TOOLS): $(DEV)
	$(PIP) 'fp8scope[frameworks,trackers]'
	@touch $@

# The kernels alone, into the source tree: any Python will do, with a C++ compiler or the package ziglang.
kernels:
	$(PYTHON) build_backend/kernel_libraries.py

demo: $(PACKAGE)
	$(BIN)/fp8scope demo $(DEMO_ARGS)

up: $(PACKAGE)
	$(BIN)/fp8scope up $(UP_ARGS)

# Two test processes more than cores (they wait for servers half of their time), at most four, each on one core: JOBS=0
# runs all in one. The goal is 20 minutes on two cores, see CONTRIBUTING.md.
test: $(TOOLS) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(TEST_ARGS)

# Finds the tests, and leaves the bytecode of their files to the processes of `make test`, which would else compile them
# at the same time.
collect: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only --quiet --quiet >/dev/null

# On a machine with a CUDA device; elsewhere the GPU tests are skipped with a line that says so.
test-gpu: $(TOOLS)
	$(BIN)/python -m pytest tests/gpu

bench-gpu: $(TOOLS)
	$(BIN)/python benchmarks/gpu_kernels.py

# Of Debian's PostgreSQL, pgbouncer, Redis and nginx, in network namespaces; see docs/operating.md.
rehearsal: $(DEV)
	$(BIN)/python deploy/rehearsal $(REHEARSAL_ARGS)

# The browser tests need Debian's chromium. Root installs it; others are told, and those tests are skipped with
# a line that says so (with CI=true they fail instead).
browser:
	@{ $(CHROMIUM); } >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
		echo "chromium is not installed: the browser tests will be skipped (Debian: apt-get install chromium)"

check: messages lint types django

# Of the commits since the rule began; see CONTRIBUTING.md.
messages:
	@$(PYTHON) tools/commit_messages.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/djangofmt --quiet --check dashboard

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/djangofmt dashboard

types: $(DEV)
	$(BIN)/mypy

# The settings of the tests: those of production would wait for the database.
django: $(DEV)
	$(BIN)/python manage.py check --deploy --fail-level WARNING
	$(BIN)/python manage.py makemigrations --check --dry-run --settings fp8scope_dashboard.settings.test

# All but those that need a directory of loss curves (calibration, detectors, verdicts) or a GPU (gpu_kernels): hours.
# docs/benchmarks.md gets their results.
BENCHMARKS = agent_overhead bisection capture chaos cold_store compaction compositions crash deletion eager_fallback fp6 growth ingest kill linear load optimizer_state outage quantize query recipes scale spikes storage watching web_server
bench: $(TOOLS)
	$(BIN)/python tools/benchmark_table.py $(BENCHMARKS) -- $(BENCH_ARGS)

# The documents as pages, below build/site.
site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The oldest dependencies that pyproject.toml allows, in an environment of their own. torch stays that of constraints.txt.
LOWEST_TESTS := tests/agent/recording tests/agent/delivery tests/agent/cli/test_main.py tests/dashboard
lowest:
	$(PYTHON) -m venv build/lowest
	$(PYTHON) tools/lowest.py demo > build/lowest/constraints.txt
	build/lowest/bin/python -m pip install --quiet -c build/lowest/constraints.txt -e '.[demo]' \
		pytest pytest-django pytest-timeout pytest-xdist hypothesis PyYAML aiosmtpd
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal $(LOWEST_TESTS)

clean:
	rm -rf kernels/fp8scope_kernels/cpu/*.so .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
