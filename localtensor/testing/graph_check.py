"""The graphs that ranks compile, checked together: their collectives match, are waited for, and no rank waits for ever."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import fx

from localtensor import errors
from localtensor._util.events import Call, Wait
from localtensor.collectives.rendezvous import Contribution, Group, Ticket, match_key
from localtensor.errors.base import ProgramFault, WrongType, merge_equal_lines
from localtensor.lockstep.comms.process_groups import LockstepGroup
from localtensor.testing.graph_flow import Flow, Start, follow, line_of, place_of

Graphs: TypeAlias = Mapping[int, fx.GraphModule] | Sequence[fx.GraphModule] | fx.GraphModule
Members: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
_CALL = "check_graphs"


def check_graphs(graphs: Graphs, *, groups: Mapping[str, Members] | None = None) -> tuple[Call, ...]:
    """Check the collectives of the graphs that ranks compile; returns those that match, in the order in which they end.

    graphs  the `torch.fx.GraphModule` of each rank, by rank or in rank order, or one for all ranks of its groups; with
            functional collectives (`_c10d_functional`), and `meta["val"]` as make_fx and AOTAutograd write it.
    groups  the ranks of each group by its name, or a list of groups of which each rank is in one.  A name that is not
            in it is that of a process group of now.

    Each rank runs its graph in order.  A collective starts at its node, and the n-th of a group matches the n-th of each
    other member; `wait_tensor` blocks until all members have started it.  A reordering that is not right raises, with
    the lines of the graphs that are concerned:

    * a `CollectiveMismatch` (`KindMismatch`, `ShapeMismatch`, ...) where the calls at one position of a group differ;
    * `EarlyReturn` where a graph ends without a call that others wait for, and `Deadlock` where ranks wait for each
      other, also in several groups;
    * `ReadBeforeWait` and `BufferReused` where a node reads a result, or writes to a buffer, before the wait;
    * `WorkNotWaited` for a result without a wait;
    * `NotCheckable` for what cannot be followed: sends, collectives in a graph of its own, a group that is not known.
    """
    given = _by_rank(graphs, groups or {})
    flows: dict[int, Flow] = {}
    for graph in given.values():
        if id(graph) not in flows:
            flows[id(graph)] = follow(graph, _CALL)
    ranks = _Ranks({rank: flows[id(given[rank])] for rank in sorted(given)}, groups or {})
    ranks.check_each()
    return ranks.run()


def _by_rank(graphs: Graphs, groups: Mapping[str, Members]) -> dict[int, fx.GraphModule]:
    if isinstance(graphs, fx.GraphModule):
        names = {step.start.group_name for step in follow(graphs, _CALL).steps if step.start is not None}
        given = {rank: graphs for name in names for members in _lists(name, groups) for rank in members} or {0: graphs}
    elif isinstance(graphs, Mapping):
        given = dict(graphs)
    elif isinstance(graphs, Iterable):
        given = dict(enumerate(graphs))
    else:
        given = {0: graphs}
    for rank, graph in given.items():
        if not isinstance(graph, fx.GraphModule):
            remedy = "Pass what make_fx returns, or what a backend of torch.compile takes."
            raise WrongType(_CALL, f"graphs[{rank}]", graph, "a torch.fx.GraphModule is expected", remedy)
    if not given:
        raise errors.NotCheckable(_CALL, "graphs", repr(graphs), "there is no rank", "Pass the graph of each rank.")
    return given


def _lists(name: str, groups: Mapping[str, Members]) -> list[tuple[int, ...]]:
    """The groups of this name: one, or in lockstep one for each part of the ranks."""
    if name in groups:
        rows: list[Any] = list(groups[name])
        return [tuple(row) for row in rows] if rows and not isinstance(rows[0], int) else [tuple(rows)]
    try:
        found = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, errors.LocalTensorError) as error:
        problem = "there is no process group of this name now"
        remedy = f"Pass groups={{{name!r}: [0, 1]}} with its ranks, or check the graphs where the group is."
        raise errors.NotCheckable(_CALL, "groups", f"group {name!r}", problem, remedy) from error
    if isinstance(found, LockstepGroup):
        return [tuple(members) for members in found._groups]
    return [tuple(dist.get_process_group_ranks(found))]


class _Ranks:
    """The ranks, each at a step of its graph."""

    def __init__(self, flows: Mapping[int, Flow], groups: Mapping[str, Members]) -> None:
        self._flows, self._given = flows, groups
        self._lists: dict[str, list[tuple[int, ...]]] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._at = dict.fromkeys(flows, 0)
        self._tickets: dict[int, dict[Start, Ticket]] = {rank: {} for rank in flows}
        self._starts: dict[tuple[int, str, int], Start] = {}
        self._blocked: dict[int, list[int]] = {}  # ranks by the identity of their rendezvous' first ticket
        self._done: list[Call] = []

    def check_each(self) -> None:
        """Raise for what is wrong in one graph, whatever the others do."""
        for rank, flow in self._flows.items():
            if flow.fault is not None:
                start, node = flow.fault.start, flow.fault.node
                kind = errors.BufferReused if flow.fault.writes else errors.ReadBeforeWait
                call = self._call(rank, start)
                raise _with_lines(kind(call, str(node.target), place_of(node)), [(rank, start.node), (rank, node)])
        for rank, flow in self._flows.items():
            if flow.unwaited:
                calls = [self._call(rank, start) for start in flow.unwaited]
                raise _with_lines(errors.WorkNotWaited(calls), [(rank, start.node) for start in flow.unwaited])

    def run(self) -> tuple[Call, ...]:
        ready = deque(self._flows)
        while ready:
            ready.extend(self._advance(ready.popleft()))
        waiting = [rank for rank, flow in self._flows.items() if self._at[rank] < len(flow.steps)]
        if waiting:
            self._fail(waiting)
        return tuple(self._done)

    def _advance(self, rank: int) -> list[int]:
        """Run the rank until it blocks; returns the ranks that can go on since."""
        steps, mine = self._flows[rank].steps, self._tickets[rank]
        free: list[int] = []
        while self._at[rank] < len(steps):
            step = steps[self._at[rank]]
            if step.start is not None and step.start not in mine:
                free += self._join(rank, step.start)
            missing = [mine[start] for start in step.waits if not mine[start].done]
            if missing:
                self._blocked.setdefault(id(missing[0].part), []).append(rank)
                break
            self._at[rank] += 1
        return free

    def _join(self, rank: int, start: Start) -> list[int]:
        part = self._part(rank, start)
        rendezvous = part.group.next_rendezvous(rank)
        part.number = rendezvous.number
        self._starts[rank, start.group_name, part.number] = start
        self._tickets[rank][start] = rendezvous.join(part)
        if rendezvous.broken is not None:
            self._differ(rendezvous.mismatch())
        if not rendezvous.complete():
            return []
        calls = [rendezvous.parts[one].call() for one in part.group.ranks]
        if not _splits_fit(calls):
            self._differ(errors.SplitMismatch(calls, part.group.recent_calls()))
        self._done.append(calls[0])
        part.group.close(rendezvous, lambda parts: [None] * len(parts))
        return [one for member in rendezvous.parts.values() for one in self._blocked.pop(id(member), ())]

    def _differ(self, error: errors.CollectiveMismatch) -> None:
        calls = [(call.rank, self._starts[call.rank, call.group_name, call.number].node) for call in error.calls]
        raise _with_lines(error, calls)

    def _fail(self, waiting: Sequence[int]) -> None:
        """Raise for ranks that wait and are not met."""
        waits, lines = [], []
        for rank in waiting:
            step, mine = self._flows[rank].steps[self._at[rank]], self._tickets[rank]
            ticket, start = next((mine[one], one) for one in step.waits if not mine[one].done)
            waits.append(Wait(rank, ticket.peers(), ticket.part.call()))
            lines += [(rank, start.node)] if step.node is start.node else [(rank, start.node), (rank, step.node)]
        awaited = {rank for wait in waits for rank in wait.ranks}
        ended = [rank for rank in sorted(awaited) if rank not in waiting]
        if not ended:
            raise _with_lines(errors.Deadlock(waits), lines)
        last = {rank: list(self._tickets[rank]) for rank in ended}
        places = {rank: place_of(starts[-1].node) if starts else None for rank, starts in last.items()}
        lines = [*((rank, starts[-1].node) for rank, starts in last.items() if starts), *lines]
        raise _with_lines(errors.EarlyReturn(waits, places), lines)

    def _part(self, rank: int, start: Start) -> Contribution:
        group = self._group(rank, start)
        root = start.root
        if root is not None:
            if not 0 <= root < len(group.ranks):
                raise errors.RankOutside("broadcast", "src", root, len(group.ranks), len(group.ranks) - 1)
            root = group.ranks[root]
        must = "dtype" if start.kind in ("all_to_all_single", "shard_dim_alltoall") else "shapes"
        place = place_of(start.node)
        return Contribution(
            rank=rank,
            kind=start.kind,
            group=group,
            inputs=None,
            tensors=start.tensors,
            device=start.device,
            key=match_key(start.kind, start.tensors, start.device, start.op, root, must),
            op=start.op,
            root=root,
            input_splits=start.input_splits,
            output_splits=start.output_splits,
            line=None if place is None else (place.file, place.line, place.function),
        )

    def _call(self, rank: int, start: Start) -> Call:
        """The call before the ranks run: its number counts those of the group that the graph has before it."""
        starts = [step.start for step in self._flows[rank].steps if step.start is not None]
        before = starts[: starts.index(start)]
        return replace(self._part(rank, start).call(), number=sum(one.group_name == start.group_name for one in before))

    def _group(self, rank: int, start: Start) -> Group:
        name = start.group_name
        if name not in self._lists:
            self._lists[name] = _lists(name, self._given)
        members = next((one for one in self._lists[name] if rank in one), None)
        if members is None or not set(members) <= self._flows.keys():
            values = f"group {name!r} of {members or self._lists[name]}"
            problem = f"rank {rank} calls in it at {line_of(start.node)}, and "
            problem += "is none of its ranks" if members is None else "not all of its ranks have a graph"
            raise errors.NotCheckable(_CALL, "graphs", values, problem, "Pass the graph of each rank of each group.")
        if start.group_size not in (None, len(members)):
            values = f"group_size={start.group_size} at {line_of(start.node)} on rank {rank}"
            problem = f"group {name} has {len(members)} ranks"
            raise errors.NotCheckable(_CALL, "group_size", values, problem, f"Let the pass write {len(members)}.")
        return self._groups.setdefault((name, members), Group(name, members))


def _splits_fit(calls: Sequence[Call]) -> bool:
    """Whether each rank expects as many rows as its peers send it, of calls in group order; sizes that are not known fit."""
    for there, receiver in enumerate(calls):
        room = receiver.output_splits
        for here, sender in enumerate(calls if room is not None else ()):
            sent = sender.input_splits
            if sent is not None and room is not None and sent[there : there + 1] != room[here : here + 1]:
                return False
    return True


def _with_lines(error: ProgramFault, nodes: Iterable[tuple[int, fx.Node]]) -> ProgramFault:
    """The error, with the lines of the graphs at the end of its message."""
    lines = merge_equal_lines((rank, line_of(node)) for rank, node in nodes)
    error.args = ("\n".join([str(error.args[0]), "Graphs:", *lines]),)
    return error
