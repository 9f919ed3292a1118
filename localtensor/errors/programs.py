"""Faults that a real run does not report: deadlocks, races, leftovers, and the first cause of a failed run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from localtensor._util.events import Call, Place, Raised, Wait, Waiting
from localtensor.errors import base

LONGEST_CIRCLE = 12  # ranks of a circle that are printed


class EarlyReturn(base.ProgramFault):
    """Ranks returned while others wait for them; `returned` holds where each was last seen."""

    def __init__(self, waits: Sequence[Wait], returned: Mapping[int, Place | None]) -> None:
        self.waits, self.returned = tuple(waits), dict(returned)
        awaited = {rank for wait in waits for rank in wait.ranks}
        early = sorted(awaited & returned.keys()) or sorted(returned)
        whom = "it" if len(early) == 1 else "them"
        sentence = (
            f"{base.rank_names(early)} returned while {_ranks_and_wait(waits)} for {whom}: "
            "a rank must take part in every collective that its groups call. "
            "Look for a return, a break or a branch that depends on the rank, and make the call on every rank."
        )
        left = [(rank, f"returned, last seen{base.place_suffix(returned[rank]) or ' in no call'}") for rank in early]
        places = [*map(returned.get, early), *_places(waits)]
        details = [*base.merge_equal_lines(left, " "), *base.wait_lines(waits)]
        super().__init__(sentence, details, places, [*early, *_ranks(waits)])


class Deadlock(base.ProgramFault):
    """No rank can go on: each waits for another.  `circle` are the ranks of a cycle of waits, () if there is none."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self.waits = tuple(sorted(waits, key=lambda wait: wait.rank))
        self.circle = _find_cycle({wait.rank: set(wait.ranks) for wait in waits})
        inside = [wait for wait in self.waits if wait.rank in self.circle]
        problem = "no rank can go on"
        problem += f", they wait for each other in a circle: {self._cycle_text()}" if inside else ""
        remedy = _deadlock_remedy([wait.call for wait in inside])
        sentence = f"{_ranks_and_wait(waits)}: {problem}. {remedy}"
        first = [*inside, *(wait for wait in self.waits if wait not in inside)]
        super().__init__(sentence, base.wait_lines(self.waits), _places(first), _ranks(first))

    def _cycle_text(self) -> str:
        shown = list(map(str, self.circle[:LONGEST_CIRCLE]))
        return " -> ".join([*shown, *(["..."] if len(self.circle) > LONGEST_CIRCLE else []), str(self.circle[0])])


class WorkNotWaited(base.ProgramFault):
    """Asynchronous collectives without a wait(): their outputs may hold anything."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        sentence = base.refusal_sentence(
            _call_text(calls),
            "async_op",
            f"not waited for on {base.rank_names({call.rank for call in calls})}",
            "the function returned while its output may still be on the way",
            "Keep the Work that the call returns, and call its wait() before the output is read.",
        )
        ranks = [call.rank for call in calls]
        super().__init__(sentence, base.call_lines(calls), [call.place for call in calls], ranks)


class ReadBeforeWait(base.ProgramFault):
    """The output of an asynchronous collective was read before its wait()."""

    def __init__(self, call: Call, op: str, place: Place | None) -> None:
        self.call, self.op = call, op
        sentence = base.refusal_sentence(
            base.call_summary(replace(call, place=None)),
            "output",
            f"read by {op} on rank {call.rank}{base.place_suffix(place)}",
            "until wait() it may hold the old numbers, the new ones or some of both",
            "Call wait() on the Work that the call returned before this line.",
        )
        super().__init__(sentence, base.call_lines([call]), [place, call.place], [call.rank])


class BufferReused(base.ProgramFault):
    """A buffer was written while a collective on it was on the way; `op` is None if that shows only at the wait."""

    def __init__(self, call: Call, op: str | None, place: Place | None) -> None:
        self.call, self.op = call, op
        found = f"written by {op} on rank {call.rank}{base.place_suffix(place)}"
        sentence = base.refusal_sentence(
            base.call_summary(replace(call, place=None)),
            "buffer",
            found if op else f"found changed on rank {call.rank} at its wait{base.place_suffix(place)}",
            "until wait() the collective may still read it, or write to it",
            "Call wait() before the tensor is written, or pass the call a clone.",
        )
        super().__init__(sentence, base.call_lines([call]), [place, call.place], [call.rank])


class MessagesLeftOver(base.ProgramFault):
    """Sends and receives that were never matched."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        sentence = base.refusal_sentence(
            _call_text(calls),
            "peer",
            f"never met on {base.rank_names({call.rank for call in calls})}",
            "a send meets the recv of the rank that it names, in the same group and with the same tag",
            "Make the other half of each call on the rank that it names, or leave the call out.",
        )
        details = [*base.call_lines(calls), *base.truncate_lines(list(_near_miss_lines(calls)))]
        super().__init__(sentence, details, [call.place for call in calls], [call.rank for call in calls])


