"""How one call runs under rules of a book: which placements its tensors are wanted in, and what its results are then.

A plan follows from shapes, dtypes, placements, arguments and the sizes of the mesh, and from no rank: all ranks come to
the same, each for itself.  It is kept by all of that, each argument with its type, so that 1, 1.0 and True differ.

| torch part (under torch.distributed.tensor)             | read on     | run on |
|---------------------------------------------------------|-------------|--------|
| _dtensor_spec.DTensorSpec, TensorMeta                   | 2.11 - 2.15 | 2.13   |
| DTensorSpec.shard_order, .is_default_device_order       | 2.11 - 2.15 | 2.13   |

`tests/strategies/test_torch_dtensor.py` names them, for `torch_dtensor` asks for both, too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import LocalTensorError, refusal
from localtensor.placement import cuts, is_plain, short, shorts
from strategies.book import Ask, Entry, Line, Meta, bound
from strategies.cost import NETWORK
from strategies.expansion import Problem, expand
from strategies.local_arguments import Piece, written_leaves
from strategies.output_metadata import calm, on_meta, outputs_of
from strategies.propagate_errors import BadRule
from strategies.propagate_rules import checked_own, made_instead
from strategies.propagation import Grid
from strategies.rules import Call, frozen, out_leaves, overload, results

MOST = 20_000
"""Plans that are kept; after that they are all forgotten."""
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_STATELESS = (Replicate, Shard, Partial)
_FAKE_TURN = threading.Lock()


class NoSizes(LocalTensorError, RuntimeError):
    """A tensor whose sizes are symbols, as where a program is traced; a `RuntimeError`, as DTensor's refusals are."""

    def __init__(self, op: str, values: str) -> None:
        problem, remedy = "its sizes are no integers", "Trace with static shapes, or outside of the overlay."
        super().__init__(refusal(f"{op} under overlay_dtensor", "tensors", values, problem, remedy))


class TurnedAxes(LocalTensorError, RuntimeError):
    """A tensor whose axes do not cut a dim from left to right; a `RuntimeError`, as DTensor's own refusals are."""

    def __init__(self, op: str, values: str) -> None:
        problem = "its axes do not cut from left to right, in which order rules are taken for them"
        remedy = "Redistribute it to replicas first: to the same placements DTensor moves nothing, and the order stays."
        super().__init__(refusal(f"{op} under overlay_dtensor", "tensors", values, problem, remedy))


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a call as it comes: what is known of the whole of it, and how it lies."""

    meta: TensorMeta
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`whole` is the call that is made, of whole tensors.  `inputs` are wanted, by leaf number; `outputs` come, None for what is masked or no tensor; both by axis.

    `settled` are tensors that the call writes to, by leaf number, each with the result that it becomes: no line leaves
    them where they lie, so a copy is written to, and brought back.  `reshaped` are written ones whose shape changes in
    place, and `resized` those given as `out=` of another shape, which become what the result is.
    """

    whole: Piece
    inputs: tuple[tuple[Placement, ...], ...]
    outputs: Grid
    metas: tuple[TensorMeta | None, ...]
    settled: tuple[tuple[int, int | None], ...] = ()
    reshaped: tuple[tuple[int, int], ...] = ()
    resized: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan on a mesh: the leaves that must be moved first, and the specs of the results."""

    mesh: DeviceMesh
    plan: Plan
    moves: tuple[int, ...]
    outputs: tuple[DTensorSpec | None, ...]


class Planner:
    """The plans of one overlay; any thread may ask at any time.

    Two threads that ask for the same at once may both compute it, and come to the same.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Plan] = {}
        self._ready: dict[Any, Ready] = {}

    def ready(self, entry: Entry, call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh) -> Ready:
        """What is to be done on this mesh.  Raises `BadRule` where the rule says nonsense, `NoSizes` for symbols,
        `TurnedAxes` for a shard order, and what the op raises for whole tensors like these."""
        key = _key(call, specs, mesh)
        here = key, id(mesh)  # and no mesh that equals it: the ranks of one process have meshes of their own
        known = self._ready.get(here) if key is not None else None
        if known is not None and known.mesh is mesh:
            return known
        plan = self._plan(key, entry, call, specs, tuple(mesh.shape))
        anew = dict(plan.resized)
        moves = tuple(i for i, want in enumerate(plan.inputs) if specs[i].placements != want and i not in anew)
        outputs = tuple(
            None if placements is None or meta is None else DTensorSpec(mesh, placements, tensor_meta=meta)
            for placements, meta in zip(plan.outputs, plan.metas, strict=True)
        )
        made = Ready(mesh, plan, moves, outputs)
        return made if key is None else _kept(self._ready, here, made)

    def _plan(self, key: Any, entry: Entry, call: Call, specs: Sequence[DTensorSpec], sizes: tuple[int, ...]) -> Plan:
        known = self._known.get(key) if key is not None else None
        if known is not None:
            return known
        made = _made(entry, call, [_held(call.op, spec) for spec in specs], sizes)
        return made if key is None else _kept(self._known, key, made)

    def __len__(self) -> int:
        return len(self._known)


