"""The HTML page of a report: one file with its style and its script in it, which opens without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localtensor._util.html_page import STYLE, render_page, xml_safe
from strategies.base.journal import Line
from strategies.model.cause import CauseRecord, definitions
from strategies.model.verdict import FAULTS, Finding, Report, Verdict, digest, mesh_kind
from strategies.sweep import aggregate
from strategies.sweep.report.html_pictures import GIVES, TAKES, TensorPicture, columns_of, families, parse_picture
from strategies.sweep.report.text_and_json import alike, by_reason, call_text, file_name, is_silent, ops_text

_DTYPES = re.compile(r"\b(f|bf|c|i|u|bool)\d*\[")
_CLASS = {"c": "complex", "f": "real", "bf": "real", "i": "integer", "u": "integer", "bool": "bool"}


@dataclass(frozen=True, slots=True)
class ShownFinding:
    """A finding as the page shows it: its anchor, the attributes that filters match, its picture, its script.

    `loudness` is "silent" or "loud" for a confirmed finding, else "".
    """

    finding: Finding
    anchor: str
    call: str
    loudness: str
    kind: str
    mesh: str
    dtypes: tuple[str, ...]
    meshes: tuple[str, ...]
    columns: tuple[str, ...]
    picture: tuple[TensorPicture, ...]
    terms: tuple[str, ...]
    script: str
    file: str


@dataclass(frozen=True, slots=True)
class ShownCause:
    """A cause as the page shows it: its anchor, "silent" or "loud", what happens in its case, and its findings.

    Of `groups`, each has findings that fail in one way and a line that names their overloads; "" for one that stands alone.
    """

    cause: CauseRecord
    anchor: str
    loudness: str
    happens: str
    findings: tuple[ShownFinding, ...]
    groups: tuple[tuple[str, tuple[ShownFinding, ...]], ...]


def show_causes(report: Report, found: Sequence[ShownFinding]) -> list[ShownCause]:
    """The causes with their findings, each in the order of the report."""
    by_name = {one.finding.name: one for one in found}
    order = {one.finding.name: place for place, one in enumerate(found)}
    shown = []
    for cause in report.causes:
        own = tuple(by_name[name] for name in sorted(cause.findings, key=order.__getitem__))
        silent = not cause.rank[0] if cause.rank else all(one.loudness == "silent" for one in own)
        happens = (cause.reason or own[0].finding.reason).splitlines()[0]
        groups = [[by_name[f.name] for f in group] for group in alike([one.finding for one in own], report)]
        folded = [(ops_text([o.finding for o in group]) if len(group) > 1 else "", tuple(group)) for group in groups]
        loudness = "silent" if silent else "loud"
        shown.append(ShownCause(cause, anchor(cause.id), loudness, happens, own, tuple(folded)))
    return shown


def show_finding(finding: Finding) -> ShownFinding:
    """The finding as the page shows it."""
    mesh = finding.mesh or (finding.ranks,)
    dtypes = tuple(dict.fromkeys(dtypes for dtypes, _ in finding.kinds)) or (class_of(finding.sample),)
    file = file_name(finding) if finding.script else ""
    loudness = "silent" if is_silent(finding) else "loud"
    return ShownFinding(
        finding,
        anchor(finding.name),
        call_text(finding),
        loudness if finding.verdict in FAULTS else "",
        "alone" if not finding.title else "meshes" if len(mesh) > 1 else "pairs",
        " × ".join(map(str, mesh)),
        dtypes,
        tuple(dict.fromkeys(kind for _, kind in finding.kinds)) or (mesh_kind(mesh),),
        columns_of(finding.rule),
        parse_picture(finding.picture, finding.reason),
        definitions(finding.script, finding.title),
        finding.script.replace("{name}", file),
        file,
    )


def anchor(name: str) -> str:
    """The finding's URL fragment, which changes only with the rule's name.

    >>> anchor("aten.add.Tensor: S(0), R -> S(0)").rpartition("-")[0]
    'aten.add.Tensor-S-0-R-S-0'
    """
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:80].strip('-')}-{digest([xml_safe(name)])[:8]}"


def class_of(sample: tuple[str, ...]) -> str:
    """The class of dtypes of a printed call, for journals that do not hold it.

    >>> class_of(("f64[2]", "i64[2]")), class_of(("[bool[1], bool[1]]",)), class_of(("3",))
    ('real', 'bool', 'real')
    """
    found = {_CLASS[kind] for kind in _DTYPES.findall(" ".join(sample))}
    return next((kind for kind in ("complex", "real", "integer", "bool") if kind in found), "real")


_HERE = Path(__file__).parents[2] / "templates"
SIGNS = {
    Verdict.UNSOUND: "✕", Verdict.REFUSED: "⊘", Verdict.SUSPECT: "!", Verdict.MISSING: "+", Verdict.SOUND: "✓", Verdict.UNTESTABLE: "?",
    Verdict.CRASHED: "⚡",
}  # fmt: skip
"""Each verdict has a sign as well as a colour."""


def page(begin: Line, lines: Sequence[Line], *, name: str, cut: str = "") -> tuple[str, Report]:
    """The page of a journal's lines, and the report that it shows.  `cut` is a sentence on a truncated last line."""
    report = aggregate.report(begin, lines)
    found = [show_finding(finding) for finding in report.findings]
    causes = show_causes(report, found)
    attributed = {one.finding.name for cause in causes for one in cause.findings}
    text = render_page(
        _HERE / "report.html.j2", (STYLE, _HERE / "report.css"), _HERE / "report.js",
        name=name, cut=cut, begin=begin, report=report, facts=_facts(begin, report), found=found,
        causes=causes, rest=[one for one in found if one.finding.name not in attributed],
        families=families(begin["ops"], lines, report), takes=TAKES, gives=GIVES,
        signs={verdict.value: sign for verdict, sign in SIGNS.items()},
        totals=[(verdict.value, int(getattr(report.counts, verdict.value))) for verdict in SIGNS],
        filters=_filters(found), untestable=by_reason((why, rule) for rule, why in report.untestable),
        programs=" and programs" if any(f.title and f.verdict in FAULTS for f in report.findings) else "",
        silent=sum(one.loudness == "silent" for one in found),
    )  # fmt: skip
    return text, report


