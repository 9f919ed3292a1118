"""The shared cache of propagated calls, and its keys: all that a propagation may depend on, and nothing else.

Of a spec, a key has the placements with their exact classes (torch treats a subclass as equal to its parent), the sizes
of the mesh axes, shape, dtype and shard order; no mesh, axis names, process group or rank.  Of an argument it has the
value and the type, because 1, 1.0 and True are equal and mean different things, and so do 0.0 and -0.0; NaN equals
itself.  An argument that cannot be held by value raises `NoKey`: such a call is not cached.

A `CallKey` is a tuple, not a dataclass, and a spec in it a string: C hashes both, and a string only once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.concurrency import (
    LIMIT,
    SELF_KEYED_TYPES,
    THREAD_SYNC,
    IdentityKey,
    KeyPart,
    SingleFlightCache,
    Sync,
    uncommon_value_key,
    value_key,
)
from localtensor.layout import Spec, StridedShard
from localtensor.threads import SETTINGS, ambient_settings
from strategies.model.call_signature import NoKey, spec_key
from strategies.model.rule import Leaf, overload

_VALUES = frozenset({Replicate, Shard, Partial, StridedShard})
"""Placement classes whose equality compares the meaning."""
SPECS_LIMIT = 4096
"""The number of specs known by identity.  Beyond it the table is cleared, which costs time only."""


class CallKey(NamedTuple):
    """The key of a call.  Calls with equal keys are propagated alike."""

    op: str
    specs: tuple[Hashable, ...]
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]
    settings: Hashable
    ambient: tuple[Hashable, ...]


class CallKeyFactory:
    """A factory of keys.  It knows specs that it has met by identity, for speed.

    Thread-safe.  `settings` is whatever else its owner's answers depend on.
    """

    __slots__ = ("_limit", "_seen", "settings")

    def __init__(self, settings: Hashable = (), limit: int = SPECS_LIMIT) -> None:
        self.settings = settings
        self._limit = limit
        self._seen: dict[int, tuple[Spec, Hashable]] = {}

    def of(self, op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKey:
        """The key of a call with `specs` by leaf number, and a `Leaf` in `args` and `kwargs` for each tensor.

        Raises `NoKey` for an argument that cannot be held by value.
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
                (Leaf, value.index) if kind is Leaf else value if kind in SELF_KEYED_TYPES else value_key(value, _leaf)
            )
        named = _named(kwargs) if kwargs else ()
        return _new(CallKey, (op, tuple(tokens), tuple(parts), named, self.settings, ambient_settings()))

    def _see(self, spec: Spec) -> Hashable:
        token = spec_key(spec)
        if len(self._seen) >= self._limit:
            self._seen.clear()
        self._seen[id(spec)] = (spec, token)  # keeps the spec alive, so that its id is not reused
        return token


class SpecInterner:
    """A table of one representative for all equal specs, so that tables by identity serve new specs, too.

    Lookups are fast for specs on the same mesh object.  A spec with attributes beyond its values, or with symbolic
    sizes, represents itself.  Thread-safe.
    """

    __slots__ = ("_known", "_limit", "_placements")

    def __init__(self, limit: int = SPECS_LIMIT) -> None:
        self._limit = limit
        self._known: dict[tuple[Any, ...], Spec] = {}
        self._placements: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def of(self, spec: Spec) -> Spec:
        """The representative of a spec, which equals it and has the same mesh object."""
        # The representative keeps alive what the key names by identity.
        shape = spec.shape
        key = (id(spec.mesh), id(spec.placements), spec.dtype, spec.shard_order, shape, *map(type, shape), type(spec))
        try:
            return self._known[key]
        except KeyError:
            return self._add(spec)
        except TypeError:  # symbols cannot be hashed
            return spec

    def _add(self, spec: Spec) -> Spec:
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


_new: Callable[[type[CallKey], tuple[Any, ...]], CallKey] = tuple.__new__


