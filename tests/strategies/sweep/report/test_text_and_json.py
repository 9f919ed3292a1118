import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console
from torch.distributed.tensor import Partial, Replicate, Shard

import strategies
from localtensor.layout.spec import parse
from strategies.model.rule import Program, Rule
from strategies.model.verdict import Counts, Crash, Finding, LeftOut, Report, Verdict
from strategies.sweep.report import text_and_json
from tests.strategies.cases import numbers, sample
from tests.strategies.model.test_cause import SCAN

SCHEMA = json.loads((Path(strategies.__file__).parent / "schema/report.json").read_text())


def finding(verdict=Verdict.UNSOUND, op="aten.cumprod.default", inputs="S(1)", outputs="S(1)", **more):
    rule = Rule(op, tuple(map(parse, inputs.split())), tuple(map(parse, outputs.split())))
    real = "gloo" if verdict is Verdict.UNSOUND else None
    facts = Finding(
        rule, 2, verdict, "differs at [0]: got 1, expected 2", ("f64[2,4]", "-1"), "cumprod #1", real, "[1]", "[2]"
    )
    return replace(facts, **more)


WRONG = finding(
    picture="argument 0, S(1)\n  rank 0  [1, 2] of shape (2,)", script="# {name}\n", kinds=(("real", "1 axis"),)
)
FULL = Report(
    "2.13.0", 7, (2, 3), "gloo", Counts(sound=3, unsound=1, suspect=1, missing=1, crashed=1, instances=9),
    (WRONG, finding(Verdict.SUSPECT, inputs="S(0) R", got=""), finding(Verdict.MISSING, outputs="P(sum)", got="", want="")),
    (Crash("aten.sort.default", "sort(f64[2])", "KeyError: 'x'", "Traceback ..."),),
    (("aten.rand.default: R -> R", "no reason"),), (("aten.add.Tensor: too many", 4),),
    (("aten.sub.Tensor", "never asked"),), (("aten.neg.default", "no call of it"),), (("trials", 0.5),),
)  # fmt: skip
EMPTY = Report("2.13.0", 0, (2,), "none", Counts())


def check_schema(body):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(body)


def body_of(report):
    return json.loads(text_and_json.as_json(report))


def shown(report, width=140):
    sink = io.StringIO()
    text_and_json.show(report, Console(file=sink, width=width))
    return sink.getvalue()


# JSON.


@pytest.mark.parametrize("report", [FULL, EMPTY], ids=["full", "empty"])
def test_json_obeys_the_schema(report):
    body = body_of(report)
    check_schema(body)
    assert {"torch", "seed", "ranks", "counts", "findings"} <= set(body)


def test_a_finding_is_written_in_short_form():
    assert body_of(FULL)["findings"][0] == {
        "op": "aten.cumprod.default", "inputs": ["S(1)"], "outputs": ["S(1)"], "mesh": [2], "title": None, "verdict": "unsound",
        "confirmed_on": "gloo", "reason": "differs at [0]: got 1, expected 2", "sample": ["f64[2,4]", "-1"],
        "origin": "cumprod #1", "elements": 0, "kinds": [["real", "1 axis"]], "got": "[1]", "want": "[2]",
        "picture": "argument 0, S(1)\n  rank 0  [1, 2] of shape (2,)", "command": None, "repro": None,
        "cause": None,
    }  # fmt: skip


def test_a_finding_names_its_cause_and_the_causes_are_there():
    cause = replace(SCAN, findings=(WRONG.name,))
    body = body_of(replace(FULL, causes=(cause,)))
    check_schema(body)
    assert [one["cause"] for one in body["findings"]] == ["scan_1", None, None]
    (told,) = body["causes"]
    assert (told["id"], told["findings"], told["file"], told["line"]) == ("scan_1", [WRONG.name], "torch/x.py", 7)
    assert (told["lines"], told["prints"], told["right"], told["script"]) == (
        "x = 1",
        "DTensor gives 1",
        "2",
        "scan_1.py",
    )
    assert told["versions"] == {"2.13.0": "present"} and told["tried"].startswith("With replicas, ")


def test_what_was_left_out_of_each_overload_is_there():
    left = (LeftOut("aten.add.Tensor", "real", "dtypes that do not apply", ("float8_e4m3fn",)),)
    body = body_of(replace(FULL, left_out=left))
    check_schema(body)
    assert body["left_out"] == {"aten.add.Tensor": {"real": {"dtypes that do not apply": ["float8_e4m3fn"]}}}


def without(name):
    return lambda body: body["findings"][0].pop(name)


