"""The blind pairs: each label is checked by splitting the inputs and joining the pieces by hand."""

import sys

import pytest

from tests.tools import warm

CHECK = """
from tests.tools.bench.blind_labels import labels
from tests.tools.bench.blind_pairs import PAIRS, score
assert len(PAIRS) >= 60
assert labels(PAIRS) == [], labels(PAIRS)
nothing = score({"findings": [], "ignored": [], "untested": {}})
assert nothing.startswith(f"wrong rules found: 0 of {len(PAIRS)}") and nothing.endswith("right rules accused: 0 of 91: none")
print("all is well")
"""


@pytest.mark.slow
def test_every_label_holds_by_hand():
    ran = warm.run([sys.executable, "-c", CHECK])
    assert ran.stdout == "all is well\n", ran.stderr
