"""Uses of a tensor that are no ops: what Python gets of it, attributes, copies, factories, hooks, items, and layers that hold it.

A generator takes the number of mesh axes and yields steps.  Names are those that `torch.Tensor` itself has where there is a list.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from localtensor.layout import Layout
from strategies.model.codec import placements_code
from strategies.programs.public_api.tensor_steps import (
    EVEN,
    FLOATS,
    MOVES,
    NUMBERS,
    ROWS,
    S0,
    S1,
    Generator,
    PublicStep,
    R,
    layouts_on,
)

OF_PIECES = {
    "data_ptr": "an address", "const_data_ptr": "an address", "get_device": "a number of a device", "is_pinned": "of memory", "is_shared": "of memory",
    "cuda": "moves", "xpu": "moves", "ipu": "moves", "hpu": "moves", "mtia": "moves", "pin_memory": "moves",
    "tolist": "has a step of its own", "item": "has a step of its own", "share_memory_": "moves", "backward": "a gradient",
}  # fmt: skip
"""What of a tensor is that of its memory or device: no program compares it."""
PLAIN = (bool, int, float, str, tuple, torch.dtype, torch.layout)


def _whole_float(x: Tensor, layout: Layout) -> bool:
    return x.dtype.is_floating_point


def _whole_int(x: Tensor, layout: Layout) -> bool:
    return not x.dtype.is_floating_point


@functools.cache
def told_names() -> dict[str, str]:
    """Public names of a tensor that give something plain, by how they are written: `x.dim()`, `x.shape`; or a view, such as `x.mT`."""
    found: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dir(Tensor):
            if name.startswith("_") or name.endswith("_") or name in OF_PIECES:
                continue
            value, called = None, None
            with contextlib.suppress(Exception):  # why: a method that needs arguments or another tensor raises anything
                value = getattr(torch.ones(3, 2), name)
                called = value() if callable(value) else value
            tensors = isinstance(called, tuple) and any(isinstance(v, Tensor) for v in called)
            if (isinstance(called, PLAIN) and not tensors) or (isinstance(called, Tensor) and not callable(value)):
                found[name] = f"x.{name}()" if callable(value) else f"x.{name}"
    return found


def tells(axes: int) -> Iterator[PublicStep]:
    for name, text in told_names().items():
        yield PublicStep(text, f"told({text})", ROWS, group=str(text.endswith("()")), aspect=name)
    for text in ("len(x)", "x.size(-1)", "x.stride(0)", "2.0 in x", "200.0 in x", "tuple(x.shape)", "hash(x) == hash(x)",
                 "x.is_set_to(x)", "x.is_same_size(x)", "[*x]", "[*reversed(x)]", "len([*zip(x, x)])"):  # fmt: skip
        yield PublicStep(text, f"told({text})", NUMBERS, group="Python", aspect=text)
    for text in ("x.tolist()", "x.numpy()", "x.__array__()"):
        call = text.replace(".numpy()", ".numpy().tolist()").replace("__()", "__().tolist()")
        yield PublicStep(text, f"told({call})", NUMBERS, group="Python", aspect=text)


_SCALARS = ("x.sum()", "x.amax()", "x.mean()", "x.argmax()", "x.norm()", "(x > 0).all()")
_OF_FLOATS = ("{}.item()", "float({})", "complex({})", "bool({})", "{}.item() > 0")
_OF_INTS = (
    "int({})",
    "operator.index({})",
    "format({}, 'd')",
    "'%d' % {}",
    "range(90)[{} % 7]",
    "bool({})",
    "str({}.item())",
)


def numbers(axes: int) -> Iterator[PublicStep]:
    """Python's numbers and texts of a tensor of one element, which most reductions give as a partial value."""
    for scalar in _SCALARS:
        for uses, fits in ((_OF_FLOATS, _whole_float), (_OF_INTS, _whole_int)):
            for use in uses:
                if scalar not in ("x.mean()", "x.norm()") or uses is _OF_FLOATS:
                    text = use.format(scalar)
                    kind = "int64" if uses is _OF_INTS else "float"
                    code = f"told({text})"
                    yield PublicStep(f"{text} of {kind}", code, NUMBERS, (), fits, use)