class GroupsLeftOver(base.ProgramFault):
    """Process groups that the program made and did not destroy; `places` holds, by name, where each was made."""

    def __init__(
        self, groups: Mapping[str, tuple[int, ...]], ranks: Sequence[int], places: Mapping[str, Place | None]
    ) -> None:
        self.groups = dict(groups)
        names = f"group{'s' if len(groups) != 1 else ''} {', '.join(list(groups)[:8])}"
        sentence = base.refusal_sentence(
            "new_group",
            "group",
            f"{names}{' and others' if len(groups) > 8 else ''} on {base.rank_names(ranks)}",
            "made by the function, and still there when it returned",
            "Call torch.distributed.destroy_process_group(group) on each rank that made it.",
        )
        lines = [
            f"  group {name} of ranks {base.rank_ranges(members)}{base.place_suffix(places.get(name))}"
            for name, members in groups.items()
        ]
        super().__init__(sentence, base.truncate_lines(lines), [places.get(name) for name in groups], ranks)


class RanksDisagree(base.ProgramFault):
    """A value that the program asserts to be the same on all ranks differs; `values` are short forms by rank."""

    def __init__(
        self,
        what: str,
        values: Mapping[int, str],
        places: Mapping[int, Place | None],
        detail: str = "",
        *,
        call: str = "assert_same_on_all_ranks",
    ) -> None:
        self.values = dict(values)
        order = [rank for _, ranks in base.minority_first(values) for rank in ranks]
        sentence = base.refusal_sentence(
            call,
            what,
            base.facts_by_rank({rank: base.first_line(value, 80) for rank, value in values.items()}),
            f"the ranks disagree{detail and ', '}{detail}",
            "Compute it from what all ranks share: the same seed, the same input, or a broadcast from one rank.",
        )
        lines = [(rank, f"{values[rank]}{base.place_suffix(places.get(rank))}") for rank in order]
        details = [*base.likely_culprit_lines(values), *base.merge_equal_lines(lines)]
        super().__init__(sentence, details, [places.get(rank) for rank in order], order)


class RankRaised(base.ProgramFault):
    """Ranks raised; the first cause comes first in `raised`, and is this error's __cause__.

    `where` are the lines that they came from, by rank.  `waits` are the waits of the other ranks; `busy` are real
    processes that were ended, with their places.  `errors` are the exceptions themselves, by rank, where the ranks are
    threads of this process or were forked from it; `rendered` is the text of each in its own process.
    """

    def __init__(
        self,
        raised: Sequence[Raised],
        waiting: Sequence[Wait] = (),
        places: Mapping[int, Place | None] | None = None,
        busy: Sequence[Waiting] = (),
    ) -> None:
        self.raised, self.waits, self.busy = tuple(raised), tuple(waiting), tuple(busy)
        self.errors: dict[int, BaseException] = {}
        self.rendered: dict[int, str] = {}
        self.where = where = dict(places or {})
        first, others = raised[0], sorted(raised[1:], key=lambda one: one.rank)
        problem = "this is the first rank that raised"
        problem += f", and {_ranks_and_wait(waiting)} for others since" if waiting else ""
        problem += f", and {base.rank_names(one.rank for one in busy)} had not come back" if busy else ""
        sentence = base.refusal_sentence(
            "run",
            f"rank {first.rank}",
            f"{_raised_text(first)}{base.place_suffix(where.get(first.rank))}",
            problem,
            "Repair this line first: what the other ranks say may only be its echo.",
        )
        texts = [(one.rank, f"{_raised_text(one)}{base.place_suffix(where.get(one.rank))}") for one in others]
        lines = base.merge_equal_lines(texts)
        order = [one.rank for one in (first, *others)]
        super().__init__(
            sentence,
            [*lines, *base.wait_lines(waiting), *base.busy_lines(busy)],
            [*map(where.get, order), *_places(waiting)],
            [*order, *_ranks(waiting), *(one.rank for one in busy)],
        )


