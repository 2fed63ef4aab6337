"""What the verbs print: for people, or as JSON for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.text import Text


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with a message and no traceback."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(message, style="red"))
    raise typer.Exit(code)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can put right is said in words; anything else keeps its traceback."""
    from sparkjax.config import ConfigError

    try:
        yield
    except typer.Exit:
        raise
    except ConfigError as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader has seen enough. Python would complain again when it flushes at exit.
        sys.stdout = None  # type: ignore[assignment]
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        # The package defines an exception class where there is something to tell the user.
        ours = type(error).__module__.partition(".")[0] == "sparkjax"
        if ours or isinstance(error, FileNotFoundError):
            fail(str(error))
        raise


def dump(value: Any) -> None:
    """One JSON document a line."""
    print(json.dumps(value, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # arrays and their scalars
        return value.tolist()
    return msgspec.to_builtins(value)


def configuration(config: Any, as_json: bool, docs: bool) -> None:
    """The lines of `sparkjax config`; with `docs` each is followed by what the key means."""
    from sparkjax.config import FIELDS, allowed, digest, explain

    rows = explain(config)
    if as_json:
        dump({"keys": [row._asdict() for row in rows], "digest": digest(config)})
        return
    console = Console(highlight=False, soft_wrap=True)
    values = [json.dumps(row.value, ensure_ascii=False, default=_plain).strip('"') for row in rows]
    wide = max(len(row.key) for row in rows) + 2
    value_wide = min(44, max(map(len, values)) + 2)
    for row, value in zip(rows, values, strict=True):
        changed = "green" if row.source != "default" else "dim"
        console.print(
            Text.assemble(
                (f"{row.key:<{wide}}", "cyan"), f"{value:<{value_wide}}", " ", (row.source, changed)
            )
        )
        if docs:
            words = allowed(FIELDS[row.key].type) if row.key in FIELDS else "text, or null"
            console.print(Text(f"    {row.doc}\n    ({words})", style="dim"))
    console.print(f"\ndigest {digest(config)}")


def report(report: Any, as_json: bool) -> None:
    """A line for each comparison of `sparkjax verify`."""
    if as_json:
        print(report.json())
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{report.path} ({report.family}, {report.dtype})")
    for line in report.lines:
        verdict = {True: "[green]ok [/]", False: "[bold red]OFF[/]", None: "   "}[line.ok]
        numbers = f"{_number(line.relative)}  {_number(line.absolute)}"
        console.print(f"  {verdict} {line.what:<28} {numbers}  {line.note}".rstrip())
    console.print("[green]all equal[/]" if report.ok else "[bold red]off[/]")


def vectors(path: Any, lines: Iterable[Any], as_json: bool) -> bool:
    """A line for each case of `sparkjax verify --vectors`; whether all are fine."""
    if as_json:
        cases = [dataclasses.asdict(line) for line in lines]
        fine = all(case["ok"] for case in cases)
        dump({"path": str(path), "ok": fine, "cases": cases})
        return fine
    console = Console(highlight=False, soft_wrap=True)
    console.print(str(path))
    count, off = 0, 0
    for line in lines:
        count, off = count + 1, off + (not line.ok)
        verdict = "[green]ok [/]" if line.ok else "[bold red]OFF[/]"
        text = f"  {line.name:<34} {line.rule:<6} {_number(line.error)}  {line.note}"
        console.print(verdict, Text(text.rstrip()), end="\n", sep="")
    console.print(f"[green]all {count} equal[/]" if not off else f"[bold red]{off} of {count} off[/]")
    return not off


def _number(value: float | None) -> str:
    return f"{value:9.2e}" if value is not None else " " * 9


def pulled(result: Any, as_json: bool) -> None:
    """Where a fetched checkpoint lies."""
    if as_json:
        dump({**dataclasses.asdict(result), "path": str(result.path)})
        return
    size = f"{result.files} files, {result.bytes / 1e9:.2f} GB, all hashes right"
    print(f"{result.path}\n  commit {result.commit}: {size}; {result.fetched / 1e9:.2f} GB fetched now")


def generated(result: Any, as_json: bool) -> None:
    if as_json:
        dump(result)
    else:
        print(result.text)


def scored(tokens: Sequence[int], texts: Sequence[str], scores: Any, as_json: bool) -> None:
    """Tokens with their log-probabilities; the first one follows nothing and has none."""
    logprobs = [None, *map(float, scores)]
    total = sum(map(float, scores))
    if as_json:
        dump({"tokens": tokens, "texts": texts, "logprobs": logprobs, "sum": total})
        return
    for token, text, logprob in zip(tokens, texts, logprobs, strict=True):
        shown = f"{logprob:10.4f}" if logprob is not None else " " * 10
        print(f"{token:8} {shown}  {text!r}")
    print(f"{'sum':>8} {total:10.4f}  mean {total / len(scores):.4f}")


def measured(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        dump(result)
        return
    print(
        f"{result['requests']} requests, {result['streams']} at a time: "
        f"{result['prompt_tokens']} prompt and {result['completion_tokens']} output tokens "
        f"in {result['seconds']:.2f} s"
    )
    print(
        f"  {result['output_tokens_per_second']:.1f} output tok/s, "
        f"{result['total_tokens_per_second']:.1f} in all"
    )
    for key, name in [
        ("first_token_seconds", "first token"),
        ("between_tokens_seconds", "between tokens"),
        ("request_seconds", "whole request"),
    ]:
        if spread := result[key]:
            times = "   ".join(f"{k} {v * 1e3:.1f} ms" for k, v in spread.items())
            print(f"  {name:<15} {times}")


def profiled(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        dump(answer)
    else:
        print(f"trace written to {answer.get('directory', '?')} (open it with xprof or Perfetto)")
