"""pytorch-ignite: an engine on each rank, `idist`'s model, optimizer and loader, and metrics that are reduced."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping, global_step_from_engine
from ignite.metrics import Accuracy, Loss, RunningAverage
from keep import keep, parameters
from torch import nn
from torch.utils.data import TensorDataset


def training(rank, kept):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=1e-2))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=idist.device())
    evaluator = create_supervised_evaluator(
        model, {"hits": Accuracy(), "loss": Loss(nn.functional.cross_entropy)}, device=idist.device()
    )
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
    losses, found = [], []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(loader)
        found.append(dict(evaluator.state.metrics, epoch=global_step_from_engine(engine)(None, None)))

    stop = EarlyStopping(3, lambda engine: -engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stop)
    trainer.run(loader, max_epochs=3)
    total = idist.all_reduce(torch.tensor(float(idist.get_rank() + 1)))
    names = idist.all_gather(f"rank {idist.get_rank()}")
    kept.update(losses=losses, found=found, running=trainer.state.metrics, total=total, names=names,
                params=parameters(model), size=idist.get_world_size())  # fmt: skip


def main():
    kept = {}
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, kept)
    keep(**kept)


if __name__ == "__main__":
    main()