_ASSIGNED = {
    "x.data = y": "setattr(a, 'data', y)", "x.grad = y": "setattr(a, 'grad', y)", "x.data.copy_(y)": "a.data.copy_(y)",
    "x.detach().copy_(y)": "a.detach().copy_(y)", "x.detach().mul_(y)": "a.detach().mul_(y)", "x.data.zero_()": "a.data.zero_()",
    "x.copy_(y) without gradients": "torch.no_grad()(a.copy_)(y)", "x.set_(y)": "torch.no_grad()(a.set_)(y)",
    "x.requires_grad = False": "setattr(a, 'requires_grad', False)", "x.requires_grad_(False)": "a.requires_grad_(False)",
    "x.detach_()": "a.detach_()", "torch.utils.swap_tensors(x, y)": "torch.utils.swap_tensors(a, y)",
    "x.data = x.data.double()": "setattr(a, 'data', a.data.double())", "x.data = x.data * 2": "setattr(a, 'data', a.data * 2)",
}  # fmt: skip
_CHANGED = {
    "load_state_dict": "m.load_state_dict(n.state_dict())", "load_state_dict(assign=True)": "m.load_state_dict(n.state_dict(), assign=True)",
    "double()": "m.double()", "to(float64)": "m.to(torch.float64)", "bfloat16()": "m.bfloat16()", "requires_grad_(False)": "m.requires_grad_(False)",
    "zero_grad()": "m.zero_grad()", "zero_grad(False)": "m.zero_grad(set_to_none=False)", "apply(zeros_)": "m.apply(lambda v: nn.init.zeros_(v.weight))",
    "nn.init.eye_": "nn.init.eye_(m.weight)", "nn.init.constant_": "nn.init.constant_(m.weight, 0.5)", "nn.init.ones_": "nn.init.ones_(m.weight)",
    "vector_to_parameters": "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(n.parameters()), m.parameters())",
    "weight = n.weight": "setattr(m, 'weight', n.weight)",
}  # fmt: skip


def _not_partial(x: Tensor, layout: Layout) -> bool:
    return not any(p.is_partial() for p in layout)


def _has_rows(x: Tensor, layout: Layout) -> bool:
    return x.shape[0] > 2 and x.shape[1] > 2 and _not_partial(x, layout)


def _between(changes: Mapping[str, str], function: str, given: str, axes: int) -> Iterator[PublicStep]:
    """Steps that change a tensor or a layer by another one, in each layout."""
    for text, change in changes.items():
        for layout in layouts_on(axes, MOVES):
            listed = placements_code(layout)
            call = f"{text}, y in {listed}" if given == "a, y" else f"{text} of a layer; another in {listed}"
            code = f"{function}(x, {listed}, lambda {given}: {change})"
            yield PublicStep(call, code, ROWS, (layout,), _not_partial, text, text)


def assigned(axes: int) -> Iterator[PublicStep]:
    return _between(_ASSIGNED, "set_on", "a, y", axes)


def layers(axes: int) -> Iterator[PublicStep]:
    return _between(_CHANGED, "restored", "m, n", axes)


_COPIES = {
    "copy.copy(x)": "copy.copy", "copy.deepcopy(x)": "copy.deepcopy", "pickle.loads(pickle.dumps(x))": "lambda v: pickle.loads(pickle.dumps(v))",
    "torch.load(torch.save(x))": "lambda v: saved_and_loaded(v)", "x.clone().detach()": "lambda v: nn.Parameter(v.clone().detach(), v.requires_grad)",
    "torch.load(torch.save(x), weights_only=False)": "lambda v: saved_and_loaded(v, weights_only=False)",
    "torch.load(torch.save(x), map_location='cpu')": "lambda v: saved_and_loaded(v, map_location='cpu')",
    "copy.deepcopy of a layer": "lambda v: copy.deepcopy(nn.ParameterList([nn.Parameter(v, v.requires_grad)]))[0]",
    "nn.Parameter(x)": "lambda v: nn.Parameter(v, v.requires_grad)", "x.data": "lambda v: nn.Parameter(v.data, v.requires_grad)",
}  # fmt: skip


def copies(axes: int) -> Iterator[PublicStep]:
    for text, make in _COPIES.items():
        for shared in (True,) if text in ("copy.copy(x)", "nn.Parameter(x)", "x.data") else (None,):
            options = ", shares=True" if shared else ""
            for kind in (FLOATS, NUMBERS):
                yield PublicStep(f"{text} of {kind}", f"copied(x, {make}{options})", kind, (), _not_partial, text, text)


_SAVED = ("v", "v.flatten(0, 1)", "v.mT", "v[1:]", "v[:, None]")


