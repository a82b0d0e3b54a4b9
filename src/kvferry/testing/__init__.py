"""What the authors of an engine test against: kvferry without NIXL, without a GPU, without a second process.

`LocalNetwork` starts endpoints of this process, with a `Pool` each: an engine's own memory, or memory that the pool
allocates. `Pool.check` finds every byte that is wrong. `FaultyTransport` makes transfers fail. `pytest_plugin` has
fixtures.
"""

from kvferry.pools.contents import Contents, CopiedContents, KnownContents
from kvferry.pools.pool import Block, Pool, WrongBytes, copied_contents
from kvferry.testing.network import LocalNetwork, Pair
from kvferry.testing.transports import FaultyTransport
from kvferry.transport import InProcessNetwork, InProcessTransport

__all__ = [
    "Block",
    "Contents",
    "CopiedContents",
    "FaultyTransport",
    "InProcessNetwork",
    "InProcessTransport",
    "KnownContents",
    "LocalNetwork",
    "Pair",
    "Pool",
    "WrongBytes",
    "copied_contents",
]
