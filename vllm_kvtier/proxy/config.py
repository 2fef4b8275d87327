"""ProxyConfig: every option of the proxy, its default and meaning, checked when it is made."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from vllm_kvtier.errors import ConfigError


class EngineAddress(msgspec.Struct, frozen=True):
    """Where one engine is: its HTTP base URL and, if known, where its connector's endpoint listens.

    ``kv_host`` and ``kv_port`` are only needed where the engine's answers do not carry them (answers that
    vLLM before 0.33 streams), or where others must reach the endpoint under another name than the engine
    says.
    """

    url: str
    kv_host: str | None = None
    kv_port: int | None = None

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Read ``http://host:port[,kv=HOST:PORT]``; raises ConfigError with what is wrong."""
        url, *extras = [part.strip() for part in text.split(",")]
        kv_host: str | None = None
        kv_port: int | None = None
        for extra in extras:
            name, _, value = extra.partition("=")
            host, _, port = value.rpartition(":")
            number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
            if name != "kv" or not host or not 0 < number < 65536:
                raise ConfigError(
                    f"The engine address {text!r} has {extra!r} after the URL; write kv=HOST:PORT there."
                )
            kv_host, kv_port = host.strip("[]"), number
        return cls(url=url.rstrip("/"), kv_host=kv_host, kv_port=kv_port)

    def check(self) -> None:
        """Raise ConfigError if the URL cannot be an engine's."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"The engine URL {self.url!r} is not one: write http://HOST:PORT.")
        if parts.username or parts.password:
            # It would show up in logs and in /kvtier/state.
            raise ConfigError(
                f"The engine URL for {parts.hostname} holds a password; engines take API keys instead."
            )
        if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"The engine URL {self.url!r} must end before /v1 and hold no query.")


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the proxy; times are seconds, sizes bytes. Raises ConfigError where they cannot work."""

    #: Engines that prefill. None at all: every decode engine computes alone.
    prefill: tuple[EngineAddress, ...] = ()
    #: Engines that decode; at least one.
    decode: tuple[EngineAddress, ...]

    #: Tell P which D has the conversation, so that P pulls from it (needs ``bidirectional`` in the engines).
    bidirectional: bool = True
    #: Prompts with fewer characters are computed by D alone (a token counts as four characters).
    min_prefill_chars: int = 0

    #: A connection to an engine must be there within this time.
    connect_timeout: float = 5.0
    #: P must have answered within this time, queue included; later D computes alone.
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

    #: A failed engine is set aside this long before its first probe; the time doubles with each failure...
    backoff_first: float = 0.5
    #: ... up to this.
    backoff_most: float = 30.0
    #: So many decode engines are asked for one request at most, lest one request that kills engines kills
    #: all.
    max_decode_attempts: int = 3

    #: Larger requests are refused with 413.
    max_body_bytes: int = 64 << 20
    #: A larger single event of a stream, or a larger answer of P, counts as broken. Bounds the proxy's
    #: memory.
    max_event_bytes: int = 32 << 20

    #: So many conversations' routes are kept; the least recently used goes first.
    conversations_kept: int = 65536
    #: A route that was not used for so long is forgotten.
    conversation_ttl: float = 3600.0
    #: A conversation recognised by its text (not by an id) leaves its D when that one has so many more
    #: requests under way than the idlest: many conversations may begin alike, and P can pull from the old D
    #: anyway.
    affinity_slack: int = 16

    #: Take the tenant from the header X-Tenant. Only behind a gateway that sets it itself.
    trust_tenant_header: bool = False
    #: File whose bytes key the tenants' salts. Proxies that share engines need the same; default: random
    #: per start.
    salt_secret_file: str | None = None
    #: The cluster key of the engines' endpoints, where they have one; used to release KV that nobody will
    #: pull, and for queries.
    cluster_key_file: str | None = None
    #: Debugging: leave ``kv_transfer_params`` in answers. Shows clients the engines' addresses and export
    #: ids.
    expose_params: bool = False
    #: Honour ``X-KVTier-Report: 1``: token counts of pulls in the answer.
    allow_report: bool = True

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("The proxy has no decode engine: give at least one --decode http://HOST:PORT.")
        for address in (*self.prefill, *self.decode):
            address.check()
        for role, addresses in (("prefill", self.prefill), ("decode", self.decode)):
            urls = [address.url for address in addresses]
            for url in urls:
                if urls.count(url) > 1:
                    raise ConfigError(f"The {role} engine {url} is named twice; name it once.")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than zero.")
        for name in ("min_prefill_chars", "affinity_slack"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative.")
        if self.backoff_first > self.backoff_most:
            raise ConfigError(
                f"backoff_first ({self.backoff_first} s) is longer than backoff_most "
                f"({self.backoff_most} s); make the first back-off the shorter one."
            )


_POSITIVE = (
    "connect_timeout",
    "prefill_timeout",
    "first_byte_timeout",
    "stream_idle_timeout",
    "answer_timeout",
    "client_timeout",
    "probe_timeout",
    "query_timeout",
    "backoff_first",
    "backoff_most",
    "max_decode_attempts",
    "max_body_bytes",
    "max_event_bytes",
    "conversations_kept",
    "conversation_ttl",
)
