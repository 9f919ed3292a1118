"""Inference of general rules, as Python expressions, from the rules that a search found on some kinds of calls.

`S(0) -> S(0)` and `S(1) -> S(1)` on matrices, and the same on vectors, become one line for each `d` below `ndims[0]`.
A candidate line is tested on all kinds of calls that were searched: it is dropped if it yields a wrong rule on any of
them, and of the others the one that yields most rules is taken.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.call_signature import non_tensor_arguments
from strategies.model.codec import placement_code
from strategies.model.rule import Rule
from strategies.validation.missing_rules import Survey


@dataclass(frozen=True, slots=True)
class RuleLine:
    """Rules as Python expressions: `ndims[i]` is the number of dims of tensor i, `numbers` has a letter for each
    tensor, arguments have their names, and `d` runs over the dims of tensor `over` if that is not None."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    where: tuple[str, ...] = ()
    over: int | None = None


@dataclass(frozen=True, slots=True)
class _Point:
    """One kind of call, with the values of all names that a line may use."""

    survey: Survey
    names: dict[str, Any]
    may_lack: frozenset[str]

    def value(self, text: str, d: int) -> Any:
        """The value of an expression of a line here.  The text is our own, the one that is printed."""
        return eval(text, self.names | {"d": d, "torch": torch})  # noqa: S307

    def all_true(self, where: Sequence[str], d: int) -> bool:
        return all(self.value(text, d) for text in where)


def infer_lines(surveys: Sequence[Survey]) -> list[RuleLine]:
    """Lines that together yield every missing rule, and no rule that a survey refutes."""
    lacking = frozenset(fact.argument for one in surveys for fact in one.kind.facts if fact.says == "is None")
    points = [_Point(one, values_by_name(one), lacking) for one in surveys]
    made: list[RuleLine] = []
    left = [(point, rule) for point in points for rule in point.survey.missing()]
    while left:
        here, rule = left[0]
        fitting = [p for p in points if len(p.survey.kind.dims) == len(rule.inputs)]
        yields = [(line, _yielded(line, rule, fitting)) for line in _candidates(here, rule)]
        right = [(line, found) for line, found in yields if found is not None]
        best, found = max(right, key=lambda pair: len(pair[1]))
        made.append(_restricted(best, rule, [p for p in points if any(spot == id(p) for spot, _ in found)]))
        left = [(p, r) for p, r in left if (id(p), str(r)) not in found and (p is not here or str(r) != str(rule))]
    return made


def _restricted(line: RuleLine, rule: Rule, seen: Sequence[_Point]) -> RuleLine:
    """The line, restricted to the arguments on which it was seen to hold: a value that never varied is a condition.

    Rules of partial values may depend on the dtypes, and on the signs of scalar arguments.
    """
    where = list(line.where)
    partial = any(isinstance(p, Partial) for p in rule.inputs)
    facts: dict[str, dict[str, None]] = {}
    for point in seen:
        for fact in point.survey.kind.facts:
            facts.setdefault(fact.argument, {})[fact.says] = None
    for argument, values in facts.items():
        if any(re.search(rf"\b{argument}\b", text) for text in line.where):
            continue
        lacks = argument in seen[0].may_lack
        signs = set(values) if set(values) <= {"> 0", "< 0", "== 0"} and set(values) != {"== 0"} else set()
        if signs and partial and not {"> 0", "< 0"} <= signs:
            where.append(_text(argument, _SIGNS[frozenset(signs)], lacks=lacks))
        elif len(values) == 1 and not signs:
            where.append(_text(argument, next(iter(values)), lacks=lacks))
    numbers = sorted({point.survey.kind.numbers for point in seen})
    if partial and not any("numbers" in text for text in where):
        where.append(f"numbers in {tuple(numbers)}" if len(numbers) > 1 else f"numbers == '{numbers[0]}'")
    return replace(line, where=tuple(where))


_SIGNS = {
    frozenset({"> 0"}): "> 0", frozenset({"< 0"}): "< 0",
    frozenset({"> 0", "== 0"}): ">= 0", frozenset({"< 0", "== 0"}): "<= 0",
}  # fmt: skip


def values_by_name(one: Survey) -> dict[str, Any]:
    """The names that a line may use, with their values for this kind of call."""
    given = {name: value for name, value, _ in non_tensor_arguments(one.samples[0])}
    there = {fact.argument: ... for fact in one.kind.facts if fact.says == "is not None"}
    return {"ndims": list(one.kind.dims), "numbers": one.kind.numbers} | given | there


def _candidates(here: _Point, rule: Rule) -> Iterator[RuleLine]:
    """Lines that yield this rule here, the most general first."""
    conditions = list(_conditions(here))
    shards = [i for i, p in enumerate(rule.inputs) if isinstance(p, Shard)]
    if shards:
        over = shards[0]
        anchor: Any = rule.inputs[over]
        d = int(anchor.dim)
        spots = [*((p, i) for i, p in enumerate(rule.inputs)), *((p, None) for p in rule.outputs)]
        choices = [[*_placement_codes(p, i, over, here, d)] for p, i in spots]
        for texts, extra, where in itertools.product(
            itertools.islice(itertools.product(*choices), 24), _domains(here, over), conditions
        ):
            if here.all_true(extra, d):
                yield RuleLine(texts[: len(rule.inputs)], texts[len(rule.inputs) :], (*where, *extra), over)
    inputs, outputs = tuple(map(_literal, rule.inputs)), tuple(map(_literal, rule.outputs))
    for where in conditions[-1:] if shards else conditions:
        yield RuleLine(inputs, outputs, where)


