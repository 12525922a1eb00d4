"""The ladder: no flapping, monotone, down again when the pressure ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.serving.ladder import Ladder, LadderConfig, Rung, default_rungs

CONFIG = LadderConfig()
TOP = len(CONFIG.up)
pressures = st.one_of(st.floats(0, 1.2), st.sampled_from([*CONFIG.up, *CONFIG.down]))
# (seconds since the update before, pressure)
moments = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, 5.0]), pressures), max_size=40)
many = settings(max_examples=60, deadline=None)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def levels(trace, config=CONFIG):
    """Levels after each moment of a trace."""
    clock = Clock()
    ladder = Ladder(config, default_rungs(1000), clock)
    result = []
    for wait, pressure in trace:
        clock.now += wait
        result.append(ladder.update(pressure))
        assert ladder.level == result[-1] and ladder.rung is ladder.rungs[ladder.level]
    return result


def naive(trace, config=CONFIG):
    """The rules again, from the whole past: level i + 1 lasts from a moment over up[i] until a dwell below down[i] is over."""
    result, now, past = [], 0.0, []
    for wait, pressure in trace:
        now += wait
        past.append((now, pressure))
        level = 0
        for i, (up, down) in enumerate(zip(config.up, config.down, strict=True)):
            on, low_since = False, None
            for at, p in past:
                low_since = None if p >= down else at if low_since is None else low_since
                if low_since is not None and at - low_since >= config.dwell_s:
                    on = False
                on = on or p >= up
            level = i + 1 if on else level
        result.append(level)
    return result


@many
@given(moments)
def test_levels_follow_the_rules(trace):
    assert levels(trace) == naive(trace) == levels(trace)


@many
@given(moments, st.data())
def test_more_pressure_never_gives_a_lower_level(trace, data):
    more = [(wait, pressure + data.draw(st.sampled_from([0.0, 0.0, 0.05, 0.5]))) for wait, pressure in trace]
    assert all(low <= high for low, high in zip(levels(trace), levels(more), strict=True))


@many
@given(moments, st.data())
def test_inside_a_band_nothing_moves(trace, data):
    """Between the lower and the upper threshold of a rung, and for whatever time, its level is neither entered nor left."""
    rung = data.draw(st.integers(0, TOP - 1))
    inside = st.floats(CONFIG.down[rung], CONFIG.up[rung], exclude_max=True)
    wobble = data.draw(st.lists(st.tuples(st.floats(0, 3), inside), min_size=1, max_size=30))
    after = levels([*trace, *wobble])[len(trace) :]
    reached = bool(trace) and levels(trace)[-1] > rung
    assert [level > rung for level in after] == [reached] * len(wobble)


@many
@given(moments, st.lists(st.floats(0, CONFIG.down[0], exclude_max=True), min_size=2, max_size=5))
def test_it_comes_down_to_level_0_after_one_dwell(trace, calm):
    """Low for dwell_s, however often it is asked meanwhile; and not sooner."""
    before = levels(trace)[-1] if trace else 0
    after = levels([*trace, *((0.0, pressure) for pressure in calm), (CONFIG.dwell_s, calm[-1])])
    assert after[-1] == 0
    if trace and trace[-1][1] >= CONFIG.down[-1]:
        assert after[-2] == before


def test_it_goes_up_at_once_and_down_after_a_dwell_below_the_lower_threshold():
    trace = [
        (0, 0.5),
        (0, 0.86),
        (0, 0.8),
        (9, 0.76),
        (9, 0.99),
        (0, 0.93),
        (9, 0.91),
        (0.5, 0.92),
        (0.9, 0.9),
        (0.5, 0.9),
        (0.5, 0.9),
    ]
    assert levels(trace) == [0, 1, 1, 1, 3, 3, 3, 3, 3, 3, 2]


def test_rungs_are_data_and_none_touches_running_work():
    rungs = default_rungs(4096)
    assert [rung.longest_context_tokens is not None for rung in rungs] == [False, True, True, True]
    assert {rung.longest_context_tokens for rung in rungs[1:]} == {1024}
    assert [rung.ttl_factor < 1 for rung in rungs] == [False, False, True, True]
    assert [rung.queues_only for rung in rungs] == [False, False, False, True]
    assert rungs[0] == Rung()


@pytest.mark.parametrize(
    "wrong, match",
    [
        (dict(up=(0.9,), down=(0.8, 0.85)), "as many"),
        (dict(up=(0.9,), down=(0.9,)), "below its upper"),
        (dict(up=(0.9,), down=(0.0,)), "over 0"),
        (dict(up=(0.9, 0.8), down=(0.1, 0.2)), "must not fall"),
        (dict(dwell_s=-1.0), "dwell_s"),
        (dict(dwell_s=float("nan")), "dwell_s"),
    ],
)
def test_thresholds_that_make_no_ladder(wrong, match):
    with pytest.raises(ValueError, match=match):
        LadderConfig(**wrong)


def test_other_mistakes():
    with pytest.raises(ValueError, match="2 rungs, level 0 included, want 1 threshold"):
        Ladder(CONFIG, default_rungs(8)[:2], Clock())
    ladder = Ladder(CONFIG, default_rungs(8), Clock())
    ladder.update(0.9)
    for wrong in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="share of the usable pages"):
            ladder.update(wrong)
        assert ladder.level == 1
