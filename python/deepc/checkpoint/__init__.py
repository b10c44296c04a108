"""Checkpoints: safetensors shards with an index, published by one atomic rename; no pickle anywhere.

`files` reads and writes one file, `store` a checkpoint directory."""

from .files import SafetensorsFile, Slice, TensorInfo, write_safetensors
from .store import (
    CheckpointReader,
    CheckpointWriter,
    LogicalTensor,
    decode_client_state,
    encode_client_state,
    list_tags,
    new_token,
    read_latest,
    write_model,
)

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "LogicalTensor",
    "SafetensorsFile",
    "Slice",
    "TensorInfo",
    "decode_client_state",
    "encode_client_state",
    "list_tags",
    "new_token",
    "read_latest",
    "write_model",
    "write_safetensors",
]
