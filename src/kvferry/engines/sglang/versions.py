"""What SGLang 0.5.22 has otherwise than the version after it. Nothing else in the plug-in knows one version from another."""

from __future__ import annotations

from typing import Any


def kv_layout(described: Any) -> str | None:
    """Returns the order within pages that a server's caches, or its description, say; 0.5.22 has one order only.

    Args:
        described: KVArgs, a manager, or a PrefillServerInfo.
    """
    return getattr(described, "kv_layout", None)


def compares_whole_prompts(manager: type) -> bool:
    """Whether SGLang compares a checksum of the whole prompt, on every rank, with the first prefill rank's.

    What the decode side had already was never the prefill side's, and another rank has other heads: 0.5.22 finds faults
    where there are none.

    Args:
        manager: SGLang's CommonKVManager.
    """
    return not hasattr(manager, "should_verify_kv_checksum")
