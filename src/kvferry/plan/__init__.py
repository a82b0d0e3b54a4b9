"""Which bytes go from which rank to which, as pure data.

`pieces` intersects the boxes of both sides and elects one writer for what several ranks hold, `lowering` turns a piece
into byte runs, `descriptors` into rows that a transport prepares once and page numbers select, `compatibility` says
why two sides cannot exchange caches, and `proof` checks all of it.
"""

from kvferry.plan.compatibility import check_exchangeable
from kvferry.plan.descriptors import DescriptorRows, descriptor_indices, descriptor_rows
from kvferry.plan.lowering import Runs, lower
from kvferry.plan.pieces import Piece, elect_writer, pieces_for_receiver
from kvferry.plan.proof import Proof, prove, prove_receiver

__all__ = [
    "DescriptorRows",
    "Piece",
    "Proof",
    "Runs",
    "check_exchangeable",
    "descriptor_indices",
    "descriptor_rows",
    "elect_writer",
    "lower",
    "pieces_for_receiver",
    "prove",
    "prove_receiver",
]
