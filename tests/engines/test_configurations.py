"""Every two settings of vLLM's that go together: right answers, the hits that are due, and nothing is left behind.

Each row of the table starts an engine. All kinds of requests are asked twice, computed and from the store, with a pause
and resets in between. What they must be answered is what an engine without us answers.

    python -m pytest -m "slow or not slow" tests/engines/test_configurations.py

The file is also a program: an engine in its own process, which gets its commands as lines of JSON.
"""

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import model_shapes
import pytest
from configurations import AXES, IN_PROCESS, Row, covering, describe, excluded, write_adapter, write_eagle
from engine_client import LOGPROB_TOLERANCE, random_tokens
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import NodeStore, runtime_dir, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, free_port, kill_all, start_all

MAX_LENGTH = 2048
ANSWER = 8  # tokens
SETTLE_SECONDS = 30.0
OPTIONS = {"store_size": "256MiB", "store_idle_seconds": 60, "load_policy": "always", "retain_seconds": 1.0}
# Random weights and short windows: rounding moves a logprob by less than this.
TOLERANCE = {"recall": 1e-2 if GPUS else LOGPROB_TOLERANCE}  # float32 kernels of GPUs differ with the batch
WINDOWS_TOLERANCE = 2e-3
NEARLY_GREEDY_TIE = 0.2  # at a temperature of 0.01 the second is taken once in 5e8
ADAPTERS = ("one", "two")

ROWS = covering(AXES, excluded)
QUICK = [ROWS[0], {**ROWS[0], "lora": True, "step": 64, "processes": "worker", "scheduling": "priority"}]


class Request(NamedTuple):
    name: str
    prompt: list[int]
    body: dict[str, Any]
    due: bool = True  # whether its whole blocks are to be loaded when it is asked again


