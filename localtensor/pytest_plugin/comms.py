"""The fixtures `comms` and `comms_snapshot`: what ranks have called, and the same as a text that stays.

Loading this module imports neither torch nor numpy.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pytest

from localtensor.errors.base import Refusal, rank_names
from localtensor.pytest_plugin.marks import file_name

if TYPE_CHECKING:
    from localtensor._util.events import Call

MOST_SHOWN = 12  # calls in a repr
UPDATE = "update"
KINDS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "scatter", "send",
    "sparse_all_reduce",
)  # fmt: skip


class NoSuchKind(Refusal, call="comms", argument="kind", values="{kind!r}"):
    """A kind that no call has: to count its calls would find none, whatever the ranks do."""

    PROBLEM = "no collective has this name"


class Comms(Sequence["Call"]):
    """The collectives and messages of a rank so far, in order; each is a `localtensor._util.events.Call`.

    Live: later calls appear in it.  `rank` None is all ranks, in the order of their calls; `kind`, `axis` and `implicit`
    choose among them.

    >>> from localtensor._util.events import Call
    >>> log = [Call(rank, "all_reduce", "0", (0, 1), 0, ("f32[4]",), 16, axis="tp", implicit=True) for rank in (0, 1)]
    >>> comms = Comms(lambda: log, rank=0)
    >>> comms
    Comms(rank 0: all_reduce #0 of f32[4])
    >>> len(comms), comms.kinds, comms.count("all_reduce"), comms.bytes, len(comms.of_all_ranks)
    (1, ['all_reduce'], 1, 16, 2)
    >>> comms.bytes_by_axis_and_kind, len(comms.implicit), len(comms.along("dp"))
    ({('tp', 'all_reduce'): 16}, 1, 0)
    """

    def __init__(
        self,
        log: Callable[[], Sequence[Call]],
        rank: int | None,
        kind: str | None = None,
        axis: str | None = None,
        implicit: bool = False,
    ) -> None:
        self._log, self.rank, self._chosen = log, rank, (kind, axis, implicit)

    @property
    def calls(self) -> list[Call]:
        """The calls until now."""
        kind, axis, implicit = self._chosen
        return [
            call
            for call in self._log()
            if (self.rank is None or call.rank == self.rank)
            and (kind is None or call.kind == kind)
            and (axis is None or call.axis == axis)
            and (call.implicit or not implicit)
        ]

    @property
    def of_all_ranks(self) -> Comms:
        """The same log, with the calls of every rank."""
        return Comms(self._log, None, *self._chosen)

    def of(self, kind: str) -> Comms:
        """The calls of one kind: "all_reduce", "broadcast", "send".  Raises `NoSuchKind`."""
        self._check(kind)
        return Comms(self._log, self.rank, kind, *self._chosen[1:])

    def along(self, axis: str) -> Comms:
        """The calls along one mesh axis."""
        return Comms(self._log, self.rank, self._chosen[0], axis, self._chosen[2])

    def _check(self, kind: str) -> None:
        known = {*KINDS, *(call.kind for call in self._log())}
        if kind not in known and "." not in kind:  # `store.wait(...)`, `symm_mem.rendezvous`: there are any number
            near = difflib.get_close_matches(kind, sorted(known), n=1)
            raise NoSuchKind(kind, f"Did you mean {near[0]}?" if near else f"Choose of {', '.join(KINDS)}.")

    @property
    def implicit(self) -> Comms:
        """The calls that no line of the program asks for: DTensor's, to move an op's tensors or a gradient."""
        return Comms(self._log, self.rank, *self._chosen[:2], implicit=True)

    @property
    def kinds(self) -> list[str]:
        """The kind of each call, in order."""
        return [call.kind for call in self.calls]

    @property
    def bytes(self) -> int:
        """The bytes of all tensors that the rank passed to its calls."""
        return sum(call.bytes for call in self.calls)

    @property
    def bytes_by_axis_and_kind(self) -> dict[tuple[str | None, str], int]:
        """The bytes by mesh axis and kind of call; the axis of a group that no mesh has is None."""
        found: dict[tuple[str | None, str], int] = defaultdict(int)
        for call in self.calls:
            found[call.axis, call.kind] += call.bytes
        return dict(found)

    def count(self, value: str | Call) -> int:
        """The number of calls of a kind, or of occurrences of a Call.  Raises `NoSuchKind`."""
        if isinstance(value, str):
            self._check(value)
        return self.kinds.count(value) if isinstance(value, str) else self.calls.count(value)

    def text(self) -> str:
        """The communication as a text that depends on no schedule and no line: what each rank calls, in its order."""
        by_rank: dict[int, list[str]] = defaultdict(list)
        for call in self.calls:
            by_rank[call.rank].append(_stable_text(call))
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank in sorted(by_rank):
            alike[tuple(by_rank[rank])].append(rank)
        lines = []
        for texts, ranks in alike.items():
            lines.append(f"{rank_names(ranks)}:")
            for text, same in groupby(texts):
                times = len(list(same))
                lines.append(f"  {text}" + (f", {times} times" if times > 1 else ""))
        return "\n".join(lines or ["no calls"]) + "\n"

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        calls = self.calls
        texts = [_call_text(call, with_rank=self.rank is None) for call in calls[:MOST_SHOWN]]
        texts += [f"and {len(calls) - MOST_SHOWN} more"] if len(calls) > MOST_SHOWN else []
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        return f"Comms({who}: {', '.join(texts) or 'nothing yet'})"


def _call_text(call: Call, *, with_rank: bool) -> str:
    who = f"rank {call.rank} " if with_rank else ""
    return f"{who}{call.kind} #{call.number}" + (f" of {', '.join(call.tensors)}" if call.tensors else "")


def _stable_text(call: Call) -> str:
    of = f" of {', '.join(call.tensors)}" if call.tensors else ""
    where = f"along {call.axis}" if call.axis else f"in ranks {', '.join(map(str, call.group))}"
    extra = "".join(
        f", {name}={value}" for name in ("op", "root", "peer", "tag") if (value := getattr(call, name)) is not None
    )
    return f"{call.kind}{of} {where}{extra}, {call.bytes} bytes" + (", implicit" if call.implicit else "")


class CommsSnapshot:
    """`assert comms == comms_snapshot`: the communication is that of the file that the test wrote with `--rank-snapshots update`.

    The file lies in `__snapshots__` beside the test's; each comparison of a test, and of a rank, has one.  `name` is the
    test's, with its class: `TestIt::test_sum`.
    """

    def __init__(self, file: Path, name: str, *, update: bool) -> None:
        self._folder = file.parent / "__snapshots__" / file.stem
        self._name, self._update = file_name(name.replace("::", ".")), update
        self._compared: Counter[int | None] = Counter()
        self.differences: list[str] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comms):
            return NotImplemented
        number = self._compared[other.rank]
        self._compared[other.rank] += 1
        whose = "" if other.rank is None else f".rank{other.rank}"
        file = self._folder / f"{self._name}{whose}{f'.{number}' if number else ''}.txt"
        text = other.text()
        if self._update:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return True
        if not file.exists():
            self.differences = [f"there is no snapshot {file.name} yet: run the test once with --rank-snapshots update"]
            return False
        kept = file.read_text(encoding="utf-8")
        self.differences = list(
            difflib.unified_diff(kept.splitlines(), text.splitlines(), "snapshot", "this run", lineterm="")
        )
        return kept == text

    __hash__ = None  # type: ignore[assignment]  # as of whatever compares by content

    def __repr__(self) -> str:
        return f"the snapshot of {self._name}"


def check_snapshots(call: str, argument: str, value: object) -> str:
    """The value of `--rank-snapshots`.  Raises `pytest.UsageError`."""
    if value not in (UPDATE, "check"):
        raise pytest.UsageError(
            f"{call}: {argument}: {value}: snapshots are checked or updated. Write {UPDATE} or check."
        )
    return str(value)
