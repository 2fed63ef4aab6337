"""The verbs that drive a world of ranks from any of its hosts, through the hosts' agents."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import show

World = Annotated[Path, typer.Option("--config", "-c", help="The world's YAML file, on this host.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    for verb in (up, down, restart, status, health, logs, check, journal):
        app.command()(verb)


def up(
    config: World,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait until the world is ready; 0 does not wait."),
    ] = 900.0,
) -> None:
    """Start a world: this host's agent if none runs, then every rank. Once on each host; later from any."""
    with show.plain_errors():
        from sparkjax import agent

        loaded = _load(config)
        if any(agent.roster.is_here(host) for host in agent.hosts(loaded)):
            _plainly(lambda: agent.start_here(config))
        fine = _table(agent.ask_all(loaded, "up"))
        if not fine:
            show.fail("not every host has an agent: run this on those hosts, too")
        if wait:
            _wait_ready(loaded, wait)


def down(
    config: World,
    agents: Annotated[bool, typer.Option("--agents", help="End the agents, too.")] = False,
) -> None:
    """Stop every rank: running answers may finish first (http.drain_seconds)."""
    with show.plain_errors():
        from sparkjax import agent

        loaded = _load(config)
        fine = _table(agent.ask_all(loaded, "down"))
        if agents:
            fine = (
                all(not isinstance(a, Exception) for a in agent.ask_all(loaded, "quit").values())
                and fine
            )
        raise typer.Exit(0 if fine else 1)


def restart(
    config: World,
    wait: Annotated[float, typer.Option(min=0, help="As of up.")] = 900.0,
) -> None:
    """Stop every rank, then start all with their hosts' files as they are now."""
    with show.plain_errors():
        from sparkjax import agent

        loaded = _load(config)
        agent.ask_all(loaded, "down")
        if not _table(agent.ask_all(loaded, "up")):
            raise typer.Exit(1)
        if wait:
            _wait_ready(loaded, wait)


def status(config: World, as_json: Json = False) -> None:
    """Every rank: whether it runs, since when, how it last ended."""
    with show.plain_errors():
        from sparkjax import agent

        answers = agent.ask_all(_load(config), "status")
        raise typer.Exit(0 if _table(answers, as_json) else 1)


def health(config: World, as_json: Json = False) -> None:
    """Whether the world answers: exit 0 if every rank runs and rank 0 is ready."""
    with show.plain_errors():
        from sparkjax import agent

        answers = agent.ask_all(_load(config), "health")
        fine = _healthy(answers)
        if as_json:
            typer.echo(json.dumps({"ready": fine, "hosts": _plain(answers)}))
        else:
            _table({h: a if isinstance(a, Exception) else a["ranks"] for h, a in answers.items()})
            typer.echo("ready" if fine else "not ready")
        raise typer.Exit(0 if fine else 1)


def logs(
    config: World,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=10000, help="Of each rank.")
    ] = 20,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's.")] = None,
) -> None:
    """The last lines of every rank's log."""
    with show.plain_errors():
        from sparkjax import agent

        fine = True
        for host, answer in agent.ask_all(_load(config), "logs", lines).items():
            if isinstance(answer, Exception):
                typer.echo(str(answer), err=True)
                fine = False
                continue
            for number, text in answer.items():
                if rank is None or rank == int(number):
                    typer.echo(f"--- rank {number} on {host}")
                    typer.echo("\n".join(text))
        raise typer.Exit(0 if fine else 1)


