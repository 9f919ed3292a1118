"""Further uses of the public calls: modules of many kinds, what a caller gave, and arguments of all types.

A generator takes the number of mesh axes and yields steps.  Their keys are a public name and, after a comma, what of it they try.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Layout
from strategies.model.codec import placement_code, placements_code
from strategies.programs.public_api.optimizer_steps import OPTIMIZER_STEPS
from strategies.programs.public_api.tensor_steps import (
    EVEN_SEQUENCES,
    FEW_CLASSES,
    FLOATS,
    IMAGES,
    INDICES,
    LAST,
    LOGITS,
    MOVES,
    NUMBERS,
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
)

_STYLES: dict[str, tuple[str, str, Placement, Placement, tuple[str, ...]]] = {
    "ColwiseParallel": ("output_layouts=Replicate()", FLOATS, R, R, ("nn.Linear(n, 5)", "nn.Linear(n, 8, bias=False)")),
    "RowwiseParallel": ("input_layouts=Replicate()", FLOATS, R, R, ("nn.Linear(n, 5)", "nn.Linear(n, 8, bias=False)")),
    "SequenceParallel": ("", SEQUENCES, S1, S1, ("nn.LayerNorm(n)", "nn.LayerNorm(n, bias=False)", "nn.RMSNorm(n)")),
}
"""For each style: options that make its results whole, its tensors, what it takes and gives, and modules of one layer."""
_EMBEDDINGS = ("nn.Embedding(5, 6)", "nn.Embedding(7, 3, padding_idx=1)")
_TIED = {"SequenceParallel": "TiedNorms(n)"}
_SCALED = {"SequenceParallel": "ScaledNorm(n)"}
_FROZEN = (None, "*weight", "*bias", "*")
_CALLS: tuple[tuple[tuple[float, ...], dict[str, float]], ...] = (
    ((), {}),
    ((2.0,), {}),
    ((), {"scale": 2.0}),
    ((2.0,), {"shift": 1.0}),
)


def _varied(
    plan: str, module: str, kind: str, takes: Placement | None, gives: Placement, group: str = "", **own: Any
) -> PublicStep:
    """A step of a module under a plan, or under `distribute_module` without one; its text has the calls in their order."""
    own = {name: value for name, value in own.items() if value not in (None, (), {})}
    call = f"{_module_call(plan, module, own)}, then {_use_of_module(takes, own)}"
    options = {**own, "frozen": repr(own["frozen"])} if "frozen" in own else own
    given = call_text("varied", "x", f"lambda n: {module}", plan, _code(takes), placement_code(gives), **options)
    aspect = group if group in ("tied", "frozen", "arguments", "pieces") else ""
    return PublicStep(call, given, kind, group=group or module, aspect=aspect)


def _module_call(plan: str, module: str, own: dict[str, Any]) -> str:
    """Python text of the call on the module: `distribute_module(Tied(n).eval(), mesh), parameters '*bias' frozen`."""
    made = f"{module}.eval()" if own.get("training") is False else module
    source = {"src_data_rank": own.get("source")}
    first, rest = (made, "mesh"), [plan.replace("parallel.", "")] if plan != "None" else []
    call = call_text("parallelize_module" if rest else "distribute_module", *first, *rest, **source)
    call += f", parameters {own['frozen']!r} frozen" if "frozen" in own else ""
    return call + (f", each rank right in its own piece along dim {own['own']}" if "own" in own else "")


def _use_of_module(takes: Placement | None, own: dict[str, Any]) -> str:
    if own.get("looks"):
        return "the module's state"
    more = ", ".join([*map(str, own.get("more", ())), *(f"{n}={v}" for n, v in own.get("named", {}).items())])
    given = f"x in {placement_code(takes)}" if takes else "the DTensor x"
    return f"a training step on {given}" + (f" and {more}" if more else "")


def _code(placement: Placement | None) -> str:
    return "None" if placement is None else placement_code(placement)


def kept(style: str, axes: int) -> Iterator[PublicStep]:
    """What modules of many kinds keep under a style: ties, names, what requires a gradient, buffers, training mode, values."""
    options, kind, takes, gives, modules = _STYLES[style]
    alike = style == "SequenceParallel" or None
    one, every = f"parallel.{style}({options})", _nested_plan(style, options)
    tied = _TIED.get(style, "Tied(n)")
    for frozen, training in ((f, t) for f in _FROZEN for t in (None, False)):
        own = {"looks": True, "frozen": frozen, "training": training, "alike": alike}
        for module in modules:
            yield _varied(one, module, kind, takes, gives, "one", **own)
        yield _varied(every, tied, kind, takes, gives, "tied", **own)
        nested = f"nn.Sequential(nn.Sequential({modules[0]}), nn.Dropout(0.0))"
        yield _varied(f"{{'0.*': {one}}}", nested, kind, takes, gives, "nested", **own)
        if style != "SequenceParallel":
            for module in _EMBEDDINGS:
                yield _varied(f"parallel.{style}()", module, INDICES, R, gives, "embedding", **own)


def _nested_plan(style: str, options: str) -> str:
    first = options
    if style == "SequenceParallel":
        return f"{{'first': parallel.{style}(use_local_output=True), 'second': parallel.{style}()}}"
    return f"{{'first': parallel.{style}({first}), 'second': parallel.{style}({first})}}"


def trained(style: str, axes: int) -> Iterator[PublicStep]:
    """A step of training of the same modules, called with several arguments, of pieces that are even or not and of DTensors.

    Pieces of several shapes are for the steps about them alone: what they do to a style is one fault, whatever else varies.
    """
    options, kind, takes, gives, modules = _STYLES[style]
    alike, even = style == "SequenceParallel" or None, EVEN_SEQUENCES if kind == SEQUENCES else kind
    one = f"parallel.{style}({options})"
    scaled = _SCALED.get(style, "ScaledLinear(n, 5)")
    for frozen in _FROZEN:
        tied = _TIED.get(style, "Tied(n)")
        yield _varied(_nested_plan(style, options), tied, even, takes, gives, "tied", frozen=frozen, alike=alike)
        for module in modules:
            yield _varied(one, module, even, takes, gives, "frozen", frozen=frozen, alike=alike)
    for more, named in _CALLS[1:]:
        yield _varied(one, scaled, even, takes, gives, "arguments", more=more, named=named, alike=alike)
    for module in modules:
        yield _varied(one, module, kind, None, gives, "DTensor", alike=alike)
        for cut in (S0, S1) if style == "SequenceParallel" else (S0,):
            dim = "sequence_dim" if style == "SequenceParallel" else "input_layouts"
            value = str(cut.dim) if style == "SequenceParallel" else placement_code(cut)
            rest = "" if style != "ColwiseParallel" else ", output_layouts=Replicate()"
            out = cut if style == "SequenceParallel" else R
            yield _varied(f"parallel.{style}({dim}={value}{rest})", module, kind, cut, out, "pieces", alike=alike)


_MLP = "nn.Sequential(nn.Linear(n, {h}), nn.ReLU(), nn.Linear({h}, 3))"
_DEEP = "nn.Sequential(nn.Sequential(nn.Linear(n, {h}), nn.Tanh()), nn.Sequential(nn.Linear({h}, n)))"
_HIDDEN = (5, 7, 12)


def plans(axes: int) -> Iterator[PublicStep]:
    """Hidden layers of any size; and ranks whose own pieces alone are right, where no rank is the source."""
    col, row = "parallel.ColwiseParallel", "parallel.RowwiseParallel"
    for hidden in _HIDDEN:
        for module, first, second in ((_MLP, "0", "2"), (_DEEP, "0.0", "1.*")):
            plan = f"{{'{first}': {col}(), '{second}': {row}()}}"
            yield _varied(plan, module.format(h=hidden), FLOATS, R, R, "hidden")
            plan = f"{{'{first}': {col}(use_local_output=False), '{second}': {row}()}}"
            yield _varied(plan, module.format(h=hidden), FLOATS, R, R, "hidden, of DTensors")
    for name, dim in (("ColwiseParallel", 0), ("RowwiseParallel", 1)):
        style = f"parallel.{name}({_STYLES[name][0]})"
        for plan, module in (
            (style, "nn.Linear(n, 8)"),
            (f"{{'': {style}}}", "nn.Linear(n, 8)"),
            (f"{{'0': {style}}}", "nn.Sequential(nn.Linear(n, 6))"),
            (f"{{'*.?': {style}}}", "nn.Sequential(nn.Sequential(nn.Linear(n, 6)))"),
        ):
            # A rank that is given names the source of the mesh axis; None, that each rank has its own piece already.
            yield _varied(plan, module, FLOATS, R, R, f"own {plan[:4]}", source="None", own=dim)


def replicas(axes: int) -> Iterator[PublicStep]:
    """What modules keep under `distribute_module`, and a step of training."""
    for module in ("Tied(n)", "TiedNorms(n)", "nn.Sequential(nn.Linear(n, 5), nn.Sequential(nn.LayerNorm(5)))"):
        for frozen, training in ((f, t) for f in _FROZEN for t in (None, False)):
            for looks in (True, None):
                own = {"looks": looks, "frozen": frozen, "training": training}
                yield _varied("None", module, ROWS, None, R, f"{module} {looks}", **own)


def ensured(style: str, axes: int) -> Iterator[PublicStep]:
    """A style that prepares a module, for DTensors whose layouts are not those that the style has for plain tensors."""
    batch = (R, S0, S1)
    into, out = "Input" in style, style.endswith("Output")
    for one in combined(coming=batch, stated=batch, wanted=batch, local=(None, True, False)):
        coming, stated, wanted, local = (one[name] for name in ("coming", "stated", "wanted", "local"))
        own: dict[str, Any] = {}
        if into:
            own |= {"input_layouts": stated, "desired_input_layouts": wanted}
        if out:
            own |= {"output_layouts": stated, "desired_output_layouts": wanted}
        own["use_local_output" if style != "PrepareModuleInputOutput" else "use_local_input"] = local
        for keyword in (False, True) if style == "PrepareModuleInput" else (False,):
            named = {"input_kwarg_layouts": f"{{'y': {placement_code(stated)}}}"}
            named["desired_input_kwarg_layouts"] = f"{{'y': {placement_code(wanted)}}}"
            plan = call_text(style, **own, **(named if keyword else {}))
            given = f"{'y=' if keyword else ''}x.redistribute([{placement_code(coming)}])"
            call = f"{plan} of a module that is called with {given}"
            ends = {"seen": wanted if into else None, "given": wanted if out else None, "keyword": keyword or None}
            if style == "PrepareModuleInputOutput" and local:
                continue  # the module gives plain pieces of what it was given, in the layout that is stated
            code = call_text("layouts_ensured", "x", f"parallel.{plan}", placement_code(coming), **ends)
            yield PublicStep(call, code, SEQUENCES, group=f"{coming == stated} {stated == wanted} {keyword}")


def caller_distributes(axes: int) -> Iterator[PublicStep]:
    for layout in layouts_on(axes, (*MOVES, LAST)):
        for source in ({}, {"src_data_rank": "None"}):
            made = call_text("distribute_tensor", "given", "mesh", "listed", **source)
            text = call_text("distribute_tensor", "x", "mesh", placements=layout, **source)
            yield _untouched(text, made, layout, False)


def caller_makes(axes: int) -> Iterator[PublicStep]:
    for layout in layouts_on(axes, MOVES):
        for run_check in (None, True):
            made = call_text("DTensor.from_local", "given", "mesh", "listed", run_check=run_check)
            made = made[:-1] + ", shape=x.shape, stride=x.stride())"
            text = call_text("DTensor.from_local", placements=layout, run_check=run_check)
            yield _untouched(text, made, layout, True)


def _untouched(text: str, made: str, layout: Layout, pieces: bool) -> PublicStep:
    code = f"unchanged(x, lambda given, mesh, listed, x: {made}, {placements_code(layout)}, {pieces})"
    named = (tuple(R if p == LAST else p for p in layout),)
    return PublicStep(f"{text}, then the caller's tensor", code, NUMBERS, named, group=str(R in layout))


_MOVED = ("x.full_tensor()", "x.to_local()", "x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)",
          "x.redistribute(placements=[Shard(0)] * x.device_mesh.ndim)")  # fmt: skip


def caller_moves(axes: int) -> Iterator[PublicStep]:
    for move in (*_MOVED, "x.redistribute(placements=x.placements, async_op=True)"):
        yield PublicStep(f"{move}, then the caller's tensor", f"left_alone(x, lambda x: {move})", NUMBERS)


def strides_of_moved(axes: int) -> Iterator[PublicStep]:
    for view in ("x.transpose(0, -1)", "x.permute(*range(x.ndim)[::-1])", "x"):
        for move in _MOVED[2:]:
            call = f"{move.replace('x.', view + '.', 1)}, then the strides of its pieces"
            code = f"strides_agree(x, lambda x: (lambda x: {move} if hasattr(x, 'device_mesh') else x)({view}))"
            yield PublicStep(call, code, FLOATS)


def strides_of_distributed(axes: int) -> Iterator[PublicStep]:
    for view in ("transpose(0, -1)", "permute(*range(x.ndim)[::-1])"):
        for layout in layouts_on(axes, (R, S0, LAST)):
            call = f"distribute_tensor(x.{view}, mesh, {placements_code(layout)}), then the strides of its pieces"
            made = f"on_mesh(whole(x).{view}, x, {placements_code(layout)})"
            named = (tuple(R if p == LAST else p for p in layout),)
            yield PublicStep(call, f"strides_agree(x, lambda x: {made})", FLOATS, named)


_FREE = {
    "a * 2 + 1": ("lambda a: a * 2 + 1", "{}", ()),
    "(a * 2, a.exp())": ("lambda a: (a * 2, a.exp())", "{}", (1,)),
    "(a * 2, ones)": ("lambda a: (a * 2, a.new_ones(2))", "{}", (R,)),
    "(a * 2, 3)": ("lambda a: (a * 2, 3)", "{}", (None,)),
    "a * b, b by keyword": ("lambda a, b: a * b", "{'b': on_mesh(eighths(x.shape, x), x, {p})}", ()),
    "a * k, k=3": ("lambda a, k: a * k", "{'k': 3}", ()),
}
"""Functions for `local_map`: what they take by keyword, and the results after the first, None for a number, R for one that ranks have alike."""


def maps(axes: int) -> Iterator[PublicStep]:
    """`local_map` of pieces that are even or not, with several results, scalars and arguments by keyword."""
    for layout in layouts_on(axes, MOVES):
        listed = placements_code(layout)
        for text, (function, named, further) in _FREE.items():
            given = named.replace("{p}", listed)
            others: dict[object, str] = {None: "None", R: placements_code((R,) * axes)}
            gives = [listed, *(others.get(one, listed) for one in further)]
            outs = gives[0] if len(gives) == 1 else f"({', '.join(gives)})"
            options = {"out_placements": outs, "in_placements": f"({listed},)"}
            call = call_text("local_map", text, **options)
            code = call_text("mapped_freely", "x", function, f"lambda x: {given}", **options)
            yield PublicStep(f"{call}, of any pieces", code, ROWS, (layout,), group=text)


_TYPES = {
    "bool": ("False", "True"), "float": ("0.5", "2.5"), "str": ("'each'", "'sum'"), "int": ("0", "1"),
    "int[]": ("[0]", "[1]"), "float[]": ("[0.5]", "[1.5]"), "bool[]": ("[False]", "[True]"), "Scalar": ("1", "2"),
    "int?": ("None", "1"), "float?": ("None", "1.5"), "bool?": ("None", "True"), "str?": ("None", "'sum'"),
    "Tensor?": ("None", "'a tensor'"), "ScalarType": ("torch.float32", "torch.float64"),
}  # fmt: skip
"""Two values of each type that an argument of an op may have."""
_REPLACED = {
    "flip": "[0]", "tril": "", "cumprod": "0", "erf": "", "roll": "[1], [0]", "logcumsumexp": "0", "triu": "1", "erfc": "",
    "atanh": "", "sinh": "",
}  # fmt: skip
"""Ops of torch that have rules, with the arguments after the first; no other program has them."""


def arguments(axes: int) -> Iterator[PublicStep]:
    """`register_sharding` of ops with an argument of any type, whose rules depend on it."""
    for kind, (off, on) in _TYPES.items():
        for first, second in ((off, on), (on, off)):
            for keyword in (None, True):
                if first == off or off != "None":
                    word = f"{kind}{' by keyword' if keyword else ''}"
                    call = f"register_sharding of an op with {word}: {first}, then {second}"
                    code = call_text("registered_with", "x", repr(kind), first, second, keyword=keyword)
                    yield PublicStep(call, code, group=kind)


def replaced(axes: int) -> Iterator[PublicStep]:
    """`register_sharding` of ops that have rules of torch's."""
    for op, rest in _REPLACED.items():
        call = f"register_sharding of {op}, which has rules: replicas alone"
        yield PublicStep(call, f"overridden(x, {op!r}{', ' + rest if rest else ''})")


