"""The matrices of a `.gguf` in another type, as another `.gguf`: the weights that the servers of a comparison share.

    python benchmarks/gguf_weights.py SOURCE.gguf TARGET.gguf BF16|Q8_0|Q4_0

llama.cpp serves each type with other kernels, so which is fastest depends on the processor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from caudex.engine.loading import cache_folder, default_gguf

FILE_TYPES = {
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
TOKENS = "token_embd.weight"
_WRITTEN_BY_THE_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")


def default_model_in(kind: str) -> Path:
    """The default model with its matrices in `kind`, made now if there is none."""
    target = cache_folder() / "benchmarks" / f"{default_gguf().stem}.{kind.lower()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        write_in(kind, default_gguf(), unfinished)
        unfinished.rename(target)
    return target


def write_in(kind: str, source: Path, target: Path) -> None:
    """Copy a `.gguf`, matrices in `kind` and vectors in float32, as llama.cpp's own converter has them.

    The table of tokens, which is the output matrix too, is kept in 8 bits where `kind` has fewer.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN_BY_THE_WRITER:
            value_type = field.types[0]
            inner = field.types[-1] if value_type == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), value_type, sub_type=inner)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        add_tensor(
            writer, tensor.name, values, "Q8_0" if (tensor.name, kind) == ("token_embd.weight", "Q4_0") else kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray[Any, np.dtype[np.float32]], kind: str) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    raw_type = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(values, raw_type), raw_dtype=raw_type)


if __name__ == "__main__":
    write_in(sys.argv[3], Path(sys.argv[1]), Path(sys.argv[2]))
