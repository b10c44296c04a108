"""What the fork server of ranks.py imports before it forks: what a rank imports before its first step, so that it is
paid once per pytest process. Nothing of deepc, which reads its variables when it is imported."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

# What huggingface_hub reads when it is imported; forks have an environment of their own.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
gc.disable()  # ranks.py enables it in forks: a collection there would copy each page that holds one of these objects
for _name in (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch._dynamo",  # torch's first optimizer imports the compiler
    "torch._subclasses.fake_tensor",
    "numpy",
    "safetensors.torch",
    "pytest",
    "hypothesis",
    "transformers",  # looks through its models' files; what looks for DeepSpeed comes with its first model
    "transformers.models.auto.configuration_auto",
    "torch.distributed.checkpoint.hf_storage",  # this and the rest: what its models and its Trainer import of others
    "scipy.optimize",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
gc.collect()
gc.freeze()
