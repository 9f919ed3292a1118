import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from strategies.base import worker_pool
from strategies.base.atomic_files import write_lines
from strategies.base.progress import Progress
from strategies.inputs import derived_samples, gathering, opinfo_samples
from strategies.inputs.derived_samples import UserOpTask, user_op_samples
from strategies.inputs.gathering import (
    CapturePass,
    SampleSelection,
    _scouted,
    gather,
    gather_samples,
    pick,
    run_capture_pass,
    select_overloads,
)
from strategies.model.rule import overload
from strategies.model.settings import BadSetting, Settings
from strategies.model.verdict import Crash
from strategies.torch_api import dtensor, user_modules
from tests.strategies import users
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
ADD, MUL, NEG = "aten.add.Tensor", "aten.mul.Tensor", "aten.neg.default"
CRASH = Crash("add[int64,even]", "its samples", "E")


@pytest.fixture
def world(monkeypatch):
    """`world(first, second)`: what the likely OpInfos give, and all the others; it notes what was gathered."""
    asked = []

    def gives(first, second=(), *, wanted=(ADD, MUL), made=(), reasons=()):
        monkeypatch.setattr(derived_samples, "lacking", lambda *_: [None] * 3)
        monkeypatch.setattr(derived_samples, "gather", lambda *_: (dict(made), dict(reasons)))
        left = [first, second]
        picked = SampleSelection((1, 2), frozenset(wanted))
        lacking = SampleSelection((3,), frozenset(wanted) - set(first))
        monkeypatch.setattr(gathering, "pick", lambda settings, rules: picked)
        monkeypatch.setattr(gathering, "wider", lambda pick, met: lacking if lacking.overloads else SampleSelection(()))

        def gather(hands, pick, settings, tick, units):
            asked.append(pick)
            units(5)
            tick(5)
            return dict(left.pop(0)), [CRASH], Counter({"refused": len(asked)})

        monkeypatch.setattr(gathering, "gather", gather)
        return asked

    return gives


class Told(Progress):
    def __init__(self):
        self.phases = []

    def phase(self, name, total):
        self.phases.append((name, total))


def captured(rules=None, progress=None):
    return gather_samples(None, Settings(("x",)), rules, progress or Progress())


def test_samples_come_by_overload_in_the_order_of_names(world):
    world({MUL: [sample("mul.Tensor", X, 2)], ADD: [sample("add.Tensor", X, 2)]})
    found = captured()
    assert list(found.shelf) == [ADD, MUL]
    assert [(len(samples), why) for samples, why in found.shelf.values()] == [(1, ""), (1, "")]
    assert (found.crashed, found.refused) == ((CRASH,), {"refused": 1})


def test_where_the_likely_opinfos_reach_all_the_others_are_not_run(world):
    asked = world({ADD: [sample("add.Tensor", X, 2)], MUL: [sample("mul.Tensor", X, 2)]})
    captured()
    assert [pick.infos for pick in asked] == [(1, 2)]


def test_an_overload_that_they_do_not_reach_is_looked_for_in_the_others(world):
    asked = world({ADD: [sample("add.Tensor", X, 2)]}, {MUL: [sample("mul.Tensor", X, 2)]})
    found = captured()
    assert [pick.infos for pick in asked] == [(1, 2), (3,)]
    assert list(found.shelf) == [ADD, MUL]
    assert (found.crashed, found.refused) == ((CRASH, CRASH), {"refused": 3})


def test_what_no_journal_can_hold_is_not_on_the_shelf(world):
    bad = sample("bernoulli.p", X, 0.5, generator=torch.Generator())
    world({NEG: [sample("neg.default", torch.eye(3).to_sparse()), sample("neg.default", X)], "aten.bernoulli.p": [bad]},
          wanted=())  # fmt: skip
    found = captured()
    assert {op: (len(samples), why) for op, (samples, why) in found.shelf.items()} == {
        NEG: (1, ""), "aten.bernoulli.p": (0, "its calls hold values that have no form in a journal"),
    }  # fmt: skip
    assert found.refused == {"refused": 1, f"{NEG}: a call holds a value that has no form in a journal": 1}


