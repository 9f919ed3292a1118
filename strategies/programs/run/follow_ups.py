"""Follow-up steps of an op in a program, by name: cheap steps that reveal a wrong placement of the result.

Each is an expression of one result `x` of the op, the same for a plain tensor and for a DTensor, and the same in the
scripts that reproduce a finding; or one of the steps around the whole call: "grad", "grad S(0)", "grad of 1", "grad of
input 1 alone", "base", "only 1", "again(x0, 2)".  A chain is several steps, of which only the last may be around the
whole: "exp | S(0) | grad".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from localtensor.layout import StridedShard
from strategies.model.call_signature import numeric_arguments, parse_prior_call
from strategies.model.codec import placements_code
from strategies.model.oracle import mutates
from strategies.model.rule import PUBLIC, Call, flat_results, overload, read_layout, split_prior_call
from strategies.programs.public_api import table as public_api
from strategies.programs.run import law_steps, step_functions
from strategies.programs.run.step_functions import (
    gradients,
    laid,
    through_local,
    trained,
    whole,
    with_base_written,
    written,
)
from strategies.torch_api.decompositions import has_autograd_kernel

VIEWS = (
    "x[1:]", "x[-1]", "x.narrow(-1, 0, 1)", "x.transpose(0, -1)", "x.view(-1)", "x.unsqueeze(0)", "x.chunk(2)[0]",
    "x.split(1, -1)[0]", "x.unbind(0)[0]", "x[::2]", "x[..., -1]", "x.diagonal(0, 0, -1)",
)  # fmt: skip
"""Views `v` of a base `x`."""
WRITES = ("v.mul_(-2)", "v.add_(1)", "v.copy_(v * 3)", "v.fill_(2)")
"""Writes to a view `v`."""
BASE_WRITTEN = "x.mul_(-2)"
"""The write to the base of a view."""
VIEW_STEPS = {  # torch 2.13: a view of a sharded dim is a copy, so most of these are wrong for a right op
    **{f"v = {v}, {w}": f"written(x, lambda x: {v}, lambda v: {w})" for v in VIEWS for w in WRITES},
    **{f"v = {v}, {BASE_WRITTEN}": f"with_base_written(x, lambda x: {v})" for v in VIEWS},
}
"""Steps that take a view, write to it or to its base, and read both or the view: their names are what happens, in order."""
STRIDES = "strides"
"""The step that compares the strides of a DTensor, which are part of its spec, with those of its piece."""
RESULT_STEPS = {
    "cast float32": "x.to(torch.float32)", "cast float64": "x.to(torch.float64)", "cast int64": "x.to(torch.int64)",
    "cast bool": "x.to(torch.bool)",
    "sum": "x.sum()", "sum 0": "x.sum(0)", "sum -1": "x.sum(-1)",
    "times 2": "x * 2", "times -1": "x * -1", "plus 1": "x + 1", "squared": "x * x", "absolute": "x.abs()",
    "transpose": "x.transpose(0, -1)", "slice": "x[1:]", "select": "x[-1]", "narrow": "x.narrow(-1, 0, 1)",
    "view": "x.reshape(-1)", "unsqueeze": "x.unsqueeze(0)", "full twice": "[whole(x), whole(x)]",
    "greater 0": "x > 0", "exp": "x.exp()", "mean": "x.mean()", "max": "x.max()", "halved": "x / 2", "clamp": "x.clamp(-1, 1)",
    "softmax": "x.softmax(-1)", "cat": "torch.cat([x, x])", "where": "torch.where(x > 0, x, x * 2)",
    "chunk": "x.chunk(2)[0]", "copied": "x.detach().clone()", "own transpose": "x @ x.transpose(-2, -1)",
    "added in place": "x.clone().add_(1)",
    "R": "laid(x, Replicate())", "S(0)": "laid(x, Shard(0))", "S(1)": "laid(x, Shard(1))",
    "column": "x.split(1, -1)[0]", "row": "x.unbind(0)[0]", "mean -1": "x.mean(-1)", "amax": "x.amax(0)",
    "less its mean": "x - x.mean()",
    "local": "through_local(x)",
    "unflatten": "x.unflatten(-1, (-1, 2))", "squeeze": "x.squeeze()", "expand": "x.unsqueeze(0).expand(3, *x.shape)",
    "repeat": "torch.stack([x] * 2).flatten(0, 1)", "flip": "x.flip(0)", "roll": "x.roll(1, -1)", "cumsum": "x.cumsum(-1)",
    "sort": "x.sort(-1)", "argmax": "x.argmax(-1)", "logsumexp": "x.logsumexp(-1)", "norm": "torch.linalg.vector_norm(x)",
    "std": "x.std(-1, correction=0)", "tanh": "x.tanh()", "root": "x.abs().sqrt()", "masked": "x.masked_fill(x > 0, 0)", "lower": "x.tril()",
    "layer norm": "torch.nn.functional.layer_norm(x, x.shape[-1:])", "times its sum": "x * x.sum(-1, keepdim=True)",
    "swapped": "x.transpose(0, 1)", "outer": "x.reshape(-1, 1) * x.reshape(1, -1)", "concatenated": "torch.cat([x, x * 2], -1)",
    STRIDES: "strides_agree(x, lambda x: x)",
    "flatten": "x.flatten(0, 1)", "flatten last": "x.flatten(-2, -1)", "two rows": "x.reshape(2, -1)",
    "two columns": "x.reshape(-1, 2)", "unflatten 0": "x.unflatten(0, (2, -1))", "unflatten last": "x.unflatten(-1, (2, -1))",
}  # fmt: skip
RESHAPES = (
    "view", "flatten", "flatten last", "two rows", "two columns", "unflatten", "unflatten 0", "unflatten last", "swapped", "transpose",
)  # fmt: skip
"""The steps that only give the elements another shape or order of dims."""
CHAIN_SIGN = " | "
"""What separates the steps of a chain in its name."""
GRADS = {
    "grad": "gradients(op, x, Replicate(), writes)", "grad S(0)": "gradients(op, x, Shard(0), writes)",
    "grad of ones": "gradients(op, x, None, writes)",
    "grad twice": "gradients(op, x, Replicate(), writes, twice=True)",
    "sgd": "trained(op, x, writes, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True))",
    "adam": "trained(op, x, writes, lambda p: torch.optim.AdamW(p, lr=0.1, eps=1.0))",
}  # fmt: skip
"""Steps around the op and the steps before: expressions of the function `op`, its tensors `x`, and whether it `writes`."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """One step after an op: the expression `text` of its result `x`."""

    name: str
    text: str

    def apply(self, outs: Sequence[Any]) -> list[Any]:
        """The results of the step on each result that is a tensor."""
        code = _compiled(self.text)
        scope = {
            **public_api.scope(), "torch": torch, "whole": whole, "laid": laid, "Replicate": Replicate, "Shard": Shard,
            "_StridedShard": StridedShard, "written": written, "with_base_written": with_base_written,
            "through_local": through_local,
        }  # fmt: skip
        return flat_results([eval(code, scope, {"x": x}) for x in outs if isinstance(x, Tensor)])  # noqa: S307  # of ours


_compiled = functools.cache(functools.partial(compile, filename="<follower>", mode="eval"))


def input_alone(then: str) -> str:
    """The number of the input of which a step `grad of input 1 alone` takes the gradient; empty for another step."""
    found = re.fullmatch(r"grad of input (\d+) alone", then)
    return found[1] if found else ""


def steps_of(then: str) -> tuple[str, ...]:
    """The names of the steps of a chain, in their order; one for a single step, none without a follow-up.

    >>> steps_of("exp | S(0) | grad"), steps_of("strides | again(x0, 2)"), steps_of("")
    (('exp', 'S(0)', 'grad'), ('strides', 'again(x0, 2)'), ())
    """
    if then.startswith(PUBLIC):  # the arguments of a call may hold the sign
        return (then,)
    steps, prior = split_prior_call(then)
    return (*(steps.split(CHAIN_SIGN) if steps else ()), *([prior] if prior else ()))


_IN_WORDS = {
    "grad": "the gradient", "grad S(0)": "the gradient, which comes in as S(0)", "grad of ones": "the gradient, which comes in as torch.ones_like(x)", "grad twice": "the gradient of the gradient",
    "sgd": "two steps of torch.optim.SGD", "adam": "two steps of torch.optim.AdamW", "full twice": "full_tensor() twice",
    "R": "redistribute to R", "S(0)": "redistribute to S(0)", "S(1)": "redistribute to S(1)", "local": "from_local(x.to_local())",
    STRIDES: "x.stride() beside that of its pieces",
}  # fmt: skip


def in_words(then: str) -> str:
    """The steps of a program as a reader follows them: each as its expression of the result `x` before it, or in words.

    >>> in_words("root | grad twice"), in_words("to (S(0), R)"), in_words("grad of 1")
    ('x.abs().sqrt(), then the gradient of the gradient', 'redistribute to (S(0), R)', 'the gradient of result 1')
    """
    words = [_IN_WORDS.get(step) or RESULT_STEPS.get(step) or _in_words(step) for step in steps_of(then)]
    return ", then ".join(words)


def _in_words(step: str) -> str:
    if step.startswith("to ("):
        return f"redistribute {step}"
    if step.startswith("only "):
        return f"result {step.removeprefix('only ')} alone"
    return re.sub(r"^grad of (?=\d)", "the gradient of result ", step).replace("grad of", "the gradient of")


def shorter_chains(then: str) -> list[str]:
    """The chain without one of its steps, each in turn; without the only one, there is no follow-up.

    >>> shorter_chains("exp | sum"), shorter_chains("sum"), shorter_chains("")
    (['sum', 'exp'], [''], [])
    """
    steps = steps_of(then)
    return [CHAIN_SIGN.join((*steps[:i], *steps[i + 1 :])) for i in range(len(steps))]


def is_gradient(step: str) -> bool:
    """Whether the step of that name calls for the gradient of the op."""
    return step in GRADS or bool(input_alone(step) or re.match(r"grad of \d", step))


def needs_results_only(step: str) -> bool:
    """Whether the step of that name needs only the results of the op."""
    return step in RESULT_STEPS or step in VIEW_STEPS or step.startswith(("to (", "only ", PUBLIC))


def follow_up(name: str) -> FollowUp:
    """The step of that name; `to (S(0), R)` is a redistribution to that layout, and `public ...` a use of a public call.

    Raises ValueError for an unknown name, and BadPlacement for an invalid layout.
    """
    if name.startswith(PUBLIC):
        return FollowUp(name, public_api.public_step(name)[1].code)
    if name.startswith("to ("):
        return FollowUp(name, f"laid(x, {placements_code(read_layout(name[3:]))})")
    every = RESULT_STEPS | VIEW_STEPS
    if name not in every:
        raise ValueError(f"nothing that follows an op is called {name!r}; there are {', '.join(every)}")
    return FollowUp(name, every[name])


@dataclass(frozen=True, slots=True)
class CallWithFollowUp(Call):
    """A call with its follow-up step, which runs on whole tensors and on DTensors in place of the call."""

    then: str = ""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Any]:
        """All results to be compared.  Raises ValueError for an unknown follow-up step."""
        *between, last = steps_of(self.then) or ("",)

        def op(given: Sequence[Any]) -> list[Any]:
            return _applied(between, flat_results(Call.__call__(self, given)))

        writes = mutates(self.op)
        if is_gradient(last) and not has_autograd_kernel(overload(self.op)):
            raise RuntimeError(f"{self.op} has no autograd kernel")
        if last.startswith("again("):
            parse_prior_call(self.op, last)([x.clone() for x in tensors] if writes else tensors)
            return op(tensors)
        if alone := input_alone(last):
            return gradients(op, tensors, Replicate(), writes, only=int(alone))
        if re.match(r"grad of \d", last):
            number = int(last.removeprefix("grad of "))
            return gradients(lambda given: [op(given)[number]], tensors, Replicate(), writes)
        if last in GRADS:
            scope = {"torch": torch, "gradients": gradients, "trained": trained, "Replicate": Replicate, "Shard": Shard}
            around = {"op": op, "x": tensors, "writes": writes}
            return list(eval(_compiled(GRADS[last]), {**scope, **around}))  # noqa: S307  # of GRADS
        if last in law_steps.LAWS:
            around = {"op": op, "x": tensors, "packet": packet(self.op), "arguments": numeric_arguments(self)}
            return list(eval(_compiled(law_steps.LAWS[last]), {**vars(law_steps), **around}))  # noqa: S307  # of LAWS
        if last in step_functions.RINGS:
            scope = {**vars(step_functions), "x": tensors}
            return list(eval(_compiled(step_functions.RINGS[last]), scope))  # noqa: S307  # of RINGS
        if last == "base":
            return with_bases(op, tensors)
        return _applied([last] if last else [], op(tensors))

    @property
    def alone(self) -> Call | None:
        """The op's own call, if the steps need only its results, so that `after` may be run separately; else None."""
        own = self.then and all(map(needs_results_only, steps_of(self.then)))
        return Call(self.op, self.args, self.kwargs) if own else None

    def after(self, outs: Sequence[Any]) -> list[Any]:
        """The results of the follow-up steps on the results of the op."""
        return _applied(steps_of(self.then), outs)


def _applied(steps: Sequence[str], outs: Sequence[Any]) -> list[Any]:
    """The results of one step after another."""
    for step in steps:
        number = step.removeprefix("only ")
        outs = [outs[int(number)]] if number != step else follow_up(step).apply(outs)
    return list(outs)


def packet(op: str) -> str:
    """The name of an op without its overload, in place or not: `uniform` for `aten.uniform_.default`."""
    return op.split(".")[1].rstrip("_")


def with_bases(op: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """The op on a view of each tensor: its results, the tensors themselves, and views that were taken before."""
    views = [x.unsqueeze(0) for x in tensors]
    outs = op([x.view(x.shape) for x in tensors])
    return [*outs, *tensors, *views]