def with_(**new):
    return lambda body: body["findings"][0].update(new)


REQUIRED = ("op", "inputs", "outputs", "mesh", "verdict", "confirmed_on", "reason", "sample", "got", "want", "repro")
BROKEN = {
    **{f"no {name}": without(name) for name in REQUIRED},
    "an unsound that nothing confirmed": with_(confirmed_on=None),
    "an unknown verdict": with_(verdict="sound"),
    "a mesh of one rank": with_(mesh=[1]),
    "a mesh of one rank on two axes": with_(mesh=[1, 1]),
    "a mesh without axes": with_(mesh=[]),
    "no reason given": with_(reason=""),
    "another field": with_(more=1),
    "an op without its overload": with_(op="cumprod"),
    "no counts": lambda body: body.pop("counts"),
    "a negative count": lambda body: body["counts"].update(sound=-1),
    "a count left out": lambda body: body["counts"].pop("crashed"),
    "an exit code of usage": lambda body: body.update(exit_code=2),
    "another schema": lambda body: body.update(schema=2),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_the_schema_refuses(spoil):
    body = body_of(FULL)
    spoil(body)
    with pytest.raises(jsonschema.ValidationError):
        check_schema(body)


def test_a_suspect_may_be_unconfirmed():
    body = body_of(FULL)
    assert body["findings"][1]["confirmed_on"] is None
    check_schema(body)


def test_json_is_stable_and_readable():
    assert text_and_json.as_json(FULL) == text_and_json.as_json(replace(FULL))
    later = replace(FULL, seconds=(("trials", 0.75),))
    assert text_and_json.as_json(FULL).replace("0.5", "0.75") == text_and_json.as_json(later)
    assert (
        text_and_json.as_json(replace(FULL, ignored=(("aten.grün.default", "-"),))).count("grün") == 2
    )  # by name, and with the reason
    assert text_and_json.as_json(FULL).endswith("}\n")


def test_a_finding_on_several_axes_is_reported_by_its_title_and_mesh():
    one = finding(title="aten.add.Tensor on (2, 3): (S(0), R), then sum", mesh=(2, 3), ranks=6, elements=8)
    body = body_of(replace(FULL, findings=(one,)))
    check_schema(body)
    told = body["findings"][0]
    assert (told["title"], told["mesh"], told["elements"]) == (one.title, [2, 3], 8)
    row = cells(shown(replace(EMPTY, findings=(one,)), 200))
    assert (row[0], row[1]) == (f"rule{one.title.replace(' ', '')}", "ranks2x3")


def test_units_that_are_not_done_are_reported():
    whole, part = EMPTY, replace(EMPTY, unfinished=7)
    assert (body_of(whole)["unfinished"], body_of(part)["unfinished"]) == (0, 7)
    said = "7 units of the plan are not in this journal: see `localtensor merge`."
    assert said in shown(part) and "merge" not in shown(whole)


# Files.


def test_scripts_are_written_for_findings_that_have_one(tmp_path):
    report = text_and_json.write_scripts(FULL, str(tmp_path / "scripts"))
    (file,) = (tmp_path / "scripts").iterdir()
    assert file.name == "cumprod_default__S1__S1__2ranks.py"
    assert file.read_text() == "# cumprod_default__S1__S1__2ranks.py\n"
    assert [f.repro for f in report.findings] == [str(file), None, None]
    check_schema(body_of(report))


def test_without_a_folder_nothing_is_written():
    assert text_and_json.write_scripts(FULL, None) is FULL


@pytest.mark.parametrize(("given", "name"), [
    ({}, "cumprod_default__S1__S1__2ranks.py"),
    ({"inputs": "S(0) R P(sum)", "outputs": "P(max) S(2)"}, "cumprod_default__S0_R_Psum__Pmax_S2__2ranks.py"),
    ({"op": "mine.a_b.out", "ranks": 4}, "mine_a_b_out__S1__S1__4ranks.py"),
])  # fmt: skip
def test_a_script_is_called_after_its_finding(given, name):
    assert text_and_json.file_name(finding(**given)) == name


def titled(title, mesh=(2, 2)):
    return text_and_json.file_name(finding(title=title, mesh=mesh))


def test_a_script_of_a_program_is_called_after_its_mesh_layouts_and_what_follows():
    assert titled("aten.cumprod.default on (2, 2): (S(0), P(sum)), R, then times -1") == (
        "cumprod_default__on_2_2_each_S_0_P_sum_R_then_times_minus1.py"
    )


def test_no_two_programs_share_a_script():
    one = sample("add.Tensor", numbers(4, 6), numbers(4, 6))
    layouts = {mesh: list(itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=len(mesh)))
               for mesh in ((2,), (2, 2), (3, 2), (4,))}  # fmt: skip
    thens = ("", "sum", "sum 0", "sum -1", "S(0)", "grad S(0)", "to (S(0), R)", "again(x0, 1)", "again(x0, -1)")
    programs = [
        Program(one, mesh, inputs, then, flattened=flattened)
        for mesh, every in layouts.items() for inputs in itertools.product(every, repeat=2)
        for then in thens for flattened in (False, True)
    ]  # fmt: skip
    names = {titled(str(program), program.mesh) for program in programs}
    assert len(names) == len(programs) > 9000


