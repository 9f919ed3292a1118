"""The key of a propagated answer: all that the answer may depend on, and nothing else.

Of a spec: placements with their exact classes (torch holds a subclass equal to its parent), the sizes of the mesh axes,
shape, dtype and shard order; no mesh, no axis names, no process group, no rank.  Of an argument: its value and its type,
because 1 and 1.0 and True are equal and mean different things, and so do 0.0 and -0.0; NaN is equal to itself.  What
cannot be held by value is refused with `NoKey`, not forgotten: ask without a cache then.

A `Key` is a tuple, not a dataclass, and a spec in it a text: both are hashed by C, and a text but once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.concurrency import AS_IT_IS as _AS_IT_IS
from localtensor.concurrency import (
    LIMIT,
    THREADS,
    BadCache,
    Circular,
    KeyPart,
    Same,
    SingleFlightCache,
    Stats,
    Sync,
    clear_all,
)
from localtensor.concurrency import rare_key as _rare_key
from localtensor.concurrency import value_key as _value_key
from localtensor.layout import Spec
from localtensor.layout import StridedShard as _StridedShard
from localtensor.threads import SETTINGS, ambient
from strategies.model.call_signature import NoKey, spec_token
from strategies.model.rule import Leaf, overload

_VALUES = frozenset({Replicate, Shard, Partial, _StridedShard})
"""Placements of these types are equal if they mean the same."""
SPECS_LIMIT = 4096
"""So many specs are known by identity; then all of them are forgotten, which costs time only."""


class Key(NamedTuple):
    """Equal keys have equal answers.  `parts` names what it is made of."""

    op: str
    specs: tuple[Hashable, ...]
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]
    settings: Hashable
    ambient: tuple[Hashable, ...]


class Keys:
    """Makes keys; specs that were seen before are known by identity, which is what makes it quick.

    One object may be used by many threads.  `settings` is whatever else its owner's answers depend on.
    """

    __slots__ = ("_limit", "_seen", "settings")

    def __init__(self, settings: Hashable = (), limit: int = SPECS_LIMIT) -> None:
        self.settings = settings
        self._limit = limit
        self._seen: dict[int, tuple[Spec, Hashable]] = {}

    def of(self, op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
        """The key of a call: `specs` by leaf number, a `Leaf` in `args` and `kwargs` for each tensor.

        Raises `NoKey`.
        """
        seen = self._seen
        tokens = []
        for spec in specs:
            known = seen.get(id(spec))
            tokens.append(known[1] if known is not None and known[0] is spec else self._see(spec))
        parts: list[Hashable] = []
        for value in args:
            kind = type(value)
            parts.append(
                (Leaf, value.index) if kind is Leaf else value if kind in _AS_IT_IS else _value_key(value, _leaf)
            )
        named = _named(kwargs) if kwargs else ()
        return _new(Key, (op, tuple(tokens), tuple(parts), named, self.settings, ambient()))

    def _see(self, spec: Spec) -> Hashable:
        token = spec_token(spec)
        if len(self._seen) >= self._limit:
            self._seen.clear()
        self._seen[id(spec)] = (spec, token)  # the spec lives as long as its id stands here
        return token


class Specs:
    """One object for equal specs, so that what is known by identity is found for new ones, too.

    Quick for specs on the very same mesh; a spec that knows more than its values say comes back as it is, as does one of
    symbolic sizes.  One object may be used by many threads.
    """

    __slots__ = ("_known", "_limit", "_placements")

    def __init__(self, limit: int = SPECS_LIMIT) -> None:
        self._limit = limit
        self._known: dict[tuple[Any, ...], Spec] = {}
        self._placements: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def of(self, spec: Spec) -> Spec:
        """The one spec of these placements, shape, dtype and order on this mesh object: it equals the spec that is given."""
        # What is named by identity is held by the spec that is found.
        shape = spec.shape
        key = (id(spec.mesh), id(spec.placements), spec.dtype, spec.shard_order, shape, *map(type, shape), type(spec))
        try:
            return self._known[key]
        except KeyError:
            return self._met(spec)
        except TypeError:  # symbols cannot be hashed
            return spec

    def _met(self, spec: Spec) -> Spec:
        placements = spec.placements
        if type(spec) is not Spec or type(placements) is not tuple or not _VALUES.issuperset(map(type, placements)):
            return spec
        if any([getattr(placement, "__dict__", None) for placement in placements]):
            return spec
        if len(self._known) >= self._limit:
            self._known, self._placements = {}, {}
        same = self._placements.setdefault((*map(type, placements), *placements), placements)
        key = id(spec.mesh), id(same), spec.dtype, spec.shard_order, spec.shape, *map(type, spec.shape), type(spec)
        if same is not placements and key not in self._known:
            spec = Spec(spec.mesh, same, spec.shape, spec.dtype, spec.shard_order)
        return self._known.setdefault(key, spec)


_new: Callable[[type[Key], tuple[Any, ...]], Key] = tuple.__new__


def key_of(
    op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Hashable = ()
) -> Key:
    """The same key as `Keys(settings).of`, for who asks but once.

    >>> from localtensor.layout.spec import Mesh
    >>> from localtensor.layout.spec import parse
    >>> spec = Spec(Mesh.of(dp=2), (parse("S(0)"),), (8, 4), torch.float32)
    >>> key = key_of("aten.sum.dim_IntList", [spec], (Leaf(0), [1]), {"keepdim": True})
    >>> key == key_of("aten.sum.dim_IntList", [spec], (Leaf(0), [True]), {"keepdim": True})
    False
    >>> key.specs
    ('f32[8,4] @ 2: S(0)',)
    """
    return Keys(settings).of(op, specs, args, kwargs)


# -- arguments


def value_token(value: Any) -> Hashable:
    """A value with its type, as something that can be hashed: 1, 1.0 and True are three.  Raises `NoKey`."""
    return _value_key(value, _leaf)


def _leaf(value: Any) -> Hashable:
    if type(value) is Leaf:
        return (Leaf, value.index)
    return Same(value) if isinstance(value, torch.Generator) else _rare_key(value, _leaf, _no_key)


def _no_key(value: Any) -> NoKey:
    known = isinstance(value, torch.Tensor)
    problem = "a tensor is known by its spec: it must be a Leaf here" if known else "it cannot be held by value"
    return NoKey("args", value, problem)


def _named(kwargs: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    """In the order of the names, since a call knows no other."""
    if len(kwargs) == 1:
        return tuple([(name, _value_key(value, _leaf)) for name, value in kwargs.items()])
    return tuple([(name, _value_key(kwargs[name], _leaf)) for name in sorted(kwargs)])


# The shared cache of propagated answers: `SingleFlightCache`, with keys that it can explain.
#
# `SingleFlightCache` itself lives in `localtensor.concurrency.single_flight`, since the rank-thread world uses it too; this is its door for claims and rules.

__all__ = ["LIMIT", "BadCache", "Circular", "SingleFlightCache", "Stats", "answers", "call_parts", "clear_all"]


def answers(name: str, *, limit: int = LIMIT, sync: Sync = THREADS) -> SingleFlightCache[Any]:
    """A cache by `Key`: `answers("rules").get(key, compute, *args)`.

    >>> from strategies.propagation.cache import key_of
    >>> kept = answers("demo")
    >>> def asked(dim):
    ...     return key_of("aten.sum.dim_IntList", [], (Leaf(0), [dim]), {})
    >>> kept.get(asked(1), str), kept.explain(asked(-1))
    ('', 'same op; differs in: dim=[-1] vs [1]')
    """
    return SingleFlightCache(name=name, limit=limit, sync=sync, parts=call_parts)


def call_parts(key: Key) -> Mapping[str, KeyPart]:
    """What a key is made of, by name: the op, its tensors, each argument, each ambient setting."""
    parts = {"op": KeyPart(key.op, key.op)} | _tensor_parts(key.specs)
    names = _argument_names(key.op, len(key.args))
    for name, value in (*zip(names, key.args, strict=True), *key.kwargs):
        parts[name] = KeyPart(value, _shown(value), quiet=True)
    parts["settings"] = KeyPart(key.settings, repr(key.settings), quiet=True)
    for setting, value in zip(SETTINGS, key.ambient, strict=True):
        parts[setting.name] = KeyPart(value, repr(value), quiet=True)
    return parts


def _tensor_parts(specs: Sequence[Hashable]) -> dict[str, KeyPart]:
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
    parts = {name: KeyPart(tuple(values), ", ".join(values)) for name, values in columns.items() if values}
    if any(odd):
        parts["placements"] = KeyPart((parts["placements"].value, *odd), parts["placements"].text)
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
