"""DTensor's registry as a source: torch's rules, our own that are laid over them, and those that a user's module registers."""

from __future__ import annotations

from strategies.model.oracle import OracleResult
from strategies.model.rule import Claim, Sample
from strategies.torch_api import dtensor
from strategies.validation.claim_sources import claims

PARTIALS = 4
"""Samples of one decomposition that are also traced with partial inputs: each kind is a trace of its own."""


class DTensorSource:
    """The claims of DTensor, rule by rule as its propagator applies them."""

    name, title, varied = "dtensor", "DTensor", True

    def about(self, sample: Sample, truth: OracleResult, number: int) -> DTensorClaims:
        return DTensorClaims(sample, truth, number)


class DTensorClaims:
    """DTensor's claims about one sample.  One query on one rank serves the calls for all mesh sizes."""

    def __init__(self, sample: Sample, truth: OracleResult, number: int) -> None:
        self.sample, self.raw = sample, truth.raw
        self.query = dtensor.PropagatorQuery(sample, 1, truth.raw)
        self.query.partials = number < PARTIALS
        self.failures = ()

    @property
    def drawn(self) -> tuple[int, int] | None:
        return self.query.drawn or None

    def claims(self, ranks: int) -> list[Claim]:
        return claims(self.sample, ranks, self.raw, self.query)
