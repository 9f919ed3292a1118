"""DTensor's propagation, shared between the ranks of a run: who asks first computes, the others get theirs at once.

torch keeps propagated shardings per thread, because they may depend on the rank.  Most do not: what a rule says
follows from placements, shapes and arguments, and a rank comes in only through the size of its own piece.  So a
result is shared if every tensor in it is cut into equal pieces, if it holds none of the placements that carry
state (_MaskPartial) or other geometry (_StridedShard), and if it was found by rules that torch brought: anybody else's
may ask for the rank, and then ranks that disagree wait for each other for ever, which a simulation must show.  Each
rank gets it on its own mesh.  The rest is computed by each rank for itself, as before; so is everything that a thread
asks while it is `alone()`: in a patch of a test's, which may watch propagation, or change it.

What is shared is kept in a `SingleFlightCache`.  Ranks take turns, and a rank that computes may lose its turn (a rule of the
user may do anything): who comes for the same then does not wait, which could be for ever, but computes alone.

torch's private parts are touched through `PRIVATE`.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from localtensor._util.patching import replaced
from localtensor.concurrency.single_flight import Same, SingleFlightCache, rare_key, value_key
from localtensor.concurrency.single_flight_cells import Circular
from localtensor.concurrency.sync import Gate, Threads
from localtensor.threads.state.generators import Who
from localtensor.threads.state.slots import TRIED

# Private part of torch: why it is needed.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PRIVATE = {
    "torch.distributed.tensor.DTensor._op_dispatcher": "where the one propagator of the process is",
    "torch.distributed.tensor._sharding_prop.LocalLRUCache": "torch's cache per thread, which stays in front of ours",
    "torch.distributed.tensor._op_schema.OutputSharding": "what propagation answers",
    "torch.distributed.tensor._op_schema.OpSchema": "what it is asked",
}
_RULES = "torch.distributed.tensor._ops."
_TORCHS = ("aten", "prims")  # what torch has rules for; ops of others are no part of these


def wanted(share: bool | None) -> bool:
    """Whether ranks share: as asked, or as LOCALTENSOR_SHARE in the environment says, or else they do."""
    return os.environ.get("LOCALTENSOR_SHARE") != "0" if share is None else share


class Alone(Exception):
    """Not for sharing: each rank finds out for itself."""


class _OwnMatter(Exception):
    """What was found out is for the rank that asked: `answer`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class _Turns(Threads):
    """Ranks run one at a time: none waits for another here."""

    def gate(self, name: str = "") -> Gate:
        return _NoWait()


class _NoWait:
    def open(self) -> None:
        """Nobody waits."""

    def wait(self, seconds: float | None = None) -> bool:
        raise Alone


class Sharing:
    """What the ranks of one run share; nothing before the program has imported DTensor, which takes a second."""

    def __init__(self, alone: Callable[[], bool]) -> None:
        self.alone = alone
        self.known: SingleFlightCache[Any] = SingleFlightCache(name="propagation of the ranks", sync=_Turns())
        self._propagator: Any = None
        self._undo = ExitStack()

    def look(self) -> None:
        """Sharing goes on from here if DTensor is there now.  Asked at each hand-over, so it must be quick."""
        if self._propagator is None and "torch.distributed.tensor" in sys.modules:
            self._begin()

    def _begin(self) -> None:
        dispatcher = getattr(getattr(sys.modules["torch.distributed.tensor"], "DTensor", None), "_op_dispatcher", None)
        if dispatcher is None:
            return  # it is just being imported
        from torch.distributed.tensor._sharding_prop import LocalLRUCache

        self._propagator = propagator = dispatcher.sharding_propagator
        ours = _sharing(propagator, propagator.propagate_op_sharding_non_cached, self.known, self.alone)
        # Asked where torch has no C++ cache for a call.
        self._undo.enter_context(replaced(propagator, "propagate_op_sharding", LocalLRUCache(ours)))
        self._undo.enter_context(replaced(propagator, "propagate_op_sharding_non_cached", ours))

    def end(self) -> None:
        """torch's propagator is as it was."""
        self._undo.close()


