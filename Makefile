# Everything a fresh Linux machine with Python 3.10+ needs: `make demo` and `make test` set themselves
# up in .venv (pip only) and are instant the second time. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
# Where torch comes from, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu for the small CPU build.
# Empty: wherever pip is set up to look.
TORCH_INDEX ?=
PYTEST_ARGS ?=
SECONDS     ?= 60
REQUESTS    ?= 20000

BIN     := $(VENV)/bin
PY      := $(BIN)/python
PIP     := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
CORE    := $(VENV)/.stamp-core
TEST    := $(VENV)/.stamp-test
DEV     := $(VENV)/.stamp-dev
NATIVE  := $(wildcard CMakeLists.txt csrc/*.* csrc/*/*.*)  # a change here builds again

# pip hides what a build says, so this is where a missing compiler is told.
define NATIVE_NOTE
$(PY) -c 'import minisgl._native' 2>/dev/null || { \
    echo "note: the native CPU kernels could not be built here: everything works, but slower."; \
    echo "      With a C++17 compiler (Debian, Ubuntu: apt install g++), run: make clean, and again."; }
endef

# $(call need,COMMAND,PACKAGE)
define need
@command -v $(1) >/dev/null || { echo "$(1) is missing. Debian, Ubuntu: apt install $(2)" >&2; exit 1; }
endef

# $(call build_native_tests,FOLDER,ARGUMENTS): the program of tests/native, in build/FOLDER
define build_native_tests
cmake -S . -B build/$(1) -DMINISGL_NATIVE_TESTS=ON $(2) > /dev/null
cmake --build build/$(1) --parallel $$(nproc)
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo chat test test-all test-native test-asan test-neon native-digests check format fuzz soak bench model \
    install clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH_INDEX=$(TORCH_INDEX)"
	@echo "  The CPU build of torch alone: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu"

demo: $(CORE) ## ask the default model a question, and see the answer come
	@$(PY) -m minisgl demo

chat: $(CORE) ## talk to the default model
	@$(PY) -m minisgl chat

test: $(TEST) model ## all tests but the long ones (under 10 minutes on 2 cores)
	$(PY) -m pytest $(PYTEST_ARGS)

test-all: $(TEST) model test-native test-neon test-asan ## all tests, the long ones, in C++, under sanitizers
	$(call need,curl,curl)
	$(call need,npm,npm)
	$(PY) -m pytest -m "" --timeout 3600 $(PYTEST_ARGS)

SANITIZERS := -fsanitize=address -fsanitize=undefined

# What the tests of the kernels print is the same on every architecture (tests/native/test.h).
native-digests:
	$(call need,cmake,cmake)
	$(call need,g++,g++)
	$(call build_native_tests,native-tests)
	build/native-tests/native_tests > build/native-tests/digests
	@cat build/native-tests/digests

test-native: native-digests ## C++ tests of the kernels on this processor, also under sanitizers
	$(call build_native_tests,native-tests-sanitized,-DCMAKE_BUILD_TYPE=Debug \
	    -DCMAKE_CXX_FLAGS="-O1 $(SANITIZERS) -fno-sanitize-recover=undefined")
	build/native-tests-sanitized/native_tests > build/digests-sanitized
	diff build/native-tests/digests build/digests-sanitized

# A copy of the package in build/asan, ahead of the one that this environment was told to import.
define RUN_SANITIZED
import sys; sys.path.insert(0, "build/asan"); \
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]; \
import pytest, minisgl._native as native; print("under test:", native.__file__, flush=True); \
sys.exit(pytest.main(sys.argv[1:]))
endef

test-asan: $(TEST) ## Python tests of the kernels, the kernels under sanitizers (10 minutes)
	$(call need,g++,g++)
	rm -rf build/asan
	$(PIP) --quiet --no-deps --target build/asan . -C build-dir=build/asan-objects \
	    -C cmake.build-type=Debug \
	    -C cmake.define.CMAKE_CXX_FLAGS="-O1 -g $(SANITIZERS) -fno-sanitize-recover=undefined"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 $(PY) -c '$(RUN_SANITIZED)' -m "" -o pythonpath=. \
	    --timeout 3600 tests/kernel tests/attention tests/layers $(PYTEST_ARGS)

test-neon: native-digests ## the same tests on an emulated ARM processor, with NEON and without
	$(call need,aarch64-linux-gnu-g++,g++-aarch64-linux-gnu)
	$(call need,qemu-aarch64,qemu-user)
	$(call build_native_tests,native-tests-neon,-DCMAKE_SYSTEM_NAME=Linux \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	    -DCMAKE_EXE_LINKER_FLAGS=-static)
	for cpu in max cortex-a53; do \
	    qemu-aarch64 -cpu $$cpu build/native-tests-neon/native_tests > build/digests-neon && \
	        diff build/native-tests/digests build/digests-neon || exit 1; done

check: $(DEV) ## format, lint, types, layers, fast tests (under a minute)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PY) -m pytest -q tests/test_tidy.py tests/message tests/utils tests/kvcache tests/scheduler \
	    $(wildcard tests/test_*.py) $(PYTEST_ARGS)

format: $(DEV) ## rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(TEST) ## random steps of the simulated engine: make fuzz SECONDS=600
	$(PY) -m tests.sim.fuzz --seconds $(SECONDS)

soak: $(TEST) ## many requests of every kind at a tiny model's server: make soak REQUESTS=100000
	$(PY) -m tests.server.soak --requests $(REQUESTS)

bench: $(CORE) ## run the programs of benchmark/, one after the other
	@for script in benchmark/*.py; do echo "== $$script"; \
	    PYTHONPATH=. $(PY) $$script || exit 1; done

model: $(CORE) ## fetch the default model (98 MB) unless it is there
	@$(PY) -c "from minisgl.utils.model_files import resolve_model as r; print('model:', r('default').path)"

install: $(DEV) ## the environment for development

clean: ## remove what was built, the environment too
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# --- set-up, one stamp per step -------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "minisgl needs Python 3.10 or later: '$(PYTHON)' is missing or older." >&2; \
	    echo "Name another one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its venv module is not complete." >&2; \
	    echo "Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch numpy
	@touch $@

# One install each; the larger ones stand for the smaller.
$(CORE): $(VENV)/.stamp-torch pyproject.toml $(NATIVE)
	@echo "installing minisgl: compiling the CPU kernels takes a minute or two"
	$(PIP) --quiet -e .
	@$(NATIVE_NOTE)
	@touch $@

$(TEST): $(VENV)/.stamp-torch pyproject.toml $(NATIVE)
	@echo "installing minisgl for tests: compiling the CPU kernels takes a minute or two"
	$(PIP) --quiet -e '.[test]'
	@$(NATIVE_NOTE)
	@touch $@ $(CORE)

$(DEV): $(VENV)/.stamp-torch pyproject.toml $(NATIVE)
	$(PIP) --quiet -e '.[dev]'
	@$(NATIVE_NOTE)
	@touch $@ $(TEST) $(CORE)
