"""Run the guides' commands in a shell with small CPU engines, and compare their output with the samples.

Blocks of the kind ``bash`` are run in order. Servers (``vllm serve``, ``kvtier store``, ``kvtier proxy``) run until the
end of the page. ``bash restart``: the running store is stopped first. ``bash example`` is not run. A ``text`` block is
the output of the block before it: each of its lines must be in the output, with other numbers, and a number that is not
0 must not be 0. Commands are repeated until their output matches, because copies of blocks take a moment.

``Place.own`` makes the only changes to a command.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import netns
from docs_blocks import ROOT, MarkdownIt, commands_of
from node_fixtures import store_in

sys.path.insert(0, str(ROOT / "tools"))
import install_cpu

from vllm_kvtier.devtools.engines import COMMON_ENV, CPU_ENV
from vllm_kvtier.devtools.processes import Service, ServiceFailed, free_port, kill_all
from vllm_kvtier.store.launcher import serves

TESTS = Path(__file__).parent
PORTS = ("8000", "8100", "8200", "7100", "7200", "9000", "50051", "9003")  # that pages use; each is a free one here
SIZES = {"64GiB": "192MiB", "2TiB": "256MiB", "100GiB": "200MiB"}  # of memory and of disk
# What makes an engine of the small model start fast; see devtools/engines.py.
FLAGS = (
    "--served-model-name MODEL --dtype float32 --max-model-len 3328 --block-size 32 --num-gpu-blocks-override 140 "
    "--kv-cache-memory-bytes 134217728 --max-num-seqs 16 --enforce-eager --disable-uvicorn-access-log"
)
# This interpreter's, whatever is in PATH.
COMMANDS = {
    "kvtier": "-m vllm_kvtier.cli", "python": "", "mooncake_master": "-m mooncake.cli", "moto_server": "-m moto.server",
}  # fmt: skip
# What `vllm` runs, with the metadata that tools/install_cpu.py adds, also where an older set-up lacks it.
VLLM = """
import sys

sys.path.append({site!r})

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
"""
# What a page calls vllm: a process that has imported it already runs that.
FORKED_VLLM = """
import os
import sys

sys.path.append({tests!r})
from zygote import OF_SESSION, Zygote

