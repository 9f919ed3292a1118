"""The gate's result as SARIF 2.1.0.  Fingerprints identify results from run to run, independent of source lines."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from localtensor._util.html_page import xml_safe
from strategies.gate.baseline import FindingKey, GateResult, SourceLine, WrongFunction
from strategies.gate.decision import IGNORED
from strategies.gate.formats.wording import BASELINE, fingerprint, kinds_text, stale_remedy, what_happens
from strategies.sweep.report.text_and_json import is_silent

MOST = 4_999
"""GitHub shows fewer than 5,000 results of a run."""
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
SILENT, LOUD = "silently-wrong-sharding-rule", "loudly-wrong-sharding-rule"
UNCALLED, STALE = "registration-never-asked", "stale-baseline-entry"
_RULES = {
    SILENT: (
        "A sharding rule gives wrong results, and no rank raises.",
        "Under this rule the ranks' pieces do not make the op's result on whole tensors, and no rank raises.",
    ),
    LOUD: (
        "A sharding rule makes ranks raise, hang or die where the op itself works.",
        "The op accepts the call on whole tensors. Sharded by this rule, a rank raises, hangs or dies.",
    ),
    UNCALLED: (
        "A sharding rule is registered where torch never asks.",
        "torch asks an op's single-dim strategy first. Register there: register_single_dim_strategy.",
    ),
    STALE: (
        "An accepted finding no longer shows.",
        "The baseline accepts a wrong rule that is right by now. Remove the entry: localtensor gate --update.",
    ),
}


def sarif(result: GateResult, *, baseline: str = BASELINE, version: str = "") -> str:
    """SARIF text with fewer than 5,000 results: one for each rule function and each stale entry, new ones first.

    `baseline` is the location of results without a source line; `version` is this tool's.
    """
    place = SourceLine(baseline, 1)
    results = [_found(cause, "error", baseline) for cause in result.new_causes]
    results += [_result(STALE, entry.key, "error", stale_remedy(entry), place) for entry in result.gone]
    for cause in result.accepted_causes:
        reasons = dict.fromkeys(entry.reason for one in cause.findings for entry in one.accepted)
        suppressions = [{"kind": "external", "justification": xml_safe(reason)} for reason in reasons]
        results.append({**_found(cause, "note", baseline), "suppressions": suppressions})
    left = max(0, len(results) - MOST)
    driver: dict[str, Any] = {"name": "localtensor", "rules": [_rule(name) for name in _RULES]}
    if version:
        driver["version"] = version
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(result, left)],
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the repository."}}},
        "automationDetails": {"id": "localtensor-gate/"},
        "columnKind": "unicodeCodePoints",
        "results": results[:MOST],
        "properties": {"torch": xml_safe(result.report.torch), "seed": result.report.seed, "leftOut": left},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(name: str) -> dict[str, Any]:
    short, full = _RULES[name]
    return {
        "id": name,
        "name": "".join(map(str.title, name.split("-"))),
        "shortDescription": {"text": short},
        "fullDescription": {"text": full},
        "help": {"text": f"{full} What to do: run `localtensor gate` where you work; its output shows each finding."},
        "defaultConfiguration": {"level": "error"},
        "properties": {"precision": "very-high", "problem.severity": "error", "tags": ["correctness", "distributed"]},
    }


def _result(rule: str, key: FindingKey, level: str, text: str, place: SourceLine) -> dict[str, Any]:
    sign = fingerprint(key)
    where = {
        "artifactLocation": {"uri": quote(xml_safe(place.file)), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": place.line},
    }
    return {
        "ruleId": rule,
        "ruleIndex": list(_RULES).index(rule),
        "level": level,
        "message": {"text": xml_safe(text)},
        "locations": [
            {
                "physicalLocation": where,
                "logicalLocations": [{"fullyQualifiedName": xml_safe(key.op), "kind": "function"}],
            }
        ],
        # GitHub tells results apart by the first of these names, other readers by any
        "partialFingerprints": {"primaryLocationLineHash": f"{sign}:1", "localtensorKey/v1": sign},
        "properties": {name: xml_safe(value) for name, value in asdict(key).items()},
    }


def _found(cause: WrongFunction, level: str, baseline: str) -> dict[str, Any]:
    """The result for a rule function.  It is known by the first of its keys, and its text has all its forms."""
    first, keys = cause.findings[0], cause.keys
    place = first.place or SourceLine(baseline, 1)
    silent = any(is_silent(one.finding) for one in cause.findings)
    rule = UNCALLED if keys[0].rule == IGNORED else SILENT if silent else LOUD
    forms = [f"{f.finding.name} ({kinds_text(f.new or f.keys)}): {what_happens(f)}" for f in cause.findings]
    found = _result(rule, keys[0], level, "\n".join(forms), place)
    return {**found, "properties": {**found["properties"], "keys": [xml_safe(str(key)) for key in keys]}}


def _invocation(result: GateResult, left: int) -> dict[str, Any]:
    notes = [_note("error", f"{c.op}: {c.sample}: crashed: {c.error}") for c in result.report.crashed]
    notes += [_note("error", trouble) for trouble in result.trouble]
    notes += [_note("note", note) for note in result.notes]
    notes += [_note("note", f"{op} was not tried: {why}") for op, why in result.untried]
    if left:
        notes.append(_note("warning", f"{left} results are left out: GitHub takes fewer than 5,000."))
    body: dict[str, Any] = {"executionSuccessful": not result.trouble, "exitCode": result.exit_code}
    return {**body, "toolExecutionNotifications": notes} if notes else body


def _note(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": xml_safe(text)}}
