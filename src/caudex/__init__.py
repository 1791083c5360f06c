"""Prefix caching for LLM inference, from one block to a fleet."""

from importlib.metadata import version as _version

__version__ = _version("caudex")
