"""The picture of a plan as SVG: for light and dark backgrounds, without scripts and external resources."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from localtensor.layout import RowIntervals
from strategies.planner.text import ascii as drawing

SIDE, GAP, LABEL, LEFT, LINE = 56, 14, 13, 16, 18
"""In pixels: the side of a rank's box, the gap between boxes, a small label, the left margin, a line of text."""
LETTER = 7.3
"""The largest width of a letter in pixels."""
ROW, COLUMN = 40, int((SIDE + GAP) / LETTER)
"""The most letters beside a row of ranks, and above a column."""
MOST_RANKS = (6, 8)
"""The most ranks that are drawn below each other, and side by side."""
FINEST = 64
"""The number of cells of a dim that is held in more runs."""
STYLE = """
.ltp { color-scheme: light dark; background: #ffffff; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.ltp text { fill: #1b1f24; font-size: 12px; }
.ltp .step { font-weight: bold; }
.ltp .small { fill: #57606a; font-size: 11px; }
.ltp .whole { fill: #8b949e22; stroke: #6e7781; }
.ltp .value { fill: #0072b2; }
.ltp .part { fill: url(#ltp-part); stroke: #d55e00; }
.ltp .stripe { stroke: #d55e00; }
.ltp .talk { fill: none; stroke: #57606a; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
.ltp { background: #0d1117; }
.ltp text { fill: #e6edf3; }
.ltp .small { fill: #9da7b3; }
.ltp .value { fill: #56b4e9; }
.ltp .part { stroke: #e69f00; }
.ltp .stripe { stroke: #e69f00; }
.ltp .talk { stroke: #9da7b3; }
}
"""


def svg(stages: Sequence[drawing.PlanStage], title: str = "") -> str:
    """One panel for each stage, below each other. Dashed frames are the groups that communicate in the following step.

    >>> import torch
    >>> from localtensor.layout import Mesh, Spec, parse
    >>> svg([drawing.PlanStage(Spec(Mesh.of(dp=2), (parse("S(0)"),), (2, 6), torch.float32))])[:30]
    '<svg xmlns="http://www.w3.org/'
    """
    return ET.tostring(_svg_element(stages, title), encoding="unicode")


def html_page(stages: Sequence[drawing.PlanStage], title: str, words: str) -> str:
    """An HTML page with the picture, and the plan in words below it."""
    root = ET.Element("html", {"lang": "en"})
    head = ET.SubElement(root, "head")
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    ET.SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
    ET.SubElement(head, "title").text = _xml_safe(title)
    ET.SubElement(head, "style").text = ":root { color-scheme: light dark } svg { max-width: 100%; height: auto }"
    body = ET.SubElement(root, "body")
    body.append(_svg_element(stages, title))
    ET.SubElement(body, "pre").text = words
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _svg_element(stages: Sequence[drawing.PlanStage], title: str) -> ET.Element:
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "ltp", "role": "img"})
    ET.SubElement(root, "title").text = _xml_safe(title or "What each rank holds, step by step")
    ET.SubElement(root, "style").text = STYLE
    _stripes(root)
    dims = drawing.dims_drawn(stages)
    right, top = 0.0, 6.0
    if title:
        right, top = _text(root, LEFT, top, title, "step"), top + LINE + 4
    for place, stage in enumerate(stages):
        after = stages[place + 1].axes if place + 1 < len(stages) else ()
        reached, top = _panel(root, stage, after, dims, top)
        right = max(right, reached)
    right = max(right, _legend(root, top))
    size = (round(right + LEFT), round(top + LINE + 8))
    root.set("viewBox", f"0 0 {size[0]} {size[1]}")
    root.set("width", str(size[0]))
    root.set("height", str(size[1]))
    return root


