"""Uses of torch's optimizers, and of what clips and unscales gradients, on DTensor parameters of mixed layouts.

A generator takes the number of mesh axes and yields steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.layout import Layout
from strategies.model.codec import placements_code
from strategies.programs.public_api.tensor_steps import (
    MOVES,
    ROWS,
    S0,
    S1,
    Generator,
    PublicStep,
    R,
    call_text,
    layouts_on,
)


def _laid_out(x: Tensor, layout: Layout) -> bool:
    """Whether a parameter may have this layout."""
    return not any(isinstance(p, Partial) for p in layout)


_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "Adadelta": ("lr=0.5", "lr=0.5, weight_decay=0.1"), "Adagrad": ("lr=0.5", "lr=0.5, lr_decay=0.1"),
    "Adam": ("lr=0.1", "lr=0.1, amsgrad=True, weight_decay=0.1"), "AdamW": ("lr=0.1", "lr=0.1, amsgrad=True"),
    "Adamax": ("lr=0.1", "lr=0.1, weight_decay=0.1"), "ASGD": ("lr=0.1, t0=1", "lr=0.1, weight_decay=0.1"),
    "NAdam": ("lr=0.1", "lr=0.1, weight_decay=0.1, decoupled_weight_decay=True"), "RAdam": ("lr=0.1", "lr=0.1, weight_decay=0.1"),
    "RMSprop": ("lr=0.1", "lr=0.1, centered=True, momentum=0.5"), "Rprop": ("lr=0.1", "lr=0.1, etas=(0.25, 2.0)"),
    "SGD": ("lr=0.5, momentum=0.5", "lr=0.5, momentum=0.5, nesterov=True, weight_decay=0.1"), "Adafactor": ("lr=0.1", "lr=0.1, d=1.5"),
}  # fmt: skip
"""Options of each optimizer."""


def optimizer(name: str, axes: int) -> Iterator[PublicStep]:
    """Two steps of an optimizer on parameters of mixed layouts."""
    for layouts in _mixed(axes):
        for options in _OPTIMIZERS[name]:
            for foreach in (False, True):
                for maximize in (None, True):
                    made = call_text(f"torch.optim.{name}", "p", options, foreach=foreach, maximize=maximize)
                    call = f"{made.replace('(p, ', '(')} of parameters in {_listed(layouts)}"
                    code = call_text("optimized", "x", _listed(layouts), f"lambda p: {made}")
                    yield PublicStep(call, code, ROWS, layouts, _laid_out, str(foreach))


def _mixed(axes: int) -> list[tuple[Layout, ...]]:
    """Layouts of the first parameter, and of the others in turn."""
    mixed = [one for one in layouts_on(axes, (R, S0)) if one.count(S0) < 2]
    return [(one, other) for one in layouts_on(axes, MOVES) if one.count(S0) < 2 > one.count(S1) for other in mixed]


def _listed(layouts: Sequence[Layout]) -> str:
    return ", ".join(map(placements_code, layouts))


_CLIPS = {
    **{f"clip_grad_norm_(p, 1.0, norm_type={kind})": kind for kind in ("1.0", "2.0", "3.0", "float('inf')")},
    "clip_grad_value_(p, 0.5)": "value",
}


def clips(which: str, axes: int) -> Iterator[PublicStep]:
    for layouts in _mixed(axes):
        for text, kind in _CLIPS.items():
            for foreach in (False, True):
                if text.startswith(which):
                    made = f"nn.utils.{text[:-1]}, foreach={foreach})"
                    code = f"clipped(x, {_listed(layouts)}, lambda p: {made})"
                    call = f"{made.removeprefix('nn.utils.')} of gradients in {_listed(layouts)}"
                    yield PublicStep(call, code, ROWS, layouts, _laid_out, f"{kind} {foreach}")


def scalers(axes: int) -> Iterator[PublicStep]:
    for layouts in _mixed(axes):
        for value in ("1.0", "float('inf')", "float('nan')"):
            for number in (0, 1, 2):
                for place in (0, -1):
                    code = f"unscaled(x, {_listed(layouts)}, {value}, {number}, {place})"
                    where = f"element {place} of gradient {number} times {value}, in {_listed(layouts)}"
                    yield PublicStep(f"torch.amp.GradScaler: {where}", code, ROWS, layouts, _laid_out, value)


def scaled_parts(axes: int) -> Iterator[PublicStep]:
    call = "torch.amp.GradScaler: a gradient that is a pending sum of finite parts, which is infinite"
    yield PublicStep(call, "unscaled_parts(x)", ROWS)


_AUTOCAST = (
    "a @ w", "F.linear(a, w.mT)", "torch.addmm(a.new_ones(4), a, w)", "torch.einsum('ij,jk->ki', a, w)", "(a @ w).sum()", "(a @ w).mean(0)",
    "(a @ w).relu() @ w.mT", "torch.cat([a, a @ w], -1)", "(a @ w) + w[:1]", "(a @ w).softmax(-1)", "(a @ w).exp()", "F.layer_norm(a @ w, (4,))",
    "F.mse_loss(a @ w, (a @ w).detach() + 1)", "F.cross_entropy(a @ w, (a @ w).detach().argmax(1))", "a.sum(0) @ w", "(a @ w).norm()", "(a @ w).cumsum(0)",
    "(a @ w).float() * 2", "F.linear(F.linear(a, w.mT), w)", "F.conv1d(a[None], w.mT[..., None])", "torch.stack([a @ w, w[:1].expand(a.shape[0], 4)])",
)  # fmt: skip


def autocasts(axes: int) -> Iterator[PublicStep]:
    """Functions of float32 numbers that torch computes in bfloat16, or keeps in float32."""
    for text in _AUTOCAST:
        for layout in layouts_on(axes, MOVES):
            listed = placements_code(layout)
            call = f"torch.autocast to bfloat16: {text}, w in {listed}"
            yield PublicStep(call, f"autocast(x, lambda a, w: {text}, {listed})", ROWS, group=text, aspect=text)


OPTIMIZER_STEPS: dict[str, Generator] = {
    **{f"optim.{name}": functools.partial(optimizer, name) for name in _OPTIMIZERS},
    "utils.clip_grad_norm_": functools.partial(clips, "clip_grad_norm_"),
    "utils.clip_grad_value_": functools.partial(clips, "clip_grad_value_"),
    "amp.autocast": autocasts,
    "amp.GradScaler": scalers,
    "amp.GradScaler, a pending sum": scaled_parts,
}
