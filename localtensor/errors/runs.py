"""Refusals of `run`, of a pool of real processes and of `explore`: bad input, unsupported calls, runs that do not end.

Those of lockstep mode come last: a branch on values that differ between ranks, and tensors from outside of the mode.
"""

import linecache
from collections.abc import Iterable, Mapping, Sequence

from localtensor._util.events import Call, Place, Wait, Waiting
from localtensor.errors import base


class NotCallableWith(base.Refusal):
    """The function for the ranks is not callable, or takes other arguments."""

    def __init__(self, fn: object, problem: str) -> None:
        name = getattr(fn, "__qualname__", None) or base.first_line(repr(fn), 60)
        remedy = "Pass a function, and after it the arguments that it takes on one rank."
        super().__init__("run", "fn", str(name), problem, remedy)


class PiecesDiffer(base.Refusal):
    """A list does not have one piece for each rank."""

    def __init__(self, argument: str, length: int, ranks: int) -> None:
        problem = "a list is dealt out, one piece for each rank"
        remedy = f"Make it {ranks} long, or pass a tuple to give it whole to every rank."
        values = f"a list of {length} for {ranks} rank{'s' if ranks != 1 else ''}"
        super().__init__("run", argument, values, problem, remedy)


class NotCopyable(base.Refusal):
    """An argument that cannot be copied for each rank."""

    def __init__(self, argument: str, kind: str, detail: str) -> None:
        problem = f"each rank gets its own deep copy, and this one failed ({base.first_line(detail)})"
        remedy = "bind it there by a closure or functools.partial: then the ranks share it."
        super().__init__("run", argument, kind, problem, f"Make it inside the function, or {remedy}")


class NestedRun(base.Refusal):
    """A rank starts another run."""

    def __init__(self, rank: int, place: Place | None = None) -> None:
        problem = "the ranks of a run cannot start another"
        remedy = "Call run where no run is going on, or make a process group inside this one with new_group."
        super().__init__("run", "fn", f"called by rank {rank}{base.place_suffix(place)}", problem, remedy)


class NeverEnded(base.ProgramFault):
    """A run past its time limit; `left_behind` are ranks whose threads could not be stopped, `busy` real processes."""

    def __init__(
        self,
        seconds: float,
        running: Place | None,
        rank: int | None,
        waits: Sequence[Wait] = (),
        left_behind: Sequence[int] = (),
        busy: Sequence[Waiting] = (),
    ) -> None:
        self.seconds, self.rank = seconds, rank
        self.waits, self.left_behind, self.busy = tuple(waits), tuple(left_behind), tuple(busy)
        at_work = f"rank {rank} was running{base.place_suffix(running)}" if rank is not None else "no rank was running"
        if busy:
            at_work = f"{base.rank_names(one.rank for one in busy)} {'was' if len(busy) == 1 else 'were'} still at work"
        sentence = base.refusal_sentence(
            "run",
            "timeout",
            f"timeout={seconds:g}",
            f"the run has not ended in time; {at_work}",
            "Look for a loop without end there, or give timeout= more seconds.",
        )
        lines = [*base.wait_lines(waits), *base.busy_lines(busy)]
        if left_behind:
            ranks_left = base.rank_names(left_behind)
            lines.append(f"  {ranks_left} could not be stopped: the thread goes on until the process ends")
        ranks = [] if rank is None else [rank]
        ranks += [*(wait.rank for wait in waits), *left_behind, *(one.rank for one in busy)]
        super().__init__(sentence, lines, [running, *(wait.call.place for wait in waits)], ranks)


class NotServed(base.Refusal):
    """A call of torch.distributed that rank threads do not support."""

    def __init__(self, call: str, detail: str, gloo_has_it: bool = True) -> None:
        problem = f"this call is not served there ({detail})"
        remedy = "Run the program on real processes, with on='gloo'."
        if not gloo_has_it:  # as far as is known
            remedy = f"Use another call, or {remedy[0].lower()}{remedy[1:-1]}, if gloo has this one."
        super().__init__(call, "on", "rank threads", problem, remedy)


class ForeignThread(base.Refusal, argument="thread", values="called from {thread}"):
    """A collective called from a thread that no rank has started."""

    PROBLEM = "a collective belongs to a rank, and this thread is none"
    REMEDY = "Call it on the rank's own thread, or on one that the rank has started."


