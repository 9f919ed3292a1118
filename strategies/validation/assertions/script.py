"""The report on a wrong rule: the error's message, and a program of plain torch that shows the wrong result."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import refusal_sentence
from localtensor.layout import StridedShard, is_inexact, shard_cut, short, split_axis
from strategies.model.call_signature import argument_text, arguments_text, with_indexed_tensors
from strategies.model.codec import FLATTEN_FUNCTION, slack_text, tensor_literal
from strategies.model.rule import written_leaves
from strategies.validation.assertions.case import CaseRun, RuleCase, result_placements
from strategies.validation.assertions.ops import Op
from strategies.validation.assertions.rule import AssertedRule, WrongRule, shard_dim
from strategies.validation.difference import ResultDifference, tensor_text

_SCRIPT = (
    '''"""{op}: {rule}

This rule is wrong on {ranks} ranks: {problem}

Run:  python {name}
It needs torch{and_more} only, and one process; exit code 1 as long as the rule is wrong.
"""

import sys
from math import inf, nan  # noqa: F401 (some values below are not finite)

import torch
{imports}

'''
    + FLATTEN_FUNCTION
    + '''

def call(given):
    """The op on these tensors: what it returns, and the tensors that it writes to without returning them."""
    x = [tensor.clone() for tensor in given]
    out = torch.ops.{op}({arguments})
    return flat(out) + [{written}]


# The tensors of the call, and what each rank holds of them.
{inputs}

wants = call([{wholes}])
gots = []
for rank in range({ranks}):
    try:
        gots.append(call([{pieces}]))
    except Exception as error:  # noqa: BLE001
        print(f"rank {{rank}} raises {{type(error).__name__}}: {{error}}\\nrank {{rank}} WRONG: on whole tensors it gives {{wants}}")
        sys.exit(1)

wrong = False


def compare(who, got, want, slack):
    global wrong
    if isinstance(want, torch.Tensor):
        same = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (want.shape, want.dtype)
        same = same and torch.allclose(got, want, rtol=0.0, atol=slack, equal_nan=True)
    else:
        same = type(got) is type(want) and (got == want or got != got and want != want)
    wrong |= not same
    print(f"{{who}} got  {{got}}\\n{{who}} want {{want}}\\n{{who}} {{'right' if same else 'WRONG'}}")


for rank in range({ranks}):
    if len(gots[rank]) != len(wants):
        print(f"rank {{rank}} WRONG: {{len(gots[rank])}} results, and {{len(wants)}} on whole tensors")
        sys.exit(1)
{comparisons}
sys.exit(1 if wrong else 0)
'''
)


_PARTS = """\
for rank in range(len(gots)):
    if gots[rank][{i}].shape != wants[{i}].shape:
        print(f"rank {{rank}} WRONG: result {i} has shape {{tuple(gots[rank][{i}].shape)}}, the total {{tuple(wants[{i}].shape)}}")
        sys.exit(1)
