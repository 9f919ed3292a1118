"""The implicit redistribution of a call's tensors, and the error message about it.

DTensor's own steps determine whether a redistribution communicates: a step does if its axis has more than one rank, the
tensor is not replicated on it, and no shard becomes partial (possible since torch 2.14: each rank adds zeros).  The
message names the collectives of our plan (`strategies.planner.search.api`), if there is one.  Both follow from specs
alone, so all ranks of a mesh raise the same error.

| torch part (under torch.distributed.tensor)              | read on     | run on |
|-----------------------------------------------------------|-------------|--------|
| _redistribute._gen_transform_infos: DTensor's own steps   | 2.11 - 2.15 | 2.13   |
| _dtensor_spec.DTensorSpec, .shard_order                   | 2.11 - 2.15 | 2.13   |
| torch._C._current_autograd_node: which backward runs      | 2.13        | 2.13   |

`tests/strategies/propagation/explicit/test_redistribution_text.py` checks each part by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import Place, place_of_frame
from localtensor.errors import LocalTensorError, refusal_sentence
from localtensor.layout import Spec, is_standard, is_supported, shape_text, short
from strategies.planner.search.api import plan
from strategies.torch_api.specs import NoSuchSpec, mesh_of, of_torch

ALLOW = "allow_implicit_communication()"
_HERE = str(Path(__file__).parents[2]) + "/"


class ImplicitCommunication(LocalTensorError, RuntimeError):
    """An op would have communicated implicitly where only explicit communication is allowed.

    `op` and `arguments` name the tensors that would have moved, `line` is the line of the user's program.  It is a
    `RuntimeError`, as torch's own refusal is.
    """

    def __init__(self, op: str, arguments: tuple[str, ...], line: Place | None, text: str) -> None:
        super().__init__(text)
        self.op, self.arguments, self.line = op, arguments, line


class ImplicitCommunicationWarning(UserWarning):
    """The same as a warning."""


@dataclass(frozen=True, slots=True)
class ImplicitRedistribution:
    """The redistribution of one argument of a call from `src` to `dst`; `written` if the op writes to it."""

    argument: str
    src: DTensorSpec
    dst: DTensorSpec
    written: bool = False


def communicating_steps(src: DTensorSpec, dst: DTensorSpec) -> tuple[str, ...]:
    """DTensor's own steps that communicate, in its order; none for a local redistribution."""
    same = src.placements == dst.placements and src.shard_order == dst.shard_order
    if src.is_replicated() or src.mesh != dst.mesh or same:
        return ()
    try:
        infos = _redistribute._gen_transform_infos(src, dst, None)  # cached for DTensor's own call right after
    except (RuntimeError, ValueError, LookupError, AssertionError):
        return ()  # DTensor raises it itself right after, before anything moves
    names, texts = mesh_of(src.mesh).names, []
    for info in infos:
        was, now = info.src_dst_placements
        alone = was.is_replicate() or (was.is_shard() and now.is_partial())
        if was != now and src.mesh.size(info.mesh_dim) > 1 and not alone:
            texts.append(f"{names[info.mesh_dim]}: {short(was)} -> {short(now)}")
    return tuple(texts)


def argument_names(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], number: Callable[[Any], int | None]
) -> dict[int, tuple[str, bool]]:
    """By tensor number, the argument's name in the schema, with its place in a list, and whether the op writes to it."""
    arguments = op._schema.arguments
    found: dict[int, tuple[str, bool]] = {}

    def walk(value: object, name: str, written: bool) -> None:
        if isinstance(value, (list, tuple)):
            for i, one in enumerate(value):
                walk(one, f"{name}[{i}]", written)
        elif (leaf := number(value)) is not None:
            found[leaf] = name, written

    by_name = {argument.name: argument for argument in arguments}
    given = [(arguments[i].name if i < len(arguments) else f"argument {i}", value) for i, value in enumerate(args)]
    for name, value in [*given, *kwargs.items()]:
        alias = by_name[name].alias_info if name in by_name else None
        walk(value, name, alias is not None and alias.is_write)
    return found


