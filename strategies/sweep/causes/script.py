"""The script of a cause: a few lines of plain torch that show it, which start their own ranks, and a run of them on gloo.

The exit code of a script is 1 if the fault shows, 0 if it does not, and 2 if it cannot be run there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import pickling
from localtensor.layout import GLOO_DTYPES, Layout, Mesh, is_supported
from strategies.model.cause import FAILED, RIGHT, SHOWS
from strategies.model.codec import (
    COMPARISON_FUNCTION,
    FLATTEN_FUNCTION,
    docstring_text,
    flatten_code,
    placements_code,
    slack_text,
    tensor_literal,
)
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import mutates
from strategies.model.rule import Program
from strategies.programs.run.follow_ups import GRADS, follow_up
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.step_functions import local_inputs_of
from strategies.programs.script import LIMIT_CODE, argument_code, body_code, helper_functions, tolerances_code
from strategies.sweep.causes.cause import Case
from strategies.sweep.causes.spelling import raw_spelling, spelled
from strategies.torch_api.code_places import no_return_place
from strategies.torch_api.rank_runs import RankProcesses, first_rank_failure, returned_values
from strategies.validation.difference import tensor_text

MOST_WRITTEN = 16
"""Elements of a tensor that are written one by one; a longer one that counts is written as `arange`."""

_SCRIPT = '''"""{title}

{about}

Run:  python {name}
It starts its {ranks} ranks itself; `PYTHONHASHSEED=0 torchrun --nproc-per-node {ranks} {name}` does the same.
Exit code 1: the fault shows.  0: it does not.  2: it cannot be run with this torch.
"""

import os
import socket
import subprocess
import sys
import time
import traceback
{imports}
RANKS, RAISES = {ranks}, {raises}


{helpers}


def check():
{body}


def main():{limit}
    dist.init_process_group("gloo")
    try:
        wrong = check()
        dist.barrier()
    except Exception as error:
        traceback.print_exc()
        print(f"rank {{dist.get_rank()}} raises {{type(error).__name__}}: {{error}}", flush=True)
        os._exit(1 if RAISES else 2)
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


def start():
    """Start the ranks as processes, as torchrun does, and end them all when one has failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {{"PYTHONHASHSEED": "0", **os.environ}}  # ranks that go through a set of placements do so in one order
    env |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}}
    ranks = [subprocess.Popen([sys.executable, __file__], env={{**env, "RANK": str(r)}}) for r in range(RANKS)]
    end = time.time() + 120
    while None in [p.poll() for p in ranks] and not any(p.poll() for p in ranks) and time.time() < end:
        time.sleep(0.05)
    codes = {{p.poll() for p in ranks}}
    for p in ranks:
        p.kill()
    if codes == {{None}} or codes == {{None, 0}}:
        print("hangs: ranks still wait after 120 s", flush=True)
    sys.exit(0 if codes == {{0}} else 2 if 2 in codes and 1 not in codes else 1)  # a rank that dies is a fault, too


if __name__ == "__main__":
    main() if "RANK" in os.environ else start()
