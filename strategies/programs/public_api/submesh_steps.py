"""Uses of DTensors on a submesh, where each row of ranks holds other values; and of what modules of the packages offer besides.

A generator takes the number of mesh axes and yields steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.codec import placement_code
from strategies.programs.public_api.function_steps import FAMILIES, family
from strategies.programs.public_api.tensor_steps import (
    EVEN,
    FLOATS,
    IMAGES,
    INDICES,
    LOGITS,
    ROWS,
    S0,
    S1,
    SUM,
    Generator,
    PublicStep,
    R,
)

_CUTS: tuple[Placement, ...] = (S0, S1, R, SUM)
_CUTS_OF: dict[str, tuple[Placement, ...]] = {LOGITS: (S1,), INDICES: (R, S0), IMAGES: (Shard(3), S0)}
_GRADIENT = "pulled_back(({}), [v])"
_REDUCED = (
    "v.sum()", "v.sum(0)", "v.mean(-1)", "v.max()", "v.amin(0)", "v.min(0)[0]", "v.prod(0)", "v.argmax()", "v.argmin(0)",
    "v.argmax(-1)", "v.std()", "v.var(0)", "torch.linalg.vector_norm(v)", "torch.linalg.vector_norm(v, float('inf'))",
    "torch.linalg.vector_norm(v, 1, 0)", "v.logsumexp(0)", "(v > 10).all()", "(v > 10).any(0)", "v.amax(-1)", "v.count_nonzero()",
    "torch.nn.utils.get_total_norm([v])",
)  # fmt: skip
_PICKED = (
    "torch.tensor(torch.equal(v, v + 0))", "torch.tensor(torch.equal(v, v * (v > 10)))", "v.sort(0)[0]", "v.topk(1, 0)[0]",
    "v.median(0)[0]", "v.cumsum(0)", "v.cumsum(-1)", "v.cummax(0)[0]", "v.flip(0)", "v.roll(1, 0)", "v.index_select(0, v.argmin(0).reshape(-1))",
    "v.scatter_add(0, (v * 0).long(), v)", "v.gather(0, (v * 0).long())",
)  # fmt: skip
_COMPUTED = (
    "v.softmax(0)", "v.softmax(-1)", "v.log_softmax(-1)", "F.layer_norm(v, v.shape[-1:])", "v @ v.mT", "F.normalize(v, dim=0)",
    "v * v.sum(0)", "F.cross_entropy(v.reshape(-1, v.shape[-1]), (v.reshape(-1, v.shape[-1]) > 10).to(v.dtype))", "v.tril()",
    "torch.cat([v, v])", "v.unfold(0, 1, 1)",
)  # fmt: skip
_REGISTERED = """registered(v, 'scaled', '(Tensor x, Tensor y) -> Tensor', lambda x, y: x * 2 + y,
lambda x, y: [([Replicate()], [Replicate()] * 2)])""".replace("\n", " ")
_MOVED = (
    "[v.redistribute(placements=[Replicate()]) if hasattr(v, 'placements') else v]", "[whole(v)]",
    "[v.redistribute(placements=[Shard(0)]) if hasattr(v, 'placements') else v]",
    "[v.redistribute(placements=[Shard(1)], async_op=True) if hasattr(v, 'placements') else v]",
    "row_source(v, Shard(0))", "row_source(v, Replicate())", "from_local(v, coming=[Shard(0)])", "to_local(v)",
    "full_tensor(v, grad_placements=[Partial('sum')])", _REGISTERED, "created(v, 'full', [Shard(0)], 2.0)",
    "mapped(v, lambda a: a.sum(0), lambda v: [], in_placements=([Shard(0)],), out_placements=[Partial('sum')])",
)  # fmt: skip
_TRAINED = (
    "row_clipped(v)", "row_clipped(v, norm_type=float('inf'), foreach=False)", "row_clipped(v, norm_type=1.0)", "row_scaled(v)",
    "row_optimized(v, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, foreach=True))", "row_optimized(v, lambda p: torch.optim.AdamW(p, lr=0.1))",
    "row_trained(v, lambda n: nn.Sequential(nn.Linear(n, 12), nn.ReLU(), nn.Linear(12, 5)), {'0': parallel.ColwiseParallel(), '2': parallel.RowwiseParallel()})",
    "row_trained(v, lambda n: nn.Linear(n, 6), parallel.ColwiseParallel(output_layouts=Replicate()))",
)  # fmt: skip
_FURTHER = {
    LOGITS: ("loss_in_parallel(v, [Shard(1)], None, reduction='sum')", "loss_in_parallel(v, [Shard(1)], None)"),
    INDICES: ("pulled_back(F.embedding(v, w := leaf_of(on_mesh(eighths((5, 6), torch.ones(())), v, [Shard(0)]))), [w])",
              "[F.one_hot(v, 5)]",),
    IMAGES: (*(_GRADIENT.format(f"F.conv2d(v, on_mesh(eighths((2, v.shape[1], 1, {k}), v), v, [Replicate()]), padding=(0, {k // 2}))")
               for k in (1, 3)), _GRADIENT.format("F.max_pool2d(v, 2)")),
}  # fmt: skip


def rows(family: str, axes: int) -> Iterator[PublicStep]:
    """Steps on meshes of two axes alone; the submesh is of either axis."""
    made = {
        "reductions": [(text, EVEN, f"[{text}]") for text in _REDUCED],
        "elements": [(text, EVEN, f"[{text}]") for text in _PICKED],
        "gradients": [(text, EVEN, f"(lambda v: torch.enable_grad()(lambda: {_GRADIENT.format(text)})())(leaf_of(v))")
                      for text in _COMPUTED],
        "moves": [(text, EVEN, text) for text in _MOVED],
        "training": [(text, EVEN, text) for text in _TRAINED],
        "kinds": [(text, kind, f"(lambda v: torch.enable_grad()(lambda: {text})())(leaf_of(v))")
                  for kind, texts in _FURTHER.items() for text in texts],
    }[family]  # fmt: skip
    for text, kind, use in made if axes == 2 else ():
        for axis in range(axes):
            cuts = _CUTS_OF.get(kind, _CUTS if family in ("reductions", "elements", "moves") else _CUTS[:3])
            for cut in cuts:
                call = f"rows along axis {axis}, {placement_code(cut)}: {text}"
                code = f"on_rows(x, {axis}, {placement_code(cut)}, lambda v: {use})"
                yield PublicStep(call, code, kind, ((cut, R),), group=text, aspect=text)


def parts(axes: int) -> Iterator[PublicStep]:
    """Steps on a mesh of all ranks but one."""
    for text in (*_REDUCED, *_PICKED, *_COMPUTED):
        yield from _on_ranks("all ranks but the last", "every[:-1]", text, f"[{text}]")


def turned(axes: int) -> Iterator[PublicStep]:
    """Steps on a mesh of all ranks, the last one first: a process group has its ranks in the order of their numbers all the same."""
    for text in (*_REDUCED, *_PICKED, *_COMPUTED):
        yield from _in_another_order(text, f"[{text}]")
    for text in _MOVED:
        yield from _in_another_order(text, text)


def _in_another_order(text: str, use: str) -> Iterator[PublicStep]:
    """Steps without an aspect: what goes wrong in one of them does so by the order, whatever the function."""
    for step in _on_ranks("all ranks, the last one first", "every.flip(0)", text, use):
        yield replace(step, aspect="")


def _on_ranks(words: str, chosen: str, text: str, use: str) -> Iterator[PublicStep]:
    for cut in (S0, S1, R):
        code = f"on_ranks(x, lambda every: {chosen}, {placement_code(cut)}, lambda v: {use})"
        yield PublicStep(f"{words}, {placement_code(cut)}: {text}", code, EVEN, group=text, aspect=text)


_OF_TWO = (
    "a + b", "a.add_(b)", "a.copy_(b)", "a.mul(b)", "torch.where(a > 0, a, b)", "torch.lerp(a, b, 0.5)", "a @ b.mT", "torch.cat([a, b])",
    "torch.stack([a, b])", "torch._foreach_add([a], [b])", "torch._foreach_mul([a], [b])", "torch.addcmul(a, b, b)", "torch.dot(a[0], b[0])",
    "torch.maximum(a, b)", "a.gather(0, (b * 0).long())", "a.scatter_add(0, (b * 0).long(), b)", "a.masked_fill(b > 0, 0)", "torch.outer(a[0], b[0])",
    "torch.equal(a, b) * a", "torch.allclose(a, b) * a", "torch.cdist(a, b)", "torch.einsum('ij,ij->j', a, b)", "torch.kron(a, b)", "a[b[:, 0] > 0]",
)  # fmt: skip

_OF_PARAMETERS = (
    "nn.utils.clip_grad_norm_(p, 1.0, foreach=False)", "nn.utils.clip_grad_norm_(p, 1.0, foreach=True)",
    "nn.utils.clip_grad_value_(p, 0.5, foreach=True)", "nn.utils.get_total_norm([q.grad for q in p])",
    "nn.utils.parameters_to_vector(p)", "torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=True).step()",
    "torch.optim.AdamW(p, lr=0.5, foreach=True).step()", "torch.optim.AdamW(p, lr=0.5, fused=True).step()",
)  # fmt: skip


def crossed(axes: int) -> Iterator[PublicStep]:
    """Functions of tensors on two submeshes that cross: torch may refuse them, and may not mix up their pieces."""
    steps = [step for name in FAMILIES for step in family(name, axes, "across")]
    uses = [(text, text) for text in _OF_TWO]
    uses += [(f"{text}, p = a, b", f"of_parameters([a, b], lambda p: {text})") for text in _OF_PARAMETERS]
    for text, use in uses:
        for cut in (0, 1, None):
            code = f"across(x, lambda a, b: {use}, (eighths(x.shape, x),), ({cut},))"
            steps.append(PublicStep(f"{text}, b cut along {cut}", code, ROWS, group=text, aspect=text))
    for step in steps if axes == 2 else ():
        yield replace(step, call=f"{step.call}, on submeshes that cross")


_RESHARDED = ("nn.Linear(n, 8)", "nn.Sequential(nn.Linear(n, 12), nn.Tanh(), nn.Linear(12, 5))", "nn.LayerNorm(n)")


def reshards(axes: int) -> Iterator[PublicStep]:
    for module in _RESHARDED:
        for dim in (None, 0, 1):
            yield PublicStep(
                f"input_reshard({module}, mesh, {dim})",
                f"resharded(x, lambda n: {module}, {dim})",
                ROWS,
                group=str(dim),
            )
            if module.startswith("nn.Seq"):
                plan = "{'0': parallel.ColwiseParallel(), '2': parallel.RowwiseParallel()}"
                call = f"input_reshard(parallelize_module({module}, mesh, {plan}), mesh, {dim})"
                yield PublicStep(
                    call, f"resharded(x, lambda n: {module}, {dim}, {plan})", ROWS, group=f"{dim} of a plan"
                )


def watched(axes: int) -> Iterator[PublicStep]:
    """Functions within `CommDebugMode`, which only counts."""
    for text in ("a.sum(0)", "a.softmax(-1)", "a * 2", "a @ a.mT"):
        call = f"{text} within CommDebugMode()"
        yield PublicStep(call, f"within(x, dtensor.debug.CommDebugMode, 1, lambda a: {text})", FLOATS, group=text)


CROSSED = "device_mesh.init_device_mesh, rows that cross"
"""The name of uses that torch may refuse."""
_ROWS = ("reductions", "elements", "gradients", "moves", "training", "kinds")
SUBMESH_STEPS: dict[str, Generator] = {
    **{f"device_mesh.init_device_mesh, rows: {name}": functools.partial(rows, name) for name in _ROWS},
    CROSSED: crossed,
    "device_mesh.DeviceMesh, of some ranks": parts,
    "device_mesh.DeviceMesh, of ranks in another order": turned,
    "parallel.input_reshard.input_reshard": reshards,
    "debug.CommDebugMode": watched,
}
