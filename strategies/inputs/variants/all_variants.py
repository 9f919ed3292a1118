"""All forms, and which of them are tried on which sample."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from localtensor.layout.tolerance import UNSTABLE
from strategies.inputs.variants.dims_and_layout import DIMENSIONS
from strategies.inputs.variants.forms_indices import INDEXED
from strategies.inputs.variants.forms_layout import LAYOUTS
from strategies.inputs.variants.scalars import SCALARS
from strategies.inputs.variants.sizes import SIZES
from strategies.inputs.variants.variant import Form
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
