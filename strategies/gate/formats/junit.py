"""The gate's result as JUnit XML: a test case for each overload.  The form is that of strategies/schema/junit.xsd."""

from __future__ import annotations

from collections import defaultdict
from xml.etree import ElementTree as ET

from localtensor._util.html_page import xml_safe
from strategies.gate.baseline import GateResult
from strategies.gate.formats.wording import kinds_text, stale_remedy, what_happens

GATE = "localtensor.gate"
_TAGS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit(result: GateResult) -> str:
    """JUnit XML text: a failure for a new or gone finding, an error for a crash, skipped for an untested overload.

    >>> from strategies.model.verdict import Counts, Report
    >>> text = junit(GateResult(Report("2.13.0", 0, (2,), "gloo", Counts()), judged=("aten.add.Tensor",)))
    >>> '<testcase classname="aten.add" name="aten.add.Tensor" />' in text
    True
    """
    cases = _cases(result)
    suite = ET.Element("testsuite", name=GATE, tests=str(len(cases)), time=f"{result.seconds:.3f}")
    for tag, plural in _TAGS.items():
        suite.set(plural, str(sum(outcome is not None and outcome[0] == tag for outcome in cases.values())))
    properties = ET.SubElement(suite, "properties")
    facts = {"torch": result.report.torch, "seed": str(result.report.seed), "exit_code": str(result.exit_code)}
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=name, value=xml_safe(value))
    for op, outcome in cases.items():
        group = GATE if op == "run" else op.rpartition(".")[0]
        case = ET.SubElement(suite, "testcase", classname=xml_safe(group), name=xml_safe(op))
        if outcome is not None:
            tag, message, text = outcome
            node = ET.SubElement(case, tag, message=xml_safe(message))
            if tag != "skipped":
                node.set("type", "gate" if tag == "failure" else "crash")
            node.text = xml_safe(text) or None
    root = ET.Element("testsuites", {name: suite.attrib[name] for name in ("tests", "failures", "errors", "time")})
    root.append(suite)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _cases(result: GateResult) -> dict[str, tuple[str, str, str] | None]:
    """For each overload None if it is clean, or the tag, the message and the text of its worst outcome."""
    cases: dict[str, tuple[str, str, str] | None] = dict.fromkeys(result.judged)
    cases |= dict.fromkeys(reviewed.finding.rule.op for reviewed in result.findings)
    cases |= {op: ("skipped", why, "") for op, why in result.untried}
    crashed: dict[str, list[str]] = defaultdict(list)
    for crash in result.report.crashed:
        crashed[crash.op].append("\n".join(filter(None, (f"{crash.sample}: {crash.error}", crash.trace))))
    cases |= {op: ("error", texts[0].partition("\n")[0], "\n\n".join(texts)) for op, texts in crashed.items()}
    wrong = _wrong(result)
    cases |= {op: ("failure", texts[0].partition("\n")[0], "\n\n".join(texts)) for op, texts in wrong.items()}
    if result.trouble:
        cases["run"] = ("error", result.trouble[0], "\n".join(result.trouble))
    return dict(sorted(cases.items()))


def _wrong(result: GateResult) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = defaultdict(list)
    for reviewed in result.new:
        found = reviewed.finding
        paragraphs = (f"{found.name} ({kinds_text(reviewed.new)})", what_happens(reviewed), found.picture)
        wrong[found.rule.op].append("\n".join(filter(None, paragraphs)))
    for entry in result.gone:
        wrong[entry.key.op].append(stale_remedy(entry))
    return wrong
