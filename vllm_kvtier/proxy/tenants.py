"""Who asks, and the salt that keeps tenants' KV apart.

A tenant is a digest: of the name of its API key where the proxy checks keys, else of the bearer token, or of the
header X-Tenant behind a gateway that sets it. Nothing here checks a token: the proxy's keys do, or the engines
(``--api-key``), or the gateway. Where nobody does, a wrong token is just another, empty, tenant.

Every request that leaves the proxy carries a ``cache_salt``, which vLLM mixes into the first block's hash.
KV is only ever found by hash, so a tenant who cannot make another's salt cannot reach its KV, be it in an
engine's own prefix cache or over a pull. The salt is a keyed digest (BLAKE2b, RFC 7693) of the tenant and
the client's own salt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from vllm_kvtier.errors import ConfigError

_DIGEST_BYTES = 32


class Tenants:
    """Names tenants and salts their requests; holds the secret, and never shows it."""

    def __init__(self, secret: bytes | None = None, *, trust_header: bool = False):
        # BLAKE2b takes 64 bytes of key at most; a longer secret counts in full.
        self._key = hashlib.blake2b(secret or secrets.token_bytes(64)).digest()
        self._trust_header = trust_header

    @classmethod
    def from_file(cls, path: str | None, *, trust_header: bool) -> Tenants:
        """Read the secret from ``path`` (None: random); raises ConfigError if it cannot serve as one."""
        if path is None:
            return cls(trust_header=trust_header)
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"The salt secret {path} cannot be read ({error.strerror}); check the path.") from error
        if len(secret) < 16:
            raise ConfigError(f"The salt secret {path} holds {len(secret)} bytes; put 16 or more random ones there.")
        return cls(secret, trust_header=trust_header)

    def digest(self, purpose: bytes, *parts: bytes) -> bytes:
        """32 keyed bytes for ``parts``; each counts with its length, so no two lists of parts are alike."""
        state = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES, person=purpose)
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def identify(self, headers: Mapping[str, str], key_name: str | None = None) -> bytes:
        """The tenant's digest; ``headers`` has lower-case names or is case-insensitive. ``key_name``: of the API key
        that the proxy has checked, if it checks any."""
        if self._trust_header and (named := headers.get("x-tenant", "").strip()):
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
