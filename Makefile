# `make run` runs a federation, `make test` checks everything; both set up .venv first.
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
AUDIT := .venv-audit
FLOWER := .venv-flower
NEWEST_FLOWER := 1.42.0
SOURCES := fl_strategies clients simulations reproduction tests benchmarks examples apps
USUAL := not paper and not deployment and not faults and not slow and not wheel

PARTIES := tests/attacks tests/clients tests/fuzz tests/simulations tests/reproduction
PROCESSES := tests/flower tests/faults tests/repository/test_bench.py

.PHONY: install run test test-logic test-parties test-processes lint test-slow test-flower test-deployment test-faults deploy-demo docs fuzz kills audit licences paper clean examples wheel-check notebooks bench

install: $(INSTALLED)

# xgboost-cpu is the module `xgboost` without 300 MB of GPU libraries; users who install the
# extra `xgboost` get the full package.
$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade "pip>=25.1"
	$(PYTHON) -m pip install --quiet --constraint constraints.txt \
		--editable ".[sklearn,lightgbm,torch,fast,opacus,accounting,simulation,figures,encoders]" xgboost-cpu --group dev
	@touch $@

run: install
	$(PYTHON) -m simulations flower

# Side by side: two parts that compute, one that mostly waits for Flower's processes, and lint.
test: install
	$(MAKE) --no-print-directory -j4 lint test-logic test-parties test-processes

test-logic: install
	$(PYTHON) -m pytest -m "$(USUAL)" $(addprefix --ignore=,$(PARTIES) $(PROCESSES))

test-parties: install
	$(PYTHON) -m pytest -m "$(USUAL)" $(PARTIES)

test-processes: install
	$(PYTHON) -m pytest -v -m "$(USUAL)" $(PROCESSES)

# Liars in whole federations, and audits by many draws; a few minutes.
test-slow: install
	$(PYTHON) -m pytest -m slow

# The tests of `make test` on the newest Flower, which has an environment of its own on top of the
# usual one. Where pip cannot have all that it asks for, as where an index lacks the newest
# certifi, it is tested with the dependencies of the usual one. Only pip needs the network.
test-flower: install
	python3 -m venv $(FLOWER)
	$(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(FLOWER)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/usual.pth"
	$(FLOWER)/bin/python -m pip install --quiet --no-deps --editable .
	$(FLOWER)/bin/python -m pip install --quiet "flwr[simulation]==$(NEWEST_FLOWER)" \
		|| $(FLOWER)/bin/python -m pip install --quiet --no-deps "flwr==$(NEWEST_FLOWER)"
	$(MAKE) --no-print-directory -j3 PYTHON=$(FLOWER)/bin/python \
		test-logic test-parties test-processes

# All strategies on SuperLink and SuperNodes with TLS and node keys, and on Ray; several minutes.
test-deployment: install
	$(PYTHON) -m pytest -m deployment

# All faults of docs/reliability.md, those of `make test` too; about a quarter of an hour.
test-faults: install
	$(PYTHON) -m pytest tests/faults

deploy-demo: install
	$(PYTHON) -m simulations.deploy demo

# The pages as a site, in build/site; a warning, such as a broken link, is an error. Only pip needs
# the network.
docs: install
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

lint: install
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy

# How fast, against a plain script on this machine: docs/performance.md; about twenty minutes.
bench: install
	$(PYTHON) -m benchmarks.suite

# A long search for inputs that decoders do not refuse properly; about ten minutes.
fuzz: install
	FL_STRATEGIES_FUZZ_INPUTS=100000 $(PYTHON) -m pytest tests/fuzz

# Server and parties killed 500 times at random moments; about ten minutes.
kills: install
	FL_STRATEGIES_KILLS=500 $(PYTHON) -m pytest -s tests/server/test_kills.py

# Known vulnerabilities of everything that is installed; needs the network. The tool has an
# environment of its own, so that it neither changes nor audits itself. OSV, because pip-audit
# passes without a word over packages that a mirror of PyPI tells nothing about.
audit: install
	python3 -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(AUDIT)/bin/python -m pip install --quiet --group audit
	$(AUDIT)/bin/pip-audit --skip-editable --vulnerability-service osv \
		--path $(VENV)/lib/python*/site-packages

licences: install
	$(PYTHON) -m tests.licences

# All examples and apps, also by `flwr build` and `flwr run`; about five minutes.
examples: install
	$(PYTHON) -m pytest tests/examples

# The notebooks anew, with their outputs, in place; about two minutes.
notebooks: install
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --group notebooks
	$(PYTHON) -m tests.notebooks
	$(PYTHON) -m pytest tests/examples/test_notebooks.py tests/clients/test_saved_model.py

# The package as users get it, in empty environments; needs the network and a few minutes.
wheel-check: install
	$(PYTHON) -m pytest -v -m wheel tests/repository/test_wheel.py

# The published and promised figures; needs FL_STRATEGIES_DATA (see docs/getting_started.md) and about an hour.
paper: install
	$(PYTHON) -m pytest -m paper

clean:
	rm -rf $(VENV) $(AUDIT) $(FLOWER) build dist .mypy_cache .pytest_cache .ruff_cache
