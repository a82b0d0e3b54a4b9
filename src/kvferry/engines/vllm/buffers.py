"""What `kv_buffer_device` asks for, and what there is instead.

With "cpu" vLLM's NIXL connector takes host memory as large as the whole cache, copies the blocks of each request there
and back, and transfers from there: for devices whose memory NIXL cannot register, and for nothing else. kvferry
registers the cache where it is, and has rings of staging memory on the same device.
"""

from __future__ import annotations


def buffer_notice(buffer_device: str, device: str) -> str | None:
    """Returns what to tell an operator whose setting has no effect; None where nothing was asked for.

    Args:
        buffer_device: `kv_buffer_device` of vLLM's `KVTransferConfig`.
        device: the platform's type of device, which is vLLM's default for it.
    """
    if buffer_device == device:
        return None
    return (
        f"kv_buffer_device is {buffer_device!r}, and has no effect: kvferry moves caches from where they are, on "
        f"{device}, with no copy of them in host memory. Where the network cannot reach the device's memory, UCX goes "
        "through the host by itself; KVFERRY_PATH=staged then sends a few large writes in place of many small ones, "
        "through KVFERRY_STAGING_RING_MIB of the device's memory for each peer. Leave kv_buffer_device out"
    )
