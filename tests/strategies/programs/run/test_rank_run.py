"""On two real gloo processes, started once for this file."""

import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from localtensor._util import pickling
from localtensor.layout.shards import split_axis
from localtensor.processes.pool import Pool
from strategies.programs.run.rank_run import ProgramRankTask, drop_native_messages, misfit, run_pickled_task
from tests.strategies import planted_ops
from tests.strategies.cases import numbers, placements, sample
from tests.strategies.planted_ops import planted
from tests.strategies.script_runner import logs_errors

HOME = (planted_ops.__name__, str(Path(__file__).parents[4]))
X = numbers(5, 4)


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=30) as pool:
        yield pool


@pytest.fixture
def validated(pool):
    """What each of the two ranks hears of a sample with these input placements."""

    def ask(one, text, **changes):
        given = placements(text)
        rng = torch.Generator().manual_seed(0)
        columns = [split_axis(t, p, 2, rng) for t, p in zip(one.tensors, given, strict=True)]
        shapes, strides = (tuple(tuple(f(t)) for t in one.tensors) for f in (torch.Tensor.size, torch.Tensor.stride))
        parts = [
            ProgramRankTask(
                one.call, tuple((p,) for p in given), tuple(c[rank] for c in columns), shapes, strides, "cpu", HOME
            )
            for rank in (0, 1)
        ]
        outcomes = pool.call(run_pickled_task, [(pickling.dumps(replace(part, **changes)),) for part in parts])
        return [pickling.loads(outcome.value) for outcome in outcomes]

    return ask


def assert_whole(found, *want):
    """Every rank has the same whole results, and nobody failed."""
    for one in found:
        assert (one.failed, one.errors, one.trace) == ("", (), "")
        for got, expected in zip(one.whole, want, strict=True):
            torch.testing.assert_close(got, expected)


def test_each_rank_tells_its_piece_and_the_whole(validated):
    found = validated(sample("neg.default", X), "S(0)")
    assert_whole(found, -X)
    assert [one.placements for one in found] == [("S(0)",)] * 2
    assert [one.shapes for one in found] == [((3, 4),), ((2, 4),)]
    assert torch.equal(torch.cat([one.pieces[0] for one in found]), -X)


@pytest.mark.parametrize(("op", "args", "text", "outputs"), [
    ("sum.dim_IntList", ([0],), "S(0)", ("P(sum)",)),
    ("neg.default", (), "P(max)", ("P(min)",)),
    ("neg.default", (), "R", ("R",)),
    ("neg.default", (), "P(avg)", ("P(avg)",)),
    ("max.dim", (0,), "S(1)", ("S(0)", "S(0)")),
    ("split.Tensor", (3,), "S(1)", ("S(1)", "S(1)")),
])  # fmt: skip
def test_results_are_put_together_from_their_placements(validated, op, args, text, outputs):
    one = sample(op, X, *args)
    found = validated(one, text)
    assert [h.placements for h in found] == [outputs] * 2
    want = one.call(one.tensors)
    assert_whole(found, *([want] if isinstance(want, torch.Tensor) else want))


def test_an_average_is_put_together_though_gloo_has_none(validated):
    x = numbers(4, 6)
    found = validated(sample("mean.dim", x, [0]), "S(0)")
    assert found[0].placements == ("P(avg)",)
    assert_whole(found, x.mean(0))


def test_tensors_in_lists_and_among_keywords_find_their_place(validated):
    assert_whole(validated(sample("cat.default", [X, X + 1], 0), "S(1), S(1)"), torch.cat([X, X + 1]))
    assert_whole(validated(sample("clamp.Tensor", X, max=X * 0), "S(1), S(1)"), X.clamp(max=0.0))


def test_strides_of_the_whole_tensor_reach_the_ranks(validated):
    turned = numbers(4, 6).t()
    assert_whole(validated(sample("neg.default", turned), "S(0)"), -turned)


def test_what_is_no_tensor_has_no_placement(validated):
    found = validated(sample("is_same_size.default", X, X), "R, R")
    assert [(one.placements, one.shapes, one.pieces) for one in found] == [(("-",), (None,), (True,))] * 2
    assert found[0].whole == (True,)


