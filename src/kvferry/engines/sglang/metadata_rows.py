"""What SGLang sends beside the caches: one row of each of its metadata buffers, the first token among them.

The rows are small and in CPU memory; they travel in kvferry's aux data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.errors import IncompatiblePeerError, KVFerryError, UsageError

_ROWS = msgspec.msgpack.Decoder(list[bytes])
_MOST_BYTES = 1023 * 1024
"""A room carries a mebibyte beside its pages (`aux` of `Sender.submit`), and what is around the rows travels, too."""


@dataclass(frozen=True, slots=True)
class MetadataRows:
    """SGLang's metadata buffers.

    Attributes:
        addresses: the address of each.
        row_bytes: the bytes of one request's row in each.
    """

    addresses: tuple[int, ...]
    row_bytes: tuple[int, ...]

    def check_size(self) -> None:
        """Checks that a request's rows can travel.

        Raises:
            UsageError: if they are too many bytes.
        """
        total = sum(self.row_bytes)
        if total > _MOST_BYTES:
            raise UsageError(
                f"SGLang's metadata of a request has {total} bytes (buffers of {list(self.row_bytes)}), and kvferry "
                f"sends {_MOST_BYTES} at most: lower --sampling-mask-max-tokens, or unset "
                "SGLANG_ENABLE_DISAGG_SAMPLING_MASK, on both sides"
            )

    def read(self, index: int) -> bytes:
        """Returns all rows of one request, as aux data."""
        return msgspec.msgpack.encode(
            [
                ctypes.string_at(address + index * size, size)
                for address, size in zip(self.addresses, self.row_bytes, strict=True)
            ]
        )

    def write(self, index: int, aux: bytes) -> None:
        """Writes the rows that `read` returned on the other side.

        Raises:
            IncompatiblePeerError: if the other side's rows are not like these.
            KVFerryError: if the other side sent none.
        """
        rows = _decoded(aux)
        sizes = tuple(len(row) for row in rows)
        if sizes != self.row_bytes:
            raise IncompatiblePeerError(
                f"the prefill side has metadata rows of {list(sizes)} bytes, this side of {list(self.row_bytes)}: "
                "options that add or widen one must be the same on both, such as --disaggregation-enable-kv-checksum, "
                "SGLANG_ENABLE_DISAGG_SAMPLING_MASK and the speculative algorithm"
            )
        for address, row in zip(self.addresses, rows, strict=True):
            ctypes.memmove(address + index * len(row), row, len(row))


def _decoded(aux: bytes) -> Sequence[bytes]:
    try:
        return _ROWS.decode(aux)
    except msgspec.MsgspecError as error:
        raise KVFerryError(f"the prefill side sent no metadata rows ({len(aux)} bytes of aux data)") from error
