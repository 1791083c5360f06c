"""Well-known GPUs: memory, bandwidth and dense 16-bit tensor throughput (without sparsity).

Memory is in GiB where the vendor's "GB" are powers of two (what the driver shows), else as printed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator; operations are dense 16-bit ones; `source` is the page that the figures are from."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: float
    source: str


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "A10G",
            24 * 2**30,
            600e9,
            70e12,
            "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        ),
        Gpu("L4", 24 * 2**30, 300e9, 121e12, "https://www.nvidia.com/en-us/data-center/l4/"),
        Gpu("L40S", 48 * 2**30, 864e9, 362e12, "https://www.nvidia.com/en-us/data-center/l40s/"),
        Gpu(
            "RTX-4090",
            24 * 2**30,
            1008e9,
            165e12,
            "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        Gpu("A100-40GB", 40 * 2**30, 1555e9, 312e12, "https://www.nvidia.com/en-us/data-center/a100/"),
        Gpu("A100-80GB", 80 * 2**30, 2039e9, 312e12, "https://www.nvidia.com/en-us/data-center/a100/"),
        Gpu("H100", 80 * 2**30, 3350e9, 989e12, "https://www.nvidia.com/en-us/data-center/h100/"),
        Gpu("H200", 141e9, 4800e9, 989e12, "https://www.nvidia.com/en-us/data-center/h200/"),
        Gpu("B200", 180e9, 8000e9, 2250e12, "https://www.nvidia.com/en-us/data-center/dgx-b200/"),
        Gpu(
            "MI300X", 192e9, 5300e9, 1307e12, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, however it is spelt. Raises ValueError that lists the known ones."""
    wanted = "".join(c for c in name.lower() if c.isalnum())
    for known, gpu in GPUS.items():
        if "".join(c for c in known.lower() if c.isalnum()) == wanted:
            return gpu
    starting = [gpu for known, gpu in GPUS.items() if known.lower().startswith(name.lower())]
    if len(starting) == 1:
        return starting[0]
    raise ValueError(f"gpu is {name!r}; known are {', '.join(GPUS)}")
