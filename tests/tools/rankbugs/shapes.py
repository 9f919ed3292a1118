"""ShapeMismatch: the same collective, and one rank brings a tensor of another size."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.tools.rankbugs.corpus import fault, right


@fault("ShapeMismatch", ranks=2)
def one_rank_brings_a_longer_tensor():
    x = torch.ones(4 + dist.get_rank())
    dist.all_reduce(x)  # fault


@right(ranks=2)
def both_ranks_bring_one_length():
    x = torch.ones(4 + dist.get_rank())[:4]
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


@fault("ShapeMismatch", ranks=4)
def the_last_batch_of_one_rank_is_short():
    rows = torch.ones(12 if dist.get_rank() < 3 else 11, 2)
    for batch in rows.split(4):
        shared = batch.clone()
        dist.all_reduce(shared)  # fault


@right(ranks=4)
def the_last_batch_of_one_rank_is_padded():
    have = 12 if dist.get_rank() < 3 else 11
    rows = torch.cat([torch.ones(have, 2), torch.zeros(12 - have, 2)])
    total = 0.0
    for batch in rows.split(4):
        shared = batch.clone()
        dist.all_reduce(shared)
        total += shared.sum().item()
    assert total == 2.0 * 47


@fault("ShapeMismatch", ranks=3)
def a_list_for_pieces_of_my_own_size():
    x = torch.ones(2 if dist.get_rank() < 2 else 3)
    got = [torch.empty_like(x) for _ in range(3)]
    dist.all_gather(got, x)  # fault


@right(ranks=3)
def sizes_are_gathered_first_and_pieces_padded():
    rank = dist.get_rank()
    x = torch.full((2 if rank < 2 else 3,), float(rank))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    longest = int(max(sizes))
    got = [torch.empty(longest) for _ in range(3)]
    dist.all_gather(got, nn.functional.pad(x, (0, longest - len(x))))
    whole = torch.cat([piece[: int(size)] for piece, size in zip(got, sizes)])
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@fault("ShapeMismatch", ranks=2)
def an_output_for_as_many_rows_as_i_have():
    mine = torch.ones(3 - dist.get_rank(), 2)
    out = mine.new_empty(2 * mine.shape[0], 2)
    dist.all_gather_into_tensor(out, mine)  # fault


@fault("ShapeMismatch", ranks=3)
def the_receivers_of_a_broadcast_guess_the_size():
    x = torch.arange(6.0) if dist.get_rank() == 0 else torch.empty(5)
    dist.broadcast(x, src=0)  # fault


@right(ranks=3)
def the_size_is_broadcast_before_the_tensor():
    size = torch.tensor([6 if dist.get_rank() == 0 else 0])
    dist.broadcast(size, src=0)
    x = torch.arange(6.0) if dist.get_rank() == 0 else torch.empty(int(size))
    dist.broadcast(x, src=0)
    assert x.sum().item() == 15.0


@fault("ShapeMismatch", ranks=4)
def in_a_subgroup_one_rank_kept_a_column_more():
    evens = dist.new_group([0, 2])
    if dist.get_rank() % 2 == 0:
        x = torch.ones(2, 3 + dist.get_rank() // 2)
        dist.reduce(x, dst=2, group=evens)  # fault


@right(ranks=4)
def a_subgroup_reduces_and_the_others_bring_other_sizes():
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    even = dist.get_rank() % 2 == 0
    x = torch.ones(2, 3) if even else torch.ones(5)
    dist.all_reduce(x, group=evens if even else odds)
    assert x.sum().item() == (12.0 if even else 10.0)


@fault("ShapeMismatch", ranks=2)
def the_scattered_input_is_cut_to_my_own_length():
    whole = torch.ones(8 if dist.get_rank() == 0 else 6)
    mine = torch.empty(len(whole) // 2)
    dist.reduce_scatter_tensor(mine, whole)  # fault


@right(ranks=2)
def the_scattered_input_has_one_length():
    whole = torch.arange(8.0) * (1 + dist.get_rank())
    mine = torch.empty(len(whole) // 2)
    dist.reduce_scatter_tensor(mine, whole)
    assert mine.tolist() == [3.0 * (i + 4 * dist.get_rank()) for i in range(4)]


class Pooled(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Linear(3, hidden)

    def forward(self, x):
        pooled = self.inner(x).mean(0).detach()
        dist.all_reduce(pooled)  # fault
        return pooled / dist.get_world_size()


@fault("ShapeMismatch", ranks=3, helpers=(Pooled.forward,))
def one_rank_built_a_wider_layer():
    model = Pooled(hidden=16 if dist.get_rank() == 0 else 8)
    model(torch.ones(4, 3))


@right(ranks=3)
def every_rank_built_the_same_layer():
    model = Pooled(hidden=8)
    nn.init.constant_(model.inner.weight, 1.0)
    nn.init.zeros_(model.inner.bias)
    y = model(torch.full((4, 3), float(dist.get_rank())))
    assert y.tolist() == [3.0] * 8


@fault("ShapeMismatch", ranks=2)
def what_passed_the_filter_is_summed():
    scores = torch.tensor([0.1, 0.9, 0.8]) if dist.get_rank() == 0 else torch.tensor([0.7, 0.2, 0.3])
    kept = scores[scores > 0.5]
    dist.all_reduce(kept)  # fault


@right(ranks=2)
def what_passed_the_filter_is_masked_and_summed():
    scores = torch.tensor([0.0, 2.0, 1.0]) if dist.get_rank() == 0 else torch.tensor([4.0, 0.0, 0.0])
    kept = torch.where(scores > 0.5, scores, 0.0)
    dist.all_reduce(kept)
    assert kept.tolist() == [4.0, 2.0, 1.0]


@fault("ShapeMismatch", ranks=3)
def squeeze_drops_the_batch_of_one():
    batch = 1 if dist.get_rank() == 2 else 2
    logits = torch.ones(batch, 1, 3).squeeze()
    dist.all_reduce(logits)  # fault


@fault("ShapeMismatch", ranks=2)
def functional_gather_of_uneven_rows():
    x = torch.ones(2 + 2 * dist.get_rank(), 2)
    whole = functional.all_gather_tensor(x, 0, dist.group.WORLD)  # fault
    return whole.sum()


@right(ranks=2)
def functional_gather_of_even_rows():
    x = torch.ones(2, 2) * (1 + dist.get_rank())
    whole = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    assert whole.sum().item() == 12.0


def add_up(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)  # fault
    return gradient


@fault("ShapeMismatch", ranks=2, helpers=(add_up,))
def a_hook_sums_gradients_of_two_vocabularies():
    table = nn.Embedding(10 if dist.get_rank() else 12, 2)
    table.weight.register_hook(add_up)
    table(torch.tensor([1, 2])).sum().backward()


@right(ranks=2)
def a_hook_sums_gradients_of_one_vocabulary():
    table = nn.Embedding(10, 2)
    table.weight.register_hook(add_up)
    table(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()
    assert table.weight.grad[:4, 0].tolist() == [0.0, 2.0, 1.0, 1.0]


@fault("ShapeMismatch", ranks=3)
def one_rank_sends_more_than_the_gatherer_has_room_for():
    mine = torch.ones(2 + (dist.get_rank() == 1))
    room = [torch.empty(2) for _ in range(3)] if dist.get_rank() == 0 else None
    dist.gather(mine, room, dst=0)  # fault


@right(ranks=3)
def the_gatherer_has_room_for_all():
    mine = torch.ones(2) * dist.get_rank()
    room = [torch.empty(2) for _ in range(3)] if dist.get_rank() == 1 else None
    dist.gather(mine, room, dst=1)
    assert room is None or torch.stack(room).sum(1).tolist() == [0.0, 2.0, 4.0]


@fault("ShapeMismatch", ranks=4)
def one_rank_wants_a_longer_piece_than_the_root_cuts():
    piece = torch.empty(3 if dist.get_rank() == 3 else 2)
    pieces = list(torch.arange(8.0).split(2)) if dist.get_rank() == 0 else None
    dist.scatter(piece, pieces, src=0)  # fault


@fault("ShapeMismatch", ranks=4)
def the_columns_of_a_mesh_are_of_two_lengths():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = mesh.get_local_rank("dp")
    x = torch.ones(3 + row)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    dist.all_reduce(x, group=mesh.get_group("dp"))  # fault


@right(ranks=4)
def the_rows_of_a_mesh_may_be_of_two_lengths():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, _ = mesh.get_coordinate()
    x = torch.ones(3 + row)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    total = x.sum()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    assert total.item() == 14.0


@right(ranks=2)
def tensors_without_any_elements_are_reduced():
    x = torch.ones(0, 3)
    dist.all_reduce(x)
    assert x.shape == (0, 3) and x.sum().item() == 0.0


@right(ranks=3)
def a_step_may_be_larger_than_the_last():
    sums = []
    for step in range(4):
        x = torch.ones(step + 1)
        dist.all_reduce(x)
        sums.append(x.sum().item())
    assert sums == [3.0, 6.0, 9.0, 12.0]