def implicit_communication_error(op: str, needs: Sequence[ImplicitRedistribution]) -> ImplicitCommunication:
    """The error for a call whose tensors would have moved."""
    line = user_line()
    have = "; ".join(spec_text(need.src) for need in needs)
    want = "; ".join(_layout_text(need.dst) for need in needs)
    it = "it" if len(needs) == 1 else "them"
    moving = "; ".join(_communication_text(need) for need in needs if communicating_steps(need.src, need.dst))
    how = f"would communicate by itself: {moving}" if moving else f"each rank would change {it} by itself"
    problem = f"the op wants {it} as {want}, and {how}"
    names = tuple(need.argument for need in needs)
    text = refusal_sentence(call_text(op, line), ", ".join(names), have, problem, _remedy_text(needs))
    return ImplicitCommunication(op, names, line, text)


def call_text(op: str, line: Place | None) -> str:
    """The op, the backward in which it runs, and the line where the user called it."""
    node = backward_node()
    backward = f" in the backward of {node.name()}" if node is not None else ""
    return f"{op}{backward}{f' ({line})' if line else ''}"


def user_line(frame: FrameType | None = None) -> Place | None:
    """The user's innermost line on the stack of this frame, or of the caller, outside of our own code."""
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return place_of_frame(frame)


def backward_node() -> torch.autograd.graph.Node | None:
    """The node of autograd that runs in this thread; None outside of a backward, and if torch lacks the function."""
    current_node = getattr(torch._C, "_current_autograd_node", None)
    return current_node() if current_node is not None else None


def spec_or_none(spec: DTensorSpec) -> Spec | None:
    """DTensor's spec as ours; None if there is none."""
    if not all(map(is_supported, spec.placements)):
        return None
    try:
        return of_torch(spec)
    except NoSuchSpec:
        return None


def spec_text(spec: DTensorSpec) -> str:
    """`f32[8,4] @ dp:S(0)`, and the like for a spec that has no counterpart of ours."""
    ours = spec_or_none(spec)
    if ours is not None:
        return repr(ours)
    meta = spec.tensor_meta
    return f"{'' if meta is None else shape_text(meta.shape, meta.dtype)} @ {_layout_text(spec)}"


def _layout_text(spec: DTensorSpec) -> str:
    ours = spec_or_none(spec)
    if ours is not None:
        return repr(ours).partition(" @ ")[2]
    return ", ".join(f"{name}:{short(p)}" for name, p in zip(mesh_of(spec.mesh).names, spec.placements, strict=True))


def _communication_text(need: ImplicitRedistribution) -> str:
    """The collectives of our plan; DTensor's own steps if there is no plan, or one that moves nothing."""
    torch_steps = ", ".join(communicating_steps(need.src, need.dst))
    src, dst = spec_or_none(need.src), spec_or_none(need.dst)
    if src is None or dst is None:
        return torch_steps
    try:
        found = plan(src, dst)
    except LocalTensorError:
        return torch_steps
    steps = [str(step) for step in found.steps if step.kind != "local"]
    return ", ".join(steps) or f"{torch_steps} (without need)"


def _remedy_text(needs: Sequence[ImplicitRedistribution]) -> str:
    codes = [_explicit_call(need) for need in needs]
    if backward_node() is not None or None in codes:
        return f"Put it in `with {ALLOW}:`."
    return f"Write {', '.join(map(str, codes))} before it, or put it in `with {ALLOW}:`."


def _explicit_call(need: ImplicitRedistribution) -> str | None:
    """The call that makes the redistribution explicit; None if there is no such public call."""
    if need.written or not all(map(is_standard, need.dst.placements)):
        return None
    if any(len(axes) > 1 and list(axes) != sorted(axes) for _, axes in need.dst.shard_order or ()):
        return None
    wanted = [_target_code(was, now) for was, now in zip(need.src.placements, need.dst.placements, strict=True)]
    return f"{need.argument}.redistribute(placements=[{', '.join(wanted)}])"


def _target_code(was: Placement, now: Placement) -> str:
    if isinstance(now, Partial):  # no public target: a partial tensor stays so, and from R each rank proceeds locally
        return f"Partial({now.reduce_op!r})" if was == now else "Replicate()"
    return f"Shard({now.dim})" if isinstance(now, Shard) else repr(Replicate())
