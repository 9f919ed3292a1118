from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from localtensor._util.patching import IndependentWorld, replaced, wrapped


class Base:
    def twice(self, x):
        return 2 * x


class Derived(Base):
    pass


def test_an_inherited_attribute_is_inherited_again_afterwards():
    with replaced(Derived, "twice", lambda self, x: "other"):
        assert Derived().twice(3) == "other" and Base().twice(3) == 6
    assert "twice" not in vars(Derived) and Derived().twice(3) == 6


def test_it_comes_back_when_the_block_raises():
    box = SimpleNamespace(x=1)
    with pytest.raises(KeyError), replaced(box, "x", 2):
        raise KeyError
    assert box.x == 1


def test_what_is_wrapped_gets_the_original_and_all_arguments():
    with wrapped(Base, "twice", lambda original, self, x: original(self, x) + 1):
        assert Base().twice(3) == 7
        assert Base.twice.__name__ == "twice"
    assert Base().twice(3) == 6


# A world of groups that is an object's own: torch keeps most of it in its module.


TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")


def test_two_worlds_share_nothing_with_each_other_or_with_torch():
    one, other = IndependentWorld(), IndependentWorld()
    for name in TABLES:
        getattr(one, name)["key"] = name
        assert "key" not in getattr(other, name) and "key" not in getattr(c10d._world, name)
    one.group_count = 7
    one.default_pg = "mine"
    assert other.group_count == 0 and other.default_pg is None and not dist.is_initialized()


def test_every_table_of_torchs_world_is_covered():
    tables = {name for name, value in vars(c10d._World).items() if isinstance(value, property)}
    assert {*TABLES, "group_count", "default_pg"} <= tables
    assert all(
        name in vars(IndependentWorld)
        for name in tables - {"default_pg", "pg_coalesce_state", "comms", "pg_config_info"}
    )
