"""What a token of a model takes in a KV cache and in the node store, read from its ``config.json``.

Layers that keep KV alike (attention over everything, over a window, MLA) form a group, as in vLLM; bytes come from the
same layouts that slots are made of (``codecs.parts``, ``wire.slots``), rounding and checksums included.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kvtier import codecs, fingerprint
from vllm_kvtier.cache_kinds import KINDS, CacheKind, Contents, of_layer_type
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan import layer_types
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, slot_layout

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True)
class Layers:
    """``count`` layers that keep KV alike; ``fields``: numbers a token and head."""

    kind: CacheKind
    count: int
    heads: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Model:
    """``dtype``: of the KV cache. ``remarks``: features of the configuration that are ignored here."""

    name: str
    dtype: str
    layers: tuple[Layers, ...]
    longest: int  # tokens of a prompt
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Footprint:
    """Of a token. ``gpu``: bytes in one rank's cache; ``stored``: bytes in the store, all ranks; ``loaded``: bytes that
    one rank loads; ``pages``: 4 KiB pages of a block, by group; ``logical``: bytes of KV, each once; ``parts``: of a
    block in the store, of all groups and ranks."""

    block_tokens: int
    gpu: float
    stored: float
    loaded: float
    logical: float
    pages: tuple[int, ...]
    parts: int

    def tokens_in_store(self, nbytes: int) -> int:
        """Tokens that fit into ``nbytes``: whole slots, none across a piece of pinned memory, page 0 unused."""
        if len(self.pages) == 1:
            whole, rest = divmod(nbytes // PAGE, PIECE_BYTES // PAGE)
            pieces = [PIECE_BYTES // PAGE] * whole + [rest]
            pieces[0] -= 1
            return sum(max(0, piece) // self.pages[0] for piece in pieces) * self.block_tokens
        return int(max(0, nbytes - PAGE) / self.stored)

    def tokens_in_cache(self, nbytes: int) -> int:
        """Tokens that fit into one rank's cache of ``nbytes``."""
        return int(nbytes / self.gpu) // self.block_tokens * self.block_tokens


def read(model: str, cache_dtype: str = "auto") -> Model:
    """``model``: a config.json, a directory with one, or a name in the hub's cache. Raises KVTierError."""
    path = Path(model).expanduser()
    if not path.is_file():
        folder = fingerprint.model_folder(model)
        if folder is None:
            raise KVTierError(f"{model} is no file, no directory, and not in the hub's cache here")
        path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KVTierError(f"{path} is no model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise KVTierError(f"{path} is no model's configuration")
    return from_config(config, model, cache_dtype)


def from_config(config: Mapping[str, Any], name: str, cache_dtype: str = "auto") -> Model:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping) or "num_hidden_layers" not in text:
        raise KVTierError(f"{name}: its configuration does not say how many layers it has (num_hidden_layers)")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "")
    dtype = dtype.removeprefix("torch.") or "bfloat16"
    if cache_dtype != "auto":
        dtype = "fp8" if cache_dtype.startswith("fp8") else cache_dtype
    elif _has_fp8_cache(config.get("quantization_config")):
        dtype = "fp8"
    elif dtype == "float32":
        dtype = "bfloat16"  # vLLM computes in half of it
    if dtype not in _DTYPES:
        raise KVTierError(f"{name}: a KV cache of {dtype} is not known here; give --kv-cache-dtype")
    remarks: list[str] = []
    alike = Counter(_layer(text, i, kind, name) for i, kind in _kinds(text, remarks, name))
    if not alike:
        raise KVTierError(f"{name}: none of its layers keeps KV of tokens")
    layers = tuple(replace(layer, count=count) for layer, count in alike.items())
    return Model(name, dtype, layers, int(text.get("max_position_embeddings", 0)) or 1 << 17, tuple(remarks))


def _has_fp8_cache(quantization: Any) -> bool:
    """Whether vLLM keeps KV in 8 bits because the checkpoint says so (compressed-tensors, ModelOpt)."""
    if not isinstance(quantization, Mapping):
        return False
    inner = quantization.get("quantization")
    inner = inner if isinstance(inner, Mapping) else quantization
    scheme = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return str(scheme).lower() == "fp8"


