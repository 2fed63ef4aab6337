"""The scheduler under a fake model, with and without ticks in flight."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import World, alone, prompt_logprobs, token_at

from sparkjax.engine.admission import SKIP_AHEAD
from sparkjax.engine.journal import Decoder, encode
from sparkjax.engine.plan import Output, TokenLogprob
from sparkjax.engine.records import Limits, Sampling, Submit, Tick
from sparkjax.engine.scheduler import DigestMismatch, Scheduler, fnv1a
from sparkjax.engine.sequence import canonical_cuts

LIMITS = Limits(
    slots=3, pages=12, page_size=4, context=40, queue=4, tiles=(2, 4, 8), rows=(1, 2, 4)
)


def limits(**changes) -> Limits:
    fields = {name: getattr(LIMITS, name) for name in Limits.__struct_fields__}
    return Limits(**(fields | changes))


def request(id, prompt=5, more=6, **fields) -> Submit:
    tokens = prompt if isinstance(prompt, tuple) else tuple(range(id, id + prompt))
    return Submit(id, tokens, more, **fields)


# The property: any schedule gives every request the tokens that it gets alone.


@st.composite
def schedules(draw):
    admission = draw(st.sampled_from(["reserve", "grow"]))
    size = draw(st.integers(1, 4))
    world = limits(
        slots=draw(st.integers(1, 4)),
        pages=draw(st.integers(10, 16)) * 4 // size,
        page_size=size,
        busy_tiles=draw(st.integers(1, 2)),
        idle_tiles=draw(st.integers(1, 4)),
        admission=admission,
        window=draw(st.integers(1, 9)),
    )
    ticks, id = [], 0
    for _ in range(draw(st.integers(1, 25))):
        submits = []
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 4]))):
            prompt = draw(st.lists(st.integers(0, 16), min_size=1, max_size=20))
            submits.append(
                Submit(
                    id,
                    tuple(prompt),
                    draw(st.integers(0, 20)),
                    stop_ids=tuple(draw(st.lists(st.integers(0, 16), max_size=2))),
                    prompt_logprobs=draw(st.sampled_from([None, 0])),
                )
            )
            id += 1
        some = st.lists(st.integers(0, max(id, 1)), max_size=1)
        ticks.append((submits, draw(some), draw(some)))
    return world, draw(st.integers(0, 3)), ticks


@settings(max_examples=250, deadline=None)
@given(schedules())
def test_any_schedule_gives_what_each_request_gets_alone(schedule):
    world_limits, depth, ticks = schedule
    world = World(world_limits, depth)
    requests, ended = {}, set()
    for submits, cancels, stops in ticks:
        submits = [s for s in submits if world.scheduler.refusal(s) is None]
        requests |= {s.id: s for s in submits}
        ended |= {id for id in (*cancels, *stops) if id in requests}
        world.tick(submits, cancels, stops)
    world.drain()

    assert world.scheduler.pool.used == 0
    assert set(world.finish) == set(requests)
    for id, submit in requests.items():
        tokens, reason = alone(submit)
        got, event = world.tokens[id], world.finish[id]
        whole = (got, event.finish) == (tokens, reason)
        if not whole:  # cut short, but right as far as it goes
            assert got == tokens[: len(got)]
            cut = id in ended and event.finish in ("cancelled", "stop")
            cut |= world_limits.admission == "grow" and event.finish == "length"
            assert cut and len(got) < max(len(tokens), 1)

    again = World(world_limits, depth)
    for tick in Decoder().feed(b"".join(map(encode, world.ticks))):
        again.replay(tick)
    assert again.plans == world.plans
    assert again.scheduler.digest == world.scheduler.digest


# Prompts.


def test_cuts_depend_on_the_length_alone():
    spans = [(c.start, c.length, c.size) for c in canonical_cuts(19, (2, 4, 8))]
    assert spans == [(0, 8, 8), (8, 8, 8), (16, 3, 4)]
    assert [c.size for c in canonical_cuts(16, (2, 4, 8))] == [8, 8]
    assert [c.size for c in canonical_cuts(1, (2, 4, 8))] == [2]


def test_prefill_budget_and_turns():
    world = World(limits(slots=3, pages=40, context=64, idle_tiles=2, busy_tiles=1))
    plan = world.tick([request(0, 40, 2), request(1, 17, 2)])
    assert [(t.request.id, t.start) for t in plan.tiles] == [(0, 0), (1, 0)]
    plan = world.tick([request(2, 2, 9)])  # a short one does not wait behind the long ones
    assert [(t.request.id, t.start) for t in plan.tiles] == [(0, 8), (1, 8)]
    plan = world.tick()
    assert [(t.request.id, t.start) for t in plan.tiles] == [(2, 0), (0, 16)]
    plan = world.tick()
    assert [row.request.id for row in plan.rows] == [2]
    assert [(t.request.id, t.start, t.last) for t in plan.tiles] == [(1, 16, True)]
    world.drain()
    assert world.tokens[0] == alone(request(0, 40, 2))[0]


def test_scoring_only():
    world = World(LIMITS)
    world.tick([request(0, 19, 0, prompt_logprobs=0), request(1, 1, 0, prompt_logprobs=0)])
    world.drain()
    assert (world.tokens, world.finish[0].finish) == ({0: (), 1: ()}, "length")
    assert world.finish[0].prompt_logprobs == prompt_logprobs(request(0, 19).tokens)
    assert world.finish[1].prompt_logprobs == ()


def test_prompt_logprobs_come_with_the_first_token():
    scheduler, submit = Scheduler(LIMITS), request(0, 19, 2, prompt_logprobs=0)
    world = World(LIMITS)
    plan = scheduler.schedule(Tick(0, (submit,), digest=scheduler.digest))
    [event] = scheduler.commit(0, world.device.run(plan))
    assert (event.tokens, event.finish) == ((token_at(submit.tokens, 19),), None)
    assert event.prompt_logprobs == prompt_logprobs(submit.tokens)


def test_a_wrong_number_of_prompt_logprobs_is_not_taken():
    scheduler = Scheduler(LIMITS)
    scheduler.schedule(Tick(0, (request(0, 3, 1, prompt_logprobs=0),), digest=scheduler.digest))
    with pytest.raises(ValueError, match="0 prompt logprobs, not 2"):
        scheduler.commit(0, [Output(0, 1)])


# Ends.


def stop_at(id: int, step: int, prompt: int = 5) -> Submit:
    """A request whose own token at `step` is its stop id, and none before."""
    submit = request(id, prompt, 12)
    tokens = alone(submit)[0]
    assert tokens[step] not in tokens[:step]
    return request(id, prompt, 12, stop_ids=(tokens[step],))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 3])
def test_stop_id_is_committed_and_overrun_is_not(depth, step):
    world = World(LIMITS, depth)
    submit = stop_at(0, step)
    world.tick([submit])
    world.drain()
    assert world.finish[0].finish == "stop"
    assert world.tokens[0] == alone(submit)[0]
    assert len(world.tokens[0]) == step + 1
    overrun = sum(len(plan.rows) for plan in world.plans) - step
    assert overrun == depth


def test_logprobs_only_where_asked():
    for wanted in (None, 0, 5):
        scheduler = Scheduler(LIMITS)
        submit = request(0, 3, 1, sampling=Sampling(logprobs=wanted))
        scheduler.schedule(Tick(0, (submit,), digest=scheduler.digest))
        entry = TokenLogprob(7, -0.5)
        [event] = scheduler.commit(0, [Output(0, 7, entry)])
        assert event.logprobs == (() if wanted is None else (entry,))


def test_a_live_slot_without_a_token_is_an_error_of_that_request():
    scheduler = Scheduler(LIMITS)
    scheduler.schedule(Tick(0, (request(0), request(1)), digest=scheduler.digest))
    first, second = scheduler.commit(0, [Output(0, None), Output(1, 4)])
    assert (first.finish, second.finish) == ("error", None)
    assert first.error
    scheduler.check()


@pytest.mark.parametrize("verb", ["cancels", "stops"])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_ended_request_is_free_within_two_ticks(depth, phase, verb):
    world = World(limits(slots=1, idle_tiles=1), depth)
    victim = 0
    if phase == "queued":
        world.tick([request(0, 4, 30), request(1)])
        victim = 1
    elif phase == "prefilling":
        world.tick([request(0, 20, 4)])
        assert world.scheduler.gauges().prefilling == 1
    elif phase == "decoding":
        world.tick([request(0, 4, 30)])
        assert world.tick().rows
    world.tick(**{verb: [victim]})
    assert world.scheduler.gauges().waiting == 0
    if phase != "queued":
        assert world.scheduler.pool.used == 0
        world.drain(most=3)
        assert world.scheduler.idle
    world.drain()
    assert world.finish[victim].finish == {"cancels": "cancelled", "stops": "stop"}[verb]
    started = {item.request.id for plan in world.plans for item in plan.work}
    assert (victim in started) == (phase != "queued")


def test_a_client_that_leaves_before_the_first_tick_starts_nothing():
    world = World(LIMITS)
    assert world.tick([request(0)], cancels=[0]).empty
    assert world.finish[0].finish == "cancelled" and world.scheduler.idle


def test_the_freed_slot_is_planned_in_the_same_tick_and_old_outputs_are_ignored():
    world = World(limits(slots=1), depth=2)
    world.tick([request(0, 4, 20), request(1, 4, 3)])
    world.tick()
    plan = world.tick(cancels=[0])
    assert [tile.request.id for tile in plan.tiles] == [1]
    world.drain()
    assert world.tokens[1] == alone(request(1, 4, 3))[0]
    assert world.finish[0].finish == "cancelled"


def test_cancelling_twice_or_too_late_changes_nothing():
    world = World(LIMITS)
    world.tick([request(0, 2, 2)])
    world.drain()
    digest = fnv1a(f"N {world.number}\nC {world.number}\n".encode(), world.scheduler.digest)
    world.tick(cancels=[0, 0, 99], stops=[0])
    assert (world.scheduler.digest, world.finish[0].finish) == (digest, "length")


# Admission.


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (Submit(0, (), 4), ["prompt", "no tokens"]),
        (request(0, 5, -1), ["max_tokens", "-1"]),
        (request(0, 41, 0), ["prompt", "41", "limits.context"]),
        (request(0, 30, 11), ["max_tokens", "40", "limits.context"]),
        (request(0, 30, 10), None),
    ],
)
def test_refusal_names_the_field_and_the_limit(submit, words):
    reason = Scheduler(LIMITS).refusal(submit)
    assert (reason is None) == (words is None)
    assert all(word in reason for word in words or ())


@pytest.mark.parametrize("admission", ["reserve", "grow"])
def test_refusal_of_what_the_pool_can_never_hold(admission):
    scheduler = Scheduler(limits(pages=5, admission=admission, window=1))
    assert scheduler.refusal(request(0, 10, 10)) is None
    assert scheduler.refusal(request(0, 10, 11)).startswith("max_tokens:")
    assert scheduler.refusal(request(0, 21, 0)).startswith("prompt:")
    with pytest.raises(ValueError, match="request 0: max_tokens"):
        scheduler.schedule(Tick(0, (request(0, 10, 11),), digest=scheduler.digest))


def test_queue_full():
    world = World(limits(slots=1, queue=2))
    scheduler = world.scheduler
    assert [scheduler.queue_full(pending) for pending in (0, 2, 3)] == [False, False, True]
    world.tick([request(0), request(1), request(2)])
    assert scheduler.queue_full()
    assert scheduler.gauges().waiting == 2
    world.tick(cancels=[2])
    assert not scheduler.queue_full() and scheduler.queue_full(1)


def test_small_requests_overtake_a_big_one_only_so_often():
    world = World(limits(slots=4, queue=99))
    world.tick([request(0, 4, 30), request(1, 10, 30)])  # 9 pages, then 10 of the 12
    id = 2
    while 1 not in world.finish:
        world.tick([request(id, 2, 2), request(id + 1, 2, 2)])  # never lets the line run dry
        id += 2
        assert id < 400
    admitted = list(dict.fromkeys(t.request.id for p in world.plans for t in p.tiles))
    assert admitted.index(1) == 1 + SKIP_AHEAD
    world.drain()
    assert all(world.tokens[i] == alone(request(i, 2, 2))[0] for i in range(2, id))


def test_grow_makes_the_youngest_wait_and_loses_nothing_that_can_finish():
    world = World(limits(slots=2, pages=6, admission="grow", window=1), depth=1)
    world.tick([request(0, 8, 8), request(1, 4, 8)])  # 4 and 3 pages in the end: 7 of 6
    waited = 0
    while not world.scheduler.idle:
        plan = world.tick()
        live = world.scheduler.gauges().running
        waited += live == 2 and [row.request.id for row in plan.rows] == [0]
    assert waited
    assert world.tokens == {0: alone(request(0, 8, 8))[0], 1: alone(request(1, 4, 8))[0]}
    assert world.scheduler.pool.used == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_grow_ends_the_youngest_when_all_wait(depth):
    world = World(limits(slots=2, pages=6, admission="grow", window=1), depth)
    world.tick([request(0, 4, 20), request(1, 4, 20)])
    world.drain(most=60)
    assert world.tokens[0] == alone(request(0, 4, 20))[0]
    assert world.finish[1].finish == "length"
    assert world.tokens[1] == alone(request(1, 4, 20))[0][: len(world.tokens[1])]
    assert len(world.tokens[1]) == 9  # three pages hold 12 tokens, and one more was sampled


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 0),
        ("pages", 0),
        ("queue", 0),
        ("busy_tiles", 0),
        ("tiles", ()),
        ("tiles", (4, 4)),
        ("rows", (0, 4)),
        ("rows", (1, 2)),
        ("admission", "greedy"),
        ("window", 0),
    ],
)
def test_limits_that_make_no_sense(field, value):
    with pytest.raises(ValueError, match=f"limits.{field}"):
        Scheduler(limits(**{field: value}))


# Ranks.


def test_fnv1a_known_values():
    assert fnv1a(b"") == 0xCBF29CE484222325
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


def test_digest_mismatch_names_both_and_applies_nothing():
    ours = Scheduler(LIMITS)
    before = ours.digest
    with pytest.raises(DigestMismatch, match="tick 7") as caught:
        ours.schedule(Tick(7, (request(0),), digest=1))
    assert (caught.value.tick, caught.value.ours, caught.value.theirs) == (7, before, 1)
    assert f"{before:016x}" in str(caught.value)
    assert ours.idle and ours.digest == before and ours.in_flight == ()
    ours.check()


def test_one_different_token_is_found_at_the_next_tick():
    ranks = Scheduler(LIMITS), Scheduler(LIMITS)
    tick = Tick(0, (request(0),), digest=ranks[0].digest)
    for rank, token in zip(ranks, (3, 4), strict=True):
        rank.schedule(tick)
        rank.commit(0, [Output(0, token)])
    tick = Tick(1, digest=ranks[0].digest)
    ranks[0].schedule(tick)
    with pytest.raises(DigestMismatch):
        ranks[1].schedule(tick)


@pytest.mark.parametrize(
    ("tick", "words"),
    [
        (Tick(3), "tick 3 follows tick 1"),
        (Tick(1), "tick 1 follows tick 1"),
        (Tick(2, (request(0),)), "id 0 does not rise"),
        (Tick(2, (request(5), request(4))), "id 4 does not rise"),
    ],
)
def test_records_out_of_order_apply_nothing(tick, words):
    world = World(LIMITS)
    world.tick([request(0, 2, 9)])
    world.tick()
    scheduler = world.scheduler
    digest, gauges = scheduler.digest, scheduler.gauges()
    with pytest.raises(ValueError, match=words):
        scheduler.schedule(Tick(tick.number, tick.submits, digest=digest))
    assert (scheduler.digest, scheduler.gauges()) == (digest, gauges)
    world.drain()


def test_commit_takes_the_oldest_tick_with_matching_outputs_only():
    scheduler = Scheduler(LIMITS)
    for number in range(2):
        scheduler.schedule(
            Tick(number, (request(number),) if number == 0 else (), digest=scheduler.digest)
        )
    assert scheduler.in_flight == (0, 1)
    for number, outputs, words in [
        (1, [Output(0, 1)], r"commit of tick 1; in flight are \[0, 1\]"),
        (0, [], "0 outputs for 1"),
        (0, [Output(1, 1)], "slot 1 where slot 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            scheduler.commit(number, outputs)
    assert scheduler.commit(0, [Output(0, 1)])[0].tokens == (1,)


def test_gauges():
    world = World(limits(slots=2, idle_tiles=1))
    world.tick([request(0, 20, 2), request(1, 4, 2), request(2)])
    gauges = world.scheduler.gauges()
    assert (gauges.running, gauges.prefilling, gauges.waiting) == (2, 2, 1)
    assert (gauges.pages, gauges.pages_total) == (8, 12)
