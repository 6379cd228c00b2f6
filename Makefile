# A newcomer needs only `make demo` and `make test`. Each sets up what it uses.
PYTHON := .venv/bin/python
PYTEST_ARGS ?=
# Tests start thousands of Python processes. Without cached byte code, each compiles its modules: a third of a daemon's start.
unexport PYTHONDONTWRITEBYTECODE
# Five workers on two cores, since daemons wait more than they compute. The tests of a file stay on one worker, since many share a
# mesh; files start in the order of tests/conftest.py.
WORKERS ?= 5
# Tier `long` runs where it is required, as in CI (CONTRIBUTING.md).
LEFT_OUT := slow$(if $(findstring long,$(MESH_REQUIRE_TIERS)),, or long)

.PHONY: demo test test-slow test-machines adversary mutants venv frameworks lint lock audit docs release bench-cli bench-api bench-install bench-membership bench-jobs bench-arrays bench-slurm bench-ckptstore bench-data bench-guard bench-guard-gpu bench-provider bench-placement bench-sim bench-scale bench-adversary bench-environments bench-images clean

# A smaller environment than the tests', unless theirs is there.
demo: $(if $(wildcard .venv/.ready),venv,.venv/.demo)
	$(PYTHON) -m mesh.cli debug demo $(DEMO_ARGS)

.venv/.demo: pyproject.toml .ci/venv
	bash .ci/venv demo
	touch $@

test: venv
	$(PYTHON) -m pytest -m "not ($(LEFT_OUT))" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Negative controls of the simulator (each takes one rule out and plays seeds until a checker notices), its later seeds, variants of the
# framework trainings, MLflow, tutorials with PyTorch and JAX, and the demo in containers. Forty minutes.
test-slow: venv
	$(PYTHON) -m pytest -m slow -n $(WORKERS) --timeout 1800 $(PYTEST_ARGS)

# Whole machines of Debian sid and trixie under QEMU: the wheel, the engines, a mesh of two. Writes docs/platforms.md. Needs root, the
# network, and Debian's mmdebstrap, qemu-system-x86, qemu-utils and e2fsprogs. An hour; `MACHINES_ARGS="--only sid --keep"` is shorter.
test-machines: venv
	$(PYTHON) -m tests.machines $(MACHINES_ARGS)

# 100,000 generated requests of a hostile member against real daemons; `make test` sends 1,000. Fifteen minutes.
adversary: venv
	ADVERSARY_REQUESTS=$${ADVERSARY_REQUESTS:-100000} $(PYTHON) -m pytest --timeout 3600 tests/adversary $(PYTEST_ARGS)

# Breaks one rule of safety at a time and lists those that no test notices; `make test` tries ten each day. Half an hour;
# `MUTANTS_ARGS="--only store --jobs 2"` tries one area.
mutants: venv
	$(PYTHON) -m tests.mutants --json $(MUTANTS_ARGS)

venv: .venv/.ready

.venv/.ready: pyproject.toml .ci/venv
	bash .ci/venv dev
	touch .venv/.demo $@

# Needed by the test tiers `frameworks`, `jupyter`, `trackers` and `jax`, which are skipped without it.
frameworks: .venv-frameworks/.ready

.venv-frameworks/.ready: .ci/frameworks | venv
	bash .ci/frameworks
	touch $@

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

# Pins what a release installs, with hashes, in .ci/requirements.lock. A test checks that it fits pyproject.toml.
lock:
	bash .ci/lock

# Known vulnerabilities of the locked packages. Needs the network.
audit:
	bash .ci/audit

# The documentation site in build/docs, built without a network. A dead link or anchor is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# Checks, source archive, wheel and SHA256SUMS in dist/ (docs/how-to/release.md). RELEASE_FAST=1 leaves out lint and tests: a dry run.
release:
	bash .ci/release

bench-cli: venv
	$(PYTHON) tests/bench/cli.py

# Installs the package into new environments. Two minutes; `BENCH_ARGS=--demo` adds a clone and its demo.
bench-install: venv
	$(PYTHON) tests/bench/install.py $(BENCH_ARGS)

