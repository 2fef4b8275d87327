"""The configuration file, the command, and a running proxy that takes a changed file."""

import asyncio
import contextlib
import json
import re
import signal
import ssl
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import httpx
import pytest
from proxy_authority import Authority
from proxy_fakes import FakeEngine, text_of, turn
from typer.testing import CliRunner

from vllm_kvtier.cli import proxy as proxy_command
from vllm_kvtier.cli.__main__ import app as kvtier
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.config_file import ServerOptions, Settings, load_settings
from vllm_kvtier.proxy.kv_events.index import BLOCK_BYTES
from vllm_kvtier.proxy.reloading import Reloader
from vllm_kvtier.store.memory.memory_limits import MemoryLimits

FORMS = {
    "yaml": """
port: 9000
queue_limit: 7
stream_idle_timeout: 5
api_keys_file: clients.keys
extra_routes: [/custom]
engines:
  - {role: prefill, url: "http://p:1/", weight: 2, kv: "10.0.0.1:7000"}
  - {role: decode, url: https://d:1, ca_file: /etc/ca.pem, max_requests: 9}
""",
    "toml": """
port = 9000
queue_limit = 7
stream_idle_timeout = 5
api_keys_file = "clients.keys"
extra_routes = ["/custom"]
[[engines]]
role = "prefill"
url = "http://p:1/"
weight = 2
kv = "10.0.0.1:7000"
[[engines]]
role = "decode"
url = "https://d:1"
ca_file = "/etc/ca.pem"
max_requests = 9
""",
    "json": json.dumps(
        {
            "port": 9000,
            "queue_limit": 7,
            "stream_idle_timeout": 5,
            "api_keys_file": "clients.keys",
            "extra_routes": ["/custom"],
            "engines": [
                {"role": "prefill", "url": "http://p:1/", "weight": 2, "kv": "10.0.0.1:7000"},
                {"role": "decode", "url": "https://d:1", "ca_file": "/etc/ca.pem", "max_requests": 9},
            ],
        }
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_configuration_file_formats_are_equivalent(tmp_path, form):
    file = tmp_path / f"proxy.{form}"
    file.write_text(FORMS[form])
    settings = load_settings(str(file), {"queue_limit": None, "prefill": ()})
    assert settings.server == ServerOptions(port=9000)
    assert settings.proxy == ProxyConfig(
        prefill=(EngineAddress("http://p:1", "10.0.0.1", 7000, weight=2.0),),
        decode=(EngineAddress("https://d:1", ca_file="/etc/ca.pem", max_requests=9),),
        queue_limit=7,
        stream_idle_timeout=5.0,
        api_keys_file=str(tmp_path / "clients.keys"),
        extra_routes=("/custom",),
    )
    over = load_settings(str(file), {"queue_limit": 8, "port": 1})
    assert over.proxy.queue_limit == 8 and over.server.port == 1


D = "engines: [{role: decode, url: 'http://d:1'}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "cannot be parsed"),
        ("5", "must be a mapping"),
        ("", "must be a mapping"),
        ("on: 1", "options by name"),
        ("engines: [{1: 2, role: decode}]", "role is missing"),
        ("port: 9000", "no decode engine"),
        (D + "qeue_limit: 5", "unknown field `qeue_limit`"),
        (D + "queue_limit: many", r"Expected `int`, got `str` - at `\$.queue_limit`"),
        (D + "port: 70000", "port is 70000"),
        (D + "log_level: loud", "log_level is 'loud'"),
        (D + "tls_cert_file: x", "Only one of tls_cert_file"),
        (D + "decode: [http://d:1]", "the only place for engines"),
        ("engines: {}", "engines must be a list"),
        ("engines: [{url: 'http://d:1'}]", "engine 1: the role .* must be one of prefill, decode, pooling"),
        ("engines: [{role: decode}]", "engine 1: .*`url`"),
        ("engines: [{role: decode, url: 'http://d:1', wieght: 2}]", "engine 1: .*`wieght`"),
        ("engines: [{role: decode, url: 'http://d:1', weight: -2}]", "weight of http://d:1 is -2"),
        ("engines: [{role: decode, url: 'http://d:1', kv: x}]", "kv=HOST:PORT"),
        ("engines: [{role: decode, url: 'http://d:1', ca_file: x}]", "begins with http:"),
        ("engines: [{role: decode, url: 'https://d:1', cert_file: x}]", "only one of cert_file and key_file"),
        (D + "queue_timeout: .nan", "queue_timeout is nan"),
        (D + "extra_routes: [custom]", "a path must begin with /"),
        (D + "extra_routes: [/kvtier/drain]", "not with /kvtier/"),
    ],
)
def test_configuration_file_error_names_cause(tmp_path, text, words):
    file = tmp_path / "proxy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_settings(str(file), {})


