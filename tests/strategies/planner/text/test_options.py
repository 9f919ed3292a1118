import json
import sys

import pytest

from strategies.planner.steps.plan import Move
from strategies.planner.steps.prices import TOPOLOGY, Sent, Time, TorchPrice
from strategies.planner.steps.topology import BadTopology
from strategies.planner.text.options import BadPlanOption, parse_bytes, parse_sizes, plan_request
from strategies.planner.text.parser import BadPlanText

TEXT = "f32[8,4] @ dp=2,tp=8: S(0),R -> R,S(1)"
MOVE = Move("all_gather", (0,), 2, 1000, 500.0, "S", "R")


def refused(**options):
    with pytest.raises(BadPlanOption) as error:
        plan_request(TEXT, **options)
    return str(error.value)


@pytest.mark.parametrize(("text", "size"), [
    ("2GB", 2 * 10**9), ("512MiB", 512 * 2**20), ("1.5kB", 1500), ("100", 100), ("7 b", 7), ("1tb", 10**12), ("0", 0), ("3P", 3 * 10**15),
])  # fmt: skip
def test_sizes_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2XB", "2iB", "1e9", "nan", "1_000", "9" * 50, "٣GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(BadPlanOption, match=r"^plan: --memory: .*: this is no size\. Write 2GB"):
        parse_bytes(text)


def test_a_question_has_its_price_and_its_unit():
    assert plan_request(TEXT).price == Time(TOPOLOGY) and plan_request(TEXT).unit == "ps"
    assert plan_request(TEXT, by="bytes").price == Sent() and plan_request(TEXT, by="bytes").unit == "bytes"
    assert isinstance(plan_request(TEXT, by="torch").price, TorchPrice)
    assert plan_request(TEXT, memory="1kB", flattened=["dp,tp"]).flattened == (("dp", "tp"),)
    assert [plan_request(TEXT, by=by).price_text(2_000_000) for by in ("time", "bytes")] == ["2 us", "2.0 MB"]


def test_two_links_and_a_file_and_two_numbers_are_a_topology(tmp_path):
    links = plan_request(
        TEXT, inner="3,300", outer="5,25"
    ).topology.links  # dp reaches over nodes of eight, tp does not
    assert [link.latency for link in links] == [5e-6, 3e-6]
    assert [link.latency for link in plan_request(TEXT, inner="3,300", outer="5,25", per_node=16).topology.links] == [
        3e-6,
        3e-6,
    ]
    told = {"ranks_per_node": 8, "inner": {"latency_us": 3, "gigabytes_per_second": 300}}
    (tmp_path / "t.json").write_text(json.dumps({**told, "outer": {"latency_us": 5, "gigabytes_per_second": 25}}))
    assert plan_request(TEXT, topology=str(tmp_path / "t.json")).topology.links == links
    assert plan_request(TEXT, topology="300,25").topology.links[1].per_byte == links[1].per_byte
    (tmp_path / "t.json").write_text(json.dumps({**told, "outer": {"latency_us": -5, "gigabytes_per_second": 25}}))
    with pytest.raises(BadTopology, match=r"outer\.latency_us: -5"):
        plan_request(TEXT, topology=str(tmp_path / "t.json"))


def test_options_that_do_not_fit_are_named():
    assert refused(by="tiem") == "plan: --by: 'tiem': there is no such price. Did you mean time?"
    assert "Write time, bytes, torch, or MODULE:FUNCTION." in refused(by="speed")
    assert "no axis is called 'pp'. The axes are dp, tp." in refused(flattened=["dp,pp"])
    assert "Did you mean tp?" in refused(flattened=["dp,tpp"])
    assert "a group of several axes" in refused(flattened=["dp"]) and "a group of several axes" in refused(
        flattened=["dp,dp"]
    )
    assert "Add --outer 5,25." in refused(inner="3,300") and "Add --inner 5,25." in refused(outer="3,300")
    assert "Write --inner 5,25." in refused(inner="3", outer="5,25")
    assert "Write --inner 5,25." in refused(inner="e,.", outer="5,25")
    assert "without links" in refused(per_node=4)
    assert "as --inner would. Give the one or the others." in refused(topology="300,25", inner="3,300")
    assert "as --outer and --per-node would." in refused(topology="300,25", outer="3,300", per_node=8)
    assert "without links" in refused(per_node=8) and "--inner: ''" in refused(inner="", outer="5,25")
    with pytest.raises(BadTopology, match="ranks_per_node: 0"):
        plan_request(TEXT, inner="3,300", outer="5,25", per_node=0)
    with pytest.raises(BadPlanText):
        plan_request("f32")


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(body, name):
        (tmp_path / f"{name}.py").write_text(body)
        return {"by": f"{name}:price", "folder": str(tmp_path)}

    return write


def test_a_price_of_ones_own_is_seconds_or_whole_numbers(module):
    seconds = plan_request(TEXT, **module("def price(move):\n    return 0.5\n", "asked_seconds"))
    assert seconds.unit == "ps" and seconds.price(MOVE) == 500_000_000_000
    whole = plan_request(TEXT, **module("def price(move):\n    return 7\n", "asked_whole"))
    assert whole.unit == "" and whole.price(MOVE) == 7 and whole.price_text(7_000) == "7,000"


@pytest.mark.parametrize(("name", "body", "said"), [
    ("asked_raises", "def price(move):\n    raise ValueError('oh')\n", "it raises ValueError: oh"),
    ("asked_negative", "def price(move):\n    return -1\n", "it returns -1 for a"),
    ("asked_nan", "def price(move):\n    return float('nan')\n", "it returns nan for a"),
    ("asked_text", "def price(move):\n    return 'x'\n", "it returns 'x' for a"),
    ("asked_none", "price = 3\n", "asked_none has no function of that name"),
    ("asked_broken", "1 / 0\n", "importing it raises ZeroDivisionError"),
])  # fmt: skip
def test_a_price_that_cannot_be_asked_is_one_sentence(module, name, body, said):
    sentence = refused(**module(body, name))
    assert sentence.startswith("plan: --by: ") and said in sentence and "\n" not in sentence


def test_sizes_between_commas():
    assert parse_sizes("--shape", "", "localtensor cost check") == ()
    with pytest.raises(BadPlanOption, match=r"^localtensor cost check: --mesh: '2,x': these are no sizes"):
        parse_sizes("--mesh", "2,x", "localtensor cost check")
