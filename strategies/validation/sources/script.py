"""Scripts that show on real processes what is wrong with a claim about a function: torch and the claimant, nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.codec import slack_text, tensor_literal
from strategies.model.oracle import OracleResult
from strategies.model.rule import Sample
from strategies.validation.sources.functions import tensor_count

_SCRIPT = '''"""{head}

{reason}

Run:  torchrun --nproc-per-node {ranks} {{name}}
It prints what the ranks' results make together and what the function gives on whole tensors; exit code 1 if they differ.
"""

import sys
from math import inf, nan  # noqa: F401 (some values below are not finite)

import torch
import torch.distributed as dist
{imports}
WHOLE = [
    {whole},
]
# HELD[i][rank] is what a rank holds of tensor i: {layouts}.
HELD = [
    {held},
]
# How the results of the ranks make a whole, axis by axis of a mesh of these sizes; and the tolerance.
SIZES = {sizes}
MADE = {made}
ATOL = {atol}


def flat(out):
    if isinstance(out, torch.Tensor):
        return [out]
    return [x for one in out for x in flat(one)] if isinstance(out, (list, tuple)) else []


{whole_code}def on_a_rank(x):
    return flat({local})

{gradient}
{claimed}
def joined(parts, made, place):
    if made == "R":
        return parts[place]
    if any(part is None for part in parts):
        return None
    dim = len(parts[0].shape) if made == "P" else int(made[2:-1])  # the one in which they may differ
    if len({{(*part.shape[:dim], None, *part.shape[dim + 1 :]) for part in parts}}) > 1:
        return None  # these make no whole
    return sum(parts[1:], parts[0]) if made == "P" else torch.cat(parts, dim)


def together(x, made):
    parts, place = [None] * dist.get_world_size(), dist.get_rank()
    dist.all_gather_object(parts, x.detach())
    for size, one in zip(SIZES[::-1], made[::-1]):
        parts = [joined(parts[i : i + size], one, place % size) for i in range(0, len(parts), size)]
        place //= size
    return parts[0]


def some(x):
    if x is None:
        return "pieces that make no whole"
    return f"{{x.flatten()[:8].tolist()}} of shape {{tuple(x.shape)}}"


def verdict(whole, right, atol):
    if whole is None or whole.shape != right.shape:
        return "  WRONG"
    off = (~torch.isclose(whole, right, rtol=0.0, atol=atol, equal_nan=True)).nonzero()
    if not len(off):
        return ""
    at = off[0].tolist()
    return f"  WRONG, first at {{at}}: {{whole[tuple(at)].item()}} for {{right[tuple(at)].item()}}"


def main():
    rank = dist.get_rank()
    want = {want}
    error, errors = "", [None] * dist.get_world_size()
    try:
        {check}got = {results}(on_a_rank, [pieces[rank].clone() for pieces in HELD])
    except Exception as raised:
        error = f"rank {{rank}} raises {{type(raised).__name__}}: {{raised}}"
    dist.all_gather_object(errors, error)
    if any(errors):
        print(error or f"rank {{rank}} raises nothing", flush=True)
        return True
    wrong = False
    for right, mine, made, atol in zip(want, got, MADE, ATOL, strict=True):
        if made is None:
            continue
        whole = together(mine, made)
        said = verdict(whole, right, atol)
        print(f"rank {{rank}}: as {{', '.join(made)}} {{some(whole)}}, right is {{some(right)}}{{said}}", flush=True)
        wrong = wrong or bool(said)
    flag = torch.tensor([float(wrong)])
    dist.all_reduce(flag)
    return bool(flag.item())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wrong = main()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)
'''
_FUNCTION = """def function(x):
    return flat({function})


"""
_GRADIENT = """
COUNT, WRT = {count}, {wrt}  # the tensors of the call; those whose gradients are compared; the rest of x are cotangents


def gradients(function, x):
    leaves = [one.requires_grad_(i in WRT) for i, one in enumerate(x[:COUNT])]
    outs = [out for out in function([one.clone() for one in leaves]) if out.requires_grad]
    wrt = [leaves[i] for i in WRT]
    found = torch.autograd.grad(outs, wrt, x[COUNT:], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wrt, found)]

"""
_FORWARD = """
def run(function, x):
    return function(x)

"""


@dataclass(frozen=True)
class Wording:
    """What a source adds to the script: its title in the head, its import, and code that asks it for its claim.

    `ask` is code of a function `check(rank)` that raises where the source claims something else; empty for none.
    """

    head: str
    imports: str = ""
    ask: str = ""


@dataclass(frozen=True)
class Sides:
    """The placements of a case on each axis of a mesh, the first one outermost, and each rank's pieces.

    sizes   the ranks of each axis.
    inputs, outputs   of each tensor the placement on each axis; a result whose first is None is not compared.
    held    `held[i][rank]`, the pieces of tensor i.
    """

    sizes: Sequence[int]
    inputs: Sequence[Sequence[Placement | None]]
    outputs: Sequence[Sequence[Placement | None]]
    held: Sequence[Sequence[Tensor]]


def layout_text(placement: Placement | None) -> str | None:
    """`R`, `P` or `S(0)`."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return None if placement is None else "P" if isinstance(placement, Partial) else "R"


def _on_axes(row: Sequence[Placement | None]) -> str:
    return ", ".join(str(layout_text(p)) for p in row)


def function_script(
    sample: Sample,
    oracle: OracleResult,
    sides: Sides,
    code: tuple[str, str],
    wording: Wording,
    reason: str,
) -> str:
    """The script of a case of a rule about a function.

    sides   the placements and the pieces.
    code    the call in Python, of whole tensors and of a rank's pieces, with `x[i]` for its tensors.  Without the first,
            the results on whole tensors stand in the script as values.
    """
    wrt = list(sample.call.args[2]) if len(sample.call.args) > 2 else []
    rows = [f"[{', '.join(tensor_literal(x.contiguous()) for x in column)}]" for column in sides.held]
    slack = [slack_text(want, one) for want, one in zip(oracle.outputs, oracle.slack, strict=True)]
    run = "gradients" if wrt else "run"
    values = f"[{', '.join(map(tensor_literal, oracle.outputs))}]"
    return _SCRIPT.format(
        head=wording.head, reason=reason, ranks=len(sides.held[0]), sizes=list(sides.sizes), imports=wording.imports,
        whole=",\n    ".join(map(tensor_literal, oracle.inputs)), held=",\n    ".join(rows),
        layouts="; ".join(_on_axes(row) for row in sides.inputs),
        made=[None if row[0] is None else [layout_text(p) for p in row] for row in sides.outputs],
        atol=f"[{', '.join(slack)}]", whole_code=_FUNCTION.format(function=code[0]) if code[0] else "", local=code[1],
        gradient=_GRADIENT.format(count=tensor_count(sample.call.args[1]), wrt=wrt) if wrt else _FORWARD,
        claimed=f"\n{wording.ask}\n" if wording.ask else "", check="check(rank)\n        " if wording.ask else "",
        results=run, want=f"{run}(function, [x.clone() for x in WHOLE])" if code[0] else values,
    )  # fmt: skip
