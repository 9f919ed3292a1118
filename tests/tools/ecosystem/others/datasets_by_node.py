"""datasets by node, streamed and mapped, with torchdata's loader whose place is saved and restored."""

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from datasets.distributed import split_dataset_by_node
from keep import keep
from torchdata.stateful_dataloader import StatefulDataLoader


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    disable_progress_bars()
    whole = Dataset.from_dict({"x": list(range(53)), "text": [f"row {i}" for i in range(53)]})
    doubled = whole.map(lambda row: {"y": row["x"] * 2}).filter(lambda row: row["x"] % 5 != 0)
    mine = split_dataset_by_node(doubled.with_format("torch"), rank=rank, world_size=size)
    stream = split_dataset_by_node(
        doubled.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8), rank=rank, world_size=size
    )
    loader = StatefulDataLoader(mine, batch_size=3, num_workers=0)
    iterator = iter(loader)
    first = [next(iterator)["y"] for _ in range(2)]
    state = loader.state_dict()
    again = StatefulDataLoader(mine, batch_size=3, num_workers=0)
    again.load_state_dict(state)
    rest = [batch["y"] for batch in again]
    total = torch.tensor([sum(int(y.sum()) for y in first + rest)])
    dist.all_reduce(total)
    keep(first=first, rest=rest, stream=[row["x"] for row in stream], total=total, texts=mine["text"][:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
