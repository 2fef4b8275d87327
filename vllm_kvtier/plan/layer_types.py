"""The types of a model's layers, and the fields and KV heads of each, from ``config.json``.

Many models have fields of their own for them; the rules are those of transformers' and vLLM's configuration classes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_kvtier.cache_kinds import CacheKind
from vllm_kvtier.errors import KVTierError

NO_CACHE = ("mlp", "moe")  # types of layers that keep nothing
_FULL, _WINDOW, _STATE = "full_attention", "sliding_attention", "linear_attention"
_PATTERN = {"*": _FULL, "M": _STATE, "-": "mlp", "E": "moe"}
_WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}  # model_type -> of sliding_window_pattern, by default
# Field -> (its value, a layer's number from 0 on, the configuration) -> the layer's type, or whether it attends to all.
_FIELDS: dict[str, Callable[[Any, int, Mapping[str, Any]], str | bool]] = {
    "layer_types": lambda given, i, _: given[i],
    "layers_block_type": lambda given, i, _: given[i],
    "hybrid_override_pattern": lambda given, i, _: _PATTERN[given[i]],  # Nemotron-H
    "attn_type_list": lambda given, i, _: given[i] == 1,  # MiniMax-Text
    "attn_layer_period": lambda given, i, text: i % given == text["attn_layer_offset"],  # Jamba
    "attn_layer_indices": lambda given, i, _: i in given,  # Bamba
    "full_attn_idxs": lambda given, i, _: i in given,  # LFM2
    "full_attention_interval": lambda given, i, _: (i + 1) % given == 0,  # Qwen3-Next
    "linear_attn_config": lambda given, i, _: i + 1 in given["full_attn_layers"],  # Kimi Linear
}
# Layers differ in more than their types: Nemotron-NAS, RecurrentGemma, MiMo, PLaMo 2.
_UNREAD = ("block_configs", "block_types", "hybrid_layer_pattern", "mamba_step")
# The first that is given counts.
_HEADS = (
    "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups",
    "num_attention_heads",
)  # fmt: skip


def layer_types(text: Mapping[str, Any], name: str) -> list[str]:
    """Of each layer, in order. ``text``: the configuration of a language model. Raises KVTierError if it says this in a
    way that is not known here."""
    for field in _UNREAD:
        if text.get(field) is not None:
            raise KVTierError(f"{name}: its layers differ by {field}, which is not read here")
    count = int(text["num_hidden_layers"])
    for field, rule in _FIELDS.items():
        if given := text.get(field):
            try:
                found = [rule(given, i, text) for i in range(count)]
            except (LookupError, TypeError) as error:
                raise KVTierError(f"{name}: {field} does not say what its {count} layers are ({error!r})") from error
            return [each if isinstance(each, str) else (_STATE, _FULL)[each] for each in found]
    if not text.get("sliding_window") or not text.get("use_sliding_window", True):
        return [_FULL] * count
    period = text.get("sliding_window_pattern") or _WINDOW_PERIODS.get(text.get("model_type", ""), 0)
    period = len(period) if isinstance(period, str) else int(period)  # EXAONE 4: "LLLG"
    return [_FULL if period and (i + 1) % period == 0 else _WINDOW for i in range(count)]


def of_layer(text: Mapping[str, Any], i: int, kind: type[CacheKind], name: str) -> Mapping[str, Any]:
    """``text`` as it is for layer ``i``, of ``kind``. Raises KVTierError if parts of the layer are left out."""
    other = text.get("attention_other_setting") or {}  # Step 3.5: of its layers of one type
    if other.get("attention_type") in kind.layer_types:
        text = {**text, **other}
    if (each := text.get("per_layer_config")) is None:
        return {**text, **_of_global_layers(text)} if _FULL in kind.layer_types else text
    own = each.get(str(i)) or {}
    if own.get("skip"):
        raise KVTierError(f"{name}: its layers differ by skip of per_layer_config, which is not read here")
    return {**text, **own}


def _of_global_layers(text: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 4's layers of full attention have of their own."""
    own = {"head_dim": text.get("global_head_dim")}
    if text.get("attention_k_eq_v", True):
        own["num_key_value_heads"] = text.get("num_global_key_value_heads")
    return {field: value for field, value in own.items() if value}


def kv_heads(text: Mapping[str, Any]) -> int:
    """Raises KeyError if the configuration has none of the fields."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon 7B
        return 1
    return int(next((text[field] for field in _HEADS if text.get(field)), 0) or text["num_attention_heads"])
