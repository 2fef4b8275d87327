"""``kvtier``, also ``python -m vllm_kvtier.cli``."""

import os
import sys

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(
        f"The kvtier command needs the package {error.name}, which is not installed: pip install 'vllm-kvtier[cli]'. "
        "Engines do not need it, and `python -m vllm_kvtier.store` does not either."
    )

from vllm_kvtier.cli import bench, doctor, inspect, pin, plan, proxy, quality, store, top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="KV of prompts, kept and shared between vLLM engines: the node store, the router, and tools to look at both.",
)
# In the order in which `kvtier --help` shows them.
for command in (doctor, top, inspect, store, pin, plan, bench, quality, proxy):
    command.add_to(app)


def main() -> None:
    # Where the terminal's encoding lacks a character (LANG=C: those of bars), a question mark is better than nothing.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    try:
        app()
    except OSError as error:  # of what is printed: a full disk, a terminal that went. Of all else commands tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or its flush at the end fails once more
        sys.exit(f"error: {error.strerror or error}")


if __name__ == "__main__":
    main()
