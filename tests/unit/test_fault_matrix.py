"""The choice of cells of the fault matrix that the quick tier takes."""

from __future__ import annotations

import itertools

from tests.support.matrix import KINDS, PATHS, FaultCase, Role, all_cases, covering, full_cases, quick_cases
from tests.support.victims import Step


def test_every_pair_occurs_and_every_step_meets_every_kind_of_fault():
    """In the quick tier, but for the steps of everybody and of every kind of fault, which are the full tier's."""
    cases, full = list(all_cases()), full_cases()
    for these, those in itertools.permutations(("role", "step", "path", "fault"), 2):
        if {these, those} == {"step", "fault"}:
            continue
        chosen = full if {these, those} == {"role", "step"} else quick_cases()
        possible = {(getattr(case, these), getattr(case, those)) for case in cases}
        assert {(getattr(case, these), getattr(case, those)) for case in chosen} == possible, (these, those)
    assert {(case.step, KINDS[case.fault]) for case in full} == set(itertools.product(Step, KINDS.values()))


def test_there_are_few_of_many():
    assert len(set(all_cases())) == len(list(all_cases())) == 280
    assert len(quick_cases()) < 25
    assert {case.role for case in quick_cases()} == set(Role)


def test_the_full_tier_has_every_kind_of_fault_at_every_step_for_everybody_and_every_fault():
    cases, full = list(all_cases()), full_cases()
    assert {(case.role, case.step, KINDS[case.fault]) for case in full} == {
        (each.role, each.step, KINDS[each.fault]) for each in cases
    }
    assert {(case.role, case.fault) for case in full} == {(each.role, each.fault) for each in cases}
    assert quick_cases() <= full
    assert len(full) < 120
    for role, path in itertools.product(Role, PATHS):
        of_both = {case.step for case in full if (case.role, case.path) == (role, path)}
        assert of_both == {case.step for case in cases if case.role is role}, "either path at every step"
    for role, path in itertools.product(set(Role) - {Role.REGISTRY}, PATHS):
        of_both_faults = {case.fault for case in full if (case.role, case.path) == (role, path)}
        assert of_both_faults == {case.fault for case in cases if case.role is role}, "either path with every fault"


def test_a_choice_covers_all_takes_what_adds_most_and_is_the_same_again():
    cases = [{1}, {1, 2}, {3}, {2, 3, 4}, {4, 5}]
    assert covering(cases, set) == [{2, 3, 4}, {1}, {4, 5}]
    assert covering(list(all_cases()), FaultCase.pairs) == covering(list(all_cases()), FaultCase.pairs)
