"""``kvtier inspect``: what of a prompt is where and what became of the rest, without computing or moving anything."""

import json
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor import ends
from vllm_kvtier.doctor.endpoint import EndpointProbe
from vllm_kvtier.doctor.report import duration
from vllm_kvtier.doctor.server import Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Explanation

_BAR, _LEAST = 40, 8  # characters of a bar, and of one that is drawn at all
_BESIDE = 40  # of what stands beside it
_MOST = 12  # stretches of an engine that are shown
_TOKENIZE_SECONDS = 60.0
_TIERS = {"nodes": "other nodes", "object": "the object store"}

ServerUrl = Annotated[str, typer.Option("--server", help="A vLLM server, http://HOST:PORT: tokenizes the prompt.")]
Endpoints = Annotated[
    list[str],
    typer.Option("--endpoint", help="HOST:PORT of an engine's connector ('answers on' in its log); repeatable."),
]
Salt = Annotated[str, typer.Option("--cache-salt", help="The cache_salt that requests with this prompt carry.")]
Adapter = Annotated[str, typer.Option("--adapter", help="The LoRA adapter's name, if requests with it are meant.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def inspect(
    server: ServerUrl,
    endpoint: Endpoints,
    prompt: inputs.PromptFile = None,
    messages: inputs.MessagesFile = None,
    cache_salt: Salt = "",
    adapter: Adapter = "",
    cluster_key: inputs.Key = None,
    as_json: AsJson = False,
) -> None:
    """What of a prompt is where, for each engine: its GPU cache, exported, lent by others, its node store, below it.

    And what became of the rest: evicted, cleared, never stored; and whether the engine would load what there is. It
    only looks: nothing is computed or moved. Exit status: 0, or 1 if the prompt could not be tokenized or no engine
    answered. `kvtier doctor` with the same options says what to do about it.
    """
    with inputs.errors_in_words():
        text = inputs.read_prompt(prompt, messages)
        if text is None:
            raise typer.BadParameter("give --prompt or --messages")
        key = ClusterKey.load(str(cluster_key)) if cluster_key else None
        tokens = Server(server, _TOKENIZE_SECONDS).tokenize(text)
        engines = [(address, look_up(address, tokens, cache_salt, adapter, key)) for address in endpoint]
    if as_json:
        told = [as_object(address, found) for address, found in engines]
        print(json.dumps({"prompt_tokens": len(tokens), "engines": told}))
    else:
        console = Console(highlight=False)
        console.print(f"{len(tokens):,} tokens")
        for address, found in engines:
            show(address, found, console)
    raise typer.Exit(int(all(isinstance(found, str) for _, found in engines)))


def look_up(address: str, tokens: list[int], salt: str, adapter: str, key: ClusterKey | None) -> Explanation | str:
    """Why it did not say, in place of its answer."""
    try:
        with EndpointProbe(address, key, 5.0) as probe:
            return probe.explanation(tokens, salt, adapter)
    except KVTierError as error:
        return str(error)


def as_object(address: str, found: Explanation | str) -> dict:
    if isinstance(found, str):
        return {"endpoint": address, "unknown": found}
    return {
        "endpoint": address,
        "block_tokens": found.unit,
        "gpu_cache_tokens": found.gpu_cache,
        "exported_tokens": found.exported,
        "stored_tokens": found.stored,
        "lent_by": [{"endpoint": each.name, "tokens": each.tokens} for each in found.engines],
        "tiers": [
            {"name": each.name, "state": each.state, "reason": each.reason, "tokens": each.tokens}
            for each in found.tiers
        ],
        "store_seconds": found.store_seconds,
        "known_seconds": found.known_seconds,
        "stretches": [
            {
                "group": each.group,
                "start": each.start,
                "end": each.end,
                "place": each.place,
                "fate": ends.key(each),
                "newest_seconds": each.newest,
                "oldest_seconds": each.oldest,
            }
            for each in found.stretches
        ],
        "weighed": msgspec.to_builtins(found.weighed),
        "problem": found.problem,
    }


def show(address: str, found: Explanation | str, console: Console) -> None:
    console.print(Text(f"\n{address}", style="bold"))
    if isinstance(found, str):
        console.print(Text(found, style="yellow"), soft_wrap=True)
        return
    bar = max(0, min(_BAR, console.width - _BESIDE))
    table = Table(box=None, pad_edge=False)
    table.add_column("place", no_wrap=True, overflow="ellipsis")
    table.add_column("tokens", justify="right", no_wrap=True)
    if bar >= _LEAST:
        table.add_column("of the prompt", no_wrap=True)
    for place, tokens, note in _places(found):
        full = round(bar * min(1.0, (tokens or 0) / found.prompt)) if found.prompt else 0
        drawn = (
            Text(note, style="yellow") if note else Text.assemble(("█" * full, "green"), ("░" * (bar - full), "dim"))
        )
        table.add_row(*[Text(place), "?" if tokens is None else f"{tokens:,}", drawn][: len(table.columns)])
    console.print(table)
    for line in _ends(found):
        console.print(line, soft_wrap=True)
    for each in found.weighed:
        console.print(f"  it would {ends.weighed(each)}", soft_wrap=True, markup=False)
    if found.problem:
        console.print(Text(f"  {found.problem}", style="yellow"), soft_wrap=True)


def _places(found: Explanation) -> Iterator[tuple[str, int | None, str]]:
    """(place, tokens of the longest prefix there, None: not known; what to say in place of a bar)."""
    yield "its GPU's cache", found.gpu_cache, ""
    yield "exported", found.exported, ""
    for engine in found.engines:
        yield f"lent by {engine.name}", engine.tokens, ""
    yield "node store's memory", found.stored, ""
    for tier in found.tiers:
        unwell = tier.state not in ("", "ready")
        name = _TIERS.get(tier.name, tier.name)
        if unwell:
            yield f"with {name}", tier.tokens, f"{tier.state}: {tier.reason}"
        elif tier.tokens is not None:
            yield f"with {name}", tier.tokens, ""


def _ends(found: Explanation) -> Iterator[Text]:
    """What is not in memory, in order; of a prompt that lies there whole, nothing."""
    gaps = [each for each in found.stretches if each.place != "memory"]
    for each in gaps[:_MOST]:
        group = (
            f" of KV cache group {each.group}" if any(other.group != each.group for other in found.stretches) else ""
        )
        style = "dim" if each.place else "yellow"
        yield Text(
            f"  tokens {each.start:,} to {min(each.end, found.prompt):,}{group}: {ends.short(each)}", style=style
        )
    if len(gaps) > _MOST:
        yield Text(f"  and {len(gaps) - _MOST} more stretches (--json lists them)", style="dim")
    if any(not each.place and not each.fate for each in gaps) and found.known_seconds < found.store_seconds:
        known = duration(found.known_seconds)
        yield Text(f"  (the store remembers what it gave up in the last {known}, no more)", style="dim")


def add_to(app: typer.Typer) -> None:
    app.command("inspect")(inspect)
