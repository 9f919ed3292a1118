"""The first observation, in the causal order of the run on one device, that no allowed layout explains; and why, in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from localtensor._util.events import Place
from localtensor.layout.tolerance import measured_slack, widen_slack, within_slack
from localtensor.testing.compare.find_layout import (
    AxisLayout,
    Layout,
    assemble_layout,
    find_layout,
    permuted_layout,
)
from localtensor.testing.compare.watch import Key, Observation, Watch

HELD_AS_PARAMETER = ("gradient", "parameter after the step")


@dataclass(frozen=True)
class Divergence:
    """The first difference: what of (`key`), the user's line, the layout that was found if any, and what it looks like."""

    key: Key
    place: Place | None
    layout: str | None
    what: str
    values: str


@dataclass
class Findings:
    """What was compared, in order, with the layout of each; what was not, and why; the first divergence if there is one."""

    layouts: dict[Key, Layout] = field(default_factory=dict)
    not_compared: dict[Key, str] = field(default_factory=dict)
    divergence: Divergence | None = None


@dataclass(frozen=True)
class Sides:
    """Everything that was seen: one device, its variants (double precision first), and each rank."""

    reference: Watch
    variants: tuple[Watch, ...]
    ranks: tuple[Watch, ...]
    mesh: Mapping[str, int]
    batch_axes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.values())

    def slack(self, key: Key) -> Tensor:
        """How far a right value may be from the one device's: measured."""
        want = self.reference.seen[key].value
        exact, *noisy = (one.seen[key].value if key in one.seen else None for one in self.variants)
        slack = widen_slack(measured_slack(want, noisy), want, exact)
        slack = torch.zeros(()) if slack is None else slack
        if key.kind == "parameter after the step":
            slack = self._where_the_gradient_vanishes(key, slack)
        return slack

    def _where_the_gradient_vanishes(self, key: Key, slack: Tensor) -> Tensor:
        """Optimizers that divide by the gradient's size may move such an element either way: it is no evidence."""
        for step in range(key.step + 1):
            gradient = Key(step, "gradient", key.name)
            if gradient in self.reference.seen:
                value = self.reference.seen[gradient].value
                slack = torch.where(value.abs() <= 10 * self.slack(gradient), torch.inf, slack)
        return slack


def first_divergence(sides: Sides) -> Findings:
    """Goes through the observations of one device in order, and stops at the first that differs."""
    findings = Findings()
    for key, one in sides.reference.seen.items():
        held = [rank.seen.get(key) for rank in sides.ranks]
        there = [x for x in held if x is not None]
        if len(there) < len(held):
            missing = [str(rank) for rank, x in enumerate(held) if x is None]
            all_or = "no rank has it" if not there else f"ranks {', '.join(missing)} do not have it"
            findings.not_compared[key] = all_or
            continue
        layout = _layout_of(sides, key, one, there)
        problem = None if layout is None else _not_allowed(sides, findings, key, layout)
        if layout is not None and problem is None:
            findings.layouts[key] = layout
            continue
        findings.divergence = _divergence(sides, findings, key, there, layout, problem)
        return findings
    return findings


def _layout_of(sides: Sides, key: Key, one: Observation, held: Sequence[Observation]) -> Layout | None:
    parts = torch.Size([sides.mesh[axis] for axis in sides.batch_axes]).numel()
    factors = (1.0, float(parts)) if parts > 1 and key.kind.startswith("gradient of") else (1.0,)
    said = _layout_of_placements(held[0], len(sides.sizes))
    slack = sides.slack(key)
    return find_layout([x.value for x in held], sides.sizes, one.value, slack, first=said, factors=factors)


def _layout_of_placements(one: Observation, axes: int) -> list[Layout]:
    """The layout that a DTensor on the whole mesh says of itself."""
    if one.placements is None or len(one.placements) != axes:
        return []
    said = []
    for placement in one.placements:
        if isinstance(placement, Partial):
            said.append(AxisLayout("P", op=placement.reduce_op))
        elif isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            said.append(AxisLayout("S", placement.dim, getattr(placement, "split_factor", 1)))
        else:
            said.append(AxisLayout("R"))
    return [Layout(tuple(said))] if all(a.op in ("", "sum", "avg") for a in said) else []


