# make demo [MODEL=directory or hub name]   a conversation whose KV moves both ways, a cache that outlives its engine,
#                                           a library of documents served from disk; all checked
# make test [LEVELS="unit property"]        lint and all tests, quick levels first
# make dist                                 source archive and wheel in dist/, tried in an empty environment
# make docs                                 docs/options.md and docs/cache-kinds.md anew, from their definitions
# make site                                 the documentation as a web site in site/
# make venv                                 only the set-up, in .venv
#
# PYTHON       the python3 that .venv is made with (3.11 or later)
# VLLM_PYTHON  an interpreter that has vLLM and `pip install -e .[proxy,test]` already: used as it is, no .venv
PYTHON ?= python3
MODEL ?= models/recall-6m
LEVELS ?= unit property kernels engines chaos
PYTEST_ARGS ?=
DIST ?= dist

ifdef VLLM_PYTHON
PY := $(VLLM_PYTHON)
SETUP :=
HELM :=
else
PY := .venv/bin/python
SETUP := .venv/.installed
HELM := .venv/bin/helm
endif

# Hundreds of processes import the package and the tests: not each is to compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo dist docs site test lint clean

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

dist: $(SETUP)
	@$(PY) tools/dist.py $(DIST)

docs: $(SETUP)
	@$(PY) tools/docs_options.py
	@$(PY) tools/docs_kinds.py

site: $(SETUP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "The documentation is in site/index.html"

LINT = $(PY) -m ruff check . && $(PY) -m mypy
lint: $(SETUP)
	@$(LINT)

# Four files at a time, on two cores too: tests wait for messages, and for processes that start, die and hang. Lint runs
# beside the levels that compute. Chaos tests with engines are in files called test_engines_*. The others do not run
# beside the levels that compute, because some of them measure delays.
# Files are handed out in order: those that take longest first, or one of them would run alone at the end.
LONGEST := $(patsubst %,tests/engines/test_%.py,cache_kinds_engines sync_handoffs following docs_engines codecs node_store \
	sync_loads models sleep_engines conversations configurations node_store_models internal_errors several_nodes tiers) \
	tests/chaos/test_engines_deaths.py tests/chaos/test_engines_store.py
COMPUTES := $(patsubst %,tests/%,$(filter unit property kernels,$(LEVELS)))
ENGINES := $(foreach level,$(filter-out unit property kernels chaos,$(LEVELS)),$(wildcard tests/$(level)/test_*.py))
ifneq ($(filter chaos,$(LEVELS)),)
ENGINES += $(wildcard tests/chaos/test_engines_*.py)
WAITS := $(filter-out $(ENGINES),$(wildcard tests/chaos/test_*.py))
endif

# Without helm the tests of its chart are skipped.
.venv/bin/helm: tools/get_helm.py | .venv/.installed
	@$(PY) tools/get_helm.py || echo "no helm: the tests of examples/helm are skipped"

test: $(SETUP) $(HELM)
	@status=0; mkdir -p .cache; ($(LINT)) > .cache/lint.log 2>&1 & lint=$$!; \
	if [ -n "$(COMPUTES)" ]; then $(PY) -m pytest -n 4 --dist loadfile $(PYTEST_ARGS) $(COMPUTES) || status=$$?; fi; \
	if [ -n "$(WAITS)" ]; then $(PY) -m pytest -n 4 --dist loadfile $(PYTEST_ARGS) $(WAITS) || status=$$?; fi; \
	if [ -n "$(strip $(ENGINES))" ]; then $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) \
		$(foreach file,$(LONGEST),$(filter $(file),$(ENGINES))) $(filter-out $(LONGEST),$(ENGINES)) || status=$$?; fi; \
	wait $$lint || { status=$$?; cat .cache/lint.log; }; \
	exit $$status

clean:
	rm -rf .venv .cache build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
