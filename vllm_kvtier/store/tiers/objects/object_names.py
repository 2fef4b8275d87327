"""Names of blocks in an object store: one object per block, named by its content, below ``s3://bucket/prefix``,
``gs://bucket/prefix``, ``az://container/prefix`` or in a directory that nodes share, ``file:///directory``.

Names follow from contents alone. Any number of stores may share a prefix and write to it without coordination.
"""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from vllm_kvtier.errors import ConfigError

FORMAT = b"kvtier blocks 1\n"  # content of the object ``ObjectLocation.marker``
FORMS = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,253}[a-z0-9]")
_MAX_PREFIX = 512  # characters; S3 allows 1024 of a whole key


@dataclass(frozen=True)
class ObjectLocation:
    """``bucket``: of ``file``, the directory. ``prefix``: without slashes at its ends; may be empty."""

    bucket: str
    prefix: str
    scheme: str = "s3"

    @property
    def marker(self) -> str:
        """Key of the object that holds the format of the others."""
        return self._under(".kvtier")

    def key(self, namespace_id: bytes, group: int, block_hash: bytes) -> str:
        name = block_hash.hex()
        if self.scheme == "file":  # large directories are slow
            name = f"{name[:2]}/{name}"
        return self._under(f"{namespace_id.hex()}/{group}/{name}")

    def _under(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + f"/{self.prefix}" * bool(self.prefix)


def parse_url(url: str) -> ObjectLocation:
    """Parse a URL of one of ``FORMS``. Raises ConfigError; its message never repeats credentials."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = unquote(parts.path).rstrip("/")
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path or not path.isprintable():
            raise ConfigError(f"object_url={url!r}: must be file:///directory, with an absolute path")
        return ObjectLocation(path, "", "file")
    if "@" in url:
        where = CREDENTIALS.get(parts.scheme, CREDENTIALS["s3"])
        raise ConfigError(f"object_url: the URL must not contain credentials; {where}")
    if parts.scheme not in CREDENTIALS or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(f"object_url={url!r}: must be {FORMS}")
    prefix = parts.path.strip("/")
    if len(prefix) > _MAX_PREFIX or not prefix.isprintable():
        raise ConfigError(f"object_url={url!r}: the prefix must be at most {_MAX_PREFIX} printable characters")
    return ObjectLocation(parts.netloc, prefix, parts.scheme)


def store_digest(url: str, endpoint: str) -> str:
    """A digest by which two nodes find that they use the same object store; it hides the URL. Raises ConfigError."""
    return hashlib.blake2b(f"{parse_url(url)} {endpoint.rstrip('/')}".encode(), digest_size=16).hexdigest()


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint, "" included. Raises ConfigError if it is no http(s) URL or contains credentials."""
    if not endpoint:
        return endpoint
    parts = urlsplit(endpoint)
    if "@" in endpoint:
        raise ConfigError(f"object_endpoint: the URL must not contain credentials; {CREDENTIALS['s3']}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"object_endpoint={endpoint!r}: must be http://host:port or https://host")
    return endpoint


CREDENTIALS = {  # by scheme: where they come from
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give the machine an identity",
}
