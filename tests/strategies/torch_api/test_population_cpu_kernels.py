"""Whether this device has a kernel, asked of torch's dispatcher."""

import pytest
import torch

from strategies.torch_api.population import missing_kernel_reason


def test_the_dispatcher_can_be_asked():
    assert callable(torch._C._dispatch_has_computed_kernel_for_dispatch_key)


@pytest.mark.parametrize(
    "op", ["aten.add.Tensor", "aten.clip.default", "aten.conj_physical.default", "prims.abs.default"]
)
def test_kernels_of_its_own_and_composite_ones_count(op):
    assert missing_kernel_reason(op) == ""


def test_an_op_of_the_gpu_alone_is_told():
    why = missing_kernel_reason("aten._scaled_dot_product_efficient_attention.default")
    assert why.startswith("no kernel for CPU in this build of torch")


def test_where_torch_cannot_be_asked_nothing_is_said(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_has_computed_kernel_for_dispatch_key")
    assert missing_kernel_reason("aten._scaled_dot_product_efficient_attention.default") == ""