'''
_IMPORTS = """{more}
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
{private}"""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A script and what came of its run: `lines` are the lines that show the fault, `prints` what rank 0 printed, or the
    first rank with a piece of a wrong shape.

    `verdict` is "shows", "does not show" or "cannot be run".  `spelling` is the call as it is written in it.
    """

    script: str
    lines: str
    prints: str
    verdict: str
    spelling: str = ""


def scripts_of(case: Case, title: str, about: str, name: str) -> Iterator[ScriptRun]:
    """Scripts for the case that have not run, the shortest first; those of a public call before those of the overload.

    None where it cannot be written.
    """
    program = case.program
    if not all(is_supported(p) for layout in program.inputs for p in layout):
        return
    with contextlib.suppress(*REJECTIONS):
        inputs = _inputs(program)
        oracle = oracle_of_program(program)
        plain = not mutates(program.sample.op)
        for spelling in dict.fromkeys((spelled(program.sample), raw_spelling(program.sample.call))):
            bodies: list[tuple[list[str], list[str]]] = []  # the lines, and the functions that they use
            if program.then in GRADS and plain and _has_plain_gradient(program, spelling):
                bodies.append((_gradient(program, spelling), []))
            elif not program.then and len(oracle.outputs) == 1 and plain:
                atol = slack_text(oracle.outputs[0], oracle.slack[0])
                bodies.append(([f"return differs({_on_dtensors(spelling)}, {spelling}, {atol})"], []))
            if program.public_call:
                bodies.append(_public(program, tolerances_code(oracle)))
            bodies.append(_general(program, spelling, tolerances_code(oracle)))
            for lines, helpers in bodies:
                shown = "\n".join([_mesh(program), *inputs, *lines])
                told = "\n".join([*(text for text in helpers if text.startswith(("def op(", "def program("))), shown])
                yield ScriptRun(_text(case, title, about, name, shown, helpers), told, "", "", spelling)


def _text(case: Case, title: str, about: str, name: str, shown: str, helpers: Sequence[str]) -> str:
    program = case.program
    source = "\n".join([*helpers, shown])
    abstract = [name for name in ("Callable", "Sequence") if f"{name}[" in source]
    more = f"from collections.abc import {', '.join(abstract)}\n" if abstract else ""
    more += "from math import inf, nan\n" if re.search(r"\b(inf|nan)\b", source) else ""
    more += "from typing import Any\n" if re.search(r"\bAny\b", source) else ""
    private = "from torch import Tensor\n" if re.search(r"\bTensor\b", source.replace("torch.Tensor", "")) else ""
    if "_StridedShard" in source or "Placement" in source:
        private += "from torch.distributed.tensor.placement_types import Placement, _StridedShard  # noqa: F401\n"
    return _SCRIPT.format(
        title=docstring_text(title), about=docstring_text(textwrap.fill(about, 110)), name=name, ranks=program.ranks, raises=case.severity.raises,
        imports=_IMPORTS.format(more=more, private=private),
        limit=textwrap.indent(LIMIT_CODE.rstrip(), "    ") if no_return_place(case.reason) else "",
        helpers="\n\n\n".join([COMPARISON_FUNCTION.strip(), *helpers]), body=textwrap.indent(shown, "    "),
    )  # fmt: skip


def _mesh(program: Program) -> str:
    names = Mesh.of(*program.mesh).names
    made = f'mesh = init_device_mesh("cpu", {program.mesh}, mesh_dim_names={names})'
    if program.flattened and len(names) > 1:
        return f"{made}\n{flatten_code(names, names).strip()}"
    return made if len(names) > 1 else f'mesh = init_device_mesh("cpu", {program.mesh})'


def _inputs(program: Program) -> list[str]:
    held = local_inputs_of(program)
    return [_input(i, x, program.inputs[i], held[i]) for i, x in enumerate(program.sample.tensors)]


def _input(i: int, x: Tensor, layout: Layout, held: Sequence[Tensor]) -> str:
    if any(isinstance(p, Partial) or type(p).__name__ == "_StridedShard" for p in layout):
        return argument_code(i, x, layout, held).replace("[rank]", "[dist.get_rank()]")
    code = placements_code(_plain(layout))
    source = "" if x.dtype in GLOO_DTYPES else ", src_data_rank=None"  # what gloo does not broadcast
    return f"x{i} = {literal(x)}\nd{i} = distribute_tensor(x{i}, mesh, {code}{source})"


def _plain(layout: Layout) -> list[Placement]:
    return [Shard(p.dim) if isinstance(p, Shard) else p for p in layout]


def literal(x: Tensor) -> str:
    """Python text of the tensor, in as few letters as its values allow.

    >>> literal(torch.tensor([1.0, 2.0])), literal(torch.arange(1, 26).float().reshape(5, 5))
    ('torch.tensor([1.0, 2.0])', 'torch.arange(1.0, 26.0).reshape((5, 5))')
    """
    if x.numel() > MOST_WRITTEN and x.is_contiguous() and x.dtype in (torch.float32, torch.int64):
        flat, number = x.flatten(), float if x.dtype.is_floating_point else int
        first, step = flat[0].item(), 1
        if torch.equal(flat, torch.arange(x.numel(), dtype=x.dtype) * step + first):
            return f"torch.arange({number(first)}, {number(first + x.numel())}).reshape({tuple(x.shape)})"
        if torch.equal(flat, (torch.arange(x.numel()) % 9 + 1).to(x.dtype)):
            one = "1.0" if x.dtype.is_floating_point else "1"
            return f"(torch.arange({x.numel()}) % 9 + {one}).reshape({tuple(x.shape)})"
    text = tensor_literal(x)
    return re.sub(r", dtype=torch\.(float32|int64)\)$", ")", text) if _has_default_dtype(x) else text


def _has_default_dtype(x: Tensor) -> bool:
    usual = torch.float32 if x.dtype.is_floating_point else torch.int64
    return x.numel() > 0 and x.is_contiguous() and x.dtype == usual and all(map(math.isfinite, x.flatten().tolist()))


def _on_dtensors(text: str) -> str:
    return re.sub(r"\bx(\d+)\b", r"d\1", text)


def _has_plain_gradient(program: Program, spelling: str) -> bool:
    """Whether plain torch runs the lines of `_gradient`: not for a complex result, say, whose sum has no gradient."""
    scope = {"torch": torch, "F": torch.nn.functional, "inf": math.inf, "nan": math.nan}
    inexact = [x.dtype.is_floating_point or x.dtype.is_complex for x in program.sample.tensors]
    leaves = [x.clone().requires_grad_(y) for x, y in zip(program.sample.tensors, inexact, strict=True)]
    text = f"{_summed(spelling)}.backward()"
    try:
        eval(text, scope | {f"x{i}": x for i, x in enumerate(leaves)})  # noqa: S307  # of our own making
    except (*REJECTIONS, AttributeError):
        return False
    return all(x.grad is not None for x in leaves if x.requires_grad)


def _gradient(program: Program, text: str) -> list[str]:
    """Lines that compare gradients of the sum of the result of the call `text`."""
    real = [i for i, x in enumerate(program.sample.tensors) if x.dtype.is_floating_point or x.dtype.is_complex]
    leaves = "; ".join(f"x{i}.requires_grad_(); d{i}.requires_grad_()" for i in real)
    lines = leaves.split("; ")
    lines += [f"{_summed(text)}.backward()", f"{_summed(_on_dtensors(text))}.backward()"]
    checks = ", ".join(f"differs(d{i}.grad, x{i}.grad, 1e-4)" for i in real)
    return [*lines, f"return {checks}" if len(real) == 1 else f"return any([{checks}])"]


def _summed(text: str) -> str:
    return f"{text}.sum()" if re.fullmatch(r"[\w.]+\(.*\)", text) else f"({text}).sum()"


_ALL_DIFFER = "return any([differs(got, want, atol) for got, want, atol in zip(gots, wants, {}, strict=True) if want is not None])"


def _public(program: Program, atols: str) -> tuple[list[str], list[str]]:
    """Lines for a use of a public call, and the functions that they use: on the tensor itself, not on an alias of it."""
    used = f"def program(x):\n    return flat({follow_up(program.then).text})"
    helpers = [FLATTEN_FUNCTION.strip(), *(text.strip() for text in helper_functions(program.then)), used]
    return ["wants, gots = program(x0), program(d0)", _ALL_DIFFER.format(atols)], helpers


def _general(program: Program, spelling: str, atols: str) -> tuple[list[str], list[str]]:
    """Lines for any program, and the functions that they use."""
    names = [f"x{i}" for i in range(len(program.sample.tensors))]
    text = re.sub(r"\bx(\d+)\b", r"x[\1]", spelling)
    op = f"def op(x):\n    return flat({text})\n"
    whole = f"def program(x):\n{body_code(program)}\n"
    lines = [
        f"wants = program([{', '.join(names)}])",
        f"gots = program([{_on_dtensors(', '.join(names))}])",
        _ALL_DIFFER.format(atols),
    ]
    helpers = [FLATTEN_FUNCTION.strip(), *(text.strip() for text in helper_functions(program.then)), op.strip()]
    return [*_cloned(program, names), *lines], [*helpers, whole.strip()]


def _cloned(program: Program, names: Sequence[str]) -> list[str]:
    """An op that writes to its arguments gets the values once for each run: `distribute_tensor` may share memory."""
    if not mutates(program.sample.op):
        return []
    return [f"{name} = {name}.clone()" for name in names]


def run_first_that_shows(processes: RankProcesses, case: Case, title: str, about: str, name: str) -> ScriptRun | None:
    """The first script of the case that shows the fault on real processes; the last one where none does."""
    last = None
    for one in scripts_of(case, title, about, name):
        verdict, prints = run(
            processes, one.script, case.program.ranks, raises=case.severity.raises, reason=case.reason
        )
        last = replace(one, verdict=verdict, prints=prints)
        if verdict == SHOWS:
            break
    return last


def right_text(program: Program) -> str:
    """What plain torch gives on whole tensors, in one line; "" where it gives nothing that can be compared."""
    with contextlib.suppress(*REJECTIONS):
        return ", ".join(tensor_text(x) for x in oracle_of_program(program).outputs if x is not None)
    return ""


REFUSES = "refuses this call on every rank: "
ALIKE = 24
"""Characters, digits left out, in which the messages of one error agree."""


def run(processes: RankProcesses, text: str, ranks: int, *, raises: bool, reason: str = "") -> tuple[str, str]:
    """The verdict of a script on real processes, and what rank 0 printed, or the error.

    A script of a call that every rank refuses for this `reason` shows it by that error alone: another one is a fault of the script.
    """
    outcomes = processes.run(check_on_rank, [text] * ranks)
    fault = first_rank_failure(outcomes)
    if fault is not None:
        said = (
            f"rank {fault.ranks[0]} raises {fault.raised.kind}: {fault.raised.message}" if fault.raised else fault.text
        )
        shows = raises and (fault.raised is None or _is_error_of(reason, fault.raised.message))
        return (SHOWS if shows else FAILED), said.splitlines()[0]
    values = returned_values(outcomes)
    wrong = any(wrong for wrong, _ in values)
    every = sorted((printed for _, printed in values if printed), key=lambda text: " holds shape " not in text)
    prints = every[0] if every else ""
    return (SHOWS if wrong else RIGHT), prints


def _is_error_of(reason: str, message: str) -> bool:
    _, refuses, error = reason.partition(REFUSES)
    wanted = error.partition(": ")[2]
    return not refuses or wanted == "-" or _signature(message) == _signature(wanted)


def _signature(message: str) -> str:
    return re.sub(r"\d+", "", message)[:ALIKE].strip()


def check_on_rank(sent: bytes) -> bytes:
    """Run `check` of the pickled script on this rank.  Returns, pickled, whether the fault shows, and what was printed."""
    scope = {"__name__": "cause"}
    printed = io.StringIO()
    before = logging.root.manager.disable  # these processes may have it off for good
    logging.disable()  # torch logs the traceback of every refusal, which is what some scripts show
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(pickling.loads(sent), "<cause>", "exec"), scope)  # noqa: S102  # a script of our own making
            wrong = bool(scope["check"]())  # type: ignore[operator]
    finally:
        logging.disable(before)
    return pickling.dumps((wrong, printed.getvalue().strip()))
