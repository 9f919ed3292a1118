"""The private parts of torch by which compare knows wrappers, mixed precision and dropout: a torch that changes them is named."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import localtensor as lt
from localtensor._util.module_names import plain_name
from localtensor.testing.compare.watch import Key, Watch, declared_dtype


def test_the_policy_of_mixed_precision_is_where_we_look():
    def declared(policy):
        return declared_dtype(fully_shard(nn.Linear(4, 4), mp_policy=policy))

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert lt.run(lambda: declared(half), ranks=2, leftovers="ignore").values == (torch.bfloat16, torch.bfloat16)
    assert lt.run(lambda: declared(MixedPrecisionPolicy()), ranks=2, leftovers="ignore").values == (None, None)
    assert declared_dtype(nn.Linear(4, 4)) is None


def test_wrappers_are_left_out_of_names():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)))
    assert [plain_name(name) for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert plain_name("module._orig_mod.0.weight") == "0.weight" and plain_name("submodule.0") == "submodule.0"


def test_a_copy_on_another_device_is_another_copy():
    watch = Watch()
    kept = [watch._copy(Key(0, "output", "layer"), torch.ones(3, device=device)) for device in ("cpu", "meta", "cpu")]
    assert [x.device.type for x in kept] == ["cpu", "meta", "cpu"] and kept[0] is kept[2]
