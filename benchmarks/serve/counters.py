"""What engines count of themselves at /metrics: read before and after, by engine."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import aiohttp

from .targets import Target

_SAMPLE = re.compile(r"^(vllm:\w+_total|vllm:kvtier_\w+_(?:sum|count))(?:\{([^}]*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_THE_SERVER = {"engine", "model_name"}  # labels that every sample has
SOURCES = {
    "computed": 'vllm:prompt_tokens_by_source_total{source="local_compute"}',
    "local": 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
    "external": 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
}
# Where the connector says that its tokens came from: the store (loaded), or other engines.
_KVTIER_TOKENS = re.compile(r'vllm:kvtier_(loaded|\w*(?:pulled|fetched)\w*)_tokens_total(?:\{kind="(\w*)"\})?$')
_MORE = re.compile(
    r"vllm:(kvtier_|kv_offload|lmcache|prefix_cache_|external_prefix_cache_|num_preemptions|generation_tokens|"
    r"prompt_tokens)"
)

# engine -> sample with the labels that tell it from others -> value
Counts = dict[str, dict[str, float]]


class NoMetrics(RuntimeError):
    """A server has no /metrics, or does not give them."""


def parse(text: str, name: str, rank: int | None = None) -> Counts:
    """Counters out of the text of /metrics. A server with several engines has one entry each; asked for one ``rank``,
    that alone. ``name``: the target's, which becomes the engine's."""
    found: Counts = defaultdict(dict)
    for sample, labels, value in _SAMPLE.findall(text):
        pairs = dict(_LABEL.findall(labels))
        engine = pairs.get("engine", "0")
        if rank is not None and engine != str(rank):
            continue
        rest = ",".join(f'{key}="{value}"' for key, value in sorted(pairs.items()) if key not in _OF_THE_SERVER)
        full = f"{sample}{{{rest}}}" if rest else sample
        where = name if rank is not None or engine == "0" else f"{name}.{engine}"
        found[where][full] = found[where].get(full, 0.0) + float(value)
    return dict(found)


async def read(session: aiohttp.ClientSession, targets: Sequence[Target]) -> Counts:
    """Raises NoMetrics where one does not answer."""
    found: Counts = {}
    for target in targets:
        url = f"{target.base_url}/metrics"
        try:
            async with session.get(url) as response:
                if response.status != 200:
                    raise NoMetrics(f"{url} answered {response.status}")
                found |= parse(await response.text(), target.name, target.rank)
        except (aiohttp.ClientError, OSError) as error:
            raise NoMetrics(f"{url}: {type(error).__name__}: {error}") from error
    return found


async def gauge(session: aiohttp.ClientSession, target: Target, name: str) -> float:
    """The least of this name over a server's engines; 0 if there is none. Raises NoMetrics."""
    url = f"{target.base_url}/metrics"
    async with session.get(url) as response:
        if response.status != 200:
            raise NoMetrics(f"{url} answered {response.status}")
        text = await response.text()
    return min((float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)), default=0.0)


def difference(before: Counts, after: Counts) -> Counts:
    """What was counted in between, without what stayed. A counter that fell is an engine that was started anew."""
    out: Counts = {}
    for engine, samples in after.items():
        earlier = before.get(engine, {})
        changes = {name: value - earlier.get(name, 0.0) for name, value in samples.items()}
        out[engine] = {
            name: samples[name] if change < 0 else change
            for name, change in changes.items()
            if change and _MORE.match(name)
        }
    return out


def total(counts: Counts) -> dict[str, float]:
    """Over all engines."""
    out: dict[str, float] = defaultdict(float)
    for samples in counts.values():
        for name, value in samples.items():
            out[name] += value
    return dict(out)


def tokens(samples: Mapping[str, float]) -> dict[str, float]:
    """Prompt tokens by source: computed, local (its own prefix cache), external (the connector's); of the last, what
    the connector says of it: ``loaded`` from the store, ``pulled:KIND`` and the like from other engines. ``hit_rate``:
    share that was not computed."""
    found = {name: int(samples.get(sample, 0)) for name, sample in SOURCES.items()}
    every = sum(found.values())
    out: dict[str, float] = {**found, "hit_rate": round(1 - found["computed"] / every, 4) if every else 0.0}
    for sample, value in samples.items():
        if (match := _KVTIER_TOKENS.match(sample)) and value:
            out[":".join(filter(None, match.groups()))] = int(value)
    return out
