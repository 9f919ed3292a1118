"""Why two slices are not the same, in words: the nearest of the statements in which they differ."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from strategies.gate.changes.dependency_slice import OP, REGISTRATION, RULE, Part, Slice
from strategies.gate.changes.module_model import Function, Unit


def reason(now: Slice, then: Slice, functions: Collection[Unit], makers: Collection[Unit]) -> str:
    """What changed from `then` to `now`; `functions` hold today's rule functions, `makers` are those that make them.

    The rule function itself comes first, then its registration, the op, and what these depend on, the nearest first.
    """
    sakes: dict[str, list[Part]] = defaultdict(list)
    for part in then.parts:
        sakes[part.unit.label].append(part)
    ranked = [
        (part.unit.label not in sakes, _rank(part, functions, makers), number, part)
        for number, part in enumerate(now.parts)
        if all((other.head, other.body) != (part.head, part.body) for other in sakes.get(part.unit.label, ()))
    ]
    if ranked:
        part = min(ranked, key=lambda r: r[:3])[3]
        return _words(part, sakes.get(part.unit.label, ()), functions, makers)
    texts = {(part.unit.label, part.head, part.body) for part in now.parts}
    gone = next((p for p in then.parts if (p.unit.label, p.head, p.body) not in texts), None)
    if gone is None:
        return "what it depends on stands in another order"
    if gone.origin == REGISTRATION:
        return "its registration changed"
    return f"{_called(gone.unit)}, on which {gone.origin} depended, is gone"


def _rank(part: Part, functions: Collection[Unit], makers: Collection[Unit]) -> int:
    if part.unit in functions:
        return int(part.unit in makers)
    return 2 + (part.origin == OP) if part.root else 4


def _words(part: Part, sakes: Sequence[Part], functions: Collection[Unit], makers: Collection[Unit]) -> str:
    unit, node = part.unit, part.unit.node
    what = _what(part, sakes)
    if part.unit in makers:
        return f"{_called(unit)}, which makes its rule function, {what}"
    if part.unit in functions:
        if isinstance(node, Function) and not sakes:
            return f"its rule function is now {_called(unit)}"
        if isinstance(node, Function) and any(other.body == part.body for other in sakes):
            return "its registration changed"
        name = f" `{unit.label}`" if unit.label else f" on line {node.lineno} of {unit.path}"
        return f"its rule function{name} {what}"
    if part.root and part.origin == OP:
        return f"{_called(unit)}, which defines the op, {what}"
    if part.root:
        return "its registration changed"
    if isinstance(node, Function):
        return f"{_called(unit)}, which {part.origin} calls, {what}"
    if isinstance(node, ast.ClassDef):
        return f"the class {_called(unit)}, which {part.origin} uses, {what}"
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and unit.label:
        reader = "it" if part.origin == RULE else part.origin
        return f"the constant {unit.label} that {reader} reads {what}"
    return f"{_called(unit)}, on which {part.origin} depends, {what}"


def _what(part: Part, sakes: Sequence[Part]) -> str:
    """Whether its text changed, or only what one of its names leads to."""
    text = f"{part.head} {part.body}"
    for other in sakes:
        before = f"{other.head} {other.body}"
        if _LEAD.sub("", before) == _LEAD.sub("", text):
            news = [name for name in _LEAD.findall(text) if name not in _LEAD.findall(before)]
            return f"now refers to `{news[0]}`" if news and news[0] else "changed"
    return "changed"


_LEAD = re.compile(r"(?<=@)\w*")


def _called(unit: Unit) -> str:
    if unit.label and isinstance(unit.node, Function | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return f"`{unit.label}` in {unit.path}"
    return f"line {unit.node.lineno} of {unit.path}"
