"""Kernels run on a GPU where there is one, and in Triton's interpreter elsewhere: the same tests."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Triton decides when a kernel is decorated, its own library's included, whether it will be interpreted. So
# the choice is made before the first import of Triton, and taken back for processes that other tests start.
if not HAS_CUDA and "triton" not in sys.modules:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import vllm_kvtier.kernels.encoded_pages  # imports all the others, but for one
    import vllm_kvtier.kernels.peer_copy

    import vllm_kvtier.codecs

    vllm_kvtier.codecs.names()  # imports every codec

    if before is None:
        del os.environ["TRITON_INTERPRET"]


def quicken(interpreter: ModuleType) -> None:
    """Leave out what Triton's interpreter does in vain. It exchanges the functions of its language not only for a
    kernel, but again at every call of a function within it; and it makes a table of all types to look one up."""
    exchange, find, found, modules = interpreter._patch_lang, interpreter._get_np_dtype, {}, []

    def exchange_once(fn):
        if any(fn.__globals__ is each for each in modules):
            return None  # it is the kernel that takes all back
        scope, outermost = exchange(fn), not modules
        modules.append(fn.__globals__)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (modules.clear(), restore())
        return scope

    def find_once(dtype):
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = exchange_once, find_once


if not HAS_CUDA and hasattr(sys.modules.get("triton.runtime.interpreter"), "_LangPatchScope"):
    quicken(sys.modules["triton.runtime.interpreter"])


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernel under test runs; the interpreter works on host memory."""
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    if HAS_CUDA:
        pytest.skip("the kernel runs on the GPU here")
    pytest.importorskip("triton")
    from vllm_kvtier.kernels import checksum

    if type(checksum._page_checksums).__name__ != "InterpretedFunction":
        pytest.fail(
            "Triton was imported before tests/kernels/conftest.py could choose the interpreter: "
            "run with TRITON_INTERPRET=1, or find which conftest imports Triton"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # asked again at the first launch
        yield torch.device("cpu")
