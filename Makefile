# `make demo` and `make test` are all that a newcomer needs; each sets up what it uses.
PYTHON := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: demo test venv lint bench-cli bench-membership bench-jobs clean

demo: venv
	$(PYTHON) -m mesh.cli demo $(DEMO_ARGS)

test: venv
	$(PYTHON) -m pytest $(PYTEST_ARGS)

venv: .venv/.ready

.venv/.ready: pyproject.toml .ci/venv
	bash .ci/venv
	touch $@

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench-cli: venv
	$(PYTHON) tests/bench/cli.py

# Needs root, iproute2 and iptables; serf (Debian) and kinship (PyPI) run beside if they can be had. About an hour.
bench-membership: venv
	$(PYTHON) tests/bench/membership.py $(BENCH_ARGS)

# About twenty minutes; `BENCH_ARGS="--minutes 1 --queued 0"` is shorter.
bench-jobs: venv
	$(PYTHON) tests/bench/jobs.py $(BENCH_ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
