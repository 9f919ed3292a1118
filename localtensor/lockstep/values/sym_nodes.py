"""Nodes of torch's SymInt and SymBool that compute for all ranks at once.

A result that is the same on all ranks becomes a plain int or bool; one that differs cannot decide a branch, and raises.
lockstep/values/rank_int.py makes the SymInts.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from torch.fx.experimental.sym_node import SymNode

from localtensor.errors import AnotherMode, NotHeld, NotInLockstep
from localtensor.lockstep.values.formatting import (
    FLOATS,
    divergence,
    keeps_grad,
    node_text,
    one_answer,
    one_float,
    one_int,
    shorten,
    user_place,
)
from localtensor.lockstep.values.partition import Array
from localtensor.lockstep.values.stacks import is_dense

_MAX_INT = 2**63 - 1  # of torch's ints and of numpy's
# In these files of torch the guess "false" leads to code that is right for each rank, or raises.
_SAFE_IN = ("c10/core/Contiguity.h", "c10/core/SymbolicShapeMeta.cpp", "ATen/EmptyTensor.cpp", "/input_metadata.cpp")


class _Node:
    """The methods that torch calls on any node; `__class__` passes its checks for SymNode, which holds a sympy expression."""

    __slots__ = ()
    __class__ = property(lambda self: SymNode)
    constant: Any = None
    held: Array | None = None
    expr = shape_env = _hint = None  # for torch's `statically_known_true`: nothing is known
    words: Any = property(repr)
    pytype: type
    values: Any
    most: int

    def is_int(self) -> bool:
        return self.pytype is int

    def is_bool(self) -> bool:
        return self.pytype is bool

    def is_float(self) -> bool:
        return self.pytype is float

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_symbolic = is_constant
    has_hint = is_constant  # with a hint, torch would ask for each size, not for the answer of each rank

    def maybe_as_int(self) -> int | None:
        return None

    def clone(self) -> "_Node":
        return self

    def wrap_int(self, num: int) -> "_Node":
        return Constant(num)

    wrap_bool = wrap_float = wrap_int

    def sym_float(self) -> "_Node":
        return Constant(one_float(f"float({self.words})", self.values, self.held))

    def _graph_repr(self) -> str:
        return repr(self)

    str = _str = _graph_repr


Method = Callable[[_Node, Any], _Node]


def _arithmetic(
    sign: str, fn: Callable[[int, int], int], quick: Any = None, bound: Callable[[int, int], int] | None = None
) -> Method:
    """The method for one operator: numpy's `quick` where the result's `bound` fits int64, else Python's arithmetic."""

    def method(self: _Node, other: Any) -> _Node:
        other = _operand(sign, other)
        if type(self) is Constant and type(other) is Constant:
            return Constant(fn(self.constant, other.constant))
        held = _holders(sign, self, other)
        if bound is None or (most := bound(self.most, other.most)) > _MAX_INT:
            return _by_python_ints(sign, fn, self, other, held)
        return int_node(quick(self.values, other.values), held, most)

    return method


def _division(sign: str, fn: Callable[[int, int], int], quick: Callable[..., Any]) -> Method:
    """The method for an operator that raises for zero divisors."""
    plainly = _arithmetic(sign, fn, quick, max)

    def method(self: _Node, other: object) -> _Node:
        return plainly(self, _divisor(sign, fn, self, other))

    return method


def _divisor(sign: str, fn: Callable[[int, int], Any], one: _Node, other: Any) -> Any:
    """The divisor as a node without zeros.  Raises `RanksDiverge` if it is zero on some ranks that hold it."""
    other = _operand(sign, other)
    zero = other.values == 0
    if zero is True:
        fn(1, 0)  # raises ZeroDivisionError, as on each rank
    if type(other) is not Constant and zero.any():
        held = _holders(sign, one, other)
        if (zero if held is None else zero & held).any():
            raise divergence(sign, "divisor, zero on some ranks", other.values, other.held)
        return RankInts(np.where(zero, 1, other.values), other.held)
    return other


def _comparison(sign: str, fn: Callable[[Any, Any], Any], kind: type | None = None) -> Method:
    def method(self: _Node, other: Any) -> _Node:
        other = _operand(sign, other, kind)
        if kind is bool and type(other) is Constant:
            return self if other.constant is (sign == "and") else other
        if type(self) is Constant and type(other) is Constant:
            return Constant(fn(self.constant, other.constant))
        held = _holders(sign, self, other)
        return bool_node(fn(self.values, other.values), held, lambda: f"{self.words} {sign} {other.words}")

    return method


