# The two environments hold the last training build of ONNX Runtime and the current stock one.
#
# PYTHON       the Python 3.10 or later that creates them
# TORCH_INDEX  pip options for PyTorch alone. PyPI's wheel for Linux is a CUDA build of several gigabytes, so that the
#              CPU build is taken from PyTorch's own index; where pip knows a folder of wheels, that decides
# PYTEST       options for pytest in `make test`
# SECONDS      how long `make fuzz` goes on, per tester and build
# BENCH        options for the benchmarks in `make bench`; without --save, docs stay as they are
# NETWORKS     how many random networks `make networks` checks
PYTHON ?= python3
TORCH_INDEX ?= $(if $(PIP_FIND_LINKS),,--extra-index-url https://download.pytorch.org/whl/cpu)
PYTEST ?=
SECONDS ?= 600
BENCH ?= --save
NETWORKS ?= 1000

CPU := .venv-cpu
STOCK := .venv-stock
GPU := .venv-gpu
DOCS := .venv-docs
HUGGING_FACE := .venv-hugging-face
RELEASE := .venv-release
WHEEL := .venv-wheel
JAVASCRIPT := examples/ondevice/node_modules
STAMP := .lightning_ort-installed
# --no-compile: Python compiles what is imported, a tenth of what is installed, which took half of the time. What it has
# compiled it must keep, also for who has that switched off: each process would take ten seconds to start.
PIP_OPTIONS := -qq --disable-pip-version-check --no-input --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-docs test-stock test-cpu test-hugging-face test-gpu fuzz networks lint format docs bench dist \
	smoke environments clean clean-environments
.DEFAULT_GOAL := help
# make would take a half-made environment for a finished one
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up $(CPU) and train a digit classifier in PyTorch and in ONNX Runtime"
	@echo "make test    set up both environments, check format, lint and types, build the documentation, run the tests in both"
	@echo "make test-stock, make test-cpu run the tests in one of the environments"
	@echo "make test-hugging-face set up $(HUGGING_FACE) and run the tests with transformers"
	@echo "make test-gpu set up $(GPU) with PyPI's CUDA builds and run the tests for a GPU, which must be there"
	@echo "make fuzz    try random programs, statements, operators, changes, choices, containers, schedules, damaged files and options for SECONDS=600 each, in both environments"
	@echo "make networks train random networks, NETWORKS=1000 of them, to see that their check refuses none"
	@echo "make lint    check format, lint and types"
	@echo "make format  format the code and mend what lint can mend"
	@echo "make docs    set up $(DOCS) and build the documentation into build/docs"
	@echo "make bench   run the benchmarks in $(STOCK) and write their tables and pictures into docs/ (two hours)"
	@echo "make dist    build wheel and sdist into dist/ and check them"
	@echo "make smoke   make dist, then install the wheel alone into $(WHEEL) and try it"
	@echo "make clean   remove caches; make clean-environments removes both environments"

demo: $(CPU)/$(STAMP)
	@$(CPU)/bin/python examples/digits.py

# what pip and mypy do takes one core each; the tests take what there is
test:
	@$(MAKE) --no-print-directory --jobs=2 environments lint test-docs
	@$(MAKE) --no-print-directory --jobs=1 test-stock test-cpu test-hugging-face

# a docstring that is changed may break the reference
test-docs: $(STOCK)/$(STAMP)
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then \
		echo "The documentation is not built: the tested version of Sphinx needs Python 3.11."; \
	else $(MAKE) --no-print-directory docs; fi

# what is the same beside both runs where the other tests take less time
test-stock: PART := -m "not either_build"
test-stock test-cpu: test-%: .venv-%/$(STAMP) $(JAVASCRIPT)/$(STAMP)
	.venv-$*/bin/python -m pytest $(PART) --numprocesses=auto --maxprocesses=4 --dist=worksteal $(PYTEST)

# without transformers no test is collected, which is an error
test-hugging-face:
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then \
		echo "The tests with transformers are left out: the tested version needs Python 3.11."; \
	else $(MAKE) --no-print-directory $(HUGGING_FACE)/$(STAMP) && \
		$(HUGGING_FACE)/bin/python -m pytest --numprocesses=auto --maxprocesses=2 --dist=worksteal tests/test_hugging_face.py $(PYTEST); fi

networks: $(STOCK)/$(STAMP)
	LIGHTNING_ORT_TEST_NETWORKS=$(NETWORKS) $(STOCK)/bin/python -m pytest --numprocesses=auto \
		tests/compiler/test_seeded_networks.py -k no_false_alarm $(PYTEST)

# PyPI's wheel of PyTorch is the CUDA build
test-gpu: TORCH_INDEX :=
test-gpu: $(GPU)/$(STAMP)
	$(GPU)/bin/python -m lightning_ort doctor
	LIGHTNING_ORT_TEST_GPU=1 $(GPU)/bin/python -m pytest -n 0 \
		tests/test_gpu.py tests/runtime/test_cuda_sessions.py tests/lightning/test_cuda_precision.py tests/lightning/test_accelerator.py tests/distributed/test_nccl.py $(PYTEST)

fuzz: $(STOCK)/$(STAMP) $(CPU)/$(STAMP)
	for build in $(STOCK) $(CPU); do for tester in programs statements operators changes choices containers schedules files options; do \
		$$build/bin/python -m tests.fuzz.$$tester --seconds $(SECONDS) || exit 1; done; \
		$$build/bin/python -m tests.fuzz.operators --autocast bfloat16 --seconds $(SECONDS) || exit 1; \
		$$build/bin/python -m tests.fuzz.operators --layouts --dtype float64 --seconds $(SECONDS) || exit 1; done

lint: $(STOCK)/$(STAMP)
	$(STOCK)/bin/ruff format --check .
	$(STOCK)/bin/ruff check .
	$(STOCK)/bin/mypy

format: $(STOCK)/$(STAMP)
	$(STOCK)/bin/ruff check --fix-only .
	$(STOCK)/bin/ruff format .

# every warning is an error: a link or a reference that leads nowhere, a docstring that cannot be read
docs: $(DOCS)/$(STAMP)
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs

bench: $(STOCK)/.bench-installed
	$(STOCK)/bin/python -m benchmarks $(BENCH)
	$(STOCK)/bin/python -m benchmarks.page

# --no-isolation: by the version of hatchling that is tested
dist: $(RELEASE)/$(STAMP)
	rm -rf dist
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/python -m twine check --strict dist/*

smoke: dist
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install $(PIP_OPTIONS) $(TORCH_INDEX) -r requirements/torch.txt
	$(WHEEL)/bin/python -m pip install $(PIP_OPTIONS) "$$(ls dist/*.whl)[stock,template]"
	$(WHEEL)/bin/python .ci/smoke.py

$(RELEASE)/$(STAMP): requirements/release.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install $(PIP_OPTIONS) -r $<
	@touch $@

$(STOCK)/.bench-installed: requirements/bench.txt $(STOCK)/$(STAMP)
	@$(STOCK)/bin/python -m pip install $(PIP_OPTIONS) -r $<
	@touch $@

environments: $(CPU)/$(STAMP) $(STOCK)/$(STAMP)

.venv-%/$(STAMP): requirements/%.txt requirements/common.txt requirements/torch.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is too old: Python 3.10 or later is needed. Name another: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot create environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing the packages of requirements/$*.txt into .venv-$*: a few minutes, once"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install $(PIP_OPTIONS) $(TORCH_INDEX) -r requirements/torch.txt
	@.venv-$*/bin/python -m pip install $(PIP_OPTIONS) -r requirements/$*.txt
	@.venv-$*/bin/python -m pip install $(PIP_OPTIONS) --no-deps -e .
	@touch $@

# What is installed on top of the stock environment, which these see by site-packages' own means: a .pth file.
$(DOCS)/$(STAMP) $(HUGGING_FACE)/$(STAMP): .venv-%/$(STAMP): requirements/%.txt $(STOCK)/$(STAMP)
	@echo "Installing the packages of requirements/$*.txt into .venv-$*, on top of $(STOCK)"
	@$(PYTHON) -m venv --clear .venv-$*
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(STOCK)/lib/python*/site-packages)')" \
		> "$$(echo .venv-$*/lib/python*/site-packages)/stock.pth"
	@.venv-$*/bin/python -m pip install $(PIP_OPTIONS) -r requirements/$*.txt
	@touch $@

# where npm is missing or cannot install, pytest skips the tests in JavaScript and says so
$(JAVASCRIPT)/$(STAMP): examples/ondevice/package.json
	@if command -v npm > /dev/null && npm install --prefix examples/ondevice --loglevel=error > /dev/null; then touch $@; \
	else echo "The tests in JavaScript are skipped: npm is not there, or cannot install $<."; fi

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache build digits dist lightning_logs checkpoints
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

clean-environments:
	rm -rf $(CPU) $(STOCK) $(GPU) $(DOCS) $(HUGGING_FACE) $(RELEASE) $(WHEEL) \
		$(JAVASCRIPT)
