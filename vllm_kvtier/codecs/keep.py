"""Copies a field within a part whose other fields are encoded: the rotary part of MLA."""

import torch

from vllm_kvtier.codecs.base import Format


class Keep(Format):
    """16 bits a number, no scales; a line is the whole field."""

    name = "keep16"
    lossy = False
    bound = "exact, NaN payloads included"
    bits, scale_size = 16, 0

    def line(self, count: int) -> int:
        return count

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        return x.view(torch.uint8), torch.empty((x.shape[0], 0), dtype=torch.uint8)

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return data.contiguous().view(dtype)

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)

    @property
    def kernels(self) -> None:
        return None


KEEP = Keep()
