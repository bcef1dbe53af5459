# One word per job; a bare `make` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
# Compiled modules are kept, whatever the caller has set: tests start hundreds of interpreters, which load the same ones.
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help

BIN := .venv/bin
READY := .venv/ready
READY_DEV := .venv/ready-dev
READY_INTEGRATIONS := .venv/ready-integrations
READY_BENCH := .venv/ready-bench
READY_DOCS := .venv/ready-docs
READY_DIST := .venv/ready-dist
READY_SERVERS := .venv/ready-servers
READY_DEVICE := .venv/ready-device
DEVICE_PACKAGES := .venv/device-packages
DEVICE_TESTS := tests/unit/tensors/device_digest
# Installed with npm; pinned here, because constraints.txt is for pip.
AZURITE := azurite@3.35.0
CODE := $(wildcard src tests docs bench examples attacks release)
NOT_SLOW := $(if $(SLOW),,-m "not slow")
EXAMPLES := --hypothesis-profile=$(if $(SLOW),ci-slow,ci)
# auto: one process more than there are cores, see tests/conftest.py.
JOBS := auto
SHARED := -n $(JOBS) --maxprocesses 4 --dist worksteal

.PHONY: help setup demo test test-slow test-slice device-test gpu-test servers check matrix mutants bench docs site dist

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## build .venv with the package and torch, pinned by constraints.txt; other targets add what they need
	@echo "ready: $(BIN)"

demo: $(READY) ## train, kill, resume bit-exactly, fine-tune; 2 ranks save, 1 and 3 continue: a minute; keeps its store in /tmp
	@$(BIN)/python examples/demo.py --keep "$$(mktemp -d -t holdfast-demo-XXXXXX)/store"

# Threads of torch that have nothing to do would spin on the cores that other tests need.
test: $(READY_INTEGRATIONS) ## run the tests but those of `make check` (SLOW=1: slow ones too; JOBS=0: in one process; ARGS=... for pytest)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(EXAMPLES) $(SHARED) $(NOT_SLOW) $(if $(ARGS),$(ARGS),--ignore=tests/architecture)

test-slow: $(READY_SERVERS) ## run all slow tests, folder by folder, and record them in tests/slow/last_run.md: hours (ARGS=tests/faults: that one)
	@$(BIN)/python -m tests.slow.run --jobs $(JOBS) whole $(ARGS)

test-slice: $(READY_SERVERS) ## run the slice of the slow tests that the hash of HEAD chooses (NUMBER=3: that one)
	@$(BIN)/python -m tests.slow.run --jobs $(JOBS) slice $(if $(NUMBER),--number $(NUMBER))

device-test: $(READY_DEVICE) ## test the kernels that hash on a GPU, without one: interpreted, and compiled for two GPUs: about three minutes
	@TRITON_INTERPRET=1 PYTHONPATH=$(DEVICE_PACKAGES) $(BIN)/python -m pytest -q --hypothesis-profile=ci $(DEVICE_TESTS)
	@PYTHONPATH=$(DEVICE_PACKAGES) $(BIN)/python -m pytest -q $(DEVICE_TESTS)/test_triton_kernels.py

gpu-test: $(READY_DEV) ## check and measure digests on the GPU of this machine; says so if there is none
	@$(BIN)/python -m bench.gpu_digest

servers: $(READY_SERVERS) ## install SeaweedFS, rclone and Azurite in .venv, for slow tests of object stores: about 400 MB
	@echo "ready: make test SLOW=1 ARGS=tests/servers"

check: $(READY_DOCS) ## format, lint, types, architecture, generated pages, the site
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy --strict $(CODE)
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python -m pytest -q tests/architecture
	@$(BIN)/python docs/build_site.py

matrix: $(READY_DEV) ## run the core tests with each pair of Python and torch, 5 GB a pair (PAIR=3.10-2.6: that one; ARGS=... for pytest)
	@$(BIN)/python -m tests.matrix.run $(PAIR) --jobs $(JOBS) $(if $(ARGS),-- $(ARGS))

mutants: $(READY_DEV) ## make small mistakes in the core, and record in tests/mutants/last_run.md which of them no test notices: hours
	@$(BIN)/python -m tests.mutants.run $(ARGS)

bench: $(READY_BENCH) ## compare with other formats, twenty minutes with two cores (QUICK=1: small sizes, one minute)
	@$(BIN)/python bench/run.py $(if $(QUICK),--quick)

docs: $(READY_DOCS) ## rewrite the generated pages and build the site in site/
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/build_site.py

site: $(READY_DOCS) ## build the site in site/ from the pages as they are
	@$(BIN)/python docs/build_site.py

dist: $(READY_DIST) ## build the wheel and the sdist of HEAD in dist/, and check them (TAG=v1.2.3: for a release)
	@$(BIN)/python release/dist.py $(if $(TAG),--tag $(TAG))

# PIP_CONSTRAINT and not -c: it also applies to the build backend.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || python3 -m venv .venv
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable .
	@touch $@

$(READY_DEV): $(READY)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The frameworks that tests of holdfast.integrations need. Not part of READY: `make demo` does not wait for them.
$(READY_INTEGRATIONS): $(READY_DEV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[accelerate,lightning,peft,transformers,deepspeed,ray,servers]' torchft tyro
# Without what it needs besides: its checkpoint code needs none of it, and its datasets excludes the pinned fsspec.
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps torchtitan torch_checkpointing torchdata spmd_types
	@touch $@

$(READY_BENCH): $(READY_DEV) bench/bucket-peers.txt bench/codec-peers.txt
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[peers]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv/bucket-peers -r bench/bucket-peers.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv/codec-peers -r bench/codec-peers.txt \
		|| echo "ZipNN could not be built: the suite deltas runs without it"
	@touch $@

$(READY_DOCS): $(READY_DEV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(READY_DIST): $(READY)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dist]'
	@touch $@

# Triton has 1 GB, and torch compiles in other ways where it is installed: only the tests of kernels see this folder.
$(READY_DEVICE): $(READY_DEV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(DEVICE_PACKAGES) triton
	@touch $@

# Azurite needs Node.js; without it, its tests are skipped.
$(READY_SERVERS): $(READY_INTEGRATIONS)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[programs]'
	@if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix .venv/servers $(AZURITE); \
		else echo "npm is not installed: without Azurite"; fi
	@touch $@
