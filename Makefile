# `make` lists the targets. Everything is set up by the first that needs it, in .venv and in the cache folder
# ($VLLM_EXT_CACHE, by default ~/.cache/vllm_ext); what is done is not done again.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

BIN := .venv/bin
# As for a small CPU machine without network; what the environment already sets, wins.
ENV := VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1} HF_HUB_OFFLINE=$${HF_HUB_OFFLINE:-1} \
       VLLM_NO_USAGE_STATS=$${VLLM_NO_USAGE_STATS:-1} TOKENIZERS_PARALLELISM=$${TOKENIZERS_PARALLELISM:-false}

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test unit lint format wheel clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1@\2/p' Makefile | column -t -s @
	@echo "  ARGS='...' is handed on by serve, demo, test and unit; PORT=, PYTHON=/path/to/python3.11"

setup: ## .venv with vLLM's CPU build, the tools, this project; the model
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 is needed: make PYTHON=/path/to/python3.11 ..." if sys.version_info < (3, 8) else 0)'
	@$(PYTHON) tools/bootstrap.py

serve: setup ## vLLM with the plugin and policies/demo.yaml on 127.0.0.1:8000, and two curl lines to try
	@$(BIN)/python tools/serve.py --port $(PORT) $(ARGS)

demo: setup ## two tenants on a server of its own; prints what each reused, and stops it
	@$(BIN)/python tools/demo.py $(ARGS)

test: setup ## all tests (ARGS='tests/unit -k salt' for some)
	$(ENV) $(BIN)/python -m pytest $(or $(ARGS),tests)

unit: setup ## the tests that need no engine (a minute)
	$(ENV) $(BIN)/python -m pytest tests -m unit $(ARGS)

lint: setup ## ruff, mypy, import boundaries
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict vllm_ext
	$(BIN)/mypy plugins/vllm_ext_plugin
	$(BIN)/mypy tools
	$(BIN)/lint-imports --no-logo

format: setup ## mends what ruff can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup ## dist/vllm_ext-*.whl and the source archive
	$(BIN)/python -m build --no-isolation

clean: ## removes .venv, dist and caches of this clone; keeps the model in the cache folder
	rm -rf .venv .setup.lock dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
