"""Which other values are tried on which sample, and the truth about them, found again from their name and a seed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from localtensor.layout.tolerance import UNSTABLE
from strategies.inputs.variants.adversarial_values import VALUES
from strategies.inputs.variants.variant import Values, generator
from strategies.model.oracle import REFUSALS, Truth, tell
from strategies.model.rule import Sample

PER_SAMPLE = 3
"""Other values tried of one sample.  The claims are the same, so that values cost less than forms do."""
OWN = Values("", "the sample's own values", lambda sample, rng: sample.tensors)


@functools.cache
def kind_of(variant: str) -> Values:
    """The values of that name; the sample's own for a name that is not in the table."""
    return next((kind for kind in VALUES if kind.name == variant), OWN)


def truth_of(sample: Sample, truth: Truth, variant: str, seed: int) -> Truth | None:
    """The truth about the sample with the values of that name, or None where they say nothing about it.

    The same for the same seed.  `truth` is the one about the sample's own values.
    """
    kind = kind_of(variant)
    if kind is OWN:
        return truth
    made = None if truth.metadata_only else kind.make(sample, generator(variant, seed))
    if made is None:
        return None
    if all(a is b for a, b in zip(made, truth.inputs, strict=True)):
        return truth
    try:
        told = tell(sample, made, seed=seed)
    except REFUSALS:  # the op refuses such values: then there is nothing to compare
        return None
    return told if told.unstable <= UNSTABLE and _shapes(told) == _shapes(truth) else None


def _shapes(truth: Truth) -> list[object]:
    """The claims are those for the sample's own results: values that give others are another call."""
    return [getattr(o, "shape", None) for o in truth.outputs]


def adverse(
    sample: Sample,
    truth: Truth,
    number: int,
    *,
    seed: int,
    budget: int = PER_SAMPLE,
    turns: Counter[str] | None = None,
    values: Sequence[Values] = VALUES,
) -> dict[str, Truth]:
    """At most `budget` other values for one sample, by name, each with its truth.

    `turns` counts how often each was tried on the samples of this overload before; those with the fewest turns
    come first, and of equals another one for each `number`.
    """
    turns = Counter() if turns is None else turns
    found: dict[str, Truth] = {}
    shift = {kind.name: (i - number) % len(values) for i, kind in enumerate(values)}
    for kind in sorted(values, key=lambda kind: (turns[kind.name], shift[kind.name])):
        if len(found) == budget:
            break
        told = truth_of(sample, truth, kind.name, seed)
        if told is not None:
            turns[kind.name] += 1
            found[kind.name] = told
    return found
