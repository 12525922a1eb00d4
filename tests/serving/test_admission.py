"""Admission against a naive statement of its rules; plans that add up or not; tokens never mixed with pages (CASES 24, 25)."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.planning.plan import CapacityPlan, PlanError
from jaxkv.planning.units import GIB
from jaxkv.serving.admission import Accept, Admission, Refuse
from jaxkv.serving.ladder import Rung, default_rungs

# The plan of the design notes: 80 = 42 + 8 + 6 + 20 + 4, of which 24 * 0.75 + 3 = 21 is more than 20.
FACTS = CapacityPlan(
    memory_gib=80,
    weights_gib=42,
    activations_gib=8,
    runtime_and_fragmentation_gib=6,
    kv_budget_gib=20,
    max_context_tokens=8192,
    max_active_sequences=24,
    reserve_per_sequence_gib=0.75,
    low_watermark_gib=3,
)
MIB = 2**20
many = settings(max_examples=80, deadline=None)


@st.composite
def rules(draw):
    """A small engine, with a plan in which a page is an eighth of a GiB, or without one."""
    num_pages, page_size = draw(st.integers(2, 40)), draw(st.integers(1, 9))
    given = dict(num_pages=num_pages, page_size=page_size, max_tokens_per_slot=draw(st.integers(1, 150)), bytes_per_page=GIB // 8)
    given["num_slots"] = draw(st.none() | st.integers(1, 6))
    if not draw(st.booleans()):
        return Admission(None, **given)
    usable = num_pages - 1
    watermark = draw(st.integers(0, usable - 1))
    reserve = draw(st.integers(1, usable - watermark))
    active = draw(st.integers(1, (usable - watermark) // reserve))
    budget = usable + draw(st.integers(0, 5))
    context = draw(st.integers(1, 200))
    return Admission(
        CapacityPlan(budget / 8 + 1, 0.5, 0.25, 0.25, budget / 8, context, active, reserve / 8, watermark / 8), **given
    )


requests = st.tuples(st.integers(1, 160), st.integers(1, 160), st.sampled_from([1, 1, 2, 3, 5]))


def pages_counted(page_size, prompt_tokens, max_new_tokens, n):
    """Pages of n samples, page by page: those that hold only prompt tokens are one page for all samples."""
    total = 0
    for start in range(0, prompt_tokens + max_new_tokens, page_size):
        total += 1 if start + page_size <= prompt_tokens else n
    return total


def fits(admission, prompt_tokens, max_new_tokens, n):
    """Whether a request can run with nothing beside it."""
    pages = pages_counted(admission.page_size, prompt_tokens, max_new_tokens, n)
    return (
        prompt_tokens + max_new_tokens <= admission.max_context_tokens
        and (admission.max_active_sequences is None or n <= admission.max_active_sequences)
        and max(pages, n * admission.reserve_pages) <= admission.usable_pages - admission.low_watermark_pages
    )


@many
@given(rules(), requests)
def test_accepts_what_fits_and_nothing_else(admission, request_):
    verdict = admission.check(*request_)
    if fits(admission, *request_):
        assert verdict == Accept(request_[0])
        pages = admission.pages_for(*request_)
        assert pages == pages_counted(admission.page_size, *request_)
        assert admission.may_start(0, pages, admission.usable_pages, request_[2])
    else:
        assert isinstance(verdict, Refuse) and verdict.reason in ("too_long", "never_fits")
        too_long = request_[0] + request_[1] > admission.max_context_tokens
        assert (verdict.reason == "too_long") == too_long


@many
@given(rules(), requests)
def test_truncation_keeps_as_much_as_fits(admission, request_):
    prompt_tokens, max_new_tokens, n = request_
    most = max((p for p in range(1, prompt_tokens + 1) if fits(admission, p, max_new_tokens, n)), default=None)
    verdict = admission.check(*request_, allow_truncation=True)
    if most is None:
        assert isinstance(verdict, Refuse) and "even one prompt token is too many" in verdict.message
        assert not isinstance(admission.check(*request_), Accept)
    else:
        assert verdict == Accept(most) == admission.check(most, max_new_tokens, n)


@many
@given(rules(), requests, st.booleans(), st.integers(0, 3))
def test_the_ladder_refuses_long_contexts_only(admission, request_, allow_truncation, level):
    calm = admission.check(*request_, allow_truncation=allow_truncation)
    verdict = admission.check(*request_, allow_truncation=allow_truncation, ladder_level=level)
    longest = max(1, admission.max_context_tokens // 4)
    if isinstance(calm, Accept) and level and calm.prompt_tokens + request_[1] > longest:
        assert isinstance(verdict, Refuse) and verdict.reason == "ladder" and str(longest) in verdict.message
    else:
        assert verdict == calm  # nobody's prompt is cut for a moment's pressure


@many
@given(rules(), st.integers(0, 8), st.integers(0, 50), st.integers(0, 60), st.integers(1, 4))
def test_may_start_leaves_the_watermark_and_counts_sequences(admission, active, wanted, available, new):
    limit = math.inf if admission.max_active_sequences is None else admission.max_active_sequences
    expected = active + new <= limit
    for pages in (wanted, new * admission.reserve_pages):
        expected = expected and available - pages >= admission.low_watermark_pages
    assert admission.may_start(active, wanted, available, new) == expected
    if expected:  # less is never harder
        assert admission.may_start(max(0, active - 1), max(0, wanted - 1), available + 1, new)


@many
@given(st.integers(1, 64), st.integers(1, 12), st.integers(0, 6), st.sampled_from([1, 3, 4, 7, 2.5]), st.integers(0, 3))
def test_a_plan_that_adds_up_can_start_all_its_sequences(eighths, active, watermark, pages_an_eighth, spare):
    """With the pool that the KV budget holds in whole pages, whatever the rounding."""
    budget = (active * eighths + watermark + spare) / 8
    plan = CapacityPlan(budget + 2, 1, 0.5, 0.5, budget, 512, active, eighths / 8, watermark / 8)
    bytes_per_page = int(GIB / 8 / pages_an_eighth)
    usable = plan.kv_budget_bytes // bytes_per_page
    admission = Admission(plan, num_pages=usable + 1, page_size=4, max_tokens_per_slot=512, bytes_per_page=bytes_per_page)
    available = usable
    for running in range(active):
        assert admission.may_start(running, admission.reserve_pages, available)
        available -= admission.reserve_pages
    assert not admission.may_start(active, 0, usable)


def test_the_plan_that_does_not_add_up_says_22():
    sizes = dict(page_size=16, max_tokens_per_slot=8192, bytes_per_page=2 * MIB, num_pages=10 * 1024 + 1)
    with pytest.raises(
        PlanError, match=r"24 \* 0.75 GiB = 18 GiB, with the low watermark of 3 GiB 21 GiB, .* 20 GiB; at most 22"
    ) as error:
        Admission(FACTS, **sizes)
    assert (error.value.field, error.value.largest) == ("max_active_sequences", 22)
    admission = Admission(dataclasses.replace(FACTS, max_active_sequences=22), **sizes)
    assert (admission.reserve_pages, admission.low_watermark_pages) == (384, 1536)
    assert admission.may_start(21, 384, 1536 + 384) and not admission.may_start(22, 384, 10 * 1024)
    assert not admission.may_start(21, 384, 1536 + 383)
    assert not admission.may_start(21, 1, 1536 + 383)  # a small one sets its reserve aside all the same


def test_a_plan_out_of_its_yaml_file(tmp_path):
    plan = dataclasses.replace(FACTS, max_active_sequences=22, max_context_tokens=4096)
    plan.write(tmp_path / "plan.yaml")
    sizes = dict(page_size=16, max_tokens_per_slot=8192, bytes_per_page=2 * MIB, num_pages=10 * 1024 + 1)
    admission = Admission(CapacityPlan.read(tmp_path / "plan.yaml"), **sizes)
    assert (admission.max_active_sequences, admission.max_context_tokens) == (22, 4096)
    assert Admission(plan, **sizes, num_slots=8).max_active_sequences == 8


def test_a_pool_that_is_not_the_plans():
    plan = dataclasses.replace(FACTS, max_active_sequences=22)
    sizes = dict(page_size=16, max_tokens_per_slot=8192, bytes_per_page=2 * MIB)
    with pytest.raises(
        PlanError, match="10241 pages .* are 20.00 GiB, more than the plan's KV budget of 20 GiB: num_pages may be at most 10241"
    ):
        Admission(plan, **sizes, num_pages=10 * 1024 + 2)
    with pytest.raises(PlanError, match="take 9984 pages, more than the 5000 of the pool: at most 9 sequences") as error:
        Admission(plan, **sizes, num_pages=5001)
    assert error.value.largest == 9
    Admission(plan, **sizes, num_pages=22 * 384 + 1536 + 1)


def test_refusals_have_the_numbers():
    admission = Admission(None, num_pages=11, page_size=16, max_tokens_per_slot=1000, bytes_per_page=1, num_slots=4)
    assert admission.check(100, 60) == Accept(100)
    assert admission.check(100, 61) == Refuse(
        "never_fits",
        "prompt 100 + max_new_tokens 61 tokens for n=1 samples take 11 pages of 16 tokens (at least 0 a sample), more than the 10"
        " of the pool less a low watermark of 0: shorten the prompt, ask for fewer new tokens or samples, or allow_truncation",
    )
    assert admission.check(100, 61, allow_truncation=True) == Accept(99)
    verdict = admission.check(940, 61)
    assert verdict.reason == "too_long" and "prompt 940 + max_new_tokens 61 is 1001 tokens, more than the 1000" in verdict.message
    assert admission.check(5, 170, allow_truncation=True).reason == "never_fits"
    verdict = admission.check(5, 5, n=5)
    assert verdict.reason == "never_fits" and "n=5 samples are more than the 4 sequences" in verdict.message
    for wrong in ((0, 1), (1, 0), (1, 1, 0), (-3, 5)):
        verdict = admission.check(*wrong, allow_truncation=True)
        assert verdict.reason == "invalid" and str(min(wrong)) in verdict.message


def test_samples_share_full_prompt_pages():
    admission = Admission(None, num_pages=100, page_size=4, max_tokens_per_slot=1000, bytes_per_page=1)
    assert admission.pages_for(8, 4) == 3
    assert admission.pages_for(8, 4, n=5) == 2 + 5  # two full pages once
    assert admission.pages_for(9, 4, n=5) == 2 + 5 * 2  # the ninth token is in a page of which each has a copy
    assert admission.pages_for(3, 1, n=5) == 5


def test_a_longer_prompt_can_take_fewer_pages_and_truncation_knows():
    """The page that 7 tokens fill in part is copied for each of 5 samples; 8 tokens fill it, and it is shared."""
    admission = Admission(None, num_pages=8, page_size=4, max_tokens_per_slot=1000, bytes_per_page=1)
    assert admission.pages_for(7, 4, n=5) == 11 and admission.pages_for(8, 4, n=5) == 7
    assert admission.check(9, 4, n=5, allow_truncation=True) == Accept(8)
    assert admission.check(7, 4, n=5, allow_truncation=True) == Accept(4)


@many
@given(st.integers(1, 30), st.integers(1, 100), st.integers(1, 100), st.integers(1, 4), st.integers(2, 16))
def test_pages_and_tokens_scale_apart(usable, prompt, new, n, times):
    """Pages of `times` as many tokens, and lengths times as long, take as many pages: no page count is ever read as tokens."""
    sizes = dict(num_pages=usable + 1, bytes_per_page=1)
    one = Admission(None, **sizes, page_size=3, max_tokens_per_slot=150)
    large = Admission(None, **sizes, page_size=3 * times, max_tokens_per_slot=150 * times)
    verdicts = one.check(prompt, new, n), large.check(prompt * times, new * times, n)
    assert type(verdicts[0]) is type(verdicts[1])
    if isinstance(verdicts[0], Accept):
        assert one.pages_for(prompt, new, n) == large.pages_for(prompt * times, new * times, n)
    else:
        assert verdicts[0].reason == verdicts[1].reason


def test_rungs_are_the_engines_own():
    sizes = dict(num_pages=100, page_size=16, max_tokens_per_slot=800, bytes_per_page=1)
    assert Admission(None, **sizes).rungs == default_rungs(800)
    admission = Admission(None, **sizes, rungs=(Rung(), Rung("short ones", 10)))
    assert isinstance(admission.check(5, 5, ladder_level=1), Accept)
    assert admission.check(5, 6, ladder_level=1).reason == "ladder"


@pytest.mark.parametrize(
    "wrong", [dict(num_pages=1), dict(page_size=0), dict(max_tokens_per_slot=0), dict(bytes_per_page=0), dict(num_slots=0)]
)
def test_sizes_that_cannot_be(wrong):
    sizes = dict(num_pages=9, page_size=4, max_tokens_per_slot=8, bytes_per_page=1) | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Admission(None, **sizes)
