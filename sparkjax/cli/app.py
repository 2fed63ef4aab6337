"""The verbs, their options and their help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import show, world

URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="sparkjax",
    help="Serve large language models from pure JAX, and study them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML configuration file.", exists=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set one key: engine.slots=4. Repeats."),
]
ModelPath = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Directory, .gguf file or package:NAME/FILE; else model.path."
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Arithmetic; auto is float32 on a CPU and bfloat16 on a GPU."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Url = Annotated[str, typer.Option(help="Where the server listens.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="File whose first line is the API key.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from sparkjax import __version__

        typer.echo(f"sparkjax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: ModelPath = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (http.host).")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port (http.port).")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Which of mesh.peers this process is (mesh.rank).")
    ] = None,
) -> None:
    """Serve a model over the OpenAI API."""
    with show.plain_errors():
        loaded = _load(config, overrides, model, {"http.host": host, "http.port": port, "mesh.rank": rank})
        if loaded.model.path is None:
            show.fail("no model: give --model or set model.path (see `sparkjax config`)")
        from sparkjax.serve import run

        raise typer.Exit(run(loaded))


@app.command()
def chat(
    url: Url = URL,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Served model id.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0 always takes the likeliest word.")
    ] = 0.5,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    api_key_file: KeyFile = None,
) -> None:
    """Talk to a running server in the terminal."""
    with show.plain_errors():
        from .chat import Chat
        from .client import Client

        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        with Client(url, api_key_file) as client:
            Chat(client, model or client.model(), system, _given(options)).run()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: ModelPath = None,
    dtype: Dtype = "auto",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Continue a text in this process, without a server."""
    with show.plain_errors():
        loaded = _library_model(config, model, dtype)
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        result = loaded.generate(_text(prompt), max_tokens=max_tokens, **_given(sampling))
        show.generated(result, as_json)


