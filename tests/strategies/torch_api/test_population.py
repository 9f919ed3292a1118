"""Every registered overload, once, in order, with its family and why it cannot run."""

import pytest

from strategies.model.rule import overload
from strategies.torch_api import dtensor
from strategies.torch_api.population import FAMILIES, RegisteredOverload, all_registered_overloads, family


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
