"""Every metric in a table: what an engine, the node store and the proxy export.

    python -m vllm_kvtier.telemetry.table > docs/metrics.md

Made from the tables that the metrics themselves are made from. ``families`` is for tests and tools.
"""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from vllm_kvtier.proxy import metrics as proxy
from vllm_kvtier.store import metrics as store
from vllm_kvtier.telemetry.stats import GAUGES, HISTOGRAMS, KINDS, MEANINGS

ENGINE = "vllm:kvtier_"
_SORTS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}

TEXT = """\
# Metrics

Made by `python -m vllm_kvtier.telemetry.table`; a test says when this file is no longer what the code exports.

Three places are scraped: each vLLM server's own `/metrics` (what its engines' connectors count is there without an
option), the node store with `--metrics-port` (engines that start it: `store_metrics_port`), and the proxy's `/metrics`.
[examples/grafana](../examples/grafana/README.md) has a configuration for Prometheus, a dashboard and alert rules.

A histogram `x` is three things: `x_bucket{{le=...}}`, `x_sum` and `x_count`. Times are in seconds.

## Engines

Labels: vLLM's `model_name` and `engine` (the rank in data parallelism), and `kind`, which says what a sample is of;
where there is nothing to tell apart it is empty. Loads are counted once, not once a rank; bytes are those of all ranks.
Numbers leave an engine with its steps: one that has nothing to do says what was so after its last.

Every request that comes to be computed is counted in `hits` or in `misses`, once; one that ends before that, in
neither. What vLLM itself counts goes on beside it, among others `vllm:prompt_tokens_by_source_total` and
`vllm:external_prefix_cache_hits_total`.

{engine}

vLLM's log line says the essentials of ten seconds, where something happened: prompt tokens by source
(`host_tokens=...`), bandwidth, median and longest of loads, fetches and pulls (`load_GB/s`, `load_p50_ms`,
`load_max_ms`), what was stored (`stored_MB`), how far the planner was off (`taken/expected`, 1 is right), and failures.

## Node store

{store}

A tier that is younger than these tables shows its own numbers as `kvtier_store_tier_...` without a type.

## Proxy

{proxy}
"""


class Family(NamedTuple):
    """``name``: as in a query, a histogram's without its suffixes. ``labels``: in words."""

    name: str
    sort: str
    labels: str
    meaning: str


def families() -> dict[str, list[Family]]:
    """By where they are: engine, store, proxy."""
    return {"engine": list(_engine()), "store": list(_store()), "proxy": list(_proxy())}


def _engine() -> Iterator[Family]:
    for name, meaning in MEANINGS.items():
        yield Family(f"{ENGINE}{name}_total", "counter", _kinds(name, meaning), _sentence(meaning))
    for name, (meaning, _) in HISTOGRAMS.items():
        yield Family(ENGINE + name, "histogram", _kinds(name, meaning), _sentence(meaning))
    for name, meaning in GAUGES.items():
        yield Family(ENGINE + name, "gauge", _kinds(name, meaning), _sentence(meaning))


def _kinds(name: str, meaning: str) -> str:
    if name in KINDS:
        return "`kind`: " + ", ".join(KINDS[name])
    if " by reason" in meaning or "by the reason" in meaning:
        return "`kind`: the reason"
    if " by place" in meaning:
        return "`kind`: the place"
    return "`kind`: the codec" if "codec" in meaning else ""


def _store() -> Iterator[Family]:
    found: dict[str, Family] = {}

    def add(shown: store.Shown, sort: str, labels: tuple[str, ...] = ()) -> None:
        name = store.PREFIX + shown.name + ("_total" if sort == "counter" else "")
        own = [f"`{key}`: {value}" for key, value in shown.labels.items()]
        if name in found:  # one of several that differ in a label's value
            value = next(iter(shown.labels.values()))
            found[name] = found[name]._replace(labels=f"{found[name].labels}, {value}")
            return
        words = ", ".join([*(f"`{label}`" for label in labels), *own])
        found[name] = Family(name, sort, words, _sentence(shown.meaning))

    add(store.RESPONDING, "gauge")
    add(store.INFO, "info", ("version", "instance", "policy", "pid", "huge_pages"))
    for table, labels in (
        (store.STORE, ()), (store.INDEX, ()), (store.DIRECTORY, ()), (store.TIER, ("tier",)), (store.EXTRA, ("tier",)),
    ):  # fmt: skip
        for shown in table.values():
            add(shown, "counter" if shown.counter else "gauge", labels)
    add(store.CLIENTS, "gauge", ("kind",))
    add(store.TIER_UP, "gauge", ("tier",))
    add(store.TIER_STATE, "gauge", ("tier", "state"))
    add(store.TIER_SECONDS, "histogram", ("tier", "kind"))
    add(store.HANDLING, "histogram", ("message",))
    yield from found.values()


def _proxy() -> Iterator[Family]:
    for name, shown in proxy.SHOWN.items():
        sort = _SORTS[shown.sort]
        labels = ", ".join(f"`{label}`" for label in shown.labels)
        yield Family(
            proxy.PREFIX + name + ("_total" if sort == "counter" else ""), sort, labels, _sentence(shown.meaning)
        )


def _sentence(meaning: str) -> str:
    """As the tables have it, with a capital and a full stop, and nothing that would end a cell."""
    text = meaning[:1].upper() + meaning[1:]
    return text.replace("|", "\\|").rstrip(".") + "."


def _table(found: list[Family]) -> str:
    rows = [f"| `{each.name}` | {each.sort} | {each.labels} | {each.meaning} |" for each in found]
    return "\n".join(["| Name | Type | Labels | Meaning |", "| --- | --- | --- | --- |", *rows])


def page() -> str:
    """The text of docs/metrics.md."""
    return TEXT.format(**{place: _table(found) for place, found in families().items()})


if __name__ == "__main__":
    print(page(), end="")
