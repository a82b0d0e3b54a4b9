"""The pages for who comes from elsewhere name settings that kvferry has; the engines' own tests look at theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.clones import ROOT

from kvferry.settings import known_variables

PAGES = [*sorted(ROOT.glob("docs/from-*.md")), *(ROOT / f"docs/upstream/{engine}.md" for engine in ("vllm", "sglang"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_variables_of_ours_that_a_page_names_are_there(page: Path):
    said = set(re.findall(r"\bKVFERRY_[A-Z_0-9]+", page.read_text()))
    assert said
    assert said <= known_variables()
