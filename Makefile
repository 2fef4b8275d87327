# make demo [MODEL=directory or hub name]   a conversation whose KV moves both ways, a cache that outlives its engine,
#                                           a library of documents served from disk; all checked
# make test [LEVELS="unit property"]        lint and all tests, quick levels first
# make docs                                 docs/options.md anew, from where the options are defined
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
.PHONY: help venv demo docs test lint clean

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

docs: $(SETUP)
	@$(PY) tools/docs_options.py

lint: $(SETUP)
	@$(PY) -m ruff check .

# What starts no engines runs two files at a time; engines want the machine for themselves.
QUICK := $(filter unit property kernels,$(LEVELS))
ALONE := $(filter-out unit property kernels,$(LEVELS))

test: lint
	@status=0; \
	if [ -n "$(QUICK)" ]; then $(PY) -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) $(QUICK:%=tests/%) || status=$$?; fi; \
	if [ -n "$(ALONE)" ]; then $(PY) -m pytest $(PYTEST_ARGS) $(ALONE:%=tests/%) || status=$$?; fi; \
	exit $$status

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