def key_of(
    op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Hashable = ()
) -> CallKey:
    """The key of a single call; see `Keys.of`.

    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> spec = Spec(Mesh.of(dp=2), (parse("S(0)"),), (8, 4), torch.float32)
    >>> key = key_of("aten.sum.dim_IntList", [spec], (Leaf(0), [1]), {"keepdim": True})
    >>> key == key_of("aten.sum.dim_IntList", [spec], (Leaf(0), [True]), {"keepdim": True})
    False
    >>> key.specs
    ('f32[8,4] @ 2: S(0)',)
    """
    return CallKeyFactory(settings).of(op, specs, args, kwargs)


def value_token(value: object) -> Hashable:
    """A value with its type, as something that can be hashed: 1, 1.0 and True are three.  Raises `NoKey`."""
    return value_key(value, _leaf)


def _leaf(value: object) -> Hashable:
    if type(value) is Leaf:
        return (Leaf, value.index)
    return IdentityKey(value) if isinstance(value, torch.Generator) else uncommon_value_key(value, _leaf, _no_key)


def _no_key(value: object) -> NoKey:
    is_tensor = isinstance(value, torch.Tensor)
    problem = "a tensor is known by its spec: it must be a Leaf here" if is_tensor else "it cannot be held by value"
    return NoKey("args", value, problem)


def _named(kwargs: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    """Keyword arguments in the order of their names: their order in the call has no meaning."""
    if len(kwargs) == 1:
        return tuple([(name, value_key(value, _leaf)) for name, value in kwargs.items()])
    return tuple([(name, value_key(kwargs[name], _leaf)) for name in sorted(kwargs)])


def answers(name: str, *, limit: int = LIMIT, sync: Sync = THREAD_SYNC) -> SingleFlightCache[Any]:
    """A shared cache by `CallKey` that can explain misses: `answers("rules").get(key, compute, *args)`.

    >>> from strategies.propagation.cache import key_of
    >>> kept = answers("demo")
    >>> def sum_key(dim):
    ...     return key_of("aten.sum.dim_IntList", [], (Leaf(0), [dim]), {})
    >>> kept.get(sum_key(1), str), kept.explain(sum_key(-1))
    ('', 'same op; differs in: dim=[-1] vs [1]')
    """
    return SingleFlightCache(name=name, limit=limit, sync=sync, parts=key_parts)


def key_parts(key: CallKey) -> Mapping[str, KeyPart]:
    """The parts of a key by name: the op, its tensors, each argument, each ambient setting."""
    parts = {"op": KeyPart(key.op, key.op)} | _tensor_parts(key.specs)
    names = _argument_names(key.op, len(key.args))
    for name, value in (*zip(names, key.args, strict=True), *key.kwargs):
        parts[name] = KeyPart(value, _shown(value), quiet=True)
    parts["settings"] = KeyPart(key.settings, repr(key.settings), quiet=True)
    for setting, value in zip(SETTINGS, key.ambient, strict=True):
        parts[setting.name] = KeyPart(value, repr(value), quiet=True)
    return parts


def _tensor_parts(specs: Sequence[Hashable]) -> dict[str, KeyPart]:
    """One part each for the placements, the shapes, the dtypes and the axis sizes of all tensors."""
    columns: dict[str, list[str]] = {"placements": [], "shapes": [], "dtypes": [], "mesh": []}
    extra = []
    for token in specs:
        text, *beyond = token if isinstance(token, tuple) else (token,)
        extra.append(tuple(beyond))
        tensor, _, lies = (text or "-[] @ -: -").partition(" @ ")
        dtype, _, shape = tensor.partition("[")
        sizes, _, placements = lies.partition(": ")
        for name, value in zip(columns, (f"({placements})", f"[{shape}", dtype, f"({sizes})"), strict=True):
            columns[name].append(value)
    parts = {name: KeyPart(tuple(values), ", ".join(values)) for name, values in columns.items() if values}
    if any(extra):
        parts["placements"] = KeyPart((parts["placements"].value, *extra), parts["placements"].text)
    return parts


def _argument_names(op: str, count: int) -> list[str]:
    try:
        names = [argument.name for argument in overload(op)._schema.arguments]
    except (AttributeError, ValueError):  # why: a key may be of an op that this torch does not have
        names = []
    return names[:count] + [f"args[{i}]" for i in range(len(names), count)]


def _shown(part: Hashable) -> str:
    """An argument of a key as Python text."""
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