def _not_allowed(sides: Sides, findings: Findings, key: Key, layout: Layout) -> str | None:
    """Why a layout that fits is wrong nevertheless: a reduction that nobody will do any more."""
    names = list(sides.mesh)
    pending = [names[axis] for axis in layout.pending]
    if not pending:
        return None
    over = ", ".join(pending)
    if key.kind in HELD_AS_PARAMETER:
        return f"an all_reduce of the gradient over {over} is missing"
    if key.kind == "parameter":
        return f"the parameter differs between the ranks along {over}"
    averaged = all(layout.axes[axis].op == "avg" and names[axis] in sides.batch_axes for axis in layout.pending)
    is_end = key.kind == "loss" or (key.kind in ("output", "result") and key.name == "")
    declared = sides.ranks[0].seen[key].placements is not None
    return f"an all_reduce over {over} is missing" if is_end and not averaged and not declared else None


def _divergence(
    sides: Sides, findings: Findings, key: Key, held: Sequence[Observation], layout: Layout | None, problem: str | None
) -> Divergence:
    want, slack = sides.reference.seen[key].value, sides.slack(key)
    tensors = [x.value for x in held]
    if layout is not None and _equal_along(sides, tensors, layout.pending):
        problem = None  # nothing is pending: it is a part of the sum on every rank, that is, too small
    what = problem or next(_explanations(sides, findings, key, tensors, want, slack))
    place = held[0].place or next((findings_place(sides, name) for name in (key.name,)), None)
    return Divergence(key, place, None if layout is None else str(layout), what, _values(sides, tensors, want, slack))


def _equal_along(sides: Sides, held: Sequence[Tensor], axes: Sequence[int]) -> bool:
    """Whether the ranks along these mesh axes hold equal tensors."""
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    pairs = (
        (ranks.select(axis, 0), ranks.select(axis, place)) for axis in axes for place in range(1, sides.sizes[axis])
    )
    each = (
        (held[int(a)], held[int(b)])
        for one, other in pairs
        for a, b in zip(one.flatten(), other.flatten(), strict=True)
    )
    return bool(axes) and all(a.shape == b.shape and torch.equal(a, b) for a, b in each)


def findings_place(sides: Sides, name: str) -> Place | None:
    """The line that calls the module that a parameter belongs to."""
    module = name.rpartition(".")[0]
    places = (one.place for key, one in sides.ranks[0].seen.items() if key.kind == "output" and key.name == module)
    return next((place for place in places if place is not None), None)


def _explanations(
    sides: Sides, findings: Findings, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor
) -> Iterator[str]:
    """What the difference looks like, the likelier first; the last always holds."""
    sizes, names = sides.sizes, list(sides.mesh)
    if any(not bool(x.isfinite().all()) for x in held if x.is_floating_point()) and bool(want.isfinite().all()):
        yield "NaN or infinity where one device has numbers"
    if all(x.dtype != want.dtype for x in held) and held[0].is_floating_point() == want.is_floating_point():
        cast = [x.to(want.dtype) for x in held]
        loose = slack + 64 * torch.finfo(held[0].dtype).eps * float(want.abs().max()) if want.numel() else slack
        if want.is_floating_point() and find_layout(cast, sizes, want, loose) is not None:
            yield f"the dtype is {held[0].dtype} where one device has {want.dtype}".replace("torch.", "")
    waiting = _pending_inputs(findings, key)
    if waiting:
        yield f"an all_reduce over {', '.join(names[axis] for axis in waiting)} is missing before it: what it comes from is a pending sum"
    yield from _scaled(sides, key, held, want, slack)
    yield from _counted_too_often(sides, key, held, want, slack)
    permuted = permuted_layout(held, sizes, want, slack)
    if permuted is not None:
        yield f"ranks hold each other's slices: rank {permuted[1].index(0)} has that of rank 0, and so on"
    for earlier in (
        Key(step, key.kind, key.name, call, key.leaf) for step in range(key.step + 1) for call in range(key.call + 1)
    ):
        if earlier != key and earlier in findings.layouts:
            old = sides.reference.seen[earlier].value
            if old.shape == want.shape and find_layout(held, sizes, old, sides.slack(earlier)) is not None:
                yield f"it is a stale value, that of {earlier}"
    yield from _some_ranks(sides, held, want, slack)
    yield "wrong values"


