# The newcomer's entry: `make demo`, `make test`, `make check`; `make test-all` runs every test, `make docs`
# builds the documentation site. Each makes .venv itself, once. `make check-lowest` has an environment of its own.
#
#   PYTHON   the interpreter that .venv is made with (>= 3.11)
#   WORKERS  how many processes run tests; each takes about 2 GB of memory
#   TORCH    how torch is installed; for another build of it, say
#            make TORCH="torch==2.13.0 --index-url <the address that PyTorch's install page gives for your CUDA or CPU>"

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 3
# pip would compile 25,000 modules, one after another, and most are never imported. These are, by many processes at once.
# Python compiles the others when it imports them. A package may hold modules for another version of Python.
COMPILED := torch torchao lightning pytorch_lightning torchmetrics sympy scipy numpy transformers
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP := .venv/installed

#   DEVICE   the device of `make gpu-session`: cuda, xpu ..., or cpu or simulated to try the session out
#   MINUTES  its time
.PHONY: gpu-session install demo demo-finetune demo-short test test-ci test-rest test-repeats test-all test-long stress check check-types check-rest check-lowest docs format golden clean

install: $(STAMP)

$(STAMP): pyproject.toml callbacks/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Genesis needs Python >= 3.11, this is {sys.version.split()[0]}; say make PYTHON=...")'
	@echo "installing into .venv (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install --no-compile $(TORCH) -c constraints.txt
	@$(PIP) install --no-compile -c constraints.txt -e callbacks -e ".[dev]"
	@cd .venv/lib/python*/site-packages && ../../../bin/python -m compileall -qq -j 0 $(COMPILED) || true
	@touch $@

demo: $(STAMP)
	@$(BIN)/genesis demo

# Downloads an open model and conversations (100 MB), and fine-tunes the model.
demo-finetune: $(STAMP)
	@$(BIN)/genesis demo finetune

# Three workers on two cores, because tests wait for disks, for processes that end, for limits of time. One thread each:
# more would only spin against the others', and the workers are forked from a process that must have no second thread.
test test-ci test-rest test-repeats test-long stress demo-short: export OMP_NUM_THREADS := 1
# Images of containers often set it. Each of the many ranks would compile the modules that it imports.
test test-ci test-rest test-repeats test-long stress demo-short: export PYTHONDONTWRITEBYTECODE :=
# Native code that never returns to the interpreter stops pytest-timeout, too. Such a test ends its worker.
HANGING := -o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true
PYTEST := -m pytest -q -n $(WORKERS) --dist loadgroup $(HANGING)
# Runs the tests that $(1) selects in $(2), with the options $(3), in a directory of their own, which stays where a test
# fails. pytest's own choice is a directory beside those of earlier sessions, of which each session deletes some when it
# ends: two that end together meet in one directory, and pytest fails.
define run_tests
	@directory=$$(mktemp -d) && cd $(2) && $(CURDIR)/$(BIN)/python $(PYTEST) --basetemp=$$directory/t -m "$(1)" $(3) || \
		{ echo "the tests' files: $$directory" >&2; exit 1; }; rm -rf "$$directory"
endef

# What proves the product, in minutes. Benchmarks are no part of it, and their imports take each worker seconds.
QUICK := not slow and not bench and not long and not cuda
test: $(STAMP)
	$(call run_tests,$(QUICK),callbacks)
	$(call run_tests,$(QUICK) and not demo,.,--ignore=tests/benchmarks)

# Slow tests whose claims no other test proves, and the short demo.
REST := (slow or demo) and not repeat and not long and not cuda
test-rest: $(STAMP)
	$(call run_tests,$(REST),callbacks)
	$(call run_tests,$(REST),.)

# What CI runs: both in one session, because each session imports all tests, and makes again what many share.
PROVED := (slow or demo or not bench) and not repeat and not long and not cuda
test-ci: $(STAMP)
	$(call run_tests,$(PROVED),callbacks)
	$(call run_tests,$(PROVED),.)

