"""Host memory that a decode rank receives into while its device has none to spare.

SGLang restores what came there to the device later, by itself. Its host pools have the layers of the device's pools, in
the same order and with pages of the same bytes, and page numbers of their own.
"""

from __future__ import annotations

import copy

from sglang.srt.disaggregation.base.conn import KVArgs

from kvferry.errors import LayoutError


def host_arguments(args: KVArgs) -> KVArgs | None:
    """Returns a rank's KVArgs with its host pools where the device's were; None if SGLang names no host pools.

    Raises:
        LayoutError: if a page has other bytes there.
    """
    if getattr(args, "host_kv_data_ptrs", None) is None:
        return None
    there = copy.copy(args)
    there.kv_data_ptrs, there.kv_data_lens = args.host_kv_data_ptrs, args.host_kv_data_lens
    there.kv_item_lens = args.host_kv_item_lens
    _check_pages("keys and values", args.kv_item_lens, there.kv_item_lens)
    if args.state_types:
        there.state_data_ptrs, there.state_data_lens = args.host_state_data_ptrs, args.host_state_data_lens
        there.state_item_lens = args.host_state_item_lens
        for device, host in zip(args.state_item_lens, there.state_item_lens, strict=True):
            _check_pages("sliding windows", device, host)
    return there


def _check_pages(what: str, device: list[int], host: list[int]) -> None:
    if device != host:
        raise LayoutError(
            f"--disaggregation-decode-host-receive-threshold: pages of {what} have {host[:4]}... bytes in host memory "
            f"and {device[:4]}... on the device: leave it at 1"
        )
