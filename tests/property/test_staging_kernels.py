"""Law: kernels move exactly the bytes of the blocks, whatever their nesting, alignment and type, and no other byte.

Here the CPU's kernels; tests/unit/staging holds the GPU's to it, under Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from tests.support.staging import Case, KernelMaker, cases, check_gather, check_round_trip, check_scatter
from tests.support.tiers import examples

from kvferry.staging.host import HostKernels, fastest, interpreted

BOTH_KINDS = pytest.mark.parametrize(
    "make", [partial(HostKernels, copy=copy) for copy in (fastest()[0], interpreted)], ids=["fastest", "interpreted"]
)


@BOTH_KINDS
@given(case=cases())
@settings(max_examples=examples(300))
def test_gathering_packs_the_blocks_and_nothing_else(make: KernelMaker, case: Case):
    check_gather(make, case, "cpu")


@BOTH_KINDS
@given(case=cases())
@settings(max_examples=examples(300))
def test_scattering_writes_the_blocks_and_nothing_else(make: KernelMaker, case: Case):
    check_scatter(make, case, "cpu")


@BOTH_KINDS
@given(case=cases())
@settings(max_examples=examples(100))
def test_every_bit_pattern_survives_the_way_there_and_back(make: KernelMaker, case: Case):
    check_round_trip(make, case, "cpu")
