"""One rule on one call: claims, probe, suspects, verdict."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.validation.candidate import Suspect as Suspect
    from strategies.validation.candidate import case_of as case_of
    from strategies.validation.claim_sources import TooMany as TooMany
    from strategies.validation.claim_sources import claims as claims
    from strategies.validation.discovery.codegen import NotEmitted as NotEmitted
    from strategies.validation.discovery.codegen import emit as emit
    from strategies.validation.discovery.discover import CALL as CALL
    from strategies.validation.discovery.discover import Discovery as Discovery
    from strategies.validation.discovery.discover import discover as discover
    from strategies.validation.discovery.discover import overloads as overloads
    from strategies.validation.discovery.discover import samples_of as samples_of
    from strategies.validation.discovery.rule_inference import in_words as in_words
    from strategies.validation.discovery.rule_inference import lines as lines
    from strategies.validation.finding import Settled as Settled
    from strategies.validation.finding import of_suspect as of_suspect
    from strategies.validation.overload import CHARGES as CHARGES
    from strategies.validation.overload import Bench as Bench
    from strategies.validation.overload import Note as Note
    from strategies.validation.overload import Turns as Turns
    from strategies.validation.overload import alone as alone
    from strategies.validation.probe import Case as Case
    from strategies.validation.probe import Probe as Probe
    from strategies.validation.probe import coarsest as coarsest
    from strategies.validation.probe import rounding as rounding
    from strategies.validation.probe import try_claims as try_claims
    from strategies.validation.task import Docket as Docket
    from strategies.validation.task import Hearing as Hearing
    from strategies.validation.task import keep as keep

__all__ = [
    "CALL",
    "CHARGES",
    "Bench",
    "Case",
    "Discovery",
    "Docket",
    "Hearing",
    "NotEmitted",
    "Note",
    "Probe",
    "Settled",
    "Suspect",
    "TooMany",
    "Turns",
    "alone",
    "case_of",
    "claims",
    "coarsest",
    "discover",
    "emit",
    "in_words",
    "keep",
    "lines",
    "of_suspect",
    "overloads",
    "rounding",
    "samples_of",
    "try_claims",
]

_ROOM = {
    "Bench": "strategies.validation.overload",
    "CALL": "strategies.validation.discovery.discover",
    "CHARGES": "strategies.validation.overload",
    "Case": "strategies.validation.probe",
    "Discovery": "strategies.validation.discovery.discover",
    "Docket": "strategies.validation.task",
    "Hearing": "strategies.validation.task",
    "NotEmitted": "strategies.validation.discovery.codegen",
    "Note": "strategies.validation.overload",
    "Probe": "strategies.validation.probe",
    "Settled": "strategies.validation.finding",
    "Suspect": "strategies.validation.candidate",
    "TooMany": "strategies.validation.claim_sources",
    "Turns": "strategies.validation.overload",
    "alone": "strategies.validation.overload",
    "case_of": "strategies.validation.candidate",
    "claims": "strategies.validation.claim_sources",
    "coarsest": "strategies.validation.probe",
    "discover": "strategies.validation.discovery.discover",
    "emit": "strategies.validation.discovery.codegen",
    "in_words": "strategies.validation.discovery.rule_inference",
    "keep": "strategies.validation.task",
    "lines": "strategies.validation.discovery.rule_inference",
    "of_suspect": "strategies.validation.finding",
    "overloads": "strategies.validation.discovery.discover",
    "rounding": "strategies.validation.probe",
    "samples_of": "strategies.validation.discovery.discover",
    "try_claims": "strategies.validation.probe",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