@pytest.mark.parametrize("more", [{"inputs": " ".join(["S(0)"] * 90)}, {"title": "aten.a.b on (2,): " + "S(0), " * 90}])
def test_a_script_of_many_tensors_has_a_name_that_a_file_can_bear(more, tmp_path):
    one, other = finding(**more), finding(**{k: v.replace("S(0)", "S(1)") for k, v in more.items()})
    alike = finding(**{k: v[:-4] + "S(3)" if k == "inputs" else v + "R" for k, v in more.items()})
    names = {text_and_json.file_name(each) for each in (one, other, alike)}
    for name in names:
        (tmp_path / name).touch()
    assert len(names) == 3 and max(map(len, names)) < 200


def test_a_result_that_is_no_tensor_has_a_name():
    one = finding()
    one = replace(one, rule=Rule(one.rule.op, (None, *one.rule.inputs), one.rule.outputs))
    assert re.fullmatch(r"cumprod_default__\w+_S1__S1__2ranks\.py", text_and_json.file_name(one))


# For people.


def words(text):
    """What is written, without the frame, and without the places where lines end."""
    return "".join(c for c in text if not c.isspace() and not "\u2500" <= c <= "\u257f")


def cells(text):
    """The table's columns, each read from top to bottom."""
    rows = [line.strip("│┃").replace("┃", "│").split("│") for line in text.splitlines() if line.startswith(("│", "┃"))]
    return ["".join(words(row[n]) for row in rows) for n in range(4)]


