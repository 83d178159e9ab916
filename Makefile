# The commands of a checkout; `make` without a target lists them.

PREFIX ?= /usr/local
FUZZ_SECONDS ?= 30
SOAK_SECONDS ?= 120
jiffy = dist/bin/jiffy

.PHONY: help setup setup-tests build demo test check bench bench-check fuzz soak install uninstall clean

help:
	@echo "make setup        install the Debian packages Jiffy is built and run with"
	@echo "make setup-tests  the same, and what the tests and benchmarks need"
	@echo "make build        build everything into dist/"
	@echo "make demo         setup, build, and run a command in a microVM"
	@echo "make test         setup, format, lints, documentation, dependencies, all tests; prints how many passed"
	@echo "make check        format, lints, documentation, crate edges, dependencies"
	@echo "make bench        measure Jiffy and the peers found on PATH; writes bench/results/"
	@echo "make bench-check  fail if a committed figure got worse by more than 2 %"
	@echo "make fuzz         run each fuzz target for FUZZ_SECONDS ($(FUZZ_SECONDS)) seconds; prints the coverage"
	@echo "make soak         random kills and full disks under load for SOAK_SECONDS ($(SOAK_SECONDS)) seconds; SOAK_SEED=N repeats an order"
	@echo "make install      copy dist/ to PREFIX ($(PREFIX))"
	@echo "make uninstall    remove it from PREFIX, and Jiffy's links and rules; data stays"
	@echo "make clean        remove what was built here; caches in ~/.cache/jiffy stay"

setup:
	@scripts/setup

setup-tests:
	@scripts/setup tests

build: setup
	@scripts/build

demo: build
	@scripts/demo $(jiffy)

test: setup-tests
	@scripts/test

check: setup
	@scripts/check

bench: setup-tests build
	@scripts/bench

bench-check: setup-tests build
	@scripts/bench --check

fuzz: setup
	@fuzz/run $(FUZZ_SECONDS)

soak: setup-tests build
	@scripts/soak $(SOAK_SECONDS)

install:
	@scripts/install "$(DESTDIR)$(PREFIX)"

uninstall:
	@DESTDIR="$(DESTDIR)" scripts/uninstall "$(DESTDIR)$(PREFIX)"

clean:
	@rm -rf dist
	@cargo clean --quiet
