"""Random ops: a piece of independent draws is as many independent draws.

Each rank may draw the numbers of its shard by itself, if no two ranks draw from the same stream at the same place: then
the whole is distributed as it should be, though it is not the very tensor that one rank would have drawn.  Replicated stays
what every rule takes for granted, and holds only if all ranks draw from the same stream.  There is no line for parts: what
ranks draw apart is neither the sum nor the greatest of anything that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.partials import agreed
from localtensor.layout.spec import KINDS
from strategies.ops.lib.elementwise import elementwise, shards
from strategies.ops.lib.overload_variants import named, with_variants
from strategies.ops.semantics.rulebook import Ask, Line, rules


def forgotten(ask: Ask) -> Iterator[Line]:
    """The tensor is asked for its shape and dtype only, so its parts will do."""
    for kind in KINDS:
        if agreed(kind, ask.tensors[0].dtype):
            yield ask.line({0: Partial(kind)}, [Replicate()])


def rows(ask: Ask) -> Iterator[Line]:
    """`multinomial` draws for each row of probabilities by itself."""
    if ask.tensors[0].ndim == 2:
        yield ask.line({0: Shard(0)}, [Shard(0)])


def filled(ask: Ask) -> Iterator[Line]:
    """As elementwise, where each rank has some elements."""
    yield from (replace(line, cut="filled") for line in shards(ask))


LIKE = named("rand_like randn_like randint_like randint_like.low_dtype")
OVERWRITING = named("""uniform.default normal_functional.default exponential.default geometric.default log_normal.default
    cauchy.default random.default random.from random.to""")
OF_THEIR_OWN = named("""bernoulli.default bernoulli.p poisson.default binomial.default normal.Tensor_float
    normal.float_Tensor normal.Tensor_Tensor rrelu_with_noise_functional.default""")

RULES = with_variants(
    (
        *rules("random", "each element is drawn by itself", LIKE, elementwise(forgotten)),
        *rules("random", "each element is drawn by itself, whatever was there", OVERWRITING,
               elementwise(forgotten)),
        *rules("random", "each element is drawn by itself, with chances of its own", OF_THEIR_OWN,
               elementwise()),
        *rules("random", "each element is dropped by itself; of none, torch gives a mask of the input's dtype",
               ["aten.native_dropout.default"], filled),
        *rules("random", "as normal_functional, in place", ["aten.normal_.default", "aten.normal.out"], elementwise()),
        *rules("random", "each row is drawn by itself", ["aten.multinomial.default"], rows),
    )
)  # fmt: skip
