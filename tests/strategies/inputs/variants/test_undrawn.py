"""What no sample draws: flags, strings, optional arguments and dtypes, each with a wrong rule that it alone finds.
The right rules beside them are sound in all of these calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.inputs.variants.undrawn import Undrawn, as_dtype, other_counts, other_lists, strings_of
from strategies.model.rule import Call, Leaf, Sample, overload
from strategies.model.verdict import Verdict
from strategies.validation.finding import OverloadTask
from strategies.validation.overload import validate_overload
from tests.strategies.adverse_ops import always, verdicts
from tests.strategies.cases import numbers, sample

LIB = torch.library.Library("undrawn", "FRAGMENT")  # the ops live as long as this does
X = numbers(4, 6)
PARTIAL, SHARD = ([Partial("sum")], [Partial("sum")]), ([Shard(0)], [Shard(0)])


def plant(schema: str, function: Callable[..., Tensor], rule: Callable[..., list[Any]]) -> None:
    LIB.define(schema)
    name = schema.partition("(")[0]
    LIB.impl(name, function, "CompositeExplicitAutograd")
    register_sharding(overload(f"undrawn.{name}.default"))(rule)


def doubled(x: Tensor, squares: bool = False) -> Tensor:
    return x * x if squares else x * 2


def total(x: Tensor, mode: str = "sum") -> Tensor:
    if mode not in ("sum", "amax"):
        raise ValueError(f"mode must be either sum or amax, but it is {mode}")
    return x.sum(0) if mode == "sum" else x.amax(0)


def weighted(x: Tensor, offset: Tensor | None = None) -> Tensor:
    return x * 2 if offset is None else x * 2 + offset


def half_is_capped(x: Tensor) -> Tensor:
    return x.clamp(max=1.0) if x.dtype == torch.bfloat16 else x * 2


def moved(x: Tensor) -> Tensor:
    return x.flip(0) if x.dtype.itemsize == 1 else x.clone()


def rectified(x: Tensor) -> Tensor:
    return torch.complex(x.real, x.imag.relu()) if x.is_complex() else x.clone()


def padded(rule: tuple[list[Any], list[Any]], count: int) -> tuple[list[Any], list[Any]]:
    return rule[0], [*rule[1], *[None] * count]


for right in (False, True):
    which = "right" if right else "wrong"
    plant(f"flag_{which}(Tensor x, bool squares=False) -> Tensor", doubled,
          lambda x, squares=False, right=right: [padded(SHARD, 1)] if right and squares else
          [padded(SHARD, 1), padded(PARTIAL, 1)])  # fmt: skip
    plant(f"string_{which}(Tensor x, str mode='sum') -> Tensor", total,
          lambda x, mode="sum", right=right: [([Partial("max" if right and mode == "amax" else "sum")], [Shard(0), None])])  # fmt: skip
    plant(f"optional_{which}(Tensor x, Tensor? offset=None) -> Tensor", weighted,
          lambda x, offset=None, right=right: [padded(PARTIAL, 1)] if offset is None else
          [([Partial("sum")], [Partial("sum"), Partial("sum") if right else Replicate()])])  # fmt: skip
    plant(f"bfloat16_{which}(Tensor x) -> Tensor", half_is_capped,
          lambda x, right=right: [SHARD] if right and x.tensor_meta.dtype == torch.bfloat16 else [SHARD, PARTIAL])  # fmt: skip
    plant(f"eight_bits_{which}(Tensor x) -> Tensor", moved,
          lambda x, right=right: [([Replicate()], [Replicate()])] if right and x.tensor_meta.dtype.itemsize == 1 else [SHARD])  # fmt: skip
    plant(f"complex_{which}(Tensor x) -> Tensor", rectified,
          lambda x, right=right: [SHARD] if right and x.tensor_meta.dtype.is_complex else [SHARD, PARTIAL])  # fmt: skip

REAL, INTEGER, COMPLEX = X, torch.arange(24).view(4, 6), numbers(4, 6, dtype=torch.complex64)
PLANTED = [
    ("flag", REAL), ("string", numbers(12, 2)), ("optional", REAL), ("bfloat16", REAL), ("eight_bits", REAL),
    ("eight_bits", INTEGER),
]  # fmt: skip


def unsound(name: str, x: Tensor) -> set[str]:
    op = f"undrawn.{name}.default"
    one = Sample(Call(op, (Leaf(0),)), (x,), "test")
    found = validate_overload(OverloadTask(op, (one,), ((2,), (3,)), 0), lambda number: None)
    assert not [crash for result in found for crash in result.crashed]
    assert any(result.sound for result in found)
    return {rule for result in found for rule in result.suspects}


@pytest.mark.parametrize(("name", "x"), PLANTED, ids=[f"{name} {str(x.dtype)[6:]}" for name, x in PLANTED])
def test_what_a_choice_that_no_sample_draws_alone_finds(name, x, monkeypatch):
    assert unsound(f"{name}_right", x) == set()
    assert unsound(f"{name}_wrong", x)
    monkeypatch.setattr(Undrawn, "calls", lambda *_: iter(()))
    assert unsound(f"{name}_wrong", x) == set()


def test_complex_parts_have_imaginary_parts_on_every_rank():
    """With parts that are real but for one rank's, the imaginary parts add up whatever an op makes of them."""
    assert unsound("complex_right", COMPLEX) == set()
    assert unsound("complex_wrong", COMPLEX)


