"""The findings of a sweep that are checked by hand, drawn by lot: one of each cause, and then of all until there are enough."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.tools.command_line import parser_of

EXAMPLES = """examples:
  localtensor causes sweep.jsonl --json causes.json
  python -m tests.tools.by_hand.draw causes.json             100 findings, or one of each cause where there are more causes
  python -m tests.tools.by_hand.draw causes.json --seed 7    others

A line is the name of a cause, a finding, and the check that is about it, or `-`.

Exit code 0 if each finding that was drawn has its check, 1 if not, 2 for a wrong option, 3 for a file that is no list of causes.
"""


def drawn(causes: Mapping[str, Sequence[str]], number: int, seed: int) -> list[tuple[str, str]]:
    """Causes and findings, one of each cause first, then of all that are left, until there are `number`."""
    rng = random.Random(seed)  # a lot that can be drawn again
    found = [(name, rng.choice(sorted(findings))) for name, findings in sorted(causes.items())]
    left = sorted({(name, one) for name, findings in causes.items() for one in findings} - set(found))
    return found + rng.sample(left, max(0, min(number - len(found), len(left))))


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    from tests.tools.by_hand.tables import CHECKS

    try:
        records = json.loads(asked.causes.read_text())["causes"]
        causes = {f"{record['name']} [{record['id']}]": record["findings"] for record in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"python -m tests.tools.by_hand.draw: {asked.causes} is no list of causes: {error}", file=sys.stderr)
        return 3
    checked = {check.finding: check.name for check in CHECKS.values()}
    found = drawn(causes, asked.number, asked.seed)
    for cause, finding in found:
        print(f"{cause} | {finding} | {checked.get(finding, '-')}")
    without = sum(finding not in checked for _, finding in found)
    print(f"{len(found)} findings of {len(causes)} causes, by the seed {asked.seed}; {without} have no check")
    return int(without > 0)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("by_hand.draw", EXAMPLES, __doc__)
    parser.add_argument("causes", type=Path, help="what `localtensor causes --json` wrote")
    parser.add_argument("--seed", type=int, default=24, help="of the lot (default 24)")
    parser.add_argument("--number", type=int, default=100, help="of findings (default 100)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
