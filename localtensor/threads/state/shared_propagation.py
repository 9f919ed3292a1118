"""DTensor's propagation and sharding rules under rank threads: results are shared, registered rules are per rank.

torch keeps propagated shardings per thread, because they may depend on the rank.  Most do not: the result of a rule
follows from placements, shapes and arguments, and the rank matters only through the size of its own piece.  So the
first rank computes a result for all, if every tensor in it is cut into equal pieces, if it holds no placements with
state (_MaskPartial) or other geometry (_StridedShard), and if torch's own rules produced it: other rules may ask for
the rank, and ranks that disagree then deadlock, which a simulation must show.  Each rank gets the result on its own
mesh.  Everything else each rank computes for itself, as in torch; so does a rank inside a test's patch, which may
observe or change propagation.

A rank that computes may lose its turn, because a user's rule may do anything.  Another rank with the same question then
computes for itself, since waiting could take for ever.

A rule that a module registers when it is imported is for all ranks, since Python imports a module only once.  Rules
that a rank registers later, as by `register_sharding` in the body of a test, are swapped at each hand-over, key by key,
and removed when the run is over.

torch's private parts are touched through `PRIVATE`.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from localtensor._util.patching import replaced
from localtensor.concurrency.single_flight import IdentityKey, SingleFlightCache, uncommon_value_key, value_key
from localtensor.concurrency.single_flight_cells import Circular
from localtensor.concurrency.sync import Gate, ThreadSync
from localtensor.threads.state.generators import RankIdentity

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

# Private part of torch: why it is needed.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to 2.14.
PRIVATE = {
    "torch.distributed.tensor.DTensor._op_dispatcher": "holds the one propagator of the process, with its tables",
    "torch.distributed.tensor._sharding_prop.LocalLRUCache": "torch's cache per thread, which stays in front of ours",
    "torch.distributed.tensor._op_schema.OutputSharding": "the result of propagation",
    "torch.distributed.tensor._op_schema.OpSchema": "its argument",
}
_TORCH_RULES = "torch.distributed.tensor._ops."
_TORCH_NAMESPACES = ("aten", "prims")  # the namespaces of ops for which torch has rules


class NotShareable(Exception):
    """The result must not be shared: each rank computes it for itself."""


class _OwnRankOnly(Exception):
    """The computed `answer` is for the calling rank only."""

    def __init__(self, answer: "OutputSharding") -> None:
        self.answer = answer


class _NeverWaiting(ThreadSync):
    """Synchronization for ranks, which run one at a time: none waits for another."""

    def gate(self, name: str = "") -> Gate:
        return _ClosedGate()


class _ClosedGate:
    def open(self) -> None:
        """No rank waits."""

    def wait(self, seconds: float | None = None) -> bool:
        raise NotShareable


def _propagator_if_imported() -> "ShardingPropagator | None":
    """DTensor's propagator; None while DTensor is not imported, or is being imported."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return getattr(getattr(dtensor, "_op_dispatcher", None), "sharding_propagator", None)


class Sharing:
    """The propagation shared by the ranks of one run, from the program's import of DTensor on."""

    def __init__(self, alone: Callable[[], bool], *, on: bool) -> None:
        self.alone, self.on = alone, on
        self.known: SingleFlightCache[Any] = SingleFlightCache(name="propagation of the ranks", sync=_NeverWaiting())
        self._propagator: Any = None
        self._undo = ExitStack()

    def update(self) -> None:
        """Start sharing if it is on and DTensor has been imported.  Called at each hand-over, so it must be quick."""
        if self.on and self._propagator is None and "torch.distributed.tensor" in sys.modules:
            self._begin()

    def _begin(self) -> None:
        propagator = _propagator_if_imported()
        if propagator is None:
            return  # DTensor is being imported
        from torch.distributed.tensor._sharding_prop import LocalLRUCache

        self._propagator = propagator
        ours = _sharing_function(propagator, propagator.propagate_op_sharding_non_cached, self.known, self.alone)
        # torch calls it where its C++ cache does not serve a call.
        self._undo.enter_context(replaced(propagator, "propagate_op_sharding", LocalLRUCache(ours)))
        self._undo.enter_context(replaced(propagator, "propagate_op_sharding_non_cached", ours))

    def end(self) -> None:
        """Restore torch's propagator."""
        self._undo.close()


@contextmanager
def propagation_shared(alone: Callable[[], bool] = bool, *, on: bool = True) -> Iterator[Sharing]:
    """Inside the block threads share propagation if `on`, except a thread for which `alone()` is true at the call."""
    sharing = Sharing(alone, on=on)
    sharing.update()
    try:
        yield sharing
    finally:
        sharing.end()