_LOSSES = {
    "F.cross_entropy": "F.cross_entropy(a, {t}, reduction='sum')",
    "F.cross_entropy times a pending sum": "F.cross_entropy(a, {t}, reduction='sum') * a.detach().sum()",
    "the gradient of F.cross_entropy": "torch.autograd.grad(F.cross_entropy(a, {t}, reduction='sum'), a, create_graph=True)[0]",
    "log_softmax": "F.log_softmax(a, 1)",
}
"""torch's documentation: "Currently only the cross-entropy loss is supported", "class probabilities currently not supported"."""


def losses(axes: int) -> Iterator[PublicStep]:
    """What is computed under `loss_parallel`, also entered twice, of logits with images and with fewer classes than ranks."""
    for layout in layouts_on(axes, (R, S0, S1)):
        if layout.count(S1) != 1:
            continue
        listed = placements_code(layout)
        target = placements_code([R if p == S1 else p for p in layout])
        made = f"on_mesh(numbered(a.shape[:1] + a.shape[2:], a.shape[1]), a, {target})"
        for kind in (LOGITS, IMAGES, FEW_CLASSES):
            for times, some in (
                (1, _LOSSES),
                (2, {name: _LOSSES[name] for name in ("F.cross_entropy", "log_softmax")}),
            ):
                for name, loss in some.items():
                    call = f"loss_parallel(){' entered twice' if times == 2 else ''}, then {name} of "
                    call += f"{kind} x.redistribute({listed})"
                    code = f"within(x, parallel.loss_parallel, {times}, lambda a: {loss.format(t=made)}, {listed})"
                    aspect, group = "entered twice" if times == 2 else name, f"{name} {times}"
                    group += f" {kind}" if aspect == "F.cross_entropy" else ""  # what is documented, of each kind
                    yield PublicStep(call, code, kind, (layout,), group=group, aspect=aspect)


