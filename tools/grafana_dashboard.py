#!/usr/bin/env python3
"""Write examples/grafana/kvtier.json, the dashboard, from the rows below.

usage: python tools/grafana_dashboard.py [FILE]

Here a panel is a line or two. A test compares the file with what this writes, and sends every query to a real
Prometheus.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "examples" / "grafana" / "kvtier.json"
WIDTH, HEIGHT = 24, 7  # Grafana's columns; of a panel

_E = 'instance=~"$instance",model_name=~"$model"'  # of an engine's metric
_S = 'instance=~"$instance"'  # of the store's and the proxy's
_R = "[$__rate_interval]"


def rate(name: str, by: str = "", more: str = "", where: str = "") -> str:
    """Per second, summed; ``by``: labels to keep. ``name`` begins with E. (engine), S. (store) or X. (proxy)."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric(name, more, where)}{_R}))"


def metric(name: str, more: str = "", where: str = "") -> str:
    owner, _, rest = name.partition(".")
    prefix, labels = {"E": ("vllm:kvtier_", _E), "S": ("kvtier_store_", _S), "X": ("kvtier_proxy_", _S)}[owner]
    return f"{prefix}{rest}{{{labels}{',' + more if more else ''}}}"


def total(name: str, by: str = "", more: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({metric(name, more)})"


def quantile(q: float, name: str, by: str = "", more: str = "") -> str:
    return f"histogram_quantile({q:g}, {rate(name + '_bucket', ', '.join(filter(None, ['le', by])), more)})"


def mean(name: str, by: str = "") -> str:
    return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"


class Panel(NamedTuple):
    """``queries``: {legend: PromQL}. ``unit``: Grafana's name. ``stack``: stacked areas."""

    title: str
    unit: str
    queries: dict[str, str]
    width: int = 8
    sort: str = "timeseries"
    stack: bool = False
    text: str = ""
    steps: tuple[tuple[str, float], ...] = ()  # of a stat: (colour, from which value on)


_TOKENS, _COMPUTED = rate("E.prompt_tokens_total"), rate("E.prompt_tokens_total", more='kind="local_compute"')
_BROUGHT = rate("E.prompt_tokens_total", more='kind!~"local_compute|local_cache_hit"')
_HITS, _MISSES = rate("E.hits_total"), rate("E.misses_total")
_TTFT = f"sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{{{_E}}}{_R}))"
_WRONG = metric("E.integrity_failures_total", 'kind="host"')
_M = 'tier="mooncake"'
_CLIENTS = 'route!~"/(health|ready|metrics)"'  # not those of monitoring
_NO_FAILURE = (("green", 0), ("red", 0.5))
_ALL_UP = (("red", 0), ("green", 1))


def stat(title: str, unit: str, query: str, text: str, steps: tuple[tuple[str, float], ...] = ()) -> Panel:
    return Panel(title, unit, {"": query}, 4, "stat", text=text, steps=steps)


ROWS: dict[str, list[Panel]] = {
    "Essentials": [
        stat("Prompt tokens not computed", "percentunit", f"1 - {_COMPUTED} / {_TOKENS}",
             "Share of prompt tokens whose KV was found, in the engine's prefix cache or in another source."),
        stat("Loaded by kvtier", "percentunit",
             f"{_BROUGHT} / {_TOKENS}",
             "Share that was loaded from a store, fetched from a peer's GPU, or pulled from another engine."),
        stat("Requests/s", "reqps", f"{_HITS} + ({_MISSES} or vector(0))", "Requests whose computation began."),
        stat("Store memory in use", "percentunit", f"{total('S.used_bytes')} / {total('S.pool_bytes')}",
             "Of all stores."),
        stat("Wrong checksums, 1 h", "short",
             f"sum(increase({_WRONG}[1h])) + "
             f"(sum(increase({metric('S.integrity_failures_total')}[1h])) or vector(0))",
             "Blocks from node stores that were discarded and computed again. Investigate every one.", _NO_FAILURE),
        stat("Stores and tiers up", "percentunit",
             f"avg({metric('S.responding')} or {metric('S.tier_up')} or {metric('E.store_up')})",
             "1: every store answers, every tier is usable, every engine reaches its store.", _ALL_UP),
        Panel("Prompt tokens by source", "short", {"{{kind}}": rate("E.prompt_tokens_total", "kind")}, 12, stack=True,
              text="Tokens per second, by the source of their KV."),
        Panel("Time to first token", "s", {
            "p50": f"histogram_quantile(0.5, {_TTFT})", "p99": f"histogram_quantile(0.99, {_TTFT})",
        }, 12, text="vLLM's own."),
    ],
    "Engines": [
        Panel("Requests by source of their prefix", "reqps", {"{{kind}}": rate("E.hits_total", "kind"),
              "miss: {{kind}}": rate("E.misses_total", "kind")}, stack=True),
        Panel("Lookups declined, by reason", "ops", {"{{kind}}": rate("E.lookups_declined_total", "kind")}),
        Panel("Bytes by source and codec", "Bps", {
            "load {{kind}}": rate("E.loaded_bytes_total", "kind"),
            "store {{kind}}": rate("E.stored_bytes_total", "kind"),
            "fetch {{kind}}": rate("E.fetched_bytes_total", "kind"),
            "pull {{kind}}": rate("E.pulled_bytes_total", "kind"),
        }),
        Panel("Loads, fetches and pulls: p95", "s", {
            "load {{kind}}": quantile(0.95, "E.load_seconds", "kind"),
            "fetch {{kind}}": quantile(0.95, "E.fetch_seconds", "kind"),
            "pull {{kind}}": quantile(0.95, "E.pull_seconds", "kind"),
        }, text="From job to verified."),
        Panel("Duration of a host hit, by stage", "s", {"{{kind}}": mean("E.host_hit_seconds", "kind")}, stack=True,
              text="Mean of the lookup, of waiting until vLLM has free blocks, of the load."),
        Panel("Bandwidth of single loads", "Bps", {
            "load": f"{rate('E.loaded_bytes_total')} / {rate('E.load_seconds_sum')}",
            "fetch": f"{rate('E.fetched_bytes_total')} / {rate('E.fetch_seconds_sum')}",
            "pull": f"{rate('E.pulled_bytes_total')} / {rate('E.pull_seconds_sum')}",
        }, text="Bytes over the sum of durations: below the link's bandwidth if several run at once."),
        Panel("Requests that wait", "short", {"{{kind}}": total("E.requests", "kind", 'kind!="computing"')},
              text="For a lookup, for free blocks, for a load."),
        Panel("Queues", "bytes", {"loading {{kind}}": total("E.loading_bytes", "kind")},
              text="Submitted and not arrived."),
        Panel("Blocks kept for copies", "short", {"blocks": total("E.store_inflight_blocks")},
              text="Until they are in the node store."),
        Panel("Full blocks: stored or skipped", "ops", {
            "stored": rate("E.stored_blocks_total"), "{{kind}}": rate("E.stores_skipped_total", "kind"),
        }),
        Panel("Waits for promotions", "s", {
            "p50": quantile(0.5, "E.promotion_wait_seconds"), "p95": quantile(0.95, "E.promotion_wait_seconds"),
        }),
        Panel("Failures", "ops", {
            "loads": rate("E.loads_total", more='kind="failed"'),
            "fetches": rate("E.fetches_total", more='kind="failed"'),
            "pulls": rate("E.pulls_total", more='kind="failed"'),
            "wrong checksum: {{kind}}": rate("E.integrity_failures_total", "kind"),
            "store disconnected": rate("E.store_disconnects_total"),
        }, text="The engines computed the tokens."),
    ],
    "Store and tiers": [
        Panel("Memory", "bytes", {
            "used": total("S.used_bytes"), "pinned": total("S.pinned_bytes"), "usable": total("S.ready_bytes"),
        }),
        Panel("Found in memory, of what engines asked for", "percentunit", {
            "found": f"{rate('S.prefix_hits_total')} / {rate('S.prefix_queries_total')}",
        }, text="Without other tiers engines do not ask where memory has nothing: it is no hit rate."),
        Panel("Blocks in and out of memory", "ops", {
            "stored": rate("S.stored_blocks_total"), "evicted": rate("S.evicted_blocks_total"),
            "refused: {{reason}}": rate("S.refused_slots_total", "reason"),
        }),
        Panel("Tiers: size", "bytes", {
            "{{tier}}": total("S.tier_used_bytes", "tier"),
            "{{tier}}, maximum": f"{total('S.tier_capacity_bytes', 'tier')} > 0",
        }),
        Panel("Tiers: bandwidth", "Bps", {
            "{{tier}} read": rate("S.tier_read_bytes_total", "tier"),
            "{{tier}} written": rate("S.tier_written_bytes_total", "tier"),
        }),
        Panel("Tiers: requests, p95", "s", {
            "{{tier}} {{kind}}": quantile(0.95, "S.tier_request_seconds", "tier, kind"),
        }),
        Panel("Tiers: queued demotions", "bytes", {"{{tier}}": total("S.tier_queued_bytes", "tier")}),
        Panel("Tiers: not written, evicted, failed", "ops", {
            "{{tier}}: {{cause}}": rate("S.tier_dropped_blocks_total", "tier, cause"),
            "{{tier}}: evicted": rate("S.tier_evicted_blocks_total", "tier"),
            "{{tier}}: lookup failed": rate("S.tier_failed_lookups_total", "tier"),
            "{{tier}}: read failed": rate("S.tier_read_failed_blocks_total", "tier"),
            "{{tier}}: write failed": rate("S.tier_write_failed_blocks_total", "tier"),
        }),
        Panel("Up", "short", {
            "{{instance}} answers": metric("S.responding"), "{{instance}} {{tier}}": metric("S.tier_up"),
        }),
        Panel("The store's thread: p99 of a message", "s", {
            "{{message}}": f"{quantile(0.99, 'S.message_seconds', 'message')} > 0",
        }, text="While it handles one message the others wait."),
        Panel("Leases and clients", "short", {
            "leases": total("S.leases"), "blocks under them": total("S.leased_blocks"),
            "slots being written": total("S.writing_slots"), "{{kind}}s": total("S.clients", "kind"),
        }),
        Panel("Deadlines that passed", "ops", {
            "leases": rate("S.expired_leases_total"), "reservations": rate("S.expired_reservations_total"),
            "{{tier}}: no answer": rate("S.tier_timeouts_total", "tier"),
            "{{tier}}: restarted": rate("S.tier_restarts_total", "tier"),
        }),
    ],
    "Cluster (Mooncake)": [
        Panel("This node's memory is in the cluster", "short", {
            "{{instance}} reads": metric("S.tier_up", _M), "{{instance}} gives memory": metric("S.tier_segment_up"),
        }, text="0 of both: the master does not answer."),
        Panel("Blocks found, read, written", "ops", {
            "found": rate("S.tier_found_blocks_total", more=_M), "read": rate("S.tier_read_blocks_total", more=_M),
            "written": rate("S.tier_written_blocks_total", more=_M),
            "copies requested": rate("S.tier_replicated_blocks_total"),
        }, text="Found and not read: the request did not wait, or memory had it by then."),
        Panel("Faults", "short", {
            "nodes not read from": total("S.tier_avoided_places"),
            "readers replaced": f"sum(increase({metric('S.tier_restarts_total', _M)}{_R}))",
            "memory lost": f"sum(increase({metric('S.tier_segment_restarts_total')}{_R}))",
            "writes refused": total("S.tier_state", more=f'{_M},state="read_only"'),
        }, text="A read that fails costs its process. Refused: stores that do not write now, as if memory is full."),
    ],
    "Peers and leases": [
        Panel("Leases between engines", "short", {"{{kind}}": total("E.leases", "kind")}),
        Panel("Blocks kept for leases", "short", {"{{kind}}": total("E.exported_blocks", "kind")}, stack=True),
        Panel("Lookups: p95", "s", {"{{kind}}": quantile(0.95, "E.lookup_seconds", "kind")}),
        Panel("Exports and leases", "ops", {
            "{{kind}}": rate("E.exports_total", "kind"), "blocks leased to peers": rate("E.peer_leased_blocks_total"),
        }),
        Panel("Peer fetches skipped, by reason", "ops", {"{{kind}}": rate("E.peer_fetches_skipped_total", "kind")}),
        Panel("Engines that share their caches", "short", {
            "engines": total("S.directory_holders"),
        }, text="In the directories of the node stores."),
    ],
    "Planner": [
        Panel("Decisions by reason", "ops", {"{{kind}}": rate("E.load_decisions_total", "kind")}, stack=True,
              text="Loaded: faster, not_measured, probe, policy_always. Computed: all others."),
        Panel("Actual over expected duration", "short", {
            f"{{{{kind}}}} p{q:.0f}": quantile(q / 100, "E.load_time_ratio", "kind") for q in (10, 50, 90)
        }, text="1: the planner was right."),
        Panel("Error", "percentunit", {"{{kind}}": f"avg by (kind) ({metric('E.planner_error')})"},
              text="Recent mean of |ln(actual / expected)|."),
        Panel("Expected bandwidth", "Bps", {"{{kind}}": f"avg by (kind) ({metric('E.planner_bandwidth')})"}),
        Panel("Expected: loading against computing", "s", {"{{kind}}": rate("E.estimated_seconds_total", "kind")},
              text="Seconds per second, over all decisions."),
        Panel("Loads: expected and actual", "s", {"{{kind}}": rate("E.load_decision_seconds_total", "kind")}),
    ],
    "Proxy": [
        Panel("Requests by outcome", "reqps", {
            "{{outcome}}": rate("X.requests_total", "outcome", _CLIENTS),
        }, stack=True),
        Panel("First byte and whole answer", "s", {
            "first byte p50": quantile(0.5, "X.first_byte_seconds", more=_CLIENTS),
            "first byte p99": quantile(0.99, "X.first_byte_seconds", more=_CLIENTS),
            "answer p99": quantile(0.99, "X.request_seconds", more=_CLIENTS),
            "prefill p99": quantile(0.99, "X.prefill_seconds"),
        }),
        Panel("Queues", "short", {"{{role}}": total("X.queue", "role")},
              text="Requests that wait for a slot at an engine."),
        Panel("In flight by engine", "short", {"{{role}} {{engine}}": total("X.engine_in_flight", "role, engine")}),
        Panel("Retries and events", "ops", {
            "retry {{role}}": rate("X.retries_total", "role"), "{{event}}": rate("X.events_total", "event"),
        }),
        Panel("Known of prompts", "percentunit", {
            "known": f"{rate('X.prompt_tokens_known_total')} / {rate('X.prompt_tokens_total')}",
        }, text="Estimated tokens that the chosen engine had seen before."),
    ],
}  # fmt: skip


def dashboard() -> dict:
    panels, y = [], 0
    for row, inside in ROWS.items():
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        })  # fmt: skip
        y, x, high = y + 1, 0, 0
        for panel in inside:
            height = 4 if panel.sort == "stat" else HEIGHT
            if x + panel.width > WIDTH:
                x, y, high = 0, y + high, 0
            panels.append(_panel(len(panels) + 1, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
            x, high = x + panel.width, max(high, height)
        y += high
    return {
        "title": "vllm-kvtier", "uid": "kvtier", "tags": ["vllm", "kvtier"], "schemaVersion": 39, "version": 1,
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser", "annotations": {"list": []}, "links": [], "panels": panels,
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
            _variable("instance", "Instance", 'label_values({__name__=~"vllm:kvtier_hits_total|kvtier_store_responding|'
                      'kvtier_proxy_ready"}, instance)'),
            _variable("model", "Model", "label_values(vllm:kvtier_hits_total, model_name)"),
        ]},
    }  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict:
    return {
        "name": name, "label": label, "type": "query", "datasource": _SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
        "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}, "hide": 0,
    }  # fmt: skip


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel, place: dict) -> dict:
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stack else 8, "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stack else "none", "group": "A"},
    }  # fmt: skip
    defaults = {"unit": panel.unit, "min": 0, "custom": custom}
    options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.sort == "stat":
        steps = [{"color": colour, "value": value or None} for colour, value in panel.steps] or [
            {"color": "blue", "value": None}
        ]
        defaults = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return {
        "id": number, "type": panel.sort, "title": panel.title, "description": panel.text, "datasource": _SOURCE,
        "gridPos": place, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": query, "legendFormat": legend or "__auto",
             "instant": False, "range": True, "editorMode": "code"}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def text() -> str:
    """The content of the file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(text())
