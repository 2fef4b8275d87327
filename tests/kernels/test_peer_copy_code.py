"""What the copy from other GPUs compiles to, for a GPU that need not be here: no other test would see a load of
8 bytes instead of 16, or registers that are spilled, but the bandwidth halves."""

import os
import re
import subprocess
import sys

import pytest
from vllm_kvtier.kernels.peer_copy_plan import MANY

pytest.importorskip("triton")

# In a process of its own: in this one kernels are interpreted.
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from vllm_kvtier.kernels import peer_copy as peer, peer_copy_plan as peer_plan

columns, rows = {tile}
flags = dict(SUM=True, ROWS=rows, COLUMNS=columns, LANES=min(columns, 64 * peer_plan.SHAPE.warps), CELL=64,
             TOKENS={tokens}, CELL_TOKENS=1, WORD=8, TARGET_DENSE={dense}, SOURCE_DENSE={dense}, SPLIT=False,
             PAIRS=True)
names = ["work_ptr", "acc_ptr", "segments", "starts", *flags]
signature = dict(zip(names, ["*i64", "*i64", "i32", "i32"] + ["constexpr"] * len(flags)))
source = ASTSource(peer._move, signature, {{(names.index(k),): v for k, v in flags.items()}},
                   {{(i,): [["tt.divisibility", 16]] for i in (0, 1)}})
compiled = compile(source, GPUTarget("cuda", 90, 32), dict(num_warps=peer_plan.SHAPE.warps))
print(compiled.asm["ptx"])
print("CUBIN", compiled.asm["cubin"].hex())
"""


def compiled(tile, dense, tokens) -> tuple[str, bytes]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    text = COMPILE.format(tile=tile, dense=dense, tokens=tokens)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    if "NVIDIA" in done.stderr and "ptxas" in done.stderr:
        pytest.skip("this Triton brings no ptxas")
    assert done.returncode == 0, done.stderr
    ptx, cubin = done.stdout.rsplit("CUBIN ", 1)
    return ptx, bytes.fromhex(cubin.strip())


@pytest.mark.parametrize("dense, tokens", [(True, 16), (False, 16), (False, MANY)])
@pytest.mark.parametrize("tile", [(4096, 1), (1024, 4), (512, 8)])
def test_peer_copy_code_uses_16_byte_accesses_without_spills(tile, dense, tokens):
    ptx, cubin = compiled(tile, dense, tokens)
    tiles = tile[0] * tile[1] * 8 // 16 // (32 * 16)  # of 16 bytes, a thread
    pages = re.findall(r"ld\.global\.cg[.\w]*", ptx)
    assert pages == ["ld.global.cg.v2.b64"] * (2 * tiles), "the first tile and the next one"
    stores = re.findall(r"st\.global[.\w]*", ptx)
    assert stores == ["st.global.v2.b64"] * tiles
    # The next tile's loads are on their way before the present one is stored and summed.
    assert ptx.rindex("ld.global.cg.v2") < ptx.index("st.global.v2")
    assert not re.search(r"\.local", ptx)
    assert _stack(cubin) == 0


def _stack(cubin: bytes) -> int:
    """Bytes of local memory a thread, by the tool that comes with Triton."""
    import tempfile
    from pathlib import Path

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])
