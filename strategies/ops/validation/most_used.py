"""The overloads that programs use most, most used first: a list that is made by running programs, and kept as data.

`tests/bench/most_used.py` makes it and says how; the file says with which torch.
"""

from __future__ import annotations

from pathlib import Path

from strategies.ops.semantics.rulebook import exists

MOST = 300
"""How many there are."""
HOME = Path(__file__).parents[2] / "ops" / "most_used.txt"


def most_used() -> list[str]:
    """Their names, but for those that this torch does not have."""
    lines = [line for line in HOME.read_text().splitlines() if line and not line.startswith("#")]
    return [op for op in (line.split()[0] for line in lines) if exists(op)]
