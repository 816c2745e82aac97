PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.dpbench-installed
OLDEST := .venv-oldest
PYTEST := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help run reproduce smoke test oldest slow bench lint format clean
BUDGET := 10m

help:  ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

# The environment is made once and again only when what it must hold changes.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dpbench needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Making $(VENV) (several GB with PyTorch; a few minutes, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,sweeps]'
	@touch $@

run: $(READY)  ## DP-SGD and DiSK on the embedded digits at eps=8
	$(BIN)/python -m dpbench.run algo=dpsgd,disk eps=8 -m

reproduce: $(READY)  ## what of the papers fits into BUDGET=10m (empty: no end); PAPER=disk; ARGS="device=cuda ..."; again to go on
	$(BIN)/python -m dpbench.reproduce $(if $(BUDGET),budget=$(BUDGET)) $(if $(PAPER),paper=$(PAPER)) $(ARGS)

smoke: $(READY)  ## a few steps of one cell of every table and figure (minutes), with made-up data where none are here
	$(BIN)/python -m dpbench.reproduce smoke=true $(if $(PAPER),paper=$(PAPER)) $(ARGS)

test: $(READY) lint  ## the tests (12 to 20 minutes on two cores), after the linter and the type checker
	$(BIN)/python -m pytest $(PYTEST)

# Lower bounds are promises, too: an environment of the oldest versions that they allow, by uv, which pip can't make.
oldest:  ## the tests with the oldest versions that pyproject.toml allows, in .venv-oldest (half an hour on two cores)
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable '.[dev,sweeps]'
	$(OLDEST)/bin/python -m pytest $(PYTEST)

slow: $(READY)  ## the tests that take minutes each
	$(BIN)/python -m pytest -n 2 -m slow

bench: $(READY)  ## time and memory of a private gradient, dpbench beside others (about ten minutes on two cores)
	$(BIN)/python -m benchmarks

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches; results stay
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache
