"""The planted ops by family: each family of rules that DTensor has is here, as ops of our own that compute the same."""

from __future__ import annotations

from tests.tools.bench import ops, ops_backward, ops_linear, ops_neural, ops_pointwise, ops_rare, ops_views, ops_written
from tests.tools.bench.claims import Base
from tests.tools.bench.ops_varied import VARIED_FAMILIES

FAMILIES: dict[str, tuple[Base, ...]] = {
    "pointwise": ops.POINTWISE,
    "casts": ops_pointwise.CASTS,
    "compared": ops_pointwise.COMPARED,
    "random": ops_pointwise.RANDOM,
    "ties and zeros": ops_rare.TIES,
    "large values": ops_rare.LARGE,
    "not finite": ops_rare.NOT_FINITE,
    "other lengths": ops_rare.LENGTHS,
    "reductions": ops.REDUCTIONS,
    "scans": ops.SCANS,
    "several results": ops.SEVERAL,
    "values and indices": ops_neural.INDEXED_RESULTS,
    "products": ops.PRODUCTS,
    "scaled products": ops_linear.SCALED,
    "linalg": ops_linear.LINALG,
    "fourier": ops_linear.FOURIER,
    "convolution": ops_neural.CONV,
    "pooling": ops_neural.POOLING,
    "sampling": ops_neural.SAMPLING,
    "norms": ops_neural.NORMS,
    "losses": ops_neural.LOSSES,
    "embedding": ops_neural.EMBEDDING,
    "attention": ops_neural.ATTENTION,
    "backward": ops_backward.BACKWARD,
    "movers": ops.MOVERS,
    "views": ops_views.VIEWS,
    "factories": ops_views.FACTORIES,
    "lists": ops_views.LISTS,
    "indexed": ops_views.INDEXED,
    "in place": ops_written.IN_PLACE,
    "out=": ops_written.OUT,
    "foreach": ops_written.FOREACH,
    "fused": ops_written.FUSED,
}
BASES: tuple[Base, ...] = tuple(base for bases in FAMILIES.values() for base in bases)
FAMILY_OF: dict[str, str] = {one.name: family for family, some in (FAMILIES | VARIED_FAMILIES).items() for one in some}
