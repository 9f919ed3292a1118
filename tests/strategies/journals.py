"""Journals of a sweep, written by the rooms that write them, for what reads them."""

import json
from dataclasses import replace

from strategies.base import journal
from strategies.model.settings import Settings
from strategies.model.verdict import Crash, Verdict, WorkUnit
from strategies.validation import finding as findings
from strategies.validation.finding import RuleOutcome, TaskResult
from tests.strategies.gate_cases import HOSTILE, RAISES, finding

OPS = ["aten.add.Tensor", "aten.add_.Tensor", "aten.cumprod.default", "aten.gather.default", "aten.neg.default"]
SUM = "aten.add.Tensor: P(sum), P(sum) -> P(sum)"
SILENT = finding(kinds=(("real", "1 axis"), ("complex", "1 axis")), script="# run as {name}\nassert 1 < 2\n")
LOUD = finding("aten.gather.default", "S(1)", reason=RAISES, kinds=(("bool", "1 axis"),))
PROGRAM = finding(
    "aten.add.Tensor", "P(sum)", title="aten.add.Tensor on (2, 2): (S(0), R), R, then sum", mesh=(2, 2), ranks=4,
    kinds=(("real", "2 axes"),),
)  # fmt: skip
SUSPECT = finding(placements="S(1)", verdict=Verdict.SUSPECT, confirmed_on=None)


def begin(**more):
    asked = Settings(("add", "cumprod"), ranks=(2, 3), journal="").asked()
    trials = [["alone", [2]], ["meshes", [2, 2]]]
    return {"kind": "begin", "format": journal.FORMAT, "torch": "2.13.0", **asked, "ops": OPS, "trials": trials,
            "ignored": [], **more}  # fmt: skip


def validated(op, *, trial="alone", dtypes="real", mesh=(2,), **what):
    return findings.task_line(TaskResult(WorkUnit(op, trial, dtypes, mesh), **what), 0.5)


def settled(found):
    return findings.outcome_line(RuleOutcome(found.name, found))


def lines():
    crash = Crash("aten.neg.default", "neg(f64[2])", "the process died with SIGFPE", "Traceback")
    return [
        {"kind": "captured", "crashed": [], "refused": {"abs[complex64]: RuntimeError: no": 2}},
        validated("aten.add.Tensor", samples=2, tried=9, sound={SUM, "aten.add.Tensor: R, R -> R"}),
        validated("aten.add_.Tensor", samples=2, tried=3, sound={"aten.add_.Tensor: S(0), R -> S(0)"}),
        validated("aten.cumprod.default", samples=1, tried=4, sound={"aten.cumprod.default: S(5) -> S(5)"},
              untestable={"aten.cumprod.default: P(max) -> P(max)": "P(max) means nothing for this dtype"}),
        validated("aten.gather.default", samples=3, tried=5, skipped={"too large": 4}),
        validated("aten.neg.default", skipped={"no sample fits": 1}, crashed=[crash]),
        settled(SILENT), settled(LOUD), settled(PROGRAM), settled(SUSPECT),
        {"kind": "settled", "rule": "aten.gather.default: S(0), R -> S(0)", "verdict": "cleared"},
    ]  # fmt: skip


def hostile():
    bad = finding("my.bad.default", reason=HOSTILE, sample=(HOSTILE,), picture=HOSTILE, script=HOSTILE, origin=HOSTILE,
                  got=HOSTILE, want=HOSTILE)  # fmt: skip
    named = replace(
        bad, title=f"my.bad.default on {HOSTILE}", picture=f"argument 0, {HOSTILE[:40]}\n  rank 0  {HOSTILE[:40]}"
    )
    crash = Crash("my.bad.default", HOSTILE, HOSTILE, HOSTILE)
    return [
        settled(bad), settled(named),
        validated("my.bad.default", tried=1, untestable={f"my.bad.default: {HOSTILE}": HOSTILE}, crashed=[crash],
              skipped={HOSTILE: 2}),
    ]  # fmt: skip


def write(path, first, rest):
    path.write_text("".join(json.dumps(one) + "\n" for one in (first, *rest)))
    return path
