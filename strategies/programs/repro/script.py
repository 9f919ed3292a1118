"""Scripts for torchrun that reproduce a finding: plain torch, without an import of ours."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Mesh, StridedShard, is_standard, is_supported
from strategies.model.call_signature import arguments_text, numeric_arguments, parse_prior_call, with_indexed_tensors
from strategies.model.code_text import (
    COMPARISON_CODE,
    FLATTEN_FUNCTION,
    docstring_code,
    flatten_code,
    placements_code,
    slack_text,
    tensor_literal,
)
from strategies.model.oracle import OracleResult, mutates
from strategies.model.rule import Program, placements_text, written_leaves
from strategies.programs.run import attention_steps, follow_ups, law_steps, local_inputs, step_functions
from strategies.programs.run.local_inputs import local_inputs_of
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.validation.probe import Case

_CALL_PRINTS = "what DTensor makes of the call and what the op gives on whole tensors; exit code 1 if they differ."
_SCRIPT = """{head}

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
        got = got.to_local().clone() if got.placements[0].is_replicate() else got.full_tensor()
"""

_HELPERS = f"\n\n{FLATTEN_FUNCTION}\n"


def case_script(case: Case, reason: str, name: str, module: str = "") -> str:
    """The text of a script that reproduces a finding about one rule, with the values of the case.

    `module` is the user's rules module that the script imports, for a rule of the user's own.
    """
    given = case.truth.inputs, [(p or Replicate(),) for p in case.rule.inputs], case.held
    return (_SCRIPT + COMPARISON_CODE).format(
        head=docstring_code(
            str(case.rule), f" gets this wrong on {case.ranks} ranks: {reason}", case.ranks, name, _CALL_PRINTS
        ),
        helpers=_HELPERS,
        module=_import_code(module),
        inputs="\n".join(map(argument_code, itertools.count(), *given)),
        op=case.sample.op,
        plain=arguments_text(case.sample.call),
        distributed=arguments_text(case.sample.call, "d"),
        slack=tolerances_code(case.truth),
        results=_results(case),
    )


def _import_code(module: str) -> str:
    if not module:
        return ""
    return f'\nsys.path.insert(0, ".")  # run it from the folder that holds {module}\nimport {module}  # noqa: E402, F401\n'


def _results(case: Case) -> str:
    """The two lists to compare: the op's results, and the arguments that it writes to without returning them."""
    leaves = written_leaves(case.sample.call)
    own = ["flat(want)", "flat(got)"] if case.truth.raw is not None else ["[]", "[]"]
    also = [f" + [{', '.join(f'{letter}{leaf}' for leaf in leaves)}]" if leaves else "" for letter in "xd"]
    return ", ".join(a + b for a, b in zip(own, also, strict=True))


def argument_code(i: int, x: Tensor, placements: tuple[Placement, ...], held: Sequence[Tensor]) -> str:
    lines = [f"# argument {i}: {placements_text(placements)}", f"x{i} = {tensor_literal(x)}"]
    listed = placements_code(placements)
    if all(not isinstance(p, (Partial, StridedShard)) for p in placements):
        lines.append(f"d{i} = distribute_tensor(x{i}.clone(), mesh, {listed}, src_data_rank=None)")
    else:
        pieces = ",\n         ".join(map(tensor_literal, held))
        whole = f"shape=x{i}.shape, stride=x{i}.stride()"
        lines.append(f"held{i} = [{pieces}]")
        lines.append(f"d{i} = DTensor.from_local(held{i}[rank], mesh, {listed}, run_check=False, {whole})")
    return "\n".join(lines)


def tolerances_code(truth: OracleResult) -> str:
    """The tolerance of each output as a list in Python: the largest finite slack, and a little of its scale."""
    shown = (slack_text(want, slack) for want, slack in zip(truth.outputs, truth.slack, strict=True))
    return f"[{', '.join(shown)}]"


def is_writable_case(case: Case) -> bool:
    """Whether the case can be a script: no placement of DTensor's own is among the inputs."""
    return all(map(is_standard, case.rule.inputs))


_PRINTS = "what DTensor makes of the program and what plain tensors give; exit code 1 if they differ."
_PROGRAM_SCRIPT = (
    """{head}

import sys
from collections.abc import Callable, Sequence  # noqa: F401
from math import inf, nan  # noqa: F401 (some values below are not finite)
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
from torch.distributed.tensor.placement_types import Placement, _StridedShard  # noqa: F401
{module}
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", {mesh}, mesh_dim_names={names})
{flatten}

{helpers}

"""
    + FLATTEN_FUNCTION
    + """

def op(x):
    return flat(torch.ops.{op}({arguments}))


def program(x):
{body}


{inputs}
wants = program([{plain}])
gots = program([{distributed}])
wrong = False
for want, got, slack in zip(wants, gots, {slack}):
    if isinstance(got, torch.Tensor):
        print(f"rank {{rank}} placements {{getattr(got, 'placements', '-')}}", flush=True)
        got = got.full_tensor() if isinstance(got, DTensor) else got
"""
)