def test_a_derived_call_that_no_journal_can_hold_is_counted_too(world):
    bad = sample("bernoulli.p", X, 0.5, generator=torch.Generator())
    world({}, wanted=(), made={"aten.bernoulli.p": [bad, sample("bernoulli.p", X, 0.25)]})
    found = captured()
    assert [len(samples) for samples, _ in found.shelf.values()] == [1]
    assert found.refused["aten.bernoulli.p: a call holds a value that has no form in a journal"] == 1


class Inline:
    """Workers that are this process."""

    def run(self, function, tasks, *, limit, tick):
        return [worker_pool.TaskDone(function(task, lambda step: None)) for task in tasks]


@pytest.mark.parametrize(
    ("op", "infos"), [("aten.convolution.default", (1,)), ("aten.neg.default", (0,)), ("aten.lgamma.default", (0, 1))]
)
def test_opinfos_that_no_name_tells_are_looked_for_with_one_dtype(monkeypatch, op, infos):
    known = {info.name: info for info in opinfo_samples.database()}
    few = [known["neg"], known["nn.functional.conv1d"]]
    monkeypatch.setattr(opinfo_samples, "database", lambda: few)
    told, guess = Told(), SampleSelection((0, 1), frozenset({op}), guessed=True)
    found = _scouted(Inline(), guess, Settings(("x",), dtypes=("float64", "int64")), told)
    assert (found.infos, found.guessed) == (infos, len(infos) == 2)
    assert told.phases == [("looking for calls", 2)]


def test_an_overload_whose_name_no_opinfo_has_is_a_guess():
    database = opinfo_samples.database()
    assert select_overloads(frozenset({"aten.convolution.default"}), database).guessed
    assert not select_overloads(frozenset({"aten.cumprod.default"}), database).guessed


def test_each_pass_is_a_phase(world):
    told = Told()
    world({ADD: [sample("add.Tensor", X, 2)]}, {})
    captured(progress=told)
    assert told.phases == [("capturing samples", 5), ("capturing samples", 5), ("deriving samples", 3)]


def test_what_no_capture_reaches_is_derived_or_has_its_reason(world):
    world({MUL: [sample("mul.Tensor", X, 2)]}, made={ADD: [sample("add.Tensor", X, X)]}, reasons={NEG: "it needs CUDA"})
    shelf = captured().shelf
    assert {op: (len(samples), why) for op, (samples, why) in shelf.items()} == {
        ADD: (1, ""), MUL: (1, ""), NEG: (0, "it needs CUDA"),
    }  # fmt: skip
    assert list(shelf) == sorted(shelf)


@pytest.fixture
def restored():
    with users.undone():
        yield


def silent(_):
    """Nobody counts."""


def asked(*patterns, **given):
    return Settings(patterns, **given)


def gathered(found, settings):
    with worker_pool.WorkerPool(1) as crew:
        return gather(crew, found, settings, silent, silent)


# Calls.


def test_a_pass_brings_home_the_calls_that_have_a_rule():
    number = names_of_all().index("addr")  # it calls addr_, too, for which torch 2.13 has none
    found, _ = run_capture_pass(CapturePass(number, "float64", "even", "cpu", 0), silent)
    assert "aten.addr.default" in {s.op for s in found}
    assert all(dtensor.registry_of(overload(s.op)) for s in found)


def names_of_all():
    return [info.name for info in opinfo_samples.database()]


def test_gathering_keeps_what_was_asked_for_and_counts_passes():
    units, ticks = [], []
    with worker_pool.WorkerPool(1) as crew:
        settings = asked("aten.cumprod.default", dtypes=("int64",))
        found = pick(settings, None)
        by_op, crashed, _ = gather(crew, found, settings, ticks.append, units.append)
    assert set(by_op) == {"aten.cumprod.default"}
    assert {s.tensors[0].dtype for s in by_op["aten.cumprod.default"]} == {torch.int64}
    assert crashed == [] and units == [sum(ticks)] == [len(found.infos) * len(opinfo_samples.SIZES)]


def test_a_dtype_that_the_op_does_not_take_is_refused_with_what_it_takes():
    settings = asked("bitwise_and", dtypes=("complex64",))
    with pytest.raises(BadSetting) as refused:
        gathered(pick(settings, None), settings)
    assert str(refused.value) == (
        "localtensor validate: --dtype: complex64: no op that you named takes it on cpu. "
        "They take bool, int32, int64, int8, uint8."
    )


