"""How answers of real engines are counted: each is right, wrong, failed or unfinished."""

from __future__ import annotations

import pytest
from tests.real_engines.beside import Answers


def test_answers_are_counted_once_each():
    found = Answers.of([(1, 2), (7,), (3,), (), None], [(1, 2), (7,), (4,), (5,), (6,)])
    assert (found.right, found.wrong, found.failed, found.unfinished) == (2, 1, 1, 1)
    assert str(found) == "of 5 2 right, 1 wrong, 1 failed, 1 unfinished"


def test_an_answer_may_be_any_of_several():
    """Of the old weights or of the new ones, but not of both."""
    found = Answers.of([(1, 1), (2, 2), (1, 2)], [(1, 1)] * 3, [(2, 2)] * 3)
    assert (found.right, found.wrong) == (2, 1)
    assert str(found) == "of 3 2 right, 1 wrong"


def test_as_many_answers_as_questions():
    with pytest.raises(AssertionError):
        Answers.of([(1,)], [(1,), (2,)])
