"""``kvtier inspect``: the prefix of a prompt that each tier has, and why blocks are missing. It moves nothing."""

import json
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_kvtier.cli import inputs
from vllm_kvtier.doctor import removal_text
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe
from vllm_kvtier.doctor.report import duration
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Explanation

_BAR_CHARS, _MIN_BAR_CHARS = 40, 8  # characters of a bar; a shorter one is not drawn
_OTHER_CHARS = 40  # characters
_MAX_SPANS = 12  # shown of one engine
_TIERS = {"nodes": "other nodes", "object": "the object store", "mooncake": "the Mooncake cluster"}

Endpoints = Annotated[
    list[str],
    typer.Option("--endpoint", help="HOST:PORT of an engine's connector ('answers on' in its log); repeatable."),
]
Adapter = Annotated[str, typer.Option("--adapter", help="Name of the LoRA adapter of these requests.")]


def inspect(
    server: inputs.ServerUrl,
    endpoint: Endpoints,
    prompt: inputs.PromptFile = None,
    messages: inputs.MessagesFile = None,
    cache_salt: inputs.Salt = "",
    salt_secret: inputs.SaltSecret = None,
    tenant: inputs.Tenant = "",
    adapter: Adapter = "",
    cluster_key: inputs.Key = None,
    as_json: inputs.AsJson = False,
) -> None:
    """Show for each engine which prefix of a prompt is in its GPU cache, exported, in peers, in the node store's tiers.

    Also why blocks are missing (evicted, cleared, never stored) and whether the engine would load what is cached.
    Computes and moves nothing. Exit status: 0, or 1 if the prompt could not be tokenized or no engine answered.
    `kvtier doctor` with the same options says what to do.
    """
    with inputs.errors_as_messages():
        text = inputs.read_prompt(prompt, messages)
        if text is None:
            raise typer.BadParameter("give --prompt or --messages")
        key = ClusterKey.load(str(cluster_key)) if cluster_key else None
        tokens = inputs.tokenize(server, text)
        salt = inputs.salt_of(cache_salt, salt_secret, tenant)
        engines = [(address, look_up(address, tokens, salt, adapter, key)) for address in endpoint]
    if as_json:
        answers = [as_object(address, found) for address, found in engines]
        print(json.dumps({"prompt_tokens": len(tokens), "engines": answers}))
    else:
        console = Console(highlight=False)
        console.print(f"{len(tokens):,} tokens")
        for address, found in engines:
            show(address, found, console)
    raise typer.Exit(int(all(isinstance(found, str) for _, found in engines)))


def look_up(address: str, tokens: list[int], salt: str, adapter: str, key: ClusterKey | None) -> Explanation | str:
    """The engine's answer, or as a string why there is none."""
    try:
        with EndpointProbe(address, key, 5.0) as probe:
            return probe.explanation(tokens, salt, adapter)
    except KVTierError as error:
        return str(error)


def as_object(address: str, found: Explanation | str) -> dict:
    if isinstance(found, str):
        return {"endpoint": address, "unknown": found}
    return {
        "endpoint": address, "block_tokens": found.hash_block_size, "gpu_cache_tokens": found.gpu_cache,
        "exported_tokens": found.exported, "stored_tokens": found.stored,
        "peers": [{"endpoint": each.name, "tokens": each.tokens} for each in found.peers],
        "tiers": msgspec.to_builtins(found.tiers),
        "store_seconds": found.store_seconds, "history_seconds": found.history_seconds,
        "spans": [
            {
                "group": each.group, "start": each.start, "end": each.end, "tier": each.tier,
                "removal_reason": removal_text.key(each),
                "newest_seconds": each.newest, "oldest_seconds": each.oldest,
            }
            for each in found.spans
        ],
        "load_decisions": msgspec.to_builtins(found.load_decisions), "problem": found.problem,
        "namespace": found.namespace,
    }  # fmt: skip


def show(address: str, found: Explanation | str, console: Console) -> None:
    console.print(Text(f"\n{address}", style="bold"))
    if isinstance(found, str):
        console.print(Text(found, style="yellow"), soft_wrap=True)
        return
    bar = max(0, min(_BAR_CHARS, console.width - _OTHER_CHARS))
    table = Table(box=None, pad_edge=False)
    table.add_column("tier", no_wrap=True, overflow="ellipsis")
    table.add_column("tokens", justify="right", no_wrap=True)
    if bar >= _MIN_BAR_CHARS:
        table.add_column("of the prompt", no_wrap=True)
    tiers = list(_tiers(found))
    for tier, tokens, note in tiers:
        full = round(bar * min(1.0, (tokens or 0) / found.prompt)) if found.prompt else 0
        drawn = Text.assemble(("█" * full, "green"), ("░" * (bar - full), "dim"))
        cells = Text(tier), "?" if tokens is None else f"{tokens:,}", Text(note, style="yellow") if note else drawn
        table.add_row(*cells[: len(table.columns)])
    console.print(table)
    for line in _missing(found):
        console.print(line, soft_wrap=True)
    if not any(tokens for _, tokens, _ in tiers):
        console.print(Text(f"  ({removal_text.ABOUT_SALTS})", style="dim"), soft_wrap=True)
    for each in found.load_decisions:
        console.print(f"  it would {removal_text.decision(each)}", soft_wrap=True, markup=False)
    if found.namespace:
        text = f"  namespace {found.namespace} (for `kvtier clear --namespace`)"
        console.print(Text(text, style="dim"), soft_wrap=True)
    if found.problem:
        console.print(Text(f"  {found.problem}", style="yellow"), soft_wrap=True)


def _tiers(found: Explanation) -> Iterator[tuple[str, int | None, str]]:
    """(tier, tokens of its longest prefix or None if not known, a note to show instead of a bar)."""
    yield "GPU cache", found.gpu_cache, ""
    yield "exported", found.exported, ""
    for peer in found.peers:
        yield f"peer {peer.name}", peer.tokens, ""
    yield "store memory", found.stored, ""
    for tier in found.tiers:
        note = "" if tier.state in ("", "ready") else f"{tier.state}: {tier.reason}"
        if note or tier.tokens is not None:
            yield f"with {_TIERS.get(tier.name, tier.name)}", tier.tokens, note


def _missing(found: Explanation) -> Iterator[Text]:
    """A line for each span that is not in memory, in order."""
    gaps = removal_text.missing(found, 0, found.prompt)
    for each in gaps[:_MAX_SPANS]:
        group = f" of KV cache group {each.group}" if len({span.group for span in found.spans}) > 1 else ""
        tokens = f"tokens {each.start:,} to {min(each.end, found.prompt):,}{group}"
        yield Text(f"  {tokens}: {removal_text.short(each)}", style="dim" if each.tier else "yellow")
    if len(gaps) > _MAX_SPANS:
        yield Text(f"  and {len(gaps) - _MAX_SPANS} more spans (--json lists them)", style="dim")
    never = any(removal_text.key(each) == removal_text.NEVER_STORED for each in gaps)
    if never and found.history_seconds < found.store_seconds:
        known = duration(found.history_seconds)
        yield Text(f"  (the store's history of removals covers the last {known})", style="dim")
