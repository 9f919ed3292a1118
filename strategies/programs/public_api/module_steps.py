"""Uses of the public calls which distribute modules, of `loss_parallel` and of `context_parallel`: one generator for each public name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Layout
from strategies.model.codec import placement_code, placements_code
from strategies.programs.public_api.tensor_steps import (
    EVEN_SEQUENCES,
    FLOATS,
    INDICES,
    LAST,
    LOGITS,
    ROWS,
    S0,
    S1,
    SEQUENCES,
    Generator,
    PublicStep,
    R,
    call_text,
    combined,
    layouts_on,
    options_text,
)

LINEAR = ("nn.Linear(n, 8)", "nn.Linear(n, 5)", "nn.Linear(n, 12, bias=False)", "nn.Linear(n, 3)")
EMBEDDING = ("nn.Embedding(12, 8)", "nn.Embedding(5, 6)", "nn.Embedding(7, 3)", "nn.Embedding(10, 4, padding_idx=1)")
NORM = (
    "nn.LayerNorm(n)", "nn.LayerNorm(n, bias=False)", "nn.LayerNorm(n, elementwise_affine=False)", "nn.RMSNorm(n)",
    "nn.Dropout(0.0)", "nn.Dropout(0.5).eval()",
)  # fmt: skip
"""Modules of the kinds that a style documents, for tensors whose last dim is `n`."""


def distribute_module(axes: int) -> Iterator[PublicStep]:
    cuts = {
        None: "None",
        "Shard(0)": "lambda v, axes: [Shard(0)] * axes",
        "the last dim": "lambda v, axes: [Shard(v.ndim - 1)] * axes",
    }
    made = [(m, ROWS) for m in (*LINEAR[:2], NORM[0], "nn.Sequential(nn.Linear(n, 4), nn.Tanh())")]
    for module, takes in [*made, (EMBEDDING[1], INDICES)]:
        for name, cut in cuts.items():
            for into, out in ((None, None), ((R,) * axes, (S0,) * axes), ((S0,) * axes, (R,) * axes)):
                own = {
                    "partition_fn": name and f"<{name}>",
                    "input_fn": into and f"<to {placements_code(into)}>",
                    "output_fn": out and f"<to {placements_code(out)}>",
                }
                hooks = {"takes": into, "gives": out}
                call = call_text("distribute_module", module, "mesh", **own)
                code = call_text("module_distributed", "x", f"lambda n: {module}", cut, **hooks)
                yield PublicStep(call, code, takes, group=module)


def _style(
    style: str, module: str, kind: str, takes: Placement | None, gives: Placement, *, alike: bool = False, **own: Any
) -> PublicStep:
    plan = call_text(style, **own)
    options = ", alike=True, sequence=True" if alike else ""
    given = f"{placement_code(takes) if takes else None}, {placement_code(gives)}{options}"
    code = f"parallelized(x, lambda n: {module}, parallel.{plan}, {given})"
    return PublicStep(f"{plan} of {module}", code, kind, group=module)


def colwise(axes: int) -> Iterator[PublicStep]:
    return _linear_styles("ColwiseParallel", R, LAST)


def rowwise(axes: int) -> Iterator[PublicStep]:
    return _linear_styles("RowwiseParallel", LAST, R)


def _linear_styles(style: str, takes: Placement, gives: Placement) -> Iterator[PublicStep]:
    """A style of linear layers and embeddings; `takes` and `gives` are the layouts that it assumes and gives by default."""
    for module in (*LINEAR, *EMBEDDING):
        embedding = module in EMBEDDING
        for one in combined(
            input_layouts=[None, R, S0, LAST], output_layouts=[None, R, S0, LAST], use_local_output=[None, False]
        ):
            into, out = one["input_layouts"] or takes, one["output_layouts"] or gives
            yield _style(style, module, INDICES if embedding else FLOATS, into, out, **one)


def sequence(axes: int) -> Iterator[PublicStep]:
    for module in NORM:
        for dim in (None, 0, 1):
            for local, plain in ((None, True), (True, True), (None, False)):
                cut = Shard(1 if dim is None else dim)
                takes = cut if plain else None
                own = {"sequence_dim": dim, "use_local_output": local}
                step = _style("SequenceParallel", module, SEQUENCES, takes, cut, alike=True, **own)
                yield step if plain else replace(step, call=f"{step.call}, of a DTensor")


_MLP = "nn.Sequential(nn.Linear(n, 12), nn.ReLU(), nn.Linear(12, 5))"
_BLOCK = "nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 12), nn.Tanh(), nn.Linear(12, n))"
_NESTED = "nn.Sequential(nn.Sequential(nn.Linear(n, 12)), nn.Sequential(nn.Linear(12, 6)))"
_COL, _ROW = "parallel.ColwiseParallel", "parallel.RowwiseParallel"
_BLOCK_PLAN = (
    f"{{'0': parallel.SequenceParallel(), '1': {_COL}(input_layouts=Shard(1)), '3': {_ROW}(output_layouts=Shard(1))}}"
)
_PLANS = (
    (_MLP, f"{{'0': {_COL}(), '2': {_ROW}()}}", R, R, True),
    (_MLP, f"{{'0': {_COL}(input_layouts=Shard(0)), '2': {_ROW}(output_layouts=Shard(0))}}", S0, S0, True),
    (_MLP, f"{{'2': {_COL}(output_layouts=Replicate()), '0': {_ROW}(input_layouts=Replicate())}}", R, R, True),
    (_MLP, f"{{'[02]': {_COL}(output_layouts=Replicate())}}", R, R, True),
    (_NESTED, f"{{'0.0': {_COL}(), '1.*': {_ROW}()}}", R, R, True),
    (_NESTED, f"{{'*.0': {_COL}(output_layouts=Replicate())}}", R, R, True),
    ("nn.Linear(n, 6)", f"{{'': {_COL}(output_layouts=Replicate())}}", R, R, True),
    (_BLOCK, _BLOCK_PLAN, S1, S1, False),
)  # fmt: skip
"""Modules and plans, the layouts that they take and give, and whether the first rank's parameters count on all ranks."""


