# make demo     install, train the demo, score it, say where the report is
# make test     install, then format check, lint, types and tests
# make proof    the slow proofs: random kills, memory over ten epochs of the demo, steps of every preset,
#               the server under load and 10,000 hostile requests, clusters of two hosts (as root, with
#               the packages that CONTRIBUTING.md names)
# make torture  ten minutes of kills, damaged files, nonsense, hostile names and full disks
# make kernels  GPU kernels without a GPU: against their references in Triton's interpreter, and
#               compiled for GPUs from the A100 to the RTX 50
# make bench    the ratio of training speed to a bare PyTorch loop
# make docs     write the generated pages

PYTHON ?= python3
BIN := .venv/bin
DEMO_RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test check proof torture kernels bench docs format clean

demo: .venv/installed
	$(BIN)/phalanx train demo --run-dir $(DEMO_RUN)
	$(BIN)/phalanx validate $(DEMO_RUN)
	@echo "look at $(DEMO_RUN)/report.html"

test: .venv/installed-dev check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: .venv/installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

proof: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

# TORTURE="--seed 7 --only 12" repeats a trial
torture: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python -m torture $(TORTURE)

KERNEL_TESTS := tests/kernels tests/products tests/mbconv tests/fused tests/inference tests/engine/test_fused_update.py
kernels: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'triton>=3.7,<3.9'
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(KERNEL_TESTS)
	$(BIN)/python -m pytest -n 2 -m slow tests/kernels/test_other_gpus.py

bench: .venv/installed
	$(BIN)/phalanx bench overhead

docs: .venv/installed
	$(BIN)/python scripts/write_docs.py

format: .venv/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Phalanx needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
