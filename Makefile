# Everything happens in a virtual environment in this tree; only Python >= 3.11, git and make are assumed.
#
#   make run ARGS='--web.listen-address 127.0.0.1:10077'    the exporter
#   make test     unit tests                     make check    format, lint, types, alert rules
#   make e2e      real processes and services    make bench    ratios against other exporters
#   make deployed  packages, unit, image and chart as built and run
#   make faults   what it watches, and what it stands on, is broken on purpose (docs/FAULTS.md)
#   make soak     a year of starts and ends in minutes: does anything grow?
#   make audit    known holes and licences of what is installed
#   make score    docs/SCORE.md: recordings and the obvious rules, measured anew
#   make dashboards  grafana/ and its ConfigMaps anew   make pictures    docs/pictures/ anew
#   make page-pictures  the same of the page, in Chromium
#   make hardware                                the GPU collector against a real driver (docs/HARDWARE.md)

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
HARDWARE_ARGS ?=
PYTEST_ARGS ?=
SCORE_ARGS ?=
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$python"; break; }; done)
LINTED := exporter tests bench grafana score deploy
# What is shipped beside us: exactly these files.  `make PINNED=` takes the newest releases that are allowed.
PINNED ?= constraints.txt
pin = $(if $(PINNED),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(PINNED))

.PHONY: run test check lint e2e deployed faults soak audit bench score dashboards pictures browser page-pictures hardware clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,13p

run: $(VENV)/.installed
	$(BIN)/stallwatch serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/pytest -m 'not e2e and not faults and not soak' -n auto --maxprocesses 4 $(PYTEST_ARGS)

check: lint
	@if command -v promtool >/dev/null; then \
		promtool test rules rules/tests/*.test.yml; \
	else \
		echo 'make check: promtool is not installed, the alert rules were not checked'; \
	fi

# What of this `make test` does not do, too: it asks promtool as well.
lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy
	@if command -v promtool >/dev/null; then promtool check rules --lint=all --lint-fatal rules/*.yml; fi

e2e: $(VENV)/.installed-test
	$(BIN)/pytest -m e2e $(PYTEST_ARGS) tests/e2e

faults: $(VENV)/.installed-test
	$(BIN)/pytest -m 'faults and not minutes' -n 2 --dist loadfile $(PYTEST_ARGS) tests/faults

deployed: $(VENV)/.installed-test
	$(BIN)/pytest -m e2e $(PYTEST_ARGS) tests/deploy

soak: $(VENV)/.installed-test
	$(BIN)/pytest -m soak $(PYTEST_ARGS) tests/soak

# pip-audit has an environment of its own: what it needs is nothing that we need.
audit: $(VENV)/.installed-test
	@test -x $(VENV)/audit/bin/pip-audit || { $(BIN)/python -m venv $(VENV)/audit && \
		$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit; } || true
	$(BIN)/python .ci/supply_chain.py $(VENV)/audit/bin/pip-audit

bench: $(VENV)/.installed-test
	@for name in scan node memory gpu wedged scrape logs replay; do echo "== bench/$$name.py"; $(BIN)/python -m bench.$$name || exit; done

score: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m score $(SCORE_ARGS)

dashboards: $(VENV)/.installed
	$(BIN)/python -m grafana

pictures: $(VENV)/.installed-docs
	PYTHONPATH=.:tests $(BIN)/python tests/dashboard_pictures.py

browser: $(VENV)/.installed-browser

page-pictures: $(VENV)/.installed-browser
	PYTHONPATH=.:tests $(BIN)/python tests/page_pictures.py

hardware: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m hardware.run $(HARDWARE_ARGS)

clean:
	rm -rf $(VENV) build dist exporter/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find exporter tests bench score -name __pycache__ -type d -prune -exec rm -rf {} +

# An interrupted installation leaves no stamp, so that the next call repeats it.
$(VENV)/.installed: pyproject.toml $(PINNED) | $(BIN)/python
	$(pin)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(PINNED) | $(BIN)/python
	$(pin)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

$(VENV)/.installed-browser: pyproject.toml | $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	@touch $@

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'stallwatch needs Python 3.11 or newer: none of python3, python3.11 … python3.14 is' \
		'one; install it, or say which: make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments: its' \
		'venv or ensurepip module is missing; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
