import json
from dataclasses import replace
from urllib.parse import unquote

import pytest
from pydantic import ValidationError
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif

from strategies.gate.baseline import SourceLine
from strategies.gate.formats.sarif import MOST, sarif
from tests.strategies.gate_cases import CLEAN, EVERY, FULL, ONE_FUNCTION, UNTIL, finding, hostile, huge, new, unasked


def run_of(result, **more):
    (run,) = json.loads(sarif(result, **more))["runs"]
    return run


def hashes(result):
    return [r["partialFingerprints"]["localtensorKey/v1"] for r in run_of(result)["results"]]


def test_the_version_of_the_tool_is_told_where_it_is_known():
    assert run_of(CLEAN, version="0.1.0")["tool"]["driver"]["version"] == "0.1.0"
    assert "version" not in run_of(CLEAN)["tool"]["driver"]


@pytest.mark.parametrize("which", sorted(set(EVERY) - {"huge"}))
def test_it_obeys_the_models_made_from_the_published_schema(which):
    text = sarif(EVERY[which](), version="0.1.0")
    assert Sarif.model_validate_json(text).version.value == "2.1.0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), "2.0.0"), (("runs", 0, "more"), 1), (("runs", 0, "results", 0, "level"), "fatal"),
        (("runs", 0, "results", 0, "message"), {"words": "x"}), (("runs", 0, "tool"), {}),
        (("runs", 0, "results", 0, "ruleIndex"), -2), (("runs", 0, "results", 0, "suppressions"), [{"kind": "no"}]),
    ],
)  # fmt: skip
def test_those_models_refuse_what_is_wrong(path, value):
    body = json.loads(sarif(FULL))
    spot = body
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    with pytest.raises(ValidationError):
        Sarif.model_validate(body)


@pytest.mark.parametrize("which", ["full", "hostile", "huge"])
def test_github_finds_what_it_needs_in_every_result(which):
    run = run_of(EVERY[which]())
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"] and rule["help"]["text"]
    assert 0 < len(run["results"]) < 5_000
    for result in run["results"]:
        (place,) = [location["physicalLocation"] for location in result["locations"]]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%" and place["artifactLocation"]["uri"]
        assert place["region"]["startLine"] >= 1 and result["message"]["text"]
        assert result["partialFingerprints"]["primaryLocationLineHash"]
    marks = [r["partialFingerprints"]["primaryLocationLineHash"] for r in run["results"]]
    assert len(set(marks)) == len(marks)


def test_new_ones_come_first_as_errors_and_accepted_ones_last_as_suppressed_notes():
    told = [(r["level"], r["ruleId"], "suppressions" in r) for r in run_of(FULL)["results"]]
    assert told == [
        ("error", "silently-wrong-sharding-rule", False), ("error", "loudly-wrong-sharding-rule", False),
        ("error", "stale-baseline-entry", False), ("note", "loudly-wrong-sharding-rule", True),
    ]  # fmt: skip
    assert run_of(FULL)["results"][3]["suppressions"] == [
        {"kind": "external", "justification": "reported upstream, 100 % known"},
        {"kind": "external", "justification": "for good"},
    ]


def test_all_forms_of_one_rule_function_are_one_result():
    (told,) = run_of(ONE_FUNCTION)["results"]
    assert told["message"]["text"].count("\n") == 2 and "S(1) -> S(1) (real on 1 axis)" in told["message"]["text"]
    assert len(told["properties"]["keys"]) == 4 and told["ruleId"] == "silently-wrong-sharding-rule"
    accepted = replace(
        ONE_FUNCTION, findings=tuple(replace(f, new=(), accepted=(UNTIL,)) for f in ONE_FUNCTION.findings)
    )
    assert [(r["level"], len(r["suppressions"])) for r in run_of(accepted)["results"]] == [("note", 1)]
    partly = replace(ONE_FUNCTION, findings=(*ONE_FUNCTION.findings[:1], *accepted.findings[1:]))
    assert [r["level"] for r in run_of(partly)["results"]] == ["error"]


def test_a_fingerprint_outlives_other_lines_files_words_ranks_and_neighbours():
    one, other = finding(), finding("aten.sort.default")
    before = hashes(replace(CLEAN, findings=(new(one, place=SourceLine("a.py", 1)), new(other))))
    moved = replace(one, ranks=3, reason="3 at [1]", sample=("f64[9]",))
    after = hashes(replace(CLEAN, findings=(new(other), new(moved, place=SourceLine("b.py", 99)))))
    assert after == before[::-1] and len(set(before)) == 2


def test_what_has_no_place_points_at_the_baseline():
    places = [r["locations"][0]["physicalLocation"] for r in run_of(FULL, baseline="a/b.json")["results"]]
    assert [p["artifactLocation"]["uri"] for p in places[:2]] == ["my%20ops/rules.py", "a/b.json"]
    assert [p["region"]["startLine"] for p in places[:2]] == [12, 1]
    odd = run_of(hostile())["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(odd) == "a b,c:d%\n.py" and ":" not in odd


def test_what_is_too_much_is_left_out_from_the_end_and_counted():
    run = run_of(huge())
    assert len(run["results"]) == MOST and {r["level"] for r in run["results"]} == {"error"}
    assert run["properties"]["leftOut"] == 6_020 - MOST
    assert run["invocations"][0]["toolExecutionNotifications"][-1]["message"]["text"].startswith(
        "1021 results are left"
    )


def test_crashes_trouble_and_untried_are_reported_of_the_run():
    (told,) = run_of(FULL)["invocations"]
    assert (told["executionSuccessful"], told["exitCode"]) == (False, 1)
    assert [(n["level"], n["message"]["text"].split(":")[0]) for n in told["toolExecutionNotifications"]] == [
        ("error", "aten.var.correction"), ("error", "a worker was killed twice"),
        ("note", "no rule of this file is registered"), ("note", "aten.topk.default was not tried"),
    ]  # fmt: skip


def test_a_registration_that_is_never_asked_is_a_rule_of_its_own():
    (told,) = run_of(unasked())["results"]
    assert (told["ruleId"], told["level"], told["properties"]["rule"]) == (
        "registration-never-asked",
        "error",
        "ignored",
    )


def test_a_clean_run_has_no_results_and_no_notes():
    run = run_of(CLEAN)
    assert run["results"] == [] and run["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def test_what_github_knows_a_result_by_does_not_hang_on_the_line_that_it_stands_on():
    def marks(line):
        judged = replace(new(finding(), "real"), place=SourceLine("rules.py", line))
        return [r["partialFingerprints"] for r in run_of(replace(CLEAN, findings=(judged,)))["results"]]

    assert marks(3) == marks(30) and len(marks(3)) == 1
