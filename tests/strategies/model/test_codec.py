import ast
import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as draw
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import localtensor as lt
from strategies.model import codec
from strategies.model.codec import NamedPlacement, NotEncodable
from strategies.model.rule import Leaf, Rule
from tests.strategies.cases import numbers, rule, sample

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


def there_and_back(x):
    return codec.read_value(json.loads(json.dumps(codec.value(x))))


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).tolist() if x.numel() else []


def assert_same_tensor(x):
    """To the last bit, and with the same strides."""
    again = codec.read_tensor(json.loads(json.dumps(codec.tensor(x))))
    assert (again.dtype, again.shape, again.stride()) == (x.dtype, x.shape, x.stride())
    assert bits(again) == bits(x.detach().resolve_conj().resolve_neg())


# Tensors.


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_comes_back(dtype):
    width = torch.empty(0, dtype=dtype).element_size()
    one = torch.randint(0, 2, (6 * width,), dtype=torch.uint8) if dtype == torch.bool else numbers(6 * width).byte()
    assert_same_tensor(one.view(dtype).reshape(2, 3))


SPECIAL = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1 / 3])


@pytest.mark.parametrize("x", [
    SPECIAL, SPECIAL.float(), torch.complex(SPECIAL, SPECIAL.flip(0)), torch.tensor(3.5), torch.tensor([]),
    torch.empty(0, 3), torch.empty(2, 0, 3).transpose(0, 2), torch.arange(6).view(torch.uint8),
], ids=lambda x: f"{x.dtype} {tuple(x.shape)}")  # fmt: skip
def test_extreme_values_and_empty_shapes_come_back(x):
    assert_same_tensor(x)


X = numbers(4, 6)
STRIDED = {
    "transposed": X.t(), "every other": X[:, ::2], "expanded": X[:1].expand(3, 6), "all expanded": X[0, 0].expand(2, 3),
    "a row expanded": X[0].expand(4, 6), "size 1 with an odd stride": X[:, :1].t(), "a column": X[:, 2],
    "expanded and transposed": X[:1].expand(3, 6).t(), "channels last": numbers(2, 3, 4, 5).to(
        memory_format=torch.channels_last), "expanded to nothing": torch.empty(1, 0).expand(3, 0),
}  # fmt: skip


@pytest.mark.parametrize("x", STRIDED.values(), ids=STRIDED)
def test_strides_come_back(x):
    assert_same_tensor(x)


def test_views_that_conjugate_or_negate_come_back_as_what_they_show():
    z = numbers(3, dtype=torch.complex64)
    assert_same_tensor(z.conj())
    assert_same_tensor(z.conj().imag)
    assert not codec.read_tensor(codec.tensor(z.conj())).is_conj()


def test_a_tensor_that_needs_a_gradient_is_data_all_the_same():
    again = codec.read_tensor(codec.tensor(X.clone().requires_grad_()))
    assert torch.equal(again, X) and not again.requires_grad


@draw.composite
def tensors(make):
    dtype = make(draw.sampled_from([d for d in DTYPES if d is not torch.bool]))
    shape = make(draw.lists(draw.integers(0, 4), max_size=3))
    order = make(draw.permutations(range(len(shape))))
    grown = [make(draw.booleans()) for _ in shape]
    own = [1 if grow else size for grow, size in zip(grown, shape, strict=True)]
    width = torch.empty(0, dtype=dtype).element_size() * math.prod(own)
    data = make(draw.binary(min_size=width, max_size=width))
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(own).expand(shape).permute(order)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(tensors())
def test_any_bytes_in_any_strides_come_back(x):
    assert_same_tensor(x)


# Arguments.

VALUES = (
    None, True, False, 0, 1, -(2**70), 0.1, -0.0, 5e-324, "", "grün 😀 \n", 2j, complex(-0.0, math.inf),
    torch.float64, torch.bfloat16, torch.device("cpu"), torch.device("meta"), torch.strided,
    torch.channels_last, torch.preserve_format, Leaf(3), [], (), [1, (2, [Leaf(0)])], ([],), [None, "R"],
)  # fmt: skip


