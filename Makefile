# make train            train the demo model in FP8 (emulated without a GPU) and plot its loss
# make test             run the CPU tests in parallel; run one test: make test ARGS="-n 0 -k NAME"
# make lint             run ruff check and ruff format
# make test-gpu         run the tests that need one GPU with Transformer Engine
# make test-multi-gpu   run the tests that need two or more GPUs
#
# The first call creates .venv and installs requirements.txt into it. Python 3.10 or newer must be in PATH.
# Pass flags to the training: make train ARGS="--max_steps 50 --log_interval 1"
# Use an installed Python:    make train PYTHON=python3
# PYTHON is for machines whose python3 has torch and Transformer Engine, such as NVIDIA's containers: a new .venv
# would not see them. Install the other requirements there without replacing torch:
#   grep -v '^torch==' requirements.txt | python3 -m pip install -r /dev/stdin

SHELL := /bin/bash
ARGS ?=

ifdef PYTHON
PY := $(PYTHON)
else
PY := .venv/bin/python
INSTALLED := .venv/.installed
endif

.PHONY: help train test lint test-gpu test-multi-gpu

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# Print the precision flags for this machine. --help and wrong settings exit before torch is imported.
FP8_FLAGS := from fp8_suite.core.packages import start_command; start_command(); import sys; sys.argv[0] = "train_fp8.py"; \
  from fp8_suite.training.launch import parse_early; parse_early("ARGS has these flags:"); \
  import torch; from fp8_suite.training.precision.te_runtime import why_not_te; \
  print("--mixed_precision fp8" if torch.cuda.is_available() and why_not_te() else "--use_te --mixed_precision fp8")

# tee -i ignores Ctrl-C, because the run still prints while it saves a checkpoint and stops.
train: $(INSTALLED)
	@set -eo pipefail; \
	log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	fp8=$$($(PY) -c '$(FP8_FLAGS)' --config configs/demo.yaml $(ARGS)); \
	[[ $$fp8 == --* ]] || { echo "$$fp8"; exit; }; \
	(set -x; $(PY) train_fp8.py --config configs/demo.yaml $$fp8 $(ARGS)) | tee -i "$$log"; \
	$(PY) -m benchmarks.report "$$(sed -n 's/^run folder: //p' "$$log" | tail -n 1)"

# One process per core. Tests of one file share training runs, so they share a process. GPUs are hidden.
test: $(INSTALLED)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

test-gpu: $(INSTALLED)
	$(PY) -m pytest -m gpu $(ARGS)

test-multi-gpu: $(INSTALLED)
	$(PY) -m pytest -m multi_gpu $(ARGS)

.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "error: python3 in PATH must be Python 3.10 or newer, found: $$(python3 --version 2>&1)" >&2; exit 1; }
	@[ -x .venv/bin/python ] || python3 -m venv .venv || \
	{ rm -rf .venv; echo "error: cannot make .venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	.venv/bin/python -m pip install --quiet -r requirements.txt
	@touch $@
