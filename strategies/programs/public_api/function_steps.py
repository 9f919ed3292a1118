"""Uses of the functions of `torch.nn.functional` with each of their flags, forward and backward: one generator for each function.

A generator takes the number of mesh axes and yields steps.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import functional

from strategies.programs.public_api.tensor_steps import (
    FLOATS,
    IMAGES,
    INDICES,
    LOGITS,
    ROWS,
    SEQUENCES,
    Generator,
    PublicStep,
)

Choices = dict[str, tuple[str, ...]]
"""Values of each flag, besides its default."""


@dataclass(frozen=True, slots=True)
class Use:
    """How a function is called: the kind of its tensor `a`, its arguments, the values of its other tensors, and its flags."""

    kind: str
    first: str = "a"
    others: dict[str, str] = field(default_factory=dict)
    flags: Choices = field(default_factory=dict)
    also: str = ""
    """What it writes to, and is compared, too."""


BOOL, TRUE, FALSE = ("False", "True"), ("True",), ("False",)
LOSS: Choices = {"reduction": ("'sum'", "'none'")}
LIKE = "eighths(x.shape, x)"
_CLASSES = "numbered((x.shape[0], *x.shape[2:]), x.shape[1])"
_BY_CLASS = "eighths((x.shape[1],), x).abs() + 1"
_ONES = "a.new_ones(a.shape[1]) * 2"
_OF_C = "eighths((x.shape[1],), x)"
_BINARY = "(eighths(x.shape, x) > 0).to(x.dtype)"
_SIGNS = "(eighths(x.shape, x) >= 0).to(x.dtype) * 2 - 1"


def _pointwise(**named: Choices) -> dict[str, Use]:
    return {name: Use(FLOATS, flags=flags) for name, flags in named.items()}


def _loss(first: str = "a, t", t: str = LIKE, **flags: tuple[str, ...]) -> Use:
    return Use(FLOATS, first, {"t": t}, {**LOSS, **flags})


_POOLED: Choices = {"stride": ("1",), "padding": ("1",), "ceil_mode": TRUE}
_HALF: Choices = {"p": ("0.0",), "training": FALSE, "inplace": TRUE}
_MASK = "eighths((x.shape[1], x.shape[1]), x)"
POINTWISE = {
    **_pointwise(
        relu={"inplace": TRUE},
        leaky_relu={"negative_slope": ("0.3",), "inplace": TRUE},
        elu={"alpha": ("0.5",), "inplace": TRUE},
        celu={"alpha": ("0.5",), "inplace": TRUE},
        selu={"inplace": TRUE},
        relu6={"inplace": TRUE},
        silu={"inplace": TRUE},
        mish={"inplace": TRUE},
        hardtanh={"min_val": ("-0.5",), "max_val": ("0.7",), "inplace": TRUE},
        hardswish={"inplace": TRUE},
        hardsigmoid={"inplace": TRUE},
        hardshrink={"lambd": ("0.1",)},
        softshrink={"lambd": ("0.1",)},
        tanhshrink={},
        softsign={},
        softplus={"beta": ("2.0",), "threshold": ("1.0",)},
        logsigmoid={},
        gelu={"approximate": ("'tanh'",)},
        rrelu={"inplace": TRUE},
        sigmoid={},
        tanh={},
        softmax={"dtype": ("torch.float64",)},
        log_softmax={"dtype": ("torch.float64",)},
        softmin={"dtype": ("torch.float64",)},
        normalize={"p": ("1.0", "3.0", "float('inf')"), "dim": ("0", "-1"), "eps": ("0.5",)},
    ),
    "threshold": Use(FLOATS, "a, 0.2, 5.0", flags={"inplace": TRUE}),
    "glu": Use(IMAGES, "torch.cat([a, a * 2], 1)", flags={"dim": ("1", "2")}),
    "prelu": Use(IMAGES, "a, w", {"w": _OF_C}),
    **{
        name: Use(IMAGES, "a", flags=_HALF | ({"p": ("0.0", "1.0")} if "alpha" not in name else {}))
        for name in ("dropout", "dropout2d", "alpha_dropout", "feature_alpha_dropout")
    },
}
LAYERS = {
    "linear": Use(ROWS, "a, w", {"w": "eighths((4, x.shape[-1]), x)"}, {"bias": ("a.new_ones(4) * 2",)}),
    "bilinear": Use(
        ROWS, "a, b, w", {"b": LIKE, "w": "eighths((3, x.shape[-1], x.shape[-1]), x)"}, {"bias": ("a.new_ones(3)",)}
    ),
    "one_hot": Use(INDICES, flags={"num_classes": ("5", "7")}),
    "embedding": Use(
        INDICES,
        "a, w",
        {"w": "eighths((5, 6), torch.ones(()))"},
        {"padding_idx": ("1", "-2"), "scale_grad_by_freq": TRUE, "max_norm": ("0.5",), "norm_type": ("1.0",)},
        "w.detach()",
    ),
    "layer_norm": Use(
        SEQUENCES,
        "a, a.shape[-1:]",
        {},
        {"weight": ("a.new_ones(a.shape[-1]) * 2",), "bias": ("a.new_ones(a.shape[-1])",), "eps": ("0.5",)},
    ),
    "rms_norm": Use(SEQUENCES, "a, a.shape[-1:]", {}, {"weight": ("a.new_ones(a.shape[-1]) * 2",), "eps": ("0.5",)}),
    "group_norm": Use(
        IMAGES,
        "torch.cat([a, a + 1], 1), 2",
        {},
        {"eps": ("0.5",), "weight": ("a.new_ones(a.shape[1] * 2) * 2",), "bias": ("a.new_ones(a.shape[1] * 2)",)},
    ),
    "instance_norm": Use(
        IMAGES, "a", {}, {"momentum": ("0.5",), "eps": ("0.5",), "weight": (_ONES,), "bias": (_ONES,)}
    ),
    "instance_norm with running statistics": Use(
        IMAGES,
        "a, m.detach(), s.detach()",
        {"m": _OF_C, "s": _BY_CLASS},
        {"use_input_stats": FALSE, "momentum": ("0.5",), "eps": ("0.5",)},
        "m.detach(), s.detach()",
    ),
    "local_response_norm": Use(IMAGES, "a, 3", {}, {"alpha": ("0.5",), "beta": ("0.5",), "k": ("2.0",)}),
    "batch_norm": Use(
        IMAGES,
        "a, m.detach(), s.detach()",
        {"m": _OF_C, "s": _BY_CLASS},
        {"training": TRUE, "momentum": ("0.5",), "eps": ("0.5",), "weight": (_ONES,), "bias": (_ONES,)},
        "m.detach(), s.detach()",
    ),
}
LOSSES = {
    "cross_entropy": Use(
        LOGITS,
        "a, t",
        {"t": _CLASSES},
        {**LOSS, "label_smoothing": ("0.25",), "ignore_index": ("1",), "weight": (_ONES,)},
    ),
    "cross_entropy of probabilities": Use(
        LOGITS, "a, t.softmax(1)", {"t": LIKE}, {**LOSS, "label_smoothing": ("0.25",)}
    ),
    "nll_loss": Use(
        LOGITS, "a.log_softmax(1), t", {"t": _CLASSES}, {**LOSS, "ignore_index": ("1",), "weight": (_ONES,)}
    ),
    "binary_cross_entropy": _loss("a.sigmoid(), t", _BINARY, weight=("a.new_ones(a.shape[-1]) * 2",)),
    "binary_cross_entropy_with_logits": _loss(
        "a, t", _BINARY, weight=("a.new_ones(a.shape[-1]) * 2",), pos_weight=("a.new_ones(a.shape[-1]) * 3",)
    ),
    "mse_loss": _loss(weight=("t.abs()",)),
    "l1_loss": _loss(weight=("t.abs()",)),
    "smooth_l1_loss": _loss(beta=("0.5", "0.0")),
    "huber_loss": _loss(delta=("0.5",), weight=("t.abs()",)),
    "kl_div": _loss("a.log_softmax(-1), t.softmax(-1)", log_target=TRUE, reduction=("'sum'", "'none'", "'batchmean'")),
    "poisson_nll_loss": _loss("a.abs(), t.abs()", log_input=FALSE, full=TRUE, eps=("0.1",)),
    "soft_margin_loss": _loss("a, t.detach()", _SIGNS),
    "gaussian_nll_loss": _loss("a, t, t.abs() + 1", full=TRUE, eps=("0.1",)),
    "hinge_embedding_loss": _loss(t=_SIGNS, margin=("0.5",)),
    "cosine_embedding_loss": Use(
        ROWS,
        "a, b, t",
        {"b": LIKE, "t": "(numbered(x.shape[:1], 2) * 2 - 1).to(x.dtype)"},
        {**LOSS, "margin": ("0.5",)},
    ),
    "margin_ranking_loss": Use(FLOATS, "a, b, t", {"b": LIKE, "t": _SIGNS}, {**LOSS, "margin": ("0.5",)}),
    "triplet_margin_loss": Use(
        ROWS,
        "a, b, t",
        {"b": LIKE, "t": f"{LIKE}.flip(0)"},
        {**LOSS, "p": ("1.0",), "swap": TRUE, "margin": ("0.5",), "eps": ("0.1",)},
    ),
    "multi_margin_loss": Use(
        ROWS,
        "a, t",
        {"t": "numbered(x.shape[:1], x.shape[1])"},
        {**LOSS, "p": ("2",), "margin": ("0.5",), "weight": (_ONES,)},
    ),
    "multilabel_margin_loss": Use(ROWS, "a, t", {"t": "numbered(x.shape, x.shape[1])"}, {**LOSS}),
    "multilabel_soft_margin_loss": Use(ROWS, "a, t", {"t": _BINARY}, {**LOSS, "weight": (_ONES,)}),
    "cosine_similarity": Use(FLOATS, "a, b", {"b": LIKE}, {"dim": ("0", "-1"), "eps": ("0.5",)}),
    "pairwise_distance": Use(FLOATS, "a, b", {"b": LIKE}, {"p": ("1.0", "3.0"), "keepdim": TRUE, "eps": ("0.1",)}),
    "pdist": Use(ROWS, "a * a", {}, {"p": ("1.0", "3.0")}),
}
SPACES = {
    "pad": Use(IMAGES, "a, (1, 0, 0, 1)", {}, {"value": ("2.0",), "mode": ("'reflect'", "'replicate'", "'circular'", "'constant'")}),
    "interpolate": Use(IMAGES, "a, None, 2.0", {}, {"recompute_scale_factor": TRUE, "mode": ("'bilinear'", "'bicubic'", "'area'", "'nearest-exact'")}),
    "upsample": Use(IMAGES, "a, None, 2", {}, {"mode": ("'bilinear'",)}),
    "grid_sample": Use(IMAGES, "a, g", {"g": "eighths((x.shape[0], 2, 3, 2), x)"},
                       {"mode": ("'nearest'", "'bicubic'"), "padding_mode": ("'border'", "'reflection'"), "align_corners": BOOL}),
    "affine_grid": Use(IMAGES, "t, a.shape", {"t": "eighths((x.shape[0], 2, 3), x)"}, {"align_corners": BOOL}),
    "conv1d": Use(SEQUENCES, "a, w", {"w": "eighths((4, x.shape[1], 3), x)"},
                  {"padding": ("'same'", "1"), "stride": ("2",), "dilation": ("2",), "bias": ("a.new_ones(4)",)}),
    "conv2d": Use(IMAGES, "a, w", {"w": "eighths((4, x.shape[1], 1, 2), x)"}, {"padding": ("1", "(0, 1)"), "stride": ("2",), "bias": ("a.new_ones(4)",)}),
    "conv_transpose2d": Use(IMAGES, "a, w", {"w": "eighths((x.shape[1], 4, 1, 2), x)"},
                            {"padding": ("(0, 1)",), "stride": ("2",), "output_padding": ("(0, 0)",), "bias": ("a.new_ones(4)",)}),
    "max_pool2d": Use(IMAGES, "a, 2", {}, _POOLED | {"return_indices": TRUE}), "max_pool1d": Use(SEQUENCES, "a, 2", {}, _POOLED),
    "avg_pool2d": Use(IMAGES, "a, 2", {}, _POOLED | {"count_include_pad": FALSE, "divisor_override": ("3",)}),
    "avg_pool1d": Use(SEQUENCES, "a, 2", {}, _POOLED | {"count_include_pad": FALSE}),
    "lp_pool2d": Use(IMAGES, "a, 2.0, 2", {}, {"stride": ("1",), "ceil_mode": TRUE}),
    "adaptive_avg_pool2d": Use(IMAGES, "a, 2"), "adaptive_max_pool2d": Use(IMAGES, "a, (1, 2)", {}, {"return_indices": TRUE}),
    "unfold": Use(IMAGES, "a, 2", {}, {"stride": ("2",), "padding": ("1",), "dilation": ("1",)}),
    "fold": Use(IMAGES, "F.unfold(a, 1), a.shape[2:], 1", {}, {"stride": ("1",), "padding": ("0",), "dilation": ("2",)}), "pixel_shuffle": Use(IMAGES, "torch.cat([a] * 4, 1), 2"),
    "pixel_unshuffle": Use(IMAGES, "torch.cat([a, a * 2], -1)[..., :2, :2], 2"), "channel_shuffle": Use(IMAGES, "torch.cat([a, a * 2], 1), 2"),
}  # fmt: skip
FAMILIES = {"pointwise": POINTWISE, "layers": LAYERS, "losses": LOSSES, "of space": SPACES}
"""The functions by name, and by what they are of."""
LEFT_OUT = {
    "out": "without a gradient", "size_average": "deprecated", "reduce": "deprecated", "_stacklevel": "internal",
    "running_mean": "of batch_norm", "running_var": "of batch_norm", "use_input_stats": "of batch_norm", "dim": "always given",
    "sparse": "DTensor has no sparse gradients", "training": "random", "upper": "random", "lower": "random",
    "align_corners": "of few modes alone", "antialias": "of few modes alone", "size": "given as a factor", "scale_factor": "given",
}  # fmt: skip
"""Flags of functions that no program toggles, and the reason."""
FUNCTIONS_LEFT_OUT = {
    "scaled_dot_product_attention": "in torch 2.13 DTensor searches for its layouts beyond any time limit; its ops are validated by themselves",
    "multi_head_attention_forward": "of the same search", "embedding_bag": "it makes plain offsets: DTensor has no rule for it",
    "gumbel_softmax": "random", "ctc_loss": "DTensor has no rule for it", "grouped_mm": "its op is validated by itself",
    "scaled_mm": "float8", "scaled_grouped_mm": "float8", "linear_cross_entropy": "it takes no DTensor in torch 2.13",
    "triplet_margin_with_distance_loss": "that of triplet_margin_loss with a function", "boolean_dispatch": "internal", "assert_int_or_pair": "internal",
    "upsample_nearest": "upsample", "upsample_bilinear": "upsample",
}  # fmt: skip
"""Public functions without programs, and the reason; those of one and of three dims stand beside those of two, and pools with indices beside others."""


def combinations(flags: Choices) -> list[dict[str, str]]:
    """Default flags; each value of each flag alone; the last values of all flags, and of each but one."""
    last = {name: values[-1] for name, values in flags.items()}
    alone = [{name: value} for name, values in flags.items() for value in values]
    rest = [{n: v for n, v in last.items() if n != name} for name in flags] if len(flags) > 2 else []
    return [{}, *alone, *([last] if len(flags) > 1 else []), *rest]


def function_names() -> list[str]:
    """The public functions of the installed torch: not those in place, of other numbers of dims, or with the indices of a pool."""
    homes = (None, functional.__name__, "torch._C._nn", "torch._jit_internal")
    return [
        name
        for name, value in vars(functional).items()
        if callable(value)
        and not isinstance(value, type)
        and getattr(value, "__module__", None) in homes
        and not re.search("^_|_$|_with_indices$|1d$|3d$|fractional|unpool", name)
    ]


def flag_names(name: str) -> list[str]:
    """The parameters of a function that have defaults; none where Python does not know its signature."""
    try:
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
    except ValueError:  # it is written in C
        return []
    return [p.name for p in parameters if p.default is not p.empty]


def family(name: str, axes: int, kind: str = "flagged") -> Iterator[PublicStep]:
    """Uses of the functions of a family that this torch has, by what runs them: "flagged", "inferred" or "across".

    The key of a function may say what it is given: "cross_entropy of probabilities".
    """
    for key, use in FAMILIES[name].items():
        one = key.partition(" ")[0]
        if kind == "across" and not use.others:  # one tensor has one mesh
            continue
        if hasattr(functional, one):
            yield from function(key, use, kind)


def function(key: str, use: Use, kind: str = "flagged") -> Iterator[PublicStep]:
    """Uses of a function: each with flags, and one of its other tensors in turn cut along one dim."""
    name = key.partition(" ")[0]
    needed = {"dim": "-1"} if name in ("softmax", "log_softmax", "softmin") else {}
    known = flag_names(name)
    for number, one in enumerate(
        combinations({n: v for n, v in use.flags.items() if kind != "across" or n == "reduction"})
    ):
        given: dict[str, Any] = {**needed, **{n: v for n, v in one.items() if not known or n in known}}
        if "dropout" in name and _draws(name, given):
            continue
        text = f"F.{name}({', '.join([use.first, *(f'{n}={v}' for n, v in given.items())])})"
        result = f"({text}, {use.also})" if use.also else text
        for cuts in _cuts(len(use.others)) if kind != "across" else [(0,) * len(use.others)]:
            words = "".join(
                f", {n} cut along {cut}" for n, cut in zip(use.others, cuts, strict=True) if cut is not None
            )
            others = "".join(f"{value}, " for value in use.others.values())
            code = f"{kind}(x, lambda {', '.join(['a', *use.others])}: {result}, ({others}), {cuts}, {number})"
            where = " under torch.inference_mode()" if kind == "inferred" else ""
            yield PublicStep(f"{text}{where}{words}", code, use.kind, group=key, aspect=key)


def _draws(name: str, given: Mapping[str, str]) -> bool:
    """Whether a dropout with these flags draws numbers: DTensor promises no stream of them on a mesh of CPUs."""
    training = inspect.signature(getattr(functional, name)).parameters["training"].default
    return given.get("training", str(training)) == "True" and "p" not in given


def _cuts(tensors: int) -> list[tuple[int | None, ...]]:
    """Layouts of the other tensors: none cut; each in turn cut along its first or its last dim, or its dim 1; all along the first."""
    whole = (None,) * tensors
    one: list[tuple[int | None, ...]] = [
        (*whole[:i], dim, *whole[i + 1 :]) for i in range(tensors) for dim in (0, 1, -1)
    ]
    return [whole, *one, *([(0,) * tensors] if tensors > 1 else [])]


_COMPOSED = (
    "a @ b.mT", "torch.einsum('ij,kj->ik', a, b)", "torch.tensordot(a, b, 2)", "torch.inner(a, b)", "torch.outer(a[0], b[0])", "torch.kron(a, b)",
    "torch.linalg.multi_dot([a, b.mT, a])", "torch.cov(a)", "torch.corrcoef(a)", "torch.trapezoid(a)", "torch.cumulative_trapezoid(a)", "torch.diff(a)",
    "torch.diff(a, dim=0)", "torch.gradient(a)[0]", "torch.hstack([a, b])", "torch.vstack([a, b])", "torch.dstack([a, b])", "torch.column_stack([a, b])",
    "torch.tensor_split(a, 2)[0]", "torch.tensor_split(a, [1], 1)[1]", "torch.movedim(a, 0, 1)", "a.flatten()", "a.reshape(-1, 1)", "torch.ravel(a.mT)",
    "torch.atleast_3d(a)", "torch.broadcast_tensors(a[:1], b)[0]", "a.unflatten(0, (-1, 1))", "torch.take_along_dim(a, b.argsort(0), 0)", "torch.msort(a)",
    "torch.argsort(a)", "torch.quantile(a, 0.5)", "torch.quantile(a, 0.25, dim=0)", "torch.nanmean(a, 0)", "torch.std_mean(a, 0)", "torch.var_mean(a)",
    "torch.norm(a)", "torch.norm(a, 1, dim=0)", "torch.linalg.norm(a)", "torch.linalg.norm(a, 1)", "torch.linalg.matrix_norm(a)", "torch.linalg.vander(a[0])",
    "torch.isclose(a, b)", "torch.isfinite(a)", "torch.float_power(a, 2)", "torch.cartesian_prod(a[0], b[0])",
    "torch.meshgrid(a[0], b[:, 0], indexing='ij')[0]", "torch.flipud(a)", "torch.fliplr(a)", "torch.rot90(a)",
    "a.where(a > 0, b)", "torch.addr(a, b[:, 0], b[0])", "torch.addmv(a[:, 0], a, b[0])", "torch.square(a)", "torch.clip(a, b, b + 1)", "torch.diag(a)",
    "torch.diagflat(a[0])", "torch.trace(a)", "a.diagonal()", "a.index_add(0, a.argmax(0), b[: a.shape[1]])", "a.repeat(2, 1)", "a.tile((2, 2))",
    "a.repeat_interleave(2, 0)", "a.type_as(b)", "torch.lerp(a, b, 0.25)", "torch.logaddexp(a, b)", "torch.hypot(a, b)", "torch.atan2(a, b + 2)",
    "torch.addcdiv(a, b, b.abs() + 1)", "torch.cumsum(a, 0) / b.abs().sum()", "(a - a.mean(0)) / (a.std(0) + 1)",
    "a.softmax(0) * b", "torch.dist(a, b)", "torch.linalg.vecdot(a, b)", "torch.complex(a, b).abs()", "torch.view_as_real(torch.complex(a, b))", "a.aminmax()",
)  # fmt: skip
"""Functions of a matrix `a` and another one `b` of its shape, most of them made of others."""


def expressions(kind: str, axes: int) -> Iterator[PublicStep]:
    for number, text in enumerate(_COMPOSED):
        for cut in (None, 0, -1) if "b" in re.findall(r"\w+", text) else (None,):
            words = "" if cut is None else f", b cut along {cut}"
            where = " under torch.inference_mode()" if kind == "inferred" else " and its gradient"
            code = f"{kind}(x, lambda a, b: {text}, ({LIKE},), ({cut},), {number})"
            yield PublicStep(f"{text}{where}{words}", code, ROWS, group=text, aspect=text)


FUNCTION_STEPS: dict[str, Generator] = {
    **{f"torch.nn.functional, {name}": functools.partial(family, name) for name in FAMILIES},
    "torch.Tensor, functions": functools.partial(expressions, "flagged"),
    "torch.inference_mode, of tensors": functools.partial(expressions, "inferred"),
    **{f"torch.inference_mode, {name}": functools.partial(family, name, kind="inferred") for name in FAMILIES},
}