@pytest.mark.parametrize("x", VALUES, ids=repr)
def test_an_argument_comes_back_as_what_it_was(x):
    again = there_and_back(x)
    assert (repr(again), type(again)) == (repr(x), type(x))


@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not_come_back(x):
    text = json.dumps(codec.value(x), allow_nan=False)
    assert repr(codec.read_value(json.loads(text))) == repr(x)


SCALARS = draw.none() | draw.booleans() | draw.integers() | draw.floats() | draw.complex_numbers() | draw.text()
NESTED = draw.recursive(SCALARS, lambda inner: draw.lists(inner) | draw.lists(inner).map(tuple), max_leaves=8)


@given(NESTED)
def test_any_nest_of_numbers_texts_lists_and_tuples_comes_back(x):
    assert repr(there_and_back(x)) == repr(x)


def test_a_tensor_among_the_arguments_comes_back():
    (again,) = there_and_back([X.t()])
    assert torch.equal(again, X.t()) and again.stride() == (1, 6)


@pytest.mark.parametrize("x", [
    torch.Generator(), {"a": 1}, {1}, b"bytes", object(), [1, (object(),)], torch.eye(3).to_sparse(), len,
], ids=lambda x: type(x).__name__)  # fmt: skip
def test_what_is_no_data_is_refused(x):
    with pytest.raises(NotEncodable):
        codec.value(x)


@pytest.mark.parametrize("told", [
    {"dtype": "load"}, {"dtype": "ops"}, {"dtype": "strided"}, {"dtype": "nothing"}, {"layout": "float64"},
    {"memory_format": "__builtins__"}, {"tensor": ["load", [1], "AAAA"]}, {"lambda": "float64"},
], ids=str)  # fmt: skip
def test_a_name_reaches_no_more_of_torch_than_constants_of_its_kind(told):
    with pytest.raises(NotEncodable, match="torch has no "):
        codec.read_value(told)


# Samples and rules.


def test_a_sample_comes_back_with_its_call_and_its_tensors():
    one = sample("addcmul.default", X.t(), X.t(), numbers(6, 4), value=float("inf"))
    again = codec.read_sample(json.loads(json.dumps(codec.sample(one))))
    assert (again.call, again.origin, again.arguments()) == (one.call, one.origin, one.arguments())
    assert [t.stride() for t in again.tensors] == [t.stride() for t in one.tensors]
    assert all(map(torch.equal, again.tensors, one.tensors))
    assert codec.is_encodable(one)


def test_a_call_with_lists_and_dtypes_gives_the_same_again():
    one = sample("cat.default", [X, X], -1)
    cast = sample("sum.dim_IntList", X, [0], True, dtype=torch.float32)
    for before in (one, cast):
        after = codec.read_sample(json.loads(json.dumps(codec.sample(before))))
        assert after.call == before.call
        assert torch.equal(after.call(list(after.tensors)), before.call(list(before.tensors)))


@pytest.mark.parametrize("one", [
    sample("bernoulli.p", X, 0.5, generator=torch.Generator()),
    sample("neg.default", torch.eye(3).to_sparse()),
    sample("from_file.default", "a.bin", True, 4),
], ids=["a generator", "a sparse tensor", "a file"])  # fmt: skip
def test_a_sample_that_cannot_be_written_says_so_beforehand(one):
    assert not codec.is_encodable(one)
    with pytest.raises(NotEncodable):
        codec.sample(one)


@pytest.mark.parametrize("text", ["S(0), R -> P(sum)", "P(max), - -> -", "S(3) -> S(0), P(avg)"])
def test_a_rule_comes_back(text):
    one = sample("add.Tensor", X, X)
    made = rule(one, text)
    assert codec.read_rule(json.loads(json.dumps(codec.rule(made)))) == made