def checkpoints(axes: int) -> Iterator[PublicStep]:
    """Tensors, and views of them, that are saved and loaded into another layout."""
    for made in _SAVED:
        strided = "flatten" in made  # strided shards cannot be saved, and are of even ones
        for layout in layouts_on(axes, MOVES):
            if strided and sum(p.is_shard() for p in layout) > 1:
                continue
            for rows in (True,) if strided else (False, True):
                listed = placements_code(layout)
                call = f"torch.distributed.checkpoint.load({made}) into {made} of {listed}{', saved in rows' if rows else ''}"
                code = f"checkpointed(x, {listed}, lambda v: {made}{', True' if rows else ''})"
                yield PublicStep(call, code, EVEN if strided else ROWS, (layout,), _has_rows, f"{made} {rows}", made)


def factories(axes: int) -> Iterator[PublicStep]:
    """Tensors made after another one, of any layout: all methods `new_...` and functions `..._like` that draw no random numbers."""
    names = [
        name for name in dir(Tensor) if name.startswith("new_") and name not in {"new_tensor", "new_empty_strided"}
    ]
    for size in ("x.shape", "(3,)", "()", "(*x.shape, 2)", "x.shape[1:]"):
        for name in names:
            value = ", 2" if name == "new_full" else ""
            for dtype in ("", ", dtype=torch.int64"):
                text = f"x.{name}({size}{value}{dtype})"
                yield _made(text, name)
    for name in ("zeros_like", "ones_like", "full_like", "empty_like"):
        for dtype in ("", ", dtype=torch.float64", ", dtype=torch.bool"):
            text = f"torch.{name}(x{', 2' if name == 'full_like' else ''}{dtype})"
            yield _made(text, name)
    for text in ("x.new_tensor([1.0, 2.0])", "x.type_as(x.double())", "x.to(torch.float64)", "x.to(x)", "x.expand_as(x)", "x.view_as(x)",
                 "x.reshape_as(x)", "x.new_empty_strided((3, 2), (1, 3)).fill_(2)"):  # fmt: skip
        yield _made(text, text)


def _made(text: str, name: str) -> PublicStep:
    filled = f"{text}.fill_(1)" if "empty" in name and "fill_" not in text else text
    return PublicStep(text, f"told({filled}, {text}.shape, {text}.dtype)", NUMBERS, group=name, aspect=name)


_PULLED = {
    "a hook of a leaf": "[a.register_hook(lambda v: v * 3), (a * 2).backward(g)][:0]",
    "a hook of a result": "[y := a * 2, y.register_hook(lambda v: v * 3), y.sin().backward(g)][:0]",
    "a hook that keeps what comes": "[kept := [], y := a * 2, y.register_hook(kept.append), (y * 3).backward(g), kept][4:]",
    "a hook after accumulation": "[a.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(3), None)[1]), (a * 2).backward(g)][:0]",
    "retain_grad": "[y := a * 2, y.retain_grad(), (y * 3).backward(g), y.grad][3:]",
    "backward(gradient)": "[(a * 2).backward(gradient=g)][:0]",
    "backward(inputs)": "[y := a * 2, y.backward(g, inputs=[a])][:0]",
    "backward twice": "[y := a.exp(), y.backward(g, retain_graph=True), y.backward(g)][:0]",
    "backward of a sum": "[(a * 2).sum().backward()][:0]",
    "backward of a mean": "[(a * a).mean().backward()][:0]",
    "autograd.grad": "[*torch.autograd.grad(a * 2, a, g)]",
    "autograd.grad of a gradient": "[(d := torch.autograd.grad(a * a * a, a, g, create_graph=True)[0]), *torch.autograd.grad(d.sum(), a)]",
    "autograd.backward": "[torch.autograd.backward([a * 2, a * 3], [g, g])][:0]",
    "a function of the user's own": "[doubled(a).backward(g)][:0]",
    "checkpoint": "[torch.utils.checkpoint.checkpoint(lambda v: v.sin() * 2, a, use_reentrant=False).backward(g)][:0]",
    "checkpoint, reentrant": "[torch.utils.checkpoint.checkpoint(lambda v: v.sin() * 2, a, use_reentrant=True).backward(g)][:0]",
    "save_on_cpu": "[s := contextlib.ExitStack(), s.enter_context(torch.autograd.graph.save_on_cpu()), y := a.sin() * 2, s.close(), y.backward(g)][:0]",
    "torch.func.vjp": "[torch.func.vjp(lambda v: v.sin(), a.detach())[1](g)[0]]",
    "torch.func.grad": "[torch.func.grad(lambda v: (v * v).sum())(a.detach())]",
    "torch.func.jvp": "[*torch.func.jvp(lambda v: v * v, (a.detach(),), (g,))]",
    "autograd.functional.vjp": "[*torch.autograd.functional.vjp(lambda v: v * v, a.detach(), g)]",
}  # fmt: skip


