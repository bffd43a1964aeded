# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test lint lab-shell bench packages docs clean venv guest

venv: $(STAMP)

$(STAMP): Makefile pyproject.toml packaging/prerequisites
	packaging/prerequisites
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[daemon,cli,artifacts,postgres,httpx,mcp,openai-agents,deepagents,docs,clusters,test]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/python examples/demo

test: $(STAMP)
	tests/lab/run --tests

lint: $(STAMP)
	$(VENV)/bin/python -m pytest tests/test_linters.py

# Process 1 of a gVisor sandbox.
guest:
	mkdir -p build
	guest/build.sh build/sbx-guest-init

lab-shell:
	tests/lab/run --lane $(or $(LANE),container) --shell

bench: $(STAMP)
	tests/lab/run --lane container -- python3 -m tests.bench

packages: $(STAMP)
	$(VENV)/bin/python packaging/build

# The site, into build/site; a warning is an error.
docs: $(STAMP)
	$(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
