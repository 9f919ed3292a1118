"""The evidence that one can run: a script of plain torch for torchrun, with no import of ours."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from localtensor.layout.spec import is_plain, short
from localtensor.layout.tolerance import scale_of
from strategies.model.oracle import Truth
from strategies.model.prior_call import arguments_text
from strategies.model.rule import written
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


def literal(x: Tensor) -> str:
    """Python text that makes the same tensor, to the last bit; strides of a dense layout included."""
    if x.is_complex():  # Python's own way to write a complex number loses the sign of a zero, and nan
        return f"torch.complex({literal(x.detach().real.clone())}, {literal(x.detach().imag.clone())})"
    made = f"torch.tensor({x.detach().cpu().tolist()!r}, dtype={x.dtype})"
    if x.numel() == 0:
        made = f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    if not x.is_contiguous():
        made = f"torch.empty_strided({tuple(x.shape)}, {tuple(x.stride())}, dtype={x.dtype}).copy_({made})"
    return made


def slacks(truth: Truth) -> str:
    """How far each output may be off, as a list in Python: the largest finite slack, and a little of its scale."""
    shown = []
    for want, slack in zip(truth.outputs, truth.slack, strict=True):
        finite = [v for v in slack.flatten().tolist() if math.isfinite(v)] if isinstance(slack, Tensor) else []
        real = isinstance(want, Tensor) and (want.dtype.is_floating_point or want.dtype.is_complex)
        shown.append(f"{max([*finite, 1e-9 * float(scale_of(want)) if real else 0.0]):.3g}")
    return f"[{', '.join(shown)}]"


def usable(case: Case) -> bool:
    """Whether the case can be written down: no placement of DTensor's own among the inputs."""
    return all(map(is_plain, case.rule.inputs))
