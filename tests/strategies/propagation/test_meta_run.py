"""Shapes and dtypes of results: without data, without modes of the caller, from any thread."""

import ast
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.concurrency.sync import THREAD_SYNC, ThreadSync
from strategies.model.rule import Call, Leaf
from strategies.ops.semantics.local_call import InvalidCall, NoMetadata
from strategies.ops.semantics.rule_registry import Meta
from strategies.propagation import meta_run
from strategies.propagation.meta_run import fake_mode_lock, no_caller_modes, output_metas

F32 = torch.float32
X = Meta((4, 3), F32)


def outputs(op, args, *metas, **kwargs):
    return output_metas(Call(op, args, tuple(kwargs.items())), metas, threading.Lock())


@pytest.mark.parametrize(("op", "args", "metas", "want"), [
    ("aten.mm.default", (Leaf(0), Leaf(1)), [X, Meta((3, 2), F32)], [Meta((4, 2), F32)]),
    ("aten.sum.default", (Leaf(0),), [Meta((4,), torch.bool)], [Meta((), torch.int64)]),
    ("aten.split.Tensor", (Leaf(0), 3), [X], [Meta((3, 3), F32), Meta((1, 3), F32)]),
    ("aten.add_.Tensor", (Leaf(0), 1), [X], [X]),
    ("aten.div.Tensor", (Leaf(0), Leaf(0)), [Meta((2,), torch.int64)], [Meta((2,), F32)]),
    ("aten._foreach_add_.Scalar", ([Leaf(0)], 1), [X], []),
    ("aten.histogram.bin_ct", (Leaf(0),), [X], [Meta((100,), F32), Meta((101,), F32)]),  # by fake tensors alone
])  # fmt: skip
def test_what_comes_out(op, args, metas, want):
    assert list(outputs(op, args, *metas)) == want


def test_a_result_that_is_no_tensor_is_none():
    got = outputs("aten._scaled_dot_product_flash_attention.default", (Leaf(0),) * 3, Meta((1, 2, 4, 8), F32))
    assert got[0] == Meta((1, 2, 4, 8), F32)
    assert None in got


@pytest.mark.parametrize("device", [torch.device("cpu"), None, "absent"])
def test_a_factory_takes_no_memory_whatever_its_device(device):
    kwargs = {} if device == "absent" else {"device": device, "pin_memory": False}
    assert outputs("aten.empty.memory_format", ([1 << 40, 1 << 10],), **kwargs) == (Meta((1 << 40, 1 << 10), F32),)


@pytest.mark.parametrize(("op", "metas"), [
    ("aten.nonzero.default", [X]),
    ("aten.masked_select.default", [X, Meta((4, 3), torch.bool)]),
    ("aten._local_scalar_dense.default", [Meta((), F32)]),
])  # fmt: skip
def test_shapes_that_depend_on_values_are_refused_in_a_sentence(op, metas):
    with pytest.raises(NoMetadata, match="depend on the values of its inputs"):
        outputs(op, tuple(Leaf(i) for i in range(len(metas))), *metas)


def test_what_the_op_itself_refuses_is_refused_with_its_own_words():
    with pytest.raises(
        InvalidCall,
        match=r"args: \(f32\[4,3\], f32\[4,3\]\): the op refuses them on meta tensors: .*same reduction dim",
    ):
        outputs("aten.mm.default", (Leaf(0), Leaf(0)), X)


def test_a_mode_of_the_caller_sees_nothing():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Watch():
        assert outputs("aten.neg.default", (Leaf(0),), X) == (X,)


class Doubles(TorchFunctionMode):
    """Makes tensors of another dtype, and results of another dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.double() if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize("op", ["aten.add.Tensor", "aten.mm.default"])
def test_a_mode_over_functions_does_not_see_it_either(op):
    """An answer that it had changed would be remembered, and told to those who have no such mode."""
    metas = Meta((4, 4), torch.float32), Meta((4, 4), torch.float32)
    with Doubles():
        assert torch.ones(2).dtype is torch.float64
        assert output_metas(Call(op, (Leaf(0), Leaf(1))), metas, threading.Lock()) == metas[:1]


def test_within_calm_nothing_of_the_callers_state_is_on_and_after_it_all_is():
    x = torch.ones(2, 2)
    with torch.inference_mode(), torch.autocast("cpu"):
        with no_caller_modes():
            made = torch.mm(x, x)
            on = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    assert on == (False, False, False) and made.dtype == torch.float32 and not made.is_inference()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_another_thread_is_in_fake_mode_is_not_locked_out():
    lock = fake_mode_lock(THREAD_SYNC)
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.acquire).result()
        child = os.fork()
        if child == 0:
            os._exit(0 if lock.acquire(blocking=False) else 1)
        _, status = os.waitpid(child, 0)
        lock.release()
    assert os.waitstatus_to_exitcode(status) == 0


def test_all_who_have_the_same_services_have_the_same_lock():
    sync = ThreadSync()
    assert fake_mode_lock(sync) is fake_mode_lock(sync) is not fake_mode_lock(ThreadSync())


def test_eight_threads_at_once_get_what_one_gets():
    """Ops without a meta kernel go through fake tensors, which threads must not do together."""
    lock, ready = threading.Lock(), threading.Barrier(8)

    def ask(_):
        ready.wait(60)
        calls = [Call("aten.histogram.bin_ct", (Leaf(0), bins)) for bins in range(1, 9)]
        return [output_metas(call, [X], lock) for call in calls]

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    assert got == [[(Meta((bins,), F32), Meta((bins + 1,), F32)) for bins in range(1, 9)]] * 8


def test_fake_mode_is_entered_with_the_lock_and_meta_tensors_need_none():
    class Lock:
        taken = 0

        def __enter__(self):
            self.taken += 1

        def __exit__(self, *_):
            pass

    lock = Lock()
    output_metas(Call("aten.neg.default", (Leaf(0),)), [X], lock)
    assert lock.taken == 0
    output_metas(Call("aten.histogram.bin_ct", (Leaf(0),)), [X], lock)
    assert lock.taken == 1


def test_each_private_part_of_torch_is_in_the_table_and_in_this_torch():
    room = Path(meta_run.__file__)
    private = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(room.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.") and "._" in f"{node.module}."
        for alias in node.names
    } | {"torch.utils._python_dispatch._disable_current_modes"}
    assert private == {
        "torch.utils._python_dispatch._disable_current_modes",
        "torch._decomp.decomposition_table",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
    }
    assert all(name.rpartition(".")[2] in meta_run.__doc__ for name in private)
