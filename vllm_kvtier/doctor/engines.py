"""The engines: their servers, their connectors' endpoints, and what their counters tell."""

from dataclasses import dataclass, field, replace

from vllm_kvtier.doctor.endpoint import EndpointProbe, Identity, NoEndpoint, Starting
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.doctor.server import Scrape, Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.vllm_compat.version import OLDEST, SUPPORTED, UNKNOWN, is_tested, parse_release
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Inspection

_FLAG = """start it with --kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both"}'"""
_NO_ENDPOINT = {
    "closed": "is the engine up, and is this its endpoint? Its log says 'answers on HOST:PORT'; endpoint_port fixes it",
    "key needed": "give --cluster-key, the file of the engines' cluster_key_file",
    "no key there": "leave --cluster-key out, or give the engine cluster_key_file",
    "other key": "copy one key file to all engines (its owner alone may read it), and restart those that had another",
    "not ours": "give the connector's endpoint ('answers on HOST:PORT' in the engine's log), not the HTTP port",
    "other version": "run the same vllm-kvtier here and there",
    "silent": "the engine hangs, or a firewall swallows what is sent: look at its log",
}


@dataclass
class Engine:
    """What is known of one engine. ``url`` and ``address`` may be "" where only the other was given."""

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
        _server(engine, seconds)
    if address:
        _endpoint(engine, key, seconds)
    return engine


def _server(engine: Engine, seconds: float) -> None:
    name, server = f"server {engine.url}", Server(engine.url, seconds)
    try:
        engine.version = server.version()
    except KVTierError as error:
        remedy = "start the engine, or give its address; a router's is not an engine's"
        engine.checks.append(fail(name, str(error), remedy))
        return
    release = parse_release(engine.version) or UNKNOWN
    words = f"it runs vLLM {engine.version or 'of no known version'}; this vllm-kvtier supports {SUPPORTED}"
    if release < OLDEST:
        engine.checks.append(fail(name, words, "install a vLLM that is supported"))
    elif not is_tested(release):
        engine.checks.append(warn(name, words, "its log says what the probe switched off, as does kvtier doctor there"))
    else:
        engine.checks.append(ok(name, f"vLLM {engine.version}"))
    try:
        engine.metrics = server.metrics()
    except KVTierError as error:
        engine.checks.append(unknown(f"counters of {engine.url}", str(error), "look at the engine's log"))
        return
    engine.checks += counters(f"counters of {engine.url}", engine.metrics)


def _endpoint(engine: Engine, key: ClusterKey | None, seconds: float) -> None:
    name = f"endpoint {engine.address}"
    try:
        with EndpointProbe(engine.address, key, seconds) as probe:
            try:
                engine.identity = probe.identity()
            except Starting as error:
                engine.checks.append(
                    warn(name, f"the engine answers but lends nothing: {error}", "its log says more; is it starting?")
                )
            engine.inspection = probe.inspection()
            if engine.identity is not None:
                engine.identity = replace(engine.identity, words=probe.words())
    except NoEndpoint as error:
        if engine.identity is None:
            engine.checks.append(fail(name, str(error), _NO_ENDPOINT[error.why]))
            return
        if error.why == "other version":
            engine.checks.append(warn(name, str(error), _NO_ENDPOINT[error.why]))
            return
        # Answered on the engine's own thread, which a long step keeps busy.
        engine.checks.append(
            warn(name, f"{error}: its connector answers, its scheduler does not", _NO_ENDPOINT["silent"])
        )
        return
    except KVTierError as error:
        engine.checks.append(fail(name, str(error), "give --endpoint HOST:PORT"))
        return
    if engine.identity is not None:
        ranks, unit = len(engine.identity.ranks), engine.identity.block_tokens
        where = "a node store" if engine.inspection.store else "no node store"
        engine.checks.append(ok(name, f"{ranks} rank{'s' * (ranks != 1)}, blocks of {unit} tokens, {where} in use"))
    if engine.inspection.violations:
        engine.checks.append(
            warn(
                name,
                f"{engine.inspection.violations} events that the connector does not expect: a fault in vllm-kvtier",
                "report it, with the engine's log",
            )
        )


def counters(name: str, metrics: Scrape) -> list[Check]:
    """What an engine's ``/metrics`` tell of trouble."""
    if not metrics.has_connector:
        return [fail(name, "this engine runs without the connector: it has no vllm:kvtier counters", _FLAG)]
    checks = []
    if metrics.cache.get("enable_prefix_caching") == "False":
        checks.append(
            fail(
                name,
                "prefix caching is off in this engine, so no block has a name that it could be found by",
                "start it without --no-enable-prefix-caching",
            )
        )
    if bad := metrics.ours("integrity_failures"):
        checks.append(
            warn(
                name,
                f"{bad:.0f} blocks arrived with a wrong checksum (and were computed instead)",
                "once or twice after a crash is no harm; if it goes on, test this machine's memory, disk and network",
            )
        )
    if lost := metrics.ours("store_lost"):
        checks.append(warn(name, f"the node store went away {lost:.0f} times", "see the store's log beside its socket"))
    if failed := metrics.ours("loads", "failed") + metrics.ours("pulls", "failed"):
        checks.append(
            warn(name, f"{failed:.0f} loads or pulls failed (and were computed instead)", "see the engine's log")
        )
    checks += _declined(name, metrics)
    return checks or [ok(name, "nothing went wrong that it counted")]


def _declined(name: str, metrics: Scrape) -> list[Check]:
    checks = []
    refused = {
        k: n for k, n in metrics.kinds("declined").items() if k in ("namespace", "layout", "timeout", "unreachable")
    }
    if refused:
        words = ", ".join(f"{kind} ({n:.0f})" for kind, n in refused.items())
        checks.append(
            warn(name, f"other engines were not pulled from: {words}", "give doctor the --endpoint of both engines")
        )
    weighed = metrics.kinds("planned")
    slower = weighed.get("slower", 0) + weighed.get("queued", 0)
    if slower > sum(weighed.values()) / 2:
        checks.append(
            warn(
                name,
                f"of {sum(weighed.values()):.0f} prompts that the node store had, {slower:.0f} were computed, which "
                "was expected to be faster than loading them",
                "no fault: prompts are short or this GPU is fast; `kvtier plan` tells from which length on loading "
                "pays, load_policy=always loads all the same",
            )
        )
    lost = {k: n for k, n in metrics.kinds("not_stored").items() if k != "stored already"}
    if lost and sum(lost.values()) > metrics.ours("stored_blocks") / 10:
        words = ", ".join(f"{kind or 'other reasons'} ({n:.0f})" for kind, n in lost.items())
        checks.append(
            warn(
                name,
                f"many full blocks were not stored: {words}",
                "a larger store_size where the store is full, store_hold_share where copies are too many or slow",
            )
        )
    return checks
