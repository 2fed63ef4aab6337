"""Every setting there is: its type, range, default and documentation, in one place.

`sparkjax.config` fills these structs from a file, the environment and the command line, and reads
its checks and its help from them. A field without `Meta(description=...)` cannot be added: a test
looks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PACKAGE = "package:"
"""How a path into an installed Python package begins."""
HUB = "hf:"
"""How a checkpoint of the Hugging Face hub begins: hf:ORG/NAME, hf:ORG/NAME/FILE.gguf, @REVISION."""

Positive = Annotated[int, Meta(ge=1)]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is read."""

    path: Annotated[
        str | None,
        Meta(
            description="a directory of safetensors, a .gguf file, hf:ORG/NAME@REVISION for what "
            "`sparkjax pull` has fetched, or package:NAME/FILE for a file inside an installed "
            "Python package"
        ),
    ] = None
    manifest: Annotated[
        str | None,
        Meta(
            description="the published checkpoint that `sparkjax plan` sizes (checkpoints/NAME.yaml); "
            "null finds it by the repository in model.path"
        ),
    ] = None
    name: Annotated[
        str | None, Meta(description="id that clients ask for; null takes it from the path")
    ] = None
    aliases: Annotated[tuple[str, ...], Meta(description="further ids for the same model")] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="arithmetic; auto is float32 on a CPU and bfloat16 on a GPU"),
    ] = "auto"
    pooling: Annotated[
        Literal["off", "mean", "last"],
        Meta(description="how /v1/embeddings makes one vector of a text's last hidden states; off serves "
             "none (anything else compiles one more program and holds caches for one text)"),
    ] = "off"
    chat_template: Annotated[
        str | None, Meta(description="a Jinja file used in place of the checkpoint's own template")
    ] = None
    answer_format: Annotated[
        Literal["glm", "mimo", "qwen", "harmony", "hermes", "pythonic", "llama", "dsml", "dsml_spaced", "plain"]
        | None,
        Meta(description="how answers write reasoning and tool calls; null is told from the template"),
    ] = None

    def __post_init__(self) -> None:
        if self.name is None and self.path is not None:
            msgspec.structs.force_setattr(self, "name", name_of(self.path))


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Caches, batching and scheduling. `null` sizes are chosen for the device and its memory."""

    slots: Annotated[int, Meta(ge=1, le=4096, description="sequences that run at a time")] = 8
    context: Annotated[
        Positive | None,
        Meta(
            description="tokens of one sequence, prompt and answer; null is the model's own limit, "
            "at most 8192"
        ),
    ] = None
    kv_tokens: Annotated[
        Positive | None,
        Meta(
            description="tokens that the cache pool holds; null is slots x context, bounded by "
            "memory"
        ),
    ] = None
    page_size: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(description="tokens of a cache page, a power of two; null is 64, or what the model needs"),
    ] = None
    tiles: Annotated[
        Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=8)] | None,
        Meta(description="prefill tile sizes in tokens, rising; null suits the device"),
    ] = None
    rows: Annotated[
        Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=8)] | None,
        Meta(description="padded row counts of a decode step, rising; null is one count, or two where "
            "that changes no bit"),
    ] = None
    queue: Annotated[
        int, Meta(ge=0, le=1_000_000, description="requests that may wait; one more gets a 503")
    ] = 64
    busy_tiles: Annotated[
        int, Meta(ge=1, le=1024, description="prefill tiles a tick while a sequence decodes")
    ] = 1
    idle_tiles: Annotated[
        int, Meta(ge=1, le=1024, description="prefill tiles a tick while none decodes")
    ] = 4
    admission: Annotated[
        Literal["reserve", "grow"],
        Meta(
            description="reserve holds the pages of prompt and max_tokens from the start; grow "
            "takes them while decoding"
        ),
    ] = "reserve"
    window: Annotated[
        int, Meta(ge=1, le=1_000_000, description="tokens that grow holds ahead of a sequence")
    ] = 256
    default_max_tokens: Annotated[
        Positive | None,
        Meta(description="tokens of an answer that names no limit; null is the rest of the context"),
    ] = None
    journal: Annotated[
        str | None,
        Meta(description="file that each decision is appended to before it is applied (of several "
             "ranks FILE.rankN); null keeps none"),
    ] = None
    compilation_cache: Annotated[
        str | None, Meta(description="directory of compiled programs; null keeps none")
    ] = "~/.cache/sparkjax/xla"
    watchdog_seconds: Annotated[
        float, Meta(gt=0, le=86400, description="a tick that takes longer ends the server")
    ] = 120.0


class Http(msgspec.Struct, frozen=True, kw_only=True):
    """The OpenAI API's front door."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0 takes a free one")] = 8000
    api_keys: Annotated[
        str | None, Meta(description="file with one API key a line; null asks for none")
    ] = None
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="largest request body, in bytes")
    ] = 4 << 20
    keep_alive_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="silence after which a stream gets a comment")
    ] = 15.0
    requests_per_minute: Annotated[
        Positive | None, Meta(description="limit of each API key; null is none")
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="web origins whose pages may call the API")
    ] = ()
    stored_responses: Annotated[
        int, Meta(ge=0, le=1_000_000, description="responses of /v1/responses that are kept; 0 keeps none")
    ] = 1000
    stored_response_bytes: Annotated[
        int, Meta(ge=0, le=1 << 40, description="bytes of their JSON, conversations included")
    ] = 64 << 20
    stored_response_seconds: Annotated[
        float, Meta(gt=0, le=1e9, description="time that an unused one is kept")
    ] = 86400.0
    max_connections: Annotated[
        int, Meta(ge=1, le=65536, description="connections open at a time")
    ] = 512
    drain_seconds: Annotated[
        float, Meta(ge=0, le=86400, description="time that running requests get after SIGTERM")
    ] = 30.0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """What the server writes to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least serious line written")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="text for people, json for machines")
    ] = "text"
    prompts: Annotated[bool, Meta(description="write prompts and answers to the log")] = False


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is spread over several processes."""

    peers: Annotated[
        tuple[str, ...],
        Meta(description="host:port of every rank, rank 0 first (port 29970 unless given; rank 0 "
             "listens there); [] is one process"),
    ] = ()
    rank: Annotated[
        Annotated[int, Meta(ge=0, le=63)] | None,
        Meta(description="which of the peers this host is; null is the one whose address is here"),
    ] = None
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="ranks that share every layer")
    ] = 1
    transport: Annotated[
        Literal["xla", "shm", "fabric"],
        Meta(description="what carries the collectives: xla is NCCL or Gloo, shm is shared memory "
             "between processes of one host, fabric is RDMA between hosts"),
    ] = "xla"
    shape: Annotated[
        Literal["direct", "ring"],
        Meta(description="of the fabric: direct is a link between every two ranks (one cable or a "
             "switch), ring is a cable to the next and one to the last rank (3 or 4 ranks)"),
    ] = "direct"
    rails: Annotated[
        int, Meta(ge=1, le=2, description="RDMA devices a link of the fabric: 2 is both PCIe "
                  "functions of a port")
    ] = 1
    devices: Annotated[
        tuple[str, ...],
        Meta(description="RDMA devices of this host, one a rail; in a ring first those towards the "
             "next rank, then those towards the one before; [] is that of this host's peers "
             "address, and for a second rail the other function of its port"),
    ] = ()
    pace_gbps: Annotated[
        Annotated[float, Meta(gt=0, le=800)] | None,
        Meta(description="most Gb/s that a link of the fabric sends; null is 28 through a switch "
             "(three or more ranks, direct), else no limit"),
    ] = None
    proxy_core: Annotated[
        Annotated[int, Meta(ge=0, le=1023)] | None,
        Meta(description="processor that the fabric's sending thread keeps for itself (GPU only); "
             "null is any"),
    ] = None
    secret: Annotated[
        str | None,
        Meta(description="file with a secret that all ranks share, the same on every host; null is "
             "enough where all peers are this machine's loopback addresses"),
    ] = None
    join_seconds: Annotated[
        float, Meta(gt=0, le=86400, description="time for all ranks to come")
    ] = 120.0
    silence_seconds: Annotated[
        float, Meta(ge=2, le=3600, description="silence after which a rank counts as gone")
    ] = 8.0
    agent_port: Annotated[
        int,
        Meta(ge=1, le=65535, description="where each host's agent listens, at its address in peers"),
    ] = 29980
    restart: Annotated[
        bool, Meta(description="whether agents start ranks again that ended in a failure")
    ] = True


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Where checkpoints lie, and how they are loaded."""

    folder: Annotated[
        str, Meta(description="where `sparkjax pull` puts checkpoints, and hf:ORG/NAME finds them")
    ] = "~/.cache/sparkjax/models"
    twelve_bits: Annotated[
        bool,
        Meta(description="keep BF16 matrices in 12 bits a weight, without loss (a matrix that does "
             "not compress stays as it is)"),
    ] = False
    image: Annotated[
        str | None,
        Meta(
            description="directory where each rank keeps its weights as the device holds them, to "
            "start from the next time; null keeps none"
        ),
    ] = None
    verify_image: Annotated[
        bool, Meta(description="compare an image's checksums before it is used")
    ] = False
    parallel: Annotated[
        int, Meta(ge=1, le=64, description="reads of checkpoint files at a time")
    ] = 16
    direct: Annotated[
        bool | None,
        Meta(description="read past the page cache; null does so from 1 GiB on"),
    ] = None
    check: Annotated[
        bool, Meta(description="compare what the device holds with what was read, after loading")
    ] = True


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration.

    Attributes:
      kernels: operation -> implementation; an operation that is not named takes the fastest.
      sources: dotted name -> where its value came from ("default" where it is missing).
    """

    model: Model = Model()
    engine: Engine = Engine()
    http: Http = Http()
    log: Log = Log()
    mesh: Mesh = Mesh()
    weights: Weights = Weights()
    kernels: dict[str, str] = {}
    sources: dict[str, str] = {}


def name_of(path: str) -> str:
    """The served id of a checkpoint path: its last part, without .gguf and its quantization."""
    if path.startswith(HUB):
        path = path.partition("@")[0]
    last = Path(path.removeprefix(PACKAGE)).name
    if last.endswith(".gguf"):
        last = last.removesuffix(".gguf")
        stem, dot, suffix = last.rpartition(".")
        return stem if dot and suffix[:1] in "QqIiBbFf" else last
    return last


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": Model, "engine": Engine, "http": Http, "log": Log, "mesh": Mesh,
    "weights": Weights,
}  # fmt: skip
PATHS = frozenset(
    ["model.path", "model.chat_template", "engine.journal", "engine.compilation_cache",
     "http.api_keys", "mesh.secret", "weights.folder", "weights.image"]
)  # fmt: skip
# What may differ between the hosts of one model without changing a token or a decision. The
# model itself is not among the decisions of this file: its weights have a digest of their own.
LOCAL = PATHS | {
    "model.name", "model.aliases", "engine.watchdog_seconds", "mesh.rank", "mesh.secret",
    "mesh.devices", "mesh.proxy_core",
    "weights.check", "weights.verify_image", "weights.parallel", "weights.direct",
}  # fmt: skip
