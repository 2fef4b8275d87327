"""Pinned host memory: the arguments of a copy's kernels, and uploads that do not wait."""

import numpy as np
import torch


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class PinnedArgs:
    """The ``words`` (int64) that the kernels of one call read, and a result byte per row that they write."""

    def __init__(self, num_words: int, num_rows: int):
        self.num_words, self.num_rows = num_words, num_rows
        self._memory = pinned(num_words * 8 + num_rows)
        self.address = self._memory.data_ptr()
        self.results_address = self.address + num_words * 8
        flat = self._memory.numpy()
        self.words = flat[: num_words * 8].view(np.int64)
        self.results = flat[num_words * 8 :]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, valid in the order of the current stream; on a CPU the array itself.

    A copy to a GPU from memory that is not pinned waits for all that its stream waits for. Behind a step's event that
    is the step's forward: the calling thread would spin in the driver, beside the thread that launches the next step.
    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
