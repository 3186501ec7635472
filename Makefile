# Every target is one or two plain commands that can be typed by hand.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup build demo test test-all property sanitize check fmt bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@$(BIN)/python -m pagemill.native
	touch $@

# In one go: a second install would compile a second time. The driver is tests/native's.
.venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	CMAKE_ARGS="-DPAGEMILL_DRIVER=ON $$CMAKE_ARGS" $(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pagemill.native
	touch .venv/base $@

setup: .venv/dev  ## editable install with the development tools

build: .venv/dev  ## the native kernels, after a change in csrc/: CMake -> pagemill/_C
	$(BIN)/cmake -S . -B build/inplace -DPAGEMILL_INPLACE=ON -DPAGEMILL_DRIVER=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build build/inplace -j$(shell nproc 2>/dev/null || echo 2)

demo: .venv/base  ## install, then generate text with a real model
	$(BIN)/pagemill pull smollm2-135m-instruct
	$(BIN)/pagemill generate --max-tokens 48 --temperature 0 "The capital of France is" "Once upon a time, there was a little"

test: .venv/dev  ## the test suite, less what is marked slow or cuda
	$(BIN)/python -m pytest -rs -m "not slow and not cuda"

test-all: .venv/dev  ## the slow tests too
	$(BIN)/python -m pytest -rs -m "not cuda"

property: .venv/dev  ## one request, one answer: the property test with 2,000 random worlds (about half an hour a kind of kernels on two cores)
	$(BIN)/python -m pytest tests/e2e/test_one_answer.py --hypothesis-profile=property --timeout=0

sanitize: .venv/dev  ## the native kernels under address, undefined-behaviour and thread sanitizers (gcc, clang, libomp)
	$(BIN)/python -m tests.native.sanitize

check: .venv/dev  ## ruff, mypy, import-linter
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy && $(BIN)/lint-imports

fmt: .venv/dev  ## format, and mend what ruff can mend
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: .venv/dev  ## the benchmarks that need nothing but pagemill and transformers, in one run
	$(BIN)/python -m benchmarks.all

docs: .venv/dev  ## run the examples and compare the documents with the code
	$(BIN)/python -m pytest tests/examples tests/docs

clean:  ## remove what the targets made
	rm -rf .venv build dist pagemill/_C.*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
