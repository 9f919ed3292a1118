"""One captured call made the call of six ranks: who shares which operand, and how the rows lie in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.localtensor.lockstep.lockstep_reference import leaves
from tests.tools.overloads.capture import Call

RANKS = 6
UNIFORM, ALONE, PAIRS, CROSSING = [0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]
# name -> which variant of operand number i each rank has
PLANS: dict[str, Callable[[int], list[int]]] = {
    "uniform": lambda i: UNIFORM,
    "alone": lambda i: ALONE,
    "first": lambda i: UNIFORM if i else ALONE,
    "rest": lambda i: ALONE if i else UNIFORM,
    "second": lambda i: ALONE if i == 1 else UNIFORM,
    "third": lambda i: ALONE if i == 2 else UNIFORM,
    "crossing": lambda i: CROSSING if i % 2 else PAIRS,
    "strided": lambda i: ALONE,  # rows whose dims lie in another order in memory
    "crossing order": lambda i: CROSSING if i % 2 else PAIRS,  # so, too
    "mixed order": lambda i: ALONE,  # every second operand so
    "slices": lambda i: PAIRS if i % 2 else ALONE,  # views of larger tensors
    "uneven": lambda i: ALONE,  # ranks 3, 4, 5 make another call, of other shapes
}
HOW = ("mixed", "shrunk", "equal")  # how the variants of an operand differ, the first that the op takes


def varied(x: Tensor, number: int, how: str) -> Tensor:
    """Another value of the same shape and dtype, likely as good for the op."""
    if number == 0 or how == "equal" or not x.numel():
        return x.clone()
    rough = x.is_floating_point() or x.is_complex()
    if how == "shrunk":
        return x * (1 - number / 16) if rough else x.clone()
    moved = x.flatten().roll(number).reshape(x.shape) if x.dim() else x
    moved = moved * (1 - number / 16) if rough else moved
    fresh = torch.empty_like(x)
    return fresh.copy_(moved)


def reordered(x: Tensor) -> Tensor:
    """The same values, with the dims the other way round in memory."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def tensors_of(call: Call) -> list[Tensor]:
    """The different tensors of a call, in order."""
    return list({id(x): x for x in leaves((call.args, call.kwargs)) if isinstance(x, Tensor)}.values())


def operands(plan: str, calls: list[Call], how: str) -> list[list[Tensor]]:
    """Of each operand, the plain tensor of each rank; ranks that share a variant share the object."""
    lists = [tensors_of(call) for call in calls]
    dense = outs_of(calls[0])
    found = []
    for place in range(len(lists[0])):
        made: dict = {}
        numbers = PLANS[plan](place)
        for rank, number in enumerate(numbers):
            which = rank * len(calls) // RANKS
            if (which, number) not in made:
                x = varied(lists[which][place], number, how)
                turned = plan in ("strided", "crossing order") or (plan == "mixed order" and place % 2)
                made[which, number] = reordered(x) if turned and place not in dense else x
        found.append([made[rank * len(calls) // RANKS, number] for rank, number in enumerate(numbers)])
    return found


def outs_of(call: Call) -> set[int]:
    """Which operands are those of out=: they stay dense, since many kernels write to others as if they were."""
    names = {argument.name for argument in call.op._schema.arguments if argument.is_out}
    ids = {id(x) for x in leaves([call.kwargs.get(name) for name in names])}
    return {place for place, x in enumerate(tensors_of(call)) if id(x) in ids}


def placed(plan: str, mode, by_rank: list[Tensor], *, dense: bool = False):
    """The LocalTensor of an operand."""
    if plan == "slices" and by_rank[0].dim() and not dense:
        with mode.disable():
            wide = {id(x): x.repeat_interleave(2, -1) for x in by_rank}
        return mode.gather({rank: wide[id(x)] for rank, x in enumerate(by_rank)})[..., ::2]
    return mode.gather(dict(enumerate(by_rank)))


def filled(value, tensors: list[Tensor], by_place):
    """The arguments with the operands in the place of the tensors."""
    if isinstance(value, Tensor):
        return next(one for x, one in zip(tensors, by_place, strict=True) if x is value)
    if isinstance(value, list | tuple):
        return type(value)([filled(one, tensors, by_place) for one in value])
    if isinstance(value, dict):
        return {name: filled(one, tensors, by_place) for name, one in value.items()}
    return value


def fits(one: Call, other: Call) -> bool:
    """Whether the calls differ in shapes only."""
    a, b = tensors_of(one), tensors_of(other)
    if one.op is not other.op or len(a) != len(b):
        return False
    if any(x.dtype != y.dtype or x.dim() != y.dim() for x, y in zip(a, b, strict=True)):
        return False
    if all(x.shape == y.shape for x, y in zip(a, b, strict=True)):
        return False
    return _outline(one, a) == _outline(other, b)


def _outline(call: Call, tensors: list[Tensor]) -> str:
    return repr(filled((call.args, call.kwargs), tensors, [f"<{number}>" for number in range(len(tensors))]))
