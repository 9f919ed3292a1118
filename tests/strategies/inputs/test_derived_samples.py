"""Samples for what no database reaches: from siblings, else drawn; and a crash costs one sample."""

import os
import signal

import pytest

from strategies.base.worker_pool import WorkerPool
from strategies.inputs import derived_samples
from strategies.inputs.derived_samples import DerivationTask, gather, lacking, make, siblings
from strategies.model.rule import overload
from tests.strategies.cases import numbers, sample, silent

X, Y = numbers(4, 6), numbers(4, 6, seed=1)
NEG = sample("neg.default", X)


def fill(by_op, wanted, seed=0):
    """As `gather`, in this process: the samples, and the reason where there are none."""
    made = {task.op: make(task, silent) for task in lacking(by_op, wanted, seed)}
    return {op: found for op, (found, _) in made.items() if found}, {op: why for op, (_, why) in made.items() if why}


def test_only_what_is_wanted_and_lacks_samples_is_made():
    made, reasons = fill({"aten.neg.default": [NEG], "aten.abs.default": []}, ["aten.neg.default", "aten.neg.out"])
    assert (list(made), reasons) == (["aten.neg.out"], {})


def test_a_sibling_is_asked_before_anything_is_drawn():
    made, _ = fill({"aten.neg.default": [NEG]}, ["aten.neg_.default"])
    assert [s.origin for s in made["aten.neg_.default"]] == ["test, as aten.neg_.default"]


def test_what_has_no_sibling_is_drawn():
    made, _ = fill({}, ["aten.positive.default"])
    assert {s.origin[:21] for s in made["aten.positive.default"]} == {"drawn from the schema"}


def test_what_cannot_run_here_says_why():
    made, reasons = fill({}, ["aten._scaled_dot_product_efficient_attention.default"])
    assert made == {}
    assert next(iter(reasons.values())).startswith("no kernel for CPU")


def test_what_refuses_everything_says_so():
    _, reasons = fill({}, ["aten.convolution.default"])
    assert "it refuses all" in reasons["aten.convolution.default"]


def test_the_same_seed_makes_the_same_in_any_order():
    ops = ["aten.square.default", "aten.relu6.default"]
    (one, _), (two, _) = fill({}, ops, seed=3), fill({}, ops[::-1], seed=3)
    assert list(one) == list(two)
    assert all(a.arguments() == b.arguments() for op in ops for a, b in zip(one[op], two[op], strict=True))


@pytest.mark.parametrize(
    ("op", "near"),
    [
        ("aten.add.out", ["aten.add.Tensor", "aten.add_.Tensor"]),
        ("aten._index_put_impl_.default", ["aten.index_put.default"]),
        ("aten.view_copy.default", ["aten.view.default"]),
        ("aten._upsample_bicubic2d_aa_backward.default", ["aten.upsample_bicubic2d_backward.default"]),
        ("aten.upsample_bicubic2d_backward.grad_input", ["aten.upsample_bicubic2d_backward.default"]),
        ("aten.max_pool2d_with_indices_backward.default", []),
        ("aten.add_.Scalar", ["aten.add_.Tensor", "aten.add.Tensor"]),
        ("aten.mul.out", []),
    ],
)
def test_siblings_are_overloads_of_a_like_name(op, near):
    have = ["aten.add.Tensor", "aten.add_.Tensor", "aten.view.default", "aten.index_put.default",
            "aten.upsample_bicubic2d_backward.default", "aten.upsample_bicubic2d.default",
            "aten.max_pool2d_with_indices.default"]  # fmt: skip
    assert siblings(op, have) == near


def test_a_task_brings_the_siblings_samples():
    [task] = lacking({"aten.neg.default": [NEG], "aten.abs.default": [NEG]}, ["aten.neg.out"], seed=5)
    assert (task.siblings, task.seed) == ((NEG,), 5)


def test_a_sibling_that_does_not_fit_is_passed_over():
    task = DerivationTask("aten.neg.out", (sample("equal.default", X, Y), NEG))
    found, why = make(task, silent)
    assert (len(found), why) == (1, "")


def test_without_draws_a_refusal_is_the_reason():
    found, why = make(DerivationTask("aten._foreach_neg.default", (NEG,), draws=False), silent)
    assert (found, why) == ([], "nothing is known that could be its argument 'self'")


def crash(task, note):
    """As `make`, of an op that kills its process on the second of three samples."""
    for number, one in enumerate(task.siblings):
        note(number)
        if one.origin == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
    return (list(task.siblings), "") if task.siblings else ([], "nothing left")


def test_a_sample_that_kills_its_worker_costs_that_sample_alone(monkeypatch):
    killer = sample("neg.default", X)
    object.__setattr__(killer, "origin", "killer")
    last = sample("neg.default", Y)
    monkeypatch.setattr(derived_samples, "make", crash)
    with WorkerPool(1) as crew:
        made, reasons = gather(crew, {"aten.neg.default": [NEG, killer, last]}, ["aten.neg.out"])
    assert [s.origin for s in made["aten.neg.out"]] == ["test", "test"]
    assert reasons == {}


def test_a_crash_on_everything_is_the_reason(monkeypatch):
    killer = sample("neg.default", X)
    object.__setattr__(killer, "origin", "killer")
    monkeypatch.setattr(derived_samples, "make", crash)
    with WorkerPool(1) as crew:
        made, reasons = gather(crew, {"aten.neg.default": [killer]}, ["aten.neg.out"])
    assert made == {}
    assert reasons == {"aten.neg.out": "the process died with SIGKILL"}


def test_workers_make_what_this_process_makes():
    wanted = ["aten.neg.out", "aten.positive.default"]
    here, _ = fill({"aten.neg.default": [NEG]}, wanted)
    with WorkerPool(2) as crew:
        there, _ = gather(crew, {"aten.neg.default": [NEG]}, wanted)
    assert {op: [s.arguments() for s in found] for op, found in there.items()} == {
        op: [s.arguments() for s in found] for op, found in here.items()
    }


def test_a_made_sample_runs():
    made, _ = fill({"aten.add.Tensor": [sample("add.Tensor", X, Y)]}, ["aten.add.out"])
    [one] = made["aten.add.out"]
    assert overload(one.op)(X, Y, out=one.tensors[2]).equal(X + Y)
