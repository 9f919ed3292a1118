"""hydra and omegaconf: a script with composed settings, its own folder a rank, logging, tensorboard and wandb off line."""

import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
import wandb
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from keep import keep, parameters
from omegaconf import OmegaConf
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Settings:
    lr: float = 0.1
    width: int = 8
    rank: int = "${oc.decode:${oc.env:RANK}}"
    optimizer: dict = field(default_factory=lambda: {"_target_": "torch.optim.SGD", "lr": "${lr}", "_partial_": True})


ConfigStore.instance().store(name="settings", node=Settings)
OmegaConf.register_new_resolver("twice", lambda value: 2 * value, replace=True)
log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_name="settings")
def main(settings):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(settings.width, settings.width))
    optimizer = instantiate(settings.optimizer)(model.parameters())
    writer = SummaryWriter("board")
    run = wandb.init(mode="disabled", config=OmegaConf.to_container(settings, resolve=True))
    rng, losses = torch.Generator().manual_seed(settings.rank), []
    for step in range(3):
        loss = model(torch.randn(4, settings.width, generator=rng)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.info("step %d", step)
        writer.add_scalar("loss", loss.item(), step)
        run.log({"loss": loss.item()})
        losses.append(loss.detach())
        dist.barrier()
    writer.close()
    run.finish()
    logged = [line.split(" - ")[-1] for line in Path(f"{HydraConfig.get().job.name}.log").read_text().splitlines()]
    keep(losses=losses, params=parameters(model), logged=logged, folder=Path.cwd().name, boards=len(os.listdir("board")),
         twice=OmegaConf.create({"a": "${twice:4}"}).a, job=json.dumps(HydraConfig.get().job.name))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.argv += [f"hydra.run.dir=out/{os.environ['RANK']}", "hydra.job.chdir=True"]
    main()
