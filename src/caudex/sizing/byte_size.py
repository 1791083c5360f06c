"""Sizes as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_byte_size(text: str) -> int | None:
    """The bytes of a size such as 1073741824, 512M or 2GiB; None if it is none. Units are powers of 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    return None if found is None else int(float(found.group(1)) * UNITS[found.group(2).upper()])