class Choice(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    top: list[list[float]]  # a token's best two


class Answer(NamedTuple):
    choices: list[Choice]
    prompt_logprobs: list[float | None] | None
    found: int  # tokens loaded or in vLLM's prefix cache, as our report says
    pulled: int


def requests(row: Row, seed: object) -> list[Request]:
    """One of every kind. Those that must not share KV have the same prompt."""
    rng = random.Random(f"configurations {seed}")
    shared = random_tokens(rng, 420)
    made = [
        Request("short", random_tokens(rng, 9), {}),
        Request("plain", shared, {}),
        Request("long", random_tokens(rng, 1300), {}),
        Request("salted", shared, {"cache_salt": f"salt {seed}"}),
        # Nearly greedy, which no seed and no top_k make certain: see ``taken_by_vllm``.
        Request("several", random_tokens(rng, 300), {"n": 3, "temperature": 0.01}),
        Request("prompt logprobs", random_tokens(rng, 300), {"prompt_logprobs": 1}, due=False),
        Request("grammar", random_tokens(rng, 300), {"structured_outputs": {"regex": "[0-9]{5}"}, "ignore_eos": False}),
        Request("biased", random_tokens(rng, 300), {"logit_bias": {"500": 100.0}, "max_tokens": 3}),
    ]
    if row["scheduling"] == "priority":
        made = [r._replace(body={**r.body, "priority": -n}) for n, r in enumerate(made)]
    if row["lora"]:
        made += [Request(f"adapter {name}", shared, {"model": name}) for name in ADAPTERS]
    return made


def body_of(request: Request) -> dict[str, Any]:
    return {
        "model": "model", "temperature": 0, "max_tokens": ANSWER, "ignore_eos": True, "logprobs": 2,
        "prompt": request.prompt, **request.body,
    }  # fmt: skip


class Server:
    """An engine behind HTTP."""

    def __init__(self, engine: Engine, reports: bool = True):
        self.engine, self._reports = engine, reports
        self._http = httpx.AsyncClient(timeout=60.0, base_url=engine.base_url)

    async def ask(self, asked: list[Request]) -> list[Answer]:
        return await asyncio.gather(*map(self._ask, asked))

    async def _ask(self, request: Request) -> Answer:
        body = {**body_of(request), "return_token_ids": True, "return_tokens_as_token_ids": True}
        if self._reports:
            body["kv_transfer_params"] = {"kvtier": {}}
        response = await self._http.post("/v1/completions", json=body)
        assert response.status_code == 200, f"{request.name}: {response.status_code} {response.text[:500]}"
        document = response.json()
        choices = []
        for choice in sorted(document["choices"], key=lambda c: c["index"]):
            found = choice["logprobs"]
            top = [sorted(entry.values(), reverse=True)[:2] for entry in found["top_logprobs"]]
            choices.append(Choice(choice["token_ids"], found["token_logprobs"], top))
        of_prompt = document["choices"][0].get("prompt_logprobs")
        if of_prompt is not None:
            pairs = zip(of_prompt, request.prompt, strict=True)
            of_prompt = [entry and entry[str(token)]["logprob"] for entry, token in pairs]
        report = (document.get("kv_transfer_params") or {}).get("kvtier", {})
        return _answer(choices, of_prompt, report)

    async def reset(self, running: bool = False, external: bool = False) -> bool:
        params = {"reset_running_requests": running, "reset_external": external}
        response = await self._http.post("/reset_prefix_cache", params=params)
        return response.raise_for_status().json()["success"]

    async def post(self, path: str, **options: Any) -> None:
        response = await self._http.post(path, **options)
        assert response.status_code == 200, f"{path}: {response.text[:500]}"

    async def paused(self) -> bool:
        return (await self._http.get("/is_paused")).raise_for_status().json()["is_paused"]

    async def used(self) -> float:
        """Share of its blocks that belonged to anything after a step, of the rank that has most."""
        text = (await self._http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
        return max(float(line.rpartition(" ")[2]) for line in lines)

    def kill(self) -> None:
        self.engine.kill()


class Child:
    """An engine in a process that has no server: this file as a program."""

    def __init__(self, engine: Engine, ahead: bool):
        self._log = engine.log_path.open("ab")
        command = [sys.executable, __file__, "ahead" if ahead else "as it is", *engine.command[3:]]
        env = {**engine._env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._path = engine.log_path
        try:
            self.scheduler = self._send({"do": "start"})
        except BaseException:
            self.kill()
            raise

    def _send(self, order: dict[str, Any]) -> Any:
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        watchdog = threading.Timer(240.0, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(b'{"answer": '):
                    return json.loads(line)["answer"]
                self._log.write(line)
        finally:
            watchdog.cancel()
        raise ServiceFailed("\n".join(self._path.read_text("utf-8", "replace").splitlines()[-60:]))

    async def ask(self, asked: list[Request]) -> list[Answer]:
        told = await asyncio.to_thread(self._send, {"do": "ask", "bodies": [body_of(r) for r in asked]})
        return [
            _answer([Choice(*c) for c in one["choices"]], one["prompt_logprobs"], one["report"]) for one in told
        ]

    async def reset(self) -> bool:
        return await asyncio.to_thread(self._send, {"do": "reset"})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def _answer(choices: list[Choice], of_prompt: list | None, report: dict[str, Any]) -> Answer:
    pulled = report.get("pulled_tokens", 0)
    return Answer(choices, of_prompt, pulled + report.get("local_tokens", 0), pulled)


def assert_same(got: Answer, want: Answer, tolerance: float, tie: float, what: str) -> None:
    """Tokens are the same up to one whose best two candidates are closer than ``tie``."""
    assert len(got.choices) == len(want.choices), what
    for a, b in zip(got.choices, want.choices, strict=True):
        assert len(a.tokens) == len(b.tokens), what
        for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
            if x != y:
                best, second = b.top[i]
                assert best - second < tie, f"{what}: token {i} is {x} instead of {y} by {best - second:.4f}"
                break
            off = abs(a.logprobs[i] - b.logprobs[i])
            assert off < tolerance, f"{what}: the logprob of token {i} is off by {off:.5f}"
    assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None), what
    for i, (x, y) in enumerate(zip(got.prompt_logprobs or [], want.prompt_logprobs or [], strict=True)):
        assert x == y if x is None or y is None else abs(x - y) < tolerance, f"{what}: prompt token {i}: {x}, {y}"


# -- engines -----------------------------------------------------------------------------------------------------------


class Makers(NamedTuple):
    model_path: Path
    log_dir: Path
    adapters: Path

    def flags(self, row: Row, name: str, kv: dict | None, env: dict, *more: str) -> Engine:
        """An engine for a row, not started."""
        windows = row["model"] != "recall"
        model = self.model_path
        if windows:
            model = model_shapes.write(model_shapes.HYBRID, self.log_dir / "models" / "hybrid", self.model_path)
        step = MAX_LENGTH if row["step"] == "whole" else row["step"]
        args = ["--dtype", "float32", "--max-num-batched-tokens", str(step), *GPU_FLAGS, *more]
        args += ["--scheduling-policy", row["scheduling"]]
        args += ["--enable-prefix-caching" if row["caching"] else "--no-enable-prefix-caching"]
        if row["step"] == "whole":
            args += ["--no-enable-chunked-prefill"]
        if row["model"] == "windows in one group":
            args += ["--disable-hybrid-kv-cache-manager"]
        if row["lora"]:
            args += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
            args += [f"{adapter}={self.adapters / adapter}" for adapter in ADAPTERS]
        if method := row["speculation"]:
            config = {"method": method, "num_speculative_tokens": 3}
            if method == "ngram":
                config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            else:
                eagle = method == "eagle"
                config["model"] = str(write_eagle(self.log_dir / "models" / "eagle", model) if eagle else model)
            args += ["--speculative-config", json.dumps(config)]
        processes, ranks = row["processes"], 1
        if processes == "data parallel":
            args += ["--data-parallel-size", "2"]
        elif processes == "two ranks":
            ranks = 2
        if GPUS and processes == "in-process":
            args += ["--no-async-scheduling"]
        devices = 2 if processes in ("data parallel", "two ranks") else 1
        return Engine(
            model, name=name.replace("/", "_")[:100], kv=kv, gpus=GPUS[:devices], tensor_parallel=ranks,
            max_model_len=MAX_LENGTH, block_size=row["block"], kv_cache_bytes=128 << 20, max_num_seqs=16,
            worker_process=processes in ("worker", "data parallel"), args=args, log_dir=self.log_dir,
            env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", **env},
        )  # fmt: skip

    def kv(self, row: Row) -> tuple[dict, dict | None]:
        """(with us, without us): the transfer configuration."""
        endpoint = 0 if row["processes"] == "data parallel" else free_port()
        mine = kvtier({**OPTIONS, "endpoint_port": endpoint}, role=row["role"])
        if not row["beside"]:
            return mine, None
        extra = {"cpu_bytes_to_use": 64 << 20} if row["beside"] == "OffloadingConnector" else {}
        other = {"kv_connector": row["beside"], "kv_role": row["role"], "kv_connector_extra_config": extra}
        if row["beside"] == "NixlConnector" and not GPUS:
            other["kv_buffer_device"] = "cpu"
        both = {"connectors": [mine, other]}
        return {"kv_connector": "MultiConnector", "kv_role": row["role"], "kv_connector_extra_config": both}, other


@pytest.fixture(scope="module")
def makers(demo_model, log_dir) -> Makers:
    made = Makers(demo_model, log_dir, log_dir / "adapters")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(made.adapters / name, seed, demo_model)
    return made


@pytest.fixture(scope="module")
def truths(makers: Makers) -> Iterator[Callable[[Row], Engine]]:
    """Engines without us, one for each model, not started: (model, with adapters)."""
    made: dict[tuple, Engine] = {}

    def of(row: Row) -> Engine:
        key = row["model"] == "recall", row["lora"]
        if key not in made:
            plain = {**ROWS[0], "model": row["model"], "lora": row["lora"], "scheduling": "priority"}
            plain["model"] = "recall" if key[0] else "windows"
            made[key] = makers.flags(plain, f"truth-{len(made)}", None, {})
        return made[key]

    yield of
    kill_all(made.values())


class Running(NamedTuple):
    row: Row
    engine: Server | Child
    truth: Server
    store: NodeStore

    async def right(self, asked: list[Request], what: str) -> list[Answer]:
        """What is answered is right; the answers."""
        got, want = await asyncio.gather(self.engine.ask(asked), self.truth.ask(asked))
        tolerance = TOLERANCE.get(self.row["model"], WINDOWS_TOLERANCE)
        for request, a, b in zip(asked, got, want, strict=True):
            tie = NEARLY_GREEDY_TIE if request.name == "several" else 2 * tolerance
            assert_same(a, b, tolerance, tie, f"{what}, {request.name}, {a.found} tokens found")
        return got

    async def settled(self) -> None:
        """vLLM's prefix cache is empty: no block is held. Without a loop, requests let time pass."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not await self.engine.reset():
            assert time.monotonic() < deadline, "the prefix cache cannot be reset: blocks are held"
            if isinstance(self.engine, Child):
                await self.engine.ask([Request("pass time", [300, 301], {"max_tokens": 1})])
            await asyncio.sleep(0.1)

    def due(self, request: Request) -> int:
        """Tokens that are to be found: whole blocks, the last token apart. With EAGLE vLLM computes one more."""
        if not self.row["caching"] or not request.due:
            return 0
        blocks = (len(request.prompt) - 1) // self.row["block"]
        return max(0, blocks - (self.row["speculation"] == "eagle")) * self.row["block"]


def start(makers: Makers, row: Row, folder: Path, name: str, truth: Engine) -> Server | Child:
    """Skips, with vLLM's own words, where vLLM does not start it without us either."""
    ours, without = makers.kv(row)
    env = {**store_env(folder), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    try:
        return run(row, makers.flags(row, name, ours, env), truth)
    except ServiceFailed as failure:
        try:
            run(row, makers.flags(row, f"{name}-without", without, env), truth).kill()
        except ServiceFailed as reason:
            errors = [line for line in str(reason).splitlines() if "Error" in line]
            pytest.skip(f"vLLM does not start this here: {(errors or [str(reason)])[0][-300:]}")
        raise failure


def run(row: Row, engine: Engine, truth: Engine) -> Server | Child:
    if row["processes"] in IN_PROCESS:
        if not truth.running:
            start_all([truth])
        return Child(engine, row["processes"] == "ahead" and not GPUS)
    start_all([engine] if truth.running else [engine, truth])
    return Server(engine, engine.kv is not None)


@pytest.fixture
def running(request, makers: Makers, truths) -> Iterator[Running]:
    row = request.param
    truth = truths(row)
    with runtime_dir() as folder:
        engine = start(makers, row, folder, request.node.name, truth)
        try:
            yield Running(row, engine, Server(truth, False), store_in(folder))
        finally:
            engine.kill()


PARAMS = [pytest.param(row, id=describe(row)) for row in QUICK]
PARAMS += [pytest.param(row, id=describe(row), marks=pytest.mark.slow) for row in ROWS if row not in QUICK]


@pytest.mark.parametrize("running", PARAMS, indirect=True)
async def test_configuration_answers_are_correct_and_hits_are_found(running: Running):
    row = running.row
    asked = taken_by_vllm(row, requests(row, describe(row)))
    first = await running.right(asked, "computed")
    for request, answer in zip(asked, first, strict=True):
        if request.name != "several":  # which share their prompt
            assert answer.found == 0, f"{request.name} shares KV with what is not the same"
    await hits_are_found(running, asked)
    if isinstance(running.engine, Server):
        await pause_and_resume(running)
        if not GPUS or row["role"] == "kv_producer":
            # vLLM keeps what a step in flight writes from consumers, whatever connector they have, and then refuses.
            await reset_while_it_generates(running)
        if row["lora"]:
            await adapter_is_updated(running, next(r for r in asked if r.name == "adapter one"))
    await running.right(taken_by_vllm(row, requests(row, "afterwards")), "afterwards")
    await nothing_left(running)


def taken_by_vllm(row: Row, asked: list[Request]) -> list[Request]:
    """vLLM takes no bias of logits while it speculates, and several answers only if they are not greedy.

    Some requests end vLLM 0.32's engines on CPUs, with us or without: prompt logprobs beside adapters; ``top_k`` while
    it speculates; a seed, where the prompt is computed in pieces. And without us, too, some answers are wrong there: of
    requests without an adapter beside adapters, by up to 2.7 in a logprob; of all requests of a step in which one that
    is not greedy has drafts.
    """
    if row["lora"] and not GPUS:
        return [request for request in asked if request.name.startswith("adapter")]
    left_out = ("biased",) if GPUS else ("biased", "several")
    return [request for request in asked if request.name not in left_out or not row["speculation"]]


async def hits_are_found(running: Running, asked: list[Request]) -> None:
    """Asked until all of them find what is due: copies take their time, and are given up by a reset. Those of an
    adapter's KV begin when the request has ended."""
    deadline, pause = time.monotonic() + SETTLE_SECONDS, 0.05
    while True:
        await asyncio.sleep(pause)
        pause *= 1.5
        await running.settled()
        answers = await running.right(asked, "asked again")
        found = {r.name: (a.found, running.due(r)) for r, a in zip(asked, answers, strict=True)}
        if not running.row["caching"]:
            assert not any(a.found for a in answers), f"vLLM has switched prefix caching off: {found}"
            return
        if all(have >= due for have, due in found.values()) and any(a.pulled for a in answers):
            assert found.get("prompt logprobs", (0, 0))[0] == 0, "nothing is known of what was not computed"
            return
        assert time.monotonic() < deadline, f"(found, due): {found}"


async def pause_and_resume(running: Running) -> None:
    """One request that generates, and one that comes while the engine stands still."""
    rng = random.Random("pause")
    early = Request("before the pause", random_tokens(rng, 200), {"max_tokens": 60})
    late = Request("in the pause", random_tokens(rng, 700), {})
    tasks = [asyncio.create_task(running.right([early], "paused"))]
    await running.engine.post("/pause", params={"mode": "keep"})
    assert await running.engine.paused()
    tasks.append(asyncio.create_task(running.right([late], "paused")))
    assert await running.engine.paused()
    await running.engine.post("/resume")
    await asyncio.gather(*tasks)


async def reset_while_it_generates(running: Running) -> None:
    rng = random.Random("reset")
    generating = Request("while it is reset", random_tokens(rng, 500), {"max_tokens": 100})
    for external in (False, True):
        task = asyncio.create_task(running.right([generating], f"reset, external: {external}"))
        while not await running.engine.used() and not task.done():
            await asyncio.sleep(0.01)
        assert await running.engine.reset(running=True, external=external), "the reset is refused"
        await task


async def adapter_is_updated(running: Running, request: Request) -> None:
    """Other weights under the same name and in the same place: KV of the earlier ones is not used."""
    [before] = await running.truth.ask([request])
    try:
        await load_adapter(running, 17)
        [after] = await running.right([request], "updated")
        assert after.choices[0].logprobs != before.choices[0].logprobs, "other weights answer otherwise"
        assert after.found == 0, "KV of the adapter's earlier weights"
        await hits_are_found(running, [request])
    finally:
        await load_adapter(running, ADAPTERS.index("one"))


async def load_adapter(running: Running, seed: int) -> None:
    """New weights in the adapter's own files, and both engines load them."""
    words = running.engine.engine.command
    folder = Path(next(word for word in words if word.startswith("one=")).partition("=")[2])
    write_adapter(folder, seed, Path(running.engine.engine.model))
    for server in (running.engine, running.truth):
        body = {"lora_name": "one", "lora_path": str(folder), "load_inplace": True}
        await server.post("/v1/load_lora_adapter", json=body)
        await server.reset()  # vLLM's own prefix cache would serve KV of the earlier ones


async def nothing_left(running: Running) -> None:
    """No block belongs to anything, and the store holds nothing for any process."""
    await running.settled()
    with suppress(OSError, EOFError):  # no store was needed
        deadline = time.monotonic() + SETTLE_SECONDS
        while held := sum(c.leases + c.reservations for c in (await asyncio.to_thread(running.store.counts)).clients):
            assert time.monotonic() < deadline, f"{held} leases and reservations in the store"
            if isinstance(running.engine, Child):
                await running.engine.ask([Request("pass time", [300, 301], {"max_tokens": 1})])
            await asyncio.sleep(0.1)


def test_configuration_rows_cover_every_allowed_pair_of_values():
    found = {pair for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    assert not [pair for pair in found if excluded(*pair)]
    for (a, of_a), (b, of_b) in itertools.combinations(AXES.items(), 2):
        for pair in itertools.product([(a, value) for value in of_a], [(b, value) for value in of_b]):
            assert pair in found or excluded(*pair), pair


# -- pooling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["LAST", pytest.param("CLS", marks=pytest.mark.slow), "MEAN"])
async def test_pooling_model_embeddings_equal_plain_engine(makers: Makers, pooling):
    """vLLM switches prefix caching off where a prompt's end is not all that is pooled."""
    flags = ["--runner", "pooling", "--convert", "embed", "--pooler-config"]
    flags += [json.dumps({"pooling_type": pooling, "use_activation": True})]
    rng = random.Random(f"pooling {pooling}")
    prompts = [random_tokens(rng, length) for length in (20, 300, 900)]
    with runtime_dir() as folder:
        kv, _ = makers.kv(ROWS[0])
        engines = [
            makers.flags(ROWS[0] | {"step": MAX_LENGTH}, f"pooling-{pooling}-{name}", kv, store_env(folder), *flags)
            for name, kv in (("kvtier", kv), ("plain", None))
        ]
        for engine in engines:  # what vLLM chooses itself
            engine.command.remove("--enable-prefix-caching")
        try:
            start_all(engines)
            async with httpx.AsyncClient(timeout=60.0) as http:
                for _ in range(3):
                    for prompt in prompts:
                        body = {"model": "model", "input": prompt}
                        urls = [f"{engine.base_url}/v1/embeddings" for engine in engines]
                        both = await asyncio.gather(*(http.post(url, json=body) for url in urls))
                        got, want = (r.raise_for_status().json()["data"][0]["embedding"] for r in both)
                        off = max(abs(a - b) for a, b in zip(got, want, strict=True))
                        assert off < 1e-4, f"{pooling}, {len(prompt)} tokens: off by {off}"
                    response = await http.post(f"{engines[0].base_url}/reset_prefix_cache")
                    assert response.json()["success"]
        finally:
            kill_all(engines)


# -- what this machine cannot do ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("running", [pytest.param({**ROWS[0], "beside": "OffloadingConnector"}, id="offloading")],
                         indirect=True)  # fmt: skip
async def test_offloading_connector_beside_ours_answers_correctly(running: Running):
    """On machines without a GPU vLLM's connector does not start, which it says itself."""
    asked = requests(running.row, "offloading")
    await running.right(asked, "computed")
    await hits_are_found(running, asked)
    await nothing_left(running)


@pytest.mark.slow
async def test_sleep_and_wake_answers_are_correct(makers: Makers, truths):
    row = ROWS[0]
    with runtime_dir() as folder:
        ours, _ = makers.kv(row)
        engine = makers.flags(row, "sleeps", ours, store_env(folder), "--enable-sleep-mode")
        truth = truths(row)
        try:
            start_all([engine] if truth.running else [engine, truth])
        except ServiceFailed as failure:
            if "Sleep mode is not supported" not in str(failure):
                raise
            pytest.skip("vLLM: Sleep mode is not supported on current platform")
        try:
            running = Running(row, Server(engine), Server(truth, False), store_in(folder))
            asked = requests(row, "sleep")
            await running.right(asked, "before sleep")
            await hits_are_found(running, asked)
            await running.engine.post("/sleep", params={"level": 1})
            await running.engine.post("/wake_up")
            await hits_are_found(running, asked)
            await nothing_left(running)
        finally:
            engine.kill()


# -- the program -------------------------------------------------------------------------------------------------------


def _program(how: str, argv: list[str]) -> None:
    if how == "ahead":
        from vllm.platforms.cpu import CpuPlatform

        settle = CpuPlatform.check_and_update_config.__func__

        def ahead(cls, config) -> None:
            settle(cls, config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(ahead)
        argv = [*argv, "--async-scheduling"]
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_known_args(argv)[0]))

    def ask(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        prompts, params, priorities = [], [], []
        for body in bodies:
            fields = {k: v for k, v in body.items() if k not in ("model", "prompt", "cache_salt", "priority")}
            if "structured_outputs" in fields:
                fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
            if "logit_bias" in fields:
                fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
            salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
            prompts.append({"prompt_token_ids": body["prompt"], **salt})
            params.append(SamplingParams(**fields, extra_args={"kv_transfer_params": {"kvtier": {}}}))
            priorities.append(body.get("priority", 0))
        told = []
        for out, body in zip(llm.generate(prompts, params, use_tqdm=False, priority=priorities), bodies, strict=True):
            choices = []
            for choice in sorted(out.outputs, key=lambda c: c.index):
                tokens = list(choice.token_ids)
                mine = [entry[token].logprob for entry, token in zip(choice.logprobs, tokens, strict=True)]
                top = [sorted((e.logprob for e in entry.values()), reverse=True)[:2] for entry in choice.logprobs]
                choices.append([tokens, mine, top])
            of_prompt = out.prompt_logprobs
            if of_prompt is not None:
                pairs = zip(of_prompt, body["prompt"], strict=True)
                of_prompt = [entry and entry[token].logprob for entry, token in pairs]
            report = (out.kv_transfer_params or {}).get("kvtier", {})
            told.append({"choices": choices, "prompt_logprobs": of_prompt, "report": report})
        return told

    core = llm.llm_engine.engine_core.engine_core
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            answer = type(core.scheduler).__name__
        elif order["do"] == "reset":
            answer = llm.reset_prefix_cache()
        else:
            answer = ask(order["bodies"])
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    _program(sys.argv[1], sys.argv[2:])