def program_script(
    program: Program, reason: str, name: str, module: str = "", truth: OracleResult | None = None
) -> str:
    """The text of a script that reproduces a finding about a program, with the program's values.

    `module` is the user's rules module that the script imports, for a rule of the user's own.  Raises as
    `local_inputs_of` and `oracle_of_program` do, and ValueError for a program that is not `is_writable_program`.
    """
    if not is_writable_program(program):
        raise ValueError(f"{program} has a placement that cannot be written down")
    count, axes = len(program.sample.tensors), Mesh.of(*program.mesh).names
    given = program.sample.tensors, program.inputs, local_inputs_of(program)
    return (_PROGRAM_SCRIPT + COMPARISON_CODE).format(
        head=docstring_code(
            str(program), f" gets this wrong on {program.ranks} ranks: {reason}", program.ranks, name, _PRINTS
        ),
        module=_import_code(module),
        mesh=program.mesh,
        names=axes,
        flatten=flatten_code(axes, axes) if program.flattened and len(axes) > 1 else "",
        helpers="\n\n".join(helper_functions(program.then)),
        op=program.sample.op,
        arguments=with_indexed_tensors(arguments_text(program.sample.call)),
        body=body_code(program),
        inputs="\n".join(map(argument_code, itertools.count(), *given)),
        plain=", ".join(f"x{i}" for i in range(count)),
        distributed=", ".join(f"d{i}" for i in range(count)),
        slack=tolerances_code(truth or oracle_of_program(program)),
    )


def is_writable_program(program: Program) -> bool:
    """Whether every placement is plain or a strided shard."""
    return all(is_supported(p) for placements in program.inputs for p in placements)


def helper_functions(then: str) -> list[str]:
    """The source of our functions that the program uses: the script runs the same code as the validation."""
    used: list[Any] = []
    if then.startswith("grad of ") or then in follow_ups.GRADS:
        used += [local_inputs.spread, local_inputs.uneven, step_functions.coming_gradients]
        used.append(
            step_functions.trained if "trained(" in follow_ups.GRADS.get(then, "") else step_functions.gradients
        )
    elif then in law_steps.LAWS:
        helpers = (law_steps.copied, law_steps.random_run, law_steps.locals_of_ranks, local_inputs.whole)
        used += [*helpers, local_inputs.spread, local_inputs.uneven]
        used.append(getattr(law_steps, law_steps.LAWS[then].partition("(")[0]))
        return [
            f"import math\n\nOp = Callable[[Sequence[Any]], list[Any]]\nRISK = {law_steps.RISK}\n",
            *map(inspect.getsource, used),
        ]
    elif then in attention_steps.RINGS:
        used += [local_inputs.whole, local_inputs.uneven, attention_steps.CpuKernels, attention_steps.ring_attention]
        imports = "import torch.nn.functional as F\nfrom torch.utils._python_dispatch import TorchDispatchMode\n"
        return [imports, *map(inspect.getsource, used)]
    elif then == "base":
        used.append(follow_ups.with_bases)
    elif follow_ups.needs_results_only(then):
        text = follow_ups.follow_up(then).text
        steps = step_functions
        every = (local_inputs.whole, local_inputs.laid, steps.written, steps.with_base_written, steps.through_local)
        used += [f for f in every if f"{f.__name__}(" in text]
    return [inspect.getsource(function) for function in used]


def body_code(program: Program) -> str:
    then, sample = program.then, program.sample
    lines = []
    if then.startswith("again("):
        first = with_indexed_tensors(arguments_text(parse_prior_call(sample.op, then)))
        given = first.replace("x[", "given[")
        lines = ["given = [t.clone() for t in x]", f"torch.ops.{sample.op}({given})  # the call before"]
    value = "op(x)"
    if then.startswith("only "):
        value = f"[op(x)[{then.removeprefix('only ')}]]"
    elif then.startswith("grad of "):
        one = f"lambda given: [op(given)[{then.removeprefix('grad of ')}]]"
        value = f"gradients({one}, x, Replicate(), {mutates(sample.op)})"
    elif then in follow_ups.GRADS:
        value = follow_ups.GRADS[then].replace("writes", str(mutates(sample.op)))
    elif then in law_steps.LAWS:
        value = law_steps.LAWS[then].replace("packet", repr(follow_ups.packet(sample.op)))
        value = value.replace("arguments", repr(numeric_arguments(sample.call)))
    elif then in attention_steps.RINGS:
        value = attention_steps.RINGS[then]
    elif then == "base":
        value = "with_bases(op, x)"
    elif follow_ups.needs_results_only(then):
        lines = ["outs = [out for out in op(x) if isinstance(out, torch.Tensor)]"]
        value = f"flat([{follow_ups.follow_up(then).text} for x in outs])"
    leaves = written_leaves(sample.call)
    also = f" + [{', '.join(f'given_[{leaf}]' for leaf in leaves)}]" if leaves else ""
    if also:
        lines.insert(0, "given_ = x")
    return "\n".join(f"    {line}" for line in [*lines, f"return {value}{also}"])
