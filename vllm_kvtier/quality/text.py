"""Text to measure on, cut into windows of tokens."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm_kvtier
from vllm_kvtier.errors import KVTierError

SUFFIXES = {".py", ".txt", ".md", ".json", ".c", ".cpp", ".h", ".go", ".rs", ".js", ".ts", ".java"}
OWN_SOURCE = "vllm-kvtier's own source"


def read(paths: Sequence[Path]) -> tuple[str, str]:
    """(name, text) of files and directories, in the order of their names.

    Without any: the source of this package, which is present and unknown to older models. Raises KVTierError for a path
    that does not exist or is not text.
    """
    name = ", ".join(path.name for path in paths) if paths else OWN_SOURCE
    files: list[Path] = []
    for path in paths or [Path(vllm_kvtier.__file__).parent]:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.suffix in (SUFFIXES if paths else {".py"}))
        else:
            files.append(path)
    try:
        return name, "\n".join(file.read_text("utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise KVTierError(f"the text cannot be read: {error}") from error


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without the special tokens that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def windows(tokenizer: Any, ids: Sequence[int], count: int, size: int) -> list[list[int]]:
    """At most ``count`` windows of ``size`` tokens, evenly spread over the text, each with the beginning that the
    tokenizer gives to a text (<bos>, where the model has one).

    Raises KVTierError for a text of less than one window.
    """
    start = tokenizer("")["input_ids"]
    fresh = size - len(start)
    whole = len(ids) // fresh
    if not whole:
        raise KVTierError(f"the text has {len(ids)} tokens, a window takes {fresh}: give more, or shorter windows")
    count = min(count, whole)
    return [start + list(ids[(at := i * whole // count * fresh) : at + fresh]) for i in range(count)]
