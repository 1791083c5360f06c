"""Text to token ids: any Hugging Face tokenizer, a tiktoken encoding, or plain bytes. No PyTorch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from caudex.trace.errors import TraceError
from caudex.trace.render import CHATML_MARKERS, TemplateRenderer, load_template

TokenArray: TypeAlias = npt.NDArray[np.int32]

BYTES_PER_TOKEN = 4
TIKTOKEN_NAMES = frozenset(
    {"o200k_base", "o200k_harmony", "cl100k_base", "p50k_base", "r50k_base", "p50k_edit", "gpt2"}
)


class Tokenizer(Protocol):
    """Encodes texts in parallel. `markers` are the strings that always stand alone as tokens: text may be cut at them
    and encoded piece by piece with the same result. `prefix` starts every prompt that no template has rendered."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def prefix(self) -> TokenArray: ...

    def encode_batch(self, texts: list[str]) -> list[TokenArray]: ...

    def decode(self, tokens: TokenArray) -> str: ...


class BytesTokenizer:
    """Needs nothing: a token is four bytes of UTF-8, about what a trained vocabulary makes of English text.

    Prefixes match to within four bytes, so hit *rates* come close to a real tokenizer's; token *counts* are rough, and
    for other scripts and for code they are off by up to half.
    """

    name = "bytes"
    description = "bytes (4 bytes of UTF-8 stand for a token: rates are close, counts are approximate)"
    markers = CHATML_MARKERS
    prefix: TokenArray = np.zeros(0, dtype=np.int32)

    def encode_batch(self, texts: list[str]) -> list[TokenArray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenArray:
        data = text.encode("utf-8", "surrogatepass")
        data += b"\0" * (-len(data) % BYTES_PER_TOKEN)
        return np.frombuffer(data, dtype=np.int32)

    def decode(self, tokens: TokenArray) -> str:
        return tokens.tobytes().replace(b"\0", b"").decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, through the tokenizers library."""

    def __init__(self, file: Path, name: str) -> None:
        try:
            from tokenizers import Tokenizer as Compiled
        except ImportError:
            raise TraceError("a Hugging Face tokenizer needs the package: pip install 'caudex[analyze]'") from None
        self._compiled: Any = Compiled.from_file(str(file))
        self._compiled.no_truncation()
        self._compiled.no_padding()
        self.name = name
        self.description = f"{name} ({self._compiled.get_vocab_size()} tokens)"
        added = self._compiled.get_added_tokens_decoder().values()
        self.markers = tuple(
            token.content
            for token in added
            if token.special and not (token.lstrip or token.rstrip or token.single_word)
        )
        self.prefix = np.asarray(self._compiled.encode("").ids, dtype=np.int32)

    def encode_batch(self, texts: list[str]) -> list[TokenArray]:
        encodings = self._compiled.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, tokens: TokenArray) -> str:
        return str(self._compiled.decode(tokens.tolist(), skip_special_tokens=False))


class TiktokenTokenizer:
    """One of OpenAI's encodings, or of an installed plug-in's, by its name."""

    def __init__(self, name: str) -> None:
        try:
            import tiktoken
        except ImportError:
            raise TraceError(f"the encoding {name} needs tiktoken: pip install 'caudex[analyze]'") from None
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:
            raise TraceError(f"tiktoken cannot load {name} (it fetches it once, then caches it): {error}") from None
        self.name = name
        self.description = f"tiktoken {name}"
        self.markers = CHATML_MARKERS
        self.prefix = np.zeros(0, dtype=np.int32)

    def encode_batch(self, texts: list[str]) -> list[TokenArray]:
        encoded = self._encoding.encode_ordinary_batch(texts, num_threads=4)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def decode(self, tokens: TokenArray) -> str:
        return self._encoding.decode(tokens.tolist())


def load_tokenizer(name: str, chat_template: str | Path | None = None) -> tuple[Tokenizer, TemplateRenderer | None]:
    """A tokenizer and its chat template, from `bytes`, a tiktoken encoding, a folder, a tokenizer.json, the name of a
    model that `caudex serve` has converted, or a hub id.

    Raises:
        TraceError: there is no such tokenizer, or what reads it is not installed.
    """
    folder = Path(name)
    if name == "bytes" or name in TIKTOKEN_NAMES or _is_registered_with_tiktoken(name):
        tokenizer: Tokenizer = BytesTokenizer() if name == "bytes" else TiktokenTokenizer(name)
        return tokenizer, None if chat_template is None else load_template(Path("."), chat_template)
    if folder.is_file():
        file, folder = folder, folder.parent
    else:
        if not folder.is_dir():
            folder = _converted(name) or _from_hub(name)
        file = folder / "tokenizer.json"
    if not file.exists():
        raise TraceError(
            f"{folder} has no tokenizer.json; transformers' save_pretrained of a fast tokenizer writes one"
        )
    try:
        return HuggingFaceTokenizer(file, Path(name).name or folder.name), load_template(folder, chat_template)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{file} is no tokenizer: {error}") from None


def _is_registered_with_tiktoken(name: str) -> bool:
    """Whether this is an encoding of an installed `tiktoken_ext` plug-in."""
    if not re.fullmatch(r"[\w.-]+", name) or Path(name).exists():
        return False
    try:
        import tiktoken
    except ImportError:
        return False
    return name in tiktoken.list_encoding_names()


def _converted(name: str) -> Path | None:
    """The newest copy of a model that `caudex serve` converted from GGUF, by the model's name or hub id."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    wanted = re.compile(rf"{re.escape(name.rsplit('/', 1)[-1])}(\..*)?-[0-9a-f]{{12}}", re.IGNORECASE)
    found = [file.parent for file in Path(base, "caudex", "models").glob("*/tokenizer.json")]
    return max(
        (folder for folder in found if wanted.fullmatch(folder.name)), key=lambda f: f.stat().st_mtime, default=None
    )


def _from_hub(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise TraceError(
            f"no tokenizer at {name!r}: give a folder, a tokenizer.json, a hub id, a tiktoken name or `bytes`"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise TraceError(
            f"{name!r} is no folder here, and fetching it needs huggingface_hub (pip install it)"
        ) from None
    wanted = ["tokenizer.json", "tokenizer_config.json", "chat_template.*", "special_tokens_map.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise TraceError(f"{name!r} is no folder here and could not be fetched: {error}") from None