class ForkedRank(base.Refusal, argument="process", values="a child that rank {rank} forked"):
    """A collective called in a process that a rank has forked: on gloo it waits for ever."""

    PROBLEM = "the other ranks are not in this process"
    REMEDY = "Call it in the rank itself, and let the child return what it has computed."


class BadFaults(base.Refusal, call="run"):
    """Faults that a run cannot have.  The argument, its value, and what it has to be."""

    def __init__(self, argument: str, value: object, problem: str) -> None:
        remedy = "Give it as localtensor.Faults documents it."
        name = f"faults.{base.first_line(argument, 60)}" if argument else "faults"
        super().__init__(name, base.first_line(repr(value), 60), problem, remedy)


class PeerLost(base.Refusal, RuntimeError):
    """A call that needs a rank which has died, or cannot be reached; a RuntimeError, as in torch."""

    def __init__(self, call: Call, peer: int, why: str) -> None:
        self.call, self.peer = call, peer
        problem = f"Connection closed by peer ({why})"
        remedy = "Catch this RuntimeError, or start again from a checkpoint."
        super().__init__(base.call_summary(call), "peer", f"rank {peer}, needed by rank {call.rank}", problem, remedy)


class CollectiveTimeout(base.Refusal, RuntimeError):
    """A wait whose time limit passed while no rank could run; a RuntimeError, as in torch.

    `diagnosis` is the error with which the run ends if the program does not catch this one.
    """

    def __init__(self, call: Call, seconds: float, words: str, diagnosis: base.LocalTensorError | None = None) -> None:
        self.call, self.seconds, self.diagnosis = call, seconds, diagnosis
        name = base.call_summary(call)
        remedy = "Let every rank that it needs make its call, or catch this RuntimeError."
        super().__init__(
            name, "timeout", f"{seconds * 1000:g} ms on rank {call.rank}", f"it has passed ({words})", remedy
        )


class NoSuchScript(base.Refusal):
    """A script that is not there."""

    def __init__(self, name: object, kind: str = "file") -> None:
        remedy = "Give the path of a Python file that exists."
        if kind == "module":
            remedy = "Give the dotted name of a module or package that can be imported and run from here."
        super().__init__("run", "script", str(name), f"there is no such {kind}", remedy)


class ThreadsOnly(base.Refusal):
    """An option that has a meaning on rank threads only."""

    def __init__(self, option: str, value: object, on: str) -> None:
        problem = f"it is for rank threads, and this is on={on!r}"
        remedy = "Leave it out, or run on threads."
        super().__init__("run", option, f"{option}={base.first_line(str(value), 60)}", problem, remedy)


class ScriptFailed(base.Refusal):
    """A script that ended with an error; `exit_codes` are by rank, in the order in which the ranks ended."""

    def __init__(self, exit_codes: Mapping[int, int]) -> None:
        self.exit_codes = dict(exit_codes)
        bad = {rank: code for rank, code in exit_codes.items() if code}
        first = next(iter(bad))
        groups = [[first]] + [[r for r in bad if bad[r] == code and r != first] for code in dict.fromkeys(bad.values())]
        phrases = [f"{base.rank_names(group)} with exit code {bad[group[0]]}" for group in groups if group]
        remedy = "See what it printed: the first rank to fail is the one to repair."
        super().__init__("run", "script", "; then ".join(phrases), "these ranks ended with an error", remedy)


class TooFewGpus(base.Refusal):
    """More ranks than this machine has GPUs, for a backend that wants one for each."""

    def __init__(self, ranks: int, gpus: int) -> None:
        problem = f"NCCL wants a GPU for each rank, and this machine has {gpus}"
        remedy = f"Ask for {gpus} ranks, or" if gpus > 1 else "Use"
        super().__init__("run", "ranks", f"ranks={ranks}", problem, f"{remedy} on='gloo'.")


class UnknownWay(base.Refusal):
    """An unknown choice of an argument: `on`, or what happens to groups that are left over."""

    def __init__(self, word: object, known: Sequence[object], argument: str = "on") -> None:
        remedy = f"Write {', '.join(map(repr, known))}."
        problem = "there is no such way to run" if argument == "on" else "there is no such choice"
        super().__init__("run", argument, f"{argument}={base.first_line(repr(word), 60)}", problem, remedy)