@pytest.mark.parametrize(("one", "name", "want"), [
    (sample("gelu.default", X), "approximate", ["none", "tanh"]),
    (sample("div.Tensor_mode", X, X, rounding_mode=None), "rounding_mode", ["trunc", "floor"]),
    (sample("scatter_reduce.two", X, 0, torch.zeros(2, 2, dtype=torch.int64), X, "sum"), "reduce",
     ["sum", "prod", "mean", "amax", "amin"]),
    (sample("searchsorted.Tensor", torch.arange(6.0), torch.arange(3.0)), "side", ["left", "right"]),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_the_strings_are_those_of_the_error_message(one, name, want):
    assert strings_of(one, name) == want


def test_groups_and_factors_come_with_sizes_that_they_divide():
    shuffled = [other.arguments() for other in other_counts(sample("pixel_shuffle.default", numbers(1, 4, 2, 2), 2))]
    assert shuffled == [["f64[1,9,2,2]", "3"], ["f64[1,16,2,2]", "4"]]
    given = numbers(1, 4, 6, 6), numbers(8, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    groups = [other.call.args[-1] for other in other_counts(sample("convolution.default", *given))]
    assert groups == [2, 4]
    strides = [other.call.args[3] for other in other_lists(sample("convolution.default", *given))]
    assert [2, 2] in strides and [1, 2] in strides


def test_a_flag_that_needs_other_sizes_gets_them():
    given = numbers(1, 4, 6, 6), numbers(8, 4, 3, 3), numbers(8), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    one = sample("convolution.default", *given)
    made = {name: other for other, _, name in Undrawn.of([one], dtypes=False).calls(one, 0)}
    assert set(made) == {"bias=None", "transposed=True"}


def test_what_is_drawn_is_not_drawn_again():
    one, other = sample("gelu.default", X), sample("gelu.default", X, approximate="tanh")
    assert Undrawn.of([one], dtypes=False).left == {("approximate", "'tanh'"): 2}
    assert Undrawn.of([one, other], dtypes=False).left == {}
    wanted = Undrawn.of([one, sample("gelu.default", X.bfloat16())])
    assert ("", "torch.bfloat16") not in wanted.left and ("", "torch.float16") in wanted.left


def test_positions_in_other_tensors_and_integers_that_no_one_checks_are_not_cast():
    index = torch.zeros(2, dtype=torch.int64)
    (cast,) = as_dtype(sample("index_select.default", torch.arange(4), 0, index), torch.int8)
    assert [x.dtype for x in cast.tensors] == [torch.int8, torch.int64]
    lengths = torch.arange(4), index, index
    assert list(as_dtype(sample("_embedding_bag.default", *lengths), torch.int8)) == []


@pytest.mark.parametrize("number", [3e4, 1.0])
def test_numbers_near_the_largest_of_float16_are_not_cast_to_it(number):
    one = sample("relu.default", torch.full((4, 4), number, dtype=torch.float64))
    names = {name for _, _, name in Undrawn.of([one]).calls(one, 0)}
    assert ("torch.float16" in names) == (number == 1.0)


def test_eight_bit_floats_are_moved_and_not_computed_with():
    product, copy = sample("mul.Tensor", X, X), sample("clone.default", X)
    for one, cast in ((product, False), (copy, True)):
        names = {name for _, _, name in Undrawn.of([one]).calls(one, 0)}
        assert ("torch.float8_e4m3fn" in names) == cast


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_parts_of_small_integers_that_wrap_accuse_no_rule(dtype):
    """A number near the end of int8 has parts whose sum leaves int8; in floats, which the op gives, it does not."""
    ends = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min] * 4, dtype=dtype)
    rules = always("P(sum) -> P(sum)"), always("P(max) -> P(max)")
    assert verdicts(sample("div.Scalar", ends, 1.0), rules[0]) == {Verdict.SOUND}
    assert verdicts(sample("sub.Scalar", ends // 2, 3), rules[1]) == {Verdict.SOUND}
    assert Verdict.UNSOUND in verdicts(
        sample("mul.Tensor", ends // 100, ends // 100), always("P(sum), P(sum) -> P(sum)")
    )
