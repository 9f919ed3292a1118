"""Documentation and docstrings use the words of the field: each word of another field has one that replaces it."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.test_sizes import ROOT, sources

BANNED = {
    r"on trial|trials?": "validation, test",
    r"courts?|courtroom|dockets?|witness(?:es)?|guilty|innocent": "validation, task, result",
    r"hearings?|heard|told": "result; reported, printed",
    r"truths?": "oracle, reference",
    r"loud|loudly": "raises",
    r"batons?": "run token",
    r"crews?": "worker group",
    r"mend(?:s|ed|ing)?": "fix",
    r"houses?|rooms?|staircases?|attics?": "module, package, import contracts",
    r"nobody|whoever": "no rank, any caller, the rank that",
    r"deaf": "SIGINT blocked",
    r"sad story|sad stories": "start-up error",
    r"weighings?|tally|tallies": "evidence, aggregate",
    r"likeness(?:es)?": "call signature",
}
"""Patterns of whole words, and what to write."""
ANY = re.compile("|".join(rf"\b(?:{words})\b" for words in BANNED), re.IGNORECASE)
"""One search for all of them: nearly all texts have none."""
QUOTED = re.compile(r"```.*?^ *```$|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE)
"""Code and quotations: names and other programs' words."""
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def banned(text: str) -> list[str]:
    """Banned words in a text, with what replaces each and the line in which it stands."""
    if not ANY.search(text):
        return []
    prose = QUOTED.sub(lambda found: "\n" * found[0].count("\n") + " ", text)
    hits = [
        (instead, hit)
        for words, instead in BANNED.items()
        for hit in re.finditer(rf"\b(?:{words})\b", prose, re.IGNORECASE)
    ]
    return [f"line {prose[: hit.start()].count(chr(10)) + 1}: {hit[0]}: write {instead}" for instead, hit in hits]


def docstrings(file: Path) -> list[tuple[str, str]]:
    """The docstrings of a module and of what it defines, each with its place; strings below a constant, too.

    Of a file that has no banned word, none: it need not be parsed.
    """
    source = file.read_text()
    if not ANY.search(source):
        return []
    children = [child for node in ast.walk(ast.parse(source)) for child in ast.iter_child_nodes(node)]
    constants = [(child.lineno, child.value) for child in children if isinstance(child, ast.Expr)]
    return [
        (f"{file.relative_to(ROOT)}:{line}", value.value)
        for line, value in constants
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_words_of_the_field(page):
    assert banned(page.read_text()) == []


def test_docstrings_use_the_words_of_the_field():
    texts = [text for file in sources(ROOT) for text in docstrings(file)]
    assert len(texts) > 100
    assert [f"{where}: {hit}" for where, text in texts for hit in banned(text)] == []


def test_a_planted_word_is_caught_and_a_quotation_is_not():
    assert banned("A rule\non trial.") == ["line 2: on trial: write validation, test"]
    assert banned('Named `baton`, "court":\n```text\ncrew\n```\nand mended.') == ["line 5: mended: write fix"]
    assert banned("Industrial, courteous, recommended, Amendment.") == []
