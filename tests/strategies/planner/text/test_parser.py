import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial

from localtensor.layout.mesh import Mesh
from localtensor.layout.reductions import is_unambiguous
from localtensor.layout.spec import PARTIAL_KINDS, Spec, parse, shard_cut
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.text.parser import DTYPES, LONGEST, BadPlanText, read, text_of

MESH = Mesh.of(dp=2, tp=2)


@st.composite
def specs(draw, mesh, shape, dtype):
    """Any spec that has a meaning: every kind of placement, and an order of its own for each dim that is cut."""
    kinds = [kind for kind in PARTIAL_KINDS if is_unambiguous(kind, dtype)]
    offered = ["R", *(f"S({dim})" for dim in range(len(shape))), *(f"P({kind})" for kind in kinds)]
    offered += [f"SS({dim},{factor})" for dim in range(len(shape)) for factor in (1, 3)]
    placements = [parse(draw(st.sampled_from(offered))) for _ in mesh.sizes]
    for axis, placement in enumerate(placements):
        if any(not partials_commute(placement, other, dtype) for other in placements[:axis]):
            placements[axis] = parse("R")
    plain = Spec(mesh, tuple(placements), shape, dtype)
    orders = tuple(
        (dim, tuple(draw(st.permutations(plain.cut_by(dim))))) for dim in range(len(shape)) if plain.cut_by(dim)
    )
    return Spec(mesh, tuple(placements), shape, dtype, orders)


@st.composite
def pairs(draw):
    names = draw(
        st.lists(st.sampled_from(["dp", "tp", "a", "R", "S", "_x1", "P"]), min_size=1, max_size=4, unique=True)
    )
    mesh = Mesh(tuple(draw(st.integers(1, 5)) for _ in names), tuple(names))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    return draw(specs(mesh, shape, dtype)), draw(specs(mesh, shape, dtype))


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read_again(pair):
    text = text_of(*pair)
    assert repr(read(text)) == repr(pair)
    assert [spec.mesh for spec in read(text)] == [pair[0].mesh] * 2
    assert text_of(*read(text)) == text


@given(pairs())
@settings(max_examples=30, deadline=None)
def test_the_print_of_specs_is_read_where_the_mesh_is_given(pair):
    src, dst = pair
    assert repr(read(f"{src} -> {dst}", src.mesh)) == repr(pair)
    assert repr(read(f"{text_of(*pair).partition('->')[0]} -> {dst}")) == repr(pair)


PARTS = st.sampled_from([
    "f32", "[8,4]", "[", "]", " @ ", "dp=2", ",tp=2", ":", "S(0)", "S(1)[1]", "[0]", "SS(0,2)", "SS(0,0)", "P(sum)", "P(max)", "R",
    ",", "->", "-", "=", "(", ")", "99999999999999999999", "\u2192", "dp:", "tp:", "Shard", "x", " ", "\x00", "é",
])  # fmt: skip


@given(st.one_of(st.text(max_size=40), st.lists(PARTS, max_size=20).map("".join)))
@settings(max_examples=80, deadline=None)
def test_any_other_text_is_refused_in_one_line_of_ascii(text):
    try:
        src, dst = read(text)
    except BadPlanText as error:
        said = str(error)
        assert said.startswith("plan: ") and said.isascii() and "\n" not in said and said.endswith(".")
    else:
        assert repr(read(text_of(src, dst))) == repr((src, dst))


@given(pairs(), st.data())
@settings(max_examples=80, deadline=None)
def test_a_slip_is_refused_or_read_and_what_is_advised_reads(pair, data):
    text = text_of(*pair)
    at = data.draw(st.integers(0, len(text)))
    slip = (
        text[:at]
        + data.draw(st.sampled_from(["", "-", ",", "x", "9", " ", "(", "]"]))
        + text[at + data.draw(st.integers(0, 2)) :]
    )
    try:
        read(slip)
    except BadPlanText as error:
        advice = str(error).rpartition(" Write '")[2].removesuffix("'.")
        if " as in " not in str(error) and " Write '" in str(error):
            assert read(advice) if "->" in advice else "dp=2,tp=4" in advice