def contexts(axes: int) -> Iterator[PublicStep]:
    """`implicit_replication` entered twice, and left in turn."""
    function = "lambda a: a * eighths(a.shape[-1:], a)"
    code = f"within(x, experimental.implicit_replication, 2, {function})"
    yield PublicStep("implicit_replication() entered twice, then a * b", code, ROWS)


VARIED_STEPS: dict[str, Generator] = {
    **{f"parallel.{style}, modules kept": functools.partial(kept, style) for style in _STYLES},
    **{f"parallel.{style}, modules trained": functools.partial(trained, style) for style in _STYLES},
    "parallel.parallelize_module, hidden sizes": plans,
    "tensor.distribute_module, modules kept": replicas,
    **{
        f"parallel.{style}, of any DTensor": functools.partial(ensured, style)
        for style in ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
    },
    "tensor.distribute_tensor, what the caller gave": caller_distributes,
    "DTensor.from_local, what the caller gave": caller_makes,
    "DTensor.redistribute, what the caller gave": caller_moves,
    "DTensor.redistribute, strides": strides_of_moved,
    "tensor.distribute_tensor, strides": strides_of_distributed,
    "experimental.local_map, of any pieces": maps,
    "experimental.register_sharding, arguments": arguments,
    "experimental.register_sharding, ops with rules": replaced,
    "parallel.loss_parallel, what is within": losses,
    "experimental.implicit_replication, twice": contexts,
    **OPTIMIZER_STEPS,
}
