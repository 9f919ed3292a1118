"""Our own sharding rules: the book of them all; one folder for each family of ops."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.ops.all_rules import CALL as CALL
    from strategies.ops.all_rules import FAMILIES as FAMILIES
    from strategies.ops.all_rules import OUR_RULES as OUR_RULES
    from strategies.ops.all_rules import TwoRules as TwoRules
    from strategies.ops.all_rules import collected as collected
    from strategies.ops.lib.elementwise import elementwise as elementwise
    from strategies.ops.lib.overload_variants import with_variants as with_variants
    from strategies.ops.semantics.errors import BadCall as BadCall
    from strategies.ops.semantics.errors import BadRule as BadRule
    from strategies.ops.semantics.errors import NoMetadata as NoMetadata
    from strategies.ops.semantics.errors import NoRule as NoRule
    from strategies.ops.semantics.errors import WouldMoveWritten as WouldMoveWritten
    from strategies.ops.semantics.local_call import Key as Key
    from strategies.ops.semantics.local_call import Piece as Piece
    from strategies.ops.semantics.local_call import local_meta as local_meta
    from strategies.ops.semantics.local_call import nothing_own as nothing_own
    from strategies.ops.semantics.local_call import pieces as pieces
    from strategies.ops.semantics.local_call import pieces_by_rank as pieces_by_rank
    from strategies.ops.semantics.local_call import places as places
    from strategies.ops.semantics.local_call import unfit as unfit
    from strategies.ops.semantics.local_call import with_arguments as with_arguments
    from strategies.ops.semantics.local_call import written_leaves as written_leaves
    from strategies.ops.semantics.rule_checks import all_replicated as all_replicated
    from strategies.ops.semantics.rule_checks import check_book as check_book
    from strategies.ops.semantics.rule_checks import checked_own as checked_own
    from strategies.ops.semantics.rule_checks import fault_of as fault_of
    from strategies.ops.semantics.rule_checks import made_instead as made_instead
    from strategies.ops.semantics.rule_checks import offer_of as offer_of
    from strategies.ops.semantics.rule_checks import own_of as own_of
    from strategies.ops.semantics.rulebook import Ask as Ask
    from strategies.ops.semantics.rulebook import Book as Book
    from strategies.ops.semantics.rulebook import Entry as Entry
    from strategies.ops.semantics.rulebook import Line as Line
    from strategies.ops.semantics.rulebook import Meta as Meta
    from strategies.ops.semantics.rulebook import OwnArguments as OwnArguments
    from strategies.ops.semantics.rulebook import Placements as Placements
    from strategies.ops.semantics.rulebook import ask_of as ask_of
    from strategies.ops.semantics.rulebook import bound as bound
    from strategies.ops.semantics.rulebook import exists as exists
    from strategies.ops.semantics.rulebook import rules as rules
    from strategies.ops.shape.reshape import groups as groups
    from strategies.ops.shape.reshape import reshaped as reshaped
    from strategies.ops.validation.coverage import Compared as Compared
    from strategies.ops.validation.coverage import coverage as coverage
    from strategies.ops.validation.most_used import most_used as most_used
    from strategies.ops.validation.run import Heard as Heard
    from strategies.ops.validation.run import Terms as Terms
    from strategies.ops.validation.run import trials as trials
    from strategies.ops.validation.samples import calls as calls

__all__ = [
    "CALL",
    "FAMILIES",
    "OUR_RULES",
    "Ask",
    "BadCall",
    "BadRule",
    "Book",
    "Compared",
    "Entry",
    "Heard",
    "Key",
    "Line",
    "Meta",
    "NoMetadata",
    "NoRule",
    "OwnArguments",
    "Piece",
    "Placements",
    "Terms",
    "TwoRules",
    "WouldMoveWritten",
    "all_replicated",
    "ask_of",
    "bound",
    "calls",
    "check_book",
    "checked_own",
    "collected",
    "coverage",
    "elementwise",
    "exists",
    "fault_of",
    "groups",
    "local_meta",
    "made_instead",
    "most_used",
    "nothing_own",
    "offer_of",
    "own_of",
    "pieces",
    "pieces_by_rank",
    "places",
    "reshaped",
    "rules",
    "trials",
    "unfit",
    "with_arguments",
    "with_variants",
    "written_leaves",
]

_ROOM = {
    "Ask": "strategies.ops.semantics.rulebook",
    "BadCall": "strategies.ops.semantics.errors",
    "BadRule": "strategies.ops.semantics.errors",
    "Book": "strategies.ops.semantics.rulebook",
    "CALL": "strategies.ops.all_rules",
    "Compared": "strategies.ops.validation.coverage",
    "Entry": "strategies.ops.semantics.rulebook",
    "FAMILIES": "strategies.ops.all_rules",
    "Heard": "strategies.ops.validation.run",
    "Key": "strategies.ops.semantics.local_call",
    "Line": "strategies.ops.semantics.rulebook",
    "Meta": "strategies.ops.semantics.rulebook",
    "NoMetadata": "strategies.ops.semantics.errors",
    "NoRule": "strategies.ops.semantics.errors",
    "OUR_RULES": "strategies.ops.all_rules",
    "OwnArguments": "strategies.ops.semantics.rulebook",
    "Piece": "strategies.ops.semantics.local_call",
    "Placements": "strategies.ops.semantics.rulebook",
    "Terms": "strategies.ops.validation.run",
    "TwoRules": "strategies.ops.all_rules",
    "WouldMoveWritten": "strategies.ops.semantics.errors",
    "all_replicated": "strategies.ops.semantics.rule_checks",
    "ask_of": "strategies.ops.semantics.rulebook",
    "bound": "strategies.ops.semantics.rulebook",
    "calls": "strategies.ops.validation.samples",
    "check_book": "strategies.ops.semantics.rule_checks",
    "checked_own": "strategies.ops.semantics.rule_checks",
    "collected": "strategies.ops.all_rules",
    "coverage": "strategies.ops.validation.coverage",
    "elementwise": "strategies.ops.lib.elementwise",
    "exists": "strategies.ops.semantics.rulebook",
    "fault_of": "strategies.ops.semantics.rule_checks",
    "groups": "strategies.ops.shape.reshape",
    "local_meta": "strategies.ops.semantics.local_call",
    "made_instead": "strategies.ops.semantics.rule_checks",
    "most_used": "strategies.ops.validation.most_used",
    "nothing_own": "strategies.ops.semantics.local_call",
    "offer_of": "strategies.ops.semantics.rule_checks",
    "own_of": "strategies.ops.semantics.rule_checks",
    "pieces": "strategies.ops.semantics.local_call",
    "pieces_by_rank": "strategies.ops.semantics.local_call",
    "places": "strategies.ops.semantics.local_call",
    "reshaped": "strategies.ops.shape.reshape",
    "rules": "strategies.ops.semantics.rulebook",
    "trials": "strategies.ops.validation.run",
    "unfit": "strategies.ops.semantics.local_call",
    "with_arguments": "strategies.ops.semantics.local_call",
    "with_variants": "strategies.ops.lib.overload_variants",
    "written_leaves": "strategies.ops.semantics.local_call",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
