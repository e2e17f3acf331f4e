# `make demo` and `make test` do everything from nothing. They use the Python that has torch
# already (then without any network), an active virtual environment, or a new .venv: see
# tools/environment.py. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=

# Runs the Python that has what the named dependency groups need, e.g. $(call python,test) -m pytest.
python = python=$$($(PYTHON) tools/environment.py $(1)) && "$$python"

# setup.py writes this file last, so it is as old as the extension.
BUILT := pytracer/_build.json
NATIVE := setup.py _build_backend/native.py $(shell find csrc -name '*.cpp' -o -name '*.h')
CXX_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cc' '*.cuh' '*.cu')

.PHONY: help demo test nightly build lint tidy docs bench wheels release-check matrix torch-tests public-programs clean FORCE

help:
	@echo "make demo    build, trace a small training run and print what it found"
	@echo "make test    build and run the tests; those marked cuda need a GPU.  ARGS='-k name'"
	@echo "make nightly  everything that takes hours; each part writes benchmarks/results/*.json"
	@echo "make build   compile the extension in place, for the torch that is installed"
	@echo "make lint    formatting, lint, spelling and types"
	@echo "make tidy    clang-tidy looks for bugs in csrc/core"
	@echo "make docs    the pages as a site with search, in build/site; checks their links"
	@echo "make bench   what tracing costs, beside the peers"
	@echo "make wheels  one wheel for this Python and all supported releases of torch, in dist/"
	@echo "make release-check  build, install and try a release on this machine"
	@echo "make matrix  install, test and run beside each of them, and write docs/support.md"
	@echo "make torch-tests      PyTorch's own tests, traced and not.  ARGS='FOLDER --quick'"
	@echo "make public-programs  other people's programs, traced and not.  ARGS='gan diffusion'"
	@echo "make clean   remove everything that was built (not .venv)"

demo: $(BUILT)
	@$(call python) -m pytracer demo $(ARGS)

# Two at a time, but for those that measure something; with ARGS one after the other.
test: $(BUILT)
	@$(call python,test) -m pytest $(if $(ARGS),$(ARGS),-n 2 --dist worksteal)

nightly: $(BUILT) tidy
	@$(call python,test programs torch-tests core cudnn) tools/nightly.py $(ARGS)

build: $(BUILT)

$(BUILT): $(NATIVE) $(shell $(PYTHON) tools/environment.py --stale)
	@$(call python) setup.py build_ext --inplace

# Each runs even when one before it failed; make fails if any did.
lint:
	@python=$$($(PYTHON) tools/environment.py test lint) && bin=$$(dirname "$$python") && \
	status=0; run() { echo "+ $$1"; shift; "$$@" || status=1; }; \
	run "ruff check" "$$python" -m ruff check . ; \
	run "ruff format" "$$python" -m ruff format --check . ; \
	run "clang-format" "$$bin/clang-format" --dry-run --Werror $(CXX_FILES) ; \
	run "codespell" "$$bin/codespell" $$(git ls-files) ; \
	run "mypy" "$$python" -m mypy ; \
	exit $$status

tidy:
	@python=$$($(PYTHON) tools/environment.py tidy) && git ls-files 'csrc/core/*.cpp' | \
	xargs -P 2 -I{} "$$(dirname "$$python")/clang-tidy" --quiet {} -- -std=c++20 -Icsrc/core

docs:
	@python=$$($(PYTHON) tools/environment.py docs) && NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --quiet

bench: $(BUILT)
	@$(call python) benchmarks/overhead.py $(ARGS)

wheels:
	@$(call python,wheels) tools/wheels.py $(ARGS)

# ARGS='ENVIRONMENT/bin/python ...' takes environments that are there already.
release-check:
	@$(call python,wheels) tools/release.py check $(ARGS)

# With ARGS as for release-check.
matrix:
	@$(call python) tools/matrix.py $(or $(ARGS),--make build/matrix)

torch-tests: $(BUILT)
	@$(call python,torch-tests) tools/torch_tests.py $(ARGS)

# What is installed runs; the tool says how to install the others beside the torch that is there.
public-programs: $(BUILT)
	@$(call python) tools/public_programs.py $(ARGS)

clean:
	rm -rf build dist *.egg-info $(BUILT) pytracer/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
