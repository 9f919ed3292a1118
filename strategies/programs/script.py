"""Scripts for torchrun that reproduce a finding (`localtensor validate --repro`): plain torch, without an import of ours."""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Mesh, StridedShard, is_standard, is_supported
from strategies.model.call_signature import arguments_text, numeric_arguments, parse_prior_call, with_indexed_tensors
from strategies.model.codec import (
    COMPARISON_FUNCTION,
    END_CODE,
    FLATTEN_FUNCTION,
    docstring_code,
    flatten_code,
    placements_code,
    slack_text,
    tensor_literal,
)
from strategies.model.oracle import OracleResult, mutates
from strategies.model.rule import PUBLIC, Program, Sample, placements_text, written_leaves
from strategies.model.settings import rules_module
from strategies.programs.public_api import table as public_api
from strategies.programs.public_api import varied_calls
from strategies.programs.run import follow_ups, law_steps, step_functions
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.step_functions import local_inputs_of
from strategies.torch_api.code_places import no_return_place
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
for want, got, atol in zip(wants, gots, {slack}, strict=True):
    wrong |= want is not None and differs(got, want, atol)
"""

_HELPERS = f"\n\n{FLATTEN_FUNCTION}\n\n{COMPARISON_FUNCTION}\n"


def case_script(case: Case, reason: str, name: str, rules: str = "") -> str:
    """The text of a script that reproduces a finding about one rule, with the values of the case.

    `rules` is the user's module or file that the script imports, for a rule of the user's own.
    """
    given = case.oracle.inputs, [(p or Replicate(),) for p in case.rule.inputs], case.held
    return (_SCRIPT + END_CODE).format(
        head=docstring_code(
            str(case.rule), f" gets this wrong on {case.ranks} ranks: {reason}", case.ranks, name, _CALL_PRINTS
        ),
        helpers=_HELPERS,
        module=_import_code(rules),
        inputs="\n".join(map(argument_code, itertools.count(), *given)),
        op=case.sample.op,
        plain=arguments_text(case.sample.call),
        distributed=arguments_text(case.sample.call, "d"),
        slack=tolerances_code(case.oracle),
        results=_results(case),
    )


def _import_code(rules: str) -> str:
    if not rules:
        return ""
    module, home = rules_module(rules, os.getcwd())
    comment = f"run it from the folder from which {rules} was validated" if rules != module else ""
    comment = comment or f"run it from the folder that holds {module}"
    path = f"\nsys.path.insert(0, {json.dumps(os.path.relpath(home))})  # {comment}"
    return f"{path}\nimport {module}  # noqa: E402, F401\n"


def _results(case: Case) -> str:
    """The two lists to compare: the op's results, and the arguments that it writes to without returning them."""
    leaves = written_leaves(case.sample.call)
    also = [f" + [{', '.join(f'{letter}{leaf}' for leaf in leaves)}]" if leaves else "" for letter in "xd"]
    return ", ".join(f"flat({name}){more}" for name, more in zip(("want", "got"), also, strict=True))


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


def tolerances_code(oracle: OracleResult) -> str:
    """The tolerance of each output as a list in Python: the largest finite slack, and a little of its scale."""
    shown = (slack_text(want, slack) for want, slack in zip(oracle.outputs, oracle.slack, strict=True))
    return f"[{', '.join(shown)}]"


def is_writable_case(case: Case) -> bool:
    """Whether the case can be a script: no placement of DTensor's own is among the inputs."""
    return all(map(is_standard, case.rule.inputs))


_PRINTS = "what DTensor makes of the program and what plain tensors give; exit code 1 if they differ."
LIMIT_CODE = """
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)  # the call does not return: this ends it, with exit code 1
"""
_PROGRAM_SCRIPT = """{head}

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

{functions}

def op(x):
    return flat(torch.ops.{op}({arguments}))


def program(x):
{body}


{inputs}
wants = program([{plain}])
gots = program([{distributed}])
wrong = False
for want, got, atol in zip(wants, gots, {slack}, strict=True):
    wrong |= want is not None and differs(got, want, atol)
"""


def program_script(
    program: Program, reason: str, name: str, rules: str = "", oracle: OracleResult | None = None
) -> str:
    """The text of a script that reproduces a finding about a program, with the program's values.

    `rules` is the user's module or file that the script imports, for a rule of the user's own.  Raises as
    `local_inputs_of` and `oracle_of_program` do, and ValueError for a program that is not `is_writable_program`.
    """
    if not is_writable_program(program):
        raise ValueError(f"{program} has a placement that cannot be written down")
    count, axes = len(program.sample.tensors), Mesh.of(*program.mesh).names
    given = program.sample.tensors, program.inputs, local_inputs_of(program)
    return (_PROGRAM_SCRIPT + END_CODE).format(
        head=docstring_code(
            str(program), f" gets this wrong on {program.ranks} ranks: {reason}", program.ranks, name, _PRINTS
        ),
        module=_import_code(rules) + (LIMIT_CODE if no_return_place(reason) else ""),
        mesh=program.mesh,
        names=axes,
        flatten=flatten_code(axes, axes) if program.flattened and len(axes) > 1 else "",
        helpers="\n\n".join(helper_functions(program.then)),
        functions=_HELPERS.strip(),
        op=program.sample.op,
        arguments=with_indexed_tensors(arguments_text(program.sample.call)),
        body=body_code(program),
        inputs="\n".join(map(argument_code, itertools.count(), *given)),
        plain=", ".join(f"x{i}" for i in range(count)),
        distributed=", ".join(f"d{i}" for i in range(count)),
        slack=tolerances_code(oracle or oracle_of_program(program)),
    )


