"""In which order many ranks' tensors are folded into one: floating point can tell."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
IN_A_ROW = 8  # ranks that are folded one after the other, as gloo does it for few


def by_pairs(pair: Callable[[T, T], T], held: Sequence[T]) -> T:
    """More than eight are folded in pairs of neighbours, again and again; eight or fewer one after the other.

    As good an order as gloo's ring or tree, whose own depends on sizes; and one in which many groups can be folded
    together (lockstep/comms/stacked_collectives.py).

    >>> by_pairs(lambda a, b: f"({a}{b})", "abcde"), by_pairs(lambda a, b: a + b, range(10))
    ('((((ab)c)d)e)', 45)
    """
    while len(held) > 1:
        even = len(held) // 2 * 2 if len(held) > IN_A_ROW else 2
        held = [*(pair(held[i], held[i + 1]) for i in range(0, even, 2)), *held[even:]]
    return held[0]
