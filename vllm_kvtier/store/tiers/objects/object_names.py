"""Names of blocks in an object store: one object per block below ``s3://bucket/prefix``, named by its content.

Names follow from contents alone. Any number of stores may share a prefix and write to it without coordination.
"""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_kvtier.errors import ConfigError

FORMAT = b"kvtier blocks 1\n"  # content of the object ``ObjectLocation.marker``
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,253}[a-z0-9]")
_MAX_PREFIX = 512  # characters; S3 allows 1024 of a whole key


@dataclass(frozen=True)
class ObjectLocation:
    """``prefix``: without slashes at its ends; may be empty."""

    bucket: str
    prefix: str

    @property
    def marker(self) -> str:
        """Key of the object that holds the format of the others."""
        return self._under(".kvtier")

    def key(self, namespace_id: bytes, group: int, block_hash: bytes) -> str:
        return self._under(f"{namespace_id.hex()}/{group}/{block_hash.hex()}")

    def _under(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_url(url: str) -> ObjectLocation:
    """Parse ``s3://bucket/prefix``. Raises ConfigError; its message never repeats credentials."""
    parts = urlsplit(url)
    if "@" in url:
        raise ConfigError(f"object_url: the URL must not contain credentials; {_WHERE}")
    if parts.scheme != "s3" or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(f"object_url={url!r}: must be s3://bucket/prefix")
    prefix = parts.path.strip("/")
    if len(prefix) > _MAX_PREFIX or not prefix.isprintable():
        raise ConfigError(f"object_url={url!r}: the prefix must be at most {_MAX_PREFIX} printable characters")
    return ObjectLocation(parts.netloc, prefix)


def store_digest(url: str, endpoint: str) -> str:
    """A digest by which two nodes find that they use the same object store; it hides the URL. Raises ConfigError."""
    return hashlib.blake2b(f"{parse_url(url)} {endpoint.rstrip('/')}".encode(), digest_size=16).hexdigest()


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint, "" included. Raises ConfigError if it is no http(s) URL or contains credentials."""
    if not endpoint:
        return endpoint
    parts = urlsplit(endpoint)
    if "@" in endpoint:
        raise ConfigError(f"object_endpoint: the URL must not contain credentials; {_WHERE}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"object_endpoint={endpoint!r}: must be http://host:port or https://host")
    return endpoint


_WHERE = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or let the machine have a role"
