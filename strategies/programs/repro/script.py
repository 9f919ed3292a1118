"""The evidence that one can run: a script of plain torch for torchrun, with no import of ours."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from localtensor.layout import StridedShard, is_defined, is_plain, short
from strategies.model.call_signature import arguments_text, before
from strategies.model.code_text import literal, slack_text
from strategies.model.oracle import Truth
from strategies.model.program import Program, held_text
from strategies.model.rule import overload, written
from strategies.programs.run import follow_ups, local_inputs
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import truth_of
from strategies.torch_api import mesh_and_caches
from strategies.validation.probe import Case

_SCRIPT = '''"""{rule}

DTensor in torch {version} gets this wrong on {ranks} ranks: {reason}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints what DTensor makes of the call and what the op gives on whole tensors; exit code 1 if they differ.
"""

import sys
from math import inf, nan  # noqa: F401 (some values below are not finite)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
{module}
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
{helpers}
{inputs}
want = torch.ops.{op}({plain})
got = torch.ops.{op}({distributed})

wants, gots = {results}
wrong = False
for want, got, slack in zip(wants, gots, {slack}):
    if isinstance(got, DTensor):
        print(f"rank {{rank}} placements {{got.placements}}", flush=True)
        got = got.to_local().clone() if got.placements[0].is_replicate() else assemble(got)
'''

COMPARED = """\
        same = (got.shape, got.dtype) == (want.shape, want.dtype) and torch.allclose(got, want, rtol=0.0, atol=slack, equal_nan=True)
        want, got = want.tolist(), got.tolist()
    elif isinstance(want, (bool, int, float)):
        same = got == want
    else:
        continue
    wrong |= not same
    print(f"rank {{rank}} got  {{got}}\\nrank {{rank}} want {{want}}\\nrank {{rank}} {{'right' if same else 'WRONG'}}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
"""
"""How a script goes on where `got` is whole: it tells both, and how it ends."""
_HELPERS = '''

def flat(out):
    """All that an op returned, in one list."""
    return [leaf for item in out for leaf in flat(item)] if isinstance(out, (tuple, list)) else [out]


def assemble(x):
    """full_tensor, but for an average, which gloo cannot make: there the ranks' values are averaged here."""
    if str(getattr(x.placements[0], "reduce_op", "")) != "avg":
        return x.full_tensor()
    held = [torch.empty_like(x.to_local().contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(held, x.to_local().contiguous())
    return torch.stack(held).double().mean(0).to(x.dtype) if not x.dtype.is_complex else torch.stack(held).mean(0)

'''


def script(case: Case, reason: str, name: str, module: str = "") -> str:
    """The text of a script that shows what is wrong, with the very values of the case.

    `module` is the user's rules module, if it is one of his rules: the script imports it, and torch, only.
    """
    own = f'\nsys.path.insert(0, ".")  # run it from the folder that holds {module}\nimport {module}  # noqa: E402, F401\n'
    return (_SCRIPT + COMPARED).format(
        rule=str(case.rule), version=torch.__version__.split("+")[0], ranks=case.ranks, reason=reason, name=name,
        helpers=_HELPERS, module=own if module else "", inputs="\n".join(_input(case, i) for i in range(len(case.held))),
        op=case.sample.op, plain=arguments_text(case.sample.call), distributed=arguments_text(case.sample.call, "d"),
        slack=slacks(case.truth),
        results=_results(case),
    )  # fmt: skip


def _results(case: Case) -> str:
    """The two lists to compare: what the op returns, and the arguments that it writes to without returning them."""
    leaves = written(case.sample.call)
    own = ["flat(want)", "flat(got)"] if case.truth.raw is not None else ["[]", "[]"]
    also = [f" + [{', '.join(f'{letter}{leaf}' for leaf in leaves)}]" if leaves else "" for letter in "xd"]
    return ", ".join(a + b for a, b in zip(own, also, strict=True))


def _input(case: Case, i: int) -> str:
    x, placement = case.truth.inputs[i], case.rule.inputs[i]
    lines = [f"# argument {i}: {short(placement)}", f"x{i} = {literal(x)}"]
    if isinstance(placement, Partial):
        pieces = ",\n         ".join(literal(piece) for piece in case.held[i])
        lines.append(f"held{i} = [{pieces}]")
        lines.append(
            f"d{i} = DTensor.from_local(held{i}[rank], mesh, [Partial({placement.reduce_op!r})], run_check=False)"
        )
    else:
        kind = f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
        lines.append(f"d{i} = distribute_tensor(x{i}.clone(), mesh, [{kind}], src_data_rank=None)")
    return "\n".join(lines)


def slacks(truth: Truth) -> str:
    """How far each output may be off, as a list in Python: the largest finite slack, and a little of its scale."""
    shown = (slack_text(want, slack) for want, slack in zip(truth.outputs, truth.slack, strict=True))
    return f"[{', '.join(shown)}]"


def usable(case: Case) -> bool:
    """Whether the case can be written down: no placement of DTensor's own among the inputs."""
    return all(map(is_plain, case.rule.inputs))


# A program of more than one op or axis as a script of plain torch for torchrun, with no import of ours.

_PROGRAM_SCRIPT = '''"""{program}

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
    count, axes = len(program.sample.tensors), mesh_and_caches.NAMES[: len(program.mesh)]
    return (_PROGRAM_SCRIPT + COMPARED).format(
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
    used: list[Any] = [mesh_and_caches.divided]
    if then.startswith("grad"):
        used += [local_inputs.spread, local_inputs.uneven, follow_ups.gradients]
    elif then == "base":
        used.append(follow_ups.with_bases)
    elif follow_ups.of_results(then):
        used += [f for f in (local_inputs.whole, local_inputs.laid) if f.__name__ in follow_ups.follower(then).text]
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
    elif then in follow_ups.GRADS:
        value = f"gradients(op, x, {follow_ups.GRADS[then]}, {bool(overload(sample.op)._schema.is_mutable)})"
    elif then == "base":
        value = "with_bases(op, x)"
    elif follow_ups.of_results(then):
        lines = ["outs = [out for out in op(x) if isinstance(out, torch.Tensor)]"]
        value = f"flat([{follow_ups.follower(then).text} for x in outs])"
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
        listed = f"[{', '.join(map(follow_ups.placement_code, placements))}]"
        if all(not isinstance(p, (Partial, StridedShard)) for p in placements):
            lines.append(f"d{i} = distribute_tensor(x{i}.clone(), mesh, {listed}, src_data_rank=None)")
            continue
        pieces = ",\n         ".join(map(literal, held))
        whole = f"shape=x{i}.shape, stride=x{i}.stride()"
        lines.append(f"held{i} = [{pieces}]")
        lines.append(f"d{i} = DTensor.from_local(held{i}[rank], mesh, {listed}, run_check=False, {whole})")
    return lines
