"""The errors this package raises on purpose; each message says what happened, to what, and what to do."""


class KVTierError(Exception):
    """Base of every error raised by vllm-kvtier."""


class ConfigError(KVTierError):
    """An option of ``kv_connector_extra_config`` is unknown, of the wrong type or impossible."""


class UnsupportedVLLM(KVTierError):
    """vLLM is missing or of a version this package does not support."""


class UnsupportedLayout(KVTierError):
    """A KV cache whose bytes this package cannot describe; requests pass through without pulls."""


class PeerRefused(KVTierError):
    """The other side of a pull refused, with the reason."""
