"""A tiny Llama 3 in torchtitan's own trainer, on the CPU: a script for torchrun, `localtensor run` and `localtensor compare`.

    torchrun --nproc-per-node 4 tests/tools/titan/train.py --shard 2 --tp 2 --backend spmd_types --typecheck

Read on torchtitan 0.3.0.  What is put in the place of its own, because it is for GPUs or needs files: the device, the
memory statistics, attention (SDPA), the data, and the initial values, which DTensor does not draw alike on the CPU.
"""

import argparse
import os
import tempfile
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks, which it does once
FOR_GPUS = {
    "get_device_name": lambda _=None: "CPU",
    "current_device": lambda: 0,
    "get_device_properties": lambda _=None: SimpleNamespace(total_memory=1 << 34),
    "memory_stats": lambda _=None: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}
for _name, _function in FOR_GPUS.items():
    setattr(torch.cpu, _name, _function)
if not hasattr(dist, "set_timeout"):  # torch 2.14 has none
    dist.set_timeout = lambda *_: None

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import Configurable, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import CommConfig, DebugConfig  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, parallelize_llama  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, ROWS = 64, 32, 4, 2, 16, 4


class Tokens(BaseDataLoader):
    """Random tokens: each rank's rows of the global batch of a step, which is the same on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        del config
        self.micro, self.rank, self.ranks, self.length = local_batch_size, dp_rank, dp_world_size, seq_len

    def __iter__(self):
        step = 0
        while True:
            rng = torch.Generator().manual_seed(step)
            rows = torch.randint(0, VOCABULARY, (ROWS, self.length + 1), generator=rng).chunk(self.ranks)[self.rank]
            for x in rows.split(self.micro):  # micro-batches of a pipeline
                positions = torch.arange(self.length).repeat(len(x), 1)
                yield {"input": x[:, :-1].contiguous(), "positions": positions}, x[:, 1:].contiguous()
            step += 1

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        del config
        super().__init__()

    def encode(self, *_):
        return []

    def decode(self, *_):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


def drawn(name):
    """An initializer whose values depend on the parameter's name alone, for whole and for distributed parameters."""

    def fill(param):
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = 0.3 * torch.randn(param.shape, generator=rng) + (param.ndim == 1)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            whole = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            whole = whole.redistribute(placements=param.placements)
        param.copy_(whole)

    return fill


def model_spec():
    given = {"weight": None}
    config = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=dict(given)),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=dict(given)),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=dict(given)),
        layers=llama3._build_llama3_layers(
            n_layers=LAYERS,
            dim=WIDTH,
            n_heads=HEADS,
            hidden_dim=2 * WIDTH,
            rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=4 * LENGTH, theta=500000, scaling="llama"),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:  # FlexAttention compiles a kernel; on the CPU it has no backward pass
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    for name, part, _, _ in config.traverse(Configurable.Config, recurse=True):
        if keys := getattr(part, "param_init", None):
            part.param_init = {key: drawn(f"{name}.{key}") for key in keys}
    return ModelSpec(
        name="llama3", flavor="tiny", model=config, parallelize_fn=parallelize_llama, pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter,
    )  # fmt: skip


def config_of(given, folder):
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        model_spec=model_spec(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=ROWS // (given.replicate * given.shard),
            seq_len=LENGTH,
            steps=given.steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=given.replicate,
            data_parallel_shard_degree=given.shard,
            tensor_parallel_degree=given.tp,
            context_parallel_degree=given.cp,
            pipeline_parallel_degree=given.pp,
            spmd_backend=given.backend,
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, spmd_typechecking=given.typecheck, enable_structured_logging=False),
        comm=CommConfig(trace_buf_size=0),
        dump_folder=folder,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("replicate", "shard", "tp", "cp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="ranks along this axis; --shard 0 is what is left")
    parser.add_argument("--backend", default="spmd_types", choices=["spmd_types", "full_dtensor", "partial_dtensor"])
    parser.add_argument("--typecheck", action="store_true", help="check the types of all tensors (spmd_types)")
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    others = given.replicate * given.tp * given.cp * given.pp
    given.shard = given.shard or int(os.environ["WORLD_SIZE"]) // others
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config_of(given, folder))
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):  # gloo has no PREMUL_SUM, by which FSDP divides gradients
                    module.set_force_sum_reduction_for_comms(True)
        try:
            trainer.train()
            if kept := os.environ.get("ECOSYSTEM_KEEP"):  # tests/tools/ecosystem
                found = {name: value for part in trainer.model_parts for name, value in part.state_dict().items()}
                found = {name: getattr(value, "to_local", lambda: value)().detach() for name, value in found.items()}  # noqa: B023
                torch.save(found, f"{kept}/rank{os.environ['RANK']}.pt")
        finally:
            trainer.close()


if __name__ == "__main__":
    main()
