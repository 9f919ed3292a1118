"""Every registered overload, once, in order, with its family and why it cannot run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.model.rule import overload
from strategies.torch_api import dtensor
from strategies.torch_api.user_modules import (
    FAMILIES,
    RegisteredOverload,
    all_registered_overloads,
    decomposes_first,
    family,
    missing_kernel_reason,
)


def test_every_registered_overload_is_a_member_once():
    names = [m.op for m in all_registered_overloads()]
    assert names == sorted(set(names))
    assert set(names) == {str(op) for op in dtensor.registered_overloads()}


def test_members_know_who_answers_for_them():
    members = {m.op: m for m in all_registered_overloads()}
    assert members["aten.add.Tensor"].source == dtensor.registry_of(overload("aten.add.Tensor"))
    assert all(m.source for m in members.values())


def test_what_has_no_kernel_says_so():
    cannot = [m for m in all_registered_overloads() if m.cannot]
    assert cannot
    assert all("no kernel" in m.cannot for m in cannot)
    assert len(cannot) < 20


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten._foreach_add_.List", "foreach"),
        ("aten._amp_foreach_non_finite_check_and_unscale_.default", "foreach"),
        ("aten._fused_adam_.default", "fused"),
        ("prims.abs.default", "prims"),
        ("aten.gelu_backward.grad_input", "out="),
        ("aten.gelu_backward.default", "backward"),
        ("aten.add_.Tensor", "in place"),
        ("aten.transpose.int", "views"),
        ("aten.native_batch_norm.default", "forward"),
        ("aten.add.Tensor", "forward"),
    ],
)
def test_families(op, kind):
    assert family(op) == kind == RegisteredOverload(op, "").family


def test_every_member_has_a_known_family():
    torchs = [
        m for m in all_registered_overloads() if m.op.startswith(("aten.", "prims."))
    ]  # other tests register ops of their own
    assert {m.family for m in torchs} == set(FAMILIES)


# Whether this device has a kernel, asked of torch's dispatcher.


def test_the_dispatcher_can_be_asked():
    assert callable(torch._C._dispatch_has_computed_kernel_for_dispatch_key)


@pytest.mark.parametrize(
    "op", ["aten.add.Tensor", "aten.clip.default", "aten.conj_physical.default", "prims.abs.default"]
)
def test_kernels_of_its_own_and_composite_ones_count(op):
    assert missing_kernel_reason(op) == ""


def test_an_op_of_the_gpu_alone_is_reported():
    why = missing_kernel_reason("aten._scaled_dot_product_efficient_attention.default")
    assert why.startswith("no kernel for CPU in this build of torch")


def test_where_torch_cannot_be_asked_nothing_is_said(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_has_computed_kernel_for_dispatch_key")
    assert missing_kernel_reason("aten._scaled_dot_product_efficient_attention.default") == ""


@pytest.mark.parametrize(("op", "first"), [
    ("aten.softmax.int", True), ("aten.matmul.default", True), ("aten.add.Tensor", False), ("aten.relu.default", False),
    ("aten._softmax.default", False), ("aten.silu_backward.default", False),
])  # fmt: skip
def test_an_op_that_autograd_takes_apart_is_never_dispatched(op, first):
    seen = []

    class Noticing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    arguments = {"aten.softmax.int": (x, 0), "aten._softmax.default": (x, 0, False), "aten.relu.default": (x,)}
    with Noticing():
        overload(op)(*arguments.get(op, (x, x)))
    assert decomposes_first(overload(op)) is first is (op not in seen)
