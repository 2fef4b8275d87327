"""The engines: their servers, their connectors' endpoints, and their metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vllm_kvtier.doctor.engines.endpoint import EndpointProbe, Identity, NoEndpoint, Starting
from vllm_kvtier.doctor.engines.server import PREFIX, Scrape, Server
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.vllm_compat.version import OLDEST, SUPPORTED, UNKNOWN, is_tested, parse_release
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Inspection

_FLAG = """start it with --kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both"}'"""
_PROXY = "give the URLs of its engines, which its /kvtier/state lists"
_NO_ENDPOINT = {
    "closed": "is the engine up, and is this its endpoint? Its log says 'answers on HOST:PORT'; endpoint_port fixes it",
    "key needed": "give --cluster-key, the file of the engines' cluster_key_file",
    "no key there": "leave --cluster-key out, or give the engine cluster_key_file",
    "other key": "copy one key file to all engines (its owner alone may read it), and restart those that had another",
    "not ours": "give the connector's endpoint ('answers on HOST:PORT' in the engine's log), not the HTTP port",
    "other version": "run the same vllm-kvtier here and there",
    "busy": "ask again when fewer ask",
    "silent": "the engine hangs, or a firewall drops its packets: see its log",
}


@dataclass
class Engine:
    """Findings about one engine. One of ``url`` and ``address`` may be ""."""

    url: str
    address: str
    version: str = ""
    metrics: Scrape | None = None
    identity: Identity | None = None
    inspection: Inspection | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.address or self.url


def look_at(url: str, address: str, key: ClusterKey | None, seconds: float = 3.0) -> Engine:
    engine = Engine(url, address)
    if url:
        engine.checks += _server(engine, seconds)
    if address:
        engine.checks += _endpoint(engine, key, seconds)
    return engine


def _server(engine: Engine, seconds: float) -> Iterator[Check]:
    name, server = f"server {engine.url}", Server(engine.url, seconds)
    try:
        engine.version = server.version()
    except KVTierError as error:
        yield fail(name, str(error), "start the engine, or give its address; a proxy is not an engine")
        return
    release = parse_release(engine.version) or UNKNOWN
    message = f"it runs vLLM {engine.version or 'of no known version'}; this vllm-kvtier supports {SUPPORTED}"
    if release < OLDEST:
        yield fail(name, message, "install a vLLM that is supported")
    elif not is_tested(release):
        yield warn(name, message, "its log lists what the probe disabled, as does kvtier doctor there")
    else:
        yield ok(name, f"vLLM {engine.version}")
    try:
        engine.metrics = server.metrics()
    except KVTierError as error:
        yield unknown(f"counters of {engine.url}", str(error), "see the engine's log")
        return
    yield from _counters(f"counters of {engine.url}", engine.metrics)


def _endpoint(engine: Engine, key: ClusterKey | None, seconds: float) -> Iterator[Check]:
    name = f"endpoint {engine.address}"
    try:
        with EndpointProbe(engine.address, key, seconds) as probe:
            try:
                engine.identity = probe.identity()
            except Starting as error:
                message = f"the engine answers but grants no leases: {error}"
                yield warn(name, message, "is it starting? see its log")
            engine.inspection = probe.inspection()
            if engine.identity is not None:
                engine.identity = replace(engine.identity, description=probe.description())
    except NoEndpoint as error:
        if engine.identity is None:
            yield fail(name, str(error), _NO_ENDPOINT[error.why])
        elif error.why in ("other version", "busy"):
            yield warn(name, str(error), _NO_ENDPOINT[error.why])
        else:  # it is answered on the engine's own thread, which a long step keeps busy
            yield warn(name, f"{error}: its connector answers, its scheduler does not", _NO_ENDPOINT["silent"])
        return
    except KVTierError as error:
        yield fail(name, str(error), "give --endpoint HOST:PORT")
        return
    if engine.identity is not None:
        ranks, size = len(engine.identity.ranks), engine.identity.hash_block_size
        store = "a node store" if engine.inspection.store else "no node store"
        yield ok(name, f"{ranks} rank{'s' * (ranks != 1)}, blocks of {size} tokens, {store} in use")
    if count := engine.inspection.violations:
        message = f"{count} events that the connector does not expect: a bug in vllm-kvtier"
        yield warn(name, message, "report it with the engine's log")


