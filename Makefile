# Three commands do everything: `make run` starts a receiver to try, `make check` answers within two
# to three minutes on two cores while one works, `make test` checks the project.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that run tests side by side: twice as many as there are processors, because many tests
# wait for another process.
WORKERS ?= $(shell expr 2 \* $$(nproc))
# What is compiled once is kept: pytest's rewriting of the tests alone takes twenty seconds.
unexport PYTHONDONTWRITEBYTECODE

# The optional checks: no generator that holds a scope (900), a checkpoint on every path (910-913).
# ASYNC114 asks for a list of startable names, which every `task_status` parameter already is;
# ASYNC127 asks for httpx2, but httpx is the public surface (its mocks and auth classes are users').
FLAKE8_ASYNC := --enable ASYNC,ASYNC900,ASYNC910,ASYNC911,ASYNC912,ASYNC913 --disable ASYNC114,ASYNC127
# Files of connections are checked for all but checkpoints: they try the socket before they wait for
# it, and the wait of the exchange around them is the checkpoint. So are stores in memory, whose
# callers have a checkpoint of their own, and the files of a task that waits in each of its rounds,
# whose private functions need none. (`--per-file-disable` is read by the linter, never used.)
WITHOUT_CHECKPOINTS := sdk_trio/net/% sdk_trio/server/% sdk_trio/storage/memory/% \
	sdk_trio/client/layers/% sdk_trio/client/answers.py \
	sdk_trio/admin/app.py sdk_trio/admin/feed.py sdk_trio/admin/status.py sdk_trio/notifications/pump.py \
	sdk_trio/reconcile/reconciler.py sdk_trio/tenants/upgrade_run.py \
	$(addprefix sdk_trio/runtime/,processes.py systemd.py worker.py) \
	sdk_trio/webhooks/forward.py sdk_trio/testing/simulation/% \
	$(addprefix sdk_trio/replication/,health_check.py supervisor.py watch.py)
FLAKE8_ASYNC_CONNECTIONS := --enable ASYNC,ASYNC900 \
	--disable ASYNC114,ASYNC127,ASYNC910,ASYNC911,ASYNC912,ASYNC913

# asyncio's cancellation is not Trio's: it comes once, and a clean-up may wait.
ON_ASYNCIO := sdk_trio/asgi/%
FLAKE8_ASYNC_ASYNCIO := $(FLAKE8_ASYNC_CONNECTIONS),ASYNC102,ASYNC103,ASYNC104,ASYNC120,ASYNC300

.PHONY: run check test lint types imports docs docs-serve package tests collected coverage generate emulators bench bench-client bench-tenants format clean

run: $(VENV)/.installed
	$(BIN)/python -m sdk_trio dev

# All that is static, and the tests that start no process and open no socket but a few: these answer
# in seconds, and each with the name of the part that is broken. Without coverage, and with few
# examples where a test makes them up. One process per processor, as they wait for nothing.
check: $(VENV)/.installed-dev lint types imports
	$(BIN)/python -m pytest --quiet --numprocesses $(shell nproc) --dist worksteal \
		--hypothesis-profile check tests/unit tests/trio

test: $(VENV)/.installed-dev lint types imports docs tests

lint: $(VENV)/.installed-dev $(VENV)/.async-checked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# It reads slowly and keeps no cache: what has none of the words that its rules are about is left
# out, and so is what has not changed since, unless the Makefile or the environment has.
SOURCES := $(wildcard $(shell git ls-files "sdk_trio/*.py"))
CHANGED = $(if $(filter-out %.py,$?),$(SOURCES),$?)
WITH_ASYNC_WORDS := grep -lE 'async|\btrio|BaseException|except(:|[*])' /dev/null
$(VENV)/.async-checked: $(SOURCES) Makefile $(VENV)/.installed-dev
	@$(WITH_ASYNC_WORDS) $(filter-out $(WITHOUT_CHECKPOINTS) $(ON_ASYNCIO),$(CHANGED)) | \
		xargs -r -n 60 -P 4 $(BIN)/python tests/async_rules.py $(FLAKE8_ASYNC)
	@$(WITH_ASYNC_WORDS) $(filter $(WITHOUT_CHECKPOINTS),$(CHANGED)) | \
		xargs -r -n 60 -P 4 $(BIN)/python tests/async_rules.py $(FLAKE8_ASYNC_CONNECTIONS)
	@$(WITH_ASYNC_WORDS) $(filter $(ON_ASYNCIO),$(CHANGED)) | \
		xargs -r -n 60 -P 4 $(BIN)/python tests/async_rules.py $(FLAKE8_ASYNC_ASYNCIO)
	@touch $@

