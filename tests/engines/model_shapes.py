"""Tiny models of every kind of KV cache: config, random weights and the demo model's tokenizer in a directory.

The weights are real files, although random: with vLLM's ``--load-format dummy`` every weight, norms included, is
about 0.001, attention adds 1e-7 of the residual stream, and any KV at all would give the same answers. Here each
projection keeps the scale of its input, so that a wrong token's KV moves logprobs by far more than rounding does.
"""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiny_models

# Devices to run the engines on; none: the CPU build.
GPUS = [int(gpu) for gpu in os.environ.get("KVTIER_TEST_GPUS", "").split(",") if gpu]
# Many engines share a device, and vLLM wants as much of it free as it might take.
GPU_FLAGS = ("--gpu-memory-utilization", "0.04") if GPUS else ()

VOCABULARY = 2048  # the demo model's tokenizer
HIDDEN = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Layers(NamedTuple):
    """Layers of one kind: how many, in how many KV cache groups, numbers in the cache a token and layer."""

    count: int
    groups: int
    numbers: int
    window: int | None = None
    chunk: int | None = None

    def blocks(self, tokens: int, block: int) -> int:
        """Blocks that a reader of ``tokens`` tokens, which goes on with the next one, needs."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        if self.chunk is not None:
            first = tokens // self.chunk * self.chunk
        return -(-tokens // block) - first // block


class Shape(NamedTuple):
    name: str
    config: dict[str, Any]
    layers: tuple[Layers, ...]
    words: bool = False  # it answers in whole words, which are the same tokens when a chat sends them back

    def pulled_bytes(self, tokens: int, block: int, itemsize: int) -> int:
        """What a pull of ``tokens`` tokens moves, whole pages and 8 bytes of checksum a block and group."""
        return sum(
            kind.blocks(tokens, block) * (kind.count * kind.numbers * block * itemsize + 8 * kind.groups)
            for kind in self.layers
        )


_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": 0,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

DENSE = Shape(
    "dense",
    {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "hidden_act": "silu",
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "rope_parameters": _ROPE,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    (Layers(count=4, groups=1, numbers=2 * 4 * 64),),
)

# As many bytes a token as the demo model. KV of another token at one of 2000 places moves a logprob by 0.0036 at least,
# five times as far as in the demo model. One layer would not do: a token's KV would not depend on those before it.
TWO_LAYERS = Shape(
    "two-layers",
    {**DENSE.config, "num_attention_heads": 12, "num_hidden_layers": 2, "num_key_value_heads": 12},
    (Layers(count=2, groups=1, numbers=2 * 12 * 64),),
    words=True,
)

WINDOW = 80  # tokens; shorter than the prompts, and no multiple of any block size
HYBRID = Shape(
    "hybrid",
    {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 512,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 64,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": _ROPE,
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    (
        Layers(count=2, groups=1, numbers=2 * 2 * 64),
        Layers(count=4, groups=2, numbers=2 * 2 * 64, window=WINDOW),
    ),
)

# The CPU kernel knows one size of latent: 512 and 64. Both layers have a dense MLP.
MLA = Shape(
    "mla",
    {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 2,
        "hidden_act": "silu",
        "intermediate_size": 512,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_attention_heads": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
    },
    (Layers(count=2, groups=1, numbers=512 + 64),),
)

# Built by ``tiny_models``.
CHUNKED = Shape(
    "chunked",
    {},
    (
        Layers(count=1, groups=1, numbers=2 * 2 * 64),
        Layers(count=3, groups=3, numbers=2 * 2 * 64, chunk=tiny_models.CHUNK),
    ),
)


def write(shape: Shape, directory: Path, tokenizer: Path) -> Path:
    """Make the model's directory: config.json, model.safetensors, and the tokenizer's files from ``tokenizer``."""
    if not shape.config:
        return tiny_models.build(shape.name, directory, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config, indent=1))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory / name)
    rng = np.random.default_rng(2026)
    weights = dict(_weights(shape.config, rng))
    if shape.words:
        weights["lm_head.weight"][~np.isin(np.arange(VOCABULARY), tiny_models.whole_words(tokenizer))] *= 0.1
    write_safetensors(directory / "model.safetensors", weights)
    return directory


def _weights(c: dict[str, Any], rng: np.random.Generator):
    """(name, float32 array) of every weight: unit scale in, unit scale out."""

    def linear(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * (gain / columns**0.5)

    def norm(size: int) -> np.ndarray:
        return np.full(size, 0.0 if gemma else 1.0, np.float32)  # Gemma's norms multiply by 1 + w

    gemma = c["model_type"] == "gemma3_text"
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    embeddings = rng.standard_normal((c["vocab_size"], hidden), dtype=np.float32)
    # Tied embeddings that outweigh the layers would answer with the last token whatever came before it.
    yield "model.embed_tokens.weight", embeddings * (0.06 if gemma else 1.0)
    yield "model.norm.weight", norm(hidden)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", linear(c["vocab_size"], hidden, gain=3.0)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for name in norms:
            yield f"{at}.{name}.weight", norm(hidden)
        if "kv_lora_rank" in c:
            rank, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
            nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
            yield f"{at}.self_attn.q_proj.weight", linear(heads * (nope + rope), hidden)
            yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", linear(rank + rope, hidden)
            yield f"{at}.self_attn.kv_a_layernorm.weight", norm(rank)
            yield f"{at}.self_attn.kv_b_proj.weight", linear(heads * (nope + value), rank)
            yield f"{at}.self_attn.o_proj.weight", linear(hidden, heads * value)
        else:
            size = c["head_dim"]
            for name, count in (("q", heads), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
                yield f"{at}.self_attn.{name}_proj.weight", linear(count * size, hidden)
            yield f"{at}.self_attn.o_proj.weight", linear(hidden, heads * size)
            yield f"{at}.self_attn.q_norm.weight", norm(size)
            yield f"{at}.self_attn.k_norm.weight", norm(size)
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", linear(c["intermediate_size"], hidden)
        yield f"{at}.mlp.down_proj.weight", linear(hidden, c["intermediate_size"])


def write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in weights.values():
            file.write(array.tobytes())