class _Ints(_Node):
    """The operators of ints."""

    __slots__ = ()
    add = _arithmetic("+", operator.add, np.add, operator.add)
    sub = _arithmetic("-", operator.sub, np.subtract, operator.add)
    mul = _arithmetic("*", operator.mul, np.multiply, operator.mul)
    sym_max = _arithmetic("max", max, np.maximum, max)
    sym_min = _arithmetic("min", min, np.minimum, max)
    bitwise_and = _arithmetic("&", operator.and_, np.bitwise_and, lambda a, b: max(a, b, _MAX_INT))
    bitwise_or = _arithmetic("|", operator.or_, np.bitwise_or, lambda a, b: max(a, b, _MAX_INT))
    bitwise_xor = _arithmetic("^", operator.xor, np.bitwise_xor, lambda a, b: max(a, b, _MAX_INT))
    lshift = _arithmetic("<<", operator.lshift)
    rshift = _arithmetic(">>", operator.rshift)
    pow = pow_by_natural = _arithmetic("**", operator.pow, np.power, lambda a, b: max(a, 1) ** min(b, 64))
    floordiv = int_floordiv = _division("//", operator.floordiv, np.floor_divide)
    mod = _division("%", operator.mod, np.remainder)
    eq = _comparison("==", operator.eq)
    ne = _comparison("!=", operator.ne)
    lt = _comparison("<", operator.lt)
    le = _comparison("<=", operator.le)
    gt = _comparison(">", operator.gt)
    ge = _comparison(">=", operator.ge)

    def int_truediv(self, other: Any) -> _Node:
        other = _divisor("/", operator.truediv, self, other)
        held = _holders("/", self, other)
        quotients = np.zeros(len(self.values if type(other) is Constant else other.values))
        quotients[slice(None) if held is None else held] = _exactly(operator.truediv, self, other, held)
        return Constant(one_float(f"{self.words} / {other.words}", quotients, held))

    truediv = int_truediv

    def neg(self) -> _Node:
        return Constant(0).sub(self)

    def abs(self) -> _Node:
        return self.sym_max(self.neg())

    def floor(self) -> _Node:
        return self

    ceil = trunc = pos = round = floor

    def is_non_overlapping_and_dense(self, sizes: Sequence[Any], strides: Sequence[Any]) -> _Node:
        """The answer of torch for each different tensor."""
        nodes = [_operand("layout", node) for node in (*sizes, *strides)]
        held, world = _holders("layout", self, *nodes), len(self.values)
        ranks = np.arange(world) if held is None else np.flatnonzero(held)
        columns = [*zip(*(np.broadcast_to(node.values, world)[ranks].tolist() for node in nodes), strict=True)]
        answers, values = {column: is_dense(column) for column in set(columns)}, np.zeros(world, bool)
        values[ranks] = [answers[column] for column in columns]
        return bool_node(values, held, lambda: "is_non_overlapping_and_dense")

    def sym_sum(self, terms: Sequence[Any]) -> _Node:
        total: _Node = Constant(0)
        for term in terms:
            total = _Ints.add(total, term)
        return total


class Constant(_Ints):
    """A number or bool that all ranks share, as an operand or a result; torch reads `constant`."""

    __slots__ = ("constant", "most", "pytype", "values")

    def __init__(self, constant: Any) -> None:
        self.constant = self.values = constant
        self.pytype, self.most = type(constant), abs(constant)

    def __repr__(self) -> str:
        return repr(self.constant)

    def is_constant(self) -> bool:
        return True

    def maybe_as_int(self) -> Any:
        return self.constant if self.pytype is int else None

    def int_(self) -> object:
        return self.constant

    def guard_int(self, file: str, line: int) -> object:
        return self.constant

    bool_ = int_
    guard_bool = guard_float = guard_size_oblivious = expect_true = guard_int
    guard_or_false = guard_or_true = statically_known_true = guard_int

    def sym_and(self, other: object) -> object:
        return other if self.constant else self

    def sym_or(self, other: object) -> object:
        return self if self.constant else other

    def sym_not(self) -> _Node:
        return Constant(not self.constant)

    def sym_ite(self, then: object, otherwise: object) -> object:
        return then if self.constant else otherwise


class RankInts(_Ints):
    """The node of an int that differs between ranks: `values` int64 of shape [world], `held` bool of that shape or None.

    `held` None marks all ranks; the value of a rank that holds none has no meaning.  The values become read-only.

    >>> RankInts(np.array([0, 1, 2])).add(2)
    RankInts(2, 3, 4)
    """

    __slots__ = ("_most", "held", "values")
    pytype = int

    def __init__(self, values: Any, held: Any = None, most: int = _MAX_INT) -> None:
        self.values, self.held, self._most = np.asarray(values), None if held is None else np.asarray(held), most
        self.values.setflags(write=False)

    @property
    def most(self) -> int:  # type: ignore[override]
        """A bound of the absolute values; exact where a product might not fit int64."""
        if self._most >= 2**31:
            self._most = max(int(self.values.max()), -int(self.values.min()))
        return self._most

    def __repr__(self) -> str:
        return node_text("RankInts", self.values, self.held)

    def __reduce__(self) -> tuple[Any, ...]:
        held = self.held if self.held is None else self.held.tolist()  # lists, since torch.load refuses NumPy arrays
        return RankInts, (self.values.tolist(), held)

    def int_(self) -> int:
        return one_int(self.values, self.held)

    hint = property(int_)  # the example by which torch records a graph

    def guard_int(self, file: str, line: int) -> int:
        return self.int_()