def _sharing_function(
    propagator: "ShardingPropagator",
    compute: Callable[[Any], Any],
    known: SingleFlightCache[Any],
    alone: Callable[[], bool],
) -> Callable[[Any], Any]:
    def computed(schema: "OpSchema") -> Any:
        table = propagator.op_to_schema_info
        noted = getattr(table, "changed", {})
        before = set(noted)
        answer = compute(schema)
        # torch notes which arguments of a decomposed op belong to a key.  That follows from the op's schema, and is for all ranks: one without it
        # would keep one result for all values of those arguments.  What a rank registers meanwhile, in its turn, has a rule and stays its own.
        for op in noted.keys() - before:
            if op in table and not any(_rules(propagator, op)):
                del noted[op]
        return answer

    def shareable(schema: "OpSchema") -> object:
        answer = computed(schema)
        try:
            _check_shareable(answer)
        except NotShareable:
            raise _OwnRankOnly(answer) from None
        return answer

    def propagate(schema: "OpSchema") -> object:
        if alone():
            return computed(schema)
        try:
            mesh, key = _mesh_and_key(propagator, schema)
            return _on_mesh(mesh, known.get(key, shareable, schema))
        except (NotShareable, Circular):
            return computed(schema)
        except _OwnRankOnly as own:
            return own.answer

    return propagate


def _mesh_and_key(propagator: "ShardingPropagator", schema: "OpSchema") -> tuple[Any, Any]:
    """The mesh of a schema, and a key of all else that the result depends on.  Raises `NotShareable`."""
    meshes: list[Any] = []
    arguments = (_key(schema.args_schema, meshes), _key(schema.kwargs_schema, meshes))
    if not meshes or any(mesh is not meshes[0] for mesh in meshes) or meshes[0].get_coordinate() is None:
        raise NotShareable
    mesh, ambient = meshes[0], _rules_and_settings(propagator, schema)
    return mesh, (schema.op, arguments, tuple(mesh.shape), mesh.mesh_dim_names, mesh.device_type, ambient)


def _rules_and_settings(propagator: "ShardingPropagator", schema: "OpSchema") -> tuple[Any, ...]:
    """What changes a result and is no argument: the rule itself, and torch's settings.  Raises `NotShareable`."""
    from localtensor.threads.state.propagation_settings import ambient_settings

    rules = _rules(propagator, schema.op)
    used = [rule for rule in rules if rule is not None]
    # An op without a rule is propagated by its decomposition, which may use any of torch's own ops.
    used = used or [rule for t in _tables(propagator) for op, rule in t.items() if op.namespace in _TORCH_NAMESPACES]
    if not all(map(_is_torchs, used)):
        raise NotShareable
    return (*map(IdentityKey, rules), ambient_settings())


def _tables(propagator: "ShardingPropagator") -> tuple[dict[Any, Any], ...]:
    return propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs, propagator.op_to_rules


def _rules(propagator: "ShardingPropagator", op: "OpOverload") -> list[Any]:
    """The rule of the op in each of the tables, or None."""
    return [table.get(op) for table in _tables(propagator)]


def _is_torchs(rule: object) -> bool:
    """Whether torch defines the rule.  A wrapper may have copied its name, but not the globals of its module."""
    return str(getattr(getattr(rule, "func", rule), "__globals__", {}).get("__name__", "")).startswith(_TORCH_RULES)


def _key(value: object, meshes: list[Any]) -> object:
    """A value as part of a key, and the meshes of its specs.  Raises `NotShareable`."""

    def leaf(value: Any) -> object:
        if not (hasattr(value, "placements") and hasattr(value, "tensor_meta")):
            return uncommon_value_key(value, leaf, NotShareable)
        _check_even(value)
        meshes.append(value.mesh)
        meta = value.tensor_meta
        order = getattr(value, "shard_order", None)
        return (value.placements, order, tuple(meta.shape), tuple(meta.stride), meta.dtype)

    return value_key(value, leaf)


