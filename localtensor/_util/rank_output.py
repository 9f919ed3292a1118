"""Output of several ranks in one stream: whole lines only, each with its rank in front."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class RankLines:
    """A stream that ranks share."""

    def __init__(self, stream: TextIO, *, prefix: bool) -> None:
        self.stream, self.prefix = stream, prefix
        self.turn = threading.Lock()

    @contextmanager
    def of(self, rank: int) -> Iterator["Tagged"]:
        """Where this rank writes; a line that it has not ended is out when the block ends."""
        tagged = Tagged(self, f"[rank {rank}] " if self.prefix else "")
        try:
            yield tagged
        finally:
            tagged.end()


class Tagged:
    r"""What one rank writes.

    >>> import sys
    >>> with RankLines(sys.stdout, prefix=True).of(3) as lines:
    ...     lines.write("one ")
    ...     lines.write("line\ntwo")
    [rank 3] one line
    [rank 3] two
    """

    def __init__(self, shared: RankLines, tag: str) -> None:
        self._shared, self._tag, self._begun = shared, tag, ""

    def write(self, text: str) -> None:
        *whole, self._begun = (self._begun + text).split("\n")
        if whole:
            with self._shared.turn:
                self._shared.stream.write("".join(f"{self._tag}{line}\n" for line in whole))
                self._shared.stream.flush()

    def end(self) -> None:
        if self._begun:
            self.write("\n")
