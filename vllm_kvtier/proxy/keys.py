"""API keys of clients and of the operator.

Each line of a file has an owner's name and a key: ``alice sk-4f3a...``. Two keys of one name are one tenant, so that a
key can be changed without losing the KV. Empty lines and lines that begin with ``#`` are skipped. Keys are kept as
keyed digests and compared in constant time. No message, log line or page contains a key.
"""

import hashlib
import hmac
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

_MIN_CHARS = 16


class ApiKeys:
    """The keys of one file. An empty set admits no request."""

    def __init__(self, keys: Mapping[str, str]):
        """``keys``: key -> its owner's name."""
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(key): name for key, name in keys.items()}

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Raises ConfigError with the number of the bad line, without its content."""
        file = Path(path)
        try:
            mode, text = file.stat().st_mode, file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API keys {path} cannot be read ({error}); check the path.") from error
        if stat.S_IMODE(mode) & 0o007:
            logger.warning("kvtier: proxy: API keys %s are accessible to all users; run `chmod o= %s`", path, path)
        keys: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ConfigError(f"The API keys {path}, line {number}: write NAME KEY, with one space between.")
            name, key = words
            if len(key) < _MIN_CHARS:
                raise ConfigError(
                    f"The API keys {path}, line {number}: the key of {name} has {len(key)} characters; "
                    f"take {_MIN_CHARS} or more."
                )
            if keys.setdefault(key, name) != name:
                raise ConfigError(f"The API keys {path}, line {number}: {name} has the key of {keys[key]}.")
        if not keys:
            raise ConfigError(f"The API keys {path} hold no key; write a line NAME KEY for each client.")
        return cls(keys)

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """The name of the owner of the request's key (``Authorization: Bearer KEY``); None if the key is unknown."""
        digest = self._digest(bearer(headers))
        found = None
        for known, name in self._names.items():
            # All are compared, so that the time does not depend on the key.
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=32).digest()


def bearer(headers: Mapping[str, str]) -> str:
    """The bearer token of a request; "" if it has none."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