class NotSharing(Sharing):
    """Each rank finds out everything for itself, as in a process of its own."""

    def look(self) -> None:
        """torch's propagator stays as it is."""


@contextmanager
def shared(alone: Callable[[], bool] = bool, *, on: bool = True) -> Iterator[Sharing]:
    """While inside, threads share what they propagate, but for one that is `alone()` when it asks; none if not `on`."""
    sharing = Sharing(alone) if on else NotSharing(alone)
    sharing.look()
    try:
        yield sharing
    finally:
        sharing.end()


def _sharing(
    propagator: Any, compute: Callable[[Any], Any], known: SingleFlightCache[Any], alone: Callable[[], bool]
) -> Callable[[Any], Any]:
    def shareable(schema: Any) -> Any:
        answer = compute(schema)
        try:
            _check_shareable(answer)
        except Alone:
            raise _OwnMatter(answer) from None
        return answer

    def propagate(schema: Any) -> Any:
        if alone():
            return compute(schema)
        try:
            mesh, key = _question(propagator, schema)
            return _on(mesh, known.get(key, shareable, schema))
        except (Alone, Circular):
            return compute(schema)
        except _OwnMatter as own:
            return own.answer

    return propagate


def _question(propagator: Any, schema: Any) -> tuple[Any, Any]:
    """The one mesh of a schema, and all else that the answer depends on."""
    meshes: list[Any] = []
    asked = (_key(schema.args_schema, meshes), _key(schema.kwargs_schema, meshes))
    if not meshes or any(mesh is not meshes[0] for mesh in meshes) or meshes[0].get_coordinate() is None:
        raise Alone
    mesh = meshes[0]
    return mesh, (
        schema.op,
        asked,
        tuple(mesh.shape),
        mesh.mesh_dim_names,
        mesh.device_type,
        _ambient(propagator, schema),
    )


def _ambient(propagator: Any, schema: Any) -> tuple[Any, ...]:
    """What changes an answer and stands in no argument: the rule itself, and torch's settings.  Raises `Alone`."""
    from localtensor.threads.state.propagation_settings import ambient

    tables = (propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs, propagator.op_to_rules)
    rules = [table.get(schema.op) for table in tables]
    used = [rule for rule in rules if rule is not None]
    # Without a rule of its own an op goes by its decomposition, which is made of torch's own ops, whichever.
    used = used or [rule for table in tables for op, rule in table.items() if op.namespace in _TORCHS]
    if not all(map(_is_torchs, used)):
        raise Alone
    return (*map(Same, rules), ambient())


def _is_torchs(rule: Any) -> bool:
    """Whether torch wrote the rule.  A wrapper may have taken its name, but not the module that it was made in."""
    return str(getattr(getattr(rule, "func", rule), "__globals__", {}).get("__name__", "")).startswith(_RULES)


def _key(value: Any, meshes: list[Any]) -> Any:
    """A value as part of a key, and the meshes of its specs.  Raises `Alone`."""

    def leaf(value: Any) -> Any:
        if not (hasattr(value, "placements") and hasattr(value, "tensor_meta")):
            return rare_key(value, leaf, Alone)
        _check_even(value)
        meshes.append(value.mesh)
        meta = value.tensor_meta
        order = getattr(value, "shard_order", None)
        return (value.placements, order, tuple(meta.shape), tuple(meta.stride), meta.dtype)

    return value_key(value, leaf)


