"""What keeps a program from being explored: it is none, it waits outside of a run, or its schedule is unreadable."""

from localtensor.errors.base import LocalTensorError, refusal


class BadProgram(LocalTensorError):
    """What was handed to `explore` is no program of threads."""

    def __init__(self, values: str, problem: str) -> None:
        remedy = "Pass a function of a Sync that returns Program(threads=[...], check=...), with new objects each time."
        super().__init__(refusal("explore", "program", values, problem, remedy))


class BadExploration(LocalTensorError):
    """A setting of `explore` that nothing can be done with."""

    def __init__(self, argument: str, values: str, problem: str, remedy: str) -> None:
        super().__init__(refusal("explore", argument, values, problem, remedy))


class WaitsAlone(LocalTensorError):
    """A lock or a gate that is waited for while no thread of the program runs, so that nobody will ever come."""

    def __init__(self, name: str) -> None:
        problem = "it is waited for outside of the threads, and nobody would ever come"
        remedy = "Let the function that makes the program, and its check, take only what is free."
        super().__init__(refusal("explore", "program", name, problem, remedy))
