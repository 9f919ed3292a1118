"""The gate's result as JSON; its schema is strategies/schema/gate.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from localtensor.layout import short
from strategies.gate.baseline import BaselineEntry, GateResult, ReviewedFinding
from strategies.sweep.report.text_and_json import call_text, is_silent


def as_json(result: GateResult) -> str:
    """JSON text, all of it ASCII, stable but for `seconds`."""
    report = result.report
    body = {
        "schema": 1,
        "exit_code": result.exit_code,
        "torch": report.torch,
        "seed": report.seed,
        "ranks": list(report.ranks),
        "confirm": report.confirm,
        "counts": asdict(report.counts),
        "causes": {"new": len(result.new_causes), "accepted": len(result.accepted_causes)},
        "findings": [_finding(reviewed) for reviewed in result.findings],
        "gone": [_entry(entry) for entry in result.gone],
        "expired": [_entry(entry) for entry in result.expired],
        "crashed": [asdict(crash) for crash in report.crashed],
        "untried": [{"op": op, "reason": why} for op, why in result.untried],
        "choices": [asdict(choice) for choice in result.choices],
        "trouble": list(result.trouble),
        "notes": list(result.notes),
        "unseen": [_entry(entry) for entry in result.unseen],
        "remembered": sorted(result.remembered),
        "judged": sorted(result.judged),
        "seconds": round(result.seconds, 3),
    }
    return json.dumps(body, indent=1) + "\n"


def _entry(entry: BaselineEntry) -> dict[str, Any]:
    return {
        **asdict(entry.key),
        "reason": entry.reason,
        "expires": entry.expires.isoformat() if entry.expires else None,
    }


def _finding(reviewed: ReviewedFinding) -> dict[str, Any]:
    f = reviewed.finding
    return {
        "op": f.rule.op,
        "name": f.name,
        "inputs": [short(p) for p in f.rule.inputs],
        "outputs": [short(p) for p in f.rule.outputs],
        "mesh": list(f.mesh or (f.ranks,)),
        "verdict": f.verdict.value,
        "silent": is_silent(f),
        "call": call_text(f),
        "reason": f.reason,
        "confirmed_on": f.confirmed_on,
        "new": [asdict(key) for key in reviewed.new],
        "accepted": [_entry(entry) for entry in reviewed.accepted],
        "keys": [asdict(key) for key in reviewed.keys],
        "function": reviewed.function or None,
        "place": asdict(reviewed.place) if reviewed.place else None,
        "got": f.got or None,
        "want": f.want or None,
        "picture": f.picture or None,
        "repro": f.repro,
    }