# A minute.
bench-api: venv
	$(PYTHON) tests/bench/api.py

# Needs root, iproute2 and iptables; compares with serf (Debian) and kinship (PyPI) where they can be installed. About an hour.
bench-membership: venv
	$(PYTHON) tests/bench/membership.py $(BENCH_ARGS)

# About twenty minutes; `BENCH_ARGS="--minutes 1 --queued 0"` is shorter.
bench-jobs: venv
	$(PYTHON) tests/bench/jobs.py $(BENCH_ARGS)

# Compares with GNU parallel, and as root with Slurm (the packages of bench-slurm), where they are installed. Ten minutes;
# `BENCH_ARGS="--jobs 100 --rounds 1"` is shorter.
bench-arrays: venv
	$(PYTHON) tests/bench/arrays.py $(BENCH_ARGS)

# Needs root and Debian's slurmctld, slurmd, slurm-client, munge. Ten minutes; `BENCH_ARGS="--rounds 1"` is shorter.
bench-slurm: venv
	$(PYTHON) tests/bench/slurm.py $(BENCH_ARGS)

# Compares with restic, borgbackup, casync, rsync, zstd and iperf3 (Debian) where they are installed. PyTorch makes the checkpoints
# first (`make frameworks`). 45 minutes; `BENCH_ARGS="--rounds 1 --on /dev/shm"` is shorter.
bench-ckptstore: venv frameworks
	$(PYTHON) tests/bench/ckptstore.py $(BENCH_ARGS)

# Compares with rsync, restic, zstd and aria2 (Debian) where they are installed; streaming needs root. Five minutes; issue-sized: `BENCH_ARGS="--gib 10 --files 100000"`.
bench-data: venv
	$(PYTHON) tests/bench/data.py $(BENCH_ARGS)

# Needs a C compiler. An hour; `BENCH_ARGS="--seconds 5"` is shorter, `BENCH_ARGS="--only mixes"` runs one part.
bench-guard: venv
	$(PYTHON) tests/bench/guard.py $(BENCH_ARGS)

# Needs an NVIDIA GPU. Rows that need a framework with CUDA are measured where the system's Python or `make frameworks` has it.
# An hour; `BENCH_ARGS="--seconds 1"` is shorter, `BENCH_ARGS="--only gate"` runs one part.
bench-guard-gpu: venv
	$(PYTHON) tests/bench/guard_gpu.py $(BENCH_ARGS)

# Needs root, iproute2 and clang. Two minutes; `BENCH_ARGS="--rows cut"` is shorter.
bench-provider: venv
	$(PYTHON) tests/bench/provider.py $(BENCH_ARGS)

# Traces are not in the repository (docs/explanation/survival.md names them): BENCH_ARGS="--traces DIR". Compares with lifelines where it is installed.
# A minute.
bench-placement: venv
	$(PYTHON) tests/bench/placement.py $(BENCH_ARGS)

# Floods at the port between nodes, and the cost of a call. Three minutes; `BENCH_ARGS=--quick` sends a tenth.
bench-adversary: venv
	$(PYTHON) tests/bench/adversary.py $(BENCH_ARGS)

bench-scale: venv
	$(PYTHON) tests/bench/scale.py $(BENCH_ARGS)

# Compares with SimPy (PyPI). An hour; `BENCH_ARGS="--quick --seeds 0"` takes five minutes. `--python PATH` compares digests with
# another Python.
bench-sim: venv
	$(PYTHON) -m pip install --quiet "simpy>=4.1"
	$(PYTHON) -m tests.bench.sim $(BENCH_ARGS)

# Needs root, dockerd, docker-registry and skopeo (Debian). Two minutes; `BENCH_ARGS="--rounds 1"` is shorter.
bench-environments: venv
	$(PYTHON) -m tests.bench.environments $(BENCH_ARGS)

bench-images: venv
	$(PYTHON) -m tests.bench.images $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-frameworks build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
