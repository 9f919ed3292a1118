"""One rank of a script: its code, read once, and run as `__main__` in a namespace of its own.

`main` is one real process of `localtensor run --on gloo`; rank threads call `execute` themselves.
"""

import importlib.util
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Script:
    """What a rank runs: a file, or a module that is found on sys.path."""

    code: CodeType
    file: str
    spec: Any = None  # a module's, as `python -m` has it


def read(name: str, *, module: bool) -> Script | None:
    """The script of that path or module name, compiled; None if there is no such thing."""
    if module:
        return _module(name)
    file = Path(name)
    if not os.path.isfile(file):  # Path's own raises where a name is too long
        return None
    return Script(compile(file.read_bytes(), str(file.absolute()), "exec", dont_inherit=True), str(file.absolute()))


def _module(name: str) -> Script | None:
    for full in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(full)
        except (ImportError, ValueError):  # a package above it is missing, or the name is none
            return None
        if spec is not None and spec.submodule_search_locations is None and spec.origin:
            code = getattr(spec.loader, "get_code", lambda _: None)(full)
            return Script(code, spec.origin, spec) if isinstance(code, CodeType) else None
    return None


def execute(script: Script) -> None:
    """The script has run in this thread, as the module `__main__`, which stays in sys.modules."""
    main = ModuleType("__main__")
    spec = script.spec
    vars(main).update(
        __file__=script.file, __builtins__=__builtins__, __spec__=spec,
        __package__=spec.parent if spec else None, __loader__=spec.loader if spec else None,
    )  # fmt: skip
    sys.modules["__main__"] = main
    exec(script.code, vars(main))  # noqa: S102  # running what the user names is the purpose


def search_path(script: str, *, module: bool) -> str:
    """What python would put first on sys.path."""
    return os.getcwd() if module else str(Path(script).absolute().parent)


def users_part(trace: TracebackType | None, ours: str) -> TracebackType | None:
    """The traceback from the first line on that is not in our own folder."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((ours, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _stay_with_parent(pipe: int) -> None:
    """The process ends when its parent does, however that ends."""
    os.set_inheritable(pipe, False)

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _seed(seed: int) -> None:
    """As rank threads begin."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def main(words: list[str]) -> None:
    """`pipe seed -m|-f script arguments...`"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends us; it has it blocked until here
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pipe, seed, how, name, *arguments = words
    _stay_with_parent(int(pipe))
    module = how == "-m"
    sys.path[0] = search_path(name, module=module)
    script = read(name, module=module)
    if script is None:  # it was there when the parent looked
        sys.exit(f"{name} has gone")
    sys.argv = [script.file if module else name, *arguments]
    _seed(int(seed))
    try:
        execute(script)
    except Exception as error:  # why: whatever the script raises is shown as python would show it
        error.__traceback__ = users_part(error.__traceback__, os.path.dirname(os.path.dirname(__file__)) + os.sep)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
