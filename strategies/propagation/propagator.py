"""`Propagator`: how a call of an op runs on a mesh, computed once for all threads.

    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import Spec, parse
    >>> from strategies.ops.semantics.rule_registry import RuleRegistry, PlacementRule, rules
    >>> def rows(query):
    ...     yield PlacementRule((parse("S(0)"), parse("S(0)")), (parse("S(0)"),))
    >>> book = RuleRegistry.of(*rules("pointwise", "each element goes by itself", ["aten.mul.Tensor"], rows))
    >>> mesh = Mesh.of(dp=2)
    >>> specs = [Spec(mesh, (parse(p),), (8, 4), torch.float32) for p in ("S(0)", "R")]
    >>> found = Propagator(book).propagate("aten.mul.Tensor", specs)
    >>> found.inputs
    (f32[8,4] @ dp:S(0), f32[8,4] @ dp:S(0))
    >>> found.outputs, found.redistributes, found.seconds
    ((f32[8,4] @ dp:S(0),), (1,), 0.0)

An answer does not depend on the rank, so all threads share it.  The first thread computes it, and it is computed again
only if something differs on which it depends: the op, placements with their classes, the sizes of the mesh, shapes,
dtypes, arguments with their types, and the settings of `localtensor.threads.state.propagation_settings`.

In front of that cache is a smaller one, for calls with the same spec objects, as a tensor keeps its own, or with specs
equal to those of an earlier call (`strategies.propagation.cache.SpecInterner`).  It is keyed by the identity of
objects.  So it holds only arguments for which identity means equality (`_lasting`), and keeps all of them alive, so
that no identity is reused.  Of the ambient settings its key has the default dtype alone: answers are computed with the
others off (`meta_run.calm`).

A call passes through these levels until one has the answer: `propagate` by identity, `_equal` by the first equal specs,
`_looked_up` by the key of all values, and the computation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_not
from types import MappingProxyType
from typing import Any

import torch

from localtensor._util import ambient
from localtensor.concurrency import LIMIT as KEPT
from localtensor.concurrency import THREAD_SYNC, AtomicCounter, SingleFlightCache, Stats, Sync
from localtensor.layout import NETWORK, Mesh, Network, Spec
from strategies.model.call_signature import NoKey
from strategies.model.rule import LEAVES, Leaf, leaf_at
from strategies.ops.semantics.local_call import check_registry
from strategies.ops.semantics.rule_registry import RuleRegistry
from strategies.propagation.cache import CallKey, CallKeyFactory, SpecInterner, answers
from strategies.propagation.compute import Decompose, UncachedPropagator
from strategies.propagation.decomposition import decomposition
from strategies.propagation.mesh_expansion import LIMIT, Propagation
from strategies.propagation.meta_run import fake_mode_lock

_STABLE = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SMALL = range(-5, 257)
"""The integers of which Python has one object each; others are new objects each time."""
_IN_ORDER = tuple(LEAVES[:count] for count in range(17))
_default_dtype = torch.get_default_dtype
MAX_CALLS_BY_IDENTITY = 4096
"""The number of calls known by identity.  Beyond it the table is cleared, which costs time only."""
STORE_ONE_OF = 32
"""One of so many calls with specs equal to known ones is added to the table by identity."""
ANYWHERE = sys.maxsize
"""The position of an op's list argument if it varies."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Propagator:
    """Propagation of calls by a registry of rules, with a cache.  Thread-safe.

    `limit` is the number of prefixes of combinations that the search looks at for one call, `kept` the number of cached
    answers.  An op without a rule runs by its decomposition, unless `decompose` is None, else with all tensors
    replicated if `replicate_all`.  Raises `InvalidRule` for a registry with an invalid rule.
    """

    __slots__ = (
        "__weakref__", "_afresh", "_cache", "_hit", "_hits", "_keys", "_listed", "_names", "_same", "_specs", "_turn",
    )  # fmt: skip

    def __init__(
        self, book: RuleRegistry, *, limit: int = LIMIT, sync: Sync = THREAD_SYNC, replicate_all: bool = False,
        decompose: Decompose | None = decomposition, network: Network = NETWORK, kept: int = KEPT,
    ) -> None:  # fmt: skip
        check_registry(book)
        # The owner may change the book, which is a mapping; cached answers must not depend on that.
        own = replace(book, entries=MappingProxyType(dict(book.entries)))
        self._afresh = UncachedPropagator(own, limit, sync, replicate_all, decompose, network, fake_mode_lock(sync))
        self._keys = CallKeyFactory()
        self._cache: SingleFlightCache[Propagation] = answers("propagate", limit=kept, sync=sync)
        self._names: dict[torch._ops.OpOverload, str] = {}
        # Replaced by `clear`, so that calls in progress do not fill the new one.
        self._same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._listed: dict[Any, int] = {}  # the position of the list argument, for ops called with lists
        self._specs, self._turn = SpecInterner(), itertools.count()
        self._hits = AtomicCounter()
        self._hit = self._hits.add
        ambient.add_cache(self)

    def propagate(
        self, op: str | torch._ops.OpOverload, specs: Sequence[Spec], args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] = _NOTHING, *, mesh: Mesh | None = None,
    ) -> Propagation:  # fmt: skip
        """How the call runs; `args` and `kwargs` hold a `Leaf(i)` for the tensor of `specs[i]`.

        Without `args` the arguments are the tensors, in their order.  `mesh` is for calls without a tensor.  Raises
        `InvalidCall`, `MissingRuleError`, `InvalidRule`, `NoMetadata` or `WouldMoveWritten`; none of them is cached.
        """
        if args is None:
            args = _IN_ORDER[len(specs)] if len(specs) < len(_IN_ORDER) else tuple(map(leaf_at, range(len(specs))))
        if mesh is not None:
            return self._looked_up(op, specs, args, kwargs, mesh)
        same, where = self._same, self._listed.get(op)
        known: tuple[Any, ...]
        if where is None:
            if kwargs:
                known = (op, _default_dtype(), *kwargs, *map(id, [*specs, *args, *kwargs.values()]))
            else:
                known = (op, _default_dtype(), *map(id, [*specs, *args]))
        elif not kwargs and where < len(args) and type(items := args[where]) is list:
            named = [*specs, *items, *args]  # a list is a new object each time: its items are compared
            del named[where - len(args)]
            known = (op, _default_dtype(), len(items), *map(id, named))
        else:
            known = (op, _default_dtype(), *kwargs, *map(id, specs), *_ids(args), *_ids(kwargs.values()))
        entry = same.get(known)
        if entry is None:
            return self._equal(same, known, where, specs, args, kwargs)
        self._hit()
        return entry[0]  # type: ignore[no-any-return]

    def _equal(
        self, same: dict[Any, Any], known: tuple[Any, ...], where: int | None, specs: Sequence[Spec],
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> Propagation:  # fmt: skip
        """The answer for the first specs equal to these, or for these if they are the first."""
        try:
            firsts = tuple(map(self._specs.of, specs))
        except AttributeError:
            return self._looked_up(known[0], specs, args, kwargs, None)  # which reports what is no spec
        if not any(map(is_not, firsts, specs)):
            found = self._looked_up(known[0], specs, args, kwargs, None)
        else:
            found = self.propagate(known[0], firsts, args, kwargs)
            if next(self._turn) % STORE_ONE_OF:  # specs made for each call would fill the table
                return found
        self._remember(same, known, where, found, specs, args, kwargs)
        return found

    def _remember(
        self, same: dict[Any, Any], known: tuple[Any, ...], where: int | None, found: Propagation,
        specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store the answer with all objects whose identity is in its key, so that no identity is reused."""
        values = (*args, *kwargs.values())
        lists = [place for place, value in enumerate(values) if type(value) is list]
        if lists and (where is None or (where != ANYWHERE and len(lists) > 1)):  # the key has a list's own identity
            place = lists[0] if len(lists) == 1 else ANYWHERE
            if self._listed.setdefault(known[0], place) != place:  # keys with a position are for one position only
                self._listed[known[0]] = ANYWHERE
        elif _lasting(values):
            if len(same) >= MAX_CALLS_BY_IDENTITY:
                same.clear()
            same[known] = (found, *specs, *(tuple(value) if type(value) is list else value for value in values))

    def _looked_up(
        self, op: str | torch._ops.OpOverload, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any],
        mesh: Mesh | None,
    ) -> Propagation:  # fmt: skip
        """The answer by the values of all that it depends on."""
        name = op if isinstance(op, str) else self._names.get(op) or self._names.setdefault(op, str(op))
        try:
            key = self._key(name, specs, args, kwargs, mesh)
        except NoKey:  # an argument that cannot be held by value: not cached
            return self._afresh(name, specs, args, kwargs, mesh)
        except (AttributeError, TypeError):
            if all(isinstance(spec, Spec) for spec in specs):
                raise
            return self._afresh(name, specs, args, kwargs, mesh)  # which reports what is no spec
        if mesh is None and specs:
            mesh = specs[0].mesh
        for spec in specs:
            if spec.mesh is not mesh and spec.mesh != mesh:  # the key lacks the names of the axes
                return self._afresh(name, specs, args, kwargs, mesh)
        found = self._cache.get(key, self._afresh, name, specs, args, kwargs, mesh)
        if found.mesh is mesh or mesh is None or found.mesh == mesh:
            return found
        return self._cache.get(key._replace(settings=("axes", mesh.names)), found.on, mesh)

    def _key(
        self, name: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh | None
    ) -> CallKey:
        """The key of the answer; specs include the sizes of their mesh.  Raises `NoKey`."""
        key = self._keys.of(name, specs, args, kwargs)
        return key if specs else key._replace(settings=("mesh", mesh and mesh.sizes))

    def stats(self) -> Stats:
        """How many calls were answered from the cache, and how many were computed."""
        stats = self._cache.stats()
        return replace(stats, hits=stats.hits + self._hits.read())

    def clear(self) -> None:
        """Empty the cache."""
        self._same, self._specs = {}, SpecInterner()
        self._cache.clear()

    def after_fork(self) -> None:
        """Nothing to do in a forked child: the tables are consistent at any time."""

    def explain_miss(
        self, op: str | torch._ops.OpOverload, specs: Sequence[Spec], args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] = _NOTHING, *, mesh: Mesh | None = None,
    ) -> str:  # fmt: skip
        """Whether this call is in the cache, and if not, how the nearest cached one differs.

        Raises `NoKey` for an argument that cannot be held by value: such a call is never cached.
        """
        given = tuple(map(leaf_at, range(len(specs)))) if args is None else args
        return self._cache.explain(self._key(str(op), specs, given, kwargs, mesh))


def _ids(values: Iterable[Any]) -> list[Any]:
    """Each value's identity; for a list those of its items."""
    return [(*map(id, value),) if type(value) is list else id(value) for value in values]


def _lasting(values: Iterable[Any]) -> bool:
    """Whether each value, or each item of a list, is always the same object if it is the same value."""
    for value in values:
        kind = type(value)
        if kind is list:
            if any(type(item) is list for item in value) or not _lasting(value):
                return False
        elif kind is Leaf:
            if not (0 <= value.index < len(LEAVES) and LEAVES[value.index] is value):
                return False
        elif kind not in _STABLE or (kind is int and value not in _SMALL):
            return False
    return True
