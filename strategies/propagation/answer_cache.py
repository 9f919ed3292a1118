"""The shared cache of propagated answers: `Once`, with keys that it can explain.

`Once` itself lives in `localtensor.concurrency.single_flight`, since the rank-thread world uses it too; this is its door for claims and rules.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from localtensor.concurrency.single_flight import LIMIT, BadCache, Once, Stats, clear_all
from localtensor.concurrency.single_flight_cells import Circular
from localtensor.concurrency.single_flight_explain import Part
from localtensor.concurrency.sync import THREADS, Sync
from strategies.model.rule import Leaf, overload
from strategies.propagation.ambient_state import SETTINGS
from strategies.propagation.cache_key import Key

__all__ = ["LIMIT", "BadCache", "Circular", "Once", "Stats", "answers", "call_parts", "clear_all"]


def answers(name: str, *, limit: int = LIMIT, sync: Sync = THREADS) -> Once[Any]:
    """A cache by `Key`: `answers("rules").get(key, compute, *args)`.

    >>> from strategies.propagation.cache_key import key_of
    >>> kept = answers("demo")
    >>> def asked(dim):
    ...     return key_of("aten.sum.dim_IntList", [], (Leaf(0), [dim]), {})
    >>> kept.get(asked(1), str), kept.explain(asked(-1))
    ('', 'same op; differs in: dim=[-1] vs [1]')
    """
    return Once(name=name, limit=limit, sync=sync, parts=call_parts)


def call_parts(key: Key) -> Mapping[str, Part]:
    """What a key is made of, by name: the op, its tensors, each argument, each ambient setting."""
    parts = {"op": Part(key.op, key.op)} | _tensor_parts(key.specs)
    names = _argument_names(key.op, len(key.args))
    for name, value in (*zip(names, key.args, strict=True), *key.kwargs):
        parts[name] = Part(value, _shown(value), quiet=True)
    parts["settings"] = Part(key.settings, repr(key.settings), quiet=True)
    for setting, value in zip(SETTINGS, key.ambient, strict=True):
        parts[setting.name] = Part(value, repr(value), quiet=True)
    return parts


def _tensor_parts(specs: Sequence[Hashable]) -> dict[str, Part]:
    """Placements, shapes, dtypes and axis sizes of all tensors: of each kind one part."""
    columns: dict[str, list[str]] = {"placements": [], "shapes": [], "dtypes": [], "mesh": []}
    odd = []
    for token in specs:
        text, *beyond = token if isinstance(token, tuple) else (token,)
        odd.append(tuple(beyond))
        tensor, _, lies = (text or "-[] @ -: -").partition(" @ ")
        dtype, _, shape = tensor.partition("[")
        sizes, _, placements = lies.partition(": ")
        for name, value in zip(columns, (f"({placements})", f"[{shape}", dtype, f"({sizes})"), strict=True):
            columns[name].append(value)
    parts = {name: Part(tuple(values), ", ".join(values)) for name, values in columns.items() if values}
    if any(odd):
        parts["placements"] = Part((parts["placements"].value, *odd), parts["placements"].text)
    return parts


def _argument_names(op: str, count: int) -> list[str]:
    try:
        names = [argument.name for argument in overload(op)._schema.arguments]
    except (AttributeError, ValueError):  # why: a key may be of an op that this torch does not have
        names = []
    return names[:count] + [f"args[{i}]" for i in range(len(names), count)]


def _shown(part: Hashable) -> str:
    """An argument as it was written."""
    if not isinstance(part, tuple):
        return repr(part)
    kind, *rest = part
    if kind is Leaf:
        return f"tensor {rest[0]}"
    if kind is complex:
        return f"complex({', '.join(map(_shown, rest))})"
    if kind is float:
        return str(rest[0])
    if kind is bool or kind is bytes:
        return repr(rest[0])
    inside = ", ".join(map(_shown, rest))
    return f"[{inside}]" if kind is list else f"({inside})" if kind is tuple else f"{kind.__name__}({inside})"
