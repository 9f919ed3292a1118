"""Python objects in lockstep: what rank threads give, where that is one object for all ranks."""

import pytest
import torch
import torch.distributed as dist

from localtensor.errors import NotInLockstep, WrongListLength
from localtensor.lockstep.mode import LocalTensorMode
from tests.localtensor.both_ways import check_both_ways, numbers


def test_objects_that_all_ranks_share_and_those_that_differ():
    def program():
        things, one = [None] * 4, [{"a": 1, "b": [2.5, "x"]}, None]
        dist.all_gather_object(things, {"rank": dist.get_rank(), "x": numbers(2), "all": "yes"})
        dist.broadcast_object_list(one, 2)
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        two = [None] * 2
        dist.all_gather_object(two, (dist.get_rank(), "same"), group=pairs)
        mine = [None]
        dist.scatter_object_list(mine, [{"n": i, "x": torch.full((2,), i)} for i in range(4)], 0)
        return things, one, two, mine

    things, _, two, mine = check_both_ways(program)
    assert (
        things[2]["rank"] == 2
        and str(two[1][0]) == "RankInts(1, 1, 3, 3)"
        and str(mine[0]["n"]) == "RankInts(0, 1, 2, 3)"
    )


def test_objects_that_cannot_be_one_object_are_refused():
    with LocalTensorMode(2):
        with pytest.raises(NotInLockstep, match="ranks get different objects: 'a' and others"):
            dist.scatter_object_list([None], ["a", "b"], 0)
        with pytest.raises(NotInLockstep, match="built differently"):
            dist.scatter_object_list([None], ["a", ["b"]], 0)
        with pytest.raises(WrongListLength, match="scatter_object_list"):
            dist.scatter_object_list([None], [], 0)


def test_a_gathered_object_is_at_the_root_alone():
    with LocalTensorMode(3):
        found = [None] * 3
        dist.gather_object({"x": numbers(2), "n": dist.get_rank()}, found, 1)
        assert found[2]["x"].ranks == (1,) and torch.equal(found[2]["x"].on(1), numbers(2).on(2))
        assert str(found[2]["n"]) == "2" or found[2]["n"] == 2
        with pytest.raises(ValueError, match="must be specified on destination rank"):
            dist.gather_object(1, None, 1)
