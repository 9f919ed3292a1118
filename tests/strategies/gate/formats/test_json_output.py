import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import strategies
from strategies.gate.formats.json_output import as_json
from tests.strategies.gate_cases import CLEAN, EVERY, FULL

SCHEMA = json.loads((Path(strategies.__file__).parent / "schema/gate.json").read_text())
READER = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())


def body_of(result):
    return json.loads(as_json(result))


@pytest.mark.parametrize("which", sorted(set(EVERY) - {"huge"}))
def test_it_obeys_its_schema(which):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    READER.validate(body_of(EVERY[which]()))
    assert body_of(EVERY[which]())["exit_code"] == EVERY[which]().exit_code


@pytest.mark.parametrize(
    ("where", "value"),
    [("exit_code", 2), ("exit_code", 0), ("seconds", -1), ("more", 1), ("torch", 2), ("judged", ["add"])],
)
def test_the_schema_refuses_what_is_wrong(where, value):
    assert not READER.is_valid(body_of(FULL) | {where: value})


@pytest.mark.parametrize("without", sorted(SCHEMA["required"]))
def test_every_field_is_needed(without):
    body = body_of(FULL)
    del body[without]
    assert not READER.is_valid(body)


def test_a_finding_is_reported_in_full():
    first = body_of(FULL)["findings"][0]
    assert (first["op"], first["call"], first["silent"]) == ("aten.cumprod.default", "cumprod(f64[2], -1)", True)
    assert first["place"] == {"file": "my ops/rules.py", "line": 12}
    assert [k["dtypes"] for k in first["new"]] == ["real", "complex"]
    assert body_of(FULL)["findings"][2]["accepted"][0]["expires"] == "2027-01-31"
    assert [len(one["new"]) + len(one["accepted"]) - len(one["keys"]) for one in body_of(FULL)["findings"]] == [
        0
    ] * len(FULL.findings)
    assert body_of(FULL)["findings"][2]["new"] == [] and body_of(FULL)["findings"][2]["keys"]


def test_only_the_seconds_differ_from_run_to_run():
    assert body_of(replace(FULL, seconds=1.0)) == body_of(FULL) | {"seconds": 1.0}
    assert as_json(CLEAN) == as_json(CLEAN)
