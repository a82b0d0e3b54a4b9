"""What is said of `kv_buffer_device`, which has no effect."""

from __future__ import annotations

import pytest

from kvferry.engines.vllm.guards import buffer_notice
from kvferry.settings import all_fields


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_said_of_the_platforms_own_device(device: str):
    assert buffer_notice(device, device) is None


def test_a_buffer_in_host_memory_is_answered_with_settings_that_exist():
    notice = buffer_notice("cpu", "cuda")
    assert notice is not None
    assert notice.startswith(
        "kv_buffer_device is 'cpu', and has no effect: kvferry moves caches from where they are, on cuda"
    )
    named = {word.partition("=")[0].removeprefix("KVFERRY_").lower() for word in notice.split() if "KVFERRY_" in word}
    assert named == {"path", "staging_ring_mib"}
    assert named <= set(all_fields())