def parallelize_module(axes: int) -> Iterator[PublicStep]:
    for module, plan, takes, gives, unlike in _PLANS:
        for source in (None, "None"):
            alike = "" if unlike and source is None else ", alike=True"
            options = options_text(src_data_rank=source)
            call = f"parallelize_module({module}, mesh, {plan.replace('parallel.', '')}{', ' + options if options else ''})"
            given = f"{placement_code(takes)}, {placement_code(gives)}{alike}{', ' + options if options else ''}"
            code = f"parallelized(x, lambda n: {module}, {plan}, {given})"
            yield PublicStep(call, code, SEQUENCES if S1 in (takes, gives) else FLOATS, group=f"{module} {plan}")


def _pair(first: object, second: object) -> str:
    return f"({', '.join(placement_code(p) if isinstance(p, Placement) else 'None' for p in (first, second))})"


def _prepared(style: str, own: dict[str, Any], takes: str, gives: str, **more: Any) -> PublicStep:
    """A style that prepares a module.  A module that gets pieces gives pieces, whose shape is known where they are even."""
    plan = call_text(style, **own)
    words = "a module of two tensors" + (", the second by keyword" if more.get("keyword") else "")
    code = call_text("prepared", "x", f"parallel.{plan}", takes, gives, **more)
    return PublicStep(
        f"{plan} of {words}", code, EVEN_SEQUENCES if "scaled" in more else SEQUENCES, group=str(sorted(more))
    )


