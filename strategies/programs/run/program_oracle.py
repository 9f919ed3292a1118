"""The oracle of a program: the op and its follow-up step as one call, with a measured tolerance."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util.patching import wrapped
from localtensor.layout import JUMP_SHARE, is_inexact, max_abs, noise_factor
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import OracleResult, mutates, run_function_oracle, run_oracle, share_unstable
from strategies.model.rule import Call, Program, Sample
from strategies.programs.public_api import table as public_api
from strategies.programs.run import step_functions
from strategies.programs.run.follow_ups import CallWithFollowUp, steps_of
from strategies.programs.run.law_steps import LAWS
from strategies.programs.run.step_functions import RINGS
from strategies.validation.difference import tensor_text

FINE_UNITS, COARSE_UNITS = 64.0, 2.0
"""How far inputs are moved, in units of precision at their largest element; less where a unit is large (half)."""
UNLIKE = (1.0, 1.5, 2.0)
"""By how much farther one input is moved than another, in turn."""


def program_call(program: Program) -> Call:
    """The op's own call, or that and its follow-up step in one."""
    return _call(program.sample, program.then)


def _call(sample: Sample, then: str) -> Call:
    call = sample.call
    return CallWithFollowUp(call.op, call.args, call.kwargs, then) if then else call


def oracle_of_program(program: Program) -> OracleResult:
    """The results of the op and its follow-up step on whole tensors, and their tolerance.

    Raises one of `oracle.REFUSALS` if the op or the step refuses the tensors: then there is no such program.
    """
    return oracle_of_sample(program.sample, program.then, program.seed, partial=has_partial(program))


def has_partial(program: Program) -> bool:
    """Whether an input is partial: then its parts are larger than it, and so is the rounding error of their sum."""
    return any(isinstance(p, Partial) for placements in program.inputs for p in placements)


def oracle_of_sample(sample: Sample, then: str, seed: int = 0, *, partial: bool = True) -> OracleResult:
    """The same for a sample and the name of a follow-up step: of mesh and placements only `partial` counts.

    The tolerance includes the rounding error of adding partial values.  Elements that jump when the inputs move by that
    much (a cast of 4.0 to an integer, the gradient of abs at 0) are not compared.
    """
    followed = replace(sample, call=_call(sample, then))
    if then in LAWS:
        raw, outputs = run_call(followed.call, sample.tensors, mutates=mutates(sample.op))
        exact = tuple(torch.zeros(()) if isinstance(x, Tensor) else None for x in outputs)
        return OracleResult(sample.tensors, tuple(outputs), exact, raw)
    if then in RINGS:  # the op is random by its tag, for its dropout
        return run_function_oracle(followed.call, sample.tensors, seed=seed)
    oracle = run_oracle(followed, seed=seed)
    if oracle.metadata_only:
        return oracle
    slack = list(oracle.slack)
    for moved in _shaken(sample.tensors, seed, 1.0 if partial else 0.0):
        try:
            _, outs = run_call(followed.call, moved, mutates=mutates(sample.op))
        except REJECTIONS:  # it left the op's domain
            continue
        slack = [_with_jumps(s, want, out) for s, want, out in zip(slack, oracle.outputs, outs, strict=False)]
    if then:
        before = _before_last_step(sample, then)
        eps = max((torch.finfo(x.dtype).eps for x in before), default=0.0)
        slack = [_with_coarse_dtype(s, want, eps) for s, want in zip(slack, oracle.outputs, strict=True)]
        scale = max((float(max_abs(x)) for x in before), default=0.0)
        slack = [_with_cancelling(s, want, scale) for s, want in zip(slack, oracle.outputs, strict=True)]
    return replace(oracle, slack=tuple(slack), unstable=share_unstable(slack))


def dispatched_ops(program: Program) -> list[str]:
    """The overloads that the program dispatches on whole tensors, in order, each once."""
    found: dict[str, None] = {}

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[str(func)] = None
            return func(*args, **(kwargs or {}))

    with contextlib.suppress(*REJECTIONS), Ops():
        oracle_of_program(program)
    return list(found)


