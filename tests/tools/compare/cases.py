"""Labelled programs for `lt.compare`: a program returns the keyword arguments of one call.

Labels say what a program does wrong by its author's understanding; nothing here is fitted to what the tool finds.
`# fault: NAME` ends the line at which the fault of the program NAME sits.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = {
    "__init__",
    "__main__",
    "cases",
    "last_layers",
    "layers",
    "models",
    "plans",
    "by_hand",
    "cost",
    "score",
    "test_corpus",
}
WORDS = {
    "missing": "missing all_reduce",
    "large": "too large, by a factor",
    "small": "too small, by a factor",
    "group": "wrong group",
    "replicas": "replicas differ",
    "slice": "wrong slice",
    "stale": "stale",
    "dtype": "dtype",
    "counted": "counted by each rank",
    "values": "wrong values",
}
Program = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A program; `kind` is None if it is right.

    kind    class of the fault
    module  the module, or the parameter, whose values go wrong first; several, with "|" between them, if each may be named
    word    a key of WORDS: what a verdict should tell; several, with "|" between them, if each is right
    op      an operation by which an explanation may name the place, where it cannot name the line
    source  where the pattern was reported: repository#number, or a paper
    """

    program: Program
    kind: str | None = None
    module: str = ""
    word: str = ""
    op: str = ""
    source: str = ""
    late: bool = False

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def file(self) -> Path:
        return Path(inspect.getsourcefile(self.program) or "").resolve()

    @property
    def places(self) -> list[str]:
        """file.py:line of each line of the statement that is marked as the fault of this program."""
        text, mark = self.file.read_text(), f"# fault: {self.name}"
        at = [number for number, line in enumerate(text.splitlines(), 1) if line.rstrip().endswith(mark)]
        lines = set(at)
        for node in ast.walk(ast.parse(text)):
            simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
            if simple and any(node.lineno <= one <= (node.end_lineno or 0) for one in at):  # type: ignore[attr-defined]
                lines |= set(range(node.lineno, (node.end_lineno or 0) + 1))  # type: ignore[attr-defined]
        return [f"{self.file.name}:{one}" for one in sorted(lines)]


CASES: list[Case] = []


def faulty(
    kind: str, module: str, word: str, source: str, *, op: str = "", late: bool = False
) -> Callable[[Program], Program]:
    def mark(program: Program) -> Program:
        CASES.append(Case(program, kind, module, word, op, source, late))
        return program

    return mark


def right(*, late: bool = False) -> Callable[[Program], Program]:
    def mark(program: Program) -> Program:
        CASES.append(Case(program, late=late))
        return program

    return mark


def cases() -> Iterator[Case]:
    for file in sorted(HERE.glob("*.py")):
        if file.stem not in OURS:
            importlib.import_module(f"{__package__}.{file.stem}")
    yield from CASES