Zygote(os.environ, shared_as=os.environ[OF_SESSION]).run_command({script!r})
"""
ONE_PROCESS = "--distributed-executor-backend uni"  # with one rank
# Several merge their metrics, if nothing imported prometheus_client before; the process that is forked has.
ONE_API_SERVER = "--api-server-count 1"
# What serves beside engines, stores and proxies: its port, and what is asked to see that it is up.
SERVERS = {"mooncake_master": ("9003", "health"), "moto_server": ("9000", "moto-api/")}
SECONDS = 90.0  # for output to be as the page says
NUMBER_BYTES = re.compile(r"(?<![\w\"=])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w\"])")


class Step:
    """A block that is run. ``kind``: run or restart. ``sample``: what it prints, if the page says."""

    def __init__(self, line: int, kind: str, text: str):
        self.line, self.kind, self.text, self.sample = line, kind, text, ""

    @property
    def serves(self) -> bool:
        words = commands_of(self.text)[0].words
        of_two_words = (["vllm", "serve"], ["kvtier", "store"], ["kvtier", "proxy"])
        return words[:2] in of_two_words or words[0] in SERVERS


def steps_of(page: str) -> list[Step]:
    steps: list[Step] = []
    last: Step | None = None
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text("utf-8")):
        if token.type != "fence":
            continue
        words = token.info.split()
        if words == ["bash"] or words == ["bash", "restart"]:
            last = Step(token.map[0] + 1, words[-1].replace("bash", "run"), token.content)
            steps.append(last)
        elif words == ["text"] and last is not None:
            last.sample, last = token.content, None
        else:
            last = None
    return steps


class Place:
    """Where a page's commands run: a folder, ports, environment and, if ``pair`` is there, two nodes' networks."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        runtime: Path,
        logs: Path,
        env: Mapping[str, str] | None = None,
        pair: netns.NetnsPair | None = None,
        ports: Mapping[str, int] | None = None,
    ):
        """``runtime``: a directory for sockets, with a short path; with a pair, one in it for each node."""
        self._model, self.folder, self._logs, self._pair = model, folder, logs, pair
        self._runtimes = [runtime, runtime] if pair is None else [runtime / "a", runtime / "b"]
        for made in {*self._runtimes, folder / "bin"}:
            made.mkdir(mode=0o700, exist_ok=True, parents=True)
        self.ports = {port: free_port() for port in PORTS} | dict(ports or {})
        modes = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        self._env = {**os.environ, **COMMON_ENV, **CPU_ENV, **modes, **(env or {})}
        self._env["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        python = shlex.quote(sys.executable)
        commands = {name: f'#!/bin/sh\nexec {python} {how} "$@"\n' for name, how in COMMANDS.items()}
        vllm = folder / "serve.py"
        (folder / "site").mkdir(exist_ok=True)
        install_cpu.name_vllm(folder / "site")
        vllm.write_text(VLLM.format(site=str(folder / "site")))
        forked = FORKED_VLLM.format(tests=str(TESTS), script=str(vllm))
        for name, text in {**commands, "vllm": f"#!{sys.executable}\n{forked}"}.items():
            script = folder / "bin" / name
            script.write_text(text)
            script.chmod(0o755)
        self.services: list[Service] = []

    def own(self, text: str) -> str:
        """The page's text with this machine's ports, sizes, addresses, directories, model and flags for it."""
        text = re.sub(rf"(?<![\d.])({'|'.join(PORTS)})(?!\d)", lambda match: str(self.ports[match[1]]), text)
        for size, here in SIZES.items():
            text = text.replace(size, here)
        if self._pair is not None:
            for address, here in zip(("10.0.0.1", "10.0.0.2"), self._pair.addresses, strict=True):
                text = text.replace(address, here)
        text = text.replace("/nvme/kvtier", str(self.folder / "disk"))
        one = ONE_API_SERVER if "--data-parallel-size" in text else ONE_PROCESS
        return text.replace("vllm serve MODEL", f"vllm serve {shlex.quote(str(self._model))} {FLAGS} {one}")

    def environment(self, text: str) -> dict[str, str]:
        alone = {} if "--data-parallel-size" in text else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return {**self._env, **alone, "XDG_RUNTIME_DIR": str(self._runtimes[self._side(text)])}

    def _side(self, text: str) -> int:
        """On which of the two nodes: that whose address it serves at; else the first."""
        match = re.search(r"--host (\S+)", text)
        return self._pair.addresses.index(match[1]) if match and self._pair is not None else 0

    def _command(self, text: str) -> list[str]:
        command = ["bash", "-euo", "pipefail", "-c", text]
        return command if self._pair is None else self._pair.command(self._side(text), command)

    # -- what serves ------------------------------------------------------------------------------------------------

    def start(self, step: Step, name: str) -> Service:
        """Not awaited."""
        text = self.own(step.text)
        words = commands_of(text)[0].words
        if words[0] in SERVERS:
            port, path = SERVERS[words[0]]
            url = f"http://127.0.0.1:{self.ports[port]}"
            ready: Callable[[], bool] = lambda: self.run(f"curl -sf --max-time 5 {url}/{path}").returncode == 0  # noqa: E731
        elif words[1] == "store":
            url = ""
            path = store_in(Path(self.environment(text)["XDG_RUNTIME_DIR"])).path
            ready = lambda: os.path.exists(path) and serves(path)  # noqa: E731
        else:
            host = words[words.index("--host") + 1] if "--host" in words else "127.0.0.1"
            url = f"http://{host}:{words[words.index('--port') + 1]}"
            ready = lambda: self.run(f"curl -sf --max-time 5 {url}/health").returncode == 0  # noqa: E731
        log, env = self._logs / f"{name}.log", self.environment(text)
        service = _Background(name, self._command(text), ready, log, env, self.folder)
        service.url = url
        self.services.append(service)
        return service.start()

    def end(self) -> None:
        """All that was started here, and the stores that engines started."""
        kill_all(reversed(self.services))
        self.services.clear()
        for runtime in self._runtimes:
            store_in(runtime).kill()

    # -- what is run to its end ------------------------------------------------------------------------------------

    def run(self, text: str) -> subprocess.CompletedProcess:
        where = {"cwd": self.folder, "env": self.environment(text)}
        return subprocess.run(self._command(text), **where, capture_output=True, text=True, timeout=120)

    def until_as_shown(self, step: Step, again: Callable[[], None] = lambda: None) -> str:
        """Runs it, again if need be, until it prints what the page shows; the output. ``again``: called in between."""
        until = time.monotonic() + SECONDS
        while True:
            done = self.run(self.own(step.text))
            missing = unlike(step.sample, done.stdout) if done.returncode == 0 else [f"exit status {done.returncode}"]
            if not missing:
                return done.stdout
            assert time.monotonic() < until, (
                f"line {step.line}: {missing}\n--- printed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
            again()
            time.sleep(0.2)

    def play(self, page: str, forget: str = "true") -> list[str]:
        """All of a page's steps; what they printed. What is shown must be so for engines that know nothing yet: before
        a step is tried again they forget, also what is in the store. ``forget``: true, they leave it; false, it is
        emptied."""
        printed, starting, engines = [], [], []
        for step in steps_of(page):
            if not step.serves or " proxy " in step.text:  # which asks the engines at its start whether they are there
                self._until_up(starting)
            if not step.serves:
                printed.append(self.until_as_shown(step, partial(self._forget, engines, forget)))
                continue
            starting.append(self.start(step, f"{Path(page).stem}-{step.line}"))
            engines += [starting[-1].url] if step.text.startswith("vllm") else []
        return printed

    def _forget(self, engines: list[str], external: str) -> None:
        for url in engines:
            self.run(f"curl -sf -X POST '{url}/reset_prefix_cache?reset_external={external}'")
        for runtime in self._runtimes if external == "false" else ():
            store_in(runtime).clear()

    def _until_up(self, services: list[Service]) -> None:
        for service in services:  # they start side by side
            service.wait_ready()
        services.clear()


class _Background(Service):
    def __init__(self, name, command, ready, log, env, folder):
        super().__init__(name, ["env", "-C", str(folder), *command], port=0, log_path=log, env=env)
        self._ready, self.url = ready, ""

    def _healthy(self) -> bool:
        return self._ready()


def unlike(sample: str, output: str) -> list[str]:
    """Lines of the sample that nothing printed is like."""
    lines = [_parted(line) for line in output.splitlines()]
    wanted = [line for line in sample.splitlines() if line.strip()]
    return [line for line in wanted if not any(_like(_parted(line), other) for other in lines)]


def _parted(line: str) -> tuple[str, list[float]]:
    line = " ".join(re.sub(r"\([^()]*\)", "", line).split())
    return NUMBER_BYTES.sub("#", line), [float(number.replace(",", "")) for number in NUMBER_BYTES.findall(line)]


def _like(shown: tuple[str, list[float]], printed: tuple[str, list[float]]) -> bool:
    return shown[0] == printed[0] and all(b for a, b in zip(shown[1], printed[1], strict=True) if a)


@contextmanager
def ended(place: Place) -> Iterator[Place]:
    """The place, with what it started killed afterwards, whatever happens; and the logs shown if something failed."""
    try:
        yield place
    except (AssertionError, ServiceFailed) as error:
        story = "\n".join(service.log_tail(25) for service in place.services)
        raise AssertionError(f"{error}\n{story}") from error
    finally:
        place.end()