def _counters(name: str, metrics: Scrape) -> list[Check]:
    """Check an engine's ``/metrics`` for errors."""
    if metrics.is_proxy:
        return [warn(name, "this is `kvtier proxy`, not an engine: its engines were not checked", _PROXY)]
    if not metrics.has_connector:
        return [fail(name, "this engine runs without the connector: it has no vllm:kvtier counters", _FLAG)]
    return list(_counted_errors(name, metrics)) or [ok(name, "no errors counted")]


def _counted_errors(name: str, metrics: Scrape) -> Iterator[Check]:
    if metrics.cache.get("enable_prefix_caching") == "False":
        message = "prefix caching is off in this engine, so its blocks have no hashes to find them by"
        yield fail(name, message, "start it without --no-enable-prefix-caching")
    elif metrics.total("vllm:prompt_tokens") and not metrics.ours("prompt_tokens"):
        message = "the connector had a part in none of its prompts, as if it were disabled in this engine"
        yield fail(name, message, "see the engine's log ('connector: disabled') and docs/limits.md")
    if faults := metrics.kinds("internal_errors"):
        places = ", ".join(f"{place} ({n:.0f})" for place, n in faults.items())
        message = f"errors in vllm-kvtier itself: {places}; after many the engine neither loads nor stores KV"
        yield warn(name, message, "report it with the engine's log, which has their tracebacks")
    if (up := metrics.mean(f"{PREFIX}store_up", "")) is not None and up < 1:
        message = "its node store did not answer, or its memory could not be reached, in the engine's last step"
        yield warn(name, message, "see the engine's log ('serving without the node store') and `kvtier stats`")
    if bad := metrics.ours("integrity_failures"):
        message = f"{bad:.0f} blocks arrived with a wrong checksum; the engine computed them"
        fix = "a few after a crash are harmless; if this repeats, test this machine's memory, disk and network"
        yield warn(name, message, fix)
    if lost := metrics.ours("store_disconnects"):
        yield warn(name, f"the node store disconnected {lost:.0f} times", "see the store's log beside its socket")
    if failed := sum(metrics.ours(kind, "failed") for kind in ("loads", "fetches", "pulls")):
        message = f"{failed:.0f} loads, peer fetches or pulls failed; the engine computed the tokens"
        yield warn(name, message, "see the engine's log")
    serious = ("namespace_mismatch", "layout", "timeout", "unreachable")
    if refused := {kind: n for kind, n in metrics.kinds("lookups_declined").items() if kind in serious}:
        reasons = ", ".join(f"{kind} ({n:.0f})" for kind, n in refused.items())
        yield warn(name, f"lookups in other engines failed: {reasons}", "give doctor the --endpoint of both engines")
    decisions = metrics.kinds("load_decisions")
    slower, total = decisions.get("slower", 0) + decisions.get("queued", 0), sum(decisions.values())
    if slower > total / 2:
        yield warn(
            name,
            f"{slower:.0f} of {total:.0f} prompts that were found were computed: expected to be faster than a load",
            "no action needed; prompts are short or this GPU is fast. `kvtier plan` tells from which length on "
            "loading is faster, load_policy=always forces loads",
        )
    lost_blocks = metrics.stores_skipped()
    if lost_blocks and sum(lost_blocks.values()) > metrics.ours("stored_blocks") / 10:
        reasons = ", ".join(f"{kind or 'other reasons'} ({n:.0f})" for kind, n in lost_blocks.items())
        fix = "a larger store_size for store_full, a larger store_inflight_share for inflight_limit and copy_dropped"
        yield warn(name, f"many full blocks were not stored: {reasons}", fix)
