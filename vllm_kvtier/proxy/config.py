"""ProxyConfig: every option of the proxy with its default and meaning, checked on construction."""

import math
from urllib.parse import urlsplit

import msgspec

from vllm_kvtier.errors import ConfigError

#: Roles of engines. ``pooling``: embeddings, scores and the like, of a model that does not generate.
ROLES = ("prefill", "decode", "pooling")

#: How an engine is chosen. ``prefix_hash``: by load and by the prefixes that the proxy sent there; ``kv_events``: by
#: load and by what the engines' KV events say they have; ``least_load``, ``round_robin``: without regard to prompts.
ROUTING_POLICIES = ("prefix_hash", "kv_events", "least_load", "round_robin")


# {old: new}: the old names of options work for one release.
RENAMED = {
    "backoff_first": "backoff_initial",
    "backoff_most": "backoff_max",
    "retry_after_most": "retry_after_max",
    "conversations_kept": "max_conversations",
    "prefixes_kept": "max_prefixes",
    "request_tokens": "request_cost_tokens",
}


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address, weight and credentials of one engine.

    ``kv_host`` and ``kv_port``: where its connector's endpoint listens. Needed only if the engine's answers do not
    contain them (streamed answers before vLLM 0.33), or if the endpoint must be reached at another address.
    """

    url: str
    kv_host: str | None = None
    kv_port: int | None = None
    #: Share of the requests relative to other engines. 0: drained, no new requests.
    weight: float = 1.0
    #: Maximum number of concurrent requests; None: ``engine_requests``.
    max_requests: int | None = None
    #: File with the API key of this engine (its ``--api-key``).
    api_key_file: str | None = None
    #: Certificate authorities (PEM) that sign the certificate of an https engine; None: those of the system.
    ca_file: str | None = None
    #: The proxy's client certificate (PEM), if the engine requires one.
    cert_file: str | None = None
    #: Key of the client certificate.
    key_file: str | None = None
    #: ``HOST:PORT`` or ``ipc://PATH`` of its KV events (``--kv-events-config``), for ``routing_policy: kv_events``.
    events: str | None = None
    #: The same of their ``replay_endpoint``.
    replay: str | None = None

    @classmethod
    def parse(cls, text: str) -> "EngineAddress":
        """Parse ``http://host:port[,kv=HOST:PORT][,events=HOST:PORT][,replay=HOST:PORT][,weight=N]``.

        Raises ConfigError.
        """
        url, *extras = [part.strip() for part in text.split(",")]
        options: dict = {}
        for extra in extras:
            name, _, value = extra.partition("=")
            if name == "weight":
                try:
                    options["weight"] = float(value)
                except ValueError as error:
                    raise ConfigError(f"The engine address {text!r} has {extra!r}; a weight is a number.") from error
                continue
            if name in ("events", "replay"):
                options[name] = value  # `check` reads it
                continue
            if name != "kv":
                raise ConfigError(
                    f"The engine address {text!r} has {extra!r} after the URL; write kv=HOST:PORT, events=HOST:PORT, "
                    "replay=HOST:PORT or weight=N there."
                )
            options |= kv_address(value, text)
        return cls(url=url.rstrip("/"), **options)

    def check(self) -> None:
        """Raise ConfigError if an option is invalid."""
        try:
            parts = urlsplit(self.url)
            parts.port  # noqa: B018 (raises)
            host = (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise ConfigError(f"The engine URL {self.url!r} is invalid: {error}.") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"The engine URL {self.url!r} is invalid: write http://HOST:PORT.")
        if parts.username or parts.password:
            # It would be visible in logs and in /kvtier/state.
            raise ConfigError(f"The engine URL for {parts.hostname} contains a password; use api_key_file instead.")
        if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"The engine URL {self.url!r} must end before /v1 and contain no query.")
        if not (0 <= self.weight < math.inf):
            raise ConfigError(f"The weight of {self.url} is {self.weight}; it must be 0 (drained) or more.")
        if self.max_requests is not None and self.max_requests < 0:
            raise ConfigError(f"max_requests of {self.url} is {self.max_requests}; it must be 0 (no limit) or more.")
        for name in ("events", "replay"):
            value = getattr(self, name)
            if value is not None and not value.startswith("ipc://"):
                host, _ = _host_and_port(value, self.url, name)
                if ":" in host and not (host.startswith("[") and host.endswith("]")):
                    raise ConfigError(f"{self.url} has {value!r} for {name}; write an IPv6 address as [ADDRESS]:PORT.")
        if self.replay is not None and self.events is None:
            raise ConfigError(f"{self.url} has replay without events; give both.")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(f"{self.url} has only one of cert_file and key_file; give both or none.")
        if parts.scheme == "http" and (self.ca_file or self.cert_file):
            raise ConfigError(f"{self.url} has certificates but begins with http:; write https: or remove them.")


def kv_address(value: str, text: str) -> dict[str, str | int]:
    """``HOST:PORT`` as the fields kv_host and kv_port. Raises ConfigError, which shows ``text``."""
    host, port = _host_and_port(value, text, "kv")
    return {"kv_host": host.strip("[]"), "kv_port": port}


def _host_and_port(value: str, text: str, name: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not host or "/" in host or not 0 < number < 65536:
        raise ConfigError(f"The engine address {text!r} has {value!r} for {name}; write {name}=HOST:PORT.")
    return host, number


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the proxy; times in seconds, sizes in bytes. Raises ConfigError for invalid values."""

    #: Prefill engines. Without any, every decode engine computes its prompts.
    prefill: tuple[EngineAddress, ...] = ()
    #: Decode engines; at least one.
    decode: tuple[EngineAddress, ...]
    #: Engines for embeddings, scores and the like. Without any, the decode engines get these requests.
    pooling: tuple[EngineAddress, ...] = ()

    #: Name the decode engine that has the conversation to the prefill engine, which pulls from it (needs
    #: ``bidirectional`` in the engines).
    bidirectional: bool = True
    #: Prompts with fewer characters are computed by the decode engine (a token counts as four characters; a prompt with
    #: media is never short). 256: the engines' ``pull_threshold``, below which a decode engine computes in any case.
    min_prefill_chars: int = 256
    #: Maximum number of requests at a decode engine whose prefill has not ended: they are sent to both engines at once,
    #: and the decode engine pulls what the prefill engine computes step by step. Further requests are sent to the
    #: decode engine when their prefill has ended; 0: all are.
    max_followed_prefills: int = 0

    #: Timeout of a connection to an engine.
    connect_timeout: float = 5.0
    #: Timeout of a prefill, including the engine's queue. After it the decode engine computes the prompt.
    prefill_timeout: float = 600.0
    #: Timeout of the first byte of a streamed answer. After it another decode engine is tried.
    first_byte_timeout: float = 600.0
    #: Maximum time between two pieces of a streamed answer. A stream as a whole has no limit.
    stream_idle_timeout: float = 600.0
    #: Timeout of an answer that is not streamed.
    answer_timeout: float = 3600.0
    #: Maximum time for a client to send its request, or to receive the next piece of its answer.
    client_timeout: float = 120.0
    #: Timeout of a health probe.
    probe_timeout: float = 5.0
    #: Timeout of each step of /kvtier/query (one engine tokenizes; all engines report what they hold).
    query_timeout: float = 5.0

    #: Maximum number of concurrent requests at one engine; 0: no limit. More requests wait in the proxy.
    engine_requests: int = 1024
    #: Maximum number of waiting requests; more are answered with 429.
    queue_limit: int = 1024
    #: Maximum time that a request waits for an engine before it is answered with 429.
    queue_timeout: float = 30.0
    #: Maximum Retry-After of a 429; below it, the measured rate of requests decides.
    retry_after_max: float = 60.0

    #: Time until the first health probe of a failed engine; it doubles with each failure.
    backoff_initial: float = 0.5
    #: Maximum time between two health probes of a failed engine.
    backoff_max: float = 30.0
    #: Maximum number of decode engines tried for one request, so that a request that crashes engines cannot crash all.
    #: Those that lack its model or path (403, 404, 405) do not count.
    max_decode_attempts: int = 3
    #: Maximum number of prefill engines tried for one request, counted in the same way. After them the decode engine
    #: computes the prompt.
    max_prefill_attempts: int = 2

    #: Larger requests are refused with 413.
    max_body_bytes: int = 64 << 20
    #: Maximum size of one event of a stream, and of a prefill engine's answer. Bounds the proxy's memory.
    max_event_bytes: int = 32 << 20
    #: Maximum size of the bodies of all requests that no engine has begun to answer, and of all answers that are held
    #: whole. The first 64 KiB of each are not counted. Beyond it 503 with Retry-After.
    max_buffered_bytes: int = 1 << 30

    #: Maximum number of conversations whose route is kept; the least recently used is dropped.
    max_conversations: int = 65536
    #: Time after which an unused route is dropped.
    conversation_ttl: float = 3600.0
    #: A conversation moves to another decode engine if its own has more requests under way (by weight) than the least
    #: busy one, by more than this. The prefill engine can still pull from the old one.
    affinity_slack: int = 16
    #: Maximum number of prompt pieces that are remembered with the engines that have seen them; about 250 bytes each.
    max_prefixes: int = 1 << 18
    #: How an engine is chosen: prefix_hash, kv_events, least_load or round_robin. See docs/proxy.md.
    routing_policy: str = "prefix_hash"
    #: With kv_events: maximum number of blocks of an engine that are remembered; about 250 bytes each, and 640 for one
    #: in a cluster or bucket.
    max_blocks: int = 1 << 18
    #: With kv_events: maximum time for an engine to tokenize a prompt. After it, prefix_hash decides.
    tokenize_timeout: float = 0.5
    #: Cost of a request under way in the choice of an engine, in prompt tokens to compute.
    request_cost_tokens: int = 256

    #: File with the API keys of clients; None: the engines check keys. See docs/proxy.md.
    api_keys_file: str | None = None
    #: File with the key for /kvtier/drain, /kvtier/resume and /kvtier/reload; None: only from this machine.
    admin_key_file: str | None = None
    #: Take the tenant from the header X-Tenant. Use it only behind a gateway that sets this header.
    trust_tenant_header: bool = False
    #: File with the secret for the tenants' salts; None: the cluster key, without one random. With another secret than
    #: before, or than another proxy of the same engines, KV of earlier requests is not found.
    salt_secret_file: str | None = None
    #: File with the cluster key of the engines' endpoints, if they have one; used to release exports and for queries.
    cluster_key_file: str | None = None
    #: More paths that are forwarded to decode engines unchanged, POST or GET.
    extra_routes: tuple[str, ...] = ()
    #: Debugging: keep ``kv_transfer_params`` in answers. Shows clients the engines' addresses and export ids.
    expose_params: bool = False
    #: Answer ``X-KVTier-Report: 1`` with token counts of pulls.
    allow_report: bool = True
    #: Log a line for every request that is served, and for some of the others.
    access_log: bool = True

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("The proxy has no decode engine: give at least one --decode http://HOST:PORT.")
        for role in ROLES:
            urls = [address.url for address in getattr(self, role)]
            for address in getattr(self, role):
                address.check()
                if urls.count(address.url) > 1:
                    raise ConfigError(f"The {role} engine {address.url} is named twice; name it once.")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:  # nor NaN
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than zero.")
        for name in ("connect_timeout", "retry_after_max"):
            if not getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number of seconds.")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.max_buffered_bytes < max(self.max_body_bytes, self.max_event_bytes):
            raise ConfigError(
                f"max_buffered_bytes is {self.max_buffered_bytes}; it must be at least max_body_bytes "
                f"({self.max_body_bytes}) and max_event_bytes ({self.max_event_bytes})."
            )
        if self.backoff_initial > self.backoff_max:
            raise ConfigError(
                f"backoff_initial is {self.backoff_initial} s; it must be at most backoff_max ({self.backoff_max} s)."
            )
        if self.routing_policy not in ROUTING_POLICIES:
            raise ConfigError(
                f"routing_policy is {self.routing_policy!r}; it must be one of {', '.join(ROUTING_POLICIES)}."
            )
        for path in self.extra_routes:
            if not path.startswith("/") or path.startswith("/kvtier/"):
                raise ConfigError(f"extra_routes has {path!r}; a path must begin with /, and not with /kvtier/.")


_POSITIVE = (
    *("connect_timeout", "prefill_timeout", "first_byte_timeout", "stream_idle_timeout", "answer_timeout"),
    *("client_timeout", "probe_timeout", "query_timeout", "queue_timeout", "retry_after_max"),
    *("backoff_initial", "backoff_max", "max_decode_attempts", "max_prefill_attempts"),
    *("max_body_bytes", "max_event_bytes", "max_conversations", "conversation_ttl", "max_blocks", "tokenize_timeout"),
)
_NOT_NEGATIVE = (
    "max_followed_prefills",
    *("min_prefill_chars", "affinity_slack", "engine_requests", "queue_limit", "max_prefixes", "request_cost_tokens"),
)