def _conditions(here: _Point) -> Iterator[tuple[str, ...]]:
    """Conditions on the call that are true here, from none to all of them."""
    kind = here.survey.kind
    facts = [_text(fact.argument, fact.says, lacks=fact.argument in here.may_lack) for fact in kind.facts]
    dims = [f"ndims[{i}] == {n}" for i, n in enumerate(kind.dims[:1])]
    numbers = [f"numbers == '{kind.numbers}'"]
    yield ()
    for one in (*facts, *dims, *numbers):
        yield (one,)
    yield from itertools.combinations((*facts, *dims, *numbers), 2)
    yield (f"ndims == {list(kind.dims)}", *numbers, *facts)


def _text(argument: str, says: str, *, lacks: bool) -> str:
    """The condition as code: `dim == [0]` also holds for tuples, as which DTensor may pass lists; None has no order."""
    if says.startswith("== ["):
        return f"list({argument}{' or ()' if lacks else ''}) {says}"
    return f"{argument} is not None and {argument} {says}" if lacks and says[0] in "<>" else f"{argument} {says}"


def _domains(here: _Point, over: int) -> Iterator[tuple[str, ...]]:
    """Conditions on the dim `d`: none, other dims than those that an argument names, or only those."""
    yield ()
    yield from ((f"d {where}",) for where in (f"< ndims[{over}] - 1", f"< ndims[{over}] - 2", "== 0", "> 0", "> 1"))
    for name, value in here.names.items():
        if type(value) is int and "dim" in name:
            yield (f"d != {name} % ndims[{over}]",)
            yield (f"d == {name} % ndims[{over}]",)
        elif _are_dims(name, value) and all(type(v) is int for v in value):
            yield (f"d not in [k % ndims[{over}] for k in {name}]",)
            yield (f"d in [k % ndims[{over}] for k in {name}]",)


def _are_dims(name: str, value: object) -> bool:
    return isinstance(value, (list, tuple)) and "dim" in name and name != "ndims"


def _placement_codes(p: Placement | None, leaf: int | None, over: int, here: _Point, d: int) -> Iterator[str]:
    """Expressions in terms of `d` whose value here is that placement."""
    if not isinstance(p, Shard):
        yield _literal(p)
        return
    ways = ["d"]
    ways += [f"d + ndims[{leaf}] - ndims[{over}]"] if leaf is not None else [f"d + max(ndims) - ndims[{over}]"]
    for name, value in here.names.items() if leaf is None else ():
        if type(value) is int and "dim" in name:
            ways += [f"d - (d > {name} % ndims[{over}])", f"d + (d >= {name} % (ndims[{over}] + 1))"]
        elif _are_dims(name, value):
            ways.append(f"d - sum(k % ndims[{over}] < d for k in {name})")
    for way in dict.fromkeys(ways):
        if here.value(way, d) == p.dim:
            yield f"Shard({way})"


def _literal(p: Placement | None) -> str:
    return "None" if p is None else placement_code(p)


def _yielded(line: RuleLine, rule: Rule, points: Sequence[_Point]) -> set[tuple[int, str]] | None:
    """The rules that the line yields at each point and that are known to hold; None if one is known not to."""
    found: set[tuple[int, str]] = set()
    seen: set[int] = set()
    for point in points:
        for d in range(point.survey.kind.dims[line.over]) if line.over is not None else (0,):
            try:
                if not point.all_true(line.where, d):
                    continue
                made = Rule(rule.op, _placed(line.inputs, point, d), _placed(line.outputs, point, d))
                holds = point.survey.says(made)
            except (TypeError, KeyError, ValueError, ZeroDivisionError):  # an argument here is None, or has no dims
                return None
            if holds is False:
                return None
            if holds:
                found.add((id(point), str(made)))
                seen |= {point.survey.kind.dims[line.over]} if line.over is not None else set()
    known = any(text.startswith("ndims") for text in line.where)
    return found if line.over is None or len(seen) > 1 or known else None


def _placed(texts: Sequence[str], point: _Point, d: int) -> tuple[Placement | None, ...]:
    words = {"Shard": Shard, "Partial": Partial, "Replicate": Replicate}
    made = tuple(eval(text, words | point.names | {"d": d}) for text in texts)  # noqa: S307
    if any(isinstance(p, Shard) and p.dim < 0 for p in made):
        raise ValueError("a negative dim")
    return made


def line_text(line: RuleLine) -> str:
    """The line for a person: `R, P(max) -> P(max) where alpha > 0`.

    >>> line_text(RuleLine(("Shard(d)", "Replicate()"), ("Shard(d)",), ("d != dim % ndims[0]",), 0))
    'S(d), R -> S(d) where d != dim % ndims[0]'
    """
    sides = [", ".join(_short(text) for text in side) for side in (line.inputs, line.outputs)]
    where = f" where {' and '.join(line.where)}" if line.where else ""
    return f"{sides[0]} -> {sides[1]}{where}"


def _short(text: str) -> str:
    return text.replace("Replicate()", "R").replace("Shard(", "S(").replace("Partial('", "P(").replace("')", ")")
