"""A mutant is one file with one thing changed; what became of it under the tests of its module."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Planted:
    """A bug planted by hand: the pattern `before`, which stands in one function once, becomes `after`; `why` says what a user would see."""

    where: str
    """The file and the function or class: `strategies/planner/search/plan_cache.py::Search.run`; a file alone for what stands outside both."""
    before: str
    """Source text; each run of blanks and line ends within it stands for any other."""
    after: str
    why: str
    tests: tuple[str, ...] = ()
    """The test files that have to find it; by default those that mirror the file."""

    @property
    def path(self) -> str:
        return self.where.partition("::")[0]

    def text(self) -> str:
        """The file with the bug in it.  Raises ValueError where the function is not there, or `before` not just once in it."""
        source = (ROOT / self.path).read_text()
        start, end = _extent(source, self.where)
        inner = r"\s+".join(map(re.escape, self.before.split()))
        edges = re.match(r"(\s*).*?(\s*)\Z", self.before, re.DOTALL)
        assert edges  # it matches any text
        found = list(re.compile(edges[1] + inner + edges[2]).finditer(source, start, end))
        if len(found) != 1:
            raise ValueError(f"{self.where}: {self.before!r} stands there {len(found)} times, not once")
        return source[: found[0].start()] + self.after + source[found[0].end() :]


def bug(where: str, before: str, after: str, why: str, *tests: str) -> Planted:
    """A planted bug; the file in `where` is named without its `.py`."""
    file, separator, name = where.partition("::")
    return Planted(f"{file}.py{separator}{name}", before, after, why, tests)


@functools.lru_cache(1)  # most bugs of one file follow one another
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _extent(source: str, where: str) -> tuple[int, int]:
    """Where the function or class begins and ends in its file, in characters; the whole file where none is named."""
    name = where.partition("::")[2]
    node: ast.AST = _parsed(source)
    for part in name.split(".") if name else ():
        inner = [n for n in ast.walk(node) if isinstance(n, _NAMED) and n.name == part]
        if len(inner) != 1:
            raise ValueError(f"{where}: {part!r} is defined there {len(inner)} times, not once")
        [node] = inner
    if not isinstance(node, _NAMED):
        return 0, len(source)
    lines = source.splitlines(keepends=True)
    first = min(n.lineno for n in (node, *node.decorator_list))
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))


_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Mutant:
    """A changed file to be tried: `text` is what it holds then, `change` its changed lines as a diff."""

    path: str
    text: str
    change: str
    why: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """`end` is one of killed, survived, slow (ran out of time, which a test suite notices, too), untested, red before."""

    mutant: Mutant
    end: str
    seconds: float
    seen: str
    """The first line of pytest's summary: which test saw it."""

    @property
    def caught(self) -> bool:
        return self.end in ("killed", "slow")
