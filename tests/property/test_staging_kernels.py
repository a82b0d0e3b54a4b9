"""Law: kernels move exactly the bytes of the blocks, whatever their nesting, alignment and type, and no other byte.

Here the CPU's kernels; tests/unit/staging holds the GPU's to it, under Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from hypothesis import given, settings
from tests.support.staging import Case, cases, check_gather, check_round_trip, check_scatter
from tests.support.tiers import examples

from kvferry.staging.host import HostKernels


@given(cases())
@settings(max_examples=examples(300))
def test_gathering_packs_the_blocks_and_nothing_else(case: Case):
    check_gather(HostKernels, case, "cpu")


@given(cases())
@settings(max_examples=examples(300))
def test_scattering_writes_the_blocks_and_nothing_else(case: Case):
    check_scatter(HostKernels, case, "cpu")


@given(cases())
@settings(max_examples=examples(100))
def test_every_bit_pattern_survives_the_way_there_and_back(case: Case):
    check_round_trip(HostKernels, case, "cpu")