def test_a_placement_of_dtensors_own_comes_back_by_name_alone():
    read = codec.read_rule(["aten.x.default", ["S(0)", "P(mask)"], ["-"]])
    assert read == Rule("aten.x.default", (Shard(0), NamedPlacement("P(mask)")), (None,))
    assert str(read) == "aten.x.default: S(0), P(mask) -> -"
    assert codec.rule(read) == ["aten.x.default", ["S(0)", "P(mask)"], ["-"]]


@pytest.mark.parametrize("op", ["aten.from_file.default", "aten.from_file.out", "aten.save.default"])
def test_an_op_that_opens_a_file_is_no_sample_of_a_file(op):
    body = codec.sample(sample("neg.default", X)) | {"op": op, "call": [["/tmp/a", True, 4], []], "tensors": []}
    with pytest.raises(NotEncodable, match=f"{op} opens a file"):
        codec.read_sample(body)


QUOTES = '"' * 3


@pytest.mark.parametrize(
    "text", [f"a{QUOTES}\nimport b\n{QUOTES}", f'{QUOTES}"', "\\d \\", f"\\{QUOTES}b", f"a\\\\{QUOTES}", '"', 'a"']
)
def test_no_text_ends_the_docstring_of_a_script(text):
    for head in (codec.docstring_code(text, "", 2, "a.py", "b"), codec.docstring_code("a", text, 2, "a.py", "b")):
        module = ast.parse(head)
        assert len(module.body) == 1 and text in ast.get_docstring(module, clean=False)


def test_characters_that_no_source_has_are_escaped_in_a_docstring():
    assert ast.parse(codec.docstring_code("a\0\ud800\x1b", "", 2, "a.py", "b"))
    assert codec.docstring_text("a\0\ud800") == "a\\u0000\\ud800"


# The comparison of a script.


def compared(local_shape, said_shape, want_shape, placement=None):
    """What a script's `differs` says of a DTensor (in replicas, if nothing else is said) whose spec says other shapes than its piece."""
    scope = {
        "torch": torch,
        "dist": dist,
        "DTensor": DTensor,
        "Replicate": Replicate,
        "Shard": Shard,
        "distribute_tensor": distribute_tensor,
    }
    exec(codec.COMPARISON_FUNCTION, scope)
    mesh = init_device_mesh("cpu", (2,))
    said = torch.ones(said_shape)
    spec = DTensorSpec(mesh, (placement or Replicate(),), TensorMeta(said.shape, said.stride(), said.dtype))
    return scope["differs"](DTensor(torch.ones(local_shape), spec, requires_grad=False), torch.ones(want_shape), 0.0)


@pytest.mark.parametrize(
    ("local", "said", "want", "wrong", "printed"),
    [
        ((2,), (2,), (2,), False, "right"),
        ((2,), (2, 1), (2,), True, "DTensor says shape (2, 1), right is (2,)"),
        ((2, 1), (2,), (2,), True, "holds shape (2, 1), its piece of (2,) has (2,)"),
    ],
)
def test_a_script_compares_the_shape_that_a_dtensor_says_with_the_right_one(capfd, local, said, want, wrong, printed):
    assert lt.run(lambda: compared(local, said, want), ranks=2).values == (wrong, wrong)
    assert printed in capfd.readouterr().out


def test_a_result_that_cannot_be_gathered_shows_the_fault(capfd, monkeypatch):
    def too_large(*_):
        raise RuntimeError("narrow changed the size")

    monkeypatch.setattr(
        Shard, "_to_replicate_tensor", too_large
    )  # as torch's own does of a wrong piece of a strided shard
    assert lt.run(lambda: compared((2,), (4,), (4,), Shard(0)), ranks=2).values == (True, True)
    assert "WRONG: the result cannot be gathered: narrow" in capfd.readouterr().out


def test_a_partial_value_that_cannot_be_added_up_is_not_wrong():
    with pytest.raises(Exception, match="unknown"):
        lt.run(lambda: compared((4,), (4,), (4,), Partial("unknown")), ranks=2)