def _pending_inputs(findings: Findings, key: Key) -> tuple[int, ...]:
    """The axes along which inputs of this module are pending sums, or the outputs just before."""
    if key.kind not in ("output", "input"):
        last = list(findings.layouts.items())[-1:] if key.kind == "gradient of the output" else []
        return tuple(axis for k, x in last if k.kind == key.kind for axis in x.pending if x.axes[axis].op == "sum")
    own = [
        x
        for k, x in findings.layouts.items()
        if k.kind == "input" and (k.step, k.name, k.call) == (key.step, key.name, key.call)
    ]
    before = list(findings.layouts.items())[-1:] if not own else []
    found = [*own, *(x for k, x in before if k.kind == "output")]
    return tuple(sorted({axis for x in found for axis in x.pending if x.axes[axis].op == "sum"}))


def _scaled(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A factor that is a product of mesh sizes, or one over it."""
    if not want.is_floating_point() or not bool(want.any()):
        return
    for count in range(1, len(sides.sizes) + 1):
        for axes in itertools.combinations(sides.mesh.items(), count):
            number = torch.Size([size for _, size in axes]).numel()
            over = ", ".join(name for name, _ in axes)
            for factor in (float(number), 1.0 / number):
                if number == 1:
                    continue
                layout = find_layout([x / factor for x in held], sides.sizes, want, slack)
                if layout is None:
                    continue
                pending = [list(sides.mesh)[axis] for axis in layout.pending]
                if any(name in pending for name, _ in axes):
                    continue  # another axis of the same size is meant
                if pending and key.kind in HELD_AS_PARAMETER:
                    yield f"it is reduced over {over} instead of {', '.join(pending)}: the wrong group"
                elif factor > 1:
                    how = "summed and not averaged" if key.kind in HELD_AS_PARAMETER else "added once too often"
                    yield f"it is {number} times too large, the number of ranks along {over}: {how}"
                else:
                    yield f"it is {number} times too small, the number of ranks along {over}: divided once too often"


def _counted_too_often(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A parameter of the module that every rank adds, where one should: a bias before an all_reduce."""
    if key.kind != "output":
        return
    for name, one in ((k.name, x.value) for k, x in sides.reference.seen.items() if k.kind == "parameter"):
        if name.rpartition(".")[0] != key.name or one.dim() != 1 or want.shape[-1:] != one.shape:
            continue
        for axis, size in sides.mesh.items():
            layout = find_layout(held, sides.sizes, want + (size - 1) * one, slack) if size > 1 else None
            if layout is not None:
                over = [list(sides.mesh)[pending] for pending in layout.pending]
                missing = f"an all_reduce over {', '.join(over)} is missing, and " if over else ""
                yield f"{missing}{name} is added {size} times, once by each rank along {axis}"


def _some_ranks(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """Right along one part of the mesh, and wrong elsewhere: replicas that differ."""
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    for axis, (name, size) in enumerate(sides.mesh.items()):
        rest = [s for i, s in enumerate(sides.sizes) if i != axis]
        right = []
        for place in range(size):
            some = ranks.select(axis, place).reshape(-1).tolist()
            if find_layout([held[rank] for rank in some], rest, want, slack) is not None:
                right.append(place)
        if right and len(right) < size:
            wrong = ", ".join(str(place) for place in range(size) if place not in right)
            yield f"replicas along {name} differ: right at {', '.join(map(str, right))}, wrong at {wrong}"


def _values(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> str:
    """The first element that differs, by the layout of the shapes; or the shapes."""
    shapes = sorted({tuple(x.shape) for x in held})
    for axes in itertools.product(
        (AxisLayout("R"), *(AxisLayout("S", d) for d in range(want.dim()))), repeat=len(sides.sizes)
    ):
        pieces = held if any(a.kind == "S" for a in axes) else [held[0]] * len(held)
        made = assemble_layout(pieces, sides.sizes, Layout(axes))
        if made is None or made.shape != want.shape:
            continue
        if made.dtype != want.dtype:
            return f"{made.dtype} where one device has {want.dtype}".replace("torch.", "")
        wrong = ~within_slack(made, want, slack)
        if not bool(wrong.any()):
            return "the first rank is right"
        at = tuple(int(i) for i in wrong.nonzero()[0])
        bound = slack if slack.dim() == 0 else slack.expand_as(want)[at]
        got = (
            f"{made[at].item():.6g} where one device gives {want[at].item():.6g}"
            if made.dim()
            else (f"{made.item():.6g} where one device gives {want.item():.6g}")
        )
        return f"{got} at {list(at)}; {int(wrong.sum())} of {wrong.numel()} elements differ, by more than {float(bound):.2g}"
    return f"shapes {', '.join(map(str, shapes))} where one device has {tuple(want.shape)}"
