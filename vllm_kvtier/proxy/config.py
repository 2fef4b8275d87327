"""ProxyConfig: every option of the proxy, its default and meaning, checked when it is made."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

import msgspec

from vllm_kvtier.errors import ConfigError

#: What engines are for. ``pooling``: embeddings, scores and the like, of a model that generates nothing.
ROLES = ("prefill", "decode", "pooling")


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one engine is, how much it gets, and how it is talked to.

    ``kv_host`` and ``kv_port``: where its connector's endpoint listens; only needed where the engine's answers do
    not carry them (answers that vLLM before 0.33 streams), or where others must reach the endpoint under another
    name than the engine says.
    """

    url: str
    kv_host: str | None = None
    kv_port: int | None = None
    #: Its share of the requests, beside the other engines'. 0: no new ones; it is drained.
    weight: float = 1.0
    #: So many requests at once at most; None: ``engine_requests``.
    max_requests: int | None = None
    #: File with the API key that this engine wants (its ``--api-key``).
    api_key_file: str | None = None
    #: Of an https engine: who signed its certificate (PEM; None: the system's authorities), and the proxy's own
    #: certificate and key if the engine asks for one.
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Read ``http://host:port[,kv=HOST:PORT][,weight=N]``; raises ConfigError with what is wrong."""
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
            if name != "kv":
                raise ConfigError(
                    f"The engine address {text!r} has {extra!r} after the URL; write kv=HOST:PORT or weight=N there."
                )
            options |= kv_address(value, text)
        return cls(url=url.rstrip("/"), **options)

    def check(self) -> None:
        """Raise ConfigError if this cannot be an engine."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"The engine URL {self.url!r} is not one: write http://HOST:PORT.")
        if parts.username or parts.password:
            # It would show up in logs and in /kvtier/state.
            raise ConfigError(f"The engine URL for {parts.hostname} holds a password; engines take API keys instead.")
        if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"The engine URL {self.url!r} must end before /v1 and hold no query.")
        if not (0 <= self.weight < math.inf):
            raise ConfigError(f"The weight of {self.url} is {self.weight}; it must be 0 (drained) or more.")
        if self.max_requests is not None and self.max_requests < 0:
            raise ConfigError(f"max_requests of {self.url} is {self.max_requests}; it must be 0 (no limit) or more.")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(f"{self.url} has only one of cert_file and key_file; give both or none.")
        if parts.scheme == "http" and (self.ca_file or self.cert_file):
            raise ConfigError(f"{self.url} has certificates but begins with http:; write https: or drop them.")


def kv_address(value: str, text: str) -> dict[str, str | int]:
    """``HOST:PORT`` as the fields kv_host and kv_port; raises ConfigError that shows ``text``."""
    host, _, port = value.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not host or not 0 < number < 65536:
        raise ConfigError(f"The engine address {text!r} has {value!r} for kv; write kv=HOST:PORT.")
    return {"kv_host": host.strip("[]"), "kv_port": number}


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the proxy; times are seconds, sizes bytes. Raises ConfigError where they cannot work."""

    #: Engines that prefill. None at all: every decode engine computes alone.
    prefill: tuple[EngineAddress, ...] = ()
    #: Engines that decode; at least one.
    decode: tuple[EngineAddress, ...]
    #: Engines for embeddings, scores and the like. None: the decode engines are asked.
    pooling: tuple[EngineAddress, ...] = ()

    #: Tell P which D has the conversation, so that P pulls from it (needs ``bidirectional`` in the engines).
    bidirectional: bool = True
    #: Prompts with fewer characters are computed by D alone (a token counts as four characters).
    min_prefill_chars: int = 0

    #: A connection to an engine must be there within this time.
    connect_timeout: float = 5.0
    #: P must have answered within this time, the engine's queue included; later D computes alone.
    prefill_timeout: float = 600.0
    #: A streamed answer must begin within this time; later another D is tried.
    first_byte_timeout: float = 600.0
    #: Longest silence within a streamed answer before it counts as broken. A stream as a whole has no limit.
    stream_idle_timeout: float = 600.0
    #: An answer that is not streamed must be complete within this time.
    answer_timeout: float = 3600.0
    #: Longest time a client may take to send its request, or to take the next piece of its answer.
    client_timeout: float = 120.0
    #: A health probe must have answered within this time.
    probe_timeout: float = 5.0
    #: Each step of /kvtier/query (an engine tokenizes; all say what they hold) must be over within this time.
    query_timeout: float = 5.0

    #: So many requests are under way at one engine at most; 0: no limit. What comes beyond waits here.
    engine_requests: int = 1024
    #: So many requests wait here at most; what comes beyond is answered 429.
    queue_limit: int = 1024
    #: A request that has waited here for so long is answered 429.
    queue_timeout: float = 30.0
    #: The longest Retry-After that a 429 names; the measured rate decides below that.
    retry_after_most: float = 60.0

    #: A failed engine is set aside this long before its first probe; the time doubles with each failure...
    backoff_first: float = 0.5
    #: ... up to this.
    backoff_most: float = 30.0
    #: So many decode engines are asked for one request at most, lest one request that kills engines kills all.
    max_decode_attempts: int = 3
    #: So many prefill engines are asked for one request at most; then D computes alone.
    max_prefill_attempts: int = 2

    #: Larger requests are refused with 413.
    max_body_bytes: int = 64 << 20
    #: A larger single event of a stream, or a larger answer of P, counts as broken. Bounds the proxy's memory.
    max_event_bytes: int = 32 << 20

    #: So many conversations' routes are kept; the least recently used goes first.
    conversations_kept: int = 65536
    #: A route that was not used for so long is forgotten.
    conversation_ttl: float = 3600.0
    #: A conversation recognised by its text (not by an id) leaves its D when that one has so many more requests
    #: under way (by weight) than the idlest: many conversations may begin alike, and P can pull from the old D anyway.
    affinity_slack: int = 16
    #: So many pieces of prompts are remembered, with the engines that have seen them; about 250 bytes each.
    prefixes_kept: int = 1 << 18
    #: In the choice of an engine, a request under way there counts as so many prompt tokens yet to be computed.
    request_tokens: int = 256

    #: File of the API keys that clients may use; None: the engines check keys. See docs/proxy.md.
    api_keys_file: str | None = None
    #: File with the key for /kvtier/drain, /kvtier/resume and /kvtier/reload; None: only from this machine.
    admin_key_file: str | None = None
    #: Take the tenant from the header X-Tenant. Only behind a gateway that sets it itself.
    trust_tenant_header: bool = False
    #: File whose bytes key the tenants' salts. Proxies that share engines need the same; default: random per start.
    salt_secret_file: str | None = None
    #: The cluster key of the engines' endpoints, where they have one; used to release KV that nobody will pull, and
    #: for queries.
    cluster_key_file: str | None = None
    #: Further paths that are passed on to decode engines as they are, POST or GET.
    extra_routes: tuple[str, ...] = ()
    #: Debugging: leave ``kv_transfer_params`` in answers. Shows clients the engines' addresses and export ids.
    expose_params: bool = False
    #: Honour ``X-KVTier-Report: 1``: token counts of pulls in the answer.
    allow_report: bool = True
    #: A line in the log for every request that is served, and for some of the others.
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
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than zero.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.backoff_first > self.backoff_most:
            raise ConfigError(
                f"backoff_first ({self.backoff_first} s) is longer than backoff_most ({self.backoff_most} s); make the "
                "first back-off the shorter one."
            )
        for path in self.extra_routes:
            if not path.startswith("/") or path.startswith("/kvtier/"):
                raise ConfigError(f"extra_routes has {path!r}; a path begins with / and is not one of the proxy's own.")


_POSITIVE = (
    *("connect_timeout", "prefill_timeout", "first_byte_timeout", "stream_idle_timeout", "answer_timeout"),
    *("client_timeout", "probe_timeout", "query_timeout", "queue_timeout", "retry_after_most"),
    *("backoff_first", "backoff_most", "max_decode_attempts", "max_prefill_attempts"),
    *("max_body_bytes", "max_event_bytes", "conversations_kept", "conversation_ttl"),
)
_NOT_NEGATIVE = (
    *("min_prefill_chars", "affinity_slack", "engine_requests", "queue_limit", "prefixes_kept", "request_tokens"),
)