class CollectiveFailed(base.ProgramFault):
    """All members have arrived and agree, and the collective refuses what they bring; `detail` is its own message."""

    def __init__(self, calls: Sequence[Call], detail: str) -> None:
        self.calls, self.detail = tuple(calls), detail
        problem = "all ranks have arrived, and what they bring is refused"
        ranks = [call.rank for call in calls]
        sentence = base.refusal_sentence(_call_text(calls), "tensors", f"of {base.rank_names(ranks)}", problem, detail)
        super().__init__(sentence, base.call_lines(calls), [call.place for call in calls], ranks)


def _call_text(calls: Sequence[Call]) -> str:
    """The call, or the first of several."""
    summaries = [base.call_summary(replace(call, place=None)) for call in calls]
    return summaries[0] if len(set(summaries)) == 1 else f"{summaries[0]} and others"


def _ranks_and_wait(waits: Iterable[Wait]) -> str:
    ranks = {wait.rank for wait in waits}
    return f"{base.rank_names(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _ranks(waits: Iterable[Wait]) -> list[int]:
    return [wait.rank for wait in waits]


def _places(waits: Iterable[Wait]) -> list[Place | None]:
    return [wait.call.place for wait in waits]


def _find_cycle(graph: Mapping[int, set[int]]) -> tuple[int, ...]:
    """A cycle of waits, which begins at its lowest rank: each rank waits for the next, the last for the first; else ()."""
    alive = {rank: sorted(ranks) for rank, ranks in graph.items()}
    while dead := [rank for rank, ranks in alive.items() if not any(other in alive for other in ranks)]:
        for rank in dead:
            del alive[rank]
    if not alive:
        return ()
    way = [min(alive)]
    while way[-1] not in way[:-1]:
        way.append(next(rank for rank in alive[way[-1]] if rank in alive))
    ring = way[way.index(way[-1]) : -1]
    start = ring.index(min(ring))
    return (*ring[start:], *ring[:start])


def _deadlock_remedy(calls: Sequence[Call]) -> str:
    """The remedy for a cycle of waits in these calls."""
    if not calls:
        return "Let the ranks that are waited for make the call too."
    if all(call.kind.startswith("store.") for call in calls):
        return "Let one of the ranks set the key before it waits for it."
    if all(call.kind == "Lock.acquire" for call in calls):
        return "Let another thread of the rank release the lock, or set what is waited for."
    if all(call.kind.startswith("symm_mem.") for call in calls):
        return "Let one of the ranks put its signal before it waits for the other's."
    if any(call.kind.startswith("store.") for call in calls):
        return "Let the rank that sets the key do it before its own call, which waits for the rank that needs the key."
    if any(call.kind.startswith("symm_mem.wait_signal") for call in calls):
        return "Let the rank that puts the signal do it before its own call, which waits for the rank that needs the signal."
    if all(call.peer is None for call in calls):
        return "Call the collectives of all groups in one order on every rank."
    if all("recv" in call.kind for call in calls):
        return "Let one of the ranks send before it receives."
    if all("send" in call.kind for call in calls):
        remedy = "Let one of the ranks receive before it sends,"
        return f"{remedy} or start both by batch_isend_irecv and wait for them after."
    return "Put the sends, receives and collectives of these ranks into one order, in which each meets its other half."


def _near_miss_lines(calls: Sequence[Call]) -> Iterable[str]:
    """Lines about sends and receives that name each other and still do not match."""
    for send in (call for call in calls if "send" in call.kind):
        for recv in (call for call in calls if "recv" in call.kind):
            if (send.peer, send.rank) == (recv.rank, recv.peer):
                pairs = [("group", send.group_name, recv.group_name), ("tag", send.tag or 0, recv.tag or 0)]
                odd = [f"{name}s {a} and {b}" for name, a, b in pairs if a != b]
                if odd:
                    yield f"  rank {send.rank}'s send and rank {recv.rank}'s recv differ in their {' and '.join(odd)}"


def _raised_text(raised: Raised) -> str:
    message = base.first_line(raised.message)
    return f"{raised.kind}: {message}" if message else raised.kind


class Diverged(base.LocalTensorError, AssertionError):
    """A parallel program computes something else than one device; `comparison` says what, where and why."""

    def __init__(self, text: str, comparison: object) -> None:
        self.comparison = comparison
        super().__init__(text)


class NotComparable(base.Refusal, call="compare", values="{what}"):
    """Two programs of which no comparison can be made."""

    SUBJECT = "compare: {argument}: {what}"
    PROBLEM = "so there is nothing to compare with"

    def __init__(self, what: str, argument: str, remedy: str) -> None:
        super().__init__(argument, what, remedy)


class NotCheckable(base.Refusal):
    """A graph whose collectives cannot be followed: sends, a group that is not known, a node of unknown shape."""
