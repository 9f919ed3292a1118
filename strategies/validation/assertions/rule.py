"""A rule as a value and as text: the placements of a call's tensors on one mesh axis, and of its results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, Refusal
from localtensor.layout import is_supported, parse, shard_cut, shorts


class NotARule(Refusal):
    """A rule, an op or a setting that cannot be parsed, or a rule that does not fit the op's calls."""


class NothingTested(Refusal, argument="calls"):
    """No call could be tested, and that is no pass."""

    PROBLEM = "nothing was tested: {why}"


class WrongRule(AssertionError):
    """The rule is wrong; the message shows the smallest case found.

    `script` is a program of plain torch that shows it, `example` a decorator for a test with `rule_cases`, `repeat`
    the call that tests this case alone, `case` the case itself.
    """

    def __init__(self, message: str, *, case: object, script: str, example: str, repeat: str) -> None:
        super().__init__(message)
        self.case, self.script, self.example, self.repeat = case, script, example, repeat


_Side: TypeAlias = Placement | str | Sequence[Placement | str | None] | None
RuleLike: TypeAlias = "AssertedRule | str | Sequence[_Side]"
Layouts: TypeAlias = Placement | str | Sequence[Placement | str | Sequence[Placement | str]]
_ITEMS = re.compile(r"[^,()]+(?:\([^()]*\))?")
_REMEDY = "Write it as 'S(0), R -> S(0)', with '-' for a result that is no tensor, or as (inputs, outputs)."


@dataclass(frozen=True, slots=True)
class AssertedRule:
    """`inputs -> outputs`: a placement for each tensor of the call, and for each result; None for one that is no tensor.

    >>> AssertedRule.read("S(0), R -> S(0), -")
    AssertedRule.read('S(0), R -> S(0), -')
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]

    @classmethod
    def read(cls, rule: RuleLike, call: str = "assert_rule") -> AssertedRule:
        """The rule from text, from (inputs, outputs), or from a rule.  Raises `NotARule` and `BadPlacement`.

        The sides of a tuple may be texts, placements, or sequences of them.
        """
        if isinstance(rule, AssertedRule):
            return rule
        sides = rule.split("->") if isinstance(rule, str) else rule
        if not isinstance(sides, tuple | list) or len(sides) != 2:
            raise NotARule(call, "rule", repr(rule), "it has no two sides, inputs and outputs", _REMEDY)
        inputs, outputs = (_placements(side, rule, call) for side in sides)
        if not inputs or None in inputs:
            raise NotARule(call, "rule", repr(rule), "each input is a tensor, and there is at least one", _REMEDY)
        return cls(tuple(p for p in inputs if p is not None), outputs)

    def __str__(self) -> str:
        return f"{shorts(self.inputs)} -> {shorts(self.outputs)}".rstrip()

    def __repr__(self) -> str:
        return f"AssertedRule.read({str(self)!r})"


def read_layouts(side: Layouts, call: str, argument: str) -> tuple[tuple[Placement, ...], ...]:
    """The layouts of several tensors: "S(0), R" is one axis and two tensors; a tuple for each tensor is several axes.

    Raises `BadPlacement`, and `NotARule` where tensors have placements for different numbers of axes.
    """
    if isinstance(side, str | Placement):
        found: list[tuple[Placement | None, ...]] = [(p,) for p in _placements(side, side, call)]
    else:
        if not isinstance(side, Sequence):
            raise NotARule(call, argument, repr(side), "it is no list of placements", _LAYOUTS)
        found = [_placements(item, side, call) for item in side]
    axes = {len(layout) for layout in found}
    if len(axes) != 1 or 0 in axes or any(p is None for layout in found for p in layout):
        raise NotARule(call, argument, repr(side), "each tensor has a placement for each axis of one mesh", _LAYOUTS)
    return tuple(tuple(p for p in layout if p is not None) for layout in found)


_LAYOUTS = "Write ['S(0)', 'R'] for two tensors on one axis, [('S(0)', 'R')] for one tensor on two axes."


def _placements(side: object, rule: object, call: str) -> tuple[Placement | None, ...]:
    if isinstance(side, str):
        words = [word.strip() for word in _ITEMS.findall(side)]
        left = _ITEMS.sub("", side).replace(",", "").strip()
        if left or side.count(",") - sum(word.count(",") for word in words) > max(len(words) - 1, 0):
            raise NotARule(call, "rule", repr(rule), f"{side.strip()!r} is no list of placements", _REMEDY)
        return tuple(_placement(word) for word in words if word)
    items: object = (side,) if side is None or isinstance(side, Placement) else side
    if not isinstance(items, Sequence):
        raise NotARule(call, "rule", repr(rule), f"{side!r} is no list of placements", _REMEDY)
    return tuple(_placement(item) for item in items)


def _placement(item: Placement | str | None) -> Placement | None:
    if item is None or (isinstance(item, str) and item.strip() == "-"):
        return None
    found = parse(item) if isinstance(item, str) else item
    if not is_supported(found) or (shard_dim(found) or 0) < 0:
        problem = "only R, S(dim), SS(dim,factor) and the five P mean anything here"
        raise BadPlacement("assert_rule", str(found), problem)
    return found


def shard_dim(placement: Placement | None) -> int | None:
    """The dim that it shards, or None."""
    cut = shard_cut(placement)
    return None if cut is None else cut[0]
