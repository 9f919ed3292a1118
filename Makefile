# Everything a developer or CI does, one target each.  `make help` lists them with what they cost.
# On a machine with Python >= 3.10 and nothing else, each target first makes .venv and fills it.

VENV   := .venv
# A file at a time: what a file prepares for its tests is made once, not by each worker.  Three on two cores: tests of processes
# wait now and then.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
TRIAL  := $(VENV)/.trial
SITE   := $(VENV)/.site
# Left behind by a setup that was interrupted; holds the number of the process that is at work.
BUSY   := $(VENV)/.busy
PYTEST := $(PY) -m pytest
# Before every commit: the examples in docstrings, the structure, and the packages that all others are built on, but for files
# of tests that take seconds.  Two workers: these tests do not wait, and a worker more takes seconds to import and collect.
LONG   := architecture/test_mutants.py localtensor/collectives/trace localtensor/_util/test_opinfo.py \
          localtensor/lockstep/test_torch_lockstep.py \
          localtensor/lockstep/test_recorder.py localtensor/concurrency/test_single_flight_stress.py \
          strategies/torch_api/test_decompositions.py strategies/model/test_verdict_work_unit.py
FAST   := -n 2 --dist loadfile tests/architecture localtensor strategies \
          $(addprefix tests/localtensor/,_util layout collectives concurrency errors lockstep/comms lockstep/values) \
          $(filter-out $(addprefix tests/,$(LONG)),$(wildcard tests/localtensor/lockstep/test_*.py)) \
          $(addprefix tests/strategies/,model torch_api) \
          $(addprefix --ignore=tests/,$(LONG))
# What mypy reports, beside the tests; printed after them.
TYPES  := .mypy_cache/report.txt

# Hundreds of tests start Python anew: without its cache each such process would compile every module of ours once more.
export PYTHONDONTWRITEBYTECODE :=

# The first of these that runs and is new enough makes .venv; `make setup PYTHON=...` asks for one.
PYTHON  ?=
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python)

.DEFAULT_GOAL := help
.PHONY: help setup validate test check fix laws real bench rankbugs overloads rules coverage races plans mutants flaky branches \
        cuda pictures site docs clean

help: ## this list  (at once)
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv and install everything, once  (a minute or two, mostly torch; then at once)

validate: $(READY) ## validate every rule that torch's DTensor registers; wrong rules are a result  (some seven minutes)
	@$(VENV)/bin/localtensor validate --all --claims; code=$$?; \
	if [ $$code -eq 1 ]; then echo "make validate: done; it found wrong rules, listed above (exit code 1 of the tool)."; \
	elif [ $$code -ne 0 ]; then echo "make validate: the tool failed with exit code $$code; docs/validate.md has the table." >&2; exit $$code; fi

test: $(READY) ## the whole suite, on three workers; what CI runs  (some 6 minutes on two cores, twice that on slow ones)
	@$(PYTEST) $(WORKERS)

check: $(READY) ## format, lint, spelling, types, import contracts, fast tests; before every commit  (about a minute, the first time a little more)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/codespell
	$(VENV)/bin/lint-imports
	@mkdir -p $(dir $(TYPES)); $(PY) -m mypy > $(TYPES) 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
	$(PYTEST) -q $(FAST); tests=$$?; wait $$types; types=$$?; cat $(TYPES); [ $$types -eq 0 ] && exit $$tests

fix: $(READY) ## format, and repair what the linter can repair by itself  (a second)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

laws: $(READY) ## the slow tests, and the properties with new and many more draws than CI  (minutes)
	$(PYTEST) -n 2 --slow --hypothesis-profile=nightly tests/properties tests/localtensor
	$(PYTEST) -n 2 --slow -m "slow or few" tests/end_to_end tests/strategies tests/tools tests/architecture

real: $(READY) ## everything that is held against real gloo processes  (minutes)
	$(PYTEST) --slow tests/real

bench: $(READY) ## side by side with torch's own validator, and the planted wrong rules  (minutes)
	$(PY) -m tests.tools.bench

rankbugs: $(READY) ## planted faults in rank programs: how many lt.run finds, and explains  (under a minute)
	@$(PY) -m tests.tools.rankbugs

overloads: $(READY) ## every aten overload in lockstep, against a plain loop over the ranks  (about 10 minutes)
	@$(PY) -m tests.tools.overloads

rules: $(READY) ## validate every sharding rule of our own, at full strength: the exit code is 1 if one is wrong  (tens of minutes)
	@$(PY) -m strategies.ops

coverage: $(READY) ## our rules beside DTensor's on the 300 most used overloads  (minutes)
	@$(PY) -m strategies.ops --coverage

