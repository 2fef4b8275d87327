"""Keys, and which connections are accepted."""

import contextlib
import stat
import threading

import pytest
import zmq

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.auth import ClusterKey, is_loopback


def test_cluster_key_create_and_load(tmp_path):
    path = tmp_path / "key"
    ClusterKey.create(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = ClusterKey.load(str(path))
    assert path.read_text().strip() not in repr(key) + str(key.public)
    with pytest.raises(FileExistsError):
        ClusterKey.create(str(path))


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"\xff\xfe" * 20, b"x" * 39, b"x" * 41, b"\x00" * 40, b'"' * 40, "é".encode() * 20]
)
def test_cluster_key_file_invalid_raises_with_fix(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="python -m vllm_kvtier.wire.auth"):
        ClusterKey.load(str(path))


def test_cluster_key_file_missing_or_readable_by_others_raises(tmp_path):
    with pytest.raises(ConfigError, match="make one"):
        ClusterKey.load(str(tmp_path / "nothing"))
    path = tmp_path / "key"
    ClusterKey.create(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ClusterKey.load(str(path))


def test_is_loopback_of_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "", "example.org", "localhost.example.org")))


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def exchange(context, server, port, secure, milliseconds=700) -> bool:
    """Whether a client made by ``secure`` gets through to ``server``."""
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    secure(client)
    client.connect(f"tcp://127.0.0.1:{port}")
    with contextlib.suppress(zmq.Again):  # the handshake was refused already
        client.send(b"hello", zmq.NOBLOCK)
    arrived = bool(server.poll(milliseconds))
    if arrived:
        server.recv_multipart()
    client.close(0)
    return arrived


def test_cluster_key_server_accepts_only_same_key(context):
    public, secret = zmq.curve_keypair()
    key, other = ClusterKey(secret), ClusterKey(zmq.curve_keypair()[1])
    server = context.socket(zmq.ROUTER)
    authenticator = key.secure_server(server)
    clients = zmq.Context()
    try:
        port = server.bind_to_random_port("tcp://127.0.0.1")

        def stranger(socket):  # knows the server's public key, but not the secret
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = key.public

        assert exchange(clients, server, port, key.secure_client, 5000)
        assert not exchange(clients, server, port, stranger)
        assert not exchange(clients, server, port, other.secure_client)
        assert not exchange(clients, server, port, lambda socket: None)  # plain
        assert exchange(clients, server, port, key.secure_client, 5000), "strangers must not shut the door behind them"
    finally:
        clients.destroy(linger=0)
        authenticator.stop()
    assert not [t for t in threading.enumerate() if "auth" in t.name.lower()]
