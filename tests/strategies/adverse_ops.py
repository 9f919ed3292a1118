"""Small ops that are easily taken for something simpler, and rules for them and for torch's that are wrong on few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.inputs.variants.adversarial import Values
from strategies.inputs.variants.all_variants import adverse, variations
from strategies.inputs.variants.dims_and_layout import InputForm
from strategies.model.arguments import argument_values
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Rule, Sample
from strategies.model.verdict import Instance, Verdict
from strategies.validation.probe import check_claims
from tests.strategies.cases import placements

LIB = torch.library.Library("adverse", "FRAGMENT")  # the ops live as long as this does


def _define(schema: str, function: Callable[..., Tensor]) -> None:
    LIB.define(schema)
    LIB.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def not_at_an_end(x: Tensor) -> Tensor:
    """By how much the maximum is above the first and the last element."""
    return x.amax() - torch.maximum(x[0], x[-1]).amax()


_define("not_at_an_end(Tensor x) -> Tensor", not_at_an_end)
_define("running_max(Tensor x) -> Tensor", lambda x: x.cummax(0).values)
_define("running_min(Tensor x) -> Tensor", lambda x: x.cummin(0).values)
_define("zeros_in(Tensor x) -> Tensor", lambda x: (x == 0).sum())
_define("peaks(Tensor x) -> Tensor", lambda x: (x == x.amax()).sum())
_define("matrix_rank(Tensor x) -> Tensor", torch.linalg.matrix_rank)
_define("of_the_largest(Tensor x) -> Tensor", lambda x: x / x.abs().amax())
_define("averaged_backward(Tensor grad) -> Tensor", lambda grad: grad.mean().expand(grad.shape).clone())
_define("some(Tensor mask) -> Tensor", lambda mask: mask.sum().clamp(max=1))
_define("some_missing(Tensor mask) -> Tensor", lambda mask: mask.logical_not().sum().clamp(max=1))
_define("distinct(Tensor index) -> Tensor", lambda index: torch.tensor(len(set(index.flatten().tolist()))))
_define(
    "saturated(Tensor x) -> Tensor", lambda x: x.to(torch.int64).clamp(-(10**6), 10**6).sum().clamp(-(10**6), 10**6)
)

WrongRule = Callable[[Sample], list[str]]
"""The claims of a rule about a call, as `S(0), R -> P(sum)`."""


def always(*claims: str) -> WrongRule:
    return lambda sample: list(claims)


def argument(sample: Sample, name: str) -> Any:
    return argument_values(sample)[name]


def tried(
    sample: Sample,
    rule: WrongRule,
    forms: Sequence[InputForm] = (),
    kinds: Sequence[Values] = (),
    turns: int = 6,
    each: int = 99,
) -> list[Instance]:
    """What the claims of a rule about this sample come to on 2, 3 and 4 ranks: with all these values, and in all
    these forms, so many turns of each with so many of the values."""
    found: list[Instance] = []
    told = run_oracle(sample)
    for turn in range(turns if forms else 1):
        counted = Counter({form.name: turn for form in forms})
        for one, oracle, name in variations(
            sample, told, turn, seed=0, traced=False, budget=99, turns=counted, forms=forms
        ):
            if turn and not name:
                continue
            others = adverse(one, oracle, turn + len(found), seed=0, budget=each if name else 99, values=kinds)
            claims = [Claim(Rule(one.op, *_sides(text)), "planted") for text in rule(one)]
            for ranks in (2, 3, 4):
                found += check_claims(one, oracle, ranks, claims, seed=0, variants=others)
    return found


def _sides(text: str) -> tuple[Any, Any]:
    inputs, outputs = text.split(" -> ")
    return placements(inputs), placements(outputs)


def verdicts(*args: Any, **options: Any) -> set[Verdict]:
    return {instance.verdict for instance in tried(*args, **options)}