FINE = "{dtype}[{shape}] @ {mesh}: {src} -> {dst}"
WRONG = [
    ({"dtype": "f33"}, "dtype: 'f33': there is no such dtype", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"dtype": "torch.bfloat16"}, "dtype: 'torch.bfloat16'", "bf16[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"shape": "8,-4"}, "shape: '-4': a size is a whole number of 0 or more", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"shape": "8,"}, "shape: '8,': a size is missing", "f32[8] @ dp=2,tp=2: R,R -> R,R"),
    ({"shape": "9" * 20}, "torch counts bytes in 63 bits", ""),
    ({"mesh": "dp=2,tp=0"}, "mesh: '0': the size of an axis is 1 or more", "f32[8,4] @ dp=2,tp=1: R,R -> R,R"),
    ({"mesh": "dp=2,dp=2"}, "mesh: 'dp': two axes have this name", "f32[8,4] @ dp=2,dp2=2: R,R -> R,R"),
    ({"mesh": "dp=2,tp=9999999"}, "ranks are more than 1,048,576", ""),
    ({"mesh": "dp=2,tp"}, "mesh: 'tp': this axis has no size. Write tp=2", ""),
    ({"mesh": "dp,tp"}, "the axes of the mesh have no sizes", ""),
    ({"mesh": "1,1,1,1,1,1,1,1,1"}, "9 axes are more than 8", ""),
    ({"src": "R"}, "from: 'R': 1 placement for 2 mesh axes", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"dst": "R,R,R"}, "to: 'R,R,R': 3 placements for 2 mesh axes", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"dst": "R -> R"}, "to: 'R -> R': there is a second ->", ""),
    ({"dst": "R,S(2)"}, "to: 'S(2)': the tensor has dims 0 to 1", "f32[8,4] @ dp=2,tp=2: R,R -> R,S(1)"),
    ({"dst": "R,S(-1)"}, "to: 'S(-1)': a dim is counted from the left, from 0", "f32[8,4] @ dp=2,tp=2: R,R -> R,S(1)"),
    ({"dst": "R,S(9999999999999999999)"}, "to: 'S(9999999999999999999)': this is no placement", "f32[8,4] @ dp=2,tp=2: R,R -> R,S(1)"),
    ({"dst": "R,SS(1,9999999999999999999)"}, "to: 'SS(1,9999999999999999999)': this is no placement", ""),
    ({"dst": "R,Shard(dim=1)"}, "to: 'Shard(dim=1)': this is no placement", "f32[8,4] @ dp=2,tp=2: R,R -> R,S(1)"),
    ({"src": "Partial(mean),R"}, "from: 'Partial(mean)'", "f32[8,4] @ dp=2,tp=2: P(avg),R -> R,R"),
    ({"src": "P(summ),R"}, "from: 'P(summ)': there is no such reduction", "f32[8,4] @ dp=2,tp=2: P(sum),R -> R,R"),
    ({"src": "dp:R, tq:R"}, "from: 'tq': there is no such axis, but dp, tp", "f32[8,4] @ dp=2,tp=2: dp:R, tp:R -> R,R"),
    ({"src": "dp:R, dp:R"}, "from: 'dp': this axis has two placements", "f32[8,4] @ dp=2,tp=2: dp:R, tp:R -> R,R"),
    ({"src": "dp:R, R"}, "from: 'R': this one does not name its axis", "f32[8,4] @ dp=2,tp=2: dp:R, tp:R -> R,R"),
    ({"src": "S(0)[0],S(0)[0]"}, "and this one shares one", "f32[8,4] @ dp=2,tp=2: S(0)[1],S(0)[0] -> R,R"),
    ({"src": "S(0)[1],S(0)[2]"}, "from: 'S(0)[2]': 2 axes cut dim 0", "f32[8,4] @ dp=2,tp=2: S(0)[1],S(0)[0] -> R,R"),
    ({"src": "S(0)[1],S(0)"}, "from: 'S(0)': 2 axes cut dim 0", "f32[8,4] @ dp=2,tp=2: S(0)[1],S(0)[0] -> R,R"),
    ({"src": "S(0)[1],R"}, "one axis cuts dim 0, and its turn is [0]", "f32[8,4] @ dp=2,tp=2: S(0)[0],R -> R,R"),
    ({"src": "R[0],R"}, "only a shard has a turn", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"src": "SS(0,0),R"}, "cuts its dim into 1 to 4,096 blocks", "f32[8,4] @ dp=2,tp=2: S(0),R -> R,R"),
    ({"dtype": "i64", "src": "P(avg),R"}, "from: 'P(avg)': it means nothing for i64", "i64[8,4] @ dp=2,tp=2: P(sum),R -> R,R"),
    ({"dtype": "c64", "src": "P(max),R"}, "from: 'P(max)': it means nothing for c64", "c64[8,4] @ dp=2,tp=2: P(sum),R -> R,R"),
    ({"src": "P(sum),P(max)"}, "P(sum) and P(max) do not commute", "f32[8,4] @ dp=2,tp=2: P(sum),P(sum) -> R,R"),
    ({"dst": "R,R please"}, "to: 'R please': this is no placement", "f32[8,4] @ dp=2,tp=2: R,R -> R,R"),
    ({"dst": "f32[8] @ dp:R, tp:R"}, "to: 'f32[8]': the tensor on the left is f32[8,4]", ""),
    ({"dst": "R,R\n"}, "text: '\\n': this character has no meaning", ""),
    ({"dst": "R,S(\u0661)"}, "text: '\\u0661': this character has no meaning", ""),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said", "advice"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_each_fault_is_named_and_a_right_text_near_it_is_given(change, said, advice):
    text = FINE.format(**{"dtype": "f32", "shape": "8,4", "mesh": "dp=2,tp=2", "src": "R,R", "dst": "R,R", **change})
    with pytest.raises(BadPlanText) as error:
        read(text)
    assert said in str(error.value)
    if advice:
        assert str(error.value).endswith(f"Write {advice!r}.")
        assert read(advice)


