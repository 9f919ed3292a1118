import pytest
import torch

spmd = pytest.importorskip("spmd_types")

from strategies.model.settings import BadSource  # noqa: E402
from strategies.validation.sources.protocol import RefusedLayouts, SourceRaises, sharded  # noqa: E402
from strategies.validation.sources.spmd_types import op_table, typed  # noqa: E402

X = torch.arange(12.0).view(6, 2)


def derived(function, *layouts, grads=None, x=X):
    axis = typed.mesh_axis(2)
    pieces = [typed.piece(x, one, 2, 0) for one in layouts]
    found = typed.result_layouts(lambda ts: function(*ts), pieces, [(one,) for one in layouts], (axis,), grads)
    return [one.name for (one,) in found]


def test_every_part_that_is_used_is_there():
    typed.package()
    table = typed.registry()
    for name in ("_OP_REGISTRY", "_DECOMP_TYPE_RULES", "_DETERMINISTIC_FACTORIES", "_DETERMINISTIC_NEW_FACTORIES"):
        assert len(getattr(table, name)) > 2
    assert callable(spmd.rules.run_typecheck)
    typed.forget_groups()


def test_layouts_of_results_are_read_locally_and_globally():
    assert derived(torch.add, typed.R, typed.R) == ["R"]
    assert derived(torch.add, typed.P, typed.P) == ["P"]
    assert derived(torch.sum, sharded(0)) == ["P"]
    assert derived(torch.neg, sharded(1)) == ["S(1)"]
    assert derived(torch.mul, typed.I, typed.I) == ["I"]


def test_a_refusal_is_distinguished_from_an_error():
    with pytest.raises(RefusedLayouts, match="Partial"):
        derived(torch.mul, typed.P, typed.P)
    with pytest.raises(RefusedLayouts, match="Invariant"):
        derived(torch.mul, typed.I, typed.R, grads=[True, True])
    with pytest.raises(SourceRaises, match=r"ValueError: .*avg"):
        derived(torch.mean, sharded(0))


def test_the_function_refuses_the_pieces_before_the_checker_sees_them():
    with pytest.raises(RefusedLayouts, match="the function refuses the pieces"):
        derived(torch.add, typed.R, sharded(0))


def test_a_type_that_this_version_does_not_know_is_one_sentence(monkeypatch):
    axis = typed.mesh_axis(2)
    monkeypatch.setattr(spmd, "get_local_type", lambda x: {axis: "Q"})
    with pytest.raises(BadSource, match=r"types a result as 'Q', which this one does not know"):
        typed.layout_of(X, axis)


def test_a_package_that_lacks_a_part_is_one_sentence(monkeypatch):
    monkeypatch.delattr(spmd, "get_partition_spec")
    typed.package.cache_clear()
    with pytest.raises(BadSource, match=r"version 0\.\S+ of its package has no get_partition_spec"):
        typed.package()
    typed.package.cache_clear()


def test_every_function_of_the_op_table_has_a_label_that_names_it():
    for label, function in op_table.functions().items():
        assert label.startswith("torch.")
        if label not in op_table.getters():
            found = torch
            for part in label.split(".")[1:]:
                found = getattr(found, part)
            # In lockstep `torch.tensor` is another function of that name.
            assert found == function or found.__name__ == function.__name__
    assert len(op_table.functions()) > 150


def test_a_function_of_torch_that_lockstep_has_replaced_is_no_method(monkeypatch):
    own = torch.tensor

    def tensor(*args):
        return own(*args).clone()

    monkeypatch.setattr(torch, "tensor", tensor)
    op_table._names.cache_clear()
    try:
        assert op_table._label(own) == "torch.tensor"
        assert op_table._label(torch.Tensor.add) == "torch.Tensor.add"
    finally:
        op_table._names.cache_clear()


def test_forms_of_a_function_have_one_base_name():
    assert {op_table.base_name(f"torch.Tensor.{n}") for n in ("add", "add_", "__radd__", "__iadd__", "__add__")} == {
        "add"
    }
    assert op_table.base_name("torch.Tensor.__rtruediv__") == "div"
