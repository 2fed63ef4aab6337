"""The repository keeps its own promises: the design's arrows, its recipes, and its documents."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparkjax
from sparkjax import config
from sparkjax.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sparkjax"
# What a layer may not know of (docs/design.md, section 1).
ABOVE = {
    "mesh": {"kernels", "models", "engine", "api", "cli", "weights", "text"},
    "kernels": {"models", "engine", "api", "cli", "text"},
    "models": {"engine", "api", "cli", "text"},
    "weights": {"engine", "api", "cli", "text"},
    "text": {"mesh", "kernels", "models", "engine", "api", "cli", "structured"},
    "structured": {"mesh", "kernels", "models", "engine", "api", "cli", "weights"},
    "engine": {"api", "cli"},
    "api": {"cli"},
    "fetch": {"engine", "api", "cli"},
}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx", "h11"}
LONGEST = 550
"""Lines of a file; past about 500 it is two ideas."""


def sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in p.parts]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, absolute, with its line."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name, node.lineno
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)


def test_imports_point_one_way():
    wrong = []
    for path in sources():
        layer = path.relative_to(PACKAGE).parts[0]
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] == "sparkjax" and len(parts) > 1 and parts[1] in ABOVE.get(layer, ()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_only_the_edge_knows_http():
    edge = {"api", "cli", "fetch", "serve.py"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources()
        if path.relative_to(PACKAGE).parts[0] not in edge
        for name, line in imports(path)
        if name.split(".")[0] in HTTP
    ]
    assert wrong == []


def test_files_hold_one_idea():
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}


def test_every_module_says_what_it_is():
    silent = [str(p.relative_to(ROOT)) for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "serving").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_are_valid(recipe: Path):
    loaded = config.load(recipe, environ={})
    assert loaded.model.path and loaded.model.name
    # A recipe opens no port to the network without a key.
    assert loaded.http.host == "127.0.0.1" or loaded.http.api_keys


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", documents(), ids=lambda p: p.name)
def test_documents_link_to_what_exists(document: Path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("document", documents(), ids=lambda p: p.name)
def test_documents_name_targets_keys_and_verbs_that_exist(document: Path):
    """What a reader will paste."""
    blocks = re.findall(r"```.*?\n(.*?)```|`([^`\n]+)`", document.read_text(), re.S)
    code = "\n".join(part for block in blocks for part in block)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|[\s;&(])make ([a-z][a-z-]*)", code)) <= targets
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"(?:^|[\s/])sparkjax ([a-z]+)\b", code, re.M)) <= verbs
    named = set(re.findall(r"--set (\S+?)=", code))
    named |= {n.lower().replace("__", ".") for n in re.findall(r"\bSPARKJAX_([A-Z]\w+)", code)}
    assert named <= set(config.FIELDS) | {f"kernels.{op}" for op in config.operations()}


def test_versions_agree():
    assert re.search(rf"^## {re.escape(sparkjax.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["requires-python"] == ">=3.11"
    assert "jax>=0.10.2,<0.13" in project["dependencies"]
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_ci_is_executable_bash():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)
