"""What `run` refuses, word for word."""

import functools
from dataclasses import dataclass

import pytest

from localtensor import errors
from localtensor._util.events import Call, Place, Wait, Waiting
from tests.localtensor.errors.test_runs_lockstep import CASES as LOCKSTEP

HERE, THERE = Place("project/a.py", 3, "f"), Place("project/a.py", 9, "g")
WAIT = Wait(0, (1,), Call(0, "all_reduce", "0", (0, 1), 4, place=THERE))


def step():
    """A function to run."""


@dataclass
class Case:
    error: errors.LocalTensorError
    message: str


CASES = {
    "fn": Case(errors.NotCallableWith(3, "an int cannot be called"),
        "run: fn: 3: an int cannot be called. Pass a function, and after it the arguments that it takes on one "
        "rank."),
    "arguments of fn": Case(errors.NotCallableWith(step, "missing a required argument: 'x'"),
        "run: fn: step: missing a required argument: 'x'. Pass a function, and after it the arguments that it "
        "takes on one rank."),
    "a callable without a name": Case(
        errors.NotCallableWith(functools.partial(divmod, "x" * 99), "too many positional arguments"),
        "run: fn: functools.partial(<built-in function divmod>, 'xxxxxxxxxx...: too many positional arguments. "
        "Pass a function, and after it the arguments that it takes on one rank."),
    "pieces": Case(errors.PiecesDiffer("args[0]", 3, 4),
        "run: args[0]: a list of 3 for 4 ranks: a list is dealt out, one piece for each rank. Make it 4 long, or "
        "pass a tuple to give it whole to every rank."),
    "pieces for one": Case(errors.PiecesDiffer("args[0]", 3, 1),
        "run: args[0]: a list of 3 for 1 rank: a list is dealt out, one piece for each rank. Make it 1 long, or "
        "pass a tuple to give it whole to every rank."),
    "copy": Case(errors.NotCopyable("args[0]", "generator", "TypeError: cannot pickle 'generator' object"),
        "run: args[0]: generator: each rank gets its own deep copy, and this one failed (TypeError: cannot "
        "pickle 'generator' object). Make it inside the function, or bind it there by a closure or "
        "functools.partial: then the ranks share it."),
    "nested": Case(errors.NestedRun(1, HERE),
        "run: fn: called by rank 1 at a.py:3 in f: the ranks of a run cannot start another. Call run where no "
        "run is going on, or make a process group inside this one with new_group."),
    "nested, nobody knows where": Case(errors.NestedRun(0),
        "run: fn: called by rank 0: the ranks of a run cannot start another. Call run where no run is going on, "
        "or make a process group inside this one with new_group."),
    "never ended": Case(errors.NeverEnded(30.0, HERE, 1, [WAIT], [1]),
        "run: timeout: timeout=30: the run has not ended in time; rank 1 was running at a.py:3 in f. Look for a "
        "loop without end there, or give timeout= more seconds.\n"
        "  rank 0 waits for rank 1 in all_reduce #4 in group 0 at a.py:9 in g\n"
        "  rank 1 could not be stopped: the thread goes on until the process ends"),
    "never ended, all waiting": Case(errors.NeverEnded(0.5, None, None, [WAIT]),
        "run: timeout: timeout=0.5: the run has not ended in time; no rank was running. Look for a loop without "
        "end there, or give timeout= more seconds.\n"
        "  rank 0 waits for rank 1 in all_reduce #4 in group 0 at a.py:9 in g"),
    "not served": Case(errors.NotServed("init_rpc", "there is no RPC"),
        "init_rpc: on: rank threads: this call is not served there (there is no RPC). Run the program on real "
        "processes, with on='gloo'."),
    "faults": Case(errors.BadFaults("kill", {3: 1}, "it has to give ranks below 3 the number of a call from 1 on"),
        "run: faults.kill: {3: 1}: it has to give ranks below 3 the number of a call from 1 on. Give it as "
        "localtensor.Faults documents it."),
    "lost peer": Case(errors.PeerLost(WAIT.call, 1, "the network is split"),
        "all_reduce #4 in group 0 at a.py:9 in g: peer: rank 1, needed by rank 0: Connection closed by peer (the network "
        "is split). Catch this RuntimeError, or start again from a checkpoint."),
    "thread": Case(errors.ForeignThread("all_reduce", "Thread-3"),
        "all_reduce: thread: called from Thread-3: a collective belongs to a rank, and this thread is none. Call "
        "it on the rank's own thread, or on one that the rank has started."),
    "forked": Case(errors.ForkedRank("a collective", 1),
        "a collective: process: a child that rank 1 forked: the other ranks are not in this process. Call it in the "
        "rank itself, and let the child return what it has computed."),
    "time limit": Case(errors.CollectiveTimeout(WAIT.call, 0.3, "Operation timed out!"),
        "all_reduce #4 in group 0 at a.py:9 in g: timeout: 300 ms on rank 0: it has passed (Operation timed out!). Let "
        "every rank that it needs make its call, or catch this RuntimeError."),
    "script": Case(errors.NoSuchScript("train.py"),
        "run: script: train.py: there is no such file. Give the path of a Python file that exists."),
    "module": Case(errors.NoSuchScript("a.b", "module"),
        "run: script: a.b: there is no such module. Give the dotted name of a module or package that can be imported "
        "and run from here."),
    "threads only": Case(errors.ThreadsOnly("schedule", "pct:7", "gloo"),
        "run: schedule: schedule=pct:7: it is for rank threads, and this is on='gloo'. Leave it out, or run on threads."),
    "processes at work": Case(
        errors.NeverEnded(2, None, None, busy=[Waiting(0, "a.py:1 in f: g()"), Waiting(2, "a.py:1 in f: g()")]),
        "run: timeout: timeout=2: the run has not ended in time; ranks 0, 2 were still at work. Look for a loop "
        "without end there, or give timeout= more seconds.\n  ranks 0, 2 were at a.py:1 in f: g()"),
    "exit codes": Case(errors.ScriptFailed({3: 1, 0: 0, 1: -9, 2: 1, 4: 1}),
        "run: script: rank 3 with exit code 1; then ranks 2, 4 with exit code 1; then rank 1 with exit code -9: these ranks ended with an error. "
        "See what it printed: the first rank to fail is the one to repair."),
    "one gpu": Case(errors.TooFewGpus(4, 1),
        "run: ranks: ranks=4: NCCL wants a GPU for each rank, and this machine has 1. Use on='gloo'."),
    "two gpus": Case(errors.TooFewGpus(4, 2),
        "run: ranks: ranks=4: NCCL wants a GPU for each rank, and this machine has 2. Ask for 2 ranks, or "
        "on='gloo'."),
    "no gpu": Case(errors.TooFewGpus(1, 0),
        "run: ranks: ranks=1: NCCL wants a GPU for each rank, and this machine has 0. Use on='gloo'."),
    "way": Case(errors.UnknownWay("mpi", ("threads", "gloo")),
        "run: on: on='mpi': there is no such way to run. Write 'threads', 'gloo'."),
    "a word of 60 characters, and no way": Case(errors.UnknownWay("x" * 58, ("raise", "warn"), "leftovers"),
        f"run: leftovers: leftovers='{'x' * 58}': there is no such choice. Write 'raise', 'warn'."),
    "a longer word": Case(errors.UnknownWay("x" * 59, ("threads",)),
        f"run: on: on='{'x' * 56}...: there is no such way to run. Write 'threads'."),
    "a schedule of 80 characters": Case(errors.BadSchedule("x" * 78, "it names no schedule"),
        f"run: schedule: '{'x' * 78}': it names no schedule. Write round_robin or shuffled:7, or copy the text after 'Replay:' in an error's message whole.",
    ),
    "a longer schedule": Case(errors.BadSchedule("x" * 79, "it names no schedule"),
        f"run: schedule: '{'x' * 76}...: it names no schedule. Write round_robin or shuffled:7, or copy the text after 'Replay:' in an error's message whole.",
    ),
    "schedule": Case(errors.BadSchedule("xyz", "it names no schedule"),
        "run: schedule: 'xyz': it names no schedule. Write round_robin or shuffled:7, or copy the text after 'Replay:' in an error's message whole."),
    "replay": Case(errors.ReplayDiverged("rank 1 was to run at step 4, and it had returned"),
        "run: schedule: a replay: rank 1 was to run at step 4, and it had returned. Replay the program, ranks "
        "and torch that wrote it, and seed what draws random numbers, reads clocks or walks over sets."),
    "group": Case(errors.BadGroup("new_group", "ranks", "[0, 9]", "there is no rank 9", "Name ranks from 0 to 3."),
        "new_group: ranks: [0, 9]: there is no rank 9. Name ranks from 0 to 3."),
    "torch": Case(errors.TorchChanged("distributed_c10d._world", "there is no such name"),
        "localtensor: torch: distributed_c10d._world: there is no such name. Use torch 2.13, with which this was "
        "tried, and report it with your version."),
    "no ranks": Case(errors.NoRanks("Pool", 0.5),
        "Pool: ranks: ranks=0.5: a group has at least one rank, and a whole number of them. Ask for 1 rank or more."),
    "too many ranks": Case(errors.NoRanks("Pool", 70_000),
        "Pool: ranks: ranks=70000: one machine has no room for so many. Ask for fewer."),
    "backend": Case(errors.NoSuchBackend("Pool", "mpi", "no such backend is known", "gloo, nccl"),
        "Pool: backend: backend='mpi': no such backend is known. Choose one of gloo, nccl."),
    "no time": Case(errors.NoTime("run", "timeout", "30"),
        "run: timeout: timeout='30': a limit is more than 0 seconds, and at most a day. Give it 30, say."),
    "arguments": Case(errors.WrongArguments("Pool.call", "1 tuple for 2 ranks", "each rank needs its own"),
        "Pool.call: args_per_rank: 1 tuple for 2 ranks: each rank needs its own. Give one tuple of arguments for "
        "each rank, in rank order."),
    "not importable": Case(errors.NotImportable("Pool.call", "main.f", "no such name"),
        "Pool.call: fn: main.f: worker processes find a function by module and name, and this failed (no such "
        "name). Define it at the top level of a module that can be imported."),
    "not sendable": Case(errors.NotSendable("Pool.call", "args_per_rank", "lock", 2, "TypeError: {no} pickle"),
        "Pool.call: args_per_rank: a lock of rank 2: it cannot be pickled or read back (TypeError: {no} pickle). "
        "Send plain data and tensors, and make live objects inside the function."),
    "closed": Case(errors.PoolClosed("Pool.call", 4),
        "Pool.call: pool: Pool(4): this pool was closed. Make a new Pool, or call before close()."),
    "not started": Case(errors.PoolDidNotStart("Pool", 4, "rank 1: it exited"),
        "Pool: pool: Pool(4): the worker processes did not come up (rank 1: it exited). In a script, start it under "
        "`if __name__ == '__main__':`; else see what the workers printed."),
    "program": Case(errors.BadProgram("None", "it is no Program with threads"),
        "explore: program: None: it is no Program with threads. Pass a function of a Sync that returns "
        "Program(threads=[...], check=...), with new objects each time."),
    "exploration": Case(errors.BadExploration("most", "0", "nothing can be tried", "Pass 1 or more."),
        "explore: most: 0: nothing can be tried. Pass 1 or more."),
    "waits alone": Case(errors.WaitsAlone("l"),
        "explore: program: l: it is waited for outside of the threads, and no thread can release it. Let the function "
        "that makes the program, and its check, take only what is free."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_word_for_word(name):
    assert str(CASES[name].error) == CASES[name].message


def test_every_refusal_has_its_words_tested():
    offered = [getattr(errors, name) for name in errors.__all__]
    public = {kind for kind in offered if kind.__module__ == "localtensor.errors.runs"}
    assert public == {type(case.error) for case in [*CASES.values(), *LOCKSTEP.values()]}


def test_a_run_that_never_ended_names_where_it_was_first():
    error = errors.NeverEnded(30, HERE, 1, [WAIT], (1, 2))
    assert error.places == (HERE, THERE) and error.ranks == (1, 0, 2)
    assert (error.seconds, error.rank, error.waits, error.left_behind) == (30, 1, (WAIT,), (1, 2))


def test_a_script_that_failed_keeps_all_exit_codes():
    assert errors.ScriptFailed({0: 0, 1: 1}).exit_codes == {0: 0, 1: 1}