types: $(VENV)/.installed-dev
	$(BIN)/mypy
	$(BIN)/mypy tests/typing examples

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-cache

# All that is made of something else: the client's types, the data of events, pages of the
# reference. A test says when it has not been run.
generate: $(VENV)/.installed-dev
	$(BIN)/python generate

# The site of the pages, with warnings and broken links as errors. It is built again after a change
# of a page; Sphinx then reads only the changed ones.
PAGES := $(wildcard *.md benchmarks/*.md docs/*.md docs/*/*.md docs/*/*.svg docs/site/* docs/site/*/*)
docs: build/site/html/llms.txt
build/site/html/llms.txt: $(PAGES) $(VENV)/.installed-dev
	$(BIN)/python docs/site/build.py

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site/html 8000

# The wheel and the sdist in dist/, built twice and compared, with a bill of materials. It is not a
# part of `make test`, because it needs programs that nothing else does.
package: build/packaging/.installed
	build/packaging/bin/python tests/package.py

build/packaging/.installed: pyproject.toml
	$(PYTHON) -m venv build/packaging
	build/packaging/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	build/packaging/bin/python -m pip install --quiet --group packaging
	touch $@

# The program of the environment that runs pytest.
RUNNER := python
tests: $(VENV)/.installed-dev
	# Programs that tests start are compiled once, as those of an installed package are.
	$(BIN)/python -m compileall -q sdk_trio tests/support
	# Each file as a whole, so that its fixtures are made once. In the order of their names, as the
	# files that take longest (e2e, integration) come first then, and no process waits at the end.
	$(BIN)/$(RUNNER) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The tests rewritten and compiled by one process, so that the processes of `make tests` need not do
# it once each.
collected: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --collect-only -qq > /dev/null

# The same with coverage, which has to stay above its limit. Tracing takes as much processor time as
# the tests themselves, so `make test` goes without.
coverage: $(VENV)/.installed-dev
	rm -f .coverage .coverage.*
	$(MAKE) tests RUNNER="coverage run"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# What integration tests talk to, in places of its own: none of it is the package's dependency.
emulators: tests/emulators/.installed

# The default configuration beside FastAPI, and all other rows, written into the page on
# performance: half an hour. QUICK=1: five minutes, only printed; ROWS="everyday full": these.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/bench.py $(if $(QUICK),--quick) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(ROWS),--rows $(ROWS))

bench-client: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python benchmarks/client.py

# What 5000 tenants cost beside 100; it takes about five minutes.
bench-tenants: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/tenants.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf tests/emulators/.venv tests/emulators/node_modules tests/emulators/.installed
	rm -rf $(VENV) .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Install with uv, in a sixth of pip's processor time: $(1) is the environment, $(2) are arguments.
# uv does not read pip's configuration. Where it is missing or finds no registry, pip installs;
# dependency groups need pip 25.1.
define install
	$(BIN)/uv pip install --quiet --system-certs --python $(1)/bin/python $(2) || { \
		$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" && \
		$(BIN)/python -m pip --python $(1)/bin/python install --quiet $(2); }
endef

$(BIN)/uv: $(VENV)/bin/python
	-$(BIN)/python -m pip install --quiet uv

DEVELOPMENT := --editable ".[ed25519,testing,http3,replication,otel]" --group dev
$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml | $(BIN)/uv
	$(call install,$(VENV),$(DEVELOPMENT))
	touch $@ $(VENV)/.installed

tests/emulators/.installed: tests/emulators/package.json console/package-lock.json pyproject.toml | $(BIN)/uv
	$(PYTHON) -m venv --without-pip tests/emulators/.venv
	$(call install,tests/emulators/.venv,--group emulators)
	npm install --prefix tests/emulators --no-package-lock --no-audit --no-fund --loglevel=error
	npm ci --prefix console --no-audit --no-fund --loglevel=error
	touch $@