def gradients(axes: int) -> Iterator[PublicStep]:
    for text, run in _PULLED.items():
        for layout in layouts_on(axes, (R, S0)):
            listed = placements_code(layout)
            code = f"pulled(x, lambda a, g: {run}, {listed})"
            yield PublicStep(f"{text}, of a gradient in {listed}", code, FLOATS, (layout,), _not_partial, text, text)


_INPLACE = [f"i{name.strip('_')}" for name in dir(Tensor) if name.startswith("__") and f"__i{name[2:]}" in dir(Tensor)]


def augmented(axes: int) -> Iterator[PublicStep]:
    """Every `x += y` that a tensor has, with another layout of y; and every operator with a number on its left."""
    for name in _INPLACE:
        if hasattr(operator, name):
            fits = _whole_int if name in ("iand", "ior", "ixor", "ilshift", "irshift") else _whole_float
            for layout in layouts_on(axes, MOVES):
                code = f"augmented(x, {name!r}, {placements_code(layout)})"
                yield PublicStep(
                    f"x {name} y, y in {placements_code(layout)}", code, NUMBERS, (layout,), fits, name, name
                )
    for name in sorted(set(dir(Tensor)) & {f"__r{n[1:]}__" for n in _INPLACE}):
        fits = _whole_int if name in ("__rand__", "__ror__", "__rxor__", "__rlshift__", "__rrshift__") else _whole_float
        yield PublicStep(f"x.{name}(2)", f"told(x.{name}(2))", NUMBERS, (), fits, "left", name)


_INDICES = ("0", "-1", "slice(1, 3)", "slice(None, None, 2)", "slice(-2, None)", "Ellipsis", "None", "(0, 1)", "(Ellipsis, 0)", "(slice(None), -1)",
            "(slice(None), slice(1, None))", "a > 0", "indices([0, 2], a)", "(slice(None), indices([1, 0], a))",
            "(indices([0, 2], a), indices([1, 0], a))", "(a > 0)[:, 0]", "(None, 1)", "[0, 2]")  # fmt: skip


def items(axes: int) -> Iterator[PublicStep]:
    for index in _INDICES:
        name = index.replace(", a)", ")")
        kind = (
            "a mask or indices" if "a >" in index or "indices" in index else "a list" if index[0] == "[" else "a view"
        )
        yield PublicStep(f"x[{name}]", f"(lambda a: told(a[{index}]))(x)", ROWS, (), _has_rows, index, kind)
        for text, value in (("-2", "-2"), ("y", f"a.detach()[{index}] * 0 + 2")):
            if text == "-2" or index not in ("a > 0", "(a > 0)[:, 0]"):
                code = f"item_set(x, lambda a: {index}, lambda a: {value})"
                yield PublicStep(f"x[{name}] = {text}", code, ROWS, (), _has_rows, f"{index} set", f"{kind}, set")


_WITH_PLAIN = (
    "a * torch.tensor(2.0)", "torch.tensor(1.0) - a", "a / torch.tensor([2.0])", "a + torch.ones(1, 1)", "torch.where(a > 0, a, torch.tensor(0.0))",
    "torch.where(torch.tensor(True), a, a * 2)", "a.clamp(min=torch.tensor(0.0))", "a.masked_fill(a > 0, torch.tensor(-1.0))", "torch.maximum(a, torch.tensor(0.0))",
    "a.clone().add_(torch.tensor(1.0))", "a.clone().copy_(torch.tensor(3.0))", "torch.lerp(a, a * 2, torch.tensor(0.5))", "torch.pow(torch.tensor(2.0), a / 8)",
    "torch.zeros(()) + a.sum()", "operator.iadd(torch.zeros(()), a.sum())", "torch.stack([a.sum(), torch.tensor(1.0)])", "torch.cat([a.sum()[None], torch.ones(1)])",
    "a.index_fill(0, torch.tensor([0]), 2.0)", "a.index_select(0, torch.tensor([1]))", "a[torch.tensor(1)]", "a[torch.tensor([1])]", "a.gather(0, torch.tensor([[1]]))",
    "a.scatter(0, torch.tensor([[1]]), 5.0)", "a.index_add(0, torch.tensor([0]), a[:1])", "F.embedding(torch.tensor([1]), a)", "torch.addcmul(a, a, torch.tensor(2.0))",
    "torch.outer(a[0], torch.ones(1))", "F.prelu(a, torch.tensor([0.25]))", "F.cross_entropy(a[:1], torch.tensor([1]))", "F.linear(a[:, :1], torch.ones(1, 1))",
)  # fmt: skip


