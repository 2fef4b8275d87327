"""benchmarks/ttft.py: the memory that its engines get."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ttft


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
        phases=phases, lengths=[2048, 131072], many=(4, 2048), itl_tokens=32768, decode_tokens=800, step_tokens=2048
    )
    asked = []

    def start(args, gpu, host):
        asked.append((gpu, host))
        raise SystemExit  # there are no engines

    monkeypatch.setattr(ttft, "start", start)
    with pytest.raises(SystemExit):
        ttft.measure(args, None)
    assert asked == [(gpu, host)]
