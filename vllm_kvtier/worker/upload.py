"""Small arrays to a device, without waiting for it."""

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, good in the order of the current stream; on a CPU the array itself.

    A copy to a GPU from memory that is not pinned waits for all that its stream waits for: behind a step's fence that
    is the step's forward, which the calling thread would spend spinning in the driver, beside the one that launches
    the next. torch keeps the pinned memory until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
