"""Tensors as bytes and as safetensors files, without copies."""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# the names of safetensors, in its order; it writes the last ones, the widest, first, so that
# every tensor is aligned
_KINDS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
_RANKS = {dtype: rank for rank, dtype in enumerate(reversed(_KINDS))}


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in order: its own memory if on the CPU and contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def iterate_safetensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """The pieces of a safetensors file, byte for byte what the library would write."""
    names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in names:
        yield view_bytes(tensors[name])
