"""Faults on purpose: ranks that die or are late, messages that are lost, and a network that falls apart.

Each fault is a function of the program's own calls, so a run with faults repeats as any other does.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from localtensor.collectives.rendezvous import Contribution, Ticket
from localtensor.errors import BadFaults, PeerLost
from localtensor.threads.diagnosis import RankEnd
from localtensor.threads.run_token import Abort
from localtensor.threads.simulation import Simulation


@dataclass(frozen=True)
class Faults:
    """Faults of a run on rank threads.  A rank's calls are its collectives, sends and receives, counted from 1.

    kill       rank -> the call at which it dies, before anything of it is sent.  A list has one such dict for each start
               of the program.  Its peers get `PeerLost`, a RuntimeError, from each call that needs it, as on gloo.
    restart    how often the program is started again on all ranks once one has died, as torchrun does with
               `--max-restarts`: with fresh copies of the arguments, and TORCHELASTIC_RESTART_COUNT in the environment.
    delay      rank -> simulated seconds by which each of its calls is late.
    drop       (sender, receiver, number): the message with that number from 1 on, of those that this sender sends to this
               receiver, is lost: the send ends well, and the receive does not.
    split      parts of the ranks that no longer reach each other, once a rank makes its call number `split_at`.

    >>> Faults(kill={2: 5}, restart=True)
    Faults(kill={2: 5}, restart=True)
    """

    kill: Mapping[int, int] | Sequence[Mapping[int, int]] = field(default_factory=dict)
    restart: int = 0
    delay: Mapping[int, float] = field(default_factory=dict)
    drop: Collection[tuple[int, int, int]] = ()
    split: Sequence[Collection[int]] = ()
    split_at: int = 1

    def __repr__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return f"Faults({', '.join(f'{name}={value!r}' for name, value in given.items() if value != _DEFAULTS[name])})"

    def check(self, ranks: int) -> None:
        """Raises `BadFaults` unless these are faults of a run of so many ranks."""
        everyone = range(ranks)

        def require(right: bool, name: str, problem: str) -> None:
            if not right:
                raise BadFaults(name, getattr(self, name), problem)

        def known(rank: object) -> bool:
            return _whole(rank, 0) and rank in everyone

        problem = f"it has to give ranks below {ranks} the number of a call from 1 on"
        require(isinstance(self.kill, (Mapping, Sequence)), "kill", problem)
        for kill in self._kills():
            good = isinstance(kill, Mapping) and all(known(rank) and _whole(call, 1) for rank, call in kill.items())
            require(good, "kill", problem)
        good = isinstance(self.restart, bool) or _whole(self.restart, 0)
        require(good, "restart", "it has to be a number of restarts")
        good = isinstance(self.delay, Mapping) and all(known(rank) and _seconds(t) for rank, t in self.delay.items())
        require(good, "delay", f"it has to give ranks below {ranks} a number of seconds")
        good = all(len(one) == 3 and known(one[0]) and known(one[1]) and _whole(one[2], 1) for one in _lists(self.drop))
        require(good, "drop", f"it has to name a sender and a receiver below {ranks}, and a number from 1 on")
        flat = [rank for part in _lists(self.split) for rank in part]
        good = all(map(known, flat)) and len(set(flat)) == len(flat)
        require(good, "split", f"its parts have to be different ranks below {ranks}")
        require(_whole(self.split_at, 1), "split_at", "it has to be the number of a call from 1 on")

    def _kills(self) -> Sequence[Mapping[int, int]]:
        return [self.kill] if isinstance(self.kill, Mapping) else self.kill

    def killed_in(self, start: int) -> Mapping[int, int]:
        """What `kill` says of this start of the program, from 0 on."""
        kills = self._kills()
        return kills[start] if start < len(kills) else {}


_DEFAULTS: dict[str, object] = {"kill": {}, "restart": 0, "delay": {}, "drop": (), "split": (), "split_at": 1}


def faults_from_text(text: str) -> Faults:
    """The faults of a text: what an error's replay line says of them, or the arguments alone.  Raises `BadFaults`.

    >>> faults_from_text("kill={2: 5}, restart=True") == faults_from_text("faults=lt.Faults(kill={2: 5}, restart=True)")
    True
    """
    start = text.find("Faults(")
    call = text[start:] if start >= 0 else f"Faults({text})"
    try:
        node = ast.parse(call.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("no names of arguments")  # noqa: TRY301
        given = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    except (
        ValueError,
        SyntaxError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as problem:  # the last two: nested too deep
        raise BadFaults("", text, 'it has to be written like "kill={2: 5}, restart=1"') from problem
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise BadFaults(name, value, f"there is no such fault; there are {', '.join(_DEFAULTS)}")
    return Faults(**given)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _lists(value: object) -> list[list[Any]]:
    """A collection of collections as lists; a list with a None, which is no rank, for anything else."""
    right = isinstance(value, Collection) and not isinstance(value, (str, Mapping))
    return [list(one) if isinstance(one, Collection) else [None] for one in value] if right else [[None]]  # type: ignore[attr-defined]


class FaultMissed(UserWarning):
    """A fault that was asked for has not come about: the program made fewer calls than its number."""


class FaultsOfRun:
    """The faults of one start of a program, and what they have done so far."""

    def __init__(self, faults: Faults, start: int, simulation: Simulation) -> None:
        self.dead: dict[int, str] = {}  # rank -> the call at which it died
        self.over = False  # the program starts again
        self._faults, self._simulation = faults, simulation
        self._kill, self._restarts = faults.killed_in(start), start < int(faults.restart)
        self._part = {rank: index for index, part in enumerate(faults.split) for rank in part}
        self._apart = False
        self._calls = [0] * simulation.ranks
        self._sent: dict[tuple[int, int | None], int] = {}
        self._drop = {(sender, receiver, number) for sender, receiver, number in faults.drop}

    @property
    def happened(self) -> bool:
        """Whether what is left undone may be the work of a fault."""
        return self._apart or bool(self.dead) or bool(self._drop)

    def missed(self) -> list[str]:
        """What has not come about in a run that has ended: a test with it has not seen the fault."""
        alive = {rank: call for rank, call in self._kill.items() if rank not in self.dead}
        found = [f"kill: rank {rank} made {self._calls[rank]} calls, not {call}" for rank, call in alive.items()]
        late = [one for one in self._drop if one[2] > self._sent.get(one[:2], 0)]
        found += [
            f"drop: rank {a} sent {self._sent.get((a, b), 0)} messages to rank {b}, not {n}" for a, b, n in sorted(late)
        ]
        if self._part and not self._apart:
            found.append(f"split: no rank made {self._faults.split_at} calls")
        return found

    def begin(self, part: Contribution) -> None:
        """A rank is about to make this call: it may die of it, or be late."""
        rank = part.rank
        if rank in self.dead:
            raise Abort  # from a `finally` of the program
        self._calls[rank] += 1
        if self._calls[rank] == self._kill.get(rank):
            self._die(part)
        if self._part and self._calls[rank] == self._faults.split_at and not self._apart:
            self._apart = True
            self._wake_separated()
        late = self._faults.delay.get(rank, 0.0)
        if late:
            ticket = Ticket(part, lambda: (rank,), ready=lambda: False)
            self._simulation.block(ticket, late)

    def cuts_off(self, part: Contribution) -> bool:
        """Whether this call needs a rank that is out of reach."""
        return bool(self._lost(part, part.group.ranks if part.peer is None else (part.peer,)))

    def check(self, ticket: Ticket) -> None:
        """Raises `PeerLost` if this wait is for a rank that is out of reach."""
        lost = [] if ticket.done else self._lost(ticket.part, ticket.peers())
        if lost:
            why = f"it died in its {self.dead[lost[0]]}" if lost[0] in self.dead else "the network is split"
            raise PeerLost(ticket.part.call(), lost[0], why)

    def loses(self, part: Contribution) -> bool:
        """Whether this message is lost."""
        pair = (part.rank, part.peer)
        self._sent[pair] = self._sent.get(pair, 0) + 1
        return (*pair, self._sent[pair]) in self._drop

    def _lost(self, part: Contribution, peers: Sequence[int]) -> list[int]:
        """Those of the peers that are out of reach; of a receive from any rank only if all are."""
        lost = [peer for peer in peers if self._out_of_reach(part.rank, peer)]
        any_source = part.kind == "recv" and part.peer is None
        return [] if any_source and len(lost) < len([peer for peer in peers if peer != part.rank]) else lost

    def _out_of_reach(self, rank: int, peer: int) -> bool:
        return peer in self.dead or (self._apart and self._part.get(rank) != self._part.get(peer))

    def _die(self, part: Contribution) -> None:
        simulation, rank = self._simulation, part.rank
        place = f" at {part.place}" if part.place else ""
        self.dead[rank] = f"call {self._calls[rank]}, {part.kind}{place}"
        if self._restarts:
            self.over = simulation.run_token.aborting = True
            raise Abort
        simulation.end(rank, RankEnd())
        token = simulation.run_token
        for number in {rank, *token.helpers(rank)} - {token.here()}:
            simulation.end_thread(number)
        self._wake_separated()
        raise Abort

    def _wake_separated(self) -> None:
        """Wake the ranks that wait for one that is out of reach now."""
        self._simulation.interrupt_waits(lambda ticket: self._lost(ticket.part, ticket.peers()))
