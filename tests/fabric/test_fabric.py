"""Two emulated hosts with RDMA devices: collectives and a served model over real verbs.

`make test-fabric`. All collectives run in one process a host, since a start takes minutes there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import quick
from lab import HOSTS, RAILS, Job, Lab, LabError, missing
from safetensors.numpy import load_file

from sparkjax.generate import Generator
from sparkjax.mesh.transports import TransportError
from sparkjax.mesh.transports.fabric import native, verbs
from sparkjax.model import Model

pytestmark = pytest.mark.fabric
TESTS = Path(__file__).resolve().parent.parent
FOLDER = TESTS.parent / ".cache" / "fabric-lab"
CALLS_MADE = 7 * (2 * 5 + 2 * 4) + 5
"""Seven sizes of two kinds of floats (five collectives) and two of integers (four), and one large."""
CALLS, SERVED = 1200.0, 2400.0
"""Seconds for all collectives, and for a world to start and answer."""
MODEL = "flint"
"""The golden model that is served. Its programs compile for minutes there, once: FOLDER/keep holds
them."""
QUICK = " ".join(f"{k}={v}" for k, v in {"JAX_PLATFORMS": "cpu", **quick.ENVIRON}.items())


def python(arguments: str, seconds: float) -> str:
    """The command that runs this Python on a host, with this checkout."""
    environ = f"{QUICK} PYTHONPATH={TESTS.parent} PYTHONUNBUFFERED=1"
    return f"cd {TESTS}/fabric; {environ} timeout {seconds:.0f} {sys.executable} {arguments}"


@pytest.fixture(scope="session")
def lab():
    if said := missing():
        pytest.skip(f"the lab needs packages: {said}")
    try:
        verbs.load()
        native.load("cpu")  # compiled here: hosts find it beside its source
    except TransportError as error:
        pytest.skip(str(error))
    with Lab(FOLDER) as lab:
        yield lab


def results(jobs: list[Job], seconds: float) -> list[dict[str, dict]]:
    """What each host's program said of each mode."""
    found: list[dict[str, dict]] = []
    for job in jobs:
        try:
            code, output = job.wait(seconds)
        except LabError:
            print(*(j.output for j in jobs), sep="\n=====\n")
            raise
        print(output)
        assert code == 0
        lines = [json.loads(x) for x in re.findall(r"^RESULT (.*)$", output, re.M)]
        found.append({line["mode"]: line for line in lines})
    return found


@pytest.fixture(scope="session")
def calls(lab: Lab) -> list[dict[str, dict]]:
    commands = [python(f"lab_rank.py {host} {RAILS}", CALLS) for host in range(HOSTS)]
    jobs = [lab.start(host, command) for host, command in enumerate(commands)]
    return results(jobs, CALLS)


def test_collectives_of_every_size_and_dtype_and_a_thousand_rounds_give_numpys_bits(calls):
    """With epochs that wrap on the way."""
    for host in calls:
        assert "error" not in host["numbers"], host["numbers"]
        assert (host["numbers"]["calls"], host["numbers"]["rounds"]) == (CALLS_MADE, 1000)


def test_a_rank_may_be_five_seconds_late_and_is_named_when_it_does_not_come(calls):
    assert calls[0]["late"]["waited"] >= 5
    said = calls[0]["late"]["said"]
    assert re.search(r"all_reduce number \d+ of rank 0 \(16 bytes\): rank 1 did not come in", said)
    assert calls[1]["late"]["said"] == said


def test_calls_that_differ_are_named_on_both(calls):
    for host in calls:
        said = host["mixed"]["said"]
        assert "all_gather" in said and "all_reduce" in said, said


def test_a_queue_pair_that_breaks_ends_both_with_rank_and_rail(calls):
    first, second = (host["broken"]["said"] for host in calls)
    assert "rank 0: a write to rank 1 on rail 0 (rxe0) failed" in first
    assert second == first
    assert all(host["broken"]["after"] < 30 for host in calls)


SETTINGS = """
model: {{path: {folder}/{model}, name: {model}}}
mesh:
  peers: [10.77.0.1, 10.77.0.2]
  tensor_parallel: 2
  transport: fabric
  rails: 2
  devices: [rxe0, rxe1]
  secret: {folder}/secret
  join_seconds: 1200
  silence_seconds: 300
engine: {{slots: 2, context: 256, kv_tokens: 1024, tiles: [64], compilation_cache: {folder}/keep/xla,
  watchdog_seconds: 1000}}
http: {{port: 8000}}
"""


def test_a_model_served_over_the_fabric_says_what_one_process_says(lab: Lab, calls):
    prompts, texts = one_process(FOLDER / MODEL)
    (FOLDER / "prompts.json").write_text(json.dumps(prompts))
    (FOLDER / "serve.yaml").write_text(SETTINGS.format(folder="/mnt", model=MODEL))
    (FOLDER / "secret").write_text("a secret that only the lab knows")
    (FOLDER / "secret").chmod(0o600)
    serve = python("-m sparkjax.serve --config /mnt/serve.yaml", SERVED)
    ranks = [lab.start(host, serve) for host in range(HOSTS)]
    ask = python(f"served.py http://127.0.0.1:8000 {MODEL} /mnt/prompts.json {SERVED}", SERVED)
    client = lab.start(0, ask)
    try:
        found = results([client], SERVED)[0]["served"]["texts"]
    finally:
        print(*(rank.output for rank in ranks), sep="\n=====\n")
    assert found == texts
    for rail in range(RAILS):
        assert f"fabric: rank 0: rail {rail} (rxe{rail}): 8 KiB in" in ranks[0].output
    lab.start(0, f"pkill -TERM -f '^{sys.executable} -m sparkjax.serve'")
    assert [rank.wait(120)[0] for rank in ranks] == [0, 0]


def one_process(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Prompts, and how one process goes on with each (greedy, 24 tokens), with the golden model and
    the tests' tokenizer put into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TESTS / "golden" / MODEL / name, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "data" / "tiny_chat" / name, folder)
    golden = load_file(TESTS / "golden" / MODEL / "golden.safetensors")
    prompts = [golden[f"prompt_{n}.input_ids"].tolist() for n in range(2)]
    generator = Generator(Model.load(str(folder)), slots=2, context=256)
    return prompts, [g.text for g in generator.generate(prompts, 24, stop_ids=())]
