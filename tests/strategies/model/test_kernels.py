"""Ops on another device, which "cpu:0" stands for here: tensors are copied there and back, one call at a time or many at once."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from strategies.model import kernels
from strategies.model.kernels import REJECTIONS, copied_to, kernels_on, placed_call, run_call, run_in_batches
from strategies.model.rule import Call, Leaf, call_of, overload
from strategies.validation.finding import OverloadTask, task_line
from strategies.validation.overload import validate_overload
from tests.strategies.cases import numbers, sample


def test_on_another_device_an_op_gives_the_same_and_leaves_its_tensors_alone():
    x, other = numbers(4, 6), numbers(4, 6)
    one = sample("add_.Tensor", x, other)
    here = run_call(one.call, one.tensors, mutates=True)
    before = [t.clone() for t in one.tensors]
    with kernels_on("cpu:0"):
        there = run_call(one.call, one.tensors, mutates=False)
    assert torch.equal(there[0], here[0])
    assert all(map(torch.equal, one.tensors, before))
    assert all(map(torch.equal, there[1], here[1]))


@pytest.mark.parametrize("x", [
    torch.arange(12.0).view(3, 4).t(), torch.arange(12.0)[1::3], torch.arange(3.0).expand(4, 3), torch.empty(0, 3).t(),
    torch.randn(3, dtype=torch.complex64).conj(),
], ids=["transposed", "with gaps", "expanded", "empty", "conjugate"])  # fmt: skip
def test_a_copy_for_another_device_has_the_same_strides(x):
    made = copied_to(x, "cpu:0")
    assert torch.equal(made, x)
    assert made.stride() == x.stride()
    assert made.data_ptr() != x.data_ptr() or not x.numel()


def test_a_call_that_names_a_device_names_the_one_that_it_runs_on():
    one = Call("aten.new_zeros.default", (Leaf(0), [2]), (("device", torch.device("cpu")),))
    assert placed_call(one, "cuda:0").kwargs == (("device", torch.device("cuda:0")),)
    elsewhere = Call("aten.new_zeros.default", (Leaf(0), [2]), (("device", torch.device("meta")),))
    assert placed_call(elsewhere, "cuda:0") == elsewhere


def test_a_scalars_tensor_of_a_foreach_op_stays_on_the_host(monkeypatch):
    moved = []
    monkeypatch.setattr(kernels, "copied_to", lambda x, device, wait=True: moved.append(tuple(x.shape)) or x.clone())
    lists = [numbers(2)], [numbers(2)], [numbers(2)]
    one = sample("_foreach_addcmul.Tensor", *lists, torch.tensor([2.0], dtype=torch.float64))
    with kernels_on("cpu:0"):
        run_call(one.call, one.tensors, mutates=False)
    assert (1,) not in moved
    assert moved.count((2,)) == 3


@pytest.mark.parametrize("kind", ["efficient", "flash"])
def test_the_state_of_a_generator_stays_where_the_kernel_reads_it(monkeypatch, kind):
    op = overload(f"aten._scaled_dot_product_{kind}_attention_backward.default")
    state = {"philox_seed": torch.zeros((), dtype=torch.int64), "philox_offset": torch.ones((), dtype=torch.int64)}
    given = {"grad_out_": numbers(1), "grad_out": numbers(1), **state}
    args = {a.name: given[a.name] for a in op._schema.arguments if a.name in given}
    call, tensors = call_of(op, (), args)
    moved = []
    monkeypatch.setattr(kernels, "copied_to", lambda x, device, wait=True: moved.append(x) or x)
    monkeypatch.setattr(kernels, "placed_call", lambda call, device: lambda there: None)
    with kernels_on("cpu:0"):
        kernels._sent(call, tensors, False)
    assert len(moved) == (1 if kind == "efficient" else 3)


# Many calls at once.


def in_batches(work):
    """What `work(note)` returns on "cpu:0", and the steps that it noted."""
    steps = []
    with kernels_on("cpu:0"):
        return run_in_batches(work, steps.append), steps


def results(one, mutates=False):
    try:
        raw, flat = run_call(one.call, one.tensors, mutates=mutates)
    except RuntimeError as error:
        return str(error)
    return [raw, *flat]


@pytest.fixture
def device(monkeypatch):
    """Another device, whose results are those of the host times `times`; `sent` are the calls that it got and whether they waited."""
    seen = SimpleNamespace(times=-1, sent=[], sent_there=kernels._sent)

    def there(call, tensors, mutates, *, wait=True):
        seen.sent.append((call.op, wait))
        return tree_map(lambda x: x * seen.times, seen.sent_there(call, tensors, mutates, wait=wait))

    monkeypatch.setattr(kernels, "_sent", there)
    return seen


def test_calls_in_batches_give_what_the_device_gives_and_none_waits(device):
    ones = [sample("neg.default", numbers(4, 3)), sample("sum.default", numbers(5)), sample("neg.default", numbers(2))]
    (found, steps) = in_batches(lambda note: [note(7), *(results(one)[1] for one in ones)][1:])
    assert all(torch.equal(got, -one.call(one.tensors)) for got, one in zip(found, ones, strict=True))
    assert [wait for _, wait in device.sent] == [False] * 3
    assert steps == [7, 7]


def test_equal_calls_are_sent_once_and_others_are_not_mixed_up_with_them(device):
    x, whole = numbers(3), torch.arange(3)
    ones = [
        sample("add.Scalar", x, 1), sample("add.Scalar", x.clone(), 1), sample("add.Scalar", x, 2), sample("sub.Scalar", x, 1),
        sample("add.Scalar", whole, 1), sample("add.Scalar", whole, 1.0), sample("add.Scalar", whole, True),
        sample("add.Scalar", x[None], 1), sample("add.Scalar", x + 1e-16, 1), sample("add.Scalar", x.flip(0), 1),
        sample("add.Scalar", numbers(3).view(torch.int64), 1),
    ]  # fmt: skip
    found, _ = in_batches(lambda note: [results(one)[1] for one in ones])
    for got, one in zip(found, ones, strict=True):
        want = -one.call(one.tensors)
        assert got.dtype == want.dtype and torch.equal(got, want)
    distinct = len(ones) - 1 - int(torch.equal(x + 1e-16, x))
    assert len(device.sent) == distinct


def test_an_op_that_writes_gets_copies_and_its_results_and_what_it_wrote_are_the_devices(device):
    one = sample("add_.Tensor", numbers(2, 3), numbers(2, 3, seed=1))
    before = one.tensors[0].clone()
    (raw, flat), _ = in_batches(lambda note: run_call(one.call, one.tensors, mutates=True))
    assert torch.equal(one.tensors[0], before)
    assert torch.equal(raw, -(before + one.tensors[1])) and torch.equal(flat[-1], raw)


def test_a_call_that_the_host_has_no_kernel_for_goes_on_with_what_the_device_gives(device, monkeypatch):
    here = kernels._run_here

    def without_neg(call, tensors, mutates):
        if "neg" in call.op:
            raise NotImplementedError("no kernel")
        return here(call, tensors, mutates)

    monkeypatch.setattr(kernels, "_run_here", without_neg)

    def work(note):
        first = results(sample("neg.default", numbers(3)))[1]
        return results(sample("exp.default", first))[1]

    found, _ = in_batches(work)
    assert torch.equal(found, -numbers(3).exp())
    assert device.sent == [("aten.neg.default", False), ("aten.exp.default", False)]


def test_a_call_made_from_another_result_of_the_device_runs_there_at_once(device):
    found, _ = in_batches(lambda note: results(sample("exp.default", results(sample("neg.default", numbers(3)))[1]))[1])
    assert torch.equal(found, -numbers(3).exp())
    assert device.sent[-1] == ("aten.exp.default", True)


def test_an_index_that_the_host_refuses_never_comes_to_the_device(device):
    one = sample("index_select.default", numbers(3), 0, torch.tensor([7]))
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        in_batches(lambda note: run_call(one.call, one.tensors, mutates=False))
    assert device.sent == []


@pytest.mark.parametrize("op", ["bernoulli.default", "gather.default", "embedding.default", "nll_loss_forward.default"])
def test_what_the_hosts_kernels_say_of_bad_values_is_known_by_its_words(op):
    bad, index = torch.tensor([[7.0, -1.0]]), torch.tensor([[9]])
    args = {
        "bernoulli.default": (bad,), "gather.default": (bad, 1, index), "embedding.default": (bad, index),
        "nll_loss_forward.default": (bad, index[0], None, 1, -100),
    }[op]  # fmt: skip
    one = sample(op, *args)
    with pytest.raises(REJECTIONS, match=kernels._BAD_VALUES):
        run_call(one.call, one.tensors, mutates=False)


@pytest.mark.parametrize("refuses", ["here", "there", "both"])
def test_what_the_device_refuses_is_refused_and_nothing_else(monkeypatch, refuses):
    def refusing(run, name):
        def runs(*args, **kwargs):
            if refuses in (name, "both"):
                raise RuntimeError(f"refused {name}")
            return run(*args, **kwargs)

        return runs

    monkeypatch.setattr(kernels, "_run_here", refusing(kernels._run_here, "here"))
    monkeypatch.setattr(kernels, "_sent", refusing(kernels._sent, "there"))
    found, _ = in_batches(lambda note: results(sample("neg.default", numbers(3))))
    assert found == "refused there" if refuses != "here" else torch.equal(found[1], -numbers(3))


def test_what_a_lost_device_does_not_give_is_asked_for_again(device, monkeypatch):
    lost, home = [True], kernels._brought_home

    def lost_once(values):
        if lost.pop() if lost else False:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return home(values)

    monkeypatch.setattr(kernels, "_brought_home", lost_once)
    found, _ = in_batches(lambda note: results(sample("neg.default", numbers(3)))[1])
    assert torch.equal(found, numbers(3))
    assert device.sent == [("aten.neg.default", False), ("aten.neg.default", True)]


def test_without_another_device_work_runs_once():
    ran = []
    assert run_in_batches(lambda note: ran.append(note) or 5, print) == 5
    assert ran == [print]


def test_results_come_home_with_their_strides_dtypes_and_identity():
    x = numbers(4, 6)
    values = [
        x, x.t(), x[:, ::2], x[0].expand(3, 6), x > 0, x[:0], torch.randn(3, dtype=torch.complex64).conj(), 3, None, x,
        x.to(torch.bfloat16), x.to(torch.float8_e4m3fn), torch.tensor(2.0), torch.eye(2).to_sparse(),
    ]  # fmt: skip
    made = kernels._brought_home(values)
    assert made[0] is made[9] and made[7:9] == [3, None]
    for got, want in zip(made, values, strict=True):
        if isinstance(want, torch.Tensor):
            assert got is not want and (got.dtype, got.layout) == (want.dtype, want.layout)
            assert torch.equal(got.to_dense().double() if got.dtype.itemsize == 1 else got.to_dense(),
                               want.to_dense().double() if want.dtype.itemsize == 1 else want.to_dense())  # fmt: skip
            assert want.layout != torch.strided or got.stride() == want.stride()


@pytest.mark.few(3)
@pytest.mark.parametrize("one", [
    sample("_softmax.default", numbers(4, 3), 0, False), sample("topk.default", numbers(4, 6), 2), sample("unbind.int", numbers(3, 4), 1),
    sample("_foreach_add.List", [numbers(4), numbers(2, 3)], [numbers(4), numbers(2, 3)]),
    sample("scatter_.value", numbers(4, 3), 0, torch.tensor([[1, 2, 0]]), 2.0), sample("add_.Tensor", numbers(4), numbers(4)),
], ids=lambda one: one.op)  # fmt: skip
def test_a_task_in_batches_says_what_it_says_one_call_at_a_time(one):
    task = OverloadTask(one.op, (one,), ((2,), (3,)), 0)
    with kernels_on("cpu:0"):
        alone = validate_overload(task, lambda step: None)
        many = run_in_batches(lambda note: validate_overload(task, note), lambda step: None)
    assert [task_line(result, 0.0) for result in many] == [task_line(result, 0.0) for result in alone]
    assert sum(result.tried for result in many)
