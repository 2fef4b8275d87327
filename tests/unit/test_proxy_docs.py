"""docs/proxy.md says what is so."""

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from proxy_fakes import Cluster

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.config_file import ServerOptions, load_settings
from vllm_kvtier.proxy.keys import ApiKeys
from vllm_kvtier.proxy.kv_events.messages import Tier
from vllm_kvtier.proxy.routes.passthrough import _ROUTES

PAGE = (Path(__file__).parents[2] / "docs/proxy.md").read_text("utf-8")
TABLES = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))


def block(kind: str) -> str:
    return re.search(rf"```{kind}\n(.*?)```", PAGE, re.S)[1]


def test_proxy_docs_configuration_file_is_valid(tmp_path):
    file = tmp_path / "proxy.yaml"
    file.write_text(block("yaml"))
    settings = load_settings(str(file), {})
    assert len(settings.proxy.prefill) == len(settings.proxy.decode) == 2 and len(settings.proxy.pooling) == 1
    assert settings.server.host == "0.0.0.0" and settings.proxy.queue_limit == 500


def test_proxy_docs_key_file_is_valid(tmp_path):
    file = tmp_path / "clients.keys"
    file.write_text(re.search(r"```\n(# clients.keys.*?)```", PAGE, re.S)[1])
    keys = ApiKeys.load(str(file))
    assert keys.owner({"authorization": "Bearer sk-9a8b7c6d5e4f3a2b"}) == "bob"


def test_proxy_docs_list_every_option_with_default():
    engine = {f for f in EngineAddress.__struct_fields__ if not f.startswith("kv_")}
    named = set(re.findall(r"`(\w+)`", TABLES))
    wanted = {*ProxyConfig.__struct_fields__, *ServerOptions.__struct_fields__, *engine}
    assert wanted - named - {"prefill", "decode", "pooling"} == set()
    for kind in (ProxyConfig, ServerOptions):
        for field in msgspec.structs.fields(kind):
            name, default = field.name, field.default
            if isinstance(default, bool) or not isinstance(default, int | float):
                continue
            of_options = [line for line in TABLES.splitlines() if line.count("|") > 3]
            (line,) = [line for line in of_options if f"`{name}`" in line.split("|")[1]]
            shown = f"{default / (1 << 20):g}" if name.endswith("_bytes") else f"{default:g}"
            shown = str(default) if isinstance(default, int) and default > 99999 and shown.endswith("e+05") else shown
            values = re.findall(r"[\d.]+", line.split("|")[2])
            names = re.findall(r"`(\w+)`", line.split("|")[1])
            assert values[names.index(name) if len(values) == len(names) else -1] == shown, (name, line)


def test_proxy_docs_list_every_route():
    for path in _ROUTES:
        assert f"`{path}`" in PAGE or f"...{path[path.rindex('/') :]}`" in PAGE, path


@pytest.mark.parametrize("text", re.findall(r"^    (curl (?:[^\n\\]|\\\n)*?)(?:  +#.*)?$", PAGE, re.M))
async def test_proxy_docs_commands_work(text):
    """With a proxy whose engines are named as on the page."""
    words = shlex.split(text.replace("\\\n", " "))
    async with Cluster() as c:
        await c.chat("u1")
        url = next(word for word in words if word.startswith("http")).removeprefix("http://127.0.0.1:8000")
        body = words[words.index("-d") + 1].replace("http://127.0.0.1:8200", c.d[0].url) if "-d" in words else None
        method = "GET" if body is None and "POST" not in words else "POST"
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        reply = await c.client.request(method, url, content=body, headers=headers)
        expected = 409 if url.endswith("/reload") else 200  # this one has no file
        assert reply.status_code == expected, reply.text
        if body:
            assert json.loads(body)


async def test_proxy_docs_metrics_exist():
    section = PAGE[PAGE.index("Metrics begin with") :].partition("\n\n")[0]
    async with Cluster() as c:
        await c.chat("u1", stream=True)
        c.core.metrics.retried("decode")
        page = (await c.client.get("/metrics")).text
        names = re.findall(r"`([a-z_]+)`", section.partition("; with policy `kv_events`")[0])
        outcomes = {"ok", "refused", "too_busy", "failed", "broken", "client_left", "kvtier_proxy_"}
        for name in set(names) - outcomes:
            assert re.search(rf"^kvtier_proxy_{name}(_count)?[ {{]", page, re.M), name


def test_proxy_docs_sample_of_kv_blocks_has_every_tier():
    shown = re.findall(r'^kvtier_proxy_kv_blocks\{events="10.0.0.3:5557",tier="(\w+)"\} \d+\.0$', block("text"), re.M)
    assert shown == [tier.name.lower() for tier in Tier]
