"""lightning: a fit that is resumed from ModelCheckpoint's last file, early stopping, gathers, the best model."""

import os

import lightning
import torch
from keep import keep, parameters
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.seen = []

    def training_step(self, batch, _):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=False, sync_dist=True)
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.seen.append(self.all_gather(torch.tensor(float(self.global_rank))))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


class Data(lightning.LightningDataModule):
    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        self.rows = TensorDataset(torch.randn(43, 8, generator=torch.Generator().manual_seed(1)))

    def train_dataloader(self):
        return DataLoader(self.rows, 3, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, 5)


def trainer(folder, epochs):
    return lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=epochs,
        logger=CSVLogger(folder, version=0),
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(folder, save_last=True, monitor="val", save_top_k=2, filename="{epoch}-{val:.4f}"),
            EarlyStopping("val", patience=3),
            LearningRateMonitor("step"),
        ],
    )


def main():
    lightning.seed_everything(3, workers=True, verbose=False)
    data = Data()
    folder = os.environ["ECOSYSTEM_KEEP"] + "/../lights"
    first = trainer(folder, 2)
    model = Model()
    first.fit(model, data)
    files = sorted(os.listdir(folder))
    second = trainer(folder, 4)
    resumed = Model()
    second.fit(resumed, data, ckpt_path=f"{folder}/last.ckpt")
    best = second.checkpoint_callback.best_model_path
    again = Model.load_from_checkpoint(best, weights_only=False)
    second.strategy.barrier()
    keep(
        seen=model.seen,
        resumed=resumed.seen,
        files=files,
        best=os.path.basename(best),
        params=parameters(resumed),
        again=parameters(again),
        steps=second.global_step,
        metrics=dict(second.callback_metrics),
        rank=second.global_rank,
    )


if __name__ == "__main__":
    main()