def check(config: World) -> None:
    """Compare configuration, model files and versions of all hosts without starting anything."""
    with show.plain_errors():
        from sparkjax import agent
        from sparkjax.mesh.world import compare
        from sparkjax.ranks import PROBLEM

        loaded = _load(config)
        if any(agent.roster.is_here(host) for host in agent.hosts(loaded)):
            _plainly(lambda: agent.start_here(config))
        begun = time.monotonic()
        answers = agent.ask_all(loaded, "check")
        for host, answer in answers.items():
            typer.echo(f"{host}: {answer if isinstance(answer, Exception) else 'answers'}")
        facts, lines = [], []
        for host, answer in answers.items():
            if not isinstance(answer, Exception):
                lines += [f"{host}: {v}" for k, v in answer.items() if k.startswith(PROBLEM)]
                facts.append({k: v for k, v in answer.items() if not k.startswith(PROBLEM)})
        lines += compare.differences(facts, "host")
        for line in lines:
            typer.echo(line)
        if not lines and len(facts) == len(answers):
            typer.echo(
                f"{len(answers)} hosts agree on {len(facts[0])} facts ({time.monotonic() - begun:.1f} s)"
            )
            return
        raise typer.Exit(1)


def journal(
    first: Annotated[Path, typer.Argument(help="One rank's decision log (engine.journal).")],
    second: Annotated[Path, typer.Argument(help="Another rank's.")],
    as_json: Json = False,
) -> None:
    """Compare two ranks' decision logs: exit 1 and the first difference where they are not equal."""
    with show.plain_errors():
        import dataclasses

        from sparkjax.engine.compare import compare_logs
        from sparkjax.engine.journal import JournalError

        try:
            found = compare_logs(first, second)
        except (JournalError, OSError) as error:
            show.fail(str(error))
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(found)))
        else:
            for line in found.differences:
                typer.echo(line)
            what = "equal" if found.same else "compared"
            typer.echo(f"{found.ticks} ticks {what}, {found.longer} in one log only")
        raise typer.Exit(0 if found.same else 1)


def _load(path: Path) -> Any:
    from sparkjax import config as configuration

    return configuration.load(path)


def _plainly(call: Any) -> None:
    """A call whose refusal is a line, not a traceback."""
    from sparkjax.agent import AgentError
    from sparkjax.mesh.world.roster import RosterError

    try:
        call()
    except (AgentError, RosterError) as error:
        show.fail(str(error))


def _plain(answers: dict[str, Any]) -> dict[str, Any]:
    return {h: {"error": str(a)} if isinstance(a, Exception) else a for h, a in answers.items()}


def _table(answers: dict[str, Any], as_json: bool = False) -> bool:
    """Prints a line a rank; whether every host answered."""
    if as_json:
        typer.echo(json.dumps(_plain(answers)))
    else:
        for host, answer in answers.items():
            if isinstance(answer, Exception):
                typer.echo(str(answer), err=True)
                continue
            for r in answer:
                line = f"rank {r['rank']}  {host}  {r['state']}"
                if r["pid"]:
                    line += f"  process {r['pid']}, {r['seconds']:.0f} s"
                if r["exit_code"] is not None:
                    line += f"  last exit code {r['exit_code']}"
                if r["failures"]:
                    line += f"  {r['failures']} failures"
                typer.echo(line)
    return not any(isinstance(a, Exception) for a in answers.values())


def _healthy(answers: dict[str, Any]) -> bool:
    if any(isinstance(a, Exception) for a in answers.values()):
        return False
    ranks = [r for a in answers.values() for r in a["ranks"]]
    ready = [a["ready"] for a in answers.values() if "ready" in a]
    return all(r["state"] == "running" for r in ranks) and ready == [True]


def _wait_ready(config: Any, seconds: float) -> None:
    """Until the world is ready; fails where a rank has given up or the time is over."""
    from sparkjax import agent

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answers = agent.ask_all(config, "health")
        if _healthy(answers):
            typer.echo("ready")
            return
        ranks = [r for a in answers.values() if not isinstance(a, Exception) for r in a["ranks"]]
        failed = [str(r["rank"]) for r in ranks if r["state"] in ("failed", "stopped")]
        if failed:
            show.fail(f"rank {', '.join(failed)} does not start; `sparkjax logs` says why")
        time.sleep(0.5)
    show.fail(f"not ready after {seconds:.0f} s; `sparkjax logs` says how far it is")
