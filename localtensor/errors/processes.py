"""Refusals of a pool of real processes."""

from collections.abc import Sequence

from localtensor.errors.base import LocalTensorError, refusal


class NoRanks(LocalTensorError):
    """A pool of processes with nobody in it."""

    def __init__(self, call: str, ranks: object) -> None:
        problem = "a group has at least one rank, and a whole number of them"
        super().__init__(refusal(call, "ranks", f"ranks={ranks!r}", problem, "Ask for 1 rank or more."))


class NoSuchBackend(LocalTensorError):
    """A communication backend that worker processes cannot use here."""

    def __init__(self, call: str, backend: object, problem: str, known: Sequence[str]) -> None:
        remedy = f"Choose one of {', '.join(known)}."
        super().__init__(refusal(call, "backend", f"backend={backend!r}", problem, remedy))


class NoTime(LocalTensorError):
    """A limit that ends a call before it begins, or never."""

    def __init__(self, call: str, argument: str, seconds: object) -> None:
        problem = "a limit is more than 0 seconds, and at most a day"
        super().__init__(refusal(call, argument, f"{argument}={seconds!r}", problem, "Give it 30, say."))


class WrongArguments(LocalTensorError):
    """Not one tuple of arguments for each rank."""

    def __init__(self, call: str, values: str, problem: str) -> None:
        remedy = "Give one tuple of arguments for each rank, in rank order."
        super().__init__(refusal(call, "args_per_rank", values, problem, remedy))


class NotImportable(LocalTensorError):
    """A function that another process cannot find by its name."""

    def __init__(self, call: str, fn: str, detail: str) -> None:
        problem = f"worker processes find a function by module and name, and this failed ({detail})"
        remedy = "Define it at the top level of a module that can be imported."
        super().__init__(refusal(call, "fn", fn, problem, remedy))


class NotSendable(LocalTensorError):
    """A value that cannot travel between the caller and a rank."""

    def __init__(self, call: str, argument: str, rank: int, kind: str, detail: str) -> None:
        problem = f"it cannot be pickled or read back ({detail})"
        remedy = "Send plain data and tensors, and make live objects inside the function."
        super().__init__(refusal(call, argument, f"a {kind} of rank {rank}", problem, remedy))


class PoolClosed(LocalTensorError):
    """A call on a pool whose processes were given up."""

    def __init__(self, call: str, ranks: int) -> None:
        problem = "this pool was closed"
        super().__init__(refusal(call, "pool", f"Pool({ranks})", problem, "Make a new Pool, or call before close()."))


class PoolDidNotStart(LocalTensorError):
    """Worker processes that ended, failed or hung before their first job."""

    def __init__(self, call: str, ranks: int, detail: str) -> None:
        problem = f"the worker processes did not come up ({detail})"
        remedy = "In a script, start it under `if __name__ == '__main__':`; else see what the workers printed."
        super().__init__(refusal(call, "pool", f"Pool({ranks})", problem, remedy))
