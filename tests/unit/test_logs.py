"""No line of any log comes at a rate that others choose."""

import asyncio
import logging
import re
import socket
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from endpoint_support import NAMESPACE, Source, making
from proxy_fakes import Cluster
from store_support import engine_hello
from support import eventually

from vllm_kvtier import logs
from vllm_kvtier.logs import RateLimit, get_logger
from vllm_kvtier.proxy.routes.serving import Serving
from vllm_kvtier.store import protocol as store_messages
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.local import local_path

SECONDS = 20.0  # until a socket is given up
MANY = 3000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def limited():
    """(logger, its lines, clock): 3 lines at once, then one in 10 s."""
    clock, lines = Clock(), Lines()
    logger = logging.Logger("limited", logging.DEBUG)
    logger.addFilter(RateLimit(3, 10.0, 5, clock))
    logger.addHandler(lines)
    return logger, lines.said, clock


def test_rate_limit_drops_repeated_lines_and_reports_count(limited):
    logger, said, clock = limited

    def say(number: int) -> None:
        logger.warning("line %d", number)

    for number in range(1000):
        say(number)
    assert said == ["line 0", "line 1", "line 2"]
    clock.now += 9.9
    say(1000)
    assert len(said) == 3
    clock.now += 0.2
    say(1001)
    assert said[3:] == ["line 1001 (998 more lines like this one were left out)"]
    clock.now += 1000
    for number in range(10):
        say(number)
    assert said[4:] == ["line 0", "line 1", "line 2"]


def test_rate_limit_counts_by_code_line_not_by_text(limited):
    logger, said, _ = limited
    for number in range(100):
        logger.warning(f"a name chosen by a client: {number}")
    assert len(said) == 3


def test_rate_limit_keeps_other_lines_and_debug(limited):
    logger, said, _ = limited
    for _ in range(10):
        logger.warning("one")
        logger.debug("details")
    logger.warning("another")
    assert said.count("one") == 3 and said.count("details") == 10 and said.count("another") == 1


def test_rate_limit_keeps_argument_formatting(limited):
    logger, said, clock = limited
    for arguments in [("%s%%", 5), ("%(a)s", {"a": 1}), (ValueError("100%"),)] * 4:
        logger.warning(*arguments)
    clock.now += 10
    for arguments in [("%s%%", 5), ("%(a)s", {"a": 1}), (ValueError("100%"),)]:
        logger.warning(*arguments)
        clock.now += 10
    assert said[:3] == ["5%", "1", "100%"]
    assert [line.partition(" (")[0] for line in said[-3:]] == ["5%", "1", "100%"]


def test_rate_limit_state_is_bounded(limited):
    logger, _, _ = limited
    (limit,) = logger.filters
    for number in range(100):
        exec(compile(f"logger.warning('x{number}')", f"file{number}", "exec"), {"logger": logger})
    assert len(limit._places) == 5


def test_rate_limit_on_logger_and_handler_counts_once(limited):
    logger, said, _ = limited
    logger.handlers[0].addFilter(RateLimit(2, 10.0))
    for _ in range(10):
        logger.warning("one")
    assert len(said) == 3


