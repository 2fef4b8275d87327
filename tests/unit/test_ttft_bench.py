"""benchmarks/ttft.py: the memory that its engines get."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tiers
import ttft

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "phases, gpu, host",
    [
        (["many"], 4 * (2048 + 256), 3 * 4 * 2048),
        (["ttft"], 131072 + 256, 3 * 131072),
        (["itl"], 8 * (64 + 800) + 32768 + 256, 9 * 32768),
        (["ttft", "many", "itl"], 131072 + 256, 3 * 131072),
    ],
)
def test_ttft_bench_memory_sizes_follow_selected_phases(monkeypatch, phases, gpu, host):
    args = argparse.Namespace(
        phases=phases, lengths=[2048, 131072], many=(4, 2048), itl_tokens=32768, decode_tokens=800, step_tokens=2048,
        model=BENCHMARKS / "models" / "qwen3-8b-shapes", device_lock=None,
    )  # fmt: skip
    asked = []

    def start(args, gpu, host):
        asked.append((gpu, host))
        raise SystemExit  # there are no engines

    monkeypatch.setattr(ttft, "start", start)
    with pytest.raises(SystemExit):
        ttft.measure(args, None)
    assert asked == [(gpu, host)]


@pytest.mark.parametrize("shapes, token, state", [
    ("qwen3-next", 12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128) * 2),
    ("nemotron-h", 2 * 2 * 8 * 128 * 2, 12 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2)),
    ("qwen3-8b", 36 * 2 * 8 * 128 * 2, 0),
])  # fmt: skip
def test_bytes_of_attention_and_of_states_follow_the_shapes(shapes, token, state):
    model = BENCHMARKS / "models" / f"{shapes}-shapes"
    assert (tiers.bytes_per_token(model), tiers.state_bytes(model)) == (token, state)
