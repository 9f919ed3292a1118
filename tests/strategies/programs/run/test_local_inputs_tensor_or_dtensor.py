import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import localtensor as lt
from strategies.programs.run.local_inputs import laid, spread, uneven, whole

X = torch.arange(6.0).view(3, 2)


def test_a_plain_tensor_stays_as_it_is():
    assert whole(X) is X and laid(X, Shard(0)) is X and spread(X, X, Shard(0)) is X


def test_a_dtensor_is_gathered_laid_and_spread():
    def body():
        mesh = init_device_mesh("cpu", (2, 2))
        x = DTensor.from_local(X, mesh, [Replicate()] * 2, run_check=False)
        cut = laid(x, Shard(1))
        dot = spread(torch.tensor(2.0), x, Shard(0))
        rows = spread(X, x, Shard(0))
        return whole(cut), cut.placements, dot.placements, rows.placements, rows.to_local()

    for rank, (gathered, cut, dot, rows, mine) in enumerate(lt.run(body, ranks=4)):
        assert torch.equal(gathered, X)
        assert (cut, dot, rows) == ((Shard(1), Shard(1)), (Replicate(), Replicate()), (Shard(0), Replicate()))
        assert torch.equal(mine, X[:2] if rank < 2 else X[2:])


def test_no_two_values_of_a_cotangent_are_alike_and_both_signs_are_there():
    values = uneven((5, 4), torch.float64, "cpu")
    assert len(set(values.flatten().tolist())) == 20
    assert (values > 0).any() and (values < 0).any()
    assert values.dtype == torch.float64 and uneven((), torch.float32, "cpu").shape == ()
