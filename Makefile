# Everything from nothing: `make demo` shows the main job, `make test` runs the tests. All targets set up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations 10 --durations-min 1
ALONE := $(BIN)/python -m pytest --durations 10 --durations-min 1

unexport PYTHONDONTWRITEBYTECODE  # every worker and every process of a test would compile the package again

.PHONY: setup demo federation test check check-papers check-processes check-browser check-docs check-slow lint torture bench docs release clean

setup: .venv/ready

.venv/ready: pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./papers
	touch $@

demo: setup
	rm -rf demo
	$(BIN)/mooring advise flights --out demo

federation: setup
	rm -rf demo/federation demo/federation.federation demo/clients
	$(BIN)/python -m benchmarks.client_tables write parkinsons demo/clients 8
	$(BIN)/mooring federation up demo/clients/run.toml --client-dir demo/clients/tables --out demo/federation
	$(BIN)/python -m benchmarks.client_tables compare demo/clients demo/federation

# What every change must pass, with `make lint`: the tests that need neither processes, a browser nor minutes.
test: setup
	$(PYTEST) -m "not (slow or processes or browser or docs)"

# Everything else; each part can be run by itself.
check: lint check-papers check-processes check-browser check-docs check-slow

check-papers: setup  # the reproduction of the papers, a distribution of its own in papers/
	$(PYTEST) -m "not (slow or processes)" papers/tests

check-processes: setup  # one at a time: they measure how long processes take
	$(ALONE) -m "processes and not slow" tests papers/tests

check-browser: setup
	$(PYTEST) -m "browser and not slow"

check-docs: setup
	$(PYTEST) -m "docs and not slow"

check-slow: setup
	$(ALONE) -m slow tests papers/tests

lint: setup  # style, types, layers
	$(BIN)/ruff check mooring papers tests benchmarks
	$(BIN)/ruff format --check mooring papers tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

torture: setup
	$(BIN)/python -m benchmarks.torture

bench: setup
	$(BIN)/python -m benchmarks.speed $(if $(wildcard peers),--peers peers)

docs: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict
	$(BIN)/mkdocs build --strict --config-file papers/mkdocs.yml

# The source archives and the wheels of both distributions, checked, and Mooring's wheel tried in an environment of its own.
release: setup
	rm -rf build papers/build dist
	$(BIN)/pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist papers
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

clean:
	rm -rf .venv demo site build dist