@app.command()
def score(
    text: Annotated[str, typer.Argument(help="Text to score; - reads standard input.")],
    model: ModelPath = None,
    dtype: Dtype = "auto",
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Log-probability of every token of a text, each given those before it."""
    with show.plain_errors():
        loaded = _library_model(config, model, dtype)
        tokens = loaded.encode(_text(text))
        if len(tokens) < 2:
            show.fail(f"the text has {len(tokens)} tokens; at least 2 are needed: the first follows nothing")
        texts = [loaded.tokenizer.token_text(token) for token in tokens]
        show.scored(tokens, texts, loaded.score(tokens), as_json)


@app.command()
def verify(
    directory: Annotated[
        list[Path] | None, typer.Argument(help="Checkpoint with golden.safetensors.")
    ] = None,
    vectors: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of weight format vectors (index.json); a line a case. Repeats."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Each has its own rule.")
    ] = "float32",
    tile: Annotated[
        int | None, typer.Option(min=1, help="Feed prompts in tiles of this many tokens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint's outputs with the reference outputs beside it; exit 1 when off."""
    with show.plain_errors():
        if not directory and not vectors:
            show.fail("nothing to compare: give a directory or --vectors")
        from sparkjax.verify import verify as compare
        from sparkjax.weights.vectors import judge

        fine = True
        for path in vectors or ():
            fine = show.vectors(path, judge(path), as_json) and fine
        for path in directory or ():
            report = compare(path, dtype=dtype, tiles=tile)
            show.report(report, as_json)
            fine = fine and report.ok
        raise typer.Exit(0 if fine else 1)


@app.command()
def pull(
    name: Annotated[
        str | None,
        typer.Argument(help="ORG/NAME, ORG/NAME/FILE.gguf, or a manifest's name; @REVISION pins it."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag (default: the manifest's, or main).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank (of --ranks) reads.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Boxes that share the model.")] = 1,
    offline: Annotated[
        bool, typer.Option("--offline", help="Touch no network: check what is here by its hashes.")
    ] = False,
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST[:PORT]", help="Copy from a box that shares, not the hub."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where checkpoints lie (weights.folder).")
    ] = None,
    share: Annotated[
        bool, typer.Option("--serve", help="Share the checkpoints of this box until stopped.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address that --serve listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that --serve listens on.")] = 8765,
    api_key_file: KeyFile = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Fetch a checkpoint, from the hub or another box, and check it; or share what is here."""
    with show.plain_errors():
        from . import fetch

        found = folder or Path(_load(config).weights.folder)
        if share:
            fetch.share(found, host, port, api_key_file)
        elif name is None:
            show.fail("nothing to fetch: give a NAME, or --serve")
        else:
            share_of = None if rank is None else (rank, ranks)
            pulled = fetch.pull(name, revision, found, origin, api_key_file, share_of, offline)
            show.pulled(pulled, as_json)


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="A new directory.")],
    model: ModelPath = None,
    dtype: Annotated[
        Literal["kept", "float32", "bfloat16"],
        typer.Option(help="Of the weights; kept leaves quantized ones as they are."),
    ] = "kept",
    config: ConfigFile = None,
) -> None:
    """Write a model's parameters as an Orbax checkpoint, which can be trained and served."""
    with show.plain_errors():
        loaded = _load(config, None, model)
        if loaded.model.path is None:
            show.fail("no model: give --model or --config")
        from sparkjax import export as exporting
        from sparkjax.config import locate

        source = locate(loaded.model.path, loaded.weights.folder)
        chosen = None if dtype == "kept" else dtype
        print(exporting.export(source, target, chosen))


@app.command()
def config(
    config: ConfigFile = None,
    overrides: Overrides = None,
    docs: Annotated[bool, typer.Option("--docs", help="Say what each key means.")] = False,
    as_json: Json = False,
) -> None:
    """Print every key, its value, and where it came from."""
    with show.plain_errors():
        show.configuration(_load(config, overrides), as_json, docs)


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A manifest's name: proposes box counts.")
    ] = None,
    boxes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Ranks (mesh.tensor_parallel).")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device kind whose constants are used, or a file of them.")
    ] = "gb10",
    compile: Annotated[
        bool, typer.Option(help="Compile the programs for GB10, to count what they launch.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Size a recipe for GB10 boxes: memory, projected speed, what limits it. Needs no GPU."""
    with show.plain_errors():
        from . import plan as planning

        planning.run(_load(config, overrides), model, boxes, device, compile, as_json)


@app.command()
def bench(
    what: Annotated[
        Literal["server", "device"],
        typer.Argument(help="A running server, or this box's device (for `sparkjax plan`)."),
    ] = "server",
    url: Url = URL,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Served model id.")] = None,
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Measure a running server (time to first token, between tokens, throughput), or this device."""
    with show.plain_errors():
        if what == "device":
            from . import plan as planning

            planning.bench_device(as_json)
            return
        from . import bench as load
        from .client import Client

        with Client(url, api_key_file) as client:
            measured = load.measure(
                client, model or client.model(), streams, requests, prompt_tokens, max_tokens
            )
        show.measured(measured, as_json)


@app.command()
def profile(
    directory: Annotated[Path, typer.Argument(help="Where the server writes the trace.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long to record.")] = 5.0,
    url: Url = URL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Record a JAX profiler trace of a running server's live traffic (from its own host only)."""
    with show.plain_errors():
        from .client import Client

        with Client(url, api_key_file) as client:
            answer = client.profile(seconds, directory.absolute())
        show.profiled(answer, as_json)


def _load(
    path: Path | None,
    overrides: list[str] | None = None,
    model: str | None = None,
    more: dict[str, Any] | None = None,
) -> Any:
    """The configuration; an option of its own is another spelling of --set."""
    from sparkjax import config as configuration

    options = {"model.path": model, **(more or {})}
    spelled = [f"{key}={value}" for key, value in options.items() if value is not None]
    return configuration.load(path, [*(overrides or []), *spelled])


def _library_model(path: Path | None, model: str | None, dtype: str) -> Any:
    loaded = _load(path, None, model)
    if loaded.model.path is None:
        show.fail("no model: give --model or --config")
    import sparkjax
    from sparkjax import compiles

    compiles.use_cache(loaded.engine.compilation_cache)
    chosen = dtype if dtype != "auto" else loaded.model.dtype
    return sparkjax.load(loaded.model.path, dtype=None if chosen == "auto" else chosen)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


world.register(app)

__all__ = ["app", "serve"]
