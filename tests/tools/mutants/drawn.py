"""Mutants that nobody chose: Cosmic Ray's operators, drawn by a seed, one module after the other."""

from __future__ import annotations

import ast
import difflib
import random
import warnings
from collections.abc import Iterator

from tests.tools.mutants.modules import tests_of
from tests.tools.mutants.values import ROOT, Mutant

LEFT_OUT = ("core/VariableReplacer", "core/VariableInserter", "core/ExceptionReplacer")
"""The first two need arguments; the third swaps an exception for one that nothing raises, in places that only ever propagate it."""
TRIES = 40
"""Draws for one module before it is given up: most operators have nothing to change in a given file."""


def drawn(paths: list[str], seed: int) -> Iterator[Mutant]:
    """One mutant of each module in turn, modules in drawn order, without end; a mutant comes once."""
    dice = random.Random(seed)
    paths = list(paths)
    dice.shuffle(paths)
    seen: set[str] = set()
    while paths:
        for path in list(paths):
            mutant = _one(path, dice, seen)
            if mutant is None:
                paths.remove(path)
            else:
                yield mutant


def _one(path: str, dice: random.Random, seen: set[str]) -> Mutant | None:
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / path).read_text()
    plain = _bare(source)
    names = [n for n in operator_names() if n not in LEFT_OUT]
    tree = get_ast(source)
    spots = {name: _spots(get_operator(name)(), tree) for name in names}
    able = [name for name in names if spots[name]]
    groups = sorted({_group(name) for name in able})
    for _ in range(TRIES if groups else 0):
        group = dice.choice(groups)
        name = dice.choice([n for n in able if _group(n) == group])
        text = _changed(source, name, dice.randrange(spots[name]))
        if text is None or text in seen or _bare(text) in (None, plain):
            continue
        seen.add(text)
        return Mutant(path, text, changed_lines(source, text), name.removeprefix("core/"), tests_of(path))
    return None


def _group(name: str) -> str:
    """Operators come by the hundred for `+` and by the one for `and`: first the group is drawn."""
    return name.split("_", maxsplit=1)[0]


def _spots(operator: object, tree: object) -> int:
    from cosmic_ray.ast import ast_nodes

    return sum(1 for node in ast_nodes(tree) for _ in operator.mutation_positions(node))  # type: ignore[attr-defined]


def _changed(source: str, name: str, occurrence: int) -> str | None:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(name)(), occurrence)


def _bare(source: str) -> str | None:
    """What of a source can be seen from outside; None for what does not parse.

    Left away: annotations, which nothing here evaluates; `strict=` and `frozen=`, which only ever stop our own mistakes;
    caches, which only cost time.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `x is 0` is a warning of the compiler
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return None
    for node in ast.walk(tree):
        _strip(node)
    return ast.dump(tree)


def _strip(node: ast.AST) -> None:
    if isinstance(node, ast.arg):
        node.annotation = None
    elif isinstance(node, ast.AnnAssign):
        node.annotation = ast.Constant(value=None)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if "cache" not in ast.unparse(d)]
    elif isinstance(node, ast.Call):
        node.keywords = [k for k in node.keywords if k.arg not in ("strict", "frozen", "slots", "eq")]


def changed_lines(before: str, after: str) -> str:
    """The lines that differ, as `-` and `+` lines with the number of the first."""
    old, new = before.splitlines(), after.splitlines()
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    where = lines[0].split()[1].lstrip("-").split(",")[0] if lines else "?"
    return "\n".join([f"line {where}", *(line for line in lines if line[:2] != "@@")])
