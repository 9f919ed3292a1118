"""The Python sessions in docs/ are true."""

import doctest
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
SESSIONS = [page for page in DOCS if "```pycon" in page.read_text()]


def test_there_are_pages_with_sessions():
    assert {"races.md", "rules.md"} <= {page.name for page in SESSIONS}


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_the_python_sessions_of_a_page_are_true(page):
    tried = doctest.testfile(str(page), module_relative=False, verbose=False)
    assert tried.attempted > 0
    assert tried.failed == 0
