"""``kvtier pin``, ``unpin`` and ``warm``: keep a prompt's KV in the node store, or promote it to the store's memory.

The engine tokenizes and hashes the prompt, and sends the request to the store.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor.engines.endpoint import parse_address
from vllm_kvtier.doctor.removal_text import ABOUT_SALTS
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.client import AsyncEndpointClient, PeerRefused

Endpoint = Annotated[
    str, typer.Option("--endpoint", help="HOST:PORT of the same engine's connector ('answers on' in its log).")
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="The prompt's text.")]
File = Annotated[Path | None, typer.Option("--file", help="A file with the text.", exists=True, dir_okay=False)]


_NOT_STORED = (
    "none of its {} tokens is in the store's memory. Is it the prompt as requests have it: a chat's with --messages "
    "(its template adds tokens), with its --cache-salt? `kvtier inspect` with the same prompt shows what each tier has"
    f"; {ABOUT_SALTS}"
)


async def _request(endpoint: str, tokens: list[int], salt: str, pinned: bool | None, key: Path | None) -> int:
    """Pin or unpin; with ``pinned`` None promote. Returns the number of blocks that changed, or whose promotion began.

    Raises KVTierError if the engine does not answer or has no store, or if the store has none of the blocks to pin or
    unpin.
    """
    host, port = parse_address(endpoint)
    stored = True
    try:
        async with AsyncEndpointClient(ClusterKey.load(str(key)) if key else None) as client:
            if pinned is None:
                result = await client.warm(host, port, tokens, salt)
            else:
                result = await client.keep(host, port, tokens, salt, pinned)
                if not result.blocks:
                    stored = (await client.query(host, port, tokens, salt)).stored > 0
    except (PeerRefused, TimeoutError) as error:
        raise KVTierError(f"{endpoint}: {error}") from error
    if result.reason or not stored:
        raise KVTierError(f"{endpoint}: {result.reason or _NOT_STORED.format(len(tokens))}")
    return result.blocks


def _command(pinned: bool | None, done: str, text: str) -> Callable[..., None]:
    def run(
        server: inputs.ServerUrl,
        endpoint: Endpoint,
        prompt: Prompt = None,
        file: File = None,
        messages: inputs.MessagesFile = None,
        cache_salt: inputs.Salt = "",
        salt_secret: inputs.SaltSecret = None,
        tenant: inputs.Tenant = "",
        cluster_key: inputs.Key = None,
    ) -> None:
        if sum(given is not None for given in (prompt, file, messages)) != 1:
            raise typer.BadParameter("give one of --messages, --prompt and --file")
        with inputs.errors_as_messages():
            asked = prompt if prompt is not None else inputs.read_prompt(file, messages)
            assert asked is not None
            tokens = inputs.tokenize(server, asked)
            salt = inputs.salt_of(cache_salt, salt_secret, tenant)
            blocks = asyncio.run(_request(endpoint, tokens, salt, pinned, cluster_key))
        typer.echo(f"{blocks} blocks of {len(tokens)} tokens are {done}")

    run.__doc__ = text
    return run


pin = _command(True, "pinned", "Pin the blocks of a prompt that the node store has: they are not evicted.")
unpin = _command(False, "unpinned", "Unpin the blocks of a prompt.")
warm = _command(
    None,
    "looked up; those that a tier has are promoted",
    "Promote a prompt's blocks from disk, an object store or other nodes to the node store's memory.",
)