@pytest.mark.parametrize(("text", "advice"), [
    ("f32[8] @ dp=2: R => S(0)", "f32[8] @ dp=2: R -> S(0)"),
    ("f32[8] @ dp=2: R \u2192 S(0)", "f32[8] @ dp=2: R -> S(0)"),
    ("f32[8] dp=2: R -> S(0)", "f32[8] @ dp=2: R -> S(0)"),
    ("f32[8] @ dp=2 R -> S(0)", "f32[8] @ dp=2: R -> S(0)"),
    ("fp16(8) @ dp=2 tp=2: r,s0 -> Replicate(), P", "f16[8] @ dp=2,tp=2: R,S(0) -> R, P(sum)"),
])  # fmt: skip
def test_several_slips_are_fixed_at_once(text, advice):
    with pytest.raises(BadPlanText) as error:
        read(text)
    assert str(error.value).endswith(f"Write {advice!r}.") and read(advice)


@pytest.mark.parametrize(
    "text", ["", " ", "hello", "->", "@ : ->", "x" * 100_000, "f32[8] @ dp=2: " + "R," * 40_000, "\ud800", "[[[->"]
)
def test_what_is_far_from_a_redistribution_is_told_an_example(text):
    with pytest.raises(
        BadPlanText, match=r"Write as in 'f32\[8,4\] @ dp=2,tp=2: S\(0\),P\(sum\) -> R,S\(1\)'\.$"
    ) as error:
        read(text)
    assert len(str(error.value)) < 300


def test_the_longest_text_is_read_and_a_longer_one_is_not():
    text = "f32[8] @ dp=2: R -> S(0)"
    assert read(text + " " * (LONGEST - len(text)))
    with pytest.raises(BadPlanText, match="2,001 characters"):
        read(text + " " * (LONGEST + 1 - len(text)))


def test_sizes_alone_make_axes_called_by_letters_and_spaces_do_not_matter():
    src, dst = read(" f32 [ 8 , 4 ]@2 , 3:S(0),SS(1, 2)->R,  P( sum)".replace("P( sum)", "P(sum)"))
    assert src.mesh == Mesh.of(2, 3) and src.shape == (8, 4)
    assert repr(dst) == "f32[8,4] @ a:R, b:P(sum)"


def test_placements_by_name_may_stand_in_any_order():
    assert repr(read("f32[8,4] @ dp=2,tp=3: tp:P(sum), dp:S(0) -> tp:S(1),dp:R")) == repr(
        read("f32[8,4] @ dp=2,tp=3: S(0),P(sum) -> R,S(1)")
    )


def test_turns_are_the_order_in_which_axes_cut():
    src, _ = read("f32[8] @ dp=2,tp=2: S(0)[1],S(0)[0] -> R,R")
    assert src.cut_by(0) == (1, 0)
    assert repr(read("f32[8] @ dp=2,tp=2: S(0)[0],S(0)[1] -> R,R")[0]) == "f32[8] @ dp:S(0), tp:S(0)"


def test_turns_of_three_axes_are_places_and_not_axes():
    src, _ = read("f32[8] @ 2,2,2: S(0)[1],S(0)[2],S(0)[0] -> R,R,R")
    assert src.cut_by(0) == (2, 0, 1)


def test_another_mesh_than_the_given_one_is_refused():
    assert read("f32[8] @ dp=2,tp=2: R,R -> R,R", MESH)[0].mesh == MESH
    with pytest.raises(BadPlanText, match=r"mesh: 'dp=3,tp=2': the mesh is Mesh\(dp=2, tp=2\)"):
        read("f32[8] @ dp=3,tp=2: R,R -> R,R", MESH)


def test_every_dtype_of_the_table_is_read_by_the_name_that_a_spec_prints():
    for name, dtype in DTYPES.items():
        src, _ = read(f"{name}[3] @ dp=2: R -> S(0)")
        assert src.dtype == dtype and repr(src).startswith(f"{name}[3]")
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64} <= set(DTYPES.values())


def test_a_spec_of_the_largest_size_that_torch_counts_is_read():
    most = math.isqrt((1 << 63) // 4 - 1)
    src, _ = read(f"f32[{most},{most}] @ dp=2: S(0) -> R")
    assert src.shape == (most, most) and shard_cut(src.placements[0]) == (0, 1)
    assert not isinstance(src.placements[0], Partial)
