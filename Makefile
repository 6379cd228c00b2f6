# `make demo` and `make test` are all that a newcomer needs; each sets up what it uses.
PYTHON := .venv/bin/python
PYTEST_ARGS ?=
# Suites run side by side, three on two cores, since daemons wait more than they compute; those that need the same engine or kernel
# stay together (tests/conftest.py).
WORKERS ?= 3

.PHONY: demo test venv frameworks lint docs bench-cli bench-api bench-install bench-membership bench-jobs bench-slurm bench-ckptstore bench-guard bench-guard-gpu bench-provider bench-placement bench-sim clean

demo: venv
	$(PYTHON) -m mesh.cli demo $(DEMO_ARGS)

test: venv
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

venv: .venv/.ready

.venv/.ready: pyproject.toml .ci/venv
	bash .ci/venv
	touch $@

# For the tests of the tiers `frameworks` and `jupyter`, which are left out without it.
frameworks: .venv-frameworks/.ready

.venv-frameworks/.ready: .ci/frameworks | venv
	bash .ci/frameworks
	touch $@

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The site, in build/docs: from docs/ and the code, without a network. A dead link or anchor is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

bench-cli: venv
	$(PYTHON) tests/bench/cli.py

# The package in new environments. Two minutes; `BENCH_ARGS=--demo` adds a clone and its demo.
bench-install: venv
	$(PYTHON) tests/bench/install.py $(BENCH_ARGS)

# A minute.
bench-api: venv
	$(PYTHON) tests/bench/api.py

# Needs root, iproute2 and iptables; serf (Debian) and kinship (PyPI) run beside if they can be had. About an hour.
bench-membership: venv
	$(PYTHON) tests/bench/membership.py $(BENCH_ARGS)

# About twenty minutes; `BENCH_ARGS="--minutes 1 --queued 0"` is shorter.
bench-jobs: venv
	$(PYTHON) tests/bench/jobs.py $(BENCH_ARGS)

# Needs root and Debian's slurmctld, slurmd, slurm-client, munge. Ten minutes; `BENCH_ARGS="--rounds 1"` is shorter.
bench-slurm: venv
	$(PYTHON) tests/bench/slurm.py $(BENCH_ARGS)

# Restic, borgbackup, casync, rsync, zstd and iperf3 (Debian) run beside where they are installed. The checkpoints are made first, by
# torch (`make frameworks`). Three quarters of an hour; `BENCH_ARGS="--rounds 1 --on /dev/shm"` is shorter.
bench-ckptstore: venv frameworks
	$(PYTHON) tests/bench/ckptstore.py $(BENCH_ARGS)

# Needs a C compiler. Five minutes; `BENCH_ARGS="--seconds 5"` is shorter.
bench-guard: venv
	$(PYTHON) tests/bench/guard.py $(BENCH_ARGS)

# On a machine with an NVIDIA GPU; what needs PyTorch or CuPy is measured where the machine's Python or `make frameworks` has it with
# CUDA. Elsewhere it says so. `BENCH_ARGS="--seconds 5"` takes about ten minutes, `BENCH_ARGS="--only gate"` one part of it.
bench-guard-gpu: venv
	$(PYTHON) tests/bench/guard_gpu.py $(BENCH_ARGS)

# Needs root, iproute2 and clang. Two minutes; `BENCH_ARGS="--rows cut"` is shorter.
bench-provider: venv
	$(PYTHON) tests/bench/provider.py $(BENCH_ARGS)

# Traces lie outside the project (docs/survival.md says which): BENCH_ARGS="--traces DIR". Lifelines runs beside where it is installed.
# A minute.
bench-placement: venv
	$(PYTHON) tests/bench/placement.py $(BENCH_ARGS)

# SimPy (PyPI) runs beside. An hour; `BENCH_ARGS="--quick --seeds 0"` takes five minutes. `--python PATH` compares digests with another Python.
bench-sim: venv
	$(PYTHON) -m pip install --quiet "simpy>=4.1"
	$(PYTHON) -m tests.bench.sim $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-frameworks build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
