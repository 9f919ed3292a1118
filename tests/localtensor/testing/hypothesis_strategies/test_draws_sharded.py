"""Sharded values: the whole and its pieces; and specs as text."""

import pytest
import torch
from hypothesis import given

from localtensor.errors import BadPlacement, LocalTensorError
from localtensor.layout import shards
from localtensor.layout.spec import StridedShard
from localtensor.testing import draws
from localtensor.testing.hypothesis_strategies.layouts import cut_pieces

COMPARED = [dtype for dtype in draws.DTYPES if not dtype.is_complex]


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@given(draws.sharded(kinds=draws.KINDS, orders=True))
def test_assembling_the_pieces_gives_the_whole_to_the_last_bit(x):
    assert [tuple(piece.shape) for piece in x.pieces] == shards.local_shapes(x.spec)
    assert_same(draws.assemble(x.pieces, x.spec), x.whole)


@given(draws.sharded(kinds=draws.KINDS, patterns=("nan", "inf"), dtypes=COMPARED))
def test_so_it_does_with_nan_and_infinities(x):
    assert_same(draws.assemble(x.pieces, x.spec), x.whole)


@given(draws.sharded(patterns=("rough",), dtypes=(torch.float32, torch.float64)))
def test_rough_values_come_back_up_to_rounding(x):
    torch.testing.assert_close(draws.assemble(x.pieces, x.spec), x.whole, atol=1e-4, rtol=1e-4)


@given(draws.sharded(kinds=("R", "S", "SS"), orders=True))
def test_pieces_are_those_of_split_and_share_no_memory(x):
    for piece, want in zip(x.pieces, shards.split(x.whole, x.spec), strict=True):
        assert_same(piece, want)
        assert piece.is_contiguous()
    storages = [piece.untyped_storage().data_ptr() for piece in (x.whole, *x.pieces) if piece.numel()]
    assert len(set(storages)) == len(storages)


def test_the_turns_of_the_axes_are_written_and_read():
    x = draws.Sharded.of("i64[5] @ dp=2:S(0)[1], tp=2:S(0)[0]", "arange")
    assert [piece.tolist() for piece in x.pieces] == [[0, 1], [3], [2], [4]]
    assert repr(x) == "Sharded.of('i64[5] @ dp=2:S(0)[1], tp=2:S(0)[0]', 'arange', 0)"
    assert draws.read_spec("i64[5] @ a=2:S(0)[0], b=2:S(0)[1]") == draws.read_spec("i64[5] @ a=2:S(0), b=2:S(0)")


@pytest.mark.parametrize("text", [
    "f32[4] @ a=2:S(0)[1], b=2:S(0)", "f32[4] @ a=2:S(0)[1], b=2:S(0)[2]", "f32[4] @ a=2:S(0)[0], b=2:S(0)[0]",
    "f32[4] @ a=2:R[0]", "f32[4] @ a=2:P(sum)[0], b=2:S(0)",
])  # fmt: skip
def test_turns_that_make_no_order_are_refused(text):
    with pytest.raises(
        draws.BadDraw, match=r"these turns do not say in which order the axes cut a dim\. Number all axes"
    ):
        draws.read_spec(text)


def test_strided_shards_that_take_turns_have_no_meaning_for_torch():
    with pytest.raises(BadPlacement, match="it has no meaning, or two"):
        draws.Sharded.of("f32[4] @ a=2:SS(0,2)[1], b=2:S(0)[0]", "arange")


def test_a_strided_shard_is_a_chunk_of_each_block():
    x = draws.Sharded.of("i64[10] @ a=2:SS(0,3)", "arange")
    assert [piece.tolist() for piece in x.pieces] == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    nested = draws.Sharded.of("i64[8] @ fsdp=2:SS(0,2), tp=2:S(0)", "arange")
    assert [piece.tolist() for piece in nested.pieces] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_replicas_of_partial_values_are_replicas():
    x = draws.Sharded.of("f32[6] @ a=2:R, b=2:P(sum)", "normal", 4)
    assert torch.equal(x.pieces[0], x.pieces[2]) and torch.equal(x.pieces[1], x.pieces[3])
    assert not torch.equal(x.pieces[0], x.pieces[1])


def test_odd_seeds_have_the_second_form_of_partial_values():
    def zeros(seed):
        return int((torch.stack(draws.Sharded.of("f32[100] @ a=3:P(sum)", "ones", seed).pieces) == 0).sum())

    assert [zeros(seed) > 60 for seed in range(6)] == [False, True] * 3


def test_another_seed_splits_another_way_and_the_same_the_same():
    x = draws.Sharded.of("f32[5] @ a=2:P(sum)", "ones", 0).spec
    whole = torch.ones(5)
    assert_same(torch.stack(cut_pieces(whole, x, 0)), torch.stack(cut_pieces(whole, x, 0)))
    assert not torch.equal(torch.stack(cut_pieces(whole, x, 0)), torch.stack(cut_pieces(whole, x, 2)))


def test_its_print_makes_it_again():
    x = draws.Sharded.of("bf16[7] @ dp=2:S(0), tp=3:P(avg)", "normal", 5)
    again = eval(repr(x), {"Sharded": draws.Sharded})
    assert repr(x) == "Sharded.of('bf16[7] @ dp=2:S(0), tp=3:P(avg)', 'normal', 5)"
    assert again == x and hash(again) == hash(x)
    assert all(map(torch.equal, again.pieces, x.pieces))


@given(draws.specs(kinds=draws.KINDS))
def test_a_spec_is_read_back_from_its_text(spec):
    assert draws.read_spec(draws.spec_text(spec)) == spec


def test_a_spec_reads_as_people_write_it():
    spec = draws.read_spec("f32[5,3] @ dp=2:SS(0, 2), tp=4:P(max)")
    assert spec.mesh.names == ("dp", "tp") and spec.mesh.sizes == (2, 4) and spec.shape == (5, 3)
    assert isinstance(spec.placements[0], StridedShard)


@pytest.mark.parametrize("text", [
    "", "f32[2]", "f32[2] @ ", "f32[2] @ a:S(0)", "f32[2] @ a=2:S(0),b=2:R", "q32[2] @ a=2:R", "f32[2,] @ a=2:R",
    "f32[2] @ a=2:R, ", "f32[-1] @ a=2:R", "f32[2] @ 1=2:R", "f32[2] @ a=0:R", "f32[2] @ a=2:Q", "f32[2] @ a=2:S(1)",
    "f32[2] @ a=2:R, a=2:R", None,
])  # fmt: skip
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(LocalTensorError):
        draws.read_spec(text)


def test_a_layout_with_two_meanings_is_refused():
    with pytest.raises(
        BadPlacement, match=r"^draws.Sharded: placement: 'SS\(0,2\), S\(0\)': it has no meaning, or two"
    ):
        draws.Sharded.of("f32[7] @ a=3:SS(0,2), b=2:S(0)", "ones")


def test_a_text_that_is_too_long_to_be_a_spec_is_refused_at_once():
    with pytest.raises(draws.BadDraw, match="this is no spec"):
        draws.read_spec(f"f32[4] @ {'x' * 100_000}")
