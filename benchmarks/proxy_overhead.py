"""What a proxy adds to a request: time to the first byte and to the last, beside other proxies.

Behind each proxy stand the same two engines that compute nothing (tests/proxy_fakes.py); in front a client
that sends streamed chat requests, each another conversation. ``direct`` is that client asking P and then D
itself: what engines and sockets cost without a proxy. Rounds alternate between the proxies, so that a busy
machine is busy for all of them. Each of client, proxy and engines is one process: with fewer than three free
cores, the times at high concurrency are those of the machine. ``cpu`` is what a proxy's own process used of a
processor for each request, which does not depend on what else the machine does.

    python benchmarks/proxy_overhead.py [OTHER_PROXY.py ...] [--concurrency 1 16] [--requests 400]

Other proxies are scripts that take the options of vLLM's toy_proxy_server.py (--host, --port,
--prefiller-host, --prefiller-port, --decoder-host, --decoder-port) and run unchanged.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_kvtier.devtools.processes import free_port

HOST = "127.0.0.1"
START_SECONDS = 30.0
ANSWER_SECONDS = 60.0
ROUNDS = 5
ROUTE = "/v1/chat/completions"
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Sample(NamedTuple):
    first: float  # seconds to the first byte of the body
    last: float


class Connection:
    """One kept HTTP connection. By hand: a client library would cost as much time as what is measured."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> tuple[bytes, float]:
        """The answer's body (with its chunks' sizes, if chunked) and when its first byte came.

        Raises RuntimeError if the answer is not 200.
        """
        for attempt in range(2):
            try:
                return await asyncio.wait_for(self._post(body), ANSWER_SECONDS)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()  # a server may close a kept connection at any time
                if attempt:
                    raise
        raise AssertionError("unreachable")

    async def _post(self, body: bytes) -> tuple[bytes, float]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self._port)
        reader, writer = self._streams
        head = f"POST {ROUTE} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"port {self._port} answered {head.splitlines()[0].decode()}")
        if b"content-length:" in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            got = await reader.readexactly(1)
            first = time.perf_counter()
            return got + await reader.readexactly(length - 1), first
        got, first = b"", 0.0
        while not got.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            first = first or time.perf_counter()
            if not data:
                raise ConnectionError("the answer broke off")
            got += data
        return got, first

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class ThroughProxy:
    """One client's connection to a proxy."""

    def __init__(self, port: int):
        self._connection = Connection(port)

    async def ask(self, body: dict) -> Sample:
        began = time.perf_counter()
        got, first = await self._connection.post(json.dumps(body).encode())
        ended = time.perf_counter()
        if b"[DONE]" not in got:
            raise RuntimeError(f"an answer did not end: {got[-200:]!r}")
        return Sample(first - began, ended - began)

    def close(self) -> None:
        self._connection.close()


class Direct:
    """P's one token, then D's answer, without a proxy."""

    def __init__(self, prefill: int, decode: int):
        self._prefill, self._decode = Connection(prefill), Connection(decode)

    async def ask(self, body: dict) -> Sample:
        began = time.perf_counter()
        probe = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
        found, _ = await self._prefill.post(json.dumps(probe).encode())
        params = json.loads(found)["kv_transfer_params"]
        _, first = await self._decode.post(json.dumps(body | {"kv_transfer_params": params}).encode())
        return Sample(first - began, time.perf_counter() - began)

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


async def measure(make_client, concurrency: int, requests: int, prompt_chars: int, serial) -> list[Sample]:
    """``requests`` requests of ``concurrency`` clients, each of which waits for its answers."""
    todo = iter(range(requests))
    samples = []

    async def client() -> None:
        asker = make_client()
        for _ in todo:
            samples.append(await asker.ask(make_body(next(serial), prompt_chars)))
        asker.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return samples


def make_body(serial: int, prompt_chars: int) -> dict:
    """A conversation of five messages whose first is unlike any other's."""
    text = "word " * (prompt_chars // 25)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, _ in zip(roles, range(5), strict=False)]
    messages[0]["content"] = f"conversation {serial} {text}"
    return {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}


# -- processes ---------------------------------------------------------------------------------------------


async def serve_engines(chunks: int) -> None:
    """Two fake engines; prints their ports and serves until it is killed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from proxy_fakes import FakeEngine

    engines = [await FakeEngine(name).start() for name in ("P", "D")]
    for engine in engines:
        engine.chunks = chunks
    print(json.dumps([engine.port for engine in engines]), flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def running(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """A process that is gone afterwards."""
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_port(process: subprocess.Popen, port: int, log: Path) -> None:
    """Until somebody listens there; raises RuntimeError if the process ends first or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), contextlib.closing(_connect(port)):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the proxy ended with code {process.returncode}; see {log}")
        time.sleep(0.1)  # the other side gives no sign when it begins to listen
    raise RuntimeError(f"nobody listens on port {port} after {START_SECONDS:g} s; see {log}")


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _connect(port: int):
    import socket

    return socket.create_connection((HOST, port), timeout=1)


