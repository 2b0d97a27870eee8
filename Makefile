# Each command sets up .venv by itself the first time; only Python 3.10 or newer and the network are needed.
#
#   make demo                    several prompts generated at once by a small real model, through portattn
#   make test                    the project's tests and the quick conformance level
#   make lint                    ruff
#
#   make demo ARGS="--help"      ARGS is passed on, for test to pytest
#   make demo PYTHON=python3.12  the Python to use
#   make demo TORCH=existing     use the torch that $(PYTHON) already has (a CUDA or ROCm build, say); TORCH=2.6.0: that version;
#                                TORCH=2.13.0+rocm7.2: PyTorch's build of it for ROCm, from the index that PIP_EXTRA_INDEX_URL names
#
# Without make (Windows): python tools/dev.py demo

PYTHON ?= python3
ARGS ?=

.PHONY: demo test lint setup clean
demo test lint setup:
	@command -v "$(PYTHON)" >/dev/null || { echo "portattn: there is no $(PYTHON) here; install Python 3.10 or newer, or name it: make $@ PYTHON=/path/to/python3" >&2; exit 1; }
	@TORCH="$(TORCH)" "$(PYTHON)" tools/dev.py $@ $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
