"""``kvtier inspect``: how much of a prompt lies where, without computing or moving anything."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor.endpoint import EndpointProbe, NoEndpoint, Starting
from vllm_kvtier.doctor.server import Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import ClusterKey

_BAR = 40  # characters
_TOKENIZE_SECONDS = 60.0
PLACES = {"gpu_cache_tokens": "its GPU's cache", "exported_tokens": "exported", "stored_tokens": "node store"}

ServerUrl = Annotated[str, typer.Option("--server", help="A vLLM server, http://HOST:PORT: tokenizes the prompt.")]
Endpoints = Annotated[
    list[str],
    typer.Option("--endpoint", help="HOST:PORT of an engine's connector ('answers on' in its log); repeatable."),
]
Salt = Annotated[str, typer.Option("--cache-salt", help="The cache_salt that requests with this prompt carry.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def inspect(
    server: ServerUrl,
    endpoint: Endpoints,
    prompt: inputs.PromptFile = None,
    messages: inputs.MessagesFile = None,
    cache_salt: Salt = "",
    cluster_key: inputs.Key = None,
    as_json: AsJson = False,
) -> None:
    """How long a prefix of a prompt lies where: in each engine's GPU cache, exported, in its node store.

    A block of the node store that is on disk only does not count: `kvtier warm` brings it up. Exit status: 0, or 1 if
    the prompt could not be tokenized or no engine answered.
    """
    with inputs.errors_in_words():
        text = inputs.read_prompt(prompt, messages)
        if text is None:
            raise typer.BadParameter("give --prompt or --messages")
        key = ClusterKey.load(str(cluster_key)) if cluster_key else None
        tokens = Server(server, _TOKENIZE_SECONDS).tokenize(text)
        engines = [look_up(address, tokens, cache_salt, key) for address in endpoint]
    found = {"prompt_tokens": len(tokens), "engines": engines}
    if as_json:
        print(json.dumps(found))
    else:
        show(found, Console())
    raise typer.Exit(int(all("unknown" in engine for engine in engines)))


def look_up(address: str, tokens: list[int], salt: str, key: ClusterKey | None) -> dict:
    """``unknown``: why it did not say, in place of numbers."""
    try:
        with EndpointProbe(address, key, 5.0) as probe:
            holding = probe.holding(tokens, salt)
            try:
                block = probe.identity().block_tokens
            except (NoEndpoint, Starting):
                block = 0
    except KVTierError as error:
        return {"endpoint": address, "unknown": str(error)}
    return {
        "endpoint": address,
        "block_tokens": block,
        "gpu_cache_tokens": holding.gpu_cache,
        "exported_tokens": holding.exported,
        "stored_tokens": holding.stored,
    }


def show(found: dict, console: Console) -> None:
    length = found["prompt_tokens"]
    table = Table(box=None, title=f"{length:,} tokens", title_justify="left", pad_edge=False)
    for name, justify in (("engine", "left"), ("place", "left"), ("tokens", "right"), ("of the prompt", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "engine")
    for engine in found["engines"]:
        if "unknown" in engine:
            table.add_row(engine["endpoint"], Text(engine["unknown"], style="yellow"))
            continue
        for number, (name, place) in enumerate(PLACES.items()):
            full = round(_BAR * engine[name] / length) if length else 0
            bar = Text.assemble(("█" * full, "green"), ("░" * (_BAR - full), "dim"))
            table.add_row("" if number else engine["endpoint"], place, f"{engine[name]:,}", bar)
    console.print(table)


def add_to(app: typer.Typer) -> None:
    app.command("inspect")(inspect)
