"""What every output of the gate says of a finding, in the same words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from strategies.gate.baseline import ANY
from strategies.gate.model import Entry, GateResult, Judged, Key
from strategies.sweep.report.text_and_json import call_text

BASELINE = "localtensor-baseline.json"
"""Where a reader is sent for what stands in no other file."""


def happens(judged: Judged) -> str:
    """What happens, on how many ranks, and what has shown it."""
    found = judged.finding
    if found.ranks < 2:  # a registration that torch never asks: no run shows it
        return found.reason
    seen = f"; seen on real {found.confirmed_on} processes" if found.confirmed_on else ""
    return f"on {found.ranks} ranks, {call_text(found)}: {found.reason}{seen}"


def where(keys: Sequence[Key]) -> str:
    """For which classes of dtypes and kinds of mesh, in the order given.

    >>> where([Key("my.op.default", "R -> R", "real", "1 axis"), Key("my.op.default", "ignored", "any", "any")])
    'real on 1 axis, any dtypes on any mesh'
    """
    told = ((f"any {what}" if value == ANY else value for what, value in _kinds(key)) for key in keys)
    return ", ".join(" on ".join(words) for words in told)


def _kinds(key: Key) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("dtypes", key.dtypes), ("mesh", key.mesh)


def stale(entry: Entry) -> str:
    """What a person has to do with an entry of the baseline that no longer shows."""
    return f"{entry.key} no longer shows: remove it from the baseline (localtensor gate --update)"


def accepted(result: GateResult) -> tuple[tuple[Key, str], ...]:
    """Each key that somebody has accepted, and why, in order."""
    found = {entry.key: entry.reason for judged in result.findings for entry in judged.accepted}
    return tuple(sorted(found.items()))


def fingerprint(key: Key) -> str:
    """A name for a key that is the same on every machine, whatever line of a file it stands at."""
    return hashlib.sha256(f"{key.op}\n{key.rule}\n{key.dtypes}\n{key.mesh}".encode(errors="surrogatepass")).hexdigest()[
        :32
    ]