parts = torch.stack([gave[{i}] for gave in gots])
"""
"""The parts of a total, of which torch can stack only those of one shape."""


def script(case: RuleCase, ran: CaseRun, name: str, imports: str = "") -> str:
    """The text; `imports` are the lines that register the op."""
    rule, leaves = AssertedRule.read(case.rule), written_leaves(ran.sample.call)
    count = range(len(rule.inputs))
    wrong = ran.wrong.problem if ran.wrong else "it is right"
    return _SCRIPT.format(
        op=ran.sample.call.op,
        rule=rule,
        ranks=case.ranks,
        problem=wrong,
        name=name,
        imports=imports,
        and_more=" and the module of the op" if imports else "",
        arguments=with_indexed_tensors(arguments_text(ran.sample.call)),
        written=", ".join(f"x[{i}]" for i in leaves),
        inputs="\n".join(_input(ran, rule, i) for i in count),
        wholes=", ".join(f"x{i}" for i in count),
        pieces=", ".join(f"held{i}[rank]" for i in count),
        comparisons="\n".join(_comparisons(case, ran, result_placements(rule, len(ran.oracle.outputs), leaves))),
    )


def _input(ran: CaseRun, rule: AssertedRule, i: int) -> str:
    whole, placement, pieces = ran.oracle.inputs[i], rule.inputs[i], ran.held[i]
    replicas = isinstance(placement, Replicate)
    held = f"[x{i}] * {len(pieces)}" if replicas else f"[{', '.join(map(tensor_literal, pieces))}]"
    return f"x{i} = {tensor_literal(whole)}\nheld{i} = {held}  # {short(placement)}"


def _comparisons(case: RuleCase, ran: CaseRun, placed: Sequence[Placement | None]) -> list[str]:
    lines = []
    every = f"for rank in range({case.ranks}):"
    for i, want in enumerate(ran.oracle.outputs):
        slack = slack_text(want, ran.oracle.slack[i])
        placement = placed[i] if i < len(placed) else None
        if isinstance(want, Tensor) and isinstance(placement, Partial):
            total = _total(placement.reduce_op, want)
            lines += _PARTS.format(i=i).splitlines()
            lines.append(f'compare("result {i}, all ranks together,", {total}, wants[{i}], {slack})')
            continue
        picked = f"wants[{i}]"
        if isinstance(want, Tensor) and (dim := shard_dim(placement)) is not None and placement is not None:
            lines.append(f"rows = {_rows(want, placement, case.ranks)}  # of dim {dim}, for each rank")
            picked += f".index_select({dim}, torch.tensor(rows[rank], dtype=torch.long))"
        lines += [every, f'    compare(f"result {i}, rank {{rank}},", gots[rank][{i}], {picked}, {slack})']
    return lines


def _rows(want: Tensor, placement: Placement, ranks: int) -> list[list[int]]:
    """The rows of the sharded dim that each rank has."""
    dim, factor = shard_cut(placement) or (0, 1)
    flat = Shard(0) if factor == 1 else StridedShard(0, split_factor=factor)
    return [piece.tolist() for piece in split_axis(torch.arange(want.shape[dim]), flat, ranks)]


def _total(kind: str, want: Tensor) -> str:
    if want.dtype == torch.bool:
        return "parts.all(0)" if kind in ("min", "product") else "parts.any(0)"
    keep = f", dtype={want.dtype}"
    return {
        "sum": f"parts.sum(0{keep})",
        "avg": "parts.mean(0)" if is_inexact(want) else f"(parts.sum(0) / len(parts)).to({want.dtype})",
        "min": "parts.amin(0)",
        "max": "parts.amax(0)",
        "product": f"parts.prod(0{keep})",
    }[kind]


def imports_of(op: Op, caller: tuple[str, str]) -> str:
    """The lines that register the op: none for torch's own, else an import of the module that defines it.

    torch knows the module of ops made by `torch.library.custom_op`; any other op is taken to be registered by the
    calling module, `caller` (its name and file).
    """
    if op.name.split(".")[0] in ("aten", "prims"):
        return ""
    name, file = op.home() or caller
    parts = name.split(".") if name != "__main__" else [Path(file).stem]
    if not Path(file).is_file():
        return f"# import the module that registers {op.name} here\n"
    top = Path(file).resolve().parents[len(parts) - 1 + (Path(file).name == "__init__.py")]
    where = f"sys.path.insert(0, {str(top)!r})\n"
    return f"\n{where}import {'.'.join(parts)}  # noqa: E402, F401 (it registers {op.name})\n"


def caller(depth: int) -> tuple[str, str]:
    """The calling module's name and its file."""
    frame = sys._getframe(depth + 1)
    return str(frame.f_globals.get("__name__", "__main__")), frame.f_code.co_filename


NAME = "wrong_rule.py"
"""The script's name in its own text."""


def wrong_rule(case: RuleCase, ran: CaseRun, imports: str, judged: int = 1) -> WrongRule:
    """The error for that case: the call, each rank's pieces and result, and three ways to repeat it."""
    rule, wrong = AssertedRule.read(case.rule), ran.wrong or ResultDifference("it is right")
    remedy = "Correct the rule or the op, or ask it of fewer calls (where=, calls=, uneven=False)."
    problem = f"on {case.ranks} ranks, {wrong.problem}"
    sentence = refusal_sentence("assert_rule", "rule", f"{case.op}: {rule}", problem, remedy)
    example = f"@example(case={case!r})"
    splits = f", splits=({case.split},)" if any(isinstance(p, Partial) for p in rule.inputs) else ""
    listed = f"calls=[({argument_text(tuple(case.args))}, {argument_text(dict(case.kwargs))})], ranks=({case.ranks},){splits}"
    repeat = f"assert_rule({case.op!r}, {str(rule)!r}, {listed})"
    text = script(case, ran, NAME, imports)
    who = "the ranks together" if wrong.rank is None else f"rank {wrong.rank}"
    results = [f"  got   {tensor_text(wrong.got)} ({who})", f"  want  {tensor_text(wrong.want)}"] if wrong.shown else []
    call = f"{case.op}({', '.join(ran.sample.arguments(rule.inputs))})"
    smallest = f", the smallest of {judged} tried" if judged > 1 else ""
    again = "  again, above a test with @given(case=rule_cases(...)), or as one line:"
    lines = [sentence, "", f"  the call  {call} on {case.ranks} ranks{smallest}", *_held(ran, rule), *results, ""]
    lines += [again, f"    {example}", f"    {repeat}", ""]
    lines += [f"  the same in plain torch, to be saved as {NAME} and run:", "", textwrap.indent(text, "    ")]
    return WrongRule("\n".join(lines), case=case, script=text, example=example, repeat=repeat)


def _held(ran: CaseRun, rule: AssertedRule) -> list[str]:
    lines = []
    for i, placement in enumerate(rule.inputs):
        lines.append(f"  tensor {i}  {tensor_text(ran.oracle.inputs[i])}")
        if short(placement) != "R":
            pieces = "; ".join(f"rank {r} {tensor_text(x)}" for r, x in enumerate(ran.held[i]))
            lines.append(f"    {short(placement)}: {pieces}")
    return lines