def test_rate_limit_holds_with_many_threads(limited):
    logger, said, _ = limited

    def say() -> None:
        for _ in range(200):
            logger.warning("from many threads")

    threads = [threading.Thread(target=say) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 3


def test_get_logger_is_used_by_every_module(root):
    package = root / "vllm_kvtier"
    allowed = {"logs.py": 1, "vllm_compat/probe/trials.py": 1}  # the call that makes them; one of vLLM's, silenced
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        found = re.findall(r"logging\.getLogger\((?!.*\.setLevel)", text)
        assert len(found) == allowed.get(str(path.relative_to(package)), 0), path
        assert not re.search(r"\blogging\.(debug|info|warning|error|exception|critical|log)\(", text), path
        assert text.count("StreamHandler()") <= text.count("addFilter(LIMIT)"), path
        assert text.count("logging.basicConfig(") == text.count("handlers=[handler]"), path


def test_get_logger_called_again_adds_no_second_filter():
    assert get_logger("vllm.kvtier.x") is get_logger("vllm.kvtier.x")
    assert get_logger("vllm.kvtier.x").filters == [logs.LIMIT]


def lines_of(records: list[logging.LogRecord]) -> dict[str, int]:
    places: dict[str, int] = {}
    for record in records:
        if record.levelno > logging.DEBUG:
            where = f"{record.pathname}:{record.lineno}"
            places[where] = places.get(where, 0) + 1
    return places


def test_log_of_engine_under_malformed_messages_is_bounded(run_dir, caplog):
    caplog.set_level(logging.INFO)
    sources = making()
    source = next(sources)(Source)  # ``making`` is a fixture's body: it stops what it made
    try:
        greeting = m.encode(m.Hello(m.PROTOCOL, "raw/1", NAMESPACE))
        for _ in range(MANY):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(local_path("source/1"))
                stranger.settimeout(SECONDS)
                with suppress(BrokenPipeError, ConnectionResetError):
                    for frame in (greeting, b"\xc1nonsense"):
                        stranger.sendall(len(frame).to_bytes(4, "little") + frame)
        eventually(lambda: not source.endpoint._connections)
    finally:
        with suppress(StopIteration):
            next(sources)
    places = lines_of(caplog.records)
    assert any("lease_connections" in place for place in places), "it does say something"
    assert max(places.values()) <= logs.BURST_LINES + 20, places  # one in 10 s more, however slow this machine is


def test_log_of_store_under_malformed_messages_is_bounded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="1MiB"), lambda: None)
    server.start()
    try:
        greeting, nonsense = store_messages.encode(engine_hello()), b"\xc1nonsense"
        for _ in range(MANY):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(SECONDS)
                stranger.connect(server.path)
                with suppress(BrokenPipeError, ConnectionResetError):
                    for frame in (greeting, nonsense):
                        stranger.sendall(len(frame).to_bytes(4, "little") + frame)
                    while stranger.recv(1 << 16):
                        continue
        eventually(lambda: not server._clients)
    finally:
        server.stop()
    places = lines_of(caplog.records)
    assert any("server.py" in place for place in places), "it does say something"
    assert max(places.values()) <= logs.BURST_LINES + 20, places


async def test_log_of_proxy_under_malformed_requests_is_bounded():
    """The HTTP server's own lines among them, and those of the access log about requests that were refused."""
    async with Cluster() as c:
        command = [sys.executable, "-m", "vllm_kvtier.proxy", "--port", "0", "--log-level", "info"]
        process = await asyncio.create_subprocess_exec(
            *command, "--prefill", c.p[0].url, "--decode", c.d[0].url, stderr=asyncio.subprocess.PIPE
        )
        url = ""
        while not url:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, "the proxy ended"
            url = line.partition("running on ")[2].split(" ")[0].strip()
        host, port = url.removeprefix("http://").split(":")
        told = asyncio.create_task(process.stderr.read())  # a full pipe would hold the proxy up
        post = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n["
        for said in [b"nonsense\r\n\r\n", post] * 300:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            writer.close()
        process.terminate()
        lines = (await asyncio.wait_for(told, 60)).decode().splitlines()
        await process.wait()
    assert any("Invalid HTTP request" in line for line in lines) and any("refused" in line for line in lines)
    assert len(lines) < 100, lines[:50]


def test_access_log_has_every_served_request(caplog):
    caplog.set_level(logging.INFO)
    core = SimpleNamespace(config=SimpleNamespace(access_log=True))
    serving = Serving(core, SimpleNamespace(method="POST", path="/v1/completions"), "completions", None)
    for outcome in ["ok", "refused"] * 100:
        serving._log(outcome, 1.0)
    assert caplog.text.count(" ok") == 100 and caplog.text.count("refused") == logs.BURST_LINES