class BadSchedule(base.Refusal):
    """A schedule that cannot be read."""

    def __init__(self, text: str, problem: str) -> None:
        remedy = "Write round_robin or shuffled:7, or copy the text after 'Replay:' in an error's message whole."
        super().__init__("run", "schedule", base.first_line(repr(text), 80), problem, remedy)


class ReplayDiverged(base.Refusal, call="run", argument="schedule", values="a replay"):
    """A program that behaves differently than when the schedule was written."""

    REMEDY = (
        "Replay the program, ranks and torch that wrote it, and seed what draws random numbers, reads clocks or "
        "walks over sets."
    )


class BadGroup(base.Refusal):
    """A process group that a rank cannot have."""


class TorchChanged(base.Refusal, call="localtensor", argument="torch"):
    """A private part of torch that is missing or different in this version."""

    REMEDY = "Use torch 2.13, with which this was tried, and report it with your version."


class NoRanks(base.Refusal, argument="ranks", values="ranks={ranks!r}"):
    """A number of ranks that no group here has."""

    def __init__(self, call: str, ranks: object) -> None:
        problem, remedy = "a group has at least one rank, and a whole number of them", "Ask for 1 rank or more."
        if isinstance(ranks, int) and ranks > 1:
            problem, remedy = "one machine has no room for so many", "Ask for fewer."
        super().__init__(call, ranks, problem, remedy)


class NoSuchBackend(base.Refusal, argument="backend", values="backend={backend!r}"):
    """A communication backend that worker processes cannot use here."""

    REMEDY = "Choose one of {known}."


DAY, MOST_RANKS = 24 * 3600.0, 1 << 16  # seconds, ranks: no limit is longer, no group of threads or processes larger


class NoTime(base.Refusal, values="{argument}={seconds!r}"):
    """A limit that ends a call before it begins, or never."""

    PROBLEM = "a limit is more than 0 seconds, and at most a day"
    REMEDY = "Give it 30, say."


class WrongArguments(base.Refusal, argument="args_per_rank"):
    """Not one tuple of arguments for each rank."""

    REMEDY = "Give one tuple of arguments for each rank, in rank order."


class NotImportable(base.Refusal, argument="fn"):
    """A function that another process cannot find by its name."""

    PROBLEM = "worker processes find a function by module and name, and this failed ({detail})"
    REMEDY = "Define it at the top level of a module that can be imported."


class NotSendable(base.Refusal, values="a {kind} of rank {rank}"):
    """A value that cannot travel between the caller and a rank."""

    PROBLEM = "it cannot be pickled or read back ({detail})"
    REMEDY = "Send plain data and tensors, and make live objects inside the function."


class PoolClosed(base.Refusal, argument="pool", values="Pool({ranks})"):
    """A call on a pool whose processes were given up."""

    PROBLEM = "this pool was closed"
    REMEDY = "Make a new Pool, or call before close()."


class PoolDidNotStart(base.Refusal, argument="pool", values="Pool({ranks})"):
    """Worker processes that ended, failed or hung before their first job."""

    PROBLEM = "the worker processes did not come up ({detail})"
    REMEDY = "In a script, start it under `if __name__ == '__main__':`; else see what the workers printed."


class BadProgram(base.Refusal, call="explore", argument="program"):
    """The argument of `explore` is not a program of threads."""

    REMEDY = "Pass a function of a Sync that returns Program(threads=[...], check=...), with new objects each time."


class BadExploration(base.Refusal, call="explore"):
    """An invalid setting of `explore`."""


class WaitsAlone(base.Refusal, call="explore", argument="program"):
    """A wait for a lock or gate while no thread of the program runs, so that no thread can ever release it."""

    PROBLEM = "it is waited for outside of the threads, and no thread can release it"
    REMEDY = "Let the function that makes the program, and its check, take only what is free."


MOST_IN_SENTENCE = 4  # values; more of them have a line each
LONGEST_SOURCE = 100  # characters of the source line
OWN_FLOW = "Run the function by localtensor.run(fn, ranks=...), where each rank has a control flow of its own"
_WITHOUT_BRANCH = "by torch.where, or by torch.sym_max, sym_min or sym_ite for ints"


