"""What a proxy adds to a request, how many it serves a second, and what it makes of engines that die.

Behind each proxy stand the same engines that compute nothing (proxy_engines.py); in front a client that sends streamed
chat requests, each another conversation, and checks every answer byte by byte. ``direct`` is that client asking the two
engines itself: what engines and sockets cost without a proxy. Rounds alternate between the proxies, so that a busy
machine is busy for all of them. Client, engines and each proxy are one process each: with fewer than three free cores
the times at high concurrency, and the requests a second, are those of the machine. ``cpu`` is what a proxy's process
used of a processor for each request, which does not depend on what else the machine does.

Then, if ``--kills`` is not 0, the same with an engine killed (connections reset, then refused) and started again every
half second or so:

    whole      all of the answer, once
    reported   a beginning of it, and an error event: the client knows that it is no more
    cut        a beginning of it, and the connection broke
    refused    an error instead of an answer (429, 500, 502, 503)
    wrong      anything else: a part missing or twice without a word, or another's. It must be 0.

    python benchmarks/proxy_overhead.py [OTHER_PROXY.py ...] [--concurrency 1 16] [--requests 400] [--kills 20]

Other proxies are scripts that take the options of vLLM's toy_proxy_server.py (--host, --port, --prefiller-hosts,
--prefiller-ports, --decoder-hosts, --decoder-ports) and run unchanged.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from proxy_engines import LeanEngine, text

from vllm_kvtier.devtools.processes import free_port

HOST = "127.0.0.1"
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
ROUNDS = 5
ROUTE = "/v1/chat/completions"
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PAIRS = 2  # prefill and decode engines
OUTCOMES = ("whole", "reported", "cut", "refused", "wrong")


class Sample(NamedTuple):
    first: float  # seconds to the first byte of the body
    last: float


class Got(NamedTuple):
    status: int
    body: bytes  # without the sizes of chunks
    first: float  # when its first byte came
    whole: bool  # the connection did not break off


class Connection:
    """One kept HTTP connection. By hand: a client library would cost as much time as what is measured."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> Got:
        for attempt in range(2):
            fresh = self._streams is None
            try:
                return await asyncio.wait_for(self._post(body), ANSWER_SECONDS)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()  # a server may close a kept connection at any time
                if attempt or fresh:
                    return Got(0, b"", time.perf_counter(), False)
        raise AssertionError("unreachable")

    async def _post(self, body: bytes) -> Got:
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self._port, limit=1 << 22)
        reader, writer = self._streams
        head = f"POST {ROUTE} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        if b"content-length:" in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            got = await reader.readexactly(1)
            first = time.perf_counter()
            return Got(status, got + await reader.readexactly(length - 1), first, True)
        got, first = bytearray(), 0.0
        try:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                first = first or time.perf_counter()
                got += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            return Got(status, bytes(got), first, False)
        return Got(status, bytes(got), first, True)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class ThroughProxy:
    """One client's connection to a proxy."""

    def __init__(self, port: int):
        self._connection = Connection(port)

    async def ask(self, body: dict) -> tuple[Sample, Got]:
        began = time.perf_counter()
        got = await self._connection.post(json.dumps(body).encode())
        return Sample(got.first - began, time.perf_counter() - began), got

    def close(self) -> None:
        self._connection.close()


class Direct:
    """The prefill engine's token, then the decode engine's answer, without a proxy."""

    def __init__(self, prefill: int, decode: int):
        self._prefill, self._decode = Connection(prefill), Connection(decode)

    async def ask(self, body: dict) -> tuple[Sample, Got]:
        began = time.perf_counter()
        probe = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
        params = json.loads((await self._prefill.post(json.dumps(probe).encode())).body)["kv_transfer_params"]
        got = await self._decode.post(json.dumps(body | {"kv_transfer_params": params}).encode())
        return Sample(got.first - began, time.perf_counter() - began), got

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


def judge(got: Got, body: dict, chunks: int) -> str:
    """One of OUTCOMES."""
    if got.status != 200:
        return "refused" if got.status in (0, 429, 500, 502, 503) else "wrong"
    try:
        data = [json.loads(e[6:]) for e in got.body.split(b"\n\n")[:-1] if e != b"data: [DONE]"]
    except ValueError:
        return "wrong"
    told = bool(data) and "error" in data[-1]
    texts = [event["choices"][0]["text"] for event in (data[:-1] if told else data)]
    name = texts[0].partition("/")[0] if texts else ""
    if texts != [text(name, body["messages"], i) for i in range(len(texts))]:
        return "wrong"
    if not got.whole:
        return "cut"
    if told:
        return "reported"
    return "whole" if len(texts) == chunks and got.body.endswith(b"data: [DONE]\n\n") else "wrong"