def _kept(table: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(table) >= MOST:
        table.clear()
    table[key] = value
    return value


def _held(op: str, spec: DTensorSpec) -> Held:
    meta = spec.tensor_meta
    if meta is None or not all(type(size) is int for size in meta.shape):
        raise NoSizes(op, str(spec))
    if spec.shard_order is not None and not DTensorSpec.is_default_device_order(spec.shard_order):
        raise TurnedAxes(op, str(spec))
    return Held(meta, spec.placements)


def _key(call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh) -> Any:
    """All that a plan depends on; None if something in it is no plain value."""
    try:
        held = tuple((_typed_placements(spec.placements), spec.tensor_meta, spec.shard_order) for spec in specs)
        key = call.op, _typed(call.args), _typed(call.kwargs), held, tuple(mesh.shape), torch.get_default_dtype()
        hash(key)
    except (_NoKey, TypeError):  # sizes that are symbols cannot be hashed
        return None
    return key


def _typed_placements(placements: tuple[Placement, ...]) -> Any:
    if all(type(p) in _STATELESS for p in placements):
        return placements
    return tuple(map(str, placements)), tuple(map(type, placements))


class _NoKey(Exception):
    pass


def _typed(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list):
        return kind, *map(_typed, value)
    if kind is float or kind is complex:
        return kind, repr(value)  # -0.0 equals 0.0, and nan not itself
    if kind in _PLAIN or kind.__name__ == "Leaf":
        return kind, value
    if isinstance(value, torch.Generator):
        return kind
    raise _NoKey


def _made(entry: Entry, call: Call, held: Sequence[Held], sizes: tuple[int, ...]) -> Plan:
    metas = global_metas(call, [one.meta for one in held])
    plain = Call(call.op, frozen(call.args), tuple((name, frozen(value)) for name, value in call.kwargs))
    written = written_leaves(plain)
    changed = tuple((leaf, r) for leaf, r in written.items() if r is not None and _differ(held[leaf].meta, metas[r]))
    outs = set(out_leaves(plain))
    resized = tuple(pair for pair in changed if pair[0] in outs)
    reshaped = tuple(pair for pair in changed if pair[0] not in outs)
    held = _as_results(held, resized, metas, sizes)
    ask, plain = made_instead(entry, question(call, held, metas), plain)
    whole, given, own = Piece(ask, plain), tuple(one.placements for one in held), checked_own(entry)
    offer = Offer(entry, ask)
    stays = tuple(
        (leaf, None if leaf in dict(reshaped) else r) for leaf, r in written.items() if leaf not in dict(resized)
    )
    found = expand(Problem(whole, sizes, given, stays, offer, own, NETWORK))
    settled: tuple[tuple[int, int | None], ...] = ()
    if found.best is None:  # no line leaves them where they lie
        settled = tuple((leaf, r) for leaf, r in written.items() if leaf not in dict(changed))
        found = expand(Problem(whole, sizes, given, (), offer, own, NETWORK))
    if found.best is None:
        raise AssertionError(f"{call.op}: not even replicas are left")
    inputs = tuple(row if row is not None else (Replicate(),) * len(sizes) for row in found.best.inputs)
    return Plan(whole, inputs, found.best.outputs, metas, settled, reshaped, resized)


def _differ(given: TensorMeta, result: TensorMeta | None) -> bool:
    return result is not None and tuple(given.shape) != tuple(result.shape)


def _as_results(
    held: Sequence[Held], resized: Sequence[tuple[int, int]], metas: Sequence[TensorMeta | None], sizes: Sequence[int]
) -> list[Held]:
    """An `out=` of another shape as it will be: what it holds is lost, and it lies as the result comes."""
    made = list(held)
    for leaf, result in resized:
        meta = metas[result]
        if meta is not None:
            made[leaf] = Held(TensorMeta(meta.shape, meta.stride, held[leaf].meta.dtype), (Replicate(),) * len(sizes))
    return made


def question(call: Call, held: Sequence[Held], outputs: Sequence[TensorMeta | None]) -> Ask:
    """What a rule is asked about a call on whole tensors."""
    tensors = tuple(Meta(tuple(one.meta.shape), one.meta.dtype) for one in held)
    results_of = tuple(None if m is None else Meta(tuple(m.shape), m.dtype) for m in outputs)
    return Ask(call.op, bound(call.op, call.args, dict(call.kwargs)), tensors, results_of)


def global_metas(call: Call, given: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Shape, strides and dtype of each result of the call on whole tensors, None for what is no tensor."""
    try:
        with calm():
            made = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in given]
            return tuple(_meta(x) if isinstance(x, Tensor) else None for x in results(on_meta(call)(made)))
    except NotImplementedError:  # no meta kernel
        found = outputs_of(call, [Meta(tuple(m.shape), m.dtype) for m in given], _FAKE_TURN)
        return tuple(None if m is None else TensorMeta(torch.Size(m.shape), _dense(m.shape), m.dtype) for m in found)


def _meta(x: Tensor) -> TensorMeta:
    return TensorMeta(x.shape, x.stride(), x.dtype)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Offer:
    """A rule's lines for a piece of the call, all-replicate among them, none of them nonsense."""

    def __init__(self, entry: Entry, whole: Ask) -> None:
        self.entry = entry
        self.numbers = bool(whole.outputs) and not any(whole.outputs) and _gives_numbers(entry.op)

    def __call__(self, ask: Ask, ranks: int) -> tuple[Line, ...]:
        rested = Line((Replicate(),) * len(ask.tensors), tuple(None if m is None else Replicate() for m in ask.outputs))
        if self.numbers:  # a number has no placement: it is that of whole tensors
            return (rested,)
        return rested, *(line for line in lines_of(self.entry, ask) if line != rested)


def _gives_numbers(op: str) -> bool:
    return not any("Tensor" in str(r.type) for r in overload(op)._schema.returns)


def lines_of(entry: Entry, ask: Ask) -> list[Line]:
    """What the rule says about one call.  Raises `BadRule`, with the rule's file and line, where that is nonsense."""
    try:
        lines = list(dict.fromkeys(entry.lines(ask)))
    except Exception as error:  # why: whatever a user's rule raises is told with the place of the rule
        said = f"it raises {type(error).__name__}: {error}"
        raise BadRule(
            entry.op, entry.where, _asked(ask), said, "Let it say nothing of calls that it does not know."
        ) from error
    for line in lines:
        _check(entry, ask, line)
    return lines


def _check(entry: Entry, ask: Ask, line: Line) -> None:
    def bad(problem: str, remedy: str) -> BadRule:
        return BadRule(entry.op, entry.where, str(line), problem, remedy)

    if not isinstance(line, Line):
        raise BadRule(entry.op, entry.where, repr(line), "this is no Line", "Use ask.line.")
    for what, placements, metas in (("tensors", line.inputs, ask.tensors), ("results", line.outputs, ask.outputs)):
        if len(placements) != len(metas):
            raise bad(f"it has {len(placements)} placements for {len(metas)} {what}", "Give one for each.")
        for number, (placement, meta) in enumerate(zip(placements, metas, strict=True)):
            if placement is None or meta is None:
                continue
            cut = cuts(placement)
            if not is_plain(placement):
                raise bad(f"{short(placement)} is not R, S(dim) or one of the five P", "Use those only.")
            if cut is not None and not 0 <= cut[0] < meta.ndim:
                raise bad(
                    f"{short(placement)} of {what} {number}, {meta}: there is no such dim", "Name one of its dims."
                )


def _asked(ask: Ask) -> str:
    return f"({', '.join(map(str, ask.tensors))})"


def layout_text(placements: Sequence[Placement]) -> str:
    """`S(0)`, or `(S(0), R)` on more than one axis."""
    return shorts(placements) if len(placements) == 1 else f"({shorts(placements)})"