def with_plain(axes: int) -> Iterator[PublicStep]:
    """Functions of a DTensor of floats and a plain tensor of one element, which DTensor takes for a replica."""
    for text in _WITH_PLAIN:
        yield PublicStep(f"{text} of floats", f"(lambda a: told({text}))(x.float())", ROWS, (), _has_rows, text, text)


_INTO = (
    "torch.amax(a, 0, out=o)", "torch.amin(a, -1, out=o)", "torch.sum(a, 0, out=o)", "torch.mean(a, 0, out=o)", "torch.prod(a, 0, out=o)",
    "torch.var(a, 0, out=o)", "torch.logsumexp(a, 0, out=o)", "torch.linalg.vector_norm(a, 2, 0, out=o)", "torch.add(a, a, out=o)",
    "torch.mul(a, 2, out=o)", "torch.exp(a, out=o)", "torch.gt(a, 0, out=o)", "torch.clamp(a, -1, 1, out=o)", "torch.matmul(a, a.mT, out=o)",
)  # fmt: skip
"""Functions with an `out` that DTensor has rules for."""


def into_views(axes: int) -> Iterator[PublicStep]:
    """Functions that are given a view of a tensor as `out`, which that tensor, too, must hold afterwards."""
    for text in _INTO:
        for layout in layouts_on(axes, (R, S1)):
            listed = placements_code(layout)
            call = f"{text.replace('out=o', 'out=y[0]')}, y in {listed}"
            yield PublicStep(call, f"out_given(x, lambda a, o: {text}, {listed})", ROWS, (), group=text)


def compared(axes: int) -> Iterator[PublicStep]:
    """Comparisons of the whole of two tensors: of equal ones, and of those that differ in one element, which one rank has."""
    for use in ("torch.equal(x, y)", "x.equal(y)", "torch.allclose(x, y)", "x.allclose(y)", "torch.isclose(x, y)", "(x == y).all().item()",
                "bool((x != y).any())", "torch.max(x - y).item() > 0", "x.eq(y)"):  # fmt: skip
        for layout in layouts_on(axes, MOVES):
            listed = placements_code(layout)
            for text, other in (("equal to x", f"changed(x, {listed}, 0) * 0 + x"),
                                ("x but for element 0", f"changed(x, {listed}, 0)"),
                                ("x but for element -1", f"changed(x, {listed}, -1)")):  # fmt: skip
                call = f"{use}, y in {listed} is {text}"
                code = f"(lambda x, y: told({use}))(x, {other})"
                yield PublicStep(call, code, ROWS, (layout,), _not_partial, use, use)
    for place in (0, -1):  # it refuses two layouts
        call = f"torch.testing.assert_close(x, y), y is x but for element {place}"
        yield PublicStep(
            call, f"holds(torch.testing.assert_close, x, {place})", ROWS, (), _not_partial, "close", "close"
        )
    yield PublicStep("a number in x", "contains(x)", ROWS, (), _not_partial, "in", "in")


_REDUCED = (
    "x.norm()", "x.mean()", "x.std()", "x.logsumexp(0)", "x.norm(dim=0)", "x.mean(0)", "x.softmax(-1)", "F.normalize(x, dim=0)",
    "F.layer_norm(x, x.shape[-1:])", "nn.utils.get_total_norm([x])", "torch._foreach_norm([x])[0]",
)  # fmt: skip
"""Functions whose results are finite in float16, although squares or sums that lead to them need not be."""


def halves(axes: int) -> Iterator[PublicStep]:
    """Functions of float16 numbers up to 2,000, whose squares overflow, and up to 60,000, of which two add up to infinity."""
    for most in ("2000.0", "60000.0"):
        for text in _REDUCED:
            code = f"finite_in_half(x, {most}, lambda x: {text})"
            yield PublicStep(f"{text} of float16 numbers up to {most[:-2]}", code, FLOATS, (), _not_partial, text, text)


PYTHON_STEPS: dict[str, Generator] = {
    "torch.Tensor, what it tells": tells,
    "torch.Tensor, numbers": numbers,
    "torch.Tensor, set": assigned,
    "torch.Tensor, in a layer": layers,
    "torch.Tensor, copies": copies,
    "torch.distributed.checkpoint": checkpoints,
    "torch.Tensor, factories": factories,
    "torch.Tensor, gradients": gradients,
    "torch.Tensor, operators": augmented,
    "torch.Tensor, items": items,
    "torch.Tensor, views as out": into_views,
    "torch.Tensor, with plain numbers": with_plain,
    "torch.Tensor, comparisons": compared,
    "torch.Tensor, half precision": halves,
}
