import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement
from localtensor.mesh import Mesh
from localtensor.placement import KINDS, Spec, StridedShard, is_defined, is_plain, parse, short


@given(
    st.one_of(
        st.just(Replicate()),
        st.builds(Shard, st.integers(0, 5)),
        st.builds(Partial, st.sampled_from(KINDS)),
    )
)
def test_what_is_printed_is_read_back(placement):
    assert parse(short(placement)) == placement


def test_a_strided_shard_is_read_back():
    assert short(parse("SS(0,2)")) == "SS(0,2)"


def test_a_strided_shard_has_a_definition_without_being_plain_and_one_that_makes_no_blocks_has_none():
    assert is_defined(parse("SS(0,2)")) and not is_plain(parse("SS(0,2)"))
    assert is_defined(Partial("max")) and is_defined(Shard(1)) and is_defined(Replicate())
    assert not is_defined(StridedShard(0, split_factor=0)) and not is_defined(None)
    with pytest.raises(BadPlacement, match="a split factor is 1 or more"):
        Spec(Mesh.of(2), (StridedShard(0, split_factor=0),), (4,), torch.int64)


def test_a_partial_subclass_is_not_a_sum_because_its_reduction_says_so():
    class _OddPartial(Partial):
        pass

    assert short(_OddPartial("sum")) == "P(odd)"
    assert not is_plain(_OddPartial("sum")) and not is_defined(_OddPartial("sum"))
    assert is_plain(Partial("sum"))


@pytest.mark.parametrize("text", ["S(-1)", "P(norm)", "S0", "", "Shard(0)"])
def test_anything_else_is_refused(text):
    with pytest.raises(BadPlacement, match=r"Write R, S\(0\), P\(sum\)"):
        parse(text)


def test_a_spec_needs_a_placement_for_each_axis():
    with pytest.raises(BadPlacement, match="1 placements for 2 mesh axes"):
        Spec(Mesh.of(2, 2), (Replicate(),), (4,), torch.float32)
