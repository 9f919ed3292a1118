"""The report of a comparison: JSON that obeys its schema, and a page in one file that escapes what it prints."""

import json
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt
from localtensor.errors import Diverged
from tests.localtensor.testing.compare.test_compare import Block

SCHEMA = json.loads((Path(__file__).parents[4] / "strategies/schema/compare.json").read_text())


def build():
    return nn.Sequential(Block(), Block())


def replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def square(y):
    return y.square().mean()


def batch():
    return torch.randn(4, 8)


TRAINED = {"mesh": {"dp": 2}, "batch": batch, "loss": square, "optimizer": torch.optim.SGD, "steps": 2}


@pytest.fixture(scope="module")
def right():
    return lt.compare(build, replicated, **TRAINED)


@pytest.fixture(scope="module")
def faulty():
    with pytest.raises(Diverged) as told:
        lt.compare(build, lambda model, mesh: None, **TRAINED)
    return told.value.comparison


@pytest.mark.parametrize("which", ["right", "faulty"])
def test_the_json_obeys_its_schema(which, request):
    done = request.getfixturevalue(which)
    written = json.loads(json.dumps(done.as_json()))
    jsonschema.validate(written, SCHEMA)
    assert written["equal"] == (which == "right") and len(written["values"]) > 60
    states = [one["state"] for one in written["values"]]
    assert set(states) == ({"equal"} if which == "right" else {"equal", "differs"})
    if which == "faulty":
        first = written["values"][states.index("differs")]
        assert first["value"] == written["divergence"]["value"] == "gradient of 1.down.bias, step 0"


def test_values_that_differ_are_among_those_that_were_compared(faulty):
    differ = sum(one.state == "differs" for one in faulty.values)
    compared = f"compared  {len(faulty.values)} values; different: {differ}; not reached: 0; not compared: 0"
    assert differ > 4 and compared in str(faulty)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.cells, self.loads, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.cells += [given["class"]] if tag == "td" and given.get("class") else []
        self.loads += [given[name] for name in ("src", "href") if name in given and not given[name].startswith("#")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_colours_the_modules_and_loads_nothing(right, faulty, tmp_path):
    faulty.write_html(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.cells.count("unsound") == 1 and "suspect" in page.cells and "sound" in page.cells and not page.loads
    text = " ".join(page.words)
    assert "The parallel program differs from one device" in text and faulty.divergence.what in text
    assert set(Page(right.as_html()).cells) == {"sound"}


def test_the_page_escapes_names_of_the_user():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(8, 8))

        def forward(self, x):
            return next(self.children())(x)

    with pytest.raises(Diverged) as told:
        lt.compare(Odd, lambda model, mesh: None, **TRAINED)
    page = told.value.comparison.as_html()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_real_processes_give_the_same_report():
    done = lt.compare(build, replicated, on="gloo", **TRAINED)
    assert done.divergence is None and not done.not_compared and len(done.layouts) > 60
    assert any(line.startswith("broadcast over dp, test_comparison.py") for line in done.collectives)
    assert done.as_json() == lt.compare(build, replicated, **TRAINED).as_json()
