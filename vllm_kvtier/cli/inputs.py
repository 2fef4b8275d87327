"""What several commands take: prompts from files, the cluster's key; and errors told in words, with an exit status."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_kvtier.doctor.server import Prompt
from vllm_kvtier.errors import KVTierError

Key = Annotated[Path | None, typer.Option("--cluster-key", help="The engines' cluster_key_file, if they have one.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt", help="A file with a prompt's text.", exists=True, dir_okay=False)
]
MessagesFile = Annotated[
    Path | None,
    typer.Option(
        "--messages", help="A JSON file with a chat's messages, or a whole chat request.", exists=True, dir_okay=False
    ),
]


def read_prompt(prompt: Path | None, messages: Path | None) -> Prompt | None:
    """Raises BadParameter for both, KVTierError for a file that is neither."""
    if prompt is not None and messages is not None:
        raise typer.BadParameter("give either --prompt or --messages")
    return read_file(prompt or messages, messages is not None) if prompt or messages else None


def read_file(file: Path, chat: bool) -> Prompt:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVTierError(f"{file} cannot be read: {error}") from error
    if not chat:
        return text
    try:
        found = json.loads(text)
    except ValueError as error:
        raise KVTierError(f"{file} is no JSON: {error}") from error
    found = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise KVTierError(f'{file} holds no messages: a list like [{{"role": "user", "content": "..."}}], or a request')
    return found


@contextmanager
def errors_in_words(code: int = 1) -> Iterator[None]:
    try:
        yield
    except KVTierError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        raise typer.Exit(code) from error
