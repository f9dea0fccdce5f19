# Everything from nothing: `make demo` shows the main job, `make test` runs the tests. Both set up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo federation test slow lint torture bench docs clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	rm -rf demo
	$(BIN)/mooring advise parkinsons --out demo

federation: setup
	rm -rf demo/federation demo/federation.federation demo/clients
	$(BIN)/python -m benchmarks.client_tables write parkinsons demo/clients 8
	$(BIN)/mooring federation up demo/clients/run.toml --client-dir demo/clients/tables --embedded --out demo/federation
	$(BIN)/python -m benchmarks.client_tables compare demo/clients demo/federation

test: setup lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check mooring tests benchmarks
	$(BIN)/ruff format --check mooring tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

torture: setup
	$(BIN)/python -m benchmarks.torture

bench: setup
	$(BIN)/python -m benchmarks.speed $(if $(wildcard peers),--peers peers)

docs: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv demo site
