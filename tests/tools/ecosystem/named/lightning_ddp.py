"""lightning's Trainer with DDP: training, validation with synchronized metrics, a checkpoint, a test from it."""

import os
import tempfile

import lightning
import torch
from keep import keep, parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.hits = MulticlassAccuracy(3)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        out = self.net(x)
        self.hits(out, y)
        self.log("val_loss", nn.functional.cross_entropy(out, y), sync_dist=True)
        self.log("val_hits", self.hits)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(5, verbose=False)
    data = TensorDataset(torch.randn(60, 8), torch.randint(0, 3, (60,)))
    size = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=size, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
            callbacks=[ModelCheckpoint(folder, monitor="val_loss")], enable_model_summary=False, sync_batchnorm=False,
            gradient_clip_val=0.5, deterministic=True,
        )  # fmt: skip
        model = Model()
        trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 5))
        fitted = dict(trainer.callback_metrics)
        tested = trainer.test(model, DataLoader(data, 5), verbose=False)
    keep(fitted=fitted, tested=tested, params=parameters(model), steps=trainer.global_step, rank=trainer.global_rank)


if __name__ == "__main__":
    main()
