"""Prefix caching for LLM inference, from one block to a fleet."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import Any as _Any

__version__ = _version("caudex")

_LAZY = {"analyze": "caudex.analysis.analyze"}
"""Attribute -> the module that is imported when it is first asked for, so that `import caudex` stays light."""


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'caudex' has no attribute {name!r}")
    return getattr(_import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
