"""Real engines whose weights and adapters change while they serve: what was stored before serves no wrong KV."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_client import Reply, assert_same, driving, random_tokens
from engine_fixtures import ENGINE_FLAGS
from node_fixtures import ASKED, OPTIONS, NodeDriver, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, start_all, wait_all

BLOCK, RANK, LAYERS, HIDDEN, HEADS, HEAD = 32, 8, 6, 256, 8, 64
LORA = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
LENGTH = 300
WHOLE = LENGTH // BLOCK * BLOCK


def adapter(folder: Path, alpha: int) -> Path:
    """Of the demo model: random changes of its queries and values, as strong as ``alpha``."""
    rng, tensors, at = np.random.default_rng(1), {}, 0
    data = b""
    for layer in range(LAYERS):
        for name, outputs in (("q_proj", HEADS * HEAD), ("v_proj", HEADS * HEAD // 2)):
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (outputs, RANK))):
                values = rng.normal(0, 0.05, shape).astype(np.float32).tobytes()
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
                tensors[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + len(values)]}
                data += values
    header = json.dumps(tensors).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", "bias": "none"}))
    return folder


@pytest.fixture(scope="module")
def pair(model_path, log_dir) -> Iterator[SimpleNamespace]:
    """Two engines with adapters, and a store of their own; GPU caches of other engines are not read: the store is."""
    with runtime_dir() as folder:
        env = {**store_env(folder), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], *LORA)}
        options = {**OPTIONS, "load_policy": "always", "peer_fetch": "off", "bidirectional": False}
        engines = [
            Engine(
                model_path, name=f"weights-{name}", kv=kvtier({**options, "endpoint_port": free_port()}),
                log_dir=log_dir, env=env, **flags,
            )
            for name in "AB"
        ]  # fmt: skip
        store = store_in(folder)
        try:
            start_all(engines)
            wait_all(engines)
            store.until_up()
            yield SimpleNamespace(first=engines[0], second=engines[1], store=store)
        finally:
            kill_all(engines)


@pytest.fixture
async def drive(pair):
    async with driving(pair.first, NodeDriver) as driver:
        driver.node = pair
        yield driver


async def entries(pair) -> int:
    return (await asyncio.to_thread(pair.store.counts)).index.entries


async def ask(drive, engine, prompt, model="model"):
    return await drive.ask(engine, prompt, 4, ASKED, model=model)


async def asked_and_stored(drive, pair, engine, prompt, model="model"):
    """An answer whose whole blocks are in the store afterwards; the engine's prefix cache is empty again."""
    before = await entries(pair)

    async def stored() -> bool:
        return await entries(pair) >= before + WHOLE // BLOCK

    async def answered_and_stored() -> Reply | None:
        reply = await ask(drive, engine, prompt, model)
        assert reply.pulled == 0, "this test's prompts are its own"
        try:
            await drive.until(stored, 5, "the prompt's blocks are stored")
        except AssertionError:  # an adapter's KV is not, if a busy machine took too long to look at the adapter's files
            reply = None
        await drive.reset(engine)
        return reply

    return await drive.until(answered_and_stored, 40, "the prompt's blocks are stored")


async def load(drive, engine, folder: Path, name: str, inplace: bool = False) -> None:
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": inplace}
    (await drive._http.post(f"{engine.base_url}/v1/load_lora_adapter", json=body)).raise_for_status()


async def test_adapter_replaced_under_same_name_does_not_load_old_kv(pair, drive, tmp_path):
    """Of one name and path, with other files: the one that came first has stored its KV."""
    prompt = random_tokens(seeded("adapters"), LENGTH)
    folder = adapter(tmp_path / "style", 16)
    await load(drive, pair.first, folder, "style")
    weak = await asked_and_stored(drive, pair, pair.first, prompt, "style")
    again = await ask(drive, pair.first, prompt, "style")
    assert again.pulled == WHOLE
    assert_same(again, weak, "out of the store")
    await drive.reset(pair.first)

    adapter(folder, 256)
    await load(drive, pair.second, folder, "style")
    strong = await asked_and_stored(drive, pair, pair.second, prompt, "style")
    assert abs(strong.logprobs[0] - weak.logprobs[0]) > 0.01, "these adapters do not differ in what they answer"

    # The first engine has the old ones still, and must not take the new ones' KV for them.
    old = await ask(drive, pair.first, prompt, "style")
    assert old.pulled == 0
    assert_same(old, weak, "the files changed behind its back")
    await load(drive, pair.first, folder, "style", inplace=True)
    await drive.reset(pair.first)  # or vLLM would find the old ones' KV itself
    new = await ask(drive, pair.first, prompt, "style")
    assert new.pulled == WHOLE, "the other engine has stored it"
    assert_same(new, strong, "loaded in place")


async def test_adapter_whose_folder_was_deleted_is_recomputed(pair, drive, tmp_path):
    prompt = random_tokens(seeded("gone"), LENGTH)
    folder = adapter(tmp_path / "brief", 64)
    await load(drive, pair.first, folder, "brief")
    first = await asked_and_stored(drive, pair, pair.first, prompt, "brief")
    shutil.rmtree(folder)
    reply = await ask(drive, pair.first, prompt, "brief")
    assert reply.pulled == 0
    assert_same(reply, first)


async def test_reloaded_weights_invalidate_stored_kv_of_that_engine_only(pair, drive):
    prompt, other = (random_tokens(seeded(f"pushed {i}"), LENGTH) for i in range(2))
    first = await asked_and_stored(drive, pair, pair.first, prompt)
    assert (await ask(drive, pair.first, prompt)).pulled == WHOLE

    # Its prefix cache is not empty: nothing of it may be stored as the new weights'.
    await drive._http.post(f"{pair.first.base_url}/collective_rpc", json={"method": "reload_weights"})
    before = await entries(pair)
    assert (await ask(drive, pair.first, other)).pulled == 0
    await drive.reset(pair.first)
    assert await entries(pair) == before
    again = await asked_and_stored(drive, pair, pair.first, prompt)
    assert_same(again, first, "the same weights, as it happens")
    assert (await ask(drive, pair.first, prompt)).pulled == WHOLE, "what it stored itself since then"
    assert (await ask(drive, pair.second, prompt)).pulled == WHOLE, "and the other engine what was there before"
    for engine in (pair.first, pair.second):
        await drive.reset(engine)
