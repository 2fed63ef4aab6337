"""Real clients hold scripted conversations: whole and streamed, tools, JSON, errors, leaving."""

from __future__ import annotations

import json

import pytest

from .conftest import HERE, NODE_MODULES, VENV, node_with, python_with, run

pytestmark = pytest.mark.clients
SCRIPTS = HERE / "scripts"


@pytest.fixture(autouse=True)
def nothing_stays(scripted_server):
    """Whatever a client did, its requests are gone afterwards."""
    yield
    scripted_server.api.engine.wait_idle(10)


@pytest.mark.parametrize(
    "script, package",
    [
        ("openai_python", "openai"),
        ("anthropic_python", "anthropic"),
        ("litellm_python", "litellm"),
        ("langchain_python", "langchain_openai"),
    ],
)
def test_python_clients(scripted_server, script, package):
    out = run([python_with(package), str(SCRIPTS / f"{script}.py"), scripted_server.url])
    assert out.endswith("all ok\n")


@pytest.mark.parametrize(
    "script, package", [("openai_node", "openai"), ("anthropic_node", "@anthropic-ai/sdk")]
)
def test_node_clients(scripted_server, script, package):
    node = node_with(package)
    out = run(
        [node, str(SCRIPTS / f"{script}.mjs"), scripted_server.url],
        CLIENT_MODULES=str(NODE_MODULES.parent),
    )
    assert out.endswith("all ok\n")


def test_the_llm_command(scripted_server, tmp_path):
    python_with("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps(
            [{"model_id": "scripted", "model_name": "toy", "api_base": f"{scripted_server.url}/v1",
              "supports_tools": True, "supports_schema": True}]
        )
    )  # fmt: skip
    llm = [str(VENV / "llm"), "-m", "scripted", "--key", "none"]
    home = {"LLM_USER_PATH": str(tmp_path)}
    assert "How can I help you" in run([*llm, "hello"], **home)
    assert "How can I help you" in run([*llm, "--no-stream", "hello"], **home)
    assert json.loads(run([*llm, "--schema", "name, age int", "Ada as JSON"], **home))["age"] == 36
    tool = "def weather(city: str) -> str:\n    return f'{city}: 7 degrees'\n"
    said = run([*llm, "--functions", tool, 'call weather with {"city": "Oslo"}'], **home)
    assert "The tool says: Oslo: 7 degrees" in said


def test_an_agent_reads_a_file(scripted_server, tmp_path):
    """pi, a coding agent, is told to read a file, calls its own tool and gets its words back."""
    node_with("@mariozechner/pi-coding-agent")
    config = tmp_path / "agent"
    config.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    (work / "note.txt").write_text("the eagle lands at noon")
    provider = {
        "baseUrl": f"{scripted_server.url}/v1", "api": "openai-completions", "apiKey": "none",
        "models": [{"id": "toy", "name": "toy", "reasoning": False, "input": ["text"],
                    "contextWindow": 200_000, "maxTokens": 4000,
                    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}],
    }  # fmt: skip
    (config / "models.json").write_text(json.dumps({"providers": {"scripted": provider}}))
    said = run(
        [str(NODE_MODULES / ".bin" / "pi"), "--provider", "scripted", "--model", "toy", "--offline",
         "--no-session", "--no-skills", "--no-extensions", "-p", 'call read with {"path": "note.txt"}'],
        cwd=work, PI_CODING_AGENT_DIR=str(config), HOME=str(tmp_path),
    )  # fmt: skip
    assert "The tool says: the eagle lands at noon" in said
