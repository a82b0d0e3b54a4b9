"""Moves bytes with NIXL: RDMA, shared memory or TCP."""

from kvferry.transport.nixl.bindings import BINDINGS, load_bindings
from kvferry.transport.nixl.transport import NixlTransport

__all__ = ["BINDINGS", "NixlTransport", "load_bindings"]
