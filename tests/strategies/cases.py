"""Samples, claims and verdicts in few words, for the tests of all rooms of `strategies`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import parse
from strategies.inputs.variants.all_variants import oracle_with_values
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Rule, Sample, call_of, overload
from strategies.model.verdict import Instance, Verdict
from strategies.validation.probe import Probe, check_claims


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same for the same arguments; integers are from -9 to 9."""
    rng = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=rng, dtype=dtype)
    return torch.randint(-9, 10, shape, generator=rng).to(dtype)


def sample(op: str, *args: Any, **kwargs: Any) -> Sample:
    """One call of an overload, of aten unless another namespace is named."""
    name = op if op.count(".") == 2 else f"aten.{op}"
    call, tensors = call_of(overload(name), args, kwargs)
    return Sample(call, tuple(tensors), "test")


def placements(text: str) -> tuple[Placement | None, ...]:
    return tuple(None if p.strip() == "-" else parse(p) for p in text.split(", "))


def rule(one: Sample, text: str) -> Rule:
    """`rule(sample, "S(0), R -> P(sum)")`."""
    inputs, outputs = text.split(" -> ")
    return Rule(one.op, placements(inputs), placements(outputs))


def probe(one: Sample, ranks: int = 2, seed: int = 0) -> Probe:
    return Probe(one, run_oracle(one), ranks, seed=seed)


def judged(one: Sample, text: str, *, ranks: int = 2, seed: int = 0, extremes: bool = False, **claim: Any) -> Instance:
    """The verdict on one rule; `extremes` asks it of NaN and infinities too."""
    what, oracle = Claim(rule(one, text), "test", **claim), run_oracle(one)
    wild = oracle_with_values(one, oracle, "specials", seed) if extremes else None
    (instance,) = check_claims(one, oracle, ranks, [what], seed=seed, variants={"specials": wild} if wild else None)
    return instance


def assert_sound(one: Sample, text: str, **options: Any) -> None:
    found = judged(one, text, **options)
    assert found.verdict is Verdict.SOUND, f"{found.rule} is {found.verdict}: {found.evidence.reason}"


def assert_wrong(one: Sample, text: str, because: str, **options: Any) -> None:
    """It is wrong, and the reason says this."""
    found = judged(one, text, **options)
    assert found.verdict is Verdict.UNSOUND, f"{found.rule} is {found.verdict}"
    assert because in found.evidence.reason


def silent(number):
    """Nobody listens."""
