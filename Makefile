# Two commands do everything: `make search` and `make test`. Both set up .venv on first use.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
BIN := .venv/bin
CONFIG ?= configs/petridish.yml

.PHONY: search test test-all lint format docs wheel benchmark clean

search: .venv/installed
	$(BIN)/nni-petridish run $(CONFIG) --resume

test: lint
	$(BIN)/python -m pytest -n 3 -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n 3

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed
	$(BIN)/mkdocs build --quiet

# With the compiled kernels, so that its users need no compiler.
wheel: .venv/installed
	NNI_PETRIDISH_KERNELS="x86-64-v2 x86-64-v3 x86-64-v4" \
	  $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

benchmark: .venv/installed
	$(BIN)/python benchmarks/weak_learning.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# The mark is made last, so that an interrupted installation is done again.
.venv/installed: setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed but none was found."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed but $(PYTHON) is $$($(PYTHON) -V 2>&1); name another one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) lacks the module venv; install it (Debian, Ubuntu: apt-get install python3-venv)."; exit 1; }
	@echo "Setting up .venv with $(PYTHON): a few minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@
