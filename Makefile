# Everything runs in .venv, made by `make setup` with a Python of 3.11 or newer: make setup PYTHON=python3.11
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := build/demo

.PHONY: help setup demo test test-light test-hosts prove prove-list proof lint golden graphs config-keys snapshot lint-docs recipes docs readme build fit-cost bench-cost bench-schedule

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

setup: $(STAMP) ## make .venv with the pinned versions

# torch first and pinned: an open range would bring the newest CUDA build with gigabytes of libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make setup PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@

demo: setup ## compile a tiny Llama, pipeline 2 x tensor 2, and train it on this CPU
	$(BIN)/shardwright compile recipes/tiny-llama-cpu.yaml -o $(DEMO)
	$(BIN)/shardwright run $(DEMO) --resume never
	@echo
	@echo "the plan             $(DEMO)/plan.json"
	@echo "DeepSpeed's config   $(DEMO)/ds_config.json"
	@echo "a line a step        $(DEMO)/run/metrics.jsonl"
	@echo "the trained model    $(DEMO)/checkpoints"
	@echo
	@echo "what it writes, of Python's own sources, a byte at a time:"
	$(BIN)/shardwright generate $(DEMO)/checkpoints/step-00000150 --prompt "def __init__(self, " --tokens 200 --temperature 0.7

test: setup ## all tests but the full counts
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not prove and not hosts and not alone'
	$(BIN)/python -m pytest -m 'alone and not prove and not hosts'

# Another Python than .venv's, without torch: files that import none of it.
LIGHT := build/light-$(notdir $(PYTHON))
LIGHT_TESTS := tests/unit/recipe tests/unit/cli/test_render.py tests/unit/cluster \
	tests/unit/data/test_rows.py tests/unit/data/test_prepare.py tests/unit/lower/test_folder.py \
	tests/unit/partition/test_cuts.py tests/unit/partition/test_stages.py tests/unit/watch/test_events.py \
	tests/unit/watch/test_stall.py tests/unit/schedule/test_step.py tests/unit/test_safe_read.py \
	tests/lint/test_command.py tests/lint/test_fix.py tests/lint/test_rules.py tests/packaging/test_house.py

test-light: $(LIGHT)/.installed ## the tests that need no torch, under another Python: make test-light PYTHON=python3.12
	$(LIGHT)/bin/python -m pytest -n 2 --dist loadfile -p no:cacheprovider $(LIGHT_TESTS)

$(LIGHT)/.installed: pyproject.toml constraints.txt tools/light.py
	test -x $(LIGHT)/bin/python || $(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m tools.light > $(LIGHT)/requirements.txt
	$(LIGHT)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -r $(LIGHT)/requirements.txt
	$(LIGHT)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps -e .
	touch $@

test-hosts: setup ## hosts and schedulers that are not there, on this machine; needs root, installs Debian packages
	apt-get install -y -qq --no-install-recommends openssh-server pdsh iproute2 munge slurm-wlm openmpi-bin
	$(BIN)/python -m pytest -m 'hosts and not prove' tests/launch

prove: setup ## the full counts in pieces; those whose result in benchmarks/ is of this code are left out (PIECES="parity lora" runs only these, AGAIN=1 runs them anyway)
	$(BIN)/python -m tools.prove $(PIECES) $(if $(AGAIN),--again)

prove-list: setup ## the pieces of make prove: how old each result is and how long it took
	$(BIN)/python -m tools.prove --list

proof: setup ## docs/proof.md and the support matrix, from benchmarks/
	$(BIN)/python -m tools.proof
	$(BIN)/python -m tools.support_matrix

fit-cost: setup ## fit the cost model's constants to the published rows; writes cost/constants.json
	$(BIN)/python -m tools.fit_cost

bench-cost: setup ## the cost model against published runs, left out of the fit; writes benchmarks/cost.json
	$(BIN)/python -m tools.fit_cost.bench

bench-schedule: setup ## DeepSpeed's pipeline engines with sleeping stages against the simulation; writes benchmarks/schedule.json
	$(BIN)/python -m tools.bench_schedule

lint: setup ## ruff, mypy --strict, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: setup ## write tests/cases/*/expected anew; read the difference before you commit it
	$(BIN)/python -m pytest tests/cases --update-golden

graphs: setup ## trace the models that come with the package anew
	$(BIN)/python -m tools.write_graphs

config-keys: setup ## what the installed transformers takes in a model's configuration, for `check`
	$(BIN)/python -m tools.write_config_keys

snapshot: setup ## what the installed DeepSpeed takes in ds_config.json, for `lint`
	$(BIN)/python -m tools.write_snapshot

lint-docs: setup ## the table of rules in docs/lint.md
	$(BIN)/python -m tools.write_lint_docs

recipes: setup ## plans every ready recipe: the table of recipes/README.md, and tests/recipes/expected
	$(BIN)/python -m tools.plan_recipes

docs: setup ## docs/recipe.md, docs/rules.md and the tables of docs/cost-model.md
	$(BIN)/python -m tools.pages.write

readme: setup ## the outputs of commands that README.md and the other pages show
	$(BIN)/python -m tools.pages.readme

build: setup ## sdist and wheel in dist/
	$(BIN)/python -m build --no-isolation
