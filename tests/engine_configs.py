"""vLLM's configuration classes with defaults and given fields, without validation and without a model."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from pydantic.fields import FieldInfo
from vllm.config import CacheConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.attention import AttentionConfig
from vllm.config.multimodal import MultiModalConfig


def at_defaults(cls: type, **fields: Any) -> Any:
    made, known = object.__new__(cls), {field.name: field for field in dataclasses.fields(cls)}
    assert set(fields) <= set(known), f"{cls.__name__} has no {set(fields) - set(known)}"
    for name, field in known.items():
        default = field.default
        if name in fields:
            default = fields[name]
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif isinstance(default, FieldInfo):
            default = default.get_default(call_default_factory=True)
        object.__setattr__(made, name, default)
    return made


def multimodal(**fields: Any) -> dict[str, Any]:
    """Of a model's configuration."""
    return {"multimodal_config": at_defaults(MultiModalConfig, **fields)}


def engine_config(
    hf: dict | None = None, cache: dict | None = None, load: dict | None = None, attention: dict | None = None,
    ranks: int = 1, lora: Any = None, additional: dict | None = None, asked_length: int | None = None,
    mla: bool = False, **model: Any,
) -> VllmConfig:  # fmt: skip
    """``hf``: the model's config.json; ``asked_length``: --max-model-len; ``model``: fields of ModelConfig."""
    hf = hf or {}
    model = {
        "model": "model", "dtype": torch.bfloat16, "hf_config": SimpleNamespace(to_dict=lambda: hf),
        "max_model_len": 256, **model,
    }  # fmt: skip
    parallel = at_defaults(ParallelConfig)
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks, 1
    model_config = at_defaults(type("ModelConfig", (ModelConfig,), {"use_mla": mla}), **model)
    model_config.original_max_model_len = asked_length
    return at_defaults(
        VllmConfig,
        model_config=model_config,
        cache_config=at_defaults(CacheConfig, **(cache or {})),
        load_config=at_defaults(LoadConfig, **(load or {})),
        attention_config=at_defaults(AttentionConfig, **(attention or {})),
        parallel_config=parallel,
        device_config=None,  # made, it looks for a device
        lora_config=lora,
        additional_config=additional or {},
    )
