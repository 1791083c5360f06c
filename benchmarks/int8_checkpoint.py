"""A checkpoint's linear layers in 8 bits, in the format that vLLM runs with 8-bit products (W8A8, compressed-tensors).

    python benchmarks/int8_checkpoint.py SOURCE_DIRECTORY TARGET_DIRECTORY

A weight row gets one scale, its largest magnitude over 127, and is rounded to it; activations are quantised a token at
a time by whoever runs it. Embeddings, norms and the output matrix stay as they are, as vLLM expects.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from caudex.engine.loading import cache_folder, locate_checkpoint

_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "observer": None}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_ROWS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_ROWS, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}


def default_int8_checkpoint() -> Path:
    """The default model so quantised, made now if there is none."""
    target = cache_folder() / "benchmarks" / f"{locate_checkpoint(None).directory.name}-w8a8"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix="unfinished-"))
        write_int8(locate_checkpoint(None).directory, unfinished)
        unfinished.rename(target)
    return target


def write_int8(source: Path, target: Path) -> None:
    """Copy a checkpoint of one `model.safetensors`, its layers' matrices quantised."""
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_linear(name, tensor):
            tensors[name], tensors[f"{name}_scale"] = quantize_rows(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith("_proj.weight")


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers in [-127, 127] (int8, as `weight` is shaped) and a float32 scale a row, [rows, 1]."""
    values = weight.to(torch.float32)
    scale = values.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    return (values / scale).round().clamp(-127, 127).to(torch.int8), scale


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    write_int8(Path(sys.argv[1]), Path(sys.argv[2]))
