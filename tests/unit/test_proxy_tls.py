"""TLS on both sides of the proxy."""

import asyncio
import contextlib
import json
import os
import ssl
from pathlib import Path

import anyio
import httpx
import pytest
from proxy_authority import Authority
from proxy_fakes import Cluster, FakeEngine, QuietServer, turn

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.core import check_secrets
from vllm_kvtier.proxy.engines import engine_http
from vllm_kvtier.proxy.routes.connections import BoundedProtocol


@pytest.mark.parametrize("trusted", ["engines and their client", "engines", "nobody"])
async def test_proxy_tls_to_engines_checks_certificates(tmp_path, trusted):
    authority = Authority(tmp_path)
    cert, key = authority.issue("engine")
    mine = dict(zip(("cert_file", "key_file"), authority.issue("proxy"), strict=True))
    asks = {"ssl_ca_certs": authority.ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    async with Cluster(p=0, d=0, decode=(_unused(),)) as c:
        c._options.pop("decode")
        c.d = [FakeEngine("D0")]
        await c.d[0].start(ssl_certfile=cert, ssl_keyfile=key, **(asks if trusted != "engines" else {}))
        engine = {} if trusted == "nobody" else {"ca_file": authority.ca_file}
        c.core.apply(c.config(engine=engine | (mine if trusted == "engines and their client" else {})))
        reply = await c.chat("u1", stream=True)
        assert reply.status_code == (503 if trusted == "nobody" else 200)


async def test_proxy_tls_without_client_certificate_is_refused_by_engine(tmp_path):
    authority = Authority(tmp_path)
    cert, key = authority.issue("engine")
    async with Cluster(p=0, d=0, decode=(_unused(),)) as c:
        c._options.pop("decode")
        c.d = [FakeEngine("D0")]
        asks = {"ssl_ca_certs": authority.ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        await c.d[0].start(ssl_certfile=cert, ssl_keyfile=key, **asks)
        c.core.apply(c.config(engine={"ca_file": authority.ca_file}))
        assert (await c.chat("u1")).status_code == 503 and not c.d[0].seen


async def test_proxy_tls_reload_uses_renewed_certificates(tmp_path):
    """The same files with other content: the engine is connected to anew."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("engine")
    async with Cluster(p=0, d=0, decode=(_unused(),)) as c:
        c._options.pop("decode")
        c.d = [FakeEngine("D0")]
        other = tmp_path / "other"
        other.mkdir()
        (tmp_path / "trusted.pem").write_bytes(open(Authority(other).ca_file, "rb").read())
        await c.d[0].start(ssl_certfile=cert, ssl_keyfile=key)
        config = c.config(engine={"ca_file": str(tmp_path / "trusted.pem")})
        c.core.apply(config)
        assert (await c.chat("u1")).status_code == 503
        (tmp_path / "trusted.pem").write_bytes(open(authority.ca_file, "rb").read())
        engine = c.core.decode[0]
        c.core.apply(config)
        await c.until(lambda: engine.healthy)
        assert (await c.chat("u1")).status_code == 200
        assert c.core.decode[0] is engine, "so that its conversations stay"
        # What an operator has drained stays so.
        await c.client.post("/kvtier/drain", json={"engine": c.d[0].url})
        os.utime(tmp_path / "trusted.pem", (1, 1))
        c.core.apply(config)
        assert (await c.chat("u1")).status_code == 503 and len(c.d[0].seen) == 1
        await c.client.post("/kvtier/resume", json={"engine": c.d[0].url})
        assert (await c.chat("u1")).status_code == 200
        assert c.core.decode[0] is engine and c.core.ready and len(c.core.routes) == 1
        # New connections are made with what the files have now.
        (tmp_path / "trusted.pem").write_bytes(open(Authority(tmp_path / "other").ca_file, "rb").read())
        c.core.apply(config)
        assert (await c.chat("u1")).status_code == 503 and len(c.d[0].seen) == 2


async def test_proxy_reload_makes_one_context_for_the_same_certificates(tmp_path, monkeypatch):
    """A file of all authorities takes 30 ms and more to read, for which no client gets a byte."""
    made, make = [], ssl.create_default_context
    ca_file = Authority(tmp_path).ca_file
    decode = tuple(EngineAddress(f"https://127.0.0.1:{port}", ca_file=ca_file) for port in (1, 2, 3))
    async with Cluster(p=0, d=1) as c:
        monkeypatch.setattr(ssl, "create_default_context", lambda *args, **kw: made.append(kw) or make(*args, **kw))
        for limit in (5, 6):
            c.core.apply(ProxyConfig(decode=decode, queue_limit=limit))
        assert len(made) == 1
        os.utime(ca_file, (1, 1))
        c.core.apply(ProxyConfig(decode=decode))
        assert len(made) == 2


async def test_proxy_reload_reads_keys_and_certificates_once(tmp_path, monkeypatch):
    """What is checked is used, whatever is written meanwhile: no reload fails half way."""
    authority = Authority(tmp_path)
    address = EngineAddress("https://127.0.0.1:1", ca_file=authority.ca_file, api_key_file=str(tmp_path / "engine.key"))
    (tmp_path / "engine.key").write_text("engine-key-0123456789")
    read = []
    monkeypatch.setattr(engine_http, "_tls", lambda *of, tls=engine_http._tls: read.append("tls") or tls(*of))
    key = engine_http.read_key
    monkeypatch.setattr(engine_http, "read_key", lambda *of: read.append("key") or key(*of))
    async with Cluster(p=0, d=1) as c:
        plain = EngineAddress(c.d[0].url)
        for _ in range(2):
            read.clear()
            c.core.apply(ProxyConfig(decode=(plain, address)))
            assert sorted(read) == ["key", "tls", "tls"]
        Path(authority.ca_file).write_bytes(b"")
        before = list(c.core.decode)
        with pytest.raises(ConfigError):
            c.core.apply(ProxyConfig(decode=(address,)))
        assert list(c.core.decode) == before and not any(engine.leaving for engine in before)


async def test_proxy_serves_https(tmp_path):
    authority = Authority(tmp_path)
    cert, key = authority.issue("proxy")
    async with Cluster() as c:
        server = QuietServer(c.app, lifespan="off", ssl_certfile=cert, ssl_keyfile=key)
        await server.begin()
        context = ssl.create_default_context(cafile=authority.ca_file)
        async with httpx.AsyncClient(trust_env=False, verify=context) as client:
            reply = await client.post(f"https://127.0.0.1:{server.port}/v1/chat/completions", json=turn("u1"))
            assert reply.status_code == 200
        await server.end()


@pytest.mark.parametrize("pieces", [1, 200])
async def test_request_behind_a_refused_one_is_not_read_with_tls(tmp_path, pieces):
    """TLS delivers what it has received while it closes a connection."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("proxy")
    inner = json.dumps(turn("smuggled")).encode()
    inner = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner
    outer = b"POST /v1/audio/translations HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    outer += b"Content-Length: %d\r\n\r\n" % (len(inner) * pieces)
    async with Cluster(p=0) as c:
        options = {"http": BoundedProtocol, "ssl_certfile": cert, "ssl_keyfile": key}
        server = QuietServer(c.app, lifespan="off", **options)
        await server.begin()
        context = ssl.create_default_context(cafile=authority.ca_file)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        for piece in (outer, *[inner] * pieces):  # in records of their own
            writer.write(piece)
        with anyio.fail_after(20), contextlib.suppress(ConnectionError):
            assert (await reader.read()).count(b"HTTP/1.1 ") == 1
        writer.transport.abort()
        await c.chat("hello")
        assert len(c.d[0].seen) == 1
        await server.end()


def _unused():
    return EngineAddress("http://unused:1")


@pytest.mark.parametrize("field", ["ca_file", "cert_file"])
def test_proxy_tls_unreadable_certificates_raise(tmp_path, field):
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    files = {"ca_file": str(broken)} if field == "ca_file" else {"cert_file": str(broken), "key_file": str(broken)}
    for address in (EngineAddress("https://d:1", **files), EngineAddress("https://d:1", ca_file="/none")):
        with pytest.raises(ConfigError, match="ca_file, cert_file and key_file"):
            check_secrets(ProxyConfig(decode=(address,)))
