"""What our pages say of SGLang's own backends is in its sources, and the change that we draft for SGLang works."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from tests.support.elsewhere import missing, named, patched, sources

from kvferry.applications.doctor.deployment import contract
from kvferry.engines.sglang.deployment import SglangDeployment
from kvferry.engines.sglang.sender import KVFerrySender
from kvferry.findings import Severity


def words() -> str:
    return sources("sglang", "srt/disaggregation/**/*.py", "srt/arg_groups/**/*.py", "srt/environ.py", "srt/*args.py")


def test_every_name_that_is_said_to_be_the_nixl_backends_is_there():
    tables = [("Settings and words", 0), ("What differs", 0), ("What differs", 1)]
    assert missing(named("docs/from-sglang-nixl.md", tables), words()) == []


def test_every_name_that_is_said_to_be_the_mooncake_backends_is_there():
    assert missing(named("docs/from-mooncake.md", [("In SGLang", 0)]), words()) == []


def test_options_that_the_doctor_looks_at_are_sglangs():
    said = (word for word in f"{SglangDeployment.example} --host".split() if word.startswith("--"))
    assert missing([*said, "prefill", "decode", "SGLANG_PLUGINS"], words()) == []


def test_with_the_drafted_change_sglang_knows_us_by_name(tmp_path: Path):
    patched("docs/upstream/sglang.md", "sglang", tmp_path)
    choices = runpy.run_path(str(tmp_path / "sglang/srt/arg_groups/choices.py"))
    assert "kvferry" in choices["DISAGG_TRANSFER_BACKEND_CHOICES"]
    utils = runpy.run_path(str(tmp_path / "sglang/srt/disaggregation/utils.py"))
    backend, kind = utils["TransferBackend"]("kvferry"), utils["KVClassType"].SENDER
    assert utils["get_kv_class"](backend, kind) is KVFerrySender


def test_the_doctor_finds_that_this_sglang_fits():
    (found,) = contract(SglangDeployment.contract, "SGLang", os.environ)
    assert (found.severity, found.what) == (Severity.GOOD, "SGLang has all that the plug-in builds on")