def proxies(others: list[str], prefill: int, decode: int) -> dict[str, tuple[list[str], int]]:
    """Name -> (command, port)."""
    port = free_port()
    ours = [sys.executable, "-m", "vllm_kvtier.proxy", "--host", HOST, "--port", str(port)]
    ours += ["--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}"]
    found = {"vllm_kvtier": (ours, port)}
    for script in others:
        port = free_port()
        command = [sys.executable, script, "--host", HOST, "--port", str(port)]
        command += ["--prefiller-host", HOST, "--prefiller-port", str(prefill)]
        command += ["--decoder-host", HOST, "--decoder-port", str(decode)]
        found[Path(script).stem] = (command, port)
    return found


# -- results -----------------------------------------------------------------------------------------------


def row(samples: list[Sample]) -> dict[str, float]:
    """Milliseconds."""
    table = 1000 * np.array(samples)
    return {
        f"{name}_p{q}": float(np.percentile(table[:, column], q))
        for column, name in enumerate(("first", "total"))
        for q in (50, 99)
    }


def show(results: dict[tuple[int, str], dict[str, float]]) -> None:
    print(f"{'':26s}{'first byte ms':>18s}{'total ms':>18s}{'added at p50':>18s}{'cpu ms':>9s}")
    print(
        f"{'clients  proxy':26s}" + "".join(f"{name:>9s}" for name in ("p50", "p99") * 2 + ("first", "total"))
    )
    for (concurrency, name), values in results.items():
        base = results[concurrency, "direct"]
        added = [values[key] - base[key] for key in ("first_p50", "total_p50")]
        numbers = [*(values[k] for k in ("first_p50", "first_p99", "total_p50", "total_p99")), *added]
        if "cpu" in values:
            numbers.append(values["cpu"])
        print(f"{concurrency:7d}  {name[:16]:17s}" + "".join(f"{number:9.2f}" for number in numbers))


async def run(options: argparse.Namespace, prefill: int, decode: int, started: dict[str, tuple[int, int]]):
    """``started``: name -> (port, process id). Returns {(concurrency, name): values of ``row``, and cpu}."""
    makers = {"direct": lambda: Direct(prefill, decode)}
    for name, (port, _) in started.items():
        makers[name] = lambda port=port: ThroughProxy(port)
    serial = itertools.count()
    results = {}
    for concurrency in options.concurrency:
        samples: dict[str, list[Sample]] = {name: [] for name in makers}
        cpu = dict.fromkeys(started, 0.0)
        for maker in makers.values():  # nothing is measured while connections and caches are new
            await measure(maker, concurrency, 4 * concurrency + 20, options.prompt_chars, serial)
        for _ in range(ROUNDS):
            for name, maker in makers.items():
                count = -(-options.requests // ROUNDS)
                before = cpu_seconds(started[name][1]) if name in started else 0.0
                samples[name] += await measure(maker, concurrency, count, options.prompt_chars, serial)
                if name in started:
                    cpu[name] += cpu_seconds(started[name][1]) - before
        for name, found in samples.items():
            results[concurrency, name] = row(found)
            if name in started:
                results[concurrency, name]["cpu"] = 1000 * cpu[name] / len(found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", metavar="OTHER_PROXY.py")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=400, help="of each proxy at each concurrency")
    parser.add_argument("--prompt-chars", type=int, default=8000)
    parser.add_argument("--chunks", type=int, default=32, help="events in a streamed answer")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--serve-engines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_engines:
        asyncio.run(serve_engines(options.chunks))
        return

    logs = Path(tempfile.mkdtemp(prefix="proxy-overhead-"))
    with contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, "--serve-engines", "--chunks", str(options.chunks)]
        engines = stack.enter_context(running(command, logs / "engines.log", stdout=subprocess.PIPE))
        line = engines.stdout.readline()
        if not line:
            raise RuntimeError(f"the engines did not start; see {logs}")
        prefill, decode = json.loads(line)
        started = {}
        for name, (command, port) in proxies(options.others, prefill, decode).items():
            log = logs / f"{name}.log"
            process = stack.enter_context(running(command, log, stdout=subprocess.DEVNULL))
            wait_for_port(process, port, log)
            started[name] = (port, process.pid)
        load = os.getloadavg()[0]
        results = asyncio.run(run(options, prefill, decode, started))
    print(
        f"{options.requests} requests each, prompts of {options.prompt_chars} characters, {options.chunks} "
        f"events an answer; {os.cpu_count()} cores, load before {load:.1f}"
    )
    show(results)
    if options.json:
        rows = [{"clients": clients, "proxy": name, **values} for (clients, name), values in results.items()]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