def _check_even(spec: Any) -> None:
    """Every rank holds a piece of the same size, and the placements are plain values.  Raises `Alone`."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    if spec.tensor_meta is None:
        raise Alone
    sizes = list(spec.tensor_meta.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if type(placement) is Shard:
            if not isinstance(sizes[placement.dim], int) or sizes[placement.dim] % size:
                raise Alone
            sizes[placement.dim] //= size
        elif type(placement) not in (Replicate, Partial):
            raise Alone


def _check_shareable(answer: Any) -> None:
    """All specs in an answer are on one mesh and even.  Raises `Alone`."""
    meshes: list[Any] = []
    wanted = answer.redistribute_schema
    _key((answer.output_spec, *([wanted.args_schema, wanted.kwargs_schema] if wanted is not None else [])), meshes)
    if any(mesh is not meshes[0] for mesh in meshes):
        raise Alone


def _on(mesh: Any, value: Any) -> Any:
    """The same answer, on another rank's mesh; nothing that can change is shared with the first."""
    if hasattr(value, "placements") and hasattr(value, "tensor_meta"):
        changes = {"mesh": mesh} | {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init and f.name != "mesh"
        }
        return type(value)(**changes)
    if hasattr(value, "args_schema"):
        return dataclasses.replace(
            value, args_schema=_on(mesh, value.args_schema), kwargs_schema=_on(mesh, value.kwargs_schema)
        )
    if hasattr(value, "redistribute_schema"):
        return dataclasses.replace(
            value, output_spec=_on(mesh, value.output_spec), redistribute_schema=_on(mesh, value.redistribute_schema)
        )
    if isinstance(value, list | tuple):
        return type(value)([_on(mesh, item) for item in value])
    if isinstance(value, dict):
        return {name: _on(mesh, item) for name, item in value.items()}
    return value


# DTensor's tables of sharding rules: what a rank registers in its program is its own, as in a process.
#
# A rule that a module registers when it is imported is for all ranks, since Python imports a module only once.  What a
# rank writes later, `register_sharding` in the body of a test say, is swapped at each hand-over, key by key, and gone
# when the run is over.

# Private part of torch: why it is needed.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
SHARDING_RULES_PRIVATE = {
    "torch.distributed.tensor.DTensor._op_dispatcher": "where the one propagator of the process is, with its tables",
}
TABLES = (
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_rules",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
    "op_to_scalar_shape_adjuster",
)
_GONE: Any = object()
_IMPORTS = ("exec_module", "_call_with_frames_removed")  # functions that run the body of a module


class Table(dict[Any, Any]):
    """One of the tables.  `changed` holds, for each key that a program has written, what was there before."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.changed: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        if key in self:
            self._note(key)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _note(self, key: Any) -> None:
        if key not in self.changed and not importing():
            self.changed[key] = self.get(key, _GONE)

    def differences(self) -> dict[Any, Any]:
        """What there is now under the keys where it is not what was there before."""
        now = {key: self.get(key, _GONE) for key in self.changed}
        return {key: value for key, value in now.items() if value is not self.changed[key]}

    def put(self, key: Any, value: Any) -> None:
        if value is not _GONE:
            super().__setitem__(key, value)
        elif key in self:
            super().__delitem__(key)


def importing() -> bool:
    """Whether the body of a module is running, on its first import."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" and caller is not None and caller.f_code.co_name in _IMPORTS:
            return True
        frame = caller
    return False


class ShardingRules:
    """The slot: what each rank has under the keys that any rank has written."""

    name, tried = "sharding_rules", TRIED
    why = "the rank that leaves a block with a rule of its own would take the rule from those still in it"

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def ready(self) -> bool:
        return hasattr(self._propagator(), TABLES[0])

    def _propagator(self) -> Any:
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        return getattr(getattr(dtensor, "_op_dispatcher", None), "sharding_propagator", None)

    def bind(self) -> None:
        propagator = self._propagator()
        for name in TABLES:
            if hasattr(propagator, name):
                self.tables.append(Table(getattr(propagator, name)))
                setattr(propagator, name, self.tables[-1])

    def save(self) -> list[dict[Any, Any]]:
        return [table.differences() if table.changed else {} for table in self.tables]

    def load(self, want: list[dict[Any, Any]], held: list[dict[Any, Any]]) -> None:
        for table, mine in zip(self.tables, want, strict=True):
            for key, before in table.changed.items():
                table.put(key, mine.get(key, before))

    def initial(self, who: Who) -> list[dict[Any, Any]]:
        """The tables as they are: what the last run changed in them is over."""
        for table in self.tables:
            table.changed.clear()
        return self.outside()

    def late(self, who: Who) -> list[dict[Any, Any]]:
        return self.outside()

    def outside(self) -> list[dict[Any, Any]]:
        return [{} for _ in self.tables]
