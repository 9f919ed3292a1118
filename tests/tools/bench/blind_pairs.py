"""Custom ops in all forms, written without having read the judge: each with a right rule, and once more with a wrong one.

localtensor validate --rules tests.tools.bench.blind_pairs --json blind.json
python -m tests.tools.bench.blind_pairs blind.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.tools.bench.blind_flags import FLAG_PAIRS, OPTIONAL_PAIRS
from tests.tools.bench.blind_form import Pair
from tests.tools.bench.blind_mutations import MUTATION_PAIRS
from tests.tools.bench.blind_shapes import SHAPE_PAIRS
from tests.tools.bench.blind_values import VALUE_PAIRS

PAIRS: tuple[Pair, ...] = (*FLAG_PAIRS, *OPTIONAL_PAIRS, *VALUE_PAIRS, *SHAPE_PAIRS, *MUTATION_PAIRS)

for _pair in PAIRS:
    _pair.register()


def score(report: dict[str, object]) -> str:
    """How many wrong rules a report of `--json` found, how many right ones it accused, and the names of both mistakes."""
    findings = [f for f in report["findings"] if f["verdict"] in ("unsound", "refused")]  # type: ignore[attr-defined]
    found = {
        "finding": {f["op"] for f in findings},
        "ignored": set(report["ignored"]),  # type: ignore[call-overload]
        "untested": set(report["untested"]),  # type: ignore[call-overload]
    }
    missed = [pair.name for pair in PAIRS if str(pair.overload("wrong")) not in found[pair.expected]]
    accused = [pair.name for pair in PAIRS if str(pair.overload("right")) in found["finding"]]
    lines = [f"wrong rules found: {len(PAIRS) - len(missed)} of {len(PAIRS)}; missed: {', '.join(missed) or 'none'}"]
    return "\n".join([*lines, f"right rules accused: {len(accused)} of {len(PAIRS)}: {', '.join(accused) or 'none'}"])


if __name__ == "__main__":
    print(score(json.loads(Path(sys.argv[1]).read_text())))
