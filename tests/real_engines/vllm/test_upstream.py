"""What our pages say of vLLM's own connectors is in its sources, and the change that we draft for vLLM works."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

from tests.support.elsewhere import missing, named, patched, sources

from kvferry.applications.doctor.deployment import contract
from kvferry.engines.vllm import KVFerryConnector
from kvferry.engines.vllm.deployment import VllmDeployment
from kvferry.findings import Severity

FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"


def words() -> str:
    return sources("vllm", "distributed/kv_transfer/**/*.py", "config/*.py", "envs.py", "engine/arg_utils.py")


def test_every_name_that_is_said_to_be_nixl_connectors_is_there():
    page = named("docs/from-nixl-connector.md", [("Settings and words", 0), ("What differs", 1)])
    assert missing(page, words()) == []


def test_every_name_that_is_said_to_be_mooncake_connectors_is_there():
    assert missing(named("docs/from-mooncake.md", [("In vLLM", 0)]), words()) == []


def test_options_that_the_doctor_looks_at_are_vllms():
    said = re.findall(r"--[a-z-]+|kv_\w+", VllmDeployment.example)
    assert missing([*said, "kv_producer", "kv_consumer", "connectors"], words()) == []
    assert "--config" in sources("vllm", "utils/argparse_utils.py")


def test_with_the_drafted_change_vllm_knows_us_by_name(tmp_path: Path):
    made = runpy.run_path(str(patched("docs/upstream/vllm.md", "vllm", tmp_path) / FACTORY))
    assert made["KVConnectorFactory"].get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


def test_the_doctor_finds_that_this_vllm_fits():
    (found,) = contract(VllmDeployment.contract, "vLLM", os.environ)
    assert (found.severity, found.what) == (Severity.GOOD, "vLLM has all that the plug-in builds on")
