"""All input forms and values, and the choice of those that are tested on a sample.

Values are found again from their name and a seed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from strategies.inputs.variants.adversarial import VALUES, Values, values_generator, with_repeated_indices
from strategies.inputs.variants.dims_and_layout import DIMENSIONS, INDEXED, LAYOUTS, InputForm, with_no_dims
from strategies.inputs.variants.sizes import SCALARS, SIZES, other_flags, with_sizes_of_a_tensor
from strategies.inputs.variants.undrawn import COUNTED
from strategies.model.arguments import argument_values, schema_arguments
from strategies.model.call_signature import diverse_subset, numeric_arguments
from strategies.model.oracle import OracleResult, run_stable_oracle, same_results
from strategies.model.rule import Sample, dtype_class
from strategies.model.verdict import ALONE, MESHES, PAIRS

FORMS: tuple[InputForm, ...] = (*DIMENSIONS, *INDEXED, *SIZES, *LAYOUTS, *SCALARS, *COUNTED)
PER_SAMPLE, PER_TRACED = 2, 1
"""Forms tested per sample, and per sample of a decomposition.  A form costs as much as a sample: with two, 24 samples
of an overload give each of its forms at least one turn."""
MOST_REJECTED = 4
"""Calls of one form that the op may reject, on one sample, before the next form has its turn."""
CANDIDATES = 32
"""Calls that one form may make from one sample."""
INFINITE = 2
"""Further samples with an infinite number among their arguments, such as the order of a norm, which has a gradient of its own; as many
again over all dims."""
VALUES_PER_SAMPLE = 3
"""Other values tested per sample.  The claims are the same, so values cost less than forms."""
FOLLOWED_SAMPLES = {PAIRS: {"real": 5, "integer": 1, "complex": 1}, MESHES: {"real": 3, "integer": 1}}
"""Samples of one overload and class of dtypes that are tried with what follows them, and on several axes."""
OWN_VALUES = Values("", "the sample's own values", lambda sample, rng: sample.tensors)


def variations(
    sample: Sample,
    oracle: OracleResult,
    number: int,
    *,
    seed: int,
    traced: bool,
    budget: int = PER_SAMPLE,
    turns: Counter[str] | None = None,
    refused: Counter[str] | None = None,
    forms: Sequence[InputForm] = FORMS,
) -> Iterator[tuple[Sample, OracleResult, str]]:
    """The sample, then at most `budget` other calls made from it that the op accepts, each with its oracle and form name.

    Forms with `always` are tested on the first samples in addition.  `number` is the number of the sample in its
    overload.  `turns` counts how often each form was tested on the samples of this overload before, and is updated:
    forms with the fewest turns come first, rotated by `number`.  Pass one counter for all samples of an overload, in
    their order.  `refused` counts how often a form made no call that the op accepts, and is updated.
    """
    yield sample, oracle, ""
    refused = Counter() if refused is None else refused
    turns = Counter() if turns is None else turns
    own = sample.origin.startswith("samples()")  # the user's own samples: only calls with the same results
    able = [form for form in forms if form.same or not own]
    left = min(budget, PER_TRACED) if traced else budget
    seen = {_key(sample)}
    shift = {form.name: (i - number) % len(forms) for i, form in enumerate(forms)}
    order = sorted(able, key=lambda form: (number >= form.always, turns[form.name] / form.weight, shift[form.name]))
    for form in order:
        free = number < form.always and not traced
        if not left and not free:
            return
        found = _first(form, sample, oracle, turns[form.name], seed, seen)
        if found is None:
            refused[form.name] += 1
        else:
            turns[form.name] += 1
            left -= 0 if free else 1
            yield (*found, form.name)


ORDERS = ("", "ascending", "descending")
"""The order of the floats of samples in turn: what is copied from the first rank is right where it has the maximum."""
CHANGED = 4
"""The most samples of which a call with other flags, without dims or with other sizes is chosen."""


def samples_for(kind: str, found: Sequence[Sample], seed: int) -> tuple[Sample, ...]:
    """The samples for a kind of test: all of them for the op alone, a choice of each class of dtypes for the others."""
    if kind == ALONE:
        return tuple(found)
    chosen: list[Sample] = []
    for dtypes, most in FOLLOWED_SAMPLES[kind].items():
        alike = [one for one in found if one.tensors and dtype_class(one) == dtypes]
        chosen += followed_samples(alike, most, seed) if kind == PAIRS else mesh_samples(alike, most)
    return tuple(chosen)


def followed_samples(found: Sequence[Sample], most: int, seed: int) -> list[Sample]:
    """Diverse samples of one class of dtypes, of which follow-up steps are tried: a third have a flag toggled or other dims.

    The first has its own values, and of the others some have their maximum on the first rank and some on the last one.

    What a gradient shows depends on the arguments, and that of a flag often on indices that come more than once, on several ranks.
    """
    rng = values_generator("repeated indices", seed)
    again = ((one, with_repeated_indices(one, rng)) for one in diverse_subset(found, CHANGED))
    flagged = [
        other
        for one, made in again
        for other in (*other_flags(replace(one, tensors=made) if made else one), *with_no_dims(one))
    ]
    chosen = diverse_subset(flagged, round(most / 3))
    chosen = [*diverse_subset(found, most - len(chosen)), *chosen]
    left = [one for one in found if all(one is not other for other in chosen)]
    chosen = [_in_order(one, ORDERS[i % len(ORDERS)], seed) for i, one in enumerate(chosen)]
    infinite = [one for one in left if any(map(_is_infinite, numeric_arguments(one.call).values()))]
    over_all = diverse_subset([other for one in infinite for other in with_no_dims(one)], INFINITE)
    return [*chosen, *diverse_subset(infinite, INFINITE), *over_all]


def _in_order(sample: Sample, order: str, seed: int) -> Sample:
    """The sample with its floats in that order, if the op takes them; the sample itself if not, or if it is the user's own."""
    if not order or sample.origin.startswith("samples()"):
        return sample
    made = values_named(order).make(sample, values_generator(order, seed))
    other = sample if made is None else replace(sample, tensors=made, origin=f"{sample.origin}, {order}")
    return other if other is sample or run_stable_oracle(other, seed=seed) is not None else sample


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def mesh_samples(found: Sequence[Sample], most: int) -> list[Sample]:
    """The first sample of one class of dtypes, and diverse others, among them the call with the sizes of its own tensors."""
    own = [other for one in found[:CHANGED] for other in with_sizes_of_a_tensor(one)]
    return [*found[:1], *diverse_subset([*own, *found[1:]], most - 1)]


