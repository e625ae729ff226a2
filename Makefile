# The commands people and CI use. `make` alone prints the list.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the same modules again

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_HOME := .reco/demo
FIGURES := .reco/figures
# Workers of the test run on two cores: many tests wait. Seven need 10.5 GiB of memory, five 9, four 8.
MEMORY := /sys/fs/cgroup/memory.max /proc/meminfo
WORKERS ?= $(shell sed -n '/^[0-9]*$$/p; s/^MemAvailable: *\([0-9]*\) kB/\1000/p' $(MEMORY) 2> /dev/null | sort -g | \
    awk '{ n = $$1 < 10e9 ? 4 : $$1 < 13e9 ? 5 : 7; exit } END { print n ? n : 4 }')

.PHONY: help setup run test check lint docs figures fuzz storm serve demo lock infra image sbom clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv and install the pinned packages (the targets below do this by themselves)

run: $(READY) ## train on real baskets, promote the champion, show one recommendation
	$(BIN)/reco run
	$(BIN)/reco recommend --user 1228 --basket 1041453,995242 --store 406 --at 2017-12-05T18:30:00Z -k 5

# A file's tests share their fixtures, so they run on one worker; tests/conftest.py puts the longest files first.
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

test: $(READY) ## every test that needs no GPU: fast lane and slow lane; the slowest ten are listed
	$(PYTEST) -m "not gpu"

check: lint ## everything that needs no process: format, lint, types, layers, workflows, prose, docs, fast tests
	$(PYTEST)

lint: $(READY) ## the part of check without tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/actionlint
	$(BIN)/zizmor --offline --quiet .github/workflows
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,idea}.yml
	$(BIN)/python -m tests.prose.prose
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(READY) ## the documentation on http://127.0.0.1:8000, rebuilt at each change
	$(BIN)/python -W ignore -m tests.docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

figures: $(READY) ## measure the published figures on this commit and champion, about 80 minutes; write the pages
	$(BIN)/reco figures --out $(FIGURES)
	cp $(FIGURES)/*.json $(FIGURES)/*.md $(FIGURES)/*.png docs/figures/
	$(BIN)/python -W ignore -m tests.docs.generate

fuzz: $(READY) ## 4,000 spoilt bundles against the loader; 2,000 made-up requests and 272 attacks against the endpoint
	$(BIN)/python -m tests.fuzz.artefacts --cases 4000
	$(BIN)/python -m tests.fuzz.requests --cases 2000
	$(BIN)/python -m tests.fuzz.attacks

storm: $(READY) ## 50 promotions killed at any point, 200 rounds of eight promotions and a rollback at once: half an hour
	STORM_KILLS=50 STORM_ROUNDS=200 $(BIN)/pytest -q -s -m slow tests/components/release/test_promotion_storm.py

serve: $(READY) ## the KServe endpoint with the champion, on http://127.0.0.1:8080
	$(BIN)/reco serve

demo: $(READY) ## the whole line on a toy shop in about ten minutes: train, answer, drift, retrain
	$(BIN)/reco --home $(DEMO_HOME) run --data toy --fast
	$(BIN)/reco --home $(DEMO_HOME) recommend --at 2024-06-12T10:00:00Z -k 3 \
	    --user user-004 --basket item-016,item-026,item-064,item-000,item-004
	@echo 'Right: item-046 is the one favourite of user-004 that is not in the basket. Now the weeks after training:'
	$(BIN)/reco --home $(DEMO_HOME) drift --data toy --retrain || test $$? -eq 1
	@echo 'They drift by design: each shopper leaves one favourite out, so that the test is hard. Your shop grows, and the'
	@echo 'next training learns weeks that drifted. This one never grows: both trainings end five weeks before its last'
	@echo 'purchase, so both learnt the same, and the drift stays.'

# An existing lock keeps its versions; `make lock UPGRADE=--upgrade` takes the newest that fit.
LOCK := uv pip compile pyproject.toml --quiet --generate-hashes --no-annotate --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" $(UPGRADE)
lock: $(READY) ## pin every package with its hashes: requirements/dev.lock, and the parts of endpoint and pipeline
	# rfc3987-syntax checks formats that nothing here asks for; importing kfp would build its grammar each time.
	$(BIN)/$(LOCK) --extra cpu --extra train --extra trace --extra dev --no-emit-package torch \
	    --no-emit-package rfc3987-syntax -o requirements/dev.lock
	$(BIN)/$(LOCK) --extra cpu --extra trace -c requirements/dev.lock -o requirements/endpoint.lock
	$(BIN)/$(LOCK) --extra cpu --extra train --no-emit-package torch -c requirements/dev.lock -o requirements/pipeline.lock

infra: $(READY) ## check images, manifests and Terraform with every tool that is installed; name the others
	PATH="$$PWD/$(BIN):$$PATH" BUILD_IMAGES=1 APPLY_TERRAFORM=1 \
	    $(BIN)/pytest -q -m "slow or not slow" tests/infra tests/monitoring/test_alerting.py

# IMAGE is endpoint or pipeline; BUILDER any program that builds a Dockerfile. The index of CPU wheels counts there, too.
IMAGE ?= endpoint
BUILDER ?= docker build $(if $(PIP_EXTRA_INDEX_URL),--build-arg 'PIP_ARGS=--extra-index-url $(PIP_EXTRA_INDEX_URL)')
image: $(READY) ## build the endpoint's container image, or with IMAGE=pipeline that of the steps
	$(BIN)/python -m tests.infra.kernel_bundle build/kernel-bundle
	$(BUILDER) -f infra/images/$(IMAGE).Dockerfile -t checkout-$(IMAGE) .

sbom: $(READY) ## list the packages of that image in build/, with versions and hashes, as CycloneDX
	mkdir -p build
	cat $$(sed -n 's/.* -r \(requirements[^ ]*\).*/\1/p' infra/images/$(IMAGE).Dockerfile) \
	    | $(BIN)/cyclonedx-py requirements - --pyproject pyproject.toml \
	    --output-reproducible -o build/sbom-$(IMAGE).json

clean: ## remove .venv and caches; models and data in .reco stay (delete that folder yourself)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.reco/*' -prune -exec rm -rf {} +

# The stamp makes set-up cost nothing the second time; a changed lock or pyproject.toml repeats it.
$(READY): requirements/dev.lock requirements/torch.txt pyproject.toml
	@.ci/set-up $(VENV)
	@touch $@