class RanksDiverge(base.Refusal, noted=True):
    """A value that must be the same on all ranks of one control flow differs; `values` holds it by rank.

    `what` is the condition in words, or empty; the user's line is quoted if its file can be read.
    """

    def __init__(self, call: str, what: str, values: Mapping[int, object], place: Place | None = None) -> None:
        self.values, self.place = dict(values), place
        facts = {rank: base.first_line(repr(value), 60) for rank, value in values.items()}
        kinds = base.minority_first(facts)
        many = len(kinds) > MOST_IN_SENTENCE
        source = _source(place)
        shown = f"{len(kinds)} values on {base.rank_names(facts)}" if many else base.facts_by_rank(facts)
        problem = f"all ranks share one control flow, and it needs one value{base.place_suffix(place)}"
        problem += f", `{source}`" if source else ""
        remedy = f"{OWN_FLOW}, or choose without a branch: {_WITHOUT_BRANCH}."
        lines = base.merge_equal_lines(facts.items()) if many else []
        super().__init__(call, what or "value", shown, problem, "\n".join([remedy, *lines]))


class OutsideWrite(base.Refusal, noted=True):
    """An op writes values that differ by rank into a tensor that all ranks share; `shown` is its short form."""

    def __init__(self, op: str, place: Place | None, shown: str) -> None:
        self.place = place
        problem = "it was made outside the mode and is one tensor for all ranks, whose values for it differ"
        remedy = "Make it inside the mode, or write to a clone of it that is made there."
        super().__init__(op, "the tensor written", f"{shown}{base.place_suffix(place)}", problem, remedy)


class AnotherMode(base.Refusal):
    """A tensor of one LocalTensorMode is used in another."""

    def __init__(self, op: str, place: Place | None = None) -> None:
        self.place = place
        problem = "it belongs to another LocalTensorMode, and each mode has ranks of its own"
        remedy = "Make it in the mode in which it is used."
        super().__init__(op, "an input", f"used{base.place_suffix(place) or ' here'}", problem, remedy)


class NoMode(base.Refusal):
    """A function that needs a LocalTensorMode is called outside of any."""

    def __init__(self, call: str, place: Place | None = None) -> None:
        self.place = place
        problem = "no LocalTensorMode is entered in this thread, so there are no ranks"
        remedy = "Call it inside `with LocalTensorMode(ranks):`."
        super().__init__(call, "mode", f"called{base.place_suffix(place) or ' here'}", problem, remedy)


class NotHeld(base.Refusal, noted=True):
    """A value is requested of ranks that hold none."""

    def __init__(self, call: str, ranks_missing: Iterable[int], ranks_held: Iterable[int]) -> None:
        missing, held = sorted(ranks_missing), sorted(ranks_held)
        problem = f"no value is held there, {f'only on {base.rank_names(held)}' if held else 'nor anywhere else'}"
        remedy = "Name only ranks that hold one, or make the value on all ranks that are to have it."
        super().__init__(call, "ranks", base.rank_names(missing), problem, remedy)


class NotInLockstep(base.Refusal, noted=True, call="LocalTensorMode", argument="ranks in lockstep"):
    """Something that one control flow for all ranks cannot do; `why` is a clause."""

    REMEDY = f"{OWN_FLOW}."


class NotTraceable(base.Refusal, noted=True):
    """A graph is recorded or compiled of what it cannot hold for all ranks; `seen` is the value, `problem` and `remedy` are clauses."""

    def __init__(self, call: str, seen: str, problem: str, remedy: str, place: Place | None = None) -> None:
        self.place = place
        super().__init__(call, "a graph for all ranks", f"{seen}{base.place_suffix(place)}", problem, remedy)


class ValuesDiffer(base.Refusal, noted=True, values="{mine} on rank {rank}, {theirs} on rank {other}"):
    """The tensors of two ranks that are offered for one LocalTensor differ in `argument`: dtype, device and the like."""

    PROBLEM = "one LocalTensor has one dtype, device, layout and number of dims for all ranks"
    REMEDY = "Give all ranks the same {argument} first."


class NotATensor(base.Refusal, argument="value", values="a {kind} on rank {rank}"):
    """A rank's value for a LocalTensor is no tensor."""

    PROBLEM = "each rank's value of a LocalTensor is a tensor"
    REMEDY = "Give a torch.Tensor for each rank."


class ModeBusy(
    base.Refusal, call="LocalTensorMode", argument="simulation", values="a second one while the first is at work"
):
    """Two simulations at once; `problem` is a clause that says which."""

    REMEDY = "Let the first end before the second."


def _source(place: Place | None) -> str:
    """The source line at a place; empty if the file cannot be read."""
    return "" if place is None else base.first_line(linecache.getline(place.file, place.line), LONGEST_SOURCE)