races: $(READY) ## a million interleavings over the shared cache, and ten million operations on it  (some 20 minutes)
	@$(PY) -m tests.tools.races.nightly
	@$(PY) -m tests.tools.races.stress

plans: $(READY) ## 100,000 random redistributions and every legal step, beside the definition; 2,000 on gloo  (some 15 minutes)
	@$(PY) -m tests.tools.plans --steps --real 2000
	@$(PY) -m tests.tools.plans.optimal

# What only these three need is installed when one of them first runs.
$(TRIAL): $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-build-isolation -c constraints.txt --editable '.[trial]'
	@touch $(TRIAL)

mutants: $(TRIAL) ## planted bugs, by hand and by Cosmic Ray: which do the tests not find?  (half an hour)
	@$(PY) -m tests.tools.mutants --minutes 30

flaky: $(TRIAL) ## the suite in twenty random orders; stopped, it goes on from flaky.jsonl  (hours)
	@$(PY) -m tests.tools.flaky --times 20 --journal flaky.jsonl

branches: $(TRIAL) ## branches of each package that the suite takes  (half an hour)
	@$(PY) -m tests.tools.branches

cuda: $(READY) ## with a GPU: the whole sweep on it, beside the CPU, real processes and the training programs; without: exit 3
	@$(PY) -m tests.tools.cuda

pictures: $(READY) ## docs/report.png, docs/terminal.svg and docs/trace_*.png anew; JOURNAL=sweep.jsonl photographs that sweep  (a minute)
	@$(PY) -m tests.tools.pictures $(JOURNAL)

# mkdocs and its theme are installed when the site is first built.
$(SITE): $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-build-isolation -c constraints.txt --editable '.[docs]'
	@touch $(SITE)

site: $(SITE) ## build the site of docs/ into build/site; warnings are errors  (some seconds)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs: $(SITE) ## write the pages that are generated, build the site, run every example  (some minutes)
	$(PY) -m tests.tools.api_page --write
	$(PY) -m tests.tools.command_page --write
	@$(MAKE) --no-print-directory site
	$(PYTEST) --slow localtensor strategies $(addprefix tests/end_to_end/,site test_readme.py test_docs.py test_api_page.py test_help.py)

clean: ## caches and built packages; .venv stays: delete it to start over  (at once)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# One shell does it all, and the stamp comes last: an interrupted setup leaves $(BUSY), and the next one
# starts over, because pip cannot tell a half-written package from a whole one.  If pip itself gives up
# (no network, say), what was there is left whole.  pip compiles on one core, compileall on all; what cannot be compiled
# (templates) is left as it is.
$(READY): pyproject.toml constraints.txt
	@set -eu; \
	say() { echo "make setup: $$*"; }; \
	if [ -f $(BUSY) ] && kill -0 "$$(cat $(BUSY))" 2>/dev/null; then \
	  say "process $$(cat $(BUSY)) is already at it: wait for it. If that is not a setup, delete $(BUSY)." >&2; exit 1; fi; \
	if [ -f $(BUSY) ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  look='import sys; print(getattr(sys, "_base_executable", sys.executable)); sys.exit(sys.version_info < (3, 10))'; \
	  found=; for python in $(PYTHONS); do \
	    if found=$$("$$python" -c "$$look" 2>/dev/null); then break; else found=; fi; done; \
	  if [ -z "$$found" ]; then \
	    say "found no Python >= 3.10 (tried: $(PYTHONS)). Install one, or name it: make setup PYTHON=/path/to/python" >&2; exit 1; fi; \
	  say "making $(VENV) with $$("$$found" --version)"; \
	  rm -f $(PY); rm -rf $(VENV); mkdir $(VENV); echo $$$$ > $(BUSY); \
	  "$$found" -m venv $(VENV) || { \
	    say "this Python cannot make virtual environments; on Debian and Ubuntu, install python3-venv." >&2; exit 1; }; \
	fi; \
	echo $$$$ > $(BUSY); \
	say "installing torch, the test tools and localtensor itself, in the versions of constraints.txt"; \
	fetch() { $(PY) -m pip install --quiet --disable-pip-version-check --no-input --no-compile -c constraints.txt "$$@" || { code=$$?; \
	  [ $$code -gt 128 ] || rm -f $(BUSY); say "pip could not install $$*; its reason stands above." >&2; exit $$code; }; }; \
	fetch setuptools; \
	fetch --no-build-isolation --editable '.[dev]'; \
	$(PY) -m compileall -qq -j 0 $(VENV)/lib || true; \
	rm -f $(BUSY); touch $(READY); \
	say "done; the command is $(VENV)/bin/localtensor"
