"""A run that is recorded, and the files that are written of it when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localtensor.collectives.trace.chrome import write_chrome
from localtensor.collectives.trace.clock import Modelled, modelled_events, set_clock
from localtensor.collectives.trace.events import Recording
from localtensor.collectives.trace.output import check_file, write_file
from localtensor.collectives.trace.recorder import Recorder
from localtensor.errors import ThreadsOnly
from localtensor.layout.links import Links, Rates

DEFAULT_LINKS = Links()


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is made of a run: a trace in `trace`, a page in `html`, a summary if `summary`; `links` price the modelled clock."""

    trace: Path | None = None
    html: Path | None = None
    summary: bool = False
    links: Links = DEFAULT_LINKS
    planned: Callable[[str], str] | None = None  # from a redistribution as text to the plan for it

    @property
    def wanted(self) -> bool:
        """Whether anything is to be made, so that the run is recorded."""
        return self.trace is not None or self.html is not None or self.summary

    def check(self, call: str, on: str) -> None:
        """Raises `ThreadsOnly` for other runs than on rank threads, `CannotWrite` for a file."""
        for name, path in (("trace", self.trace), ("html", self.html)):
            if path is None:
                continue
            if on != "threads":
                raise ThreadsOnly(name, path, on)
            check_file(call, name, path)
        if self.summary and on != "threads":
            raise ThreadsOnly("summary", self.summary, on)


@contextmanager
def recorded(
    options: TraceOptions, ranks: int, call: str = "run", done: Callable[[Recording, Modelled], object] | None = None
) -> Iterator[Recorder]:
    """Records the run in the block.  At its end, also by an error, the files are written; `done` gets the recording.

    Raises `CannotWrite` where a disk is full.
    """
    recorder = Recorder(ranks, Rates(bytes=1 / options.links.memory.per_byte, launch=options.links.memory.latency))
    try:
        with recorder.hooked():
            yield recorder
    finally:
        recording = recorder.recording
        clock = set_clock(recording, options.links, ops=options.html is not None)
        if options.trace is not None:
            write_file(
                call, "trace", options.trace, lambda file: write_chrome(recording, file, modelled_events(recording))
            )
        if options.html is not None:
            from localtensor.runner.trace.page import page_of

            text = page_of(recording, clock, options.planned)
            write_file(call, "html", options.html, lambda file: file.write(text))
        if done is not None:
            done(recording, clock)
