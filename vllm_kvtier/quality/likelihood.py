"""Next-token distributions with a codec beside those without: divergence, loss, agreement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvtier.codecs.base import Codec
from vllm_kvtier.quality.cache import RoundTripCache

# Rows of logits compared at once: a large vocabulary in float32 takes a megabyte a row and temporary.
ROWS = 256


@dataclass
class Likelihood:
    """Means over windows of equal length; one number a window in each list."""

    extra_nats: list[float] = field(default_factory=list)  # loss a token, less that without a codec
    divergence: list[float] = field(default_factory=list)  # KL(without || with), nats a token
    agreement: list[float] = field(default_factory=list)

    def perplexity(self) -> tuple[float, float]:
        """(relative change, its standard error over windows; infinite for one window)."""
        extra = torch.tensor(self.extra_nats, dtype=torch.float64)
        change = torch.expm1(extra.mean()).item()
        error = (extra.std() / len(extra) ** 0.5).item() if len(extra) > 1 else float("inf")
        return change, error * (1 + change)


def compare(
    model: Any,
    windows: Sequence[Sequence[int]],
    raw: Codec,
    codecs: Mapping[str, Codec],
    dtype: torch.dtype,
    step: Callable[[], None] = lambda: None,
) -> tuple[float, dict[str, Likelihood]]:
    """(loss in nats a token without a codec, by name what each codec does to it).

    ``dtype``: of the cache. ``step`` is called after every pass over a window, ``len(windows) * (1 + len(codecs))``
    times. Every position attends only to round-tripped K and V, its own too.
    """
    found = {name: Likelihood() for name in codecs}
    nats = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([list(window)], device=model.device)
            plain = _logits(model, ids, raw, dtype)
            nats.append(_losses(plain, ids).mean().item())
            step()
            for name, codec in codecs.items():
                coded = _logits(model, ids, codec, dtype)
                each = found[name]
                each.extra_nats.append(_losses(coded, ids).mean().item() - nats[-1])
                each.divergence.append(_mean(_divergence(p, q) for p, q in _pairs(plain, coded)))
                each.agreement.append(_mean((p.argmax(-1) == q.argmax(-1)).double() for p, q in _pairs(plain, coded)))
                step()
    return sum(nats) / len(nats), found


def _logits(model: Any, ids: torch.Tensor, codec: Codec, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, vocabulary]."""
    cache = RoundTripCache(model.config, codec.formats, dtype)
    return model(ids, past_key_values=cache, use_cache=True).logits[0]


def _pairs(p: torch.Tensor, q: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The last row predicts what is not in the window, and is as good as any for this."""
    for at in range(0, len(p), ROWS):
        yield p[at : at + ROWS], q[at : at + ROWS]


def _divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).double()


def _losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first, float64."""
    logits, wanted = logits[:-1], ids[0, 1:]
    parts = []
    for at in range(0, len(wanted), ROWS):
        of_all = logits[at : at + ROWS].float().log_softmax(-1)
        parts.append(-of_all.gather(1, wanted[at : at + ROWS, None])[:, 0].double())
    return torch.cat(parts)


def _mean(parts: Iterator[torch.Tensor]) -> float:
    return torch.cat(list(parts)).mean().item()
