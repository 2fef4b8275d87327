"""``kvtier pin``, ``unpin`` and ``warm``: keep a prompt's KV in the node store, or have it come up from below.

The engine knows how a prompt becomes blocks (its tokenizer, its hashes); it is asked for both, and tells the store.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvtier.doctor.server import Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.client import AsyncEndpointClient, PeerRefused

TOKENIZE_SECONDS = 60.0

ServerUrl = Annotated[str, typer.Option("--server", help="The vLLM server, as http://HOST:PORT: tokenizes the prompt.")]
Endpoint = Annotated[
    str, typer.Option("--endpoint", help="HOST:PORT of the same engine's connector (option endpoint_port, or its log).")
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="The text.")]
File = Annotated[Path | None, typer.Option("--file", help="A file with the text.", exists=True, dir_okay=False)]
Salt = Annotated[str, typer.Option("--cache-salt", help="The cache_salt that requests with this prompt carry.")]
Key = Annotated[Path | None, typer.Option("--cluster-key", help="The engines' cluster_key_file, if they have one.")]


def tokenize(server: str, text: str) -> list[int]:
    """Token ids of ``text`` as the server's completions see it. Raises KVTierError with the server's words."""
    return Server(server, TOKENIZE_SECONDS).tokenize(text)


async def keep(endpoint: str, tokens: list[int], salt: str, pinned: bool | None, key: Path | None = None) -> int:
    """Blocks whose state changed; ``pinned`` None: that are looked for below the store's memory.

    Raises KVTierError if the engine does not answer or has no store.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise KVTierError(f"{endpoint!r} is not HOST:PORT")
    try:
        async with AsyncEndpointClient(ClusterKey.load(str(key)) if key else None) as client:
            if pinned is None:
                kept = await client.warm(host, int(port), tokens, salt)
            else:
                kept = await client.keep(host, int(port), tokens, salt, pinned)
    except (PeerRefused, TimeoutError) as error:
        raise KVTierError(f"{endpoint} did not do it: {error or 'no answer in time'}") from error
    if kept.reason:
        raise KVTierError(f"{endpoint}: {kept.reason}")
    return kept.blocks


_DONE = {True: "pinned", False: "no longer pinned", None: "looked for"}


def _run(
    pinned: bool | None, server: str, endpoint: str, prompt: str | None, file: Path | None, salt: str, key: Path | None
) -> None:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file")
    try:
        tokens = tokenize(server, prompt if prompt is not None else file.read_text())
        blocks = asyncio.run(keep(endpoint, tokens, salt, pinned, key))
    except KVTierError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{blocks} blocks of {len(tokens)} tokens are {_DONE[pinned]}")


def pin(
    server: ServerUrl, endpoint: Endpoint, prompt: Prompt = None, file: File = None, cache_salt: Salt = "",
    cluster_key: Key = None,
) -> None:  # fmt: skip
    """Keep what the node store has of a prompt from being evicted."""
    _run(True, server, endpoint, prompt, file, cache_salt, cluster_key)


def unpin(
    server: ServerUrl, endpoint: Endpoint, prompt: Prompt = None, file: File = None, cache_salt: Salt = "",
    cluster_key: Key = None,
) -> None:  # fmt: skip
    """Let it be evicted again."""
    _run(False, server, endpoint, prompt, file, cache_salt, cluster_key)


def warm(
    server: ServerUrl, endpoint: Endpoint, prompt: Prompt = None, file: File = None, cache_salt: Salt = "",
    cluster_key: Key = None,
) -> None:  # fmt: skip
    """Bring what the node store has of a prompt on disk, in an object store or on other nodes up into its memory."""
    _run(None, server, endpoint, prompt, file, cache_salt, cluster_key)


def add_to(app: typer.Typer) -> None:
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("warm")(warm)
