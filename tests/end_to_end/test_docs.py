"""The Python sessions in docs/ are true, and the links between the pages lead somewhere."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from localtensor.testing import draws

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
SESSIONS = [page for page in PAGES if "```pycon" in page.read_text()]
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages on what is there; the changelog also names what was."""
FILES = {"localtensor.sarif", "localtensor.xml", "localtensor.sources"}
"""Files that the gate writes, and the group of entry points for sources of rules."""


def from_root(page: Path) -> str:
    """The name of a page in the reports of tests."""
    return page.relative_to(ROOT).as_posix()


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
    """Files and folders of this repository that a page names and that are not there; capitals stand for a name to be put in."""
    named = re.findall(r"(?<![\w/.-])(?:localtensor|strategies|tests|docs)/[\w./*]*[\w*]", text)
    return [path for path in named if not re.search("[A-Z]{4}", path) and not any(ROOT.glob(path))]


def exists(dotted: str) -> bool:
    """Whether this is a module, or an attribute that is reached from one; modules named are not imported themselves."""
    parent, _, name = dotted.rpartition(".")
    try:
        if importlib.util.find_spec(dotted):
            return True
    except ModuleNotFoundError:  # its parent is no package: `localtensor.planner` is an attribute
        pass
    if not parent:
        return False
    found, *attributes = parent.split(".")
    value = importlib.import_module(found)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return hasattr(value, name) or (exists(parent) and hasattr(importlib.import_module(parent), name))


def unknown(text: str) -> list[str]:
    """Modules and names, `localtensor.testing.draws`, that a page names and that are not there."""
    named = re.findall(r"(?<![\w/.-])(?:localtensor|strategies|tests)(?:\.[A-Za-z_]\w*)+", text)
    return [name for name in named if name not in FILES and not exists(name)]


def not_in_its_file(text: str) -> list[str]:
    """Names of a constant that a page places in a file, "`COLLECTIVE_OPS` of `localtensor/...`", and that this does not have."""
    placed = re.findall(r"`(\w+)`(?: \([^()]*\))?\s+(?:of|in)\s+`((?:localtensor|strategies|tests)/[\w/]+\.py)`", text)
    return [f"{name}: {path}" for name, path in placed if not re.search(rf"\b{name}\b", (ROOT / path).read_text())]


def pictured(page: str) -> set[str]:
    """The packages of the picture in docs/architecture.md."""
    (block,) = re.findall(r"^```text\n(localtensor/ .*?)^```$", page, re.DOTALL | re.MULTILINE)
    found, top = set(), ""
    for line in block.splitlines():
        if name := re.match(r"( *)(\w+)/ ", line):
            top = top if name[1] else name[2]
            found.add(f"{top}/{name[2]}" if name[1] else name[2])
    return found


def test_there_are_pages_with_sessions():
    assert {"lockstep.md", "placements.md", "plans.md", "races.md", "rules.md"} <= {page.name for page in SESSIONS}


@pytest.mark.parametrize("page", SESSIONS, ids=from_root)
def test_the_python_sessions_of_a_page_are_true(page):
    tried = doctest.testfile(str(page), module_relative=False, verbose=False)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_the_ranks_of_the_counterexample_of_own_rules_hold_what_the_page_says():
    page = (ROOT / "docs/own_rules.md").read_text()
    ((spec, values, seed),) = re.findall(r"x=Sharded\.of\('(.+)', '(\w+)', (\d+)\)", page)
    ((first, second),) = re.findall(r"two ranks that hold (-?\d+) and (-?\d+)", page)
    held = draws.Sharded.of(spec, values, int(seed)).pieces
    assert [piece.item() for piece in held] == [int(first), int(second)]


@pytest.mark.parametrize("page", PAGES, ids=from_root)
def test_every_link_of_a_page_leads_somewhere(page):
    assert loose_ends(page) == []


def test_the_pages_in_docs_lead_to_each_other_from_the_readme():
    """Every page is reached by links from the README; the site's menu is another way."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        linked = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text())
        new |= {there for target in linked if (there := (page.parent / target).resolve()).is_file()} - reached
    assert [from_root(page) for page in DOCS if page not in reached] == []


@pytest.mark.parametrize("page", NOW, ids=from_root)
def test_every_file_and_module_that_a_page_names_is_there(page):
    text = page.read_text()
    assert absent(text) == [] and unknown(text) == [] and not_in_its_file(text) == []


def test_the_picture_of_the_architecture_has_every_package():
    packages = {
        folder.relative_to(ROOT).as_posix()
        for top in ("localtensor", "strategies")
        for folder in (ROOT / top, *(ROOT / top).iterdir())
        if (folder / "__init__.py").is_file()
    }
    assert pictured((ROOT / "docs/architecture.md").read_text()) == packages


def test_a_planted_file_that_is_not_there_is_caught():
    text = "`docs/gate.md`, strategies/attic.py, `tests/attic/`, tests/strategies/ops/test_FAMILY.py"
    assert absent(text) == ["strategies/attic.py", "tests/attic"]


def test_a_planted_module_that_is_not_there_is_caught():
    text = "`localtensor.testing.draws`, `localtensor.planner.Plan`, `strategies.attic`, `localtensor.errors.Attic`, tests.tools.mutants"
    assert unknown(text) == ["strategies.attic", "localtensor.errors.Attic"]


def test_a_planted_name_in_another_file_is_caught():
    text = "a row in `COLLECTIVE_OPS` of `localtensor/collectives/c10d_table.py`, in `ATTIC` (by name) of\n`localtensor/__init__.py`"
    assert not_in_its_file(text) == ["ATTIC: localtensor/__init__.py"]


def test_a_planted_loose_end_is_caught(tmp_path):
    (tmp_path / "there.md").write_text("# A head, and more\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-head-and-more) [b](there.md#tail) [c](gone.md) [d](https://x.org/y#z) `[e](f)`\n")
    assert loose_ends(page) == ["page.md: there.md#tail", "page.md: gone.md"]
