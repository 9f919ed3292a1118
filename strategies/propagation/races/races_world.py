"""What programs over the shared cache have in common: keys that yield, a rule that changes, notes of what was computed."""

from __future__ import annotations

from typing import Any

from localtensor.concurrency.controlled_sync import Scheduled
from localtensor.concurrency.single_flight import Once

Answer = tuple[str, int]


def hold(true: bool, said: str) -> None:
    """Raises AssertionError, also under `python -O`."""
    if not true:
        raise AssertionError(said)


class Key:
    """A key in whose comparison other threads run, and whose hash all keys share: there is no quick way past it."""

    def __init__(self, sync: Scheduled, name: str) -> None:
        self.sync, self.name = sync, name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        self.sync.step(f"compares {self.name}")
        return isinstance(other, Key) and self.name == other.name

    def __repr__(self) -> str:
        return self.name


class World:
    """A cache, a rule that may change, and notes on what was computed by which rule.

    `settled` is the last rule whose change is over, its clear included.
    """

    def __init__(self, sync: Scheduled, limit: int = 8) -> None:
        self.sync, self.rule, self.settled = sync, 0, 0
        self.cache: Any = self.make(sync, limit)
        self.made: list[Answer] = []
        self.busy: set[Answer] = set()

    def make(self, sync: Scheduled, limit: int) -> Any:
        """The cache under test."""
        return Once[Any](name="explored", limit=limit, sync=sync)

    def key(self, name: str) -> Key:
        return Key(self.sync, name)

    def compute(self, name: str) -> Answer:
        made = name, self.rule
        hold(made not in self.busy or self.rule > 0, f"{name} is computed twice at once")  # after a clear it may be
        self.busy.add(made)
        self.made.append(made)
        self.sync.step(f"computes {name}")
        self.busy.discard(made)
        return made

    def get(self, name: str) -> Answer:
        settled = self.settled
        got: Answer = self.cache.get(self.key(name), lambda: self.compute(name))
        hold(got[0] == name, f"asked for {name}, told {got[0]}")
        hold(got[1] >= settled, f"asked after the clear for rule {settled}, told by rule {got[1]}")
        return got

    def change(self) -> None:
        """A new rule, and a clear."""
        self.rule += 1
        rule = self.rule
        self.cache.clear()
        self.settled = max(self.settled, rule)

    def check_once_each(self) -> None:
        hold(len(self.made) == len(set(self.made)), f"computed twice: {self.made}")

    def check_kept(self, *names: str) -> None:
        made = len(self.made)
        for name in names:
            hold(self.get(name) == (name, self.rule), f"{name} has a stale value")
        hold(len(self.made) == made, "what was computed is not kept")
