"""torchmetrics that synchronize: counts, lists of uneven length, curves, means, texts, a collection, and `unsync`."""

import torch
import torch.distributed as dist
import torchmetrics as tm
from keep import keep


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rng = torch.Generator().manual_seed(rank)
    several = tm.MetricCollection({
        "accuracy": tm.classification.MulticlassAccuracy(5),
        "confusion": tm.classification.MulticlassConfusionMatrix(5),
        "auroc": tm.classification.MulticlassAUROC(5, thresholds=None),
    })  # fmt: skip
    one = {
        "mean": tm.MeanMetric(), "cat": tm.CatMetric(), "pearson": tm.PearsonCorrCoef(), "r2": tm.R2Score(),
        "spearman": tm.SpearmanCorrCoef(), "max": tm.MaxMetric(),
    }  # fmt: skip
    for _ in range(2 + rank % 2):
        rows = 3 + rank
        scores, labels = torch.rand(rows, 5, generator=rng).softmax(1), torch.randint(0, 5, (rows,), generator=rng)
        several.update(scores, labels)
        x, y = torch.randn(rows, generator=rng), torch.randn(rows, generator=rng)
        for name, metric in one.items():
            metric.update(*((x,) if name in {"mean", "cat", "max"} else (x, y)))
    here = one["mean"].compute()
    found = {name: metric.compute() for name, metric in one.items()}
    one["mean"].reset()
    one["mean"].update(torch.tensor(float(rank)))
    with one["mean"].sync_context():
        inside = one["mean"].mean_value.clone()
    keep(several=several.compute(), one=found, here=here, inside=inside, after=one["mean"].mean_value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