def test_configuration_file_unreadable_or_conflicting_raises(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(str(tmp_path / "none.yaml"), {})
    (tmp_path / "proxy.ini").write_text(D)
    with pytest.raises(ConfigError, match="must end in"):
        load_settings(str(tmp_path / "proxy.ini"), {})
    (tmp_path / "proxy.yaml").write_text(D)
    with pytest.raises(ConfigError, match="name them in one place"):
        load_settings(str(tmp_path / "proxy.yaml"), {"decode": (EngineAddress("http://d:2"),)})


# ---------------------------------------------------------------- the command


def test_proxy_warns_of_indexes_of_kv_events_that_may_not_fit():
    engines = tuple(EngineAddress(f"http://e{i}:1", events=f"e{i}:2") for i in range(4))
    config = ProxyConfig(prefill=engines[:2], decode=engines, routing_policy="kv_events")
    needed = 4 * config.max_blocks * BLOCK_BYTES
    room, too_little = (lambda: MemoryLimits(1 << 40, 4 << 30, "m")), (lambda: MemoryLimits(needed, needed // 2, "m"))
    assert proxy_command.kv_events_warning(config, room) == ""
    warning = proxy_command.kv_events_warning(config, too_little)
    assert "4 engines may take 640 MiB" in warning
    fitting = int(re.search(r"lower max_blocks to (\d+)", warning)[1])
    assert 0 < fitting < config.max_blocks
    fits = ProxyConfig(decode=engines, routing_policy="kv_events", max_blocks=fitting)
    assert proxy_command.kv_events_warning(fits, too_little) == ""
    assert proxy_command.kv_events_warning(ProxyConfig(decode=engines), too_little) == ""


def test_proxy_warns_of_a_policy_of_kv_events_without_events():
    config = ProxyConfig(decode=(EngineAddress("http://d:1"),), routing_policy="kv_events")
    assert "no engine has events" in proxy_command.kv_events_warning(config)


KEYED = EngineAddress("http://d:1", api_key_file="engine.key")


@pytest.mark.parametrize(
    ("engines", "options", "server", "warns"),
    [
        ({"decode": (KEYED,)}, {}, {}, True),
        ({"decode": (EngineAddress("http://d:2"),), "pooling": (KEYED,)}, {}, {}, True),
        ({"decode": (EngineAddress("http://d:2"),)}, {}, {}, False),
        ({"decode": (KEYED,)}, {"admin_key_file": "admin.key"}, {}, True),
        ({"decode": (KEYED,)}, {"api_keys_file": "clients.keys"}, {}, False),
        ({"decode": (KEYED,)}, {"trust_tenant_header": True}, {}, False),
        ({"decode": (KEYED,)}, {}, {"tls_cert_file": "c", "tls_key_file": "k"}, True),
        ({"decode": (KEYED,)}, {}, {"tls_cert_file": "c", "tls_key_file": "k", "tls_client_ca_file": "ca"}, False),
    ],
)
def test_proxy_warns_if_engines_have_keys_and_clients_need_none(engines, options, server, warns):
    warning = proxy_command.keys_warning(Settings(ServerOptions(**server), ProxyConfig(**engines, **options)))
    assert ("http://d:1 has api_key_file, and no client is checked" in warning) == bool(warning) == warns


def test_proxy_options_have_documented_flags():
    shown = CliRunner().invoke(kvtier, ["proxy", "--help"], env={"COLUMNS": "80"}).output
    helps = dict(re.findall(r"^  --(\S+)(.*(?:\n {10}.*)*)", shown, re.M))
    for kind in (ProxyConfig, ServerOptions):
        for name in kind.__struct_fields__:
            flag = {"allow_report": "report", "extra_routes": "extra-route"}.get(name, name.replace("_", "-"))
            assert len(re.sub(r"--\S+|<\w+>|\s", "", helps[flag])) > 10, f"--{flag} has no help"
    assert "(default: 1024)" in shown


@pytest.mark.parametrize("options", [[], ["--decode", "nonsense"], ["--decode", "http://d:1", "--queue-limit", "-1"]])
def test_proxy_command_with_wrong_options_exits_2_with_message(options):
    result = CliRunner().invoke(kvtier, ["proxy", *options])
    assert result.exit_code == 2 and result.output.startswith("error: ") and result.output.count("\n") == 1


class Process:
    """``python -m vllm_kvtier.proxy`` with a file of engines."""

    def __init__(self, folder, *flags):
        self.file = folder / "proxy.yaml"
        self.flags = flags
        self.lines = []

    def write(self, *engines, text=None, **options):
        entries = [{"role": "decode", "url": engine.url} for engine in engines]
        # As an editor does it: another file in its place.
        other = self.file.with_suffix(".new")
        other.write_text(text or json.dumps({"engines": entries} | options))
        other.replace(self.file)

    async def __aenter__(self):
        command = [sys.executable, "-m", "vllm_kvtier.proxy", "--config", str(self.file), "--port", "0", *self.flags]
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        line = await self.until("running on ")
        url = line.partition("running on ")[2].split()[0]
        self.client = httpx.AsyncClient(trust_env=False, base_url=url, timeout=20)
        return self

    async def __aexit__(self, *exc):
        await self.client.aclose()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.communicate()

    async def until(self, words):
        while True:
            line = (await asyncio.wait_for(self.process.stderr.readline(), 20)).decode()
            assert line, f"the proxy ended without {words!r}:\n{''.join(self.lines)}"
            self.lines.append(line)
            if words in line:
                return line

    async def chat(self, text):
        reply = await self.client.post("/v1/chat/completions", json=turn(text), headers={"X-Request-Id": f"id-{text}"})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"][:2]


@pytest.fixture
async def engines():
    made = [await FakeEngine(f"D{i}").start() for i in range(2)]
    yield made
    for engine in made:
        await engine.kill()


@pytest.mark.parametrize("how", ["file", "hup", "post"])
async def test_running_proxy_reloads_engine_list(tmp_path, engines, how):
    proxy = Process(tmp_path)
    proxy.write(engines[0])
    async with proxy:
        assert await proxy.chat("a") == "D0"
        await proxy.until("[id-a]")
        proxy.write(engines[1])
        if how == "hup":
            proxy.process.send_signal(signal.SIGHUP)
        elif how == "post":
            assert (await proxy.client.post("/kvtier/reload")).json() == {"reloaded": True}
        if how != "post":
            await proxy.until("yaml reloaded")
        assert await proxy.chat("b") == "D1"
        # A file that is wrong changes nothing.
        proxy.write(text="engines: 5")
        reply = await proxy.client.post("/kvtier/reload")
        assert reply.status_code == 422 and "engines must be a list" in reply.json()["error"]["message"]
        proxy.process.send_signal(signal.SIGHUP)
        await proxy.until("the old configuration stays")
        assert await proxy.chat("c") == "D1"


async def test_running_proxy_warns_of_unchecked_clients_at_start_and_reload(tmp_path, engines):
    (tmp_path / "engine.key").write_text("engine-key-0123456789")
    proxy = Process(tmp_path)
    entry = {"role": "decode", "url": engines[0].url, "api_key_file": "engine.key"}
    proxy.write(text=json.dumps({"engines": [entry]}))
    async with proxy:
        count = lambda: "".join(proxy.lines).count("no client is checked")  # noqa: E731
        assert count() == 1
        proxy.write(text=json.dumps({"engines": [entry], "queue_limit": 7}))
        await proxy.until("yaml reloaded")
        assert count() == 2


async def test_reload_warns_of_the_server_options_that_serve(tmp_path):
    """Others need a restart, which a warning says."""
    serving = ServerOptions(tls_cert_file="c", tls_key_file="k", tls_client_ca_file="ca")
    checks = Settings(serving, ProxyConfig(decode=(EngineAddress("http://d:2"),)))
    changed = Settings(ServerOptions(), ProxyConfig(decode=(KEYED,)))
    core, warned, given = SimpleNamespace(apply=lambda config: None), [], []
    reloader = Reloader(SimpleNamespace(core=core), "", checks, lambda: changed, given.append, warned.append)
    for _ in range(2):
        await reloader.reload()
    assert given == [changed.server] * 2 and warned == [Settings(serving, changed.proxy)] * 2


async def test_files_are_watched_after_any_error(tmp_path, engines):
    proxy = Process(tmp_path)
    proxy.write(engines[0])
    async with proxy:
        for text in ("on: 1", json.dumps({"engines": [], "api_keys_file": "a\0"})):
            proxy.write(text=text)
            await proxy.until("the old configuration stays")
        proxy.write(engines[1])
        await proxy.until("yaml reloaded")
        assert await proxy.chat("a") == "D1"


async def test_file_that_a_reload_names_is_watched(tmp_path, engines):
    keys = _folder(tmp_path / "elsewhere") / "clients.keys"
    keys.write_text("ann sk-0123456789abcdef")
    proxy = Process(tmp_path)
    proxy.write(engines[0])
    async with proxy:
        proxy.write(engines[0], api_keys_file=str(keys))
        await proxy.until("yaml reloaded")
        # The files are watched anew a moment after the line.
        headers = {"Authorization": "Bearer sk-another-key-of-ann"}
        with anyio.fail_after(20):
            while (await proxy.client.get("/v1/models", headers=headers)).is_error:
                keys.write_text("ann sk-another-key-of-ann")
                await asyncio.sleep(0.1)


async def test_proxy_sigterm_waits_for_streams(tmp_path, engines):
    proxy = Process(tmp_path, "--drain-delay", "0.3")
    proxy.write(engines[0])
    async with proxy:
        engines[0].gate = asyncio.Semaphore(1)
        body = turn("u1", stream=True)
        request = proxy.client.build_request("POST", "/v1/chat/completions", json=body)
        reply = await proxy.client.send(request, stream=True)
        pieces = reply.aiter_raw()
        got = await anext(pieces)
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until("/ready answers 503")
        assert (await proxy.client.get("/ready")).status_code == 503
        await proxy.until("Waiting for")
        proxy.process.send_signal(signal.SIGHUP)  # as of a terminal that is closed, or a tool that renews certificates
        assert proxy.process.returncode is None
        for _ in range(9):
            engines[0].gate.release()
        got += b"".join([piece async for piece in pieces])
        assert text_of(got) == "".join(engines[0].text(body, i) for i in range(4)) and got.endswith(b"[DONE]\n\n")
        await reply.aclose()
        await asyncio.wait_for(proxy.process.communicate(), 20)
        assert proxy.process.returncode in (0, -signal.SIGTERM)


async def test_proxy_tls_client_certificates_and_renewal(tmp_path, engines):
    authority, other = Authority(tmp_path), Authority(_folder(tmp_path / "other"))
    cert, key = authority.issue("proxy")
    proxy = Process(tmp_path, "--tls-client-ca-file", authority.ca_file)
    proxy.write(engines[0], tls_cert_file=cert, tls_key_file=key)
    mine = authority.issue("client")

    async def health(ca_file, certificate=None):
        context = ssl.create_default_context(cafile=ca_file)
        if certificate:
            context.load_cert_chain(*certificate)
        async with httpx.AsyncClient(trust_env=False, verify=context) as client:
            return (await client.get(f"{proxy.client.base_url}/health")).status_code

    async with proxy:
        assert str(proxy.client.base_url).startswith("https:")
        assert await health(authority.ca_file, mine) == 200
        for certificate in (None, other.issue("stranger")):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await health(authority.ca_file, certificate)
        # The same files, signed by another authority.
        new_cert, new_key = other.issue("renewed")
        Path(cert).write_bytes(Path(new_cert).read_bytes())
        proxy.process.send_signal(signal.SIGHUP)
        await proxy.until("the old configuration stays")
        assert await health(authority.ca_file, mine) == 200, "a certificate without its key is not taken"
        Path(key).write_bytes(Path(new_key).read_bytes())
        proxy.process.send_signal(signal.SIGHUP)
        await proxy.until("yaml reloaded")
        assert await health(other.ca_file, mine) == 200
        with pytest.raises(httpx.ConnectError):
            await health(authority.ca_file, mine)


def _folder(path):
    path.mkdir()
    return path


async def test_proxy_with_unreadable_secret_exits_before_listening(tmp_path, engines):
    proxy = Process(tmp_path)
    proxy.write(engines[0], api_keys_file="none.keys")
    with pytest.raises(AssertionError, match="error: The API keys .*none.keys cannot be read"):
        await proxy.__aenter__()
    await proxy.process.communicate()
    assert proxy.process.returncode == 2


async def test_proxy_example_script_runs(engines):
    """``examples/disagg_proxy.py PREFILL DECODE``."""
    script = Path(__file__).parents[2] / "examples/disagg_proxy.py"
    command = [sys.executable, str(script), *(engine.url for engine in engines), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    line = b""
    while b"running on " not in line:
        line = await asyncio.wait_for(process.stderr.readline(), 20)
        assert line, "it ended"
    async with httpx.AsyncClient(trust_env=False) as client:
        url = line.decode().partition("running on ")[2].split()[0]
        for body in (turn("hello"), turn("hello " * 50)):
            reply = await client.post(f"{url}/v1/chat/completions", json=body)
            assert reply.json()["choices"][0]["text"] == engines[1].text(body, 0)
    process.kill()
    await process.communicate()
    (prefilled,) = engines[0].seen
    assert prefilled.body["messages"] == body["messages"], "the decode engine computes short prompts itself"
