import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from strategies.model.cause import RIGHT, causes_line
from strategies.model.verdict import Counts, Report, Verdict
from strategies.sweep.report.html_page import anchor, class_of, page, show_causes, show_finding
from tests.strategies.gate_cases import HOSTILE, finding
from tests.strategies.journals import LOUD, OPS, PROGRAM, SILENT, begin, hostile, lines, settled, validated
from tests.strategies.model.test_cause import SCAN


class Reader(HTMLParser):
    """The tags of a page with their attributes, and its text, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.raw = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.raw = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.raw = ""

    def handle_data(self, data):
        if not self.raw:
            self.words.append(data)

    def having(self, name):
        return [attrs[name] for _, attrs in self.tags if name in attrs]


def read(told=None, **more):
    return Reader(page(begin(**more), lines() if told is None else told, name="my run.jsonl")[0])


def text_of(reader):
    return " ".join(" ".join(reader.words).split())


def test_the_head_says_what_run_it_was():
    said = text_of(read())
    assert "3 sharding rules and programs give wrong results" in said and "2 of them silently" in said
    assert "21 rule instances on 8 samples of 4 overloads, from my run.jsonl" in said
    for fact in (
        f"torch {torch.__version__.split('+')[0]}",
        "asked for add, cumprod",
        "seed 0",
        "ranks 2, 3",
        "meshes 2, 2×2",
        "confirmed on gloo",
    ):
        assert fact in said
    assert "units 5 of 40" in said and "Not finished. 35 units of the plan are not in this journal" in said


def test_a_shard_and_ignored_registrations_and_a_cut_line_are_reported():
    said = text_of(read(shard=[2, 4], ignored=[["aten.sub.Tensor", "never asked"]]))
    assert "shard 2 of 4" in said and "Ignored registrations." in said and "aten.sub.Tensor" in said
    assert "Cut. x.jsonl: its last line was cut." in text_of(
        Reader(page(begin(), lines(), name="x", cut="x.jsonl: its last line was cut")[0])
    )
    assert "Ignored" not in text_of(read()) and "Cut." not in text_of(read())


@pytest.mark.parametrize(
    ("told", "more", "title"),
    [
        ([], {}, "Nothing was tested"), (lines()[1:3], {}, "No wrong rule so far"),
        (lines()[1:2], {"ops": []}, "No wrong rule found"), ([*lines()[1:2], lines()[6]], {}, "1 sharding rule gives wrong"),
    ],
)  # fmt: skip
def test_the_title_promises_no_more_than_was_tried(told, more, title):
    assert title in text_of(read(told, **more))


def test_every_overload_and_every_finding_is_there():
    reader = read()
    rows = [attrs["data-op"] for tag, attrs in reader.tags if tag == "tr" and "data-op" in attrs]
    assert sorted(rows) == OPS
    found = [attrs for tag, attrs in reader.tags if tag == "details" and "finding" in attrs.get("class", "")]
    assert [(f["data-v"], f["data-how"], f["data-trial"]) for f in found] == [
        ("unsound", "silent", "meshes"), ("unsound", "silent", "alone"), ("unsound", "loud", "alone"),
        ("suspect", "", "alone"),
    ]  # fmt: skip
    said = text_of(reader)
    for text in (SILENT.reason, LOUD.reason, "cumprod(f64[2], -1)", "# run as cumprod_default__S0__S0__2ranks.py"):
        assert text in said


def test_crashed_untestable_and_skipped_are_reported_with_their_reasons():
    said = text_of(read())
    for text in ("the process died with SIGFPE", "P(max) means nothing for this dtype", "abs[complex64]: RuntimeError: no",
                 "aten.gather.default: too large (4 samples)", "no sample fits"):  # fmt: skip
        assert text in said


def test_rules_that_no_validation_can_tell_stand_by_their_reasons_the_most_common_first_then_by_name():
    reasons = {"z": "a reason of one", "a": "no reason of one", "m": "shared by two", "n": "shared by two"}
    told = [
        validated(
            "aten.add.Tensor", tried=1, untestable={f"aten.add.Tensor: {rule}": why for rule, why in reasons.items()}
        )
    ]
    said = text_of(read(told))
    places = [said.index(why) for why in ("shared by two", "a reason of one", "no reason of one")]
    assert places == sorted(places)


def test_ids_are_unique_and_links_within_the_page_lead_somewhere():
    reader = read()
    ids = reader.having("id")
    links = {link[1:] for link in reader.having("href")}
    assert len(ids) == len(set(ids)) and links and links <= set(ids)


def test_nothing_is_fetched():
    text = page(begin(), lines(), name="x")[0]
    reader = Reader(text)
    assert reader.having("src") == [] and all(link.startswith("#") for link in reader.having("href"))
    assert (
        "@import" not in text and "url(" not in text and "//" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    )
    assert "default-src 'none'" in text


def test_hostile_text_stays_text():
    plain, bad = read(), read([*lines(), *hostile()])
    allowed = {tag for tag, _ in plain.tags} | {"pre"}
    assert {tag for tag, _ in bad.tags} <= allowed
    assert [tag for tag, _ in bad.tags].count("script") == 1
    names = {name for _, attrs in bad.tags for name in attrs}
    assert names <= {name for _, attrs in plain.tags for name in attrs}
    assert text_of(bad).count("<script>alert(1)</script>") >= 10
    assert "\x00" not in text_of(bad) and "\ud800" not in text_of(bad)


def test_a_hostile_name_of_a_file_or_of_the_run_stays_text():
    text = page(begin(patterns=[HOSTILE], ignored=[[HOSTILE, HOSTILE]]), lines(), name=HOSTILE)[0]
    assert [tag for tag, _ in Reader(text).tags].count("script") == 1
    assert "<script>alert" not in text


def test_same_journal_same_page():
    assert page(begin(), lines(), name="x") == page(begin(), lines(), name="x")


@pytest.mark.slow
def test_a_full_sweep_makes_a_page_of_less_than_five_megabytes():
    ops = [f"aten.op_{i}.default" for i in range(1_300)]
    script = "# a line of a script that shows a wrong result\n" * 75
    units = [validated(op, tried=1, sound={f"{op}: S({d}), R -> S({d})" for d in range(8)}) for op in ops]
    found = [settled(finding(op, picture=SILENT.picture, script=script)) for op in ops[:550]]
    text, report = page(begin(ops=ops), [*units, *found], name="full.jsonl")
    assert (report.counts.sound, report.counts.unsound) == (10_400, 550)
    assert 1_000_000 < len(text.encode()) < 5_000_000


def test_a_finding_on_one_axis():
    one = show_finding(SILENT)
    assert (one.kind, one.mesh, one.loudness, one.dtypes, one.meshes, one.columns) == (
        "alone", "2", "silent", ("real", "complex"), ("1 axis",), ("S(0)",),
    )  # fmt: skip
    assert one.call == "cumprod(f64[2], -1)" and len(one.picture) == 2
    assert one.file == "cumprod_default__S0__S0__2ranks.py" and one.script.startswith(f"# run as {one.file}\n")


def test_a_program_on_two_axes_and_one_that_raises():
    one = show_finding(PROGRAM)
    assert (one.kind, one.mesh, one.meshes, one.file) == ("meshes", "2 × 2", ("2 axes",), "")
    assert show_finding(LOUD).loudness == "loud"
    assert show_finding(finding(title="aten.cumprod.default on (2,): S(0), then sum")).kind == "pairs"
    for verdict in (Verdict.MISSING, Verdict.SUSPECT):
        assert show_finding(finding(verdict=verdict)).loudness == ""


@pytest.mark.parametrize(
    "what", ["rank 0, 2 raises E: x", "every rank raises E: x", "hangs: x", "the process of rank 1 dies"]
)
def test_what_a_user_is_shown_is_raising(what):
    assert show_finding(finding(reason=what)).loudness == "loud"


def test_without_kinds_the_call_and_the_mesh_say_them():
    one = show_finding(finding(sample=("c64[2]",), mesh=(2, 2)))
    assert (one.dtypes, one.meshes) == (("complex",), ("2 axes",))


def test_an_anchor_stays_and_is_its_own():
    assert anchor(SILENT.name) == "aten.cumprod.default-S-0-S-0-" + anchor(SILENT.name)[-8:]
    names = ["a: S(0) -> S(0)", "a: S 0 -> S(0)", "a: S(0), S(0)", "", HOSTILE]
    assert len({anchor(name) for name in names}) == len(names)
    for name in names:
        assert not set(anchor(name)) & set(" \"'<>&#%\n")


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (("i64[2]", "bool[2]"), "integer"),
        (("u8[3]",), "integer"),
        (("bf16[2]",), "real"),
        (("[c64[1]]", "f64[]"), "complex"),
    ],
)
def test_the_class_of_a_call(sample, told):
    assert class_of(sample) == told


# Causes.


def with_causes(*records):
    return [*lines(), causes_line(records, "2.13.0", None)]


def test_causes_come_first_with_their_findings_below_them_and_the_rest_after():
    first = replace(SCAN, findings=(SILENT.name, PROGRAM.name))
    second = replace(SCAN, id="scan_2", key=("two",), words="an error", findings=(LOUD.name,), rank=(1, 0, 0, 1))
    found = read(with_causes(second, first))
    marked = [
        attrs
        for tag, attrs in found.tags
        if tag == "details" and attrs.get("class", "").split()[0] in ("cause", "finding")
    ]
    order = [(attrs["class"].split()[0], attrs.get("data-op", "")) for attrs in marked]
    assert [kind for kind, _ in order] == ["cause", "finding", "finding", "cause", "finding", "finding"]
    assert order[4] == ("finding", LOUD.rule.op) and [a["data-how"] for a in marked if a["class"] == "cause"] == [
        "silent",
        "loud",
    ]
    said = text_of(found)
    assert said.index("Causes 2 causes") < said.index("Overloads by placement") < said.index("Findings without a cause")
    assert len(found.having("id")) == len(set(found.having("id")))


def test_a_cause_says_where_what_and_how_it_was_found():
    given = replace(
        SCAN, findings=(SILENT.name,), tried=(("the function replaced by replicas", 1),), why="it is odd",
        versions=(("2.12.1", "present"), ("2.15.0", "fixed")),
    )  # fmt: skip
    said = text_of(read(with_causes(given)))
    for words in (
        "scan_strategy shards with wrong values, for cumprod got 1, expected 2", "torch/x.py:7",
        "present in torch 2.12.1 and 2.13.0; not 2.15.0 (fixed)", "aten.cumprod.default", "silent, everyday",
        "With the function replaced by replicas, its one finding is right. It is odd.", "x = 1",
        "prints DTensor gives 1 right is 2", "python scan_1.py", "Its script shows it on real gloo processes, torch 2.13.0.",
    ):  # fmt: skip
        assert words in said, words


def test_findings_that_fail_alike_are_folded_into_one_line_and_all_of_them_are_below_it():
    names = [f"aten._fused_{name}_.default" for name in ("adam", "adamw", "sgd", "adagrad")]
    found = [finding(op) for op in names]
    report = Report(
        "2.13.0",
        0,
        (2,),
        "gloo",
        Counts(),
        tuple(found),
        causes=(replace(SCAN, findings=tuple(f.name for f in found)),),
    )
    ((line, group),) = show_causes(report, [show_finding(one) for one in found])[0].groups
    assert line == f"4 findings of {', '.join(names)}" and [one.finding for one in group] == found
    body = read(
        [line for line in lines() if line["kind"] != "settled"]
        + [settled(one) for one in found]
        + [causes_line(report.causes, "2.13.0", None)]
    )
    folds = [i for i, (tag, attrs) in enumerate(body.tags) if attrs.get("class") == "fold"]
    assert len(folds) == 1 and "4 findings of aten._fused_" in text_of(body)
    assert sum("finding" in attrs.get("class", "").split() for _, attrs in body.tags[folds[0] :]) >= 4


def test_a_cause_that_no_longer_reproduces_says_so_on_the_page():
    gone = replace(SCAN, findings=(SILENT.name,), verdict=RIGHT, ran_on="2.15.0")
    said = text_of(read(with_causes(gone)))
    assert gone.run_text in said and "Its script shows it" not in said


def test_without_causes_there_is_no_such_section():
    said = text_of(read())
    assert "Causes" not in said and "Findings without a cause" not in said and "Findings 4 findings" in said


def test_hostile_words_of_a_cause_are_text():
    bad = replace(SCAN, findings=(SILENT.name,), words=HOSTILE, function=HOSTILE, file=HOSTILE, lines=HOSTILE, prints=HOSTILE,
                  right=HOSTILE, script=HOSTILE, why=HOSTILE, call=HOSTILE, reason=HOSTILE, tried=((HOSTILE, 1),))  # fmt: skip
    found = read(with_causes(bad))
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert text_of(found).count("<script>alert(1)</script>") >= 10
