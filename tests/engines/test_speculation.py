"""Drafts of an EAGLE head are accepted as often after a load as after computing: their KV comes with the target's.

The head computes what its target computes, one token ahead: the target has one layer, and the head has the same one
over the embeddings of the tokens behind. So nearly all drafts are right, as long as the KV of the head's layer is.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from altering_connector import VARIABLE
from engine_client import Reply, driving, random_tokens
from engine_fixtures import TESTS_ON_PATH
from model_shapes import GPU_FLAGS, GPUS, HIDDEN, TOKENIZER_FILES, VOCABULARY, write_safetensors
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, start_all

BLOCK = 16 if GPUS else 32
STEP = 8 * BLOCK  # prompts are computed in several
ANSWER = 24
HEAD_LAYER = "layers.1."  # behind the target's
HEADS, SIZE, INNER = 4, 64, 512


def write_models(target: Path, head: Path, tokenizer: Path) -> None:
    rng = np.random.default_rng(2026)

    def linear(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * (gain / columns**0.5)

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": SIZE,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": INNER, "num_hidden_layers": 1,
        "vocab_size": VOCABULARY, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    embeddings = linear(VOCABULARY, HIDDEN)
    # The target's first norm, which heads do not have, changes nothing.
    embeddings /= np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    ones = np.ones(HIDDEN, np.float32)
    layer = {
        "self_attn.q_proj": linear(HEADS * SIZE, HIDDEN, 2.0), "self_attn.k_proj": linear(2 * SIZE, HIDDEN, 2.0),
        "self_attn.v_proj": linear(2 * SIZE, HIDDEN), "self_attn.o_proj": linear(HIDDEN, HEADS * SIZE, 2.0),
        "mlp.gate_proj": linear(INNER, HIDDEN), "mlp.up_proj": linear(INNER, HIDDEN),
        "mlp.down_proj": linear(HIDDEN, INNER, 2.0), "post_attention_layernorm": ones,
    }  # fmt: skip
    layer = {f"layers.0.{name}.weight": weight for name, weight in layer.items()}
    whole = {f"model.{name}": weight for name, weight in layer.items()} | {
        "model.embed_tokens.weight": embeddings, "model.norm.weight": ones,
        "model.layers.0.input_layernorm.weight": ones, "lm_head.weight": linear(VOCABULARY, HIDDEN, 3.0),
    }  # fmt: skip
    # Of (embedding of the next token, the target's hidden state) only the first.
    layer["fc.weight"] = np.concatenate([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))], axis=1).astype(np.float32)
    for folder, weights in ((target, whole), (head, layer)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", weights)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, target / name)


class Pair(NamedTuple):
    engine: Engine
    plan: Path  # of ``altering_connector``


@pytest.fixture(scope="module")
def pair(model_path, log_dir):
    target, head = log_dir / "models" / "one-layer", log_dir / "models" / "one-layer-eagle"
    write_models(target, head, model_path)
    speculation = {"method": "eagle", "num_speculative_tokens": 3, "model": str(head)}
    plan = log_dir / "eagle.alter"
    plan.write_text("")
    with runtime_dir() as folder:
        extra = {**OPTIONS, "store_size": "512MiB", "load_policy": "always", "endpoint_port": free_port()}
        altering = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
        engine = Engine(
            target, name="eagle-store", kv={**kvtier(extra), **altering}, gpus=GPUS[:1], block_size=BLOCK,
            args=["--dtype", "float32", "--max-num-batched-tokens", str(STEP), *GPU_FLAGS,
                  "--speculative-config", json.dumps(speculation)],
            log_dir=log_dir, env={**store_env(folder), **TESTS_ON_PATH, VARIABLE: str(plan)},
        )  # fmt: skip
        try:
            start_all([engine])
            yield Pair(engine, plan), store_in(folder)
        finally:
            kill_all([engine])


async def accepted(engine: Engine) -> list[int]:
    """Drafts that were made, and by position those that were accepted."""
    async with httpx.AsyncClient(timeout=30.0) as http:
        text = (await http.get(f"{engine.base_url}/metrics")).text
    drafts = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)$", text, re.M)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = re.findall(rf'^{name}\{{.*position="(\d)".*\}} (\S+)$', text, re.M)
    return [int(float(drafts[0])), *(int(float(count)) for _, count in sorted(by_position))]


async def test_drafts_are_accepted_after_a_load_as_after_computing(pair):
    (engine, plan), store = pair
    rng = seeded("speculation")
    prompts = [random_tokens(rng, 34 * BLOCK + extra) for extra in (3, 9, 17, 25, BLOCK - 1)]
    # Two that part behind the first one's first blocks: the KV of the last position there depends on what follows.
    prompts += [prompts[0][: n * BLOCK] + random_tokens(rng, 40) for n in (33, 20)]

    async with driving(engine, NodeDriver) as driver:
        driver.node = Node(engine, engine, engine, store, {})

        async def counted(prompt: list[int]) -> tuple[Reply, list[int]]:
            before = await accepted(engine)
            reply = await driver.ask(engine, prompt, ANSWER, ASKED)
            return reply, [a - b for a, b in zip(await accepted(engine), before, strict=True)]

        cold = []
        for prompt in prompts:
            cold.append(await counted(prompt))
            await driver.stored(engine, prompt, len(prompt) // BLOCK * BLOCK)
            await driver.reset(engine)
            await asyncio.to_thread(store.clear)
        for prompt in prompts[:5]:  # the others find only what these left
            await driver.ask(engine, prompt, ANSWER)
            await driver.stored(engine, prompt, len(prompt) // BLOCK * BLOCK)
        await driver.reset(engine)
        for prompt, (want, drafted) in zip(prompts, cold, strict=True):
            reply, again = await counted(prompt)
            assert reply.pulled > 19 * BLOCK and reply.tokens == want.tokens, reply.report
            assert again == drafted, (len(prompt), reply.report)
            await driver.reset(engine)
        assert sum(drafted[1] for _, drafted in cold) > 20, f"most drafts are right: {cold}"
        plan.write_text(f"zero 0 {HEAD_LAYER}")
        try:
            altered = [await counted(prompt) for prompt in prompts[:5]]
        finally:
            plan.write_text("")
        for (reply, _), (want, _) in zip(altered, cold, strict=False):
            assert reply.tokens == want.tokens, "drafts do not change answers"
        assert [each for _, each in altered] != [each for _, each in cold[:5]], "drafts depend on their KV"
        assert await driver.kvtier(engine, "integrity_failures") == 0