def _check_even(spec: "DTensorSpec") -> None:
    """Check that all ranks hold pieces of one size, and that placements are plain values.  Raises `NotShareable`."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    if spec.tensor_meta is None:
        raise NotShareable
    sizes = list(spec.tensor_meta.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if type(placement) is Shard:
            if not isinstance(sizes[placement.dim], int) or sizes[placement.dim] % size:
                raise NotShareable
            sizes[placement.dim] //= size
        elif type(placement) not in (Replicate, Partial):
            raise NotShareable


def _check_shareable(answer: "OutputSharding") -> None:
    """Check that all specs in a result are on one mesh and even.  Raises `NotShareable`."""
    meshes: list[Any] = []
    redistributed = answer.redistribute_schema
    arguments = () if redistributed is None else (redistributed.args_schema, redistributed.kwargs_schema)
    _key((answer.output_spec, *arguments), meshes)
    if any(mesh is not meshes[0] for mesh in meshes):
        raise NotShareable


def _on_mesh(mesh: "DeviceMesh", value: Any) -> object:
    """The same result on another rank's mesh; mutable parts are copied."""
    if hasattr(value, "placements") and hasattr(value, "tensor_meta"):
        changes = {"mesh": mesh} | {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init and f.name != "mesh"
        }
        return type(value)(**changes)
    if hasattr(value, "args_schema"):
        return dataclasses.replace(
            value, args_schema=_on_mesh(mesh, value.args_schema), kwargs_schema=_on_mesh(mesh, value.kwargs_schema)
        )
    if hasattr(value, "redistribute_schema"):
        return dataclasses.replace(
            value,
            output_spec=_on_mesh(mesh, value.output_spec),
            redistribute_schema=_on_mesh(mesh, value.redistribute_schema),
        )
    if isinstance(value, list | tuple):
        return type(value)([_on_mesh(mesh, item) for item in value])
    if isinstance(value, dict):
        return {name: _on_mesh(mesh, item) for name, item in value.items()}
    return value


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


class RuleTable(dict[Any, Any]):
    """One of the tables.  `changed` holds the previous value of each key that a program has written."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.changed: dict[Any, Any] = {}

    def __setitem__(self, key: "OpOverload", value: object) -> None:
        self._note(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: "OpOverload") -> None:
        if key in self:
            self._note(key)
        super().__delitem__(key)

    def pop(self, key: "OpOverload", *default: object) -> object:
        if key in self:
            self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: "OpOverload", default: object = None) -> object:
        if key not in self:
            self[key] = default
        return self[key]

    def _note(self, key: "OpOverload") -> None:
        if key not in self.changed and not is_importing_module():
            self.changed[key] = self.get(key, _GONE)

    def differences(self) -> dict[Any, Any]:
        """The current values of the changed keys, where they differ from the previous ones."""
        now = {key: self.get(key, _GONE) for key in self.changed}
        return {key: value for key, value in now.items() if value is not self.changed[key]}

    def put(self, key: "OpOverload", value: object) -> None:
        if value is not _GONE:
            super().__setitem__(key, value)
        elif key in self:
            super().__delitem__(key)


def is_importing_module() -> bool:
    """Whether the body of a module is running, on its first import."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name == "<module>" and caller is not None and caller.f_code.co_name in _IMPORTS:
            return True
        frame = caller
    return False


class ShardingRules:
    """The slot of each rank's values under the keys that any rank has written."""

    name = "sharding_rules"
    why = "the rank that leaves a block with a rule of its own would take the rule from those still in it"

    def __init__(self) -> None:
        self.tables: list[RuleTable] = []
        self.unchanged: list[dict[Any, Any]] = []  # while no rank has written any key

    def ready(self) -> bool:
        return hasattr(_propagator_if_imported(), TABLES[0])

    def bind(self) -> None:
        propagator = _propagator_if_imported()
        for name in TABLES:
            if hasattr(propagator, name):
                self.tables.append(RuleTable(getattr(propagator, name)))
                setattr(propagator, name, self.tables[-1])
        self.unchanged = [{} for _ in self.tables]

    def save(self) -> list[dict[Any, Any]]:
        if not any([table.changed for table in self.tables]):
            return self.unchanged
        return [table.differences() if table.changed else {} for table in self.tables]

    def load(self, want: list[dict[Any, Any]], held: list[dict[Any, Any]]) -> None:
        if held is self.unchanged:
            return
        for table, mine in zip(self.tables, want, strict=True):
            for key, before in table.changed.items():
                table.put(key, mine.get(key, before))

    def initial(self, who: RankIdentity) -> list[dict[Any, Any]]:
        """The tables as they are; changes of the previous run are forgotten."""
        for table in self.tables:
            table.changed.clear()
        return self.outside()

    def late(self, who: RankIdentity) -> list[dict[Any, Any]]:
        return self.outside()

    def outside(self) -> list[dict[Any, Any]]:
        return [{} for _ in self.tables]