def tensors_made(program: Program) -> list[tuple[str, Tensor, tuple[Placement, ...]]]:
    """What the steps of a program put on the mesh besides the tensors of the call, whole, with its placements, each once.

    They are "argument"s, such as the weight of a public call, and "gradient"s that come in.
    """
    made: list[tuple[str, Tensor, tuple[Placement, ...]]] = []

    def on_mesh(own: Callable[..., Any], values: Tensor, like: Any, placements: Sequence[Placement]) -> Any:
        made.append(("argument", values.detach().clone(), tuple(placements)))
        return own(values, like, placements)

    def spread(own: Callable[..., Any], values: Tensor, like: Any, placement: Placement) -> Any:
        others = [Replicate()] * (len(program.mesh) - 1)
        made.append(("gradient", values.detach().clone(), (placement if values.ndim else Replicate(), *others)))
        return own(values, like, placement)

    with contextlib.ExitStack() as stack, contextlib.suppress(*REJECTIONS):
        for module in public_api.MODULES:
            if hasattr(module, "on_mesh"):
                stack.enter_context(wrapped(module, "on_mesh", on_mesh))
        stack.enter_context(wrapped(step_functions, "spread", spread))
        run_call(program_call(program), program.sample.tensors, mutates=mutates(program.sample.op))
    texts = {f"{kind} {layout} {tensor_text(x)}": (kind, x, layout) for kind, x, layout in made if layout}
    return list(texts.values())


def _before_last_step(sample: Sample, then: str) -> list[Tensor]:
    """The inexact results before the last step, those of the op first: their precision limits that of the last step."""
    _, outs = run_call(sample.call, sample.tensors, mutates=mutates(sample.op))
    found = [*outs]
    for step in steps_of(then)[:-1]:
        outs = CallWithFollowUp(sample.op, (), (), step).after(outs)
        found += outs
    return [x for x in found if isinstance(x, Tensor) and is_inexact(x)]


def _with_cancelling(slack: Tensor | None, want: object, scale: float) -> Tensor | None:
    """The tolerance with the rounding error of numbers as large as `scale`, of which a later step may leave nothing.

    A number less its own mean is zero on one device; ranks, which add in another order, miss it by a unit of the number, not of
    the zero.  No change of the inputs measures that.
    """
    if slack is None or not isinstance(want, Tensor) or not is_inexact(want):
        return slack
    eps = torch.finfo(want.dtype).eps
    return slack + noise_factor(eps) * eps * scale


def _with_coarse_dtype(slack: Tensor | None, want: object, eps: float) -> Tensor | None:
    """The tolerance with the rounding error of the op's own results, if the step's dtype is finer (float32 to float64)."""
    if slack is None or not isinstance(want, Tensor) or not is_inexact(want) or torch.finfo(want.dtype).eps >= eps:
        return slack
    return slack + noise_factor(eps) * eps * (max_abs(want) + 1.0)


def _shaken(inputs: Sequence[Tensor], seed: int, least: float) -> list[list[Tensor]]:
    """The inputs moved to either side, in proportion to their largest element and `least`, not to each element.

    Neighbours move by unlike amounts: equal elements of two inputs are equal no more, in whatever directions they move.
    """
    rng = torch.Generator().manual_seed(zlib.crc32(f"shake {seed}".encode()))
    away = [
        step if step is None else step * UNLIKE[i % 3] for i, x in enumerate(inputs) for step in [_steps(x, rng, least)]
    ]
    if all(step is None for step in away):
        return []
    both = list(zip(inputs, away, strict=True))
    return [[x if step is None else (x + side * step).to(x.dtype) for x, step in both] for side in (1, -1)]


def _steps(x: Tensor, rng: torch.Generator, least: float) -> Tensor | None:
    if not is_inexact(x) or x.dtype == torch.complex32:
        return None
    signs = torch.randint(0, 2, x.shape, generator=rng).to(x.device) * 2 - 1
    return signs * _units(x.dtype) * torch.finfo(x.dtype).eps * (max_abs(x) + least)


def _units(dtype: torch.dtype) -> float:
    return FINE_UNITS if torch.finfo(dtype).eps < 1e-5 else COARSE_UNITS


def _with_jumps(slack: Tensor | None, want: Any, moved: object) -> Tensor | None:
    """The tolerance with the change from `want` to `moved`, the result on moved inputs; infinite for a jump, None for another text."""
    if isinstance(want, str):
        return slack if moved == want else None
    if slack is None or not isinstance(moved, Tensor) or moved.shape != want.shape or not want.numel():
        return slack
    same = (moved == want) | (moved.isnan() & want.isnan())
    if not is_inexact(want):
        return slack if bool(same.all()) else torch.where(same, slack, torch.inf)
    apart = torch.where(same, 0.0, (moved - want).abs().double().nan_to_num(torch.inf, torch.inf))
    jump = max(JUMP_SHARE, 4 * _units(want.dtype) * torch.finfo(want.dtype).eps)
    stable = apart <= jump * torch.maximum(max_abs(want), apart.new_tensor(1e-3))
    factor = noise_factor(torch.finfo(want.dtype).eps) / _units(want.dtype)
    room = slack + factor * torch.where(stable, apart, 0.0).amax()
    return room if bool(stable.all()) else torch.where(stable, room, torch.inf)