def _facts(begin: Line, report: Report) -> list[tuple[str, str]]:
    """The settings of the run, by heading."""
    every = len(aggregate.planned_units(begin))
    requested = ", ".join(begin["patterns"]) or ("every registered overload" if begin["everything"] else begin["rules"])
    meshes = sorted({"×".join(map(str, mesh)) for _, mesh in begin["trials"]})
    facts = [
        ("torch", report.torch), ("asked for", requested), ("rules of", begin["rules"]), ("seed", str(report.seed)),
        ("ranks", ", ".join(map(str, report.ranks))), ("meshes", ", ".join(meshes)),
        ("trials", ", ".join(sorted({kind for kind, _ in begin["trials"]}))), ("dtypes", ", ".join(begin["dtypes"])),
        ("device", begin["device"]), ("confirmed on", report.confirm if report.confirm != "none" else "nothing"),
        ("units", f"{every - report.unfinished:,} of {every:,}"),
    ]  # fmt: skip
    shard = begin.get("shard")
    return [*facts, ("shard", f"{shard[0]} of {shard[1]}")] if shard else facts


def _filters(found: Sequence[ShownFinding]) -> list[tuple[str, str, list[str]]]:
    """The name, the label and the choices of each filter; only values that occur are choices."""
    every = [
        ("how", "Silent or loud", sorted({one.loudness for one in found} - {""})),
        ("dtype", "Dtypes", sorted({dtype for one in found for dtype in one.dtypes})),
        ("mesh", "Mesh", sorted({mesh for one in found for mesh in one.meshes})),
        ("trial", "Trial", sorted({one.kind for one in found})),
        ("takes", "Takes", [column for column in TAKES if any(column in one.columns for one in found)]),
    ]
    return [each for each in every if each[2]]