def _panel(
    root: ET.Element, stage: drawing.PlanStage, after: Sequence[int], dims: Sequence[int], top: float
) -> tuple[float, float]:
    """Draws one stage; returns its right and lower ends."""
    spec, names, sizes = stage.spec, stage.spec.mesh.names, stage.spec.mesh.sizes
    right = 0.0
    if stage.step:
        right, top = _text(root, LEFT, top, f"\u2193 {stage.step}", "step"), top + LINE
    notes = (drawing.layout_text(spec), drawing.share_text(spec), drawing.undrawn_text(spec, dims))
    right, top = max(right, _text(root, LEFT, top, "   ".join(filter(None, notes)), "")), top + LINE
    lines = drawing.drawn_coordinates(sizes[:-1], MOST_RANKS[0])
    columns = drawing.drawn_indices(sizes[-1], MOST_RANKS[1])
    labels = [drawing.rank_label(names[:-1], sizes[:-1], line, ROW) for line in lines]
    left = LEFT + max(map(len, labels)) * LETTER + 6
    lefts, tops = _offsets(columns, left), _offsets(lines, top + LINE + 3)
    ends = (lefts[-1] + SIDE, tops[-1] + SIDE)
    for at, x in zip(columns, lefts, strict=True):
        label = "\u22ef" if at is None else drawing.rank_label(names[-1:], sizes[-1:], (at,), COLUMN)
        _text(root, x, top, label, "small")
    for line, words, y in zip(lines, labels, tops, strict=True):
        _text(root, LEFT, y + SIDE / 2 - LABEL / 2 if line else y - 4, "\u22ee" if line is None else words, "small")
        for at, x in zip(columns, lefts, strict=True):
            if line is not None and at is not None:
                _rank(root, drawing.share_of_rank(spec, (*line, at), dims), x, y, drawing.drawn_sizes(spec, dims))
    tops_of_lines = [y for y, line in zip(tops, lines, strict=True) if line is not None]
    lefts_of_columns = [x for x, at in zip(lefts, columns, strict=True) if at is not None]
    _group_frames(root, after, len(sizes), tops_of_lines, lefts_of_columns)
    return max(right, ends[0]), ends[1] + GAP + 6


def _offsets(shown: Sequence[object], start: float) -> list[float]:
    """The start of each box; ranks left out take less space."""
    found = []
    for one in shown:
        found.append(start)
        start += (SIDE if one is not None else LABEL) + GAP
    return found


def _rank(root: ET.Element, share: drawing.RankShare, x: float, y: float, size: tuple[int, int]) -> None:
    """A rank's box: the whole tensor, and on it the share of the rank."""
    _rect(root, "whole", x, y, SIDE, SIDE)
    for start, length in _pixel_runs(share.down, size[0]):
        for other, wide in _pixel_runs(share.across, size[1]):
            _rect(root, "part" if share.part else "value", x + other, y + start, wide, length)


def _pixel_runs(runs: RowIntervals, size: int) -> list[tuple[float, float]]:
    """The runs in pixels of a box; in cells where there are more runs than can be seen."""
    if len(runs) > FINEST:
        ends = {row * FINEST // size for start, length in runs for row in (start, start + length - 1)}
        runs, size = tuple((cell, 1) for cell in sorted(ends)), FINEST
    return [(start * SIDE / size, max(1.0, length * SIDE / size)) for start, length in runs]


def _group_frames(
    root: ET.Element, after: Sequence[int], axes: int, tops: Sequence[float], lefts: Sequence[float]
) -> None:
    """Frames around the ranks that communicate, where they form a row, a column, or the whole mesh."""
    rows, columns = [(y, y + SIDE) for y in tops], [(x, x + SIDE) for x in lefts]
    if not after or (axes > 2 and tuple(after) != (axes - 1,)):
        return
    if 0 in after and axes == 2:
        rows = [(tops[0], tops[-1] + SIDE)]
    if axes - 1 in after:
        columns = [(lefts[0], lefts[-1] + SIDE)]
    for y, down in rows:
        for x, across in columns:
            _rect(root, "talk", x - 4, y - 4, across - x + 8, down - y + 8).set("rx", "5")


def _legend(root: ET.Element, top: float) -> float:
    """The legend of the colours; returns its right end."""
    x = float(LEFT)
    for kind, words in (("value", "a value"), ("part", "a part of one, to be reduced"), ("whole", "not here")):
        _rect(root, kind, x, top, 12, 12)
        x = _text(root, x + 18, top - 2, words, "small") + 12
    _rect(root, "talk", x, top, 12, 12)
    return _text(root, x + 18, top - 2, "communicates next", "small")


def _stripes(root: ET.Element) -> None:
    definitions = ET.SubElement(root, "defs")
    size = {"width": "6", "height": "6", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    stripes = ET.SubElement(definitions, "pattern", {"id": "ltp-part", **size})
    ends = {"x1": "1", "y1": "0", "x2": "1", "y2": "6"}
    ET.SubElement(stripes, "line", {"class": "stripe", **ends, "stroke-width": "2.5"})


def _rect(root: ET.Element, kind: str, x: float, y: float, wide: float, high: float) -> ET.Element:
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{wide:.2f}", "height": f"{high:.2f}"}
    return ET.SubElement(root, "rect", {"class": kind, **place})


def _text(root: ET.Element, x: float, top: float, words: str, kind: str) -> float:
    """Writes text; returns its right end."""
    if not words:
        return x
    place = {"class": kind} if kind else {}
    text = ET.SubElement(root, "text", {**place, "x": f"{x:.1f}", "y": f"{top + 12:.1f}", "xml:space": "preserve"})
    text.text = _xml_safe(words)
    return x + len(words) * LETTER


def _xml_safe(words: str) -> str:
    """The text without characters that XML cannot hold."""
    return "".join(sign if sign.isprintable() else "?" for sign in words)
