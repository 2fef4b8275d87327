"""Tiny models with random weights, one for each kind of KV cache group that is not attention over all tokens.

The weights are scaled so that greedy answers depend on the whole history: queries and keys have a gain, so that
attention picks few tokens; the layers add more to the residual stream than the embedding brought; and only LIVE tokens
have a large output row, so that the best token's margin stays far above rounding. transformers builds and saves them.
"""

import json
import math
import shutil
from pathlib import Path

VOCAB, LIVE, HIDDEN = 2048, 256, 256
BASE = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=False,
    eos_token_id=0, pad_token_id=0, bos_token_id=0,
)  # fmt: skip
DENSE = dict(BASE, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
CHUNK = 192  # tokens, three blocks of 64
# kind -> class of the model, class of its configuration, its arguments, dtype
MODELS = {
    "chunked": ("Llama4ForCausalLM", "Llama4TextConfig", dict(
        DENSE, num_hidden_layers=4, intermediate_size_mlp=512, attention_chunk_size=CHUNK, num_local_experts=2,
        num_experts_per_tok=1, interleave_moe_layer_step=4, no_rope_layers=[1, 1, 1, 0], use_qk_norm=False,
        layer_types=["chunked_attention"] * 3 + ["full_attention"], rope_theta=10000.0), "float32"),
}  # fmt: skip
# Gain of a matrix by what its name ends in; others get 1.
Q, OUT = 2.2, 2.0
SHARP = {"q_proj": Q, "k_proj": Q, "o_proj": OUT, "down_proj": OUT}


def _filled(name, p, live, g):
    """New values of parameter ``name``; None keeps what the model's own initialization set."""
    import torch

    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name.endswith(".bias") or p.ndim < 2:
        return None
    if "embed" in leaf:
        return torch.randn(p.shape, generator=g) * 0.2
    if leaf == "lm_head":
        w = torch.randn(p.shape, generator=g) * 0.02 / math.sqrt(p.shape[-1])
        w[live] *= 200.0
        return w
    # Experts that Llama 4 keeps as [expert, in, out]; all others are [.., out, in].
    fan_in = p.shape[1] if p.ndim == 3 and leaf.endswith("_proj") else p.shape[-1]
    return torch.randn(p.shape, generator=g) * (SHARP.get(leaf, 1.0) / math.sqrt(fan_in))


def build(kind: str, out: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Write the model's directory; ``tokenizer``: where its tokenizer's files are."""
    import torch
    import transformers

    model_class, config_class, args, dtype = MODELS[kind]
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**args)).to(torch.float32)
    g = torch.Generator().manual_seed(seed)
    live = torch.randperm(VOCAB - 16, generator=g)[:LIVE] + 16
    with torch.no_grad():
        for name, p in model.named_parameters():
            new = _filled(name, p, live, g)
            if new is not None:
                p.copy_(new)
    model.to(getattr(torch, dtype)).save_pretrained(out, safe_serialization=True)
    path = out / "config.json"
    saved = json.loads(path.read_text())
    saved.update({key: value for key, value in args.items() if key not in saved})
    saved["architectures"], saved["dtype"] = [model_class], dtype
    path.write_text(json.dumps(saved, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, out / file)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
    return out
