"""Fourier transforms: every dim that is not transformed is a batch; and a transform is linear."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import along, parts_of
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules


def transformed(ask: Ask) -> Iterator[Line]:
    """Nothing at all is not transformed: the libraries below refuse empty tensors."""
    ndim = ask.meta("self").ndim
    taken = {dim % max(ndim, 1) for dim in ask["dim"]}
    for dim in range(ndim):
        if dim not in taken:
            yield along(ask, {"self": dim}, [dim], "filled")
    yield from parts_of(ask, ["self"])


RULES: tuple[Entry, ...] = with_variants(
    rules(
        "fft", "lines along one dim are transformed each by itself",
        ["aten._fft_c2c.default", "aten._fft_c2r.default", "aten._fft_r2c.default"], transformed,
    )
)  # fmt: skip