# The other slow tests, and the code of the benchmarks.
REPEATS := (repeat or bench) and not long and not cuda
test-repeats: $(STAMP)
	$(call run_tests,$(REPEATS),callbacks)
	$(call run_tests,$(REPEATS),.)

# The README's first command with fewer steps, its kill, its resume and its picture.
demo-short: $(STAMP)
	@$(BIN)/python -m pytest -q -m demo

test-all: test test-rest test-repeats

# What takes minutes each: by hand, before a release; the results are recorded.
test-long: $(STAMP)
	@$(BIN)/python -m pytest -q -m long

# A test twenty times beside four busy processes: make stress T=tests/model/test_loss.py, or an id of pytest in quotes.
stress: export T := $(value T)
stress: $(STAMP)
	@$(BIN)/python .ci/stress.py

# The quick tests with the lowest versions that the two packages allow, in .venv-lowest (6 GB: the torch of PyPI brings the
# libraries of CUDA). uv resolves them, because pip has no such choice. Versions that old warn of newer ones of what they
# import: these warnings are no errors here. T selects tests: make check-lowest T=tests/strategies
# The record of the options of `fit` is of the pinned Lightning, and ignored with another one: its tests are left out.
LOWEST := .venv-lowest
LOWEST_IGNORED := --ignore=tests/cli/test_option_names.py --ignore=tests/recipe/test_resolved.py \
	--deselect=tests/operations/plan/test_command.py::test_a_mistake_is_one_line[unknown-option]
LOWEST_WARNINGS := -W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning -W ignore::FutureWarning
check-lowest: export OMP_NUM_THREADS := 1
check-lowest: $(LOWEST)/installed
	$(if $(T),,$(call run_lowest,callbacks,$(QUICK)))
	$(call run_lowest,.,$(QUICK) and not demo,$(T))

define run_lowest
	@directory=$$(mktemp -d) && cd $(1) && $(CURDIR)/$(LOWEST)/bin/python $(PYTEST) --basetemp=$$directory/t $(LOWEST_WARNINGS) $(LOWEST_IGNORED) -m "$(2)" $(3) || \
		{ echo "the tests' files: $$directory" >&2; exit 1; }; rm -rf "$$directory"
endef

$(LOWEST)/installed: pyproject.toml callbacks/pyproject.toml
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip --disable-pip-version-check -q install uv
	@$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct -e callbacks -e ".[dev]"
	@touch $@

# Everything that a borrowed GPU should answer, most important first; the record is written after every part. It installs
# nothing and needs no network: .venv if there is one, or else the packages of PYTHON.
DEVICE ?= cuda
MINUTES ?= 15
SESSION_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
SESSION_PATH := $(CURDIR):$(CURDIR)/callbacks/src$(if $(filter simulated,$(DEVICE)),:$(CURDIR)/callbacks/tests/simulated/backend)
gpu-session:
	@PYTHONPATH="$(SESSION_PATH)" $(SESSION_PYTHON) -m benchmarks session --device $(DEVICE) --minutes $(MINUTES) $(ARGS)

# A benchmark by its name: make bench-step ARGS="--model tiny --out /tmp/step". `python -m benchmarks` lists them.
bench-%: $(STAMP)
	@$(BIN)/python -m benchmarks $* $(ARGS)

check: check-types check-rest

check-types: $(STAMP)
	@$(BIN)/mypy

check-rest: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/codespell
	@$(BIN)/python .ci/phrases.py
	@$(BIN)/python .ci/budget.py
	@$(BIN)/python .ci/examples.py

# The documentation site, into build/site; warnings and broken links are errors.
docs: $(STAMP)
	@$(BIN)/python docs/site/build_site.py

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

golden: $(STAMP)
	@GENESIS_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q -n 2 -k golden
	@GENESIS_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/fakecuda/test_fits.py tests/fakecuda/test_inference.py \
		tests/fakecuda/test_memory.py
	@cd callbacks && GENESIS_UPDATE_GOLDEN=1 ../$(BIN)/python -m pytest -q tests/test_schemas.py -k current

clean:
	rm -rf .venv .venv-lowest build dist
