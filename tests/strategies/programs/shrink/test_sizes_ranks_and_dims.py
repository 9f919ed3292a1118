import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import Program
from strategies.programs.shrink.sizes import STAGES, fewer_axes, fewer_operands, fewer_ranks, smaller_dims
from tests.strategies.cases import numbers, sample

R, S, P = Replicate(), Shard(0), Partial("sum")
ADD = sample("add.Tensor", numbers(4), numbers(4))


def test_the_order_is_fixed():
    assert [name for name, _ in STAGES] == ["dtypes", "ranks", "axes", "operands", "dims", "scalars", "values"]


@pytest.mark.parametrize(("mesh", "want"), [
    ((2,), []), ((4,), [(2,), (3,)]), ((3, 2), [(2, 2)]), ((3, 4), [(2, 4), (3, 2), (3, 3)]),
])  # fmt: skip
def test_ranks_go_to_two_first_axis_by_axis(mesh, want):
    found = [p.mesh for p in fewer_ranks(Program(ADD, mesh, ((S,) * len(mesh),) * 2))]
    assert [m for i, m in enumerate(found) if m not in found[:i]] == want


def test_an_axis_goes_with_its_placements_and_so_does_a_flattened_submesh():
    found = list(fewer_axes(Program(ADD, (2, 3), ((S, R), (P, R)), flattened=True)))
    assert [(p.mesh, p.inputs, p.flattened) for p in found] == [
        ((2,), ((S,), (P,)), True), ((3,), ((R,), (R,)), True), ((2, 3), ((S, R), (P, R)), False)
    ]  # fmt: skip
    assert list(fewer_axes(Program(ADD, (2,), ((S,), (S,))))) == []


def test_what_follows_is_left_out_first():
    found = list(fewer_operands(Program(ADD, (2,), ((S,), (S,)), then="sum")))
    assert [(p.then, p.inputs) for p in found] == [("", ((S,), (S,))), ("sum", ((R,), (S,))), ("sum", ((S,), (R,)))]


def test_the_inputs_of_a_rule_for_one_axis_are_its_name_and_stay():
    assert list(fewer_operands(Program(ADD, (2,), ((S,), (S,))))) == []


def test_on_a_mesh_placements_become_replicas_one_at_a_time():
    found = list(fewer_operands(Program(ADD, (2, 2), ((S, P), (R, S)))))
    assert [p.inputs for p in found] == [((R, P), (R, S)), ((S, R), (R, S)), ((S, P), (R, R))]


def test_optional_tensors_go():
    one = sample("native_layer_norm.default", numbers(2, 3), [3], numbers(3), numbers(3, seed=1), 1e-5)
    found = list(fewer_operands(Program(one, (2,), ((S,), (R,), (R,)))))
    assert [p.sample.call.args[2:4].count(None) for p in found] == [1, 1]
    assert [len(p.sample.tensors) for p in found] == [2, 2] and found[0].inputs == ((S,), (R,))
    assert found[0].sample.tensors[1] is one.tensors[2] and found[1].sample.tensors[1] is one.tensors[1]


def test_lists_of_tensors_of_one_length_lose_the_same_elements():
    xs, ys = [numbers(n) for n in (1, 2, 3)], [numbers(n) for n in (1, 2, 3)]
    one = sample("_foreach_add.List", xs, ys)
    found = list(fewer_operands(Program(one, (2,), ((R,),) * 6)))
    assert [[len(x) for x in p.sample.tensors] for p in found] == [[1, 1], [1, 2, 1, 2], [1, 3, 1, 3], [2, 3, 2, 3]]
    assert all(len(p.inputs) == len(p.sample.tensors) for p in found)


def test_dims_go_before_sizes():
    found = [
        p.sample.tensors[0].ndim for p in smaller_dims(Program(sample("relu.default", numbers(4, 4)), (2,), ((R,),)))
    ]
    assert found == sorted(found) and {1, 2} == set(found)
