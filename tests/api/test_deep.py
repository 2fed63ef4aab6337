"""/health?deep=1: what the devices hold, one check at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

from sparkjax.api.deep import AGE, WeightCheck

from . import toy


def served(check):
    return dataclasses.replace(toy.make_served(), weight_problems=check)


def test_it_says_what_is_wrong(make_api):
    api = make_api(served=served(lambda: ["rank 1: norm is 2 on the device, 1 was read"]))
    assert api.get("/health").status_code == 200
    deep = api.get("/health?deep=1")
    assert deep.status_code == 503
    assert deep.json() == {"status": "corrupt", "error": "rank 1: norm is 2 on the device, 1 was read"}


def test_it_says_what_is_right_or_unknown(make_api):
    fine = {"status": "ok", "model": "toy"}
    assert make_api(served=served(lambda: [])).get("/health?deep=1").json() == {**fine, "weights": "ok"}
    assert make_api().get("/health?deep=1").json() == {**fine, "weights": "unchecked"}


def test_many_ask_and_one_check_runs():
    go, calls = threading.Event(), []
    clock = [0.0]

    def check() -> list[str]:
        calls.append(1)
        go.wait(30)
        return []

    async def ask() -> None:
        deep = WeightCheck(check, now=lambda: clock[0])
        many = [asyncio.create_task(deep.problems()) for _ in range(50)]
        await asyncio.sleep(0)
        many[0].cancel()
        go.set()
        assert await asyncio.gather(*many[1:]) == [[]] * 49
        assert await deep.problems() == [] and len(calls) == 1
        clock[0] = AGE + 1
        assert await deep.problems() == [] and len(calls) == 2

    asyncio.run(ask())


def test_a_check_that_fails_is_tried_again():
    results = [RuntimeError("lost"), None]

    def check() -> list[str]:
        found = results.pop(0)
        if found is not None:
            raise found
        return []

    async def ask() -> None:
        deep = WeightCheck(check)
        try:
            await deep.problems()
        except RuntimeError as error:
            assert str(error) == "lost"
        assert await deep.problems() == []

    asyncio.run(ask())
