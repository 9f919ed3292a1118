"""Follow-up steps of an op in a program, by name: cheap steps that reveal a wrong placement of the result.

Each is an expression of one result `x` of the op, the same for a plain tensor and for a DTensor, and the same in the
scripts that reproduce a finding; or one of the steps around the whole call: "grad", "grad S(0)", "grad of 1", "base",
"only 1", "again(x0, 2)".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from localtensor.layout import StridedShard
from strategies.model.call_signature import numeric_arguments, parse_prior_call
from strategies.model.code_text import placements_code
from strategies.model.oracle import mutates
from strategies.model.rule import Call, flat_results, read_layout
from strategies.programs.run import attention_steps, law_steps
from strategies.programs.run.local_inputs import laid, whole
from strategies.programs.run.step_functions import (
    gradients,
    through_local,
    trained,
    with_base_written,
    written,
)

VIEWS = {
    "slice": "v[1:]", "select": "v[-1]", "narrow": "v.narrow(-1, 0, 1)", "transpose": "v.transpose(0, -1)",
    "view": "v.view(-1)", "unsqueeze": "v.unsqueeze(0)", "half": "v.chunk(2)[0]", "column": "v.split(1, -1)[0]",
    "row": "v.unbind(0)[0]", "every other": "v[::2]", "last of each": "v[..., -1]", "diagonal": "v.diagonal(0, 0, -1)",
}  # fmt: skip
"""Views of a base `v`, by name."""
WRITES = {"mul_": "v.mul_(-2)", "add_": "v.add_(1)", "copy_": "v.copy_(v * 3)", "fill_": "v.fill_(2)"}
"""Writes to a view `v`, by name."""
VIEW_STEPS = {  # torch 2.13: a view of a sharded dim is a copy, so most of these are wrong for a right op
    **{f"{w} {v}": f"written(x, lambda v: {VIEWS[v]}, lambda v: {WRITES[w]})" for v in VIEWS for w in WRITES},
    **{f"write, then {v}": f"with_base_written(x, lambda v: {VIEWS[v]})" for v in VIEWS},
}
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
}  # fmt: skip
GRADS = {
    "grad": "gradients(op, x, Replicate(), writes)", "grad S(0)": "gradients(op, x, Shard(0), writes)",
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
            "torch": torch, "whole": whole, "laid": laid, "Replicate": Replicate, "Shard": Shard,
            "_StridedShard": StridedShard, "written": written, "with_base_written": with_base_written,
            "through_local": through_local,
        }  # fmt: skip
        return flat_results([eval(code, scope, {"x": x}) for x in outs if isinstance(x, Tensor)])  # noqa: S307  # of ours


_compiled = functools.cache(functools.partial(compile, filename="<follower>", mode="eval"))


def needs_results_only(then: str) -> bool:
    """Whether the step of that name needs only the results of the op."""
    return then in RESULT_STEPS or then in VIEW_STEPS or then.startswith("to (")


def follow_up(name: str) -> FollowUp:
    """The step of that name; `to (S(0), R)` is a redistribution to that layout.

    Raises ValueError for an unknown name, and BadPlacement for an invalid layout.
    """
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

        def op(given: Sequence[Any]) -> list[Any]:
            return flat_results(Call.__call__(self, given))

        writes = mutates(self.op)
        if self.then.startswith("again("):
            parse_prior_call(self.op, self.then)([x.clone() for x in tensors] if writes else tensors)
            return op(tensors)
        if self.then.startswith("grad of "):
            number = int(self.then.removeprefix("grad of "))
            return gradients(lambda given: [op(given)[number]], tensors, Replicate(), writes)
        if self.then in GRADS:
            scope = {"torch": torch, "gradients": gradients, "trained": trained, "Replicate": Replicate, "Shard": Shard}
            around = {"op": op, "x": tensors, "writes": writes}
            return list(eval(_compiled(GRADS[self.then]), {**scope, **around}))  # noqa: S307  # of GRADS
        if self.then in law_steps.LAWS:
            around = {"op": op, "x": tensors, "packet": packet(self.op), "arguments": numeric_arguments(self)}
            return list(eval(_compiled(law_steps.LAWS[self.then]), {**vars(law_steps), **around}))  # noqa: S307  # of LAWS
        if self.then in attention_steps.RINGS:
            scope = {**vars(attention_steps), "x": tensors}
            return list(eval(_compiled(attention_steps.RINGS[self.then]), scope))  # noqa: S307  # of RINGS
        if self.then == "base":
            return with_bases(op, tensors)
        return self.after(op(tensors))

    @property
    def alone(self) -> Call | None:
        """The op's own call, if the step needs only its results, so that `after` may be run separately; else None."""
        own = needs_results_only(self.then) or self.then.startswith("only ")
        return Call(self.op, self.args, self.kwargs) if own else None

    def after(self, outs: Sequence[Any]) -> list[Any]:
        """The results of the follow-up step on the results of the op."""
        if self.then.startswith("only "):
            return [outs[int(self.then.removeprefix("only "))]]
        return follow_up(self.then).apply(outs) if self.then else list(outs)


def packet(op: str) -> str:
    """The name of an op without its overload, in place or not: `uniform` for `aten.uniform_.default`."""
    return op.split(".")[1].rstrip("_")


def with_bases(op: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """The op on a view of each tensor: its results, the tensors themselves, and views that were taken before."""
    views = [x.unsqueeze(0) for x in tensors]
    outs = op([x.view(x.shape) for x in tensors])
    return [*outs, *tensors, *views]
