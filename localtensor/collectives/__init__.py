"""What a collective is: reference arithmetic, argument checks, table of c10d ops, rendezvous."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.collectives.argument_checks import check_message as check_message
    from localtensor.collectives.argument_checks import check_offer as check_offer
    from localtensor.collectives.argument_checks import flat as flat
    from localtensor.collectives.c10d_registration import kernels_in_place as kernels_in_place
    from localtensor.collectives.c10d_registration import named_reduction as named_reduction
    from localtensor.collectives.c10d_registration import plain as plain
    from localtensor.collectives.c10d_registration import positions as positions
    from localtensor.collectives.c10d_table import SEND as SEND
    from localtensor.collectives.c10d_table import SERVED as SERVED
    from localtensor.collectives.c10d_table import Brought as Brought
    from localtensor.collectives.c10d_table import Served as Served
    from localtensor.collectives.compare import assert_same_on_all_ranks as assert_same_on_all_ranks
    from localtensor.collectives.compare import differences as differences
    from localtensor.collectives.compare import how_far as how_far
    from localtensor.collectives.compare import said as said
    from localtensor.collectives.compare import same_bits as same_bits
    from localtensor.collectives.mailbox import Mailbox as Mailbox
    from localtensor.collectives.rendezvous import Compute as Compute
    from localtensor.collectives.rendezvous import Group as Group
    from localtensor.collectives.rendezvous import Line as Line
    from localtensor.collectives.rendezvous import Meeting as Meeting
    from localtensor.collectives.rendezvous import Part as Part
    from localtensor.collectives.rendezvous import Ticket as Ticket
    from localtensor.collectives.rendezvous import key_of as key_of

__all__ = [
    "SEND",
    "SERVED",
    "Brought",
    "Compute",
    "Group",
    "Line",
    "Mailbox",
    "Meeting",
    "Part",
    "Served",
    "Ticket",
    "assert_same_on_all_ranks",
    "check_message",
    "check_offer",
    "differences",
    "flat",
    "how_far",
    "kernels_in_place",
    "key_of",
    "named_reduction",
    "plain",
    "positions",
    "said",
    "same_bits",
]

_ROOM = {
    "Brought": "localtensor.collectives.c10d_table",
    "Compute": "localtensor.collectives.rendezvous",
    "Group": "localtensor.collectives.rendezvous",
    "Line": "localtensor.collectives.rendezvous",
    "Mailbox": "localtensor.collectives.mailbox",
    "Meeting": "localtensor.collectives.rendezvous",
    "Part": "localtensor.collectives.rendezvous",
    "SEND": "localtensor.collectives.c10d_table",
    "SERVED": "localtensor.collectives.c10d_table",
    "Served": "localtensor.collectives.c10d_table",
    "Ticket": "localtensor.collectives.rendezvous",
    "assert_same_on_all_ranks": "localtensor.collectives.compare",
    "check_message": "localtensor.collectives.argument_checks",
    "check_offer": "localtensor.collectives.argument_checks",
    "differences": "localtensor.collectives.compare",
    "flat": "localtensor.collectives.argument_checks",
    "how_far": "localtensor.collectives.compare",
    "kernels_in_place": "localtensor.collectives.c10d_registration",
    "key_of": "localtensor.collectives.rendezvous",
    "named_reduction": "localtensor.collectives.c10d_registration",
    "plain": "localtensor.collectives.c10d_registration",
    "positions": "localtensor.collectives.c10d_registration",
    "said": "localtensor.collectives.compare",
    "same_bits": "localtensor.collectives.compare",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
