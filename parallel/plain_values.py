"""Plain values in one safetensors file: JSON in its metadata, arrays and tensors as its tensors. No pickle.

Tuples come back as tuples (random.setstate wants them), arrays as arrays of the same dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.tensor_file import allocate, parse_json, read, read_header, write


def write_value(file: Path, value: dict[str, Any]) -> tuple[int, str, str]:
    """Write and fsync; returns what tensor_file.write returns. ValueError names what cannot be stored."""
    arrays: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, arrays))
    return write(file, arrays, {"value": text})


def read_value(file: Path) -> tuple[dict[str, Any], str]:
    """(value, sha256 of the file)."""
    header = read_header(file)
    arrays = allocate(header)
    digest = read(file, header, arrays, hashed=True)
    return _decode(parse_json(header.metadata.get("value", "").encode(), file), arrays), digest


def frozen(value: dict[str, Any]) -> dict[str, Any]:
    """A deep copy that no later change of `value` reaches."""
    arrays: dict[str, torch.Tensor] = {}
    return _decode(json.loads(json.dumps(_encode(value, arrays))), arrays)


def _encode(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """JSON form of plain values; arrays and tensors go to `arrays` and are named by number."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        name = str(len(arrays))
        arrays[name] = value.detach().cpu().clone() if kind == "tensor" else torch.from_numpy(value.copy())
        return {f"${kind}": name}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _encode(item, arrays) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a checkpoint cannot store {type(value).__name__} {value!r:.80}")


def _decode(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return arrays[value["$tensor"]]
        if "$array" in value:
            return arrays[value["$array"]].numpy()
        if "$tuple" in value:
            return tuple(_decode(item, arrays) for item in value["$tuple"])
        return {key: _decode(item, arrays) for key, item in value.items()}
    return value
