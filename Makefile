# Everything runs in .venv, made by `make setup` with a Python of 3.11 or newer: make setup PYTHON=python3.11
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := build/demo

.PHONY: help setup demo test test-more test-newest test-light install-light test-hosts prove prove-megatron prove-list proof-page lint lint-light generated golden build fit-cost bench-cost bench-schedule bench-gpu

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

# A file stays on one worker, whose fixtures its tests share. pytest-xdist would
# reorder files by how many tests they have: those of few and long tests would come last, on one worker.
BY_FILE := --dist loadfile --no-loadscope-reorder
QUICK := not launch and not browser and not prove and not hosts
MORE := (launch or browser) and not prove and not hosts
# The other files are not imported, which takes longer than some launches.
MORE_FILES = $(shell grep -lrE 'mark\.(launch|browser)\b' tests --include='test_*.py')

test: setup ## minutes: unit tests, golden plans and folders, lint's probes; skips are named with their reason at the end
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -m '$(QUICK)'

test-more: setup ## minutes: a launched run of each engine and each feature, the pages' commands, the report in a browser
	$(BIN)/python -m pytest -n 3 $(BY_FILE) -m '$(MORE)' $(MORE_FILES)

# Another Python than .venv's, without torch: a test that comes to import it is skipped
# (tests/missing_packages.py).
LIGHT := build/light-$(notdir $(PYTHON))

test-light: $(LIGHT)/.installed ## the tests that need no torch, under another Python: make test-light PYTHON=python3.13
	$(LIGHT)/bin/python -m pytest -n 2 $(BY_FILE) -p no:cacheprovider -m '$(QUICK)'

lint-light: $(LIGHT)/.installed ## ruff and import directions, under another Python (mypy wants torch's types): make lint-light PYTHON=python3.13
	$(LIGHT)/bin/ruff check .
	$(LIGHT)/bin/ruff format --check .
	$(LIGHT)/bin/lint-imports

install-light: $(LIGHT)/.installed

$(LIGHT)/.installed: pyproject.toml constraints.txt tools/light_requirements.py
	test -x $(LIGHT)/bin/python || $(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m tools.light_requirements > $(LIGHT)/requirements.txt
	$(LIGHT)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -r $(LIGHT)/requirements.txt
	$(LIGHT)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps -e .
	touch $@

test-hosts: setup ## hosts and schedulers that are not there, on this machine; needs root, installs Debian packages
	apt-get install -y -qq --no-install-recommends openssh-server pdsh iproute2 munge slurm-wlm openmpi-bin
	$(BIN)/python -m pytest -m 'hosts and not prove' tests/launch

# The versions of a plain `pip install` today. torch is held: newer ones on PyPI are CUDA builds of gigabytes.
NEWEST := build/newest
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
VERIFY := $(NEWEST)/bin/shardwright verify
TWO_RANKS := --set cluster.gpus_per_node=2
DATA_RANKS := $(TWO_RANKS) --set parallelism.pipeline=1 --set parallelism.tensor=1 --set parallelism.data=2

test-newest: ## the newest allowed packages in a fresh environment, one launched run of each kind of layout: 10 to 20 minutes
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -q torch==$(TORCH)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -q --upgrade --upgrade-strategy eager torch==$(TORCH) -e '.[test]'
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(accelerate|datasets|deepspeed|megatron-core|peft|torch|torchao|transformers|trl) '
	$(VERIFY) recipes/tiny-gpt2-cpu.yaml $(TWO_RANKS) --set parallelism.data=1
	$(VERIFY) recipes/tiny-llama-cpu.yaml $(TWO_RANKS) --set parallelism.pipeline=1
	$(VERIFY) recipes/tiny-llama-cpu.yaml $(DATA_RANKS) --set parallelism.zero_stage=3
	$(VERIFY) recipes/tiny-llama-cpu.yaml $(DATA_RANKS) --set lora.rank=4 --set lora.alpha=8
	$(VERIFY) recipes/tiny-long-cpu.yaml --set data.packing=true
	$(VERIFY) recipes/tiny-moe-cpu.yaml $(TWO_RANKS) --set parallelism.pipeline=1
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -m 'launch and not prove' tests/megatron/test_parity.py tests/zoo/test_vision_language.py tests/parity/test_low_precision.py::test_low_precision_trains_as_one_plain_process
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider tests/unit/utils/test_private_names.py tests/unit/engines/test_reference.py

prove: setup ## the full counts in pieces, hours in all; what has passed on these files is left out (PIECES="parity lora" or FOR="checkpoint vision" for a part, JOBS=3 at a time, AGAIN=1 for all)
	$(BIN)/python -m tools.prove $(PIECES) --for $(FOR) --jobs $(or $(JOBS),1) $(if $(AGAIN),--again)

# Megatron-Core 0.19 wants Python 3.12, for which PyPI's torch is the CUDA build: about 5 GB, of which nothing runs.
LATER := build/megatron-3.12

prove-megatron: $(LATER)/.installed ## parity, megatron_args.sh and refused layouts with Megatron-Core 0.19, under Python 3.12: make prove-megatron PYTHON=python3.12
	$(LATER)/bin/python -m pytest -p no:cacheprovider -m launch tests/megatron/test_later.py tests/megatron/test_proof.py tests/megatron/test_transformer_engine.py tests/megatron/test_low_precision.py 'tests/megatron/test_arguments.py::test_megatron_refuses_what_its_parser_lets_through'

$(LATER)/.installed: pyproject.toml constraints.txt
	test -x $(LATER)/bin/python || $(PYTHON) -m venv $(LATER)
	$(LATER)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(LATER)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[lora,megatron]' pytest hypothesis
	touch $@

prove-list: setup ## the pieces of make prove (PIECES=, FOR=)
	$(BIN)/python -m tools.prove --list $(PIECES) --for $(FOR)

proof-page: setup ## docs/proof.md and the tables of support, from what make prove found
	$(BIN)/python -m tools.generate support_matrix
	$(BIN)/python -m tools.generate.proof_page

fit-cost: setup ## fit the cost model's constants to the published rows; writes cost/constants.json
	$(BIN)/python -m tools.fit_cost

bench-cost: setup ## the cost model against published runs, left out of the fit; writes benchmarks/cost.json
	$(BIN)/python -m tools.fit_cost.bench_cost

bench-schedule: setup ## DeepSpeed's pipeline engines with sleeping stages against the simulation; writes benchmarks/schedule.json
	$(BIN)/python -m tools.bench_pipeline_schedule

bench-gpu: ## predicted and measured on one GPU, beside the HF Trainer: pieces of at most MINUTES=9, gone on with; writes benchmarks/gpu.json
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tools.bench_gpu --minutes $(or $(MINUTES),9) $(LAYOUTS)

lint: setup ## ruff, mypy --strict, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

generated: setup ## after any change: every generated file anew; read the difference (ONLY="docs_pages golden" runs these generators alone)
	$(BIN)/python -m tools.generate $(ONLY)

golden: setup ## tests/cases/*/expected alone
	$(BIN)/python -m tools.generate golden

build: setup ## sdist and wheel in dist/
	$(BIN)/python -m build --no-isolation