def test_an_op_that_writes_is_run_on_the_pieces(validated):
    assert_whole(validated(sample("mul_.Scalar", X, 3.0), "S(0)"), X * 3)
    assert torch.equal(X, numbers(5, 4))


def test_an_argument_that_is_written_to_and_not_returned_is_reported_too(validated):
    found = validated(sample("_foreach_neg_.default", [X]), "S(0)")
    assert found[0].placements == ("S(0)",)
    assert_whole(found, -X)


def test_a_rank_that_raises_alone_is_reported_to_all_and_no_one_waits(validated):
    found = validated(planted("one_raises", X), "S(0)")
    assert [one.failed for one in found] == ["op", "op"]
    assert [one.errors for one in found] == [("", "ValueError: not on this rank")] * 2
    assert "in one_raises" in found[1].trace
    assert found[0].trace == ""
    assert found[0].whole == ()


def test_a_call_that_dtensor_refuses_is_reported_with_every_ranks_sentence(validated):
    found = validated(sample("mm.default", X, X), "R, R")
    assert all(
        len(one.errors) == 2 and all("must have same reduction dim" in error for error in one.errors) for one in found
    )
    assert "\n" not in found[0].errors[0]


def test_results_that_cannot_be_put_together_are_reported_with_their_pieces(validated):
    found = validated(planted("remembered", numbers(4, dtype=torch.int16)), "P(sum)")  # gloo cannot add these
    assert [one.failed for one in found] == ["full_tensor"] * 2
    assert found[0].placements == ("P(sum)",)
    assert found[0].pieces[0].shape == (4,)
    assert found[0].errors == ("RuntimeError: Invalid scalar type",) * 2


def test_pieces_that_do_not_match_are_reported_and_are_not_put_together(validated):
    found = validated(planted("one_grows", X), "S(0)")
    assert [one.failed for one in found] == ["full_tensor"] * 2
    assert [one.errors for one in found] == [
        ("", "WrongPieceShape: its piece has shape (3, 4), S(0) of (5, 4) is (2, 4)")
    ] * 2
    assert [one.shapes for one in found] == [((3, 4),), ((3, 4),)]
    assert found[0].whole == ()


def test_a_placement_of_a_dim_that_the_result_does_not_have_is_named_with_both():
    out = Mock(spec=DTensor, placements=(Shard(2),), shape=torch.Size(()), device_mesh=Mock(shape=(2,)))
    assert (
        str(misfit(out, (), 0))
        == "its piece has shape (), and S(2) names a dim that a tensor of shape () does not have"
    )


def test_the_processes_serve_again_after_an_error(validated, pool):
    before = pool.pids
    validated(planted("one_raises", X), "S(0)")
    assert_whole(validated(sample("neg.default", X), "S(0)"), -X)
    assert pool.pids == before


def test_a_users_ops_are_there_once_his_module_is_imported(validated):
    assert_whole(validated(planted("remembered", X), "P(sum)"), X * 2)


def test_a_rank_that_plays_logs_nothing(validated, pool):
    validated(sample("mm.default", X, X), "R, R")
    assert [outcome.value for outcome in pool.call(logs_errors, [(), ()])] == [False, False]
    assert logs_errors()


def test_a_rank_without_the_users_module_says_so(monkeypatch):
    monkeypatch.syspath_prepend("nowhere")  # so that the path is put back: a rank of a pool keeps the module's folder
    part = ProgramRankTask(
        planted("remembered", X).call, placements("R"), (X,), ((5, 4),), ((4, 1),), "cpu", ("no_such_rules", ".")
    )
    with pytest.raises(ModuleNotFoundError, match="no_such_rules"):
        run_pickled_task(pickling.dumps(part))


def writes_to_stderr(path):
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(os.dup(2), "w")
    drop_native_messages(os.getpid())
    os.write(2, b"terminate called\n")
    print("a line of Python", file=sys.stderr)


def test_a_worker_drops_what_native_code_writes_and_keeps_what_python_does(tmp_path):
    path = tmp_path / "stderr"
    worker = multiprocessing.get_context("fork").Process(target=writes_to_stderr, args=(path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0 and path.read_text() == "a line of Python\n"


def test_what_is_no_worker_keeps_its_stderr(capfd):
    drop_native_messages(os.getpid())
    os.write(2, b"native\n")
    assert capfd.readouterr().err == "native\n"
