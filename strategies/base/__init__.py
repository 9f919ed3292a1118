"""Files, journal, worker pool, signals, terminal, git.  Knows nothing of sharding."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.base.atomic_files import read_bytes as read_bytes
    from strategies.base.atomic_files import unwritable as unwritable
    from strategies.base.atomic_files import write_lines as write_lines
    from strategies.base.atomic_files import write_whole as write_whole
    from strategies.base.exits import CLEAN as CLEAN
    from strategies.base.exits import INTERRUPTED as INTERRUPTED
    from strategies.base.exits import NOTHING as NOTHING
    from strategies.base.exits import SHORT as SHORT
    from strategies.base.exits import USAGE as USAGE
    from strategies.base.exits import WRONG as WRONG
    from strategies.base.exits import complain as complain
    from strategies.base.exits import leave as leave
    from strategies.base.exits import many as many
    from strategies.base.exits import open_streams as open_streams
    from strategies.base.exits import printed as printed
    from strategies.base.exits import wrote as wrote
    from strategies.base.git import BadRevision as BadRevision
    from strategies.base.git import NoGit as NoGit
    from strategies.base.git import NoRepository as NoRepository
    from strategies.base.git import Repository as Repository
    from strategies.base.git import blob_name as blob_name
    from strategies.base.git import repository as repository
    from strategies.base.journal import STRANGE as STRANGE
    from strategies.base.journal import BadJournal as BadJournal
    from strategies.base.journal import DiskFull as DiskFull
    from strategies.base.journal import Journal as Journal
    from strategies.base.journal import Line as Line
    from strategies.base.journal import Read as Read
    from strategies.base.journal import of_kind as of_kind
    from strategies.base.journal import open_journal as open_journal
    from strategies.base.journal import read as read
    from strategies.base.journal import strange as strange
    from strategies.base.journal import unlike as unlike
    from strategies.base.progress import Bar as Bar
    from strategies.base.progress import Progress as Progress
    from strategies.base.progress import Silent as Silent
    from strategies.base.progress import bar as bar
    from strategies.base.signals import LEFT as LEFT
    from strategies.base.signals import gently as gently
    from strategies.base.signals import held as held
    from strategies.base.signals import say as say
    from strategies.base.signals import watch as watch
    from strategies.base.subprocess_worker import serve as serve
    from strategies.base.uninterrupted import quiet as quiet
    from strategies.base.uninterrupted import undisturbed as undisturbed
    from strategies.base.worker_pool import LATE as LATE
    from strategies.base.worker_pool import Answer as Answer
    from strategies.base.worker_pool import Crew as Crew
    from strategies.base.worker_pool import Done as Done
    from strategies.base.worker_pool import Failed as Failed
    from strategies.base.worker_pool import Lost as Lost
    from strategies.base.worker_pool import Work as Work

__all__ = [
    "CLEAN",
    "INTERRUPTED",
    "LATE",
    "LEFT",
    "NOTHING",
    "SHORT",
    "STRANGE",
    "USAGE",
    "WRONG",
    "Answer",
    "BadJournal",
    "BadRevision",
    "Bar",
    "Crew",
    "DiskFull",
    "Done",
    "Failed",
    "Journal",
    "Line",
    "Lost",
    "NoGit",
    "NoRepository",
    "Progress",
    "Read",
    "Repository",
    "Silent",
    "Work",
    "bar",
    "blob_name",
    "complain",
    "gently",
    "held",
    "leave",
    "many",
    "of_kind",
    "open_journal",
    "open_streams",
    "printed",
    "quiet",
    "read",
    "read_bytes",
    "repository",
    "say",
    "serve",
    "strange",
    "undisturbed",
    "unlike",
    "unwritable",
    "watch",
    "write_lines",
    "write_whole",
    "wrote",
]

_ROOM = {
    "Answer": "strategies.base.worker_pool",
    "BadJournal": "strategies.base.journal",
    "BadRevision": "strategies.base.git",
    "Bar": "strategies.base.progress",
    "CLEAN": "strategies.base.exits",
    "Crew": "strategies.base.worker_pool",
    "DiskFull": "strategies.base.journal",
    "Done": "strategies.base.worker_pool",
    "Failed": "strategies.base.worker_pool",
    "INTERRUPTED": "strategies.base.exits",
    "Journal": "strategies.base.journal",
    "LATE": "strategies.base.worker_pool",
    "LEFT": "strategies.base.signals",
    "Line": "strategies.base.journal",
    "Lost": "strategies.base.worker_pool",
    "NOTHING": "strategies.base.exits",
    "NoGit": "strategies.base.git",
    "NoRepository": "strategies.base.git",
    "Progress": "strategies.base.progress",
    "Read": "strategies.base.journal",
    "Repository": "strategies.base.git",
    "SHORT": "strategies.base.exits",
    "STRANGE": "strategies.base.journal",
    "Silent": "strategies.base.progress",
    "USAGE": "strategies.base.exits",
    "WRONG": "strategies.base.exits",
    "Work": "strategies.base.worker_pool",
    "bar": "strategies.base.progress",
    "blob_name": "strategies.base.git",
    "complain": "strategies.base.exits",
    "gently": "strategies.base.signals",
    "held": "strategies.base.signals",
    "leave": "strategies.base.exits",
    "many": "strategies.base.exits",
    "of_kind": "strategies.base.journal",
    "open_journal": "strategies.base.journal",
    "open_streams": "strategies.base.exits",
    "printed": "strategies.base.exits",
    "quiet": "strategies.base.uninterrupted",
    "read": "strategies.base.journal",
    "read_bytes": "strategies.base.atomic_files",
    "repository": "strategies.base.git",
    "say": "strategies.base.signals",
    "serve": "strategies.base.subprocess_worker",
    "strange": "strategies.base.journal",
    "undisturbed": "strategies.base.uninterrupted",
    "unlike": "strategies.base.journal",
    "unwritable": "strategies.base.atomic_files",
    "watch": "strategies.base.signals",
    "write_lines": "strategies.base.atomic_files",
    "write_whole": "strategies.base.atomic_files",
    "wrote": "strategies.base.exits",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
