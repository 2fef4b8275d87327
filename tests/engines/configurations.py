"""What may be combined in an engine's configuration, a covering of all pairs, and the files that some of it needs."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from model_shapes import GPUS, write_safetensors

Row = dict[str, Any]

# Of each the first is the default of these tests. The CPU's attention kernel works on blocks of multiples of 32, so 16
# is for GPUs. vLLM switches asynchronous scheduling off on CPUs: "ahead" is an engine in this process's child that is
# set otherwise; on GPUs all servers schedule so. OffloadingConnector needs a GPU.
AXES: dict[str, tuple] = {
    "model": ("recall", "windows", "windows in one group"),
    "role": ("kv_both", "kv_producer", "kv_consumer"),
    "caching": (True, False),
    "step": (512, 64, 16384, "whole"),  # "whole": without chunked prefill
    "block": (16, 32, 64, 128) if GPUS else (32, 64, 128),
    "processes": ("one", "worker", "two ranks", "data parallel", "in-process", "ahead"),
    "lora": (False, True),
    "speculation": (None, "ngram", "eagle", "draft_model"),
    "beside": (None, "NixlConnector", "OffloadingConnector") if GPUS else (None, "NixlConnector"),
    "scheduling": ("fcfs", "priority"),
}
IN_PROCESS = ("in-process", "ahead")


def excluded(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """Adapters and draft models are made for the demo model; adapters are loaded and changed over HTTP. An adapter
    beside EAGLE ends vLLM 0.32's engines on CPUs, with us or without."""
    row = dict([one, other])
    made_for_recall = row.get("lora") or row.get("speculation") in ("eagle", "draft_model")
    return bool(
        (made_for_recall
        and row.get("model", "recall") != "recall")
        or (row.get("lora")
        and row.get("processes") in IN_PROCESS)
        or (row.get("lora")
        and row.get("speculation") == "eagle" and not GPUS)
    )


def covering(axes: Mapping[str, Sequence], excluded: Callable[[tuple, tuple], bool]) -> list[Row]:
    """Rows in which every pair of two axes' values that is not excluded occurs, the default row first.

    One row at a time: it starts with a pair that is missing, and takes of every other axis the value that adds most
    missing pairs. An axis's first value goes with all others, so that there always is one.
    """
    missing = {
        frozenset(pair): pair
        for a, b in itertools.combinations(axes, 2)
        for pair in itertools.product([(a, value) for value in axes[a]], [(b, value) for value in axes[b]])
        if not excluded(*pair)
    }
    rows: list[Row] = []
    start: tuple = tuple((name, values[0]) for name, values in axes.items())
    while missing:
        row = dict(start)
        for name in axes:
            if name in row:
                continue
            fitting = [v for v in axes[name] if not any(excluded((name, v), other) for other in row.items())]
            row[name] = max(
                fitting, key=lambda v: sum(frozenset([(name, v), other]) in missing for other in row.items())
            )
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: row[name] for name in axes})
        start = next(iter(missing.values()), ())
    return rows


def describe(row: Row) -> str:
    """What of it is not the default."""
    shown = {True: "on", False: "off"}
    words = [f"{name}={shown.get(v, v)}".replace(" ", "_") for name, v in row.items() if v != AXES[name][0]]
    return ",".join(words) or "default"


def write_adapter(folder: Path, seed: int, model: Path) -> Path:
    """A LoRA adapter in PEFT's format that changes keys and values; written over what was there."""
    config = json.loads((model / "config.json").read_text())
    rank, hidden, size = 4, config["hidden_size"], config["head_dim"]
    rng = np.random.default_rng(seed)
    heads = {"q_proj": config["num_attention_heads"]}
    heads |= dict.fromkeys(("k_proj", "v_proj"), config["num_key_value_heads"])
    weights = {}
    for layer, name in itertools.product(range(config["num_hidden_layers"]), heads):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{at}.lora_A.weight"] = rng.standard_normal((rank, hidden), np.float32) / hidden**0.5
        weights[f"{at}.lora_B.weight"] = rng.standard_normal((heads[name] * size, rank), np.float32) / 8
    folder.mkdir(parents=True, exist_ok=True)
    adapter = {
        "base_model_name_or_path": str(model), "bias": "none", "lora_alpha": 2 * rank, "peft_type": "LORA", "r": rank,
        "target_modules": list(heads), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    write_safetensors(folder / "adapter_model.safetensors", weights)
    return folder


def write_eagle(folder: Path, model: Path) -> Path:
    """A draft head for EAGLE with random weights: what it proposes is rejected, mostly."""
    target = json.loads((model / "config.json").read_text())
    hidden, size, heads, inner = target["hidden_size"], target["head_dim"], target["num_attention_heads"], 256
    config = {
        **{k: v for k, v in target.items() if "layer" not in k and "window" not in k},
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": inner,
        "num_hidden_layers": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    rng = np.random.default_rng(7)
    kv = target["num_key_value_heads"] * size
    shapes = {
        "fc": (hidden, 2 * hidden), "layers.0.self_attn.q_proj": (heads * size, hidden),
        "layers.0.self_attn.k_proj": (kv, hidden), "layers.0.self_attn.v_proj": (kv, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * size), "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden), "layers.0.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {f"{n}.weight": rng.standard_normal(s, np.float32) / s[1] ** 0.5 for n, s in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = np.ones(hidden, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", weights)
    return folder
