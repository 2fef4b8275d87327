"""Real load on engines with different KV tiers: replays of public traces, and agents, at rising levels of load.

The trace is a sample of Mooncake's conversation trace (data/README.md), or any file in its format: also its
tool-and-agent and synthetic traces. Whole sessions of its --window are replayed (--requests: some of them), with times
compressed to --rates requests a second, and prompts, blocks and answers scaled by --lengths. Agents are --agents
sessions at once, whose prompts grow by what tools return, with one system prompt. All variants have the same requests,
memory and disk, and take turns level by level on one GPU. Reported by level: time to the first token (TTFT), time
between tokens (ITL), throughput, hits by tier, and what LRU caches of the same sizes would find; and by workload:
throughput at a fixed p99 of the TTFT.

    # one GPU, about 9 minutes
    python benchmarks/replay --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 --out replay.json
    # the loads alone; the whole trace; what a run wrote
    python benchmarks/replay --model benchmarks/models/qwen3-8b-shapes --plan --trace conversation_trace.jsonl \\
        --window 0 60 --requests 400
    python benchmarks/replay --draw replay.json replay.png
    # without a GPU
    python benchmarks/replay --model models/recall-6m --compare none kvtier --lengths 0.03125 --longest 1024 \\
        --rates 4 --agents 16 --system 128 --task 64 --tool 128 --answer 8 --turns 4 --pause 0.5 \\
        --cache-tokens 3136 --host-gib 0.04 --disk-gib 0.1
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As benchmarks/serve: run by its directory's name, Python would look for modules in it.
sys.path[:] = [str(HERE.parent), str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

if __name__ == "__main__":
    from replay.run import main

    try:
        sys.exit(main(__doc__))
    except KeyboardInterrupt:
        sys.exit(130)
