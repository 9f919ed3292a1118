from xml.etree import ElementTree as ET

import pytest

from strategies.planner.search.api import plan
from strategies.planner.text.ascii import PlanStage
from strategies.planner.text.parser import read
from strategies.planner.text.svg import SIDE, html_page, svg
from tests.strategies.planner.text.test_ascii import TEXTS

SVG = "{http://www.w3.org/2000/svg}"


def rects(text, kind):
    found = ET.fromstring(text).iter(f"{SVG}rect")
    return [
        {name: float(rect.get(name)) for name in ("x", "y", "width", "height")}
        for rect in found
        if rect.get("class") == kind
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_well_formed_and_nothing_lies_outside_or_runs_or_is_fetched(text):
    drawn = svg(plan(*read(text)).stages, text)
    root = ET.fromstring(drawn)
    assert root.tag == f"{SVG}svg" and text in drawn.replace("&gt;", ">")
    wide, high = float(root.get("width")), float(root.get("height"))
    for kind in ("whole", "value", "part", "talk"):
        for rect in rects(drawn, kind):
            assert rect["x"] >= 0 and rect["x"] + rect["width"] <= wide
            assert rect["y"] >= 0 and rect["y"] + rect["height"] <= high
    for words in root.iter(f"{SVG}text"):
        assert float(words.get("x")) + 6 * len(words.text) <= wide
    names = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert names <= {"svg", "title", "style", "defs", "pattern", "line", "rect", "text"}
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "") and "script" not in drawn
    assert "prefers-color-scheme: dark" in drawn


def area(text, kind):
    """In whole boxes; the key has one of 12 x 12 of each kind."""
    return sum(rect["width"] * rect["height"] for rect in rects(text, kind)[:-1]) / SIDE**2


def test_as_much_is_filled_as_the_ranks_hold():
    src, dst = read("f32[8,8] @ dp=2,tp=2: S(0),S(1) -> R,S(0)")
    assert area(svg([PlanStage(src)]), "value") == pytest.approx(1)
    assert area(svg([PlanStage(dst)]), "value") == pytest.approx(2)
    parts, _ = read("f32[8,8] @ dp=2,tp=2: S(0),P(sum) -> R,R")
    assert area(svg([PlanStage(parts)]), "part") == pytest.approx(2) and area(svg([PlanStage(parts)]), "value") == 0
    assert len(rects(svg([PlanStage(src)]), "whole")) == 4 + 1


@pytest.mark.parametrize(("axes", "frames"), [((0,), 3), ((1,), 2), ((0, 1), 1), ((), 0)])
def test_frames_are_around_those_who_talk_next(axes, frames):
    src, dst = read("f32[6,6] @ dp=2,tp=3: S(0),S(1) -> R,R")
    drawn = svg([PlanStage(src), PlanStage(dst, "a step", axes)])
    assert len(rects(drawn, "talk")) == frames + 1


def test_a_dim_in_thousands_of_blocks_is_drawn_as_cells():
    src, _ = read("f32[100000] @ dp=2: SS(0,4096) -> R")
    assert len(rects(svg([PlanStage(src)]), "value")) <= 2 * 64 + 1


def test_what_is_no_xml_in_a_name_stays_outside():
    src, _ = read("f32[6] @ dp=2: S(0) -> R")
    drawn = svg([PlanStage(src)], "<script>&\x00")
    assert "<script>" not in drawn and "\x00" not in drawn
    assert "<script>&?" in "".join(ET.fromstring(drawn).itertext())


def test_a_page_holds_the_picture_and_the_plan():
    made = plan(*read("f32[6] @ dp=2: S(0) -> R"))
    text = html_page(made.stages, "a < b", str(made))
    assert text.startswith("<!doctype html>") and "<title>a &lt; b</title>" in text and "<script" not in text
    assert str(made).replace(">", "&gt;") in text and text.count("<svg") == 1


def test_words_above_the_boxes_never_run_into_each_other():
    for name, size in (("tp", 1024), ("experts", 128), ("data_parallel_and_more", 1024), ("x" * 200, 2)):
        spec, _ = read(f"f32[64] @ {name}={size}: S(0) -> R")
        root = ET.fromstring(svg([PlanStage(spec)]))
        above = [text for text in root.iter(f"{SVG}text") if text.get("class") == "small"][: min(size, 8)]
        ends = [float(text.get("x")) + 6.7 * len(text.text) for text in above]  # 11 pixels high, 6.7 wide
        begins = [*[float(text.get("x")) for text in above[1:]], float(root.get("width"))]
        assert all(end <= begin for end, begin in zip(ends, begins, strict=True)), (name, ends, begins)
