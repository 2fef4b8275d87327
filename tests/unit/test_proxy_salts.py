"""``kvtier`` commands find prompts under the salts that the proxy gave their requests."""

import pytest
import typer
from doctor_fakes import FakeEngine, FakeServer
from proxy_fakes import Cluster
from store_process import Store
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli import inputs
from vllm_kvtier.cli.__main__ import app

KEY, TEXT = "sk-2f0c6a1b9d3e4f57", "word " * 20


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "salt"
    file.write_text("0123456789abcdef")
    return file


@pytest.mark.parametrize("own", ["", "mine"])
@pytest.mark.parametrize("kind", ["anonymous", "key", "header", "bearer"])
async def test_salt_of_a_tenant_is_what_the_proxy_sends(tmp_path, secret, kind, own):
    file = tmp_path / "file"
    headers, option, tenant = {
        "anonymous": ({}, {}, ""),
        "key": ({"Authorization": f"Bearer {KEY}"}, {"api_keys_file": str(file)}, "key:alice"),
        "header": ({"X-Tenant": "team"}, {"trust_tenant_header": True}, "header:team"),
        "bearer": ({"Authorization": f"Bearer {KEY}"}, {}, f"bearer:{file}"),
    }[kind]
    file.write_text(f"alice {KEY}" if kind == "key" else f"{KEY}\n")
    file.chmod(0o600)
    async with Cluster(salt_secret_file=str(secret), **option) as c:
        assert (await c.chat("u1", headers=headers, **({"cache_salt": own} if own else {}))).status_code == 200
        assert c.d[0].seen[0].body["cache_salt"] == inputs.salt_of(own, secret, tenant)


@pytest.mark.parametrize("tenant", ["alice", "key:", "other:alice"])
def test_tenant_that_is_not_named_right_is_refused(secret, tenant):
    with pytest.raises(typer.BadParameter, match="key:NAME"):
        inputs.salt_of("", secret, tenant)
    with pytest.raises(typer.BadParameter, match="--salt-secret"):
        inputs.salt_of("", None, tenant)


@pytest.mark.parametrize("command", ["pin", "inspect", "doctor"])
def test_commands_look_under_the_salt_of_the_proxy(tmp_path, secret, command):
    """And say that proxies salt where they find nothing."""
    file = tmp_path / "prompt"
    file.write_text(TEXT)
    store = Store(tmp_path)
    store.start()
    eventually(lambda: (counts := store.counts()).ready_bytes == counts.pool_bytes)
    server, engine = FakeServer(), FakeEngine(store=store.path)
    engine.stores(TEXT, inputs.salt_of("", secret, "key:alice"))
    text = "--file" if command == "pin" else "--prompt"
    given = [command, "--server", server.url, "--endpoint", engine.address, text, str(file)]
    given += ["--remote", "--socket", store.path] if command == "doctor" else []
    try:
        plain = CliRunner().invoke(app, given)
        salted = CliRunner().invoke(app, [*given, "--salt-secret", str(secret), "--tenant", "key:alice"])
    finally:
        server.stop()
        engine.stop()
        store.kill()
    assert "if it came through `kvtier proxy`, give --salt-secret" in plain.output
    assert "kvtier proxy" not in salted.output
    found = {"inspect": " 96 ", "doctor": "96 tokens of whole blocks are cached", "pin": "6 blocks of 100"}[command]
    assert found in salted.stdout and found not in plain.stdout
