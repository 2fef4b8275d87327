"""Compare next-token distributions with and without a codec: divergence, loss, agreement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.quality.cache import LoadedModel, RoundTripCache

# Rows of logits compared at once: a large vocabulary in float32 takes a megabyte a row and temporary.
MAX_ROWS = 256


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
    loaded: LoadedModel,
    windows: Sequence[Sequence[int]],
    codecs: Mapping[str, Codec],
    step: Callable[[], None] = lambda: None,
) -> tuple[float, dict[str, Likelihood]]:
    """(loss in nats per token without a codec, the changes by codec name).

    ``step`` is called after every pass over a window: ``len(windows) * (1 + len(codecs))`` times. Every position
    attends to K and V after a round trip, including its own.
    """
    found = {name: Likelihood() for name in codecs}
    nats = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([list(window)], device=loaded.model.device)
            plain = _logits(loaded, ids, {})
            nats.append(_losses(plain, ids).mean().item())
            step()
            for name, codec in codecs.items():
                logits = _logits(loaded, ids, codec.formats)
                each = found[name]
                each.extra_nats.append(_losses(logits, ids).mean().item() - nats[-1])
                each.divergence.append(_mean(_divergence(p, q) for p, q in _pairs(plain, logits)))
                each.agreement.append(_mean((p.argmax(-1) == q.argmax(-1)).double() for p, q in _pairs(plain, logits)))
                step()
    return sum(nats) / len(nats), found


def _logits(loaded: LoadedModel, ids: torch.Tensor, formats: Mapping[str, Format]) -> torch.Tensor:
    """[tokens, vocabulary]."""
    cache = RoundTripCache(loaded.model.config, formats, loaded.dtype)
    return loaded.model(ids, past_key_values=cache, use_cache=True).logits[0]


def _pairs(p: torch.Tensor, q: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The last row predicts a token outside the window, which is fine for this comparison."""
    for at in range(0, len(p), MAX_ROWS):
        yield p[at : at + MAX_ROWS], q[at : at + MAX_ROWS]


def _divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).double()


def _losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first, float64."""
    logits, wanted = logits[:-1], ids[0, 1:]
    parts = []
    for at in range(0, len(wanted), MAX_ROWS):
        of_all = logits[at : at + MAX_ROWS].float().log_softmax(-1)
        parts.append(-of_all.gather(1, wanted[at : at + MAX_ROWS, None])[:, 0].double())
    return torch.cat(parts)


def _mean(parts: Iterator[torch.Tensor]) -> float:
    return torch.cat(list(parts)).mean().item()
