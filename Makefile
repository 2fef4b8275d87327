# make demo [MODEL=directory or hub name]   a conversation whose KV moves both ways, a cache that outlives its engine,
#                                           a library of documents served from disk; all checked
# make test [LEVELS="unit property"]        lint and all tests, quickest level first
# make venv                                 only the set-up, in .venv
#
# PYTHON       the python3 that .venv is made with (3.11 or later)
# VLLM_PYTHON  an interpreter that has vLLM and `pip install -e .[proxy,test]` already: used as it is, no .venv
PYTHON ?= python3
MODEL ?= models/recall-6m
LEVELS ?= unit property kernels engines chaos
PYTEST_ARGS ?=

ifdef VLLM_PYTHON
PY := $(VLLM_PYTHON)
SETUP :=
else
PY := .venv/bin/python
SETUP := .venv/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

venv: .venv/.installed

# The stamp is written last, so that an interrupted set-up is done again.
.venv/.installed: setup.py tools/install_cpu.py
	@echo "Setting up .venv: several minutes the first time, nothing after that."
	@rm -f $@
	$(PYTHON) -m venv .venv
	.venv/bin/python tools/install_cpu.py
	@touch $@

demo: $(SETUP)
	@$(PY) examples/multiturn_demo.py --model "$(MODEL)"
	@$(PY) examples/host_cache_demo.py --model "$(MODEL)"
	@$(PY) examples/document_library.py --model "$(MODEL)"

lint: $(SETUP)
	@$(PY) -m ruff check .

test: lint
	@$(PY) -m pytest $(PYTEST_ARGS) $(wildcard $(LEVELS:%=tests/%))

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
