from torch.distributed.tensor import Replicate, Shard

from strategies.model.arguments import with_value_at
from strategies.model.oracle import run_oracle
from strategies.model.rule import Leaf, Program
from strategies.programs.shrink.values import with_call, with_tensors, without_tensors
from tests.strategies.cases import numbers, sample

CAT = sample("cat.default", [numbers(2), numbers(3), numbers(4)], 0)


def test_tensors_go_and_the_others_are_numbered_anew():
    program = Program(CAT, (2,), ((Shard(0),), (Replicate(),), (Shard(0),)))
    left = without_tensors(program, with_value_at(CAT.call, (0,), [Leaf(0), Leaf(2)]), [1])
    assert left.sample.call.args == ([Leaf(0), Leaf(1)], 0)
    assert [len(x) for x in left.sample.tensors] == [2, 4] and left.inputs == ((Shard(0),), (Shard(0),))
    assert run_oracle(left.sample).outputs[0].shape == (6,)


def test_tensors_and_calls_are_replaced_in_a_copy():
    program = Program(CAT, (2,), ((Replicate(),),) * 3)
    other = with_tensors(program, {1: numbers(7)})
    assert [len(x) for x in other.sample.tensors] == [2, 7, 4] and other.sample.origin == "test"
    assert with_call(program, with_value_at(CAT.call, (1,), -1)).sample.call.args[1] == -1
    assert [len(x) for x in program.sample.tensors] == [2, 3, 4]
