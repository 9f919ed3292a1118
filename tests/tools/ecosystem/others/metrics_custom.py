"""torchmetrics of one's own: reductions by function and by none, states that are lists, a group of some ranks, wrappers."""

import torch
import torch.distributed as dist
import torchmetrics as tm
from keep import keep


def spread(stacked):
    return stacked.max(0).values - stacked.min(0).values


class Mine(tm.Metric):
    full_state_update = False

    def __init__(self, **given):
        super().__init__(**given)
        self.add_state("wide", torch.zeros(3), dist_reduce_fx=spread)
        self.add_state("raw", torch.zeros(2), dist_reduce_fx=None)
        self.add_state("rows", [], dist_reduce_fx=None)
        self.add_state("all", [], dist_reduce_fx="cat")
        self.add_state("low", torch.tensor(1e9), dist_reduce_fx="min")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, x):
        self.wide = self.wide + x[:3]
        self.raw = self.raw * 0.5 + x[:2]
        self.rows.append(x)
        self.all.append(x[:, None] if x.ndim else x)
        self.low = torch.minimum(self.low, x.min())
        self.mean = self.mean + x.mean()

    def compute(self):
        return {
            "wide": self.wide,
            "raw": self.raw,
            "rows": list(self.rows) if isinstance(self.rows, list) else self.rows,
            "all": self.all if isinstance(self.all, torch.Tensor) else torch.cat(self.all),
            "low": self.low,
            "mean": self.mean,
        }


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)))]
    rng = torch.Generator().manual_seed(rank)
    metric, part = Mine(), Mine(process_group=groups[rank % 2], compute_on_cpu=True)
    step = Mine(dist_sync_on_step=True)
    forward = []
    for turn in range(3):
        x = torch.randn(4 + rank, generator=rng)
        metric.update(x)
        part.update(x)
        if turn < 2:
            forward.append(step(x))
    local = tm.MeanMetric(sync_on_compute=False)
    local.update(float(rank))
    tracker = tm.wrappers.MetricTracker(
        tm.MetricCollection({"mse": tm.MeanSquaredError(), "mae": tm.MeanAbsoluteError()}), maximize=[False, False]
    )
    for _ in range(3):
        tracker.increment()
        a = torch.randn(5 + rank, generator=rng)
        tracker.update(a, a * 0.5)
    best = tracker.best_metric()
    minmax = tm.wrappers.MinMaxMetric(tm.classification.BinaryAccuracy())
    running = tm.wrappers.Running(tm.SumMetric(), window=3)
    for i in range(5):
        minmax.update(torch.rand(6, generator=rng), torch.randint(0, 2, (6,), generator=rng))
        running(torch.tensor(float(i + rank)))
    torch.manual_seed(rank)
    boot = tm.wrappers.BootStrapper(tm.MeanMetric(), num_bootstraps=4)
    boot.update(torch.randn(12, generator=rng))
    text = tm.text.CharErrorRate()
    text.update(["this is it"] * (rank + 1), ["that was it"] * (rank + 1))
    r = tm.functional.pairwise_cosine_similarity(torch.randn(3, 4, generator=rng))
    keep(
        mine=metric.compute(),
        part=part.compute(),
        forward=forward,
        local=local.compute(),
        all=tracker.compute_all(),
        best=best,
        minmax=minmax.compute(),
        running=running.compute(),
        boot=boot.compute(),
        text=text.compute(),
        state=metric.metric_state and {k: v for k, v in metric.metric_state.items() if isinstance(v, torch.Tensor)},
        r=r,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
