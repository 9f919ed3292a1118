"""A program of more than one op or axis as a script of plain torch for torchrun, with no import of ours."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch.distributed.tensor import Partial

from localtensor.layout.spec import StridedShard, is_defined
from strategies.model.oracle import Truth
from strategies.model.prior_call import arguments_text, before
from strategies.model.program import Program, held_text
from strategies.model.rule import overload, written
from strategies.programs.repro.script import COMPARED, literal, slacks
from strategies.programs.run import follow_ups as followers
from strategies.programs.run import gradients
from strategies.programs.run import tensor_or_dtensor as either
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import truth_of
from strategies.torch_api import mesh_and_caches as meshed

_SCRIPT = '''"""{program}

DTensor in torch {version} gets this wrong on {ranks} ranks: {reason}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints what DTensor makes of the program and what plain tensors give; exit code 1 if they differ.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence  # noqa: F401
from math import inf, nan  # noqa: F401 (some values below are not finite)
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: F401
{module}
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", {mesh}, mesh_dim_names={names})
{flatten}

{helpers}

def flat(out):
    """All that an op returned, in one list."""
    return [leaf for item in out for leaf in flat(item)] if isinstance(out, (tuple, list)) else [out]


def op(x):
    return flat(torch.ops.{op}({arguments}))


def program(x):
{body}


for each in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):  # gloo has no average
    if hasattr(functional, each):
        own = inspect.unwrap(getattr(functional, each))
        setattr(functional, each, functools.update_wrapper(functools.partial(divided, own), own))

{inputs}
wants = program([{plain}])
gots = program([{distributed}])
wrong = False
for want, got, slack in zip(wants, gots, {slack}):
    if isinstance(got, torch.Tensor):
        print(f"rank {{rank}} placements {{getattr(got, 'placements', '-')}}", flush=True)
        got = got.full_tensor() if isinstance(got, DTensor) else got
'''


def program_script(program: Program, reason: str, name: str, module: str = "", truth: Truth | None = None) -> str:
    """The text of a script that shows what is wrong, with the very values of the program.

    `module` is the user's rules module, if it is one of his rules: the script imports it, and torch, only.  Raises
    as `held_of` and `truth_of` do, and ValueError where a placement cannot be written down (see `writable`).
    """
    if not writable(program):
        raise ValueError(f"{program} has a placement that cannot be written down")
    own = f'\nsys.path.insert(0, ".")  # run it from the folder that holds {module}\nimport {module}  # noqa: E402, F401\n'
    count, axes = len(program.sample.tensors), meshed.NAMES[: len(program.mesh)]
    return (_SCRIPT + COMPARED).format(
        program=program, version=torch.__version__.split("+")[0], ranks=program.ranks, reason=reason, name=name,
        module=own if module else "", mesh=program.mesh, names=tuple(axes),
        flatten=f'mesh._flatten("{axes}")' if program.flattened and len(axes) > 1 else "",
        helpers="\n\n".join(_helpers(program.then)), op=program.sample.op,
        arguments=_indexed(arguments_text(program.sample.call)), body=_body(program),
        inputs="\n".join(_inputs(program)), plain=", ".join(f"x{i}" for i in range(count)),
        distributed=", ".join(f"d{i}" for i in range(count)), slack=slacks(truth or truth_of(program)),
    )  # fmt: skip


def writable(program: Program) -> bool:
    """Whether every placement is plain or a strided shard."""
    return all(is_defined(p) for placements in program.inputs for p in placements)


def _indexed(arguments: str) -> str:
    return re.sub(r"\bx(\d+)\b", r"x[\1]", arguments)


def _helpers(then: str) -> list[str]:
    """Our own code that the program runs, as it stands: both runs and the script are one code."""
    used: list[Any] = [meshed.divided]
    if then.startswith("grad"):
        used += [either.spread, either.uneven, gradients.gradients]
    elif then == "base":
        used.append(followers.with_bases)
    elif followers.of_results(then):
        used += [f for f in (either.whole, either.laid) if f.__name__ in followers.follower(then).text]
    return [inspect.getsource(function) for function in used]


def _body(program: Program) -> str:
    then, sample = program.then, program.sample
    lines = []
    if then.startswith("again("):
        first = _indexed(arguments_text(before(sample.op, then)))
        given = first.replace("x[", "given[")
        lines = ["given = [t.clone() for t in x]", f"torch.ops.{sample.op}({given})  # the call before"]
    value = "op(x)"
    if then.startswith("only "):
        value = f"[op(x)[{then.removeprefix('only ')}]]"
    elif then.startswith("grad of "):
        one = f"lambda given: [op(given)[{then.removeprefix('grad of ')}]]"
        value = f"gradients({one}, x, Replicate(), {bool(overload(sample.op)._schema.is_mutable)})"
    elif then in followers.GRADS:
        value = f"gradients(op, x, {followers.GRADS[then]}, {bool(overload(sample.op)._schema.is_mutable)})"
    elif then == "base":
        value = "with_bases(op, x)"
    elif followers.of_results(then):
        lines = ["outs = [out for out in op(x) if isinstance(out, torch.Tensor)]"]
        value = f"flat([{followers.follower(then).text} for x in outs])"
    leaves = written(sample.call)
    also = f" + [{', '.join(f'given_[{leaf}]' for leaf in leaves)}]" if leaves else ""
    if also:
        lines.insert(0, "given_ = x")
    return "\n".join(f"    {line}" for line in [*lines, f"return {value}{also}"])


def _inputs(program: Program) -> list[str]:
    lines = []
    for i, (x, placements, held) in enumerate(
        zip(program.sample.tensors, program.inputs, held_of(program), strict=True)
    ):
        lines += [f"# argument {i}: {held_text(placements)}", f"x{i} = {literal(x)}"]
        listed = f"[{', '.join(map(followers.placement_code, placements))}]"
        if all(not isinstance(p, (Partial, StridedShard)) for p in placements):
            lines.append(f"d{i} = distribute_tensor(x{i}.clone(), mesh, {listed}, src_data_rank=None)")
            continue
        pieces = ",\n         ".join(map(literal, held))
        whole = f"shape=x{i}.shape, stride=x{i}.stride()"
        lines.append(f"held{i} = [{pieces}]")
        lines.append(f"d{i} = DTensor.from_local(held{i}[rank], mesh, {listed}, run_check=False, {whole})")
    return lines
