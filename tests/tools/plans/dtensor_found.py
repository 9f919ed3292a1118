"""What is wrong with DTensor's own redistribution in torch 2.13, as data: each confirmed on real gloo processes.

`dtensor_torch_2_13.json` has a line for each cause, as `localtensor validate --plans --json` writes it: the smallest pair
that shows it, under which of DTensor's planners, on which ranks, and whether a user can ask for it.
"""

import json
from pathlib import Path

import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.planner.audit.pairs import Pair

FILE = Path(__file__).parent / "dtensor_torch_2_13.json"
TOLD = json.loads(FILE.read_text())
FINDINGS = TOLD["findings"]
VERSION = TOLD["torch"]


def pair_of(found):
    """The pair of a finding."""

    def spec(side):
        order = tuple((dim, tuple(axes)) for dim, axes in side["order"])
        placements = tuple(map(parse, side["placements"]))
        return Spec(Mesh.of(*found["mesh"]), placements, tuple(found["shape"]), getattr(torch, found["dtype"]), order)

    return Pair(spec(found["src"]), spec(found["dst"]), tuple(map(tuple, found["flattened"])))