def _first(
    form: InputForm, sample: Sample, oracle: OracleResult, turn: int, seed: int, seen: set[str]
) -> tuple[Sample, OracleResult] | None:
    """The first call of this form that the op accepts and that was not tested before; each turn starts with another."""
    made = list(itertools.islice(form.make(sample), CANDIDATES))
    start = turn % len(made) if made else 0
    fresh = [other for other in (*made[start:], *made[:start]) if form.same or _key(other) not in seen]
    for other in fresh[:MOST_REJECTED]:
        seen.add(_key(other))
        found = run_stable_oracle(other, seed=seed)
        if found is not None and (not form.same or same_results(oracle, found)):
            return other, found
    return None


def _key(sample: Sample) -> str:
    """The signature of a call: shapes, dtypes, strides and arguments, without the values of tensors."""
    strides = [(tuple(x.stride()), x.storage_offset()) for x in sample.tensors]
    return f"{sample.arguments()} {strides}"


@functools.cache
def values_named(variant: str) -> Values:
    """The values of that name; `OWN_VALUES` for an unknown name."""
    return next((kind for kind in VALUES if kind.name == variant), OWN_VALUES)


def oracle_with_values(sample: Sample, oracle: OracleResult, variant: str, seed: int) -> OracleResult | None:
    """The oracle of the sample with the values of that name; None where they do not apply.

    It is determined by the seed.  `oracle` is the oracle of the sample's own values.
    """
    kind = values_named(variant)
    if kind is OWN_VALUES:
        return oracle
    made = None if oracle.metadata_only else kind.make(sample, values_generator(variant, seed))
    if made is None:
        return None
    if all(a is b for a, b in zip(made, oracle.inputs, strict=True)):
        return oracle
    other = run_stable_oracle(sample, made, seed=seed)
    return other if other is not None and _shapes(other) == _shapes(oracle) else None


def _shapes(oracle: OracleResult) -> list[object]:
    """The shapes of the results: claims hold only for values with the shapes of the sample's own."""
    return [getattr(o, "shape", None) for o in oracle.outputs]


def adverse(
    sample: Sample,
    oracle: OracleResult,
    number: int,
    *,
    seed: int,
    budget: int = VALUES_PER_SAMPLE,
    turns: Counter[str] | None = None,
    refused: Counter[str] | None = None,
    values: Sequence[Values] = VALUES,
) -> dict[str, OracleResult]:
    """At most `budget` other values for one sample: their names, each with its oracle.

    `number`, `turns` and `refused` are as in `variations`, for values.
    """
    turns = Counter() if turns is None else turns
    refused = Counter() if refused is None else refused
    found: dict[str, OracleResult] = {}
    shift = {kind.name: (i - number) % len(values) for i, kind in enumerate(values)}
    for kind in sorted(values, key=lambda kind: (turns[kind.name], shift[kind.name])):
        if len(found) == budget:
            break
        other = oracle_with_values(sample, oracle, kind.name, seed)
        if other is None:
            refused[kind.name] += 1
        else:
            turns[kind.name] += 1
            found[kind.name] = other
    return found


def wild_values(sample: Sample, oracle: OracleResult, seed: int) -> dict[str, OracleResult]:
    """NaN and infinities for a call that is given an optional number, which may take their place: `nan_to_num(x, posinf=0)`."""
    given = argument_values(sample)
    numbers = [a.name for a in schema_arguments(sample.op) if a.kind in ("Optional[float]", "Optional[number]")]
    if all(given.get(name) is None for name in numbers):
        return {}
    made = {kind.name: oracle_with_values(sample, oracle, kind.name, seed) for kind in VALUES if kind.wild}
    return {name: other for name, other in made.items() if other is not None}
