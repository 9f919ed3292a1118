"""All forms, and which of them are tried on which sample."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from localtensor.layout import UNSTABLE
from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.call_edits import Form, Values, generator
from strategies.inputs.variants.dims_and_layout import DIMENSIONS, INDEXED, LAYOUTS
from strategies.inputs.variants.sizes import SCALARS, SIZES
from strategies.model.oracle import REFUSALS, Truth, same_results, tell
from strategies.model.rule import Sample

FORMS: tuple[Form, ...] = (*DIMENSIONS, *INDEXED, *SIZES, *LAYOUTS, *SCALARS)
PER_SAMPLE, PER_TRACED = 2, 1
"""Forms tried of one sample, and of one for a decomposition.  A form costs as much as a sample: with two, 24 samples
of an overload give each of its forms at least one turn."""
REFUSED = 4
"""Calls of one form that the op may refuse, on one sample, before another form has its turn."""
CANDIDATES = 32
"""Calls that one form may make of one sample."""


def variations(
    sample: Sample,
    truth: Truth,
    number: int,
    *,
    seed: int,
    traced: bool,
    budget: int = PER_SAMPLE,
    turns: Counter[str] | None = None,
    forms: Sequence[Form] = FORMS,
) -> Iterator[tuple[Sample, Truth, str]]:
    """The sample itself, and at most `budget` other calls made from it that the op takes, each with its truth and
    the name of its form; and besides those the forms that are always tried on the first samples.

    `turns` counts how often each form was tried on the samples of this overload before: those with the fewest
    turns come first, and of equals another one for each `number`.  A caller with several samples of one overload
    passes one counter for all of them, in their order.
    """
    yield sample, truth, ""
    turns = Counter() if turns is None else turns
    own = sample.origin.startswith("samples()")  # the user's word on what his op takes: the same call only
    able = [form for form in forms if form.same or not own]
    left = min(budget, PER_TRACED) if traced else budget
    seen = {_key(sample)}
    shift = {form.name: (i - number) % len(forms) for i, form in enumerate(forms)}
    order = sorted(able, key=lambda form: (number >= form.always, turns[form.name] / form.weight, shift[form.name]))
    for form in order:
        free = number < form.always and not traced
        if not left and not free:
            return
        found = _first(form, sample, truth, turns[form.name], seed, seen)
        if found is not None:
            turns[form.name] += 1
            left -= 0 if free else 1
            yield (*found, form.name)


def _first(
    form: Form, sample: Sample, truth: Truth, turn: int, seed: int, seen: set[str]
) -> tuple[Sample, Truth] | None:
    """The first call of this form that the op takes and that was not tried before; each turn begins with another."""
    made = list(itertools.islice(form.make(sample), CANDIDATES))
    start = turn % len(made) if made else 0
    fresh = [other for other in (*made[start:], *made[:start]) if form.same or _key(other) not in seen]
    for other in fresh[:REFUSED]:
        seen.add(_key(other))
        told = _told(other, seed)
        if told is not None and (not form.same or same_results(truth, told)):
            return other, told
    return None


def _told(sample: Sample, seed: int) -> Truth | None:
    try:
        truth = tell(sample, seed=seed)
    except REFUSALS:
        return None
    return truth if truth.unstable <= UNSTABLE else None


def _key(sample: Sample) -> str:
    """Calls with the same key are one to a rule, but for their values."""
    strides = [(tuple(x.stride()), x.storage_offset()) for x in sample.tensors]
    return f"{sample.arguments()} {strides}"


# Which other values are tried on which sample, and the truth about them, found again from their name and a seed.

VALUES_PER_SAMPLE = 3
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
    budget: int = VALUES_PER_SAMPLE,
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
