"""One program run on rank threads and on real gloo processes, and the comparison of what came back.

The third way, one device, stands beside each program: an ordinary function of plain tensors.
"""

from collections.abc import Callable
from typing import Any

import torch

import localtensor as lt
from tests.device import DEVICE

Program = Callable[..., Any]


def on_threads(program: Program, *args: Any, ranks: int) -> list[Any]:
    """What each rank returned, in rank order: the same bits whether or not ranks share what DTensor propagates."""
    done = lt.run(program, *args, ranks=ranks, device=DEVICE)
    assert_same_bits(list(done), list(lt.run(program, *args, ranks=ranks, share=False, device=DEVICE)))
    return [done[rank] for rank in range(ranks)]


def on_gloo(program: Program, *args: Any, ranks: int) -> list[Any]:
    done = lt.run(program, *args, ranks=ranks, on="gloo", device=DEVICE)
    return [done[rank] for rank in range(ranks)]


def assert_same_bits(threads: Any, gloo: Any) -> None:
    """Equal to the last bit; other values than tensors and numbers are equal."""
    torch.testing.assert_close(_plain(threads), _plain(gloo), rtol=0, atol=0, equal_nan=True)


def assert_same_but_for_sums(threads: Any, gloo: Any) -> None:
    """float64 numbers but for a few last bits: of more than two ranks, gloo adds in an order that it chooses itself."""
    torch.testing.assert_close(_plain(threads), _plain(gloo), rtol=1e-11, atol=1e-13, equal_nan=True)


def on_both(program: Program, *args: Any, ranks: int, exact: bool = True) -> list[Any]:
    """What each rank returned on threads, which is the same on gloo, whose ranks cannot share what DTensor propagates."""
    threads = list(lt.run(program, *args, ranks=ranks, device=DEVICE))
    (assert_same_bits if exact else assert_same_but_for_sums)(threads, on_gloo(program, *args, ranks=ranks))
    return threads


def _plain(value: Any) -> Any:
    """Containers of tensors and numbers; anything else becomes a comparison of texts, in bytes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor | bool | int | float | complex):
        return value
    return torch.tensor(list(repr(value).encode()), dtype=torch.uint8)