def test_a_report_reads_from_what_is_wrong_to_the_totals():
    text = shown(FULL)
    order = ["ignored aten.sub.Tensor", "Unsound", "on 2 ranks, cumprod(f64[2,4], -1)", "rank 0  [1, 2] of shape (2,)",
             "Suspect", "Missing", "crashed aten.sort.default: sort(f64[2]): KeyError: 'x'",
             "not tested aten.neg.default: no call of it", "torch 2.13.0, seed 7"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_totals_are_pinned():
    assert shown(FULL, width=400).splitlines()[-1] == (
        "torch 2.13.0, seed 7, ranks 2, 3: 3 sound, 1 unsound, 0 refused, 1 suspect, 1 missing, 0 untestable, 1 crashed "
        "(confirmed on gloo); 9 rule instances on 0 samples of 0 overloads"
    )


@pytest.mark.parametrize(("overloads", "words"), [(1, "1 overload"), (2, "2 overloads")])
def test_one_overload_is_no_plural(overloads, words):
    counted = replace(FULL, counts=replace(FULL.counts, overloads=overloads))
    assert shown(counted, width=400).splitlines()[-1].endswith(f"9 rule instances on 0 samples of {words}")


def test_nothing_tested_is_said_and_no_confirmation_too():
    assert shown(EMPTY, width=400) == (
        "torch 2.13.0, seed 0, ranks 2: 0 sound, 0 unsound, 0 refused, 0 suspect, 0 missing, 0 untestable, 0 crashed "
        "(not confirmed: --confirm none); 0 rule instances on 0 samples of 0 overloads\n"
        "Nothing was tested: that is not a pass.\n"
    )


def test_what_was_judged_by_metadata_only_is_counted():
    counts = Counts(sound=2, by_metadata=1, instances=2)
    assert "; 1 of the sound ones by metadata only (random or uninitialised)" in shown(
        replace(EMPTY, counts=counts), 400
    )


def test_a_script_comes_with_its_command():
    one = replace(FULL, findings=(replace(WRONG, repro="here/x.py"),))
    assert "run it: torchrun --nproc-per-node 2 here/x.py\n" in shown(one)


def test_a_few_pictures_and_crashes_are_enough():
    many = replace(FULL, findings=(WRONG,) * 5, crashed=FULL.crashed * 11)
    assert shown(many).count("  rank 0  ") == 3
    assert shown(many).count("crashed aten.sort.default") == 8
    assert "... and 3 more crashes (all of them in --json)" in shown(many)


MARKUP = "[red]x[/red] [/] [link=y]z :warning: :x: \\[b] [1, 2]"


@pytest.mark.parametrize("place", ["reason", "picture", "sample", "repro"])
def test_markup_in_a_finding_is_shown_as_it_is(place):
    value = (MARKUP,) if place == "sample" else MARKUP
    for verdict in (Verdict.UNSOUND, Verdict.SUSPECT, Verdict.MISSING):
        if place in ("reason", "sample") or verdict is Verdict.UNSOUND:
            text = shown(replace(EMPTY, findings=(finding(verdict, **{place: value}),)), 400)
            assert MARKUP in text, verdict


def test_markup_in_names_and_crashes_is_shown_as_it_is():
    crash = Crash(MARKUP, MARKUP, MARKUP)
    text = shown(
        replace(EMPTY, ignored=((MARKUP, "-"),), crashed=(crash,), findings=(finding(op=f"a.{MARKUP}.b"),)), 900
    )
    assert (
        text.count(MARKUP) == 8
    )  # ignored once, crashed three times, rule and call in the table and above the picture


@pytest.mark.parametrize("width", [60, 200])
def test_output_without_a_terminal_has_no_escape_codes(width):
    assert "\x1b" not in shown(FULL, width)


def test_a_terminal_gets_colours():
    sink = io.StringIO()
    text_and_json.show(FULL, Console(file=sink, width=140, force_terminal=True, color_system="standard"))
    assert "\x1b[" in sink.getvalue()


def test_a_narrow_page_says_the_same_as_a_wide_one():
    for report in (EMPTY, replace(FULL, findings=())):
        assert words(shown(report, 60)) == words(shown(report, 200))
    for one in FULL.findings:
        report = replace(EMPTY, findings=(replace(one, reason="every word of this is there, " * 6, picture=""),))
        assert cells(shown(report, 60)) == cells(shown(report, 200))
        assert "everywordofthisisthere," * 6 in cells(shown(report, 60))[3]


@pytest.mark.parametrize(("reason", "silent"), [
    ("rank 1 raises ValueError: odd", False), ("rank 0, 2 raises ValueError: odd", False), ("every rank raises TypeError: x", False),
    ("hangs: rank 0 waits in all_reduce", False), ("the process of rank 1 dies of signal 11", False),
    ("rank 1 holds shape (1,), S(0) of (1,) is (0,)", True), ("rank 0: result gathered from S(0) differs at [0]: got 2, expected 1", True),
])  # fmt: skip
def test_silent_is_what_every_rank_goes_on_with(reason, silent):
    assert text_and_json.is_silent(finding(reason=reason)) is silent


FUSED = [finding(op=f"aten._fused_{name}_.default", reason=f"output {i} differs at [{i}]: got 1, expected 2")
         for i, name in enumerate(("adam", "adamw", "sgd", "adagrad"))]  # fmt: skip


def caused(findings):
    return replace(FULL, findings=tuple(findings), causes=(replace(SCAN, findings=tuple(f.name for f in findings)),))


def test_findings_of_one_cause_that_fail_alike_are_one_line_that_names_the_overloads():
    other = finding(op="aten._fused_adam.default", reason="rank 0 holds shape (4,), S(0) of (4,) is (2,)")
    report = caused([FUSED[0], other, *FUSED[1:]])
    groups = text_and_json.alike(report.findings, report)
    assert groups == [FUSED, [other]]
    rules = cells(shown(report, width=600))[0]
    ops = ", ".join(f.rule.op for f in FUSED)
    assert (
        f"4 findings of {ops} (all of them in --json); {FUSED[0].name}".replace(" ", "") in rules
        and rules.count("aten._fused_adagrad_") == 1
    )
    assert "Unsound: confirmed to give wrong results (5)" in shown(report)
    assert len(body_of(report)["findings"]) == 5


def test_few_findings_and_those_without_a_cause_have_a_line_each():
    few = caused(FUSED[:3])
    assert [len(group) for group in text_and_json.alike(few.findings, few)] == [1, 1, 1]
    unknown = replace(caused(FUSED), causes=())
    assert [len(group) for group in text_and_json.alike(unknown.findings, unknown)] == [1, 1, 1, 1]


def test_of_many_overloads_the_first_are_named():
    many = [finding(op=f"aten.op{i}.default") for i in range(8)]
    assert text_and_json.ops_text(many).endswith("aten.op5.default and 2 more")
