"""Tenants of requests, and the salt that keeps their KV apart.

A tenant is a digest of the name of its API key if the proxy checks keys, else of the bearer token, or of the header
X-Tenant behind a gateway that sets it. This module checks no token: the proxy's keys, the engines (``--api-key``) or
the gateway do. If no component checks tokens, an unknown token is a new tenant without KV.

Every request to an engine carries a ``cache_salt``, which vLLM mixes into the hash of the first block. KV is found by
hash only. Therefore a tenant cannot reach the KV of another, neither in a prefix cache nor by a pull. The salt is a
keyed digest (BLAKE2b, RFC 7693) of the tenant and the client's own salt.
"""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from vllm_kvtier.errors import ConfigError

_DIGEST_BYTES = 32


class Tenants:
    """Derives tenants and salts with a secret, which it never shows. ``trust_header``: X-Tenant names tenants."""

    def __init__(self, secret: bytes | None = None, *, trust_header: bool = False):
        # BLAKE2b takes at most 64 bytes of key; a longer secret is hashed first.
        self._key = hashlib.blake2b(secret or secrets.token_bytes(64)).digest()
        self.trust_header = trust_header

    @classmethod
    def from_file(cls, path: str | None, *, trust_header: bool) -> "Tenants":
        """Read the secret from ``path`` (None: random); raises ConfigError if it cannot serve as one."""
        if path is None:
            return cls(trust_header=trust_header)
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"The salt secret {path} cannot be read ({error.strerror}); check the path.") from error
        if len(secret) < 16:
            raise ConfigError(f"The salt secret {path} has {len(secret)} bytes; write 16 or more random bytes to it.")
        return cls(secret, trust_header=trust_header)

    def digest(self, purpose: bytes, *parts: bytes) -> bytes:
        """32 keyed bytes for ``parts``. Each part is hashed with its length, so that no two lists are ambiguous."""
        state = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES, person=purpose)
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def identify(self, headers: Mapping[str, str], key_name: str | None = None) -> bytes:
        """The tenant's digest. ``headers`` has lower-case names or is case-insensitive. ``key_name``: the owner's name
        of the API key, if the proxy checks keys."""
        if self.trust_header and (named := headers.get("x-tenant", "").strip()):
            return self.digest(b"tenant", b"header", named.encode())
        if key_name is not None:
            return self.digest(b"tenant", b"key", key_name.encode())
        authorization = headers.get("authorization", "").strip()
        if not authorization:
            return self.digest(b"tenant", b"anonymous")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self.digest(b"tenant", b"bearer", token.strip().encode())
        return self.digest(b"tenant", b"other", authorization.encode())

    def salt(self, tenant: bytes, client_salt: str | None) -> str:
        """The ``cache_salt`` for a tenant's request: 64 hexadecimal digits (vLLM allows 128 characters)."""
        own = b"" if client_salt is None else b"salted:" + client_salt.encode("utf-8", "surrogatepass")
        return self.digest(b"salt", tenant, own).hex()

    def media_name(self, tenant: bytes, name: str) -> str:
        """The name for engines of media that a tenant calls ``name``."""
        return self.digest(b"media", tenant, name.encode("utf-8", "surrogatepass")).hex()
