# Everything a fresh machine needs is one of these: `make demo`, `make test`, `make lint`, `make bench`.
# Each makes .venv when it is missing and installs only what it lacks; a second run starts at once.
#
#   PYTHON       the interpreter that makes the virtual environment (3.10 to 3.13)
#   TORCH        the torch to install, e.g. `make test TORCH=torch==2.11.0`
#   TORCH_INDEX  where the CPU build of torch lies. If it cannot be reached, torch comes from where pip is
#                configured to look; `make test TORCH_INDEX=` asks there only
#   ARGS         more arguments for pytest or for the benchmark, e.g. `make test ARGS="-k softmax"`
#   WORKERS      processes that run the tests: a number, `auto` for one a core, or 0 for none beside pytest's
#                own, e.g. `make test WORKERS=0 ARGS="--pdb -k softmax"`

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
WORKERS ?= auto

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint bench clean

demo: $(STAMPS)/bench
	$(BIN)/python benchmarks/demo.py $(ARGS)

test: $(STAMPS)/test
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMPS)/bench
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis torch_compile_debug

# torch goes first and alone: the package's own dependency on it would fetch the build for CUDA.
# Its stamp is named after the version asked for, so that another TORCH installs another torch.
TORCH_STAMP := $(STAMPS)/$(subst =,-,$(TORCH))

$(TORCH_STAMP):
	@echo "== Setting up $(VENV): $(TORCH) with what it needs (hundreds of megabytes; a minute or two)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	rm -f $(STAMPS)/torch*
	$(if $(TORCH_INDEX),$(PIP) install --retries 1 --timeout 20 --index-url $(TORCH_INDEX) "$(TORCH)" ||) \
		$(PIP) install "$(TORCH)"
	@touch "$@"

# One stamp per extra of pyproject.toml.
$(STAMPS)/test $(STAMPS)/bench $(STAMPS)/dev: $(STAMPS)/%: pyproject.toml $(TORCH_STAMP)
	@echo "== Installing hotloop and what \`make $(or $(firstword $(MAKECMDGOALS)),demo)\` needs beside it into $(VENV) (about a minute, silent)"
	$(PIP) install --quiet -e ".[$*]"
	@echo "== Done; the next run starts at once"
	@touch "$@"