def _input_options(given: Placement, wanted: Placement) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Options of a style that prepares inputs, the layouts that the module takes, and whether one comes by keyword."""
    both, desired = _pair(given, given), _pair(wanted, wanted)
    yield {"input_layouts": both, "desired_input_layouts": desired}, both, False
    own = {"input_layouts": _pair(given, None), "desired_input_layouts": _pair(wanted, None)}
    yield own, _pair(given, None), False
    named = {"input_kwarg_layouts": f"{{'y': {placement_code(given)}}}"}
    named["desired_input_kwarg_layouts"] = f"{{'y': {placement_code(wanted)}}}"
    yield {"input_layouts": given, "desired_input_layouts": wanted, **named}, both, True


_BATCH: Sequence[Placement] = (R, S0, S1)


def prepare_input(axes: int) -> Iterator[PublicStep]:
    for one in combined(given=_BATCH, wanted=_BATCH):
        given, wanted = one["given"], one["wanted"]
        for own, takes, keyword in _input_options(given, wanted):
            more = {"keyword": keyword or None}
            yield _prepared("PrepareModuleInput", own, takes, _pair(wanted, wanted), **more)
            if "None" not in takes:
                local = {**own, "use_local_output": True}
                yield _prepared("PrepareModuleInput", local, takes, _pair(wanted, wanted), scaled=False, **more)


def prepare_output(axes: int) -> Iterator[PublicStep]:
    for one in combined(given=_BATCH, wanted=_BATCH, local=(None, False)):
        given, wanted = one["given"], one["wanted"]
        own = {
            "output_layouts": _pair(given, given), "desired_output_layouts": _pair(wanted, wanted),
            "use_local_output": one["local"],
        }  # fmt: skip
        both = _pair(wanted, wanted)
        yield _prepared("PrepareModuleOutput", own, _pair(given, given), both, promised=both, local=False)
        some = {**own, "output_layouts": _pair(given, None), "desired_output_layouts": _pair(wanted, None)}
        first = f"({placement_code(wanted)},)"
        ends = _pair(wanted, given)
        yield _prepared("PrepareModuleOutput", some, _pair(given, given), ends, promised=first, local=False)


def prepare_one(style: str, axes: int) -> Iterator[PublicStep]:
    """A style that prepares the results of a module which returns a tuple of one tensor."""
    taken = "input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), " if "Input" in style else ""
    plan = f"{style}({taken}output_layouts=(Replicate(),), desired_output_layouts=(Replicate(),))"
    yield PublicStep(f"{plan} of a module that returns a tuple of one", f"tuple_of_one(x, parallel.{plan})", FLOATS)


def prepare_both(axes: int) -> Iterator[PublicStep]:
    for one in combined(given=_BATCH, wanted=_BATCH, out=_BATCH, local=(None, False)):
        given, wanted, out = one["given"], one["wanted"], one["out"]
        for own, takes, keyword in _input_options(given, wanted):
            if "None" in takes:
                continue
            ends = {
                "output_layouts": _pair(wanted, wanted), "desired_output_layouts": _pair(out, out),
                "use_local_output": one["local"],
            }  # fmt: skip
            more = {"keyword": keyword or None, "promised": _pair(out, out)}
            yield _prepared("PrepareModuleInputOutput", {**own, **ends}, takes, _pair(out, out), **more)
            local = {**own, "use_local_input": True, **ends}
            yield _prepared("PrepareModuleInputOutput", local, takes, _pair(out, out), scaled=False, **more)


def loss_parallel(axes: int) -> Iterator[PublicStep]:
    for layout in layouts_on(axes, (R, S0, S1)):
        if layout.count(S1) != 1:
            continue
        target = [R if p == S1 else p for p in layout]
        for one in combined(
            reduction=[None, "'sum'", "'none'"] if axes == 1 else ["'sum'", "'none'"],
            weighted=[None, True],
            ignored=[None, True],
            plain=[True, False] if all(p == R for p in target) else [False],
        ):
            call = call_text("F.cross_entropy", "x", "target", reduction=one["reduction"])
            words = [w for w, on in (("weighted", one["weighted"]), ("a target ignored", one["ignored"])) if on]
            words += ["a plain target"] if one["plain"] else []
            call = f"loss_parallel() of {placements_code(layout)}: {call}" + "".join(f", {w}" for w in words)
            options = {name: one[name] for name in ("reduction", "weighted", "ignored")}
            listed = "None" if one["plain"] else placements_code(target)
            code = call_text("loss_in_parallel", "x", placements_code(layout), listed, **options)
            yield PublicStep(call, code, LOGITS)
    after = "lambda a: F.cross_entropy(a, a.argmax(1))"
    code = f"after_an_error(x, parallel.loss_parallel, {after})"
    yield PublicStep("an exception within loss_parallel()", code, LOGITS)


_BUFFERS = (
    "[b]",
    "[b, b * 2]",
    "b.chunk(2)",
    "b.chunk(2, 1)",
    "b.chunk(2, -1)",
    "b.unbind(-1)",
    "[b[1:]]",
    "[b[..., :1]]",
    "[b.mT.contiguous().mT]",
)
"""Buffers of a tensor `b`: users cut query, key and value out of one."""


def context_parallel(axes: int) -> Iterator[PublicStep]:
    """Buffers that are cut along the sequence for a while; torch wants two pieces for each rank."""
    for text in _BUFFERS if axes == 1 else ():
        for dim in (0, 1):
            call = f"context_parallel(mesh, buffers={text}, buffer_seq_dims=[{dim}] for each)"
            fits = functools.partial(_divides, text, dim)
            yield PublicStep(call, f"cut_meanwhile(x, lambda b: {text}, {dim})", EVEN_SEQUENCES, (), fits, text)


def _divides(text: str, dim: int, x: Tensor, layout: Layout) -> bool:
    """Whether each buffer has two rows of the sequence for each of up to four ranks."""
    buffers = eval(text, {"b": x})  # noqa: S307  # of _BUFFERS
    return all(v.shape[dim] % 8 == 0 for v in buffers) and not any(p.is_partial() for p in layout)


MODULE_STEPS: dict[str, Generator] = {
    "tensor.distribute_module": distribute_module,
    "parallel.parallelize_module": parallelize_module,
    "parallel.ColwiseParallel": colwise,
    "parallel.RowwiseParallel": rowwise,
    "parallel.SequenceParallel": sequence,
    "parallel.PrepareModuleInput": prepare_input,
    "parallel.PrepareModuleOutput": prepare_output,
    "parallel.PrepareModuleInputOutput": prepare_both,
    "parallel.PrepareModuleOutput, a tuple of one": functools.partial(prepare_one, "PrepareModuleOutput"),
    "parallel.PrepareModuleInputOutput, a tuple of one": functools.partial(prepare_one, "PrepareModuleInputOutput"),
    "parallel.loss_parallel": loss_parallel,
    "experimental.context_parallel": context_parallel,
}
