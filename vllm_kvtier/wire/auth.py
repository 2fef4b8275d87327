"""The cluster key: authentication and encryption of connections between nodes.

Without a cluster key an endpoint listens on loopback only, unencrypted. With one, every connection is CurveZMQ.
The key file holds one Curve25519 secret (Z85, 40 characters, mode 0600). All engines and proxies of a cluster share
it, use it as their own long-term key, and accept only peers that prove possession of it.
"""

import ipaddress
import os
import stat
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_kvtier.errors import ConfigError

Z85_SECRET = 40


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ClusterKey:
    """A shared Curve25519 key pair; ``repr`` never shows the secret."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self.public = zmq.curve_public(secret)

    def __repr__(self) -> str:
        return "ClusterKey(...)"

    @classmethod
    def load(cls, path: str) -> "ClusterKey":
        """Raises ConfigError if the file is missing, readable by others or not a key. To another
        user's process, root's file may be readable by its group: Kubernetes mounts a Secret so for an fsGroup."""
        file = Path(path)
        try:
            state, text = file.stat(), file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"cluster_key_file {path}: {error.strerror}; make one with `python -m vllm_kvtier.wire.auth FILE`"
            ) from error
        if stat.S_IMODE(state.st_mode) & (0o037 if state.st_uid == 0 != os.geteuid() else 0o077):
            raise ConfigError(f"cluster_key_file {path} is readable by others; run `chmod 600 {path}`")
        try:
            if len(text) != Z85_SECRET:
                raise ValueError("wrong length")
            return cls(text)
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError(
                f"cluster_key_file {path} does not hold a key (one line of {Z85_SECRET} Z85 characters); make one "
                "with `python -m vllm_kvtier.wire.auth FILE`"
            ) from error

    @staticmethod
    def create(path: str) -> None:
        """Write a new key, mode 0600; refuses to overwrite."""
        _, secret = zmq.curve_keypair()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret + b"\n")

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = self._secret, self.public, self.public

    def secure_server(self, socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Accept only holders of the key. The returned authenticator must be stopped before the context ends."""
        public = self.public

        class SameKey:
            def callback(self, domain: str, key: bytes) -> bool:
                return key == public

        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        # Needs the socket's own domain: "*" matches only sockets without a domain.
        authenticator.configure_curve_callback("kvtier", SameKey())
        socket.curve_secretkey, socket.curve_publickey, socket.curve_server = self._secret, self.public, True
        socket.zap_domain = b"kvtier"
        return authenticator


def main() -> None:
    import sys

    if len(sys.argv) != 2:
        sys.exit("usage: python -m vllm_kvtier.wire.auth FILE   (writes a new cluster key)")
    ClusterKey.create(sys.argv[1])


if __name__ == "__main__":
    main()
