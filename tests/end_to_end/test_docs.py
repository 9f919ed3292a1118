"""The Python sessions in docs/ are true, and the links between the pages lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
SESSIONS = [page for page in DOCS if "```pycon" in page.read_text()]
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def loose_ends(page: Path) -> list[str]:
    """Links to files that are not there, or to headings that no page has."""
    found = []
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if "://" not in target and (not there.exists() or (anchor and anchor not in anchors(there))):
            found.append(f"{page.name}: {target}")
    return found


def absent(text: str) -> list[str]:
    """Files of this repository that a page names and that are not there; capitals stand for a name to be put in."""
    named = re.findall(r"\b(?:localtensor|strategies|tests|docs)/[\w./]+\.\w+", text)
    return [path for path in named if not re.search("[A-Z]{4}", path) and not (ROOT / path).is_file()]


def test_there_are_pages_with_sessions():
    assert {"lockstep.md", "plans.md", "races.md", "rules.md"} <= {page.name for page in SESSIONS}


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_the_python_sessions_of_a_page_are_true(page):
    tried = doctest.testfile(str(page), module_relative=False, verbose=False)
    assert tried.attempted > 0
    assert tried.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    assert loose_ends(page) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_readme_leads_to_every_page(page):
    assert f"(docs/{page.name}" in (ROOT / "README.md").read_text()


def test_every_file_that_contributing_names_is_there():
    assert absent((ROOT / "CONTRIBUTING.md").read_text()) == []


def test_a_planted_file_that_is_not_there_is_caught():
    assert absent("`docs/gate.md`, strategies/attic.py, tests/strategies/ops/test_FAMILY.py") == ["strategies/attic.py"]


def test_a_planted_loose_end_is_caught(tmp_path):
    (tmp_path / "there.md").write_text("# A head, and more\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-head-and-more) [b](there.md#tail) [c](gone.md) [d](https://x.org/y#z) `[e](f)`\n")
    assert loose_ends(page) == ["page.md: there.md#tail", "page.md: gone.md"]
