"""The `sparkjax` command: thin, each verb calls one function elsewhere.

Nothing here imports JAX before a verb needs it, so that help and completion answer at once.
"""

from __future__ import annotations


def main() -> None:
    """The `sparkjax` command."""
    from .app import app

    app()


def serve_main() -> None:
    """`python -m sparkjax.serve`: the same as `sparkjax serve`."""
    import typer

    from .app import serve

    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(serve)
    alone(prog_name="python -m sparkjax.serve")