def _kinds(text: Mapping[str, Any], remarks: list[str], name: str) -> list[tuple[int, type[CacheKind]]]:
    """(number, kind) of each layer that keeps KV of its own."""
    kinds: list[tuple[int, type[CacheKind]]] = []
    states = 0
    given = layer_types.layer_types(text, name)
    for i, each in enumerate(given):
        kind = of_layer_type(each)
        if kind is not None and Contents.STATE in kind.specs.values():
            states += 1
        elif each in layer_types.NO_CACHE:
            continue
        elif text.get("kv_lora_rank"):
            kinds.append((i, KINDS["mla"]))
        elif kind is None:
            raise KVTierError(f"{name}: layers of type {each} are not known here")
        else:
            kinds.append((i, kind))
    if states:
        remarks.append(
            f"{states} of {len(given)} layers keep states, a few for each prompt, which are not counted here"
        )
    if shared := int(text.get("num_kv_shared_layers") or 0):
        kinds = kinds[: len(kinds) - shared]
    return kinds


def _layer(text: Mapping[str, Any], i: int, kind: type[CacheKind], name: str) -> Layers:
    """Layer ``i`` alone."""
    try:
        text = layer_types.of_layer(text, i, kind, name)
        if Contents.LATENT in kind.specs.values():
            rope = int(text["qk_rope_head_dim"])
            fields = (Field("latent", int(text["kv_lora_rank"])), Field("rope", rope))
            return Layers(kind(), 1, 1, fields if rope else fields[:1])
        heads = layer_types.kv_heads(text)
        size = int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))
        window = int(text[kind.window_field]) if kind.window_field else None
        fields = (Field("k", size), Field("v", int(text.get("v_head_dim") or size)))
        return Layers(kind(window), 1, heads, fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KVTierError(f"{name}: its configuration lacks or hides {error}") from error


def footprint(model: Model, codec: str, tensor_parallel: int = 1, block_tokens: int = 16) -> Footprint:
    """Raises KVTierError if the heads cannot be divided over the ranks, or if the codec does not exist."""
    gpu = stored = loaded = logical = 0.0
    parts = 0
    pages = []
    for layers in model.layers:
        ranks, heads = _spread(layers, tensor_parallel, model.name)
        group = _group(layers, heads, block_tokens, model.dtype)
        part = part_layout(group, codecs.choose(codec, group)).nbytes
        slot = slot_layout([part] * ranks).pages
        pages.append(slot)
        parts += ranks
        gpu += group.block_bytes / block_tokens
        loaded += part / block_tokens
        stored += slot * PAGE / block_tokens
        logical += group.block_bytes * ranks / block_tokens
    return Footprint(block_tokens, gpu, stored, loaded, logical, tuple(pages), parts)


def _spread(layers: Layers, tensor_parallel: int, name: str) -> tuple[int, int]:
    """(ranks that hold something of their own, heads of each)."""
    if layers.heads == 1:
        return 1, 1
    if layers.heads >= tensor_parallel and layers.heads % tensor_parallel == 0:
        return tensor_parallel, layers.heads // tensor_parallel
    if tensor_parallel % layers.heads == 0:
        return layers.heads, 1
    raise KVTierError(f"{name}: {layers.heads} KV heads cannot be spread over {tensor_parallel} ranks")


def _group(layers: Layers, heads: int, block_tokens: int, dtype: str) -> GroupView:
    """The description of a worker, without addresses."""
    cell = sum(field.count for field in layers.fields) * _DTYPES[dtype]
    regions = tuple(
        Region(
            f"layer{i}", 0, heads * block_tokens * cell, heads, block_tokens * cell, 0, block_tokens, cell, cell,
            dtype=dtype, fields=layers.fields if dtype in ("bfloat16", "float16") else (),
        )
        for i in range(layers.count)
    )  # fmt: skip
    return GroupView(0, block_tokens, layers.kind.name, layers.kind.window, regions)


def describe_groups(model: Model) -> str:
    return ", ".join(
        f"{layers.count} layers of {layers.kind.describe()}"
        + (" tokens" if layers.kind.window else "")
        + f" ({layers.heads} head{'s' * (layers.heads != 1)} of {'+'.join(str(f.count) for f in layers.fields)})"
        for layers in model.layers
    )


def codec_names() -> Sequence[str]:
    return codecs.names()
