"""A finding as the page shows it: its anchor, what filters ask, its picture, its script."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strategies.gate.formats.wording import printable
from strategies.model.verdict import Finding, Verdict
from strategies.model.work_unit import digest, mesh_kind
from strategies.sweep.report.html_diagram import Part, parts
from strategies.sweep.report.html_heatmap import columns_of
from strategies.sweep.report.text_and_json import call_text, file_name, silent

_DTYPES = re.compile(r"\b(f|bf|c|i|u|bool)\d*\[")
_CLASS = {"c": "complex", "f": "real", "bf": "real", "i": "integer", "u": "integer", "bool": "bool"}


@dataclass(frozen=True, slots=True)
class Shown:
    """One finding, in words and attributes."""

    finding: Finding
    anchor: str
    call: str
    loudness: str
    trial: str
    mesh: str
    dtypes: tuple[str, ...]
    meshes: tuple[str, ...]
    columns: tuple[str, ...]
    picture: tuple[Part, ...]
    script: str
    file: str


def shown(finding: Finding) -> Shown:
    """All that the page says of a finding."""
    mesh = finding.mesh or (finding.ranks,)
    dtypes = tuple(dict.fromkeys(dtypes for dtypes, _ in finding.kinds)) or (class_of(finding.sample),)
    file = file_name(finding) if finding.script else ""
    return Shown(
        finding, anchor(finding.name), call_text(finding), _loudness(finding),
        "alone" if not finding.title else "meshes" if len(mesh) > 1 else "pairs",
        " × ".join(map(str, mesh)), dtypes, tuple(dict.fromkeys(kind for _, kind in finding.kinds)) or (mesh_kind(mesh),),
        columns_of(finding.rule), parts(finding.picture, finding.reason), finding.script.replace("{name}", file), file,
    )  # fmt: skip


def _loudness(finding: Finding) -> str:
    """Known only of what real ranks have done."""
    if finding.verdict is not Verdict.UNSOUND:
        return ""
    return "silent" if silent(finding) else "loud"


def anchor(name: str) -> str:
    """A fragment that stays as long as the rule keeps its name.

    >>> anchor("aten.add.Tensor: S(0), R -> S(0)").rpartition("-")[0]
    'aten.add.Tensor-S-0-R-S-0'
    """
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:80].strip('-')}-{digest([printable(name)])[:8]}"


def class_of(sample: tuple[str, ...]) -> str:
    """The class of dtypes of a call as it is printed, where a journal does not say on which it was suspected.

    >>> class_of(("f64[2]", "i64[2]")), class_of(("[bool[1], bool[1]]",)), class_of(("3",))
    ('real', 'bool', 'real')
    """
    found = {_CLASS[kind] for kind in _DTYPES.findall(" ".join(sample))}
    return next((kind for kind in ("complex", "real", "integer", "bool") if kind in found), "real")