async def measure(make_client, concurrency: int, bodies: Iterator[dict], chunks: int):
    """(samples of whole answers, how many of each outcome, seconds it took) of ``concurrency`` clients; each
    waits for its answers."""
    samples, outcomes = [], collections.Counter()
    began = time.perf_counter()

    async def client() -> None:
        asker = make_client()
        for body in bodies:
            sample, got = await asker.ask(body)
            outcome = judge(got, body, chunks)
            outcomes[outcome] += 1
            if outcome == "whole":
                samples.append(sample)
        asker.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return samples, outcomes, time.perf_counter() - began


def make_body(serial: int, prompt_chars: int) -> dict:
    """A conversation of five messages whose first is unlike any other's."""
    words = "word " * (prompt_chars // 25)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": words} for role, _ in zip(roles, range(5), strict=False)]
    messages[0]["content"] = f"conversation {serial} {words}"
    return {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}


# -- processes ---------------------------------------------------------------------------------------------------------


async def serve_engines(chunks: int, pause: float) -> None:
    """The engines; prints their ports and serves. A line on stdin begins to kill, or ends it."""
    engines = [await LeanEngine(f"{role}{i}", chunks, pause).start() for role in "PD" for i in range(PAIRS)]
    print(json.dumps([engine.port for engine in engines]), flush=True)
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    rng = random.Random(0)
    while await lines.get():
        while lines.empty():
            engine = rng.choice(engines)
            await engine.kill()
            await asyncio.sleep(0.1 + 0.4 * rng.random())
            await engine.start()
            await asyncio.sleep(0.3 * rng.random())
        await lines.get()


@contextlib.contextmanager
def running(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """A process that is gone afterwards."""
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_port(process: subprocess.Popen, port: int, log: Path) -> None:
    """Wait until it listens; raises RuntimeError if the process ends first or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the proxy ended with code {process.returncode}; see {log}")
        time.sleep(0.1)  # the other side gives no sign when it begins to listen
    raise RuntimeError(f"no process listens on port {port} after {START_SECONDS:g} s; see {log}")


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proxies(others: list[str], ports: list[int]) -> dict[str, tuple[list[str], int]]:
    """Name -> (command, port)."""
    prefill, decode = ([str(port) for port in half] for half in (ports[:PAIRS], ports[PAIRS:]))
    ours = [sys.executable, "-m", "vllm_kvtier.proxy", "--host", HOST, "--port", str(port := free_port())]
    for flag, engines in (("--prefill", prefill), ("--decode", decode)):
        for engine in engines:
            ours += [flag, f"http://{HOST}:{engine}"]
    found = {"vllm_kvtier": (ours, port)}
    for script in others:
        port = free_port()
        command = [sys.executable, script, "--host", HOST, "--port", str(port)]
        command += ["--prefiller-hosts", *[HOST] * PAIRS, "--prefiller-ports", *prefill]
        command += ["--decoder-hosts", *[HOST] * PAIRS, "--decoder-ports", *decode]
        found[Path(script).stem] = (command, port)
    return found


# -- results -----------------------------------------------------------------------------------------------------------


def row(samples: list[Sample]) -> dict[str, float]:
    """Milliseconds."""
    table = 1000 * np.array(samples)
    return {
        f"{name}_p{q}": float(np.percentile(table[:, column], q))
        for column, name in enumerate(("first", "total"))
        for q in (50, 99)
    }


def show(results: dict[tuple[int, str], dict[str, float]]) -> None:
    print(f"{'':26s}{'first byte ms':>18s}{'total ms':>18s}{'added: first':>18s}{'total':>18s}{'':>9s}{'':>9s}")
    print(f"{'clients  proxy':26s}" + "".join(f"{q:>9s}" for q in ("p50", "p99") * 4) + f"{'req/s':>9s}{'cpu ms':>9s}")
    for (concurrency, name), values in results.items():
        base = results[concurrency, "direct"]
        keys = ("first_p50", "first_p99", "total_p50", "total_p99")
        numbers = [values[key] for key in keys] + [values[key] - base[key] for key in keys] + [values["rate"]]
        if "cpu" in values:
            numbers.append(values["cpu"])
        print(f"{concurrency:7d}  {name[:16]:17s}" + "".join(f"{number:9.2f}" for number in numbers))


async def run(options, ports: list[int], started: dict[str, tuple[int, int]]) -> dict:
    """``started``: name -> (port, process id). Returns {(concurrency, name): values of ``row``, rate and cpu}."""
    turn = itertools.cycle(range(PAIRS))
    makers = {"direct": lambda: Direct(ports[i := next(turn)], ports[PAIRS + i])}
    makers |= {name: lambda port=port: ThroughProxy(port) for name, (port, _) in started.items()}
    serial = itertools.count()
    results = {}

    def bodies(count: int) -> Iterator[dict]:
        return iter([make_body(next(serial), options.prompt_chars) for _ in range(count)])

    for concurrency in options.concurrency:
        samples, rates = {name: [] for name in makers}, {name: [] for name in makers}
        cpu = dict.fromkeys(started, 0.0)
        for maker in makers.values():  # nothing is measured while connections and caches are new
            await measure(maker, concurrency, bodies(4 * concurrency + 20), options.chunks)
        for _ in range(ROUNDS):
            for name, maker in makers.items():
                count = -(-options.requests // ROUNDS)
                before = cpu_seconds(started[name][1]) if name in started else 0.0
                found, outcomes, seconds = await measure(maker, concurrency, bodies(count), options.chunks)
                if outcomes["whole"] != count:
                    raise RuntimeError(f"{name} did not answer all in good health: {dict(outcomes)}")
                samples[name] += found
                rates[name].append(count / seconds)
                if name in started:
                    cpu[name] += cpu_seconds(started[name][1]) - before
        for name, found in samples.items():
            results[concurrency, name] = row(found) | {"rate": float(np.median(rates[name]))}
            if name in started:
                results[concurrency, name]["cpu"] = 1000 * cpu[name] / len(found)
    return results


async def run_with_kills(options, started: dict[str, tuple[int, int]], engines: subprocess.Popen) -> dict[str, dict]:
    """Name -> outcomes, and the times of whole answers; the proxies take turns, ``--kills`` seconds each in all."""
    found = {name: (collections.Counter(), []) for name in started}
    serial = itertools.count(1 << 40)
    engines.stdin.write(b"begin\n")
    engines.stdin.flush()
    for _ in range(ROUNDS):
        for name, (port, _) in started.items():
            until = time.monotonic() + options.kills / ROUNDS
            bodies = itertools.takewhile(
                lambda _, until=until: time.monotonic() < until,
                (make_body(next(serial), options.prompt_chars) for _ in itertools.count()),
            )
            samples, outcomes, _ = await measure(
                lambda port=port: ThroughProxy(port), max(options.concurrency), bodies, options.chunks
            )
            found[name][0].update(outcomes)
            found[name][1].extend(samples)
    engines.stdin.write(b"end\n")
    engines.stdin.flush()
    return {name: {o: counts[o] for o in OUTCOMES} | row(samples) for name, (counts, samples) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", metavar="OTHER_PROXY.py")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=400, help="of each proxy at each concurrency")
    parser.add_argument("--prompt-chars", type=int, default=8000)
    parser.add_argument("--chunks", type=int, default=32, help="events in a streamed answer")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two of them")
    parser.add_argument("--kills", type=float, default=20.0, help="seconds of each proxy with engines that die")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--serve-engines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_engines:
        asyncio.run(serve_engines(options.chunks, options.pause))
        return

    logs = Path(tempfile.mkdtemp(prefix="proxy-overhead-"))
    with contextlib.ExitStack() as stack:
        command = [sys.executable, __file__, "--serve-engines", "--chunks", str(options.chunks)]
        command += ["--pause", str(options.pause)]
        pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
        engines = stack.enter_context(running(command, logs / "engines.log", **pipes))
        line = engines.stdout.readline()
        if not line:
            raise RuntimeError(f"the engines did not start; see {logs}")
        ports = json.loads(line)
        started = {}
        for name, (command, port) in proxies(options.others, ports).items():
            log = logs / f"{name}.log"
            process = stack.enter_context(running(command, log, stdout=subprocess.DEVNULL))
            wait_for_port(process, port, log)
            started[name] = (port, process.pid)
        load = os.getloadavg()[0]
        results = asyncio.run(run(options, ports, started))
        killed = asyncio.run(run_with_kills(options, started, engines)) if options.kills else {}
        after = os.getloadavg()[0]
    print(
        f"{options.requests} requests each, prompts of {options.prompt_chars} characters, {options.chunks} events an "
        f"answer; {os.cpu_count()} cores, load {load:.1f} before and {after:.1f} after"
    )
    show(results)
    for name, counts in killed.items():
        listed = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        print(f"engines killed, {max(options.concurrency)} clients, {name}: {listed}")
    if options.json:
        rows = [{"clients": clients, "proxy": name} | values for (clients, name), values in results.items()]
        rows += [{"proxy": name, "kills": True} | values for name, values in killed.items()]
        about = {"cores": os.cpu_count(), "load_before": load, "load_after": after} | vars(options)
        Path(options.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
