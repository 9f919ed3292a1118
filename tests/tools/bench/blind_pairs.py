"""Custom ops in all forms, written without having read the judge: each with a right rule, and once more with a wrong one.

localtensor validate --rules tests.tools.bench.blind_pairs
python -m tests.tools.bench --only blind
"""

from __future__ import annotations

from tests.tools.bench.blind_flags import FLAG_PAIRS, OPTIONAL_PAIRS
from tests.tools.bench.blind_form import Pair
from tests.tools.bench.blind_mutations import MUTATION_PAIRS
from tests.tools.bench.blind_shapes import SHAPE_PAIRS
from tests.tools.bench.blind_values import VALUE_PAIRS

PAIRS: tuple[Pair, ...] = (*FLAG_PAIRS, *OPTIONAL_PAIRS, *VALUE_PAIRS, *SHAPE_PAIRS, *MUTATION_PAIRS)

for _pair in PAIRS:
    _pair.register()
