"""Caches whose key leaves out what changes the answer."""

from __future__ import annotations

from typing import Any

from localtensor.concurrency.explorer import Program
from localtensor.concurrency.sync import ScheduledSync
from tests.tools.races.culprits_values import Culprit, Tiny


class Keyed:
    """The answer to (op, scalar) on a rank under a mode; `key` says of what it is remembered."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.cache, self.mode = sync, Tiny(sync), "grad"

    def key(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        return op, scalar, rank, self.mode

    def ask(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        key, mode = self.key(op, scalar, rank), self.mode

        def compute() -> tuple[Any, ...]:
            self.sync.step("computes")
            return op, scalar, rank, mode

        answer: tuple[Any, ...] = self.cache.get(key, compute)
        return answer


class WithoutScalar(Keyed):
    def key(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        return op, rank, self.mode


class WithoutRank(Keyed):
    def key(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        return op, scalar, self.mode


class EqualNumbers(Keyed):
    """1 == 1.0 == True, and they have one hash: the scalar is in the key, and its type is not."""

    def key(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        return op, scalar, rank, self.mode


class WithTypes(Keyed):
    def key(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        return op, type(scalar), scalar, rank, self.mode


def of_two(first: tuple[int, int], second: tuple[int, int]) -> Any:
    def program(sync: ScheduledSync, kind: type[Keyed]) -> Program:
        keyed = kind(sync)

        def ask(scalar: int, rank: int) -> None:
            got = keyed.ask("sum", scalar, rank)
            assert repr(got) == repr(("sum", scalar, rank, "grad")), f"scalar {scalar!r}, rank {rank} got {got}"

        return Program([lambda: ask(*first), lambda: ask(*second)])

    return program


class ReadsModeLate(Keyed):
    """The key is made of the mode as it was, the answer of the mode as it is by then."""

    def ask(self, op: str, scalar: int, rank: int) -> tuple[Any, ...]:
        def compute() -> tuple[Any, ...]:
            self.sync.step("computes")
            return op, scalar, rank, self.mode

        answer: tuple[Any, ...] = self.cache.get(self.key(op, scalar, rank), compute)
        return answer


def a_mode_changes(sync: ScheduledSync, kind: type[Keyed]) -> Program:
    keyed = kind(sync)

    def change() -> None:
        sync.step("changes the mode")
        keyed.mode = "no grad"

    def check() -> None:
        for mode in ("grad", "no grad"):
            keyed.mode = mode
            got = keyed.ask("sum", 0, 0)
            assert got[3] == mode, f"under {mode}: {got}"

    return Program([lambda: keyed.ask("sum", 0, 0), change], check)


KEYS = (
    Culprit("key without the scalar", "got", of_two((0, 0), (1, 0)), WithoutScalar, Keyed),
    Culprit("key without the rank", "got", of_two((0, 0), (0, 1)), WithoutRank, Keyed),
    Culprit("key that takes True for 1", "scalar", of_two((1, 0), (True, 0)), EqualNumbers, WithTypes),
    Culprit("mode read after the key was made", "under grad", a_mode_changes, ReadsModeLate, Keyed),
)