class RankBools(_Node):
    """The node of a bool that differs between ranks: `values` bool of shape [world], `held` as for `RankInts`.

    `words` make the text of the question, which few errors need.  Where torch needs one answer, it raises `RanksDiverge`.
    """

    __slots__ = ("_words", "held", "values")
    words = property(lambda self: shorten(self._words()))
    pytype, most = bool, 1  # as an operand of ints

    def __init__(self, values: Array, held: Array | None, words: Callable[[], str]) -> None:
        values.setflags(write=False)
        self.values, self.held, self._words = values, held, words

    def __repr__(self) -> str:
        return node_text("RankBools", self.values, self.held)

    def bool_(self) -> bool:
        return one_answer(self.words, self.values, self.held)

    def guard_bool(self, file: str, line: int) -> bool:
        return keeps_grad(self.words) or self.bool_()

    guard_size_oblivious = guard_bool

    def expect_true(self, file: str, line: int) -> NoReturn:
        raise divergence("torch._check", self.words, self.values, self.held)

    def guard_or_false(self, file: str, line: int) -> bool:
        """Raises outside of `_SAFE_IN`: elsewhere torch does not always go on to what eager mode computes."""
        if not file.endswith(_SAFE_IN):
            self.bool_()
        return False

    def guard_or_true(self, file: str, line: int) -> bool:
        return not self.guard_or_false(file, line)

    def statically_known_true(self, file: str, line: int) -> bool:
        return False

    sym_and = _comparison("and", operator.and_, bool)
    sym_or = _comparison("or", operator.or_, bool)
    eq = _comparison("==", operator.eq)

    def sym_not(self) -> _Node:
        return RankBools(~self.values, self.held, lambda: f"not ({self.words})")

    def sym_ite(self, then: Any, otherwise: Any) -> _Node:
        then, otherwise = _operand("sym_ite", then), _operand("sym_ite", otherwise)
        held = _holders("sym_ite", self, then, otherwise)
        values = np.where(self.values, then.values, otherwise.values)
        if then.pytype is bool and otherwise.pytype is bool:
            return bool_node(values, held, lambda: f"{then.words} if {self.words} else {otherwise.words}")
        return int_node(values.astype(np.int64), held)


def _operand(sign: str, x: Any, kind: type | None = None) -> Any:
    """The operand as a node of this module, with `pytype` kind if one is given.  Raises `NotInLockstep`."""
    if type(x) not in (RankInts, Constant, RankBools):
        constant = x if type(x) is int else getattr(x, "maybe_as_int", lambda: None)()
        if constant is None:
            raise NotInLockstep(f"{sign} with {shorten(repr(x))}", "it is neither one int nor an int of each rank")
        x = Constant(constant)
    if x.pytype is float or (kind is not None and x.pytype is not kind):
        raise NotInLockstep(f"{sign} with {x.words}", FLOATS if x.pytype is float else "its operands are bools")
    return x


def _holders(sign: str, *nodes: _Node) -> Array | None:
    """The ranks that hold all operands; None if all do.  Raises `AnotherMode`, and `NotHeld` if no rank does."""
    found, world = None, 0
    for node in nodes:
        if type(node) is Constant:
            continue
        if world not in (0, len(node.values)):
            raise AnotherMode(sign, user_place())
        world = len(node.values)
        held = node.held
        if found is None or held is None or held is found:
            found = held if found is None else found
            continue
        both = found & held
        if not both.any():
            raise NotHeld(sign, np.flatnonzero(found).tolist(), np.flatnonzero(held).tolist())
        found = both
    return found


def int_node(values: Array, held: Array | None, most: int = _MAX_INT) -> _Node:
    """The node for int64 of shape [world]: one number if all ranks that hold one have the same."""
    if held is not None:
        values = np.where(held, values, 0)
        first = values.item(int(held.argmax()))
        same = bool(((values == first) | ~held).all())
    else:
        first = values.item(0)
        same = first == values.item(-1) and bool((values == first).all())
    return Constant(first) if same else RankInts(values, held, most)


def bool_node(values: Array, held: Array | None, words: Callable[[], str]) -> _Node:
    true = np.count_nonzero(values if held is None else values & held)
    if true == 0 or true == (len(values) if held is None else np.count_nonzero(held)):
        return Constant(bool(true))
    return RankBools(values, held, words)


def _exactly(fn: Callable[[int, int], Any], one: _Node, other: _Node, held: Array | None) -> list[Any]:
    """The results of the ranks that hold both operands, by Python's arithmetic."""
    a, b = np.broadcast_arrays(np.asarray(one.values, object), np.asarray(other.values, object))
    pairs = zip(a if held is None else a[held], b if held is None else b[held], strict=True)
    return [fn(x, y) for x, y in pairs]


def _by_python_ints(sign: str, fn: Callable[[int, int], int], one: _Node, other: _Node, held: Array | None) -> _Node:
    results = _exactly(fn, one, other, held)
    if any(type(x) is not int or not -_MAX_INT - 1 <= x <= _MAX_INT for x in results):
        raise NotInLockstep(f"{one.words} {sign} {other.words}", "an int of each rank has 64 bits, which are too few")
    values = np.zeros(len(results) if held is None else len(held), np.int64)
    values[slice(None) if held is None else held] = results
    return int_node(values, held)
