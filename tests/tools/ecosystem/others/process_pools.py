"""Processes of a rank's own: datasets mapped by two, a pool of multiprocess, joblib's loky, a queue, and a manager."""

import multiprocessing as mp

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from joblib import Parallel, delayed
from keep import keep
from multiprocess import get_context


def square(x):
    return x * x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    disable_progress_bars()
    rows = Dataset.from_dict({"x": list(range(20))}).map(lambda row: {"y": row["x"] * 2 + rank}, num_proc=2)
    kept = rows.filter(lambda row: row["y"] % 3 == 0, num_proc=2)["y"][:]
    with get_context("fork").Pool(2) as pool:
        pooled = pool.map(lambda x: x + rank, range(5))
    loky = Parallel(n_jobs=2)(delayed(square)(x + rank) for x in range(4))
    threads = Parallel(n_jobs=2, backend="threading")(delayed(square)(x) for x in range(4))
    with mp.get_context("spawn").Manager() as manager:
        shared, items = manager.dict(rank=rank), manager.Queue()
        child = mp.get_context("fork").Process(target=lambda: items.put(shared["rank"] + 1))
        child.start()
        managed = items.get()
        child.join()
    total = torch.tensor([sum(kept), managed])
    dist.all_reduce(total)
    keep(y=rows["y"][:], kept=kept, pooled=pooled, loky=loky, threads=threads, managed=managed, total=total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
