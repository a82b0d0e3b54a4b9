"""Which bytes go from which rank to which, as pure data.

`pieces` intersects the boxes of both sides and elects one writer for what several ranks hold, `routes` says which
tokens travel and where they lie in pages of either size, `lowering` turns a piece into byte runs, `descriptors` into
rows that a transport prepares once and page numbers select, `pair` puts these together for two ranks, `cost` estimates
which path is faster, `compatibility` and `fingerprint` say why two sides cannot exchange caches and which packed pages
they cut for it, and `proof` checks all of it.
"""

from kvferry.plan.compatibility import check_exchangeable, check_share_tokens, check_token_share, described_alike
from kvferry.plan.cost import Choice, PathCosts, TransferPath, WriteSize, choose
from kvferry.plan.descriptors import DescriptorRows, Selector, descriptor_rows, selectors
from kvferry.plan.lowering import Runs, lower
from kvferry.plan.pair import ElectedRoute, PairPlan, Unit, places
from kvferry.plan.pieces import Piece, SourceGroup, elect_writer, pieces_for_receiver
from kvferry.plan.proof import Proof, prove, prove_receiver
from kvferry.plan.routes import (
    Demand,
    Route,
    Segments,
    Units,
    needed_locally,
    route_between,
    segments_between,
    units_of,
)

__all__ = [
    "Choice",
    "Demand",
    "DescriptorRows",
    "ElectedRoute",
    "PairPlan",
    "PathCosts",
    "Piece",
    "Proof",
    "Route",
    "Runs",
    "Segments",
    "Selector",
    "SourceGroup",
    "TransferPath",
    "Unit",
    "Units",
    "WriteSize",
    "check_exchangeable",
    "check_share_tokens",
    "check_token_share",
    "choose",
    "described_alike",
    "descriptor_rows",
    "elect_writer",
    "lower",
    "needed_locally",
    "pieces_for_receiver",
    "places",
    "prove",
    "prove_receiver",
    "route_between",
    "segments_between",
    "selectors",
    "units_of",
]
