"""The manifests with real vLLM: every container started as it stands, in namespaces, until its probes succeed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.real_engines.alone import check_alone
from tests.real_engines.another_prompt import refuse_another_prompt
from tests.support.clones import ROOT
from tests.support.manifests import rendered
from tests.support.pods import image_of_this_environment, running

from kvferry.applications.up.dialects import VllmDialect
from kvferry.applications.up.servers import Server

pytestmark = [pytest.mark.servers, pytest.mark.full, pytest.mark.timeout(900)]

READY_S = 500.0
PREFILL = Server("http://prefill-0.prefill:8000", "prefill-0")
BODY = {"model": "/mnt/model", "prompt": "w5 w6 w7 w8 " * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_a_deployment_of_vllm_serves_and_ends_as_its_manifests_say(tmp_path: Path):
    check_alone()
    image = image_of_this_environment(ROOT / "src")
    secrets = {"kvferry": {"secret": "a secret of at least sixteen characters"}}
    with running(rendered("vllm-cpu"), tmp_path, image, secrets) as deployed:
        deployed.start_all(READY_S)
        divided, alone = (
            json.loads(deployed.ask(host, "/v1/completions", json.dumps(BODY)))["choices"][0]["text"]
            for host in ("gateway", "prefill-0.prefill")
        )
        assert divided == alone != ""
        assert deployed.metric("decode-0", "kvferry_transfers_total") == 1
        assert ("decode-0", "prefill-0", 9440) in deployed.flows()

        def ask(host: str, body: dict[str, Any]) -> tuple[bool, str]:
            return deployed.answer(host, "/v1/completions", json.dumps({**BODY, **body}))

        prefill, decode = (partial(ask, host) for host in ("prefill-0.prefill", "decode-0.decode"))
        refuse_another_prompt(VllmDialect(), PREFILL, prefill, decode, deployed.running["decode-0"].said)
        assert deployed.closed_flows() == set()
        deployed.terminate()
