"""Where blocks lie in an object store: ``s3://bucket/prefix``, and one object a block, named by what is in it.

Names follow from contents alone, so that any number of stores may share a prefix, and write to it at the same time,
without knowing of each other.
"""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_kvtier.errors import ConfigError

FORMAT = b"kvtier blocks 1\n"  # what the object ``Place.marker`` says of the others
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,253}[a-z0-9]")
_MOST_PREFIX = 512  # characters; S3 allows 1024 of a whole key


@dataclass(frozen=True)
class Place:
    """``prefix`` is without slashes at its ends, perhaps empty."""

    bucket: str
    prefix: str

    @property
    def marker(self) -> str:
        """Key of the object that says which format the others have."""
        return self._under(".kvtier")

    def key(self, space: bytes, group: int, block_hash: bytes) -> str:
        return self._under(f"{space.hex()}/{group}/{block_hash.hex()}")

    def _under(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_url(url: str) -> Place:
    """Raises ConfigError for what is no ``s3://bucket/prefix``; the message does not repeat a password in it."""
    parts = urlsplit(url)
    if "@" in url:
        raise ConfigError(f"object_url: no credentials in the URL of a bucket; {_WHERE}")
    if parts.scheme != "s3" or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(f"object_url={url!r}: must be s3://bucket/prefix")
    prefix = parts.path.strip("/")
    if len(prefix) > _MOST_PREFIX or not prefix.isprintable():
        raise ConfigError(f"object_url={url!r}: the prefix must be at most {_MOST_PREFIX} printable characters")
    return Place(parts.netloc, prefix)


def store_digest(url: str, endpoint: str) -> str:
    """Equal where two nodes name the same objects in the same words; says nothing of the URL. Raises ConfigError."""
    return hashlib.blake2b(f"{parse_url(url)} {endpoint.rstrip('/')}".encode(), digest_size=16).hexdigest()


def check_endpoint(endpoint: str) -> str:
    """As it is, "" included. Raises ConfigError for what is no http(s) URL, or has credentials in it."""
    if not endpoint:
        return endpoint
    parts = urlsplit(endpoint)
    if "@" in endpoint:
        raise ConfigError(f"object_endpoint: no credentials in the URL; {_WHERE}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"object_endpoint={endpoint!r}: must be http://host:port or https://host")
    return endpoint


_WHERE = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or let the machine have a role"
