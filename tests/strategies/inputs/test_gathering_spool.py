import json
from pathlib import Path

import pytest
import torch

from strategies.base.atomic_files import write_lines
from strategies.inputs import gathering
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
SHELF = {
    "aten.add.Tensor": ([sample("add.Tensor", X, X.t().t()), sample("add.Tensor", X, 2)], ""),
    "aten.neg.default": ([sample("neg.default", X.t())], ""),
    "aten.out.default": ([], "it needs CUDA"),
}
EVERY = set(SHELF)


@pytest.fixture
def file(tmp_path):
    path = gathering.samples_path(tmp_path / "run.jsonl")
    write_lines(path, gathering.samples_lines("this run", SHELF))
    return path


def test_it_lies_beside_its_journal(file, tmp_path):
    assert file == tmp_path / "run.jsonl.samples"
    assert gathering.samples_path(Path("a/b")) == Path("a/b.samples")


def test_all_samples_come_back(file):
    found = gathering.read_samples(file, "this run", EVERY)
    assert list(found) == list(SHELF)
    assert {op: why for op, (_, why) in found.items()} == {op: why for op, (_, why) in SHELF.items()}
    for op, (samples, _) in SHELF.items():
        again = found[op][0]
        assert [s.call for s in again] == [s.call for s in samples]
        for one, other in zip(again, samples, strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors))
            assert [t.stride() for t in one.tensors] == [t.stride() for t in other.tensors]


def test_only_what_is_wanted_is_read(file, monkeypatch):
    parsed = []
    monkeypatch.setattr(gathering.codec, "read_sample", parsed.append)
    assert list(gathering.read_samples(file, "this run", {"aten.neg.default", "aten.gone.default"})) == [
        "aten.neg.default"
    ]
    assert len(parsed) == 1


def test_samples_of_another_run_are_not_taken(file):
    assert gathering.read_samples(file, "another run", EVERY) is None


def test_a_file_that_is_not_there_is_none(tmp_path):
    assert gathering.read_samples(tmp_path / "none", "this run", EVERY) is None


@pytest.mark.parametrize("spoil", [
    lambda data: b"", lambda data: data[:-1].rpartition(b"\n")[0] + b"\n", lambda data: b"[]\n", lambda data: b"\xff\n",
    lambda data: b'{"run": "this run"}\n', lambda data: data + data.splitlines(keepends=True)[-1],
    lambda data: b"null\n",
], ids=["empty", "a line short", "a list", "no text", "no count", "a line more", "null"])  # fmt: skip
def test_a_file_that_is_not_whole_is_not_taken(spoil, file):
    file.write_bytes(spoil(file.read_bytes()))
    assert gathering.read_samples(file, "this run", EVERY) is None


def test_each_line_is_json(file):
    head, *rows = map(json.loads, file.read_text().splitlines())
    assert head == {"run": "this run", "overloads": 3}
    assert [row["op"] for row in rows] == list(SHELF)
