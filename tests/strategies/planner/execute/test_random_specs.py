"""What is drawn: the same anywhere, valid, planned, and of every sort that makes redistributions go wrong."""

import sys
from collections import Counter

from torch.distributed.tensor import Partial

from localtensor.layout.shards import local_shapes
from localtensor.layout.spec import StridedShard
from tests.strategies.planner.execute.random_specs import draw, drawn
from tests.tools import warm


def test_a_number_is_drawn_alike_in_another_process_and_without_those_before_it():
    said = "from tests.strategies.planner.execute.random_specs import drawn\nfor n in (3, 17, 255): print(drawn(9, n))"
    other = warm.run([sys.executable, "-c", said], check=True)
    assert other.stdout.splitlines() == [str(drawn(9, n)) for n in (3, 17, 255)]
    assert [str(one) for one in draw(9, 2, first=254)][1] == str(drawn(9, 255))


def test_limits_are_kept():
    for one in draw(1, 500, ranks=6, axes=2):
        assert one.src.mesh.ranks <= 6
        assert len(one.src.mesh.sizes) <= 2
        assert one.src.mesh.ranks <= one.world <= 8


def test_no_axis_has_two_kinds_of_partial():
    for one in draw(2, 1000):
        for was, now in zip(one.src.placements, one.dst.placements, strict=True):
            assert not (isinstance(was, Partial) and isinstance(now, Partial) and was != now)


def test_everything_that_may_go_wrong_is_drawn():
    found: Counter[str] = Counter()
    for one in draw(3, 1000):
        for spec in (one.src, one.dst):
            shapes = set(local_shapes(spec))
            found["uneven"] += len(shapes) > 1
            found["empty piece"] += 0 < sum(0 in shape for shape in shapes) < len(shapes)
            found["order"] += bool(spec.shard_order)
            found["strided"] += any(isinstance(p, StridedShard) for p in spec.placements)
            found["nested"] += any(len(spec.cut_by(dim)) > 2 for dim in range(len(spec.shape)))
            found.update(f"P({p.reduce_op})" for p in spec.placements if isinstance(p, Partial))
            found["mixed"] += len({p.reduce_op for p in spec.placements if isinstance(p, Partial)}) > 1
        found["flattened"] += bool(one.flattened)
        found["outside"] += one.outside > 0
        found["scalar"] += one.src.shape == ()
        found["no element"] += 0 in one.src.shape
        found["axis of one rank"] += 1 in one.src.mesh.sizes
        found[str(one.src.dtype)] += 1
        found[f"{len(one.src.mesh.sizes)}-D"] += 1
    assert min(found.values()) >= 10, found
    assert len(found) == 32, sorted(found)