def test_ops_that_take_none_of_our_dtypes_say_so(monkeypatch):
    class Nothing:
        dtypes = frozenset({torch.uint16})

        def supported_dtypes(self, device):
            return self.dtypes

    monkeypatch.setattr(opinfo_samples, "database", lambda: [Nothing()])
    with pytest.raises(BadSetting) as refused:
        gathered(SampleSelection((0,)), asked("x", dtypes=("int64", "bool")))
    assert str(refused.value) == (
        "localtensor validate: --dtype: int64 bool: no op that you named takes it on cpu. They take none of those tried."
    )


# A user's own ops.


def own(folder, name, body, **given):
    settings = Settings(rules=users.write(folder, name, body), folder=str(folder), dtypes=("float64",), **given)
    rules = user_modules.load_rules(settings.rules, settings.folder)
    with worker_pool.WorkerPool(1) as crew:
        return derived_samples.user_op_draws(crew, settings, rules.ops)


@pytest.mark.usefixtures("restored")
def test_an_op_that_no_one_knows_is_drawn_from_its_schema(tmp_path):
    by_op, without = own(tmp_path, "own_drawn", 'op("a", lambda x: x * 2, (R, R))')
    assert {s.origin.partition(",")[0] for s in by_op["own_drawn.a.default"]} == {"drawn from the schema"}
    assert without == {}


HOOK = """
op("a", lambda x: x * 2, (R, R))

def samples(op):
    assert op is torch.ops.{}.a.default
    yield (torch.arange(6.0),), {{}}
"""


@pytest.mark.usefixtures("restored")
def test_a_modules_own_samples_come_first(tmp_path):
    by_op, without = own(tmp_path, "own_hook", HOOK.format("own_hook"))
    (sample,) = by_op["own_hook.a.default"]
    assert (sample.origin, sample.arguments(), without) == ("samples() #0", ["f32[6]"], {})


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("body", ["yield from ()", "pass"], ids=["a generator", "None"])
def test_an_op_of_which_samples_yields_no_call_is_drawn_from_its_schema(body, tmp_path):
    module = f'op("a", lambda x: x * 2, (R, R))\ndef samples(op):\n    {body}\n'
    by_op, without = own(tmp_path, "own_none_" + body[:4], module)
    [found] = by_op.values()
    assert {s.origin.partition(",")[0] for s in found} == {"drawn from the schema"}
    assert without == {}


@pytest.mark.usefixtures("restored")
def test_samples_that_raise_are_a_crash_of_that_op_only(tmp_path):
    body = 'op("a", lambda x: x * 2, (R, R))\ndef samples(op):\n    raise LookupError("no samples")\n'
    by_op, without = own(tmp_path, "own_raise", body)
    (crash,) = without.values()
    assert not by_op
    assert (crash.op, crash.sample, crash.error) == ("own_raise.a.default", "its samples", "LookupError: no samples")
    assert "own_raise.py" in crash.trace


@pytest.mark.usefixtures("restored")
def test_an_op_that_kills_the_process_on_whole_tensors_is_a_crash_of_that_op_only(tmp_path):
    body = 'op("a", lambda x: die(), (R, R))\nop("b", lambda x: x * 2, (R, R))'
    by_op, without = own(tmp_path, "own_death", body)
    (crash,) = without.values()
    assert by_op["own_death.b.default"]
    assert (crash.op, crash.error) == ("own_death.a.default", "the process died with SIGSEGV")


@pytest.mark.usefixtures("restored")
def test_drawing_runs_anywhere_the_module_can_be_found(tmp_path):
    name = users.write(tmp_path, "own_anywhere", 'op("a", lambda x: x * 2, (R, R))')
    found, _ = user_op_samples(UserOpTask(f"{name}.a.default", ("int64",), 0, name, str(tmp_path)), silent)
    assert {s.tensors[0].dtype for s in found} == {torch.int64}


PICKY = """
def picky(x):
    raise ValueError("never")

op("a", picky, (R, R))
"""


@pytest.mark.usefixtures("restored")
def test_an_op_that_refuses_every_call_drawn_for_it_says_so(tmp_path):
    assert own(tmp_path, "own_picky", PICKY) == (
        {}, {"own_picky.a.default": "it refuses all 168 calls drawn for it: ValueError: never"},
    )  # fmt: skip


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
