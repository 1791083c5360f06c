"""The weights of a quantised `.gguf` in bfloat16, as another `.gguf`: what llama.cpp serves fastest where the processor
multiplies bfloat16, and the same weights as the other servers have.

    python benchmarks/bf16_gguf.py SOURCE.gguf TARGET.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

from caudex.engine.loading import cache_folder, default_gguf

_WRITTEN_BY_THE_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")


def default_bf16_gguf() -> Path:
    """The default model in bfloat16, made now if there is none."""
    target = cache_folder() / "benchmarks" / f"{default_gguf().stem}.bf16.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        write_bf16(default_gguf(), unfinished)
        unfinished.rename(target)
    return target


def write_bf16(source: Path, target: Path) -> None:
    """Copy a `.gguf`, matrices in bfloat16 and vectors in float32, as llama.cpp's own converter has them."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN_BY_THE_WRITER:
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        add_tensor(writer, tensor.name, dequantize(tensor.data, tensor.tensor_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    halves = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    pairs = halves.view(torch.uint8).numpy().reshape(len(values), -1)
    writer.add_tensor(name, pairs, raw_dtype=GGMLQuantizationType.BF16)


if __name__ == "__main__":
    write_bf16(Path(sys.argv[1]), Path(sys.argv[2]))
