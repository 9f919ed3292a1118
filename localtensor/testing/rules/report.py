"""What an author reads of a rule that is wrong: the case, what each rank held and gave, and three ways to repeat it."""

from __future__ import annotations

import textwrap
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.errors.base import refusal
from localtensor.layout.spec import short
from localtensor.testing.rules.case import Ran, RuleCase, Wrong, call_text, code
from localtensor.testing.rules.errors import WrongRule
from localtensor.testing.rules.rule import Rule
from localtensor.testing.rules.script import script

NAME = "wrong_rule.py"
"""What the script is called in its own text."""
MOST = 24
"""Elements of a tensor that are shown."""


def wrong_rule(case: RuleCase, ran: Ran, imports: str, judged: int = 1) -> WrongRule:
    """The error for that case, which is wrong."""
    rule, wrong = Rule.read(case.rule), ran.wrong or Wrong("it is right")
    args, kwargs = case.real
    remedy = "Correct the rule or the op, or ask it of fewer calls (where=, calls=, uneven=False)."
    said = refusal("assert_rule", "rule", f"{case.op}: {rule}", f"on {case.ranks} ranks, {wrong.problem}", remedy)
    example = f"@example(case={case!r})"
    splits = f", splits=({case.split},)" if any(isinstance(p, Partial) for p in rule.inputs) else ""
    listed = f"calls=[({code(tuple(case.args))}, {code(dict(case.kwargs))})], ranks=({case.ranks},){splits}"
    repeat = f"assert_rule({case.op!r}, {str(rule)!r}, {listed})"
    text = script(case, ran, NAME, imports)
    lines = [
        said, "", f"  the call  {call_text(case.op, args, kwargs, rule.inputs)} on {case.ranks} ranks"
        + (f", the smallest of {judged} tried" if judged > 1 else ""),
        *_held(ran, rule), *_results(wrong), "",
        "  again, above a test with @given(case=rule_cases(...)), or as one line:", f"    {example}", f"    {repeat}", "",
        f"  the same in plain torch, to be saved as {NAME} and run:", "", textwrap.indent(text, "    "),
    ]  # fmt: skip
    return WrongRule("\n".join(lines), case=case, script=text, example=example, repeat=repeat)


def _held(ran: Ran, rule: Rule) -> list[str]:
    lines = []
    for i, placement in enumerate(rule.inputs):
        lines.append(f"  tensor {i}  {shown(ran.inputs[i])}")
        if short(placement) != "R":
            lines.append(
                f"    {short(placement)}: " + "; ".join(f"rank {r} {shown(x)}" for r, x in enumerate(ran.held[i]))
            )
    return lines


def _results(wrong: Wrong) -> list[str]:
    who = "the ranks together" if wrong.rank is None else f"rank {wrong.rank}"
    if wrong.want is None:
        return []
    return [f"  got   {shown(wrong.got)} ({who})", f"  want  {shown(wrong.want)}"]


def shown(value: Any) -> str:
    """The value in a line."""
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = ", ".join(
        f"{v:.6g}" if not isinstance(v, bool | complex) else str(v) for v in value.flatten()[:MOST].tolist()
    )
    return f"[{numbers}{', ...' if value.numel() > MOST else ''}] of shape {tuple(value.shape)}"
