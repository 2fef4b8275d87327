"""``kvtier``, also ``python -m vllm_kvtier.cli``."""

import sys

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(
        f"The kvtier command needs the package {error.name}, which is not installed: pip install 'vllm-kvtier[cli]'. "
        "Engines do not need it, and `python -m vllm_kvtier.store` does not either."
    )

from vllm_kvtier.cli import pin, quality, store

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The node store, and what codecs cost.")
store.add_to(app)
pin.add_to(app)
quality.add_to(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
