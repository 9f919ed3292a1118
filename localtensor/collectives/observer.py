"""What a run on rank threads reports while it goes on, to what records it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from localtensor.collectives.rendezvous import Contribution, Ticket


class RunObserver:
    """What a run reports while it goes on, each by the rank itself; this one ignores it."""

    def around(self, rank: int) -> AbstractContextManager[object]:
        """Entered while this rank runs the program."""
        return nullcontext()

    def posted(self, part: Contribution) -> None:
        """The rank makes a call."""

    def met(self, parts: Sequence[Contribution]) -> None:
        """All parts of a collective or a message are there: the calling rank has brought the last one."""

    def waiting(self, ticket: Ticket) -> AbstractContextManager[object]:
        """Entered while the rank waits; it is not blocked if the ticket is done already."""
        return nullcontext()

    def ended(self, rank: int, error: BaseException | None) -> None:
        """The rank's program has returned, or raised."""
