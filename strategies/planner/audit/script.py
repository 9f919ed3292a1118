"""A finding as a script (`localtensor validate --plans --repro`): the redistribution that goes wrong, in plain torch for torchrun."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate

from localtensor.layout import Spec, split
from strategies.model.codec import docstring_code, flatten_code, placements_code, tensor_literal
from strategies.planner.audit.compare import rounding_tolerance
from strategies.planner.audit.rank_run import is_public
from strategies.planner.audit.report import Cause
from strategies.planner.audit.verdict import PairRun
from strategies.torch_api.mesh_and_caches import averages_code

_OUTPUT = "what each rank holds and what it should hold; exit code 1 if they differ, or if a rank is refused."
_SCRIPT = """{head}

import datetime
import functools
import inspect
import logging
import sys
from collections.abc import Callable  # noqa: F401
from math import inf, nan  # noqa: F401
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

logging.disable()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", {mesh}, mesh_dim_names={names})
{flatten}{averages}
# what each rank holds: {src}
held = [
    {held}
]
# what each rank is to hold: {dst}
want = [
    {want}
]
whole = {whole}
src, dst = {src_code}, {dst_code}
{work}

try:
    with _redistribute.use_min_cost_redistribution_plan({graph}):
        got = redistributed(held[rank].clone())
except Exception as error:
    print(f"rank {{rank}} is refused: {{type(error).__name__}}: {{error}}", flush=True)
    sys.exit(1)
print(f"rank {{rank}} got {{got.dtype}} {{got.tolist()}}", flush=True)
{folds}expected = want[rank]
same = (got.shape, got.dtype) == (expected.shape, expected.dtype) and {same}
print(f"rank {{rank}} want {{expected.dtype}} {{expected.tolist()}}: {{'right' if same else 'WRONG'}}", flush=True)
{referee}wrong = torch.tensor([float(not same)])
dist.all_reduce(wrong)
dist.destroy_process_group()
sys.exit(1 if wrong.item() else 0)
"""

_PUBLIC_API = """

def redistributed(piece):
    given = DTensor.from_local(piece, mesh, src, run_check=False, shape=whole.shape, stride=whole.stride())
    return given.redistribute(placements=dst).to_local()
"""

_INTERNAL_API = '''meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)


def redistributed(piece):
    """What DTensor calls for its own use: a user cannot ask for a shard order, or for a Partial."""
    have, need = {have}, {need}
    return _redistribute.redistribute_local_tensor(piece, have, need)
'''

_REDUCE_PARTIALS = """every = [None] * dist.get_world_size()
dist.all_gather_object(every, got)
for kind, groups in {folds}:
    after = list(every)
    for group in groups:
        stack = torch.stack([every[other] for other in group])
        how = {{"sum": stack.sum, "avg": stack.mean, "min": stack.amin, "max": stack.amax, "product": stack.prod}}[kind]
        for other in group:
            after[other] = how(0)
    every = after
got = every[rank]  # what the ranks of the partial axes hold together
"""

_DISTRIBUTE_TENSOR = """dealt = distribute_tensor(whole, mesh, dst, src_data_rank=None).to_local()
print(f"rank {rank} has {dealt.tolist()} where distribute_tensor deals the whole tensor", flush=True)
"""


def script(cause: Cause, name: str, *, seed: int = 0) -> str:
    """The text of a script that reproduces the smallest pair of a finding, with the same values."""
    pair, job = cause.pair, PairRun.of(cause.pair, seed)
    plain = [p if not isinstance(p, Partial) else Replicate() for p in pair.dst.placements]
    want = split(job.whole, Spec(pair.mesh, tuple(plain), pair.dst.shape, pair.dst.dtype, pair.dst.shard_order))
    partial = plain != list(pair.dst.placements)
    averaged = any(p == Partial("avg") for p in (*pair.src.placements, *pair.dst.placements))
    tolerance = rounding_tolerance([*job.pieces, job.whole])
    equal = "torch.equal(got, expected)"
    if tolerance:
        equal = f"torch.allclose(got, expected, rtol=0.0, atol={tolerance:.3g})"
    axes = zip(pair.dst.placements, pair.mesh.names, strict=True)
    folds = [(p.reduce_op, list(pair.mesh.groups(name))) for p, name in axes if isinstance(p, Partial)]
    own = _INTERNAL_API.format(have=_spec_code(pair.src, "src"), need=_spec_code(pair.dst, "dst"))
    return _SCRIPT.format(
        head=docstring_code(
            str(pair), f", {_MODES[cause.modes[0]]}: {cause.outcome.text}", pair.mesh.ranks, name, _OUTPUT
        ),
        mesh=pair.mesh.sizes,
        names=pair.mesh.names,
        flatten="".join(flatten_code(names, pair.mesh.names) for names in pair.flattened),
        averages=averages_code() if averaged else "",
        src=pair.src,
        dst=pair.dst,
        whole=tensor_literal(job.whole),
        held=",\n    ".join(map(tensor_literal, job.pieces)),
        want=",\n    ".join(tensor_literal(piece.clone()) for piece in want),
        src_code=placements_code(pair.src.placements),
        dst_code=placements_code(pair.dst.placements),
        work=_PUBLIC_API if is_public(pair.src, pair.dst) else own,
        graph=cause.modes[0] == "graph",
        folds=_REDUCE_PARTIALS.format(folds=folds) if partial else "",
        same=equal,
        referee="" if partial or pair.dst.shard_order else _DISTRIBUTE_TENSOR,
    )


_MODES = {"greedy": "as it plans by itself", "graph": "under use_min_cost_redistribution_plan"}


def _spec_code(spec: Spec, name: str) -> str:
    if not spec.shard_order:
        return f"DTensorSpec(mesh, tuple({name}), meta)"
    orders = [(dim, spec.cut_by(dim)) for dim in range(len(spec.shape)) if spec.cut_by(dim)]
    listed = "".join(f"ShardOrderEntry({dim}, {axes}), " for dim, axes in orders)
    return f"DTensorSpec(mesh, tuple({name}), meta, ({listed}), use_strided_shard_as_shard_order=False)"