def is_writable_program(program: Program) -> bool:
    """Whether every placement is plain or a strided shard."""
    return all(is_supported(p) for placements in program.inputs for p in placements)


def helper_functions(then: str) -> list[str]:
    """The source of our functions that the program uses: the script runs the same code as the validation."""
    if then.startswith(PUBLIC):
        return public_api.sources(follow_ups.follow_up(then).text)
    used = dict.fromkeys(function for step in follow_ups.steps_of(then) for function in _functions_of(step))
    if then in law_steps.LAWS:
        shared = f"import math\n\nOp = Callable[[Sequence[Any]], list[Any]]\nRISK = {law_steps.RISK}\n"
        return [shared, *map(inspect.getsource, used)]
    if then in step_functions.RINGS:
        imports = "import torch.nn.functional as F\nfrom torch.utils._python_dispatch import TorchDispatchMode\n"
        return [imports, *map(inspect.getsource, used)]
    return [inspect.getsource(function) for function in used]


def _functions_of(step: str) -> list[Any]:
    if step.startswith("grad of ") or step in follow_ups.GRADS:
        around = step_functions.trained if "trained(" in follow_ups.GRADS.get(step, "") else step_functions.gradients
        return [step_functions.spread, step_functions.uneven, step_functions.coming_gradients, around]
    if step in law_steps.LAWS:
        law = getattr(law_steps, law_steps.LAWS[step].partition("(")[0])
        helpers = [law_steps.copied, law_steps.random_run, law_steps.locals_of_ranks, step_functions.whole]
        return [*helpers, step_functions.spread, step_functions.uneven, law]
    if step in step_functions.RINGS:
        return [step_functions.whole, step_functions.uneven, step_functions.CpuKernels, step_functions.ring_attention]
    if step == "base":
        return [follow_ups.with_bases]
    if step.startswith("only ") or not follow_ups.needs_results_only(step):
        return []
    if step == follow_ups.STRIDES:
        return [varied_calls.in_order, varied_calls.strides_agree]
    text = follow_ups.follow_up(step).text
    every = (
        step_functions.whole, step_functions.laid, step_functions.written, step_functions.with_base_written,
        step_functions.through_local,
    )  # fmt: skip
    return [f for f in every if f"{f.__name__}(" in text]


def body_code(program: Program) -> str:
    """The body of `program(x)` in a script, for the tensors `x`: the op and its follow-up steps."""
    sample = program.sample
    *between, last = follow_ups.steps_of(program.then) or ("",)
    lines: list[str] = []
    if last.startswith("again("):
        given = with_indexed_tensors(arguments_text(parse_prior_call(sample.op, last)))
        if mutates(sample.op):
            given, lines = given.replace("x[", "given["), ["given = [t.clone() for t in x]"]
        lines = [*lines, f"torch.ops.{sample.op}({given})  # the call before"]
    if not last or follow_ups.needs_results_only(last):
        lines, value = _steps_code(follow_ups.steps_of(program.then))
    else:
        op = "chain" if between else "op"
        if between:
            steps, returned = _steps_code(between)
            lines = ["def chain(x):", *(f"    {line}" for line in [*steps, f"return {returned}"]), "", *lines]
        value = _around(sample, op, last)
    leaves = written_leaves(sample.call)
    also = f" + [{', '.join(f'given_[{leaf}]' for leaf in leaves)}]" if leaves else ""
    if also:
        lines.insert(0, "given_ = x")
    return "\n".join(f"    {line}" if line else "" for line in [*lines, f"return {value}{also}"])


def _around(sample: Sample, op: str, step: str) -> str:
    """The expression of a step around the whole call, which the script defines under the name `op`."""
    writes = str(mutates(sample.op))
    if alone := follow_ups.input_alone(step):
        return f"gradients({op}, x, Replicate(), {writes}, only={alone})"
    if step.startswith("grad of "):
        one = f"lambda given: [{op}(given)[{step.removeprefix('grad of ')}]]"
        return f"gradients({one}, x, Replicate(), {writes})"
    if step in follow_ups.GRADS:
        return follow_ups.GRADS[step].replace("(op,", f"({op},").replace("writes", writes)
    if step in law_steps.LAWS:
        value = law_steps.LAWS[step].replace("packet", repr(follow_ups.packet(sample.op)))
        return value.replace("arguments", repr(numeric_arguments(sample.call)))
    if step in step_functions.RINGS:
        return step_functions.RINGS[step]
    return f"with_bases({op}, x)" if step == "base" else f"{op}(x)"


def _steps_code(steps: Sequence[str]) -> tuple[list[str], str]:
    """The lines before the last of these steps on the results of `op(x)`, and the expression of its results."""
    lines, value = [], "op(x)"
    for step in steps:
        if step.startswith("only "):
            value = f"[{value}[{step.removeprefix('only ')}]]"
        else:
            lines.append(f"outs = [out for out in {value} if isinstance(out, torch.Tensor)]")
            value = f"flat([{follow_ups.follow_up(step).text} for x in outs])"
    return lines, value
