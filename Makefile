# make quickstart   install into .venv and train the quick-start model on this CPU     (OUT=folder SEED=n)
# make test         install into .venv and run the tests
# make install      install into .venv only
#
# PIP_OPTIONS is handed to pip: where the CPU build of torch is not on your index, add PyTorch's CPU wheel index as an extra one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_OPTIONS ?=
VENV := .venv
LOCK := requirements/cpu.lock
MEGARL := $(VENV)/bin/megarl
# Written last, with the lock's checksum: an environment without it was interrupted, one with another checksum is out of date.
COMPLETE := $(VENV)/.complete

SEED ?= 0
OUT ?= runs/quickstart
WARMUP := runs/quickstart-warmup$(if $(filter-out 0,$(SEED)),-seed$(SEED))

PYTEST_OPTIONS ?=

.PHONY: help install quickstart test test-slow lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install:
	@PYTHON='$(PYTHON)' PIP_OPTIONS='$(PIP_OPTIONS)' bash tools/install.sh '$(VENV)' '$(LOCK)' '$(COMPLETE)'

quickstart: install
	@echo "== 1/3  model and data in $(WARMUP)"
	@$(MAKE) --no-print-directory $(WARMUP)/model/config.json $(WARMUP)/data/train.jsonl
	@echo "== 2/3  supervised warm-up"
	@$(MAKE) --no-print-directory $(WARMUP)/sft/model/config.json
	@echo "== 3/3  reinforcement learning: yaml/quickstart.yaml into $(OUT)"
	@$(MEGARL) train yaml/quickstart.yaml --set output='$(OUT)' --set seed=$(SEED) --set model.path=$(WARMUP)/sft/model \
		--set data.train=$(WARMUP)/data/train.jsonl --set data.evaluation.countdown=$(WARMUP)/data/heldout.jsonl

$(WARMUP)/model/config.json:
	$(MEGARL) create model tiny-qwen3 --output $(WARMUP)/model --seed $(SEED)

$(WARMUP)/data/train.jsonl:
	$(MEGARL) create data countdown-tiny --output $(WARMUP)/data --seed $(SEED)

$(WARMUP)/sft/model/config.json: | $(WARMUP)/model/config.json $(WARMUP)/data/train.jsonl
	@rm -rf $(WARMUP)/sft
	$(MEGARL) sft yaml/quickstart_sft.yaml --set output=$(WARMUP)/sft --set seed=$(SEED) --set model.path=$(WARMUP)/model \
		--set data.train=$(WARMUP)/data/train.jsonl

test: install
	@echo "== tests"
	@$(VENV)/bin/python -m pytest -m "not slow" $(PYTEST_OPTIONS)

test-slow: install
	@$(VENV)/bin/python -m pytest -m slow $(PYTEST_OPTIONS)

lint: install
	@$(VENV)/bin/ruff check megarl tests benchmarks examples

clean:
	rm -rf $(VENV) build *.egg-info
