# Every target makes its own .venv if there is none, with the versions of constraints.txt.
#   make train   train a small GPT on 2 ranks, ZeRO stage 3, with live progress and a loss curve
#   make test    the whole test suite, docstring examples included
#   make gpu     on a machine with a GPU: kernels and steps are right there, and how fast they are
#   make bench   zfunc against DDP, FSDP2 and (where installed) DeepSpeed, interleaved in one run
#   make docs    the documentation as a site, in build/site
#   make docs-shots  its pages in a browser (Chromium): what is too wide, pictures in build/shots
#   make lint    ruff and mypy
#   make wheel   sdist and wheel into dist/
# Another interpreter: make test PYTHON=python3.12. More flags: make train ARGS="--stage 1".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
ARGS ?=

# Some shells ask Python to keep no bytecode. The suite starts hundreds of processes, of which each
# would compile torch and transformers anew: 20 s in place of 8 for one that loads a model.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test gpu bench docs docs-shots lint format wheel clean
.DEFAULT_GOAL := test

train: $(READY)
	$(BIN)/zfunc train $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# Both run, whatever the first finds; ten minutes in all, results in gpu-results/.
gpu: $(READY)
	@right=0; $(BIN)/python -m pytest -q tests/device || right=1; \
	  $(BIN)/python -m benchmarks.gpu --out gpu-results $(ARGS) || right=1; exit $$right

bench: $(READY)
	$(BIN)/python -m benchmarks.train_step $(ARGS)

docs: $(READY)
	$(BIN)/zensical build --clean --strict

docs-shots: docs
	$(BIN)/python -m tests.shots

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build

# The stamp is touched last: an install that was interrupted starts again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "zfunc needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	       "name another one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# --no-compile: Python compiles what it imports; pip would begin with all of torch.
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
