# Everything here runs on a fresh machine with Python 3.11; .venv is made on first use (about 5 minutes, 3.5 GB).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo ray-demo bench test venv check test-full soak fuzz clean

help:
	@echo "make demo       answer a few prompts with plain vLLM and with trees, side by side (2 minutes after set-up)"
	@echo "make ray-demo   two replicas of the same model behind one address, on Ray Serve, with the numbers of each (2 minutes)"
	@echo "make bench      plain vLLM, trees, vLLM's own speculation and Hugging Face on the demo's model, interleaved (some 25 minutes, estimated)"
	@echo "make test       linters, types and the test suite (about 25 minutes)"
	@echo "make venv       the virtual environment alone (5 minutes, 3.5 GB; a second run takes a second)"
	@echo "make check      linters and types alone (1 minute)"
	@echo "make test-full  the suite and its slow part on tiny models: every tree shape, batch size and block offset, compiled mode"
	@echo "make soak       15 minutes of load: 64 clients, a K/V pool that preempts all the time, every text compared (MINUTES=15)"
	@echo "make fuzz       malformed HTTP requests drawn from the server's own schema, compared with plain vLLM (10 minutes)"
	@echo "make clean      remove .venv and caches"

venv:
	@$(PYTHON) vllm_eagle/setup_env.py $(VENV)

demo: venv
	@$(BIN)/vllm-eagle demo

ray-demo: venv
	@$(BIN)/vllm-eagle ray-demo

bench: venv
	@$(BIN)/vllm-eagle bench --out $(or $(OUT),bench-results)

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/mypy

test: check
	@$(BIN)/python -m pytest

test-full: venv
	@$(BIN)/python -m pytest -m "slow or not slow"

soak: venv
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),15)

fuzz: venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check "schemathesis>=4.32,<5"
	@$(BIN)/python -m tests.fuzz

clean:
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
