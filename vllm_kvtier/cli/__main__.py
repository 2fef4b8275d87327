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

from vllm_kvtier.cli import bench, doctor, inspect, pin, plan, proxy, quality, store
from vllm_kvtier.cli.top import command as top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut names at 80 columns
    help="Keep and share prompts' KV between vLLM engines: the node store, the proxy, and tools to examine both.",
)
# In the order in which `kvtier --help` shows them.
for name, command in {
    "doctor": doctor.doctor,
    "top": top.top,
    "inspect": inspect.inspect,
    "store": store.serve,
    "stats": store.stats,
    "clear": store.clear,
    "pin": pin.pin,
    "unpin": pin.unpin,
    "warm": pin.warm,
    "plan": plan.plan,
    "bench": bench.bench,
    "quality": quality.quality,
    "proxy": proxy.command(),
}.items():
    app.command(name, short_help=(command.__doc__ or "").partition("\n\n")[0])(command)
app.command("prefetch", hidden=True)(pin.warm)


def _run() -> None:
    """Raises SystemExit, but after NIXL was loaded: libraries that it brings crash at the end of the interpreter."""
    try:
        app()
    except SystemExit as end:
        if any(name.startswith("nixl") for name in sys.modules) and isinstance(end.code, int | None):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        raise


def main() -> None:
    # None: the shell has closed it (`>&-`). With LANG=C the terminal's encoding lacks the characters of bars.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    try:
        _run()
    except OSError as error:  # of printing: a full disk, a closed terminal; commands handle all others
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        sys.exit(f"error: {error.strerror or error}")


if __name__ == "__main__":
    main()
