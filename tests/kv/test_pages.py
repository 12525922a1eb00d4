"""Each ownership function on numpy, on jax and under jit; what it refuses; and that the three agree."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.kv import integrity, pages

BACKENDS = ("numpy", "jax")  # jax under jit; test_eager_jax_is_the_same_code runs it without
VERBS = ("reserve", "append", "fork", "release", "truncate")
B, M, C, P = 4, 4, 12, 4  # one shape for almost all tests: each verb compiles once
_JITTED = {name: jax.jit(getattr(pages, name)) for name in VERBS}


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def call(backend, name, own, *args):
    """Runs one verb; the result as numpy, checked for integrity and dtypes; the input must be untouched."""
    before = jax.tree.map(np.array, own)
    args = [np.asarray(a) for a in args]
    if backend == "numpy":
        out = getattr(pages, name)(own, *args)
    else:
        out = _JITTED[name](own, *(jnp.asarray(a, a.dtype if a.dtype == bool else jnp.int32) for a in args))
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(out))
    out = jax.tree.map(np.asarray, out)
    assert tree_equal(own, before)
    integrity.check_integrity(out if isinstance(out, pages.Ownership) else out[0])
    return out


def tree_equal(a, b):
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def filled(*tokens):
    own, copies, shortfall = pages.append(pages.empty(B, M, C, P), tokens + (0,) * (B - len(tokens)))
    assert shortfall == 0
    assert (copies.dst == C).all()
    return own


def rows(own):
    return [[int(page) for page in row if page] for row in own.page_table]


def copied(copies):
    """The copies as {slot: (src, dst)}; a slot without one must say (0, C)."""
    assert all(src == 0 for src, dst in zip(*copies, strict=True) if dst == C)
    return {b: (int(src), int(dst)) for b, (src, dst) in enumerate(zip(*copies, strict=True)) if dst != C}


on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


@on_each_backend
def test_append_takes_the_lowest_pages_in_slot_order(backend):
    own, _, _ = call(backend, "append", pages.empty(B, M, C, P), [5, 0, 4, 0])
    assert rows(own) == [[1, 2], [], [3], []]
    np.testing.assert_array_equal(own.lengths, [5, 0, 4, 0])
    np.testing.assert_array_equal(own.refcounts, [0, 1, 1, 1] + [0] * 8)
    own = call(backend, "release", own, [True, False, False, False])
    own, _, _ = call(backend, "append", own, [0, 9, 1, 0])
    assert rows(own) == [[], [1, 2, 4], [3, 5], []]


@on_each_backend
@pytest.mark.parametrize(("length", "more", "want"), [(3, 1, 1), (4, 1, 2), (4, 0, 1), (5, 3, 2), (0, 16, 4), (15, 1, 4)])
def test_pages_at_the_boundaries_of_a_page(backend, length, more, want):
    own, _, shortfall = call(backend, "append", filled(length, 1), [more, 0, 0, 0])
    assert shortfall == 0
    assert np.count_nonzero(own.page_table[0]) == want == pages.num_pages_needed(length + more, P)


@on_each_backend
def test_reserve_keeps_lengths_and_a_second_one_takes_nothing(backend):
    before = filled(5, 2)
    ahead, _, _ = call(backend, "reserve", before, [8, 0, 0, 0])
    np.testing.assert_array_equal(ahead.lengths, before.lengths)
    assert rows(ahead) == [[1, 2, 4, 5], [3], [], []]
    again, _, _ = call(backend, "reserve", ahead, [8, 2, 0, 0])
    assert tree_equal(again, ahead)
    used, _, _ = call(backend, "append", ahead, [8, 0, 0, 0])
    assert rows(used) == rows(ahead)


@on_each_backend
@pytest.mark.parametrize("name", ["reserve", "append"])
def test_a_shortfall_counts_the_missing_pages_and_changes_nothing(backend, name):
    before = filled(16, 13, 5)  # 4 + 4 + 2 of 11 pages: one is left
    assert pages.free_pages(before) == 1
    own, copies, shortfall = call(backend, name, before, [0, 0, 8, 1])
    assert shortfall == 2
    assert tree_equal(own, before)
    assert copied(copies) == {}
    own, _, shortfall = call(backend, name, before, [0, 0, 7, 0])
    assert shortfall == 0
    assert pages.free_pages(own) == 0


def test_numpy_returns_the_same_object_on_a_shortfall_and_where_nothing_changes():
    own = filled(16, 13, 12)  # all 11 pages
    for verb in (pages.reserve, pages.append):
        assert verb(own, [0, 0, 0, 2])[0] is own
        assert verb(own, [0, 0, 0, 2])[2] == 1
        assert verb(own, [0, 0, 0, 0])[0] is own
    assert pages.reserve(own, [0, 3, 0, 0])[0] is own
    assert pages.append(own, [0, 3, 0, 0])[0].page_table is own.page_table


@on_each_backend
def test_fork_then_write_copies_the_shared_partial_page_only(backend):
    own = call(backend, "fork", filled(6), 0, 1)
    assert rows(own) == [[1, 2], [1, 2], [], []]
    np.testing.assert_array_equal(own.refcounts[:4], [0, 2, 2, 0])
    own, copies, _ = call(backend, "append", own, [0, 1, 0, 0])
    assert copied(copies) == {1: (2, 3)}
    assert rows(own) == [[1, 2], [1, 3], [], []]
    np.testing.assert_array_equal(own.refcounts[:4], [0, 2, 1, 1])
    own, copies, _ = call(backend, "append", own, [1, 1, 0, 0])  # both own their last page now
    assert copied(copies) == {}


@on_each_backend
def test_when_all_holders_write_the_last_keeps_the_page(backend):
    own = pages.fork(filled(6), [0, 0], [1, 2])
    assert own.refcounts[2] == 3
    written, copies, shortfall = call(backend, "append", own, [1, 1, 1, 0])
    assert shortfall == 0
    assert copied(copies) == {0: (2, 3), 1: (2, 4)}
    assert rows(written) == [[1, 3], [1, 4], [1, 2], []]
    written, copies, _ = call(backend, "append", own, [1, 0, 1, 0])  # slot 1 still reads it: both writers leave
    assert copied(copies) == {0: (2, 3), 2: (2, 4)}
    assert written.refcounts[2] == 1


@on_each_backend
def test_the_copy_and_the_growth_of_one_append_both_count(backend):
    own = pages.fork(filled(6, 0, 16, 12), 0, 1)  # 2 pages are free
    grown, copies, shortfall = call(backend, "append", own, [0, 3, 0, 0])
    assert shortfall == 0
    assert rows(grown)[1] == [1, 10, 11]
    assert copied(copies) == {1: (2, 10)}
    failed, copies, shortfall = call(backend, "append", own, [0, 7, 0, 0])
    assert shortfall == 1
    assert tree_equal(failed, own)
    assert copied(copies) == {}


@on_each_backend
def test_a_full_shared_page_is_not_copied_unless_truncate_reaches_into_it(backend):
    grown, copies, _ = call(backend, "append", pages.fork(filled(8), 0, 1), [1, 1, 0, 0])
    assert copied(copies) == {}
    cut = call(backend, "truncate", grown, [9, 7, 0, 0])
    assert cut.refcounts[2] == 2
    assert copied(call(backend, "append", cut, [0, 1, 0, 0])[1]) == {1: (2, 4)}
    cut = call(backend, "truncate", grown, [9, 4, 0, 0])
    assert copied(call(backend, "append", cut, [0, 1, 0, 0])[1]) == {}


@on_each_backend
def test_fork_leaves_pages_reserved_ahead_with_the_source(backend):
    ahead = pages.reserve(filled(6), [10, 0, 0, 0])[0]
    own = call(backend, "fork", ahead, 0, 1)
    assert rows(own) == [[1, 2, 3, 4], [1, 2], [], []]
    own, copies, _ = call(backend, "append", own, [3, 0, 0, 0])
    assert copied(copies) == {0: (2, 5)}
    assert rows(own)[0] == [1, 5, 3, 4]


@on_each_backend
def test_fork_of_an_empty_slot_shares_nothing(backend):
    before = filled(0, 3)
    assert tree_equal(call(backend, "fork", before, 0, 2), before)


@pytest.mark.parametrize(
    ("src", "dst", "on_jax"),
    [(src, dst, [5, 3, 0, 0]) for src, dst in ((0, 0), (0, 1), (0, 4), (0, -1), (4, 2), (-1, 2))]
    + [([0, 1], [2, 2], [5, 3, 5, 0]), ([1, 2], [2, 3], [5, 3, 0, 0]), ([0, 9], [3, 2], [5, 3, 0, 5])],
)
def test_fork_refuses_on_numpy_and_skips_the_pair_on_jax(src, dst, on_jax):
    own = filled(5, 3)
    with pytest.raises(ValueError, match="cannot fork slot"):
        pages.fork(own, src, dst)
    np.testing.assert_array_equal(call("jax", "fork", own, src, dst).lengths, on_jax)


def test_fork_refuses_a_slot_that_only_reserved_pages():
    own = pages.reserve(filled(5), [0, 1, 0, 0])[0]
    with pytest.raises(ValueError, match=r"0 tokens, 1 pages"):
        pages.fork(own, 0, 1)
    with pytest.raises(ValueError, match="one equal length"):
        pages.fork(own, [0, 0], [2])
    with pytest.raises(TypeError, match="float64"):
        pages.fork(own, 0.0, 2)
    assert tree_equal(pages.fork(own, [], []), own)


@on_each_backend
def test_release_by_mask_or_by_number_in_any_order(backend):
    own = pages.reserve(pages.fork(filled(6, 0, 3), 0, 1), [4, 0, 0, 0])[0]
    mask = call(backend, "release", own, [True, False, True, False])
    assert tree_equal(mask, call(backend, "release", own, [2, 0, 2]))
    assert rows(mask) == [[], [1, 2], [], []]
    np.testing.assert_array_equal(mask.lengths, [0, 6, 0, 0])
    assert tree_equal(call(backend, "release", mask, 0), mask)
    assert tree_equal(call(backend, "release", mask, np.zeros(0, np.int32)), mask)
    empty = call(backend, "release", mask, 1)
    assert pages.pages_in_use(empty) == 0
    assert pages.free_pages(empty) == C - 1


@on_each_backend
def test_truncate_frees_whole_pages_and_those_reserved_ahead(backend):
    own = pages.reserve(filled(9, 8, 6), [4, 1, 0, 0])[0]
    own = call(backend, "truncate", own, [5, 8, 0, 0])
    np.testing.assert_array_equal(own.lengths, [5, 8, 0, 0])
    np.testing.assert_array_equal(np.count_nonzero(own.page_table, axis=1), [2, 2, 0, 0])
    assert pages.pages_in_use(own) == 4


def test_user_errors_name_the_numbers():
    own = filled(5, 3)
    for attempt, kind, match in (
        (lambda: pages.append(own, [0, 14, 0, 0]), ValueError, r"slot 1 holds 3 tokens .* 14 more: .* hold 16"),
        (lambda: pages.reserve(own, [12, 0, 0, 0]), ValueError, r"slot 0 holds 5 tokens and cannot take 12 more"),
        (lambda: pages.reserve(own, np.array([2**40, 0, 0, 0])), ValueError, r"1099511627776"),
        (lambda: pages.append(own, [-1, 0, 0, 0]), ValueError, r"slot 0: tokens -1"),
        (lambda: pages.append(own, [1]), ValueError, r"\(1,\).*num_slots=4"),
        (lambda: pages.append(own, np.zeros(4)), TypeError, r"tokens must be integers, got float64"),
        (lambda: pages.append(own, jnp.ones(3, jnp.int32)), ValueError, r"\(3,\).*num_slots=4"),
        (lambda: pages.truncate(own, [6, 0, 0, 0]), ValueError, r"slot 0: cannot truncate 5 tokens to 6"),
        (lambda: pages.truncate(own, [0, -1, 0, 0]), ValueError, r"slot 1: lengths -1"),
        (lambda: pages.release(own, [4]), ValueError, r"rows=\[4\] must be in \[0, 4\)"),
        (lambda: pages.release(own, -1), ValueError, r"rows=\[-1\]"),
        (lambda: pages.release(own, [True]), ValueError, r"a mask must be"),
        (lambda: pages.release(own, [0.5]), TypeError, r"rows must be integers"),
        (lambda: pages.empty(0, 1, 2, 1), ValueError, r"num_slots=0"),
        (lambda: pages.empty(1, 1, 1, 1), ValueError, r"num_pages=1 must be at least 2"),
        (lambda: pages.empty(1, 2**20, 2, 2**11), ValueError, r"2\*\*31"),
    ):
        with pytest.raises(kind, match=match):
            attempt()


def test_jax_counts_pages_past_the_row_as_shortfall_and_clamps():
    before = filled(5, 3)
    own, _, shortfall = call("jax", "append", before, [12, 0, 0, 0])
    assert shortfall == 1
    assert tree_equal(own, before)
    _, _, shortfall = call("jax", "append", before, [19, 18, 0, 0])
    assert shortfall == 2 + 2  # each passes its 16 tokens by two pages; the 5 pages inside the rows are free
    for tokens in ([2**31 - 1] * 4, [2**31 - 1, -(2**31), 0, 0]):
        own, _, shortfall = call("jax", "append", before, tokens)
        assert shortfall > 2**27
        assert tree_equal(own, before)
    _, _, shortfall = call("jax", "append", pages.empty(2, 2, 4, 1), [2**31 - 1] * 2)  # the sum would wrap
    assert shortfall > 2**27
    assert tree_equal(call("jax", "append", before, [-1, -(2**31), 0, 0])[0], before)
    np.testing.assert_array_equal(call("jax", "truncate", before, [6, -1, 0, 0]).lengths, [5, 0, 0, 0])
    assert tree_equal(call("jax", "release", before, [-1, 4, 9]), before)


def test_numpy_results_are_read_only_and_never_share_the_callers_arrays():
    tokens, lengths = np.array([6, 0, 3, 0], np.int32), np.array([5, 2, 0, 0], np.int32)
    empty = pages.empty(B, M, C, P)
    own = pages.append(empty, tokens)[0]
    forked = pages.fork(own, 0, 1)
    outs = [empty, pages.append(own, tokens), pages.reserve(own, tokens), forked, pages.append(forked, [0, 1, 0, 0])]
    outs += [pages.release(own, [0]), pages.truncate(forked, lengths), pages.append(own, [1, 0, 0, 0])]
    for leaf in jax.tree.leaves(outs):
        assert isinstance(leaf, int) or not leaf.flags.writeable
    assert tokens.flags.writeable
    assert lengths.flags.writeable
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.lengths = tokens


def test_positions_past_int16_on_every_backend():
    page_size, length = 16, 40_000
    for backend in BACKENDS:
        out, _, _ = call(backend, "append", pages.empty(2, 2600, 6000, page_size), [length, 0])
        assert pages.pages_in_use(out) == 2500
        out = call(backend, "fork", out, 0, 1)
        out, _, _ = call(backend, "append", out, [1, 3])
        assert pages.pages_in_use(out) == 2502
        out, copies, _ = call(backend, "append", call(backend, "truncate", out, [40_001, 39_990]), [0, 1])
        np.testing.assert_array_equal(copies.src, [0, out.page_table[0, 2499]])
        assert out.lengths[1] == 39_991


@pytest.mark.parametrize("num_pages", [2, 1000, 131_072])
def test_the_free_search_of_jax_finds_what_numpy_finds(num_pages):
    rng = np.random.default_rng(num_pages)
    for fill in (0.0, 0.5, 0.99, 1.0):
        free = rng.random(num_pages) >= fill
        free[0] = False
        free[-1] |= fill < 1
        held = np.flatnonzero(~free)[1:].astype(np.int32)  # one slot holds them all, page size 1
        table = np.zeros((3, num_pages), np.int32)
        table[0, : held.size] = held
        own = pages.Ownership(table, np.array([held.size, 0, 0], np.int32), (~free).astype(np.int32), 1)
        own.refcounts[0] = 0
        for tokens in ([0, 1, 1], [0, 0, 2], [0, 1, 0]):
            want, got = (call(backend, "append", own, tokens) for backend in BACKENDS)
            assert tree_equal(want[0], got[0])
            assert want[2] == got[2]


def test_a_decode_loop_on_the_device_matches_the_host_and_traces_once():
    traces = 0

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(own, steps):
        nonlocal traces
        traces += 1

        def step(carry):
            own, done, _ = carry
            own, _, shortfall = pages.append(own, (own.lengths > 0).astype(jnp.int32))
            return own, done + 1, shortfall

        return jax.lax.while_loop(lambda c: (c[1] < steps) & (c[2] == 0), step, (own, jnp.int32(0), jnp.int32(0)))

    host = pages.fork(pages.append(pages.empty(B, 16, 40, P), [5, 7, 0, 0])[0], 0, 3)
    for steps in (1, 20, 30):
        device, done, shortfall = decode(jax.tree.map(jnp.array, host), jnp.int32(steps))
        want = host
        for _ in range(int(done) - int(shortfall > 0)):
            want, _, missing = pages.append(want, (host.lengths > 0).astype(np.int32))
            assert missing == 0
        assert tree_equal(jax.tree.map(np.asarray, device), want)
    assert shortfall == 0
    assert done == 30
    _, done, shortfall = decode(jax.tree.map(jnp.array, host), jnp.int32(99))
    assert shortfall > 0
    assert done < 99
    assert traces == 1


def test_eager_jax_is_the_same_code():
    own = pages.fork(filled(6, 0, 3), 0, 1)
    host, copies, _ = pages.append(own, [1, 0, 5, 0])
    device, device_copies, shortfall = pages.append(jax.tree.map(jnp.asarray, own), jnp.asarray([1, 0, 5, 0]))
    assert shortfall == 0
    assert tree_equal((host, copies), jax.tree.map(np.asarray, (device, device_copies)))
    assert pages.free_pages(host) == int(pages.free_pages(device)) == 6


def test_x64_keeps_int32():
    with jax.enable_x64(True):
        outs = [jax.eval_shape(getattr(pages, name), filled(6), jnp.asarray([1, 0, 0, 0])) for name in VERBS[:2]]
        outs += [jax.eval_shape(pages.fork, filled(6), jnp.asarray(0), jnp.asarray(1))]
        outs += [jax.eval_shape(pages.release, filled(6), jnp.asarray([0]))]
        outs += [jax.eval_shape(pages.truncate, filled(6), jnp.asarray([0, 0, 0, 0]))]
    assert {leaf.dtype for leaf in jax.tree.leaves(outs)} == {np.dtype(np.int32)}


_OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["reserve", "append"]), st.lists(st.integers(0, 7), min_size=B, max_size=B)),
    st.tuples(st.just("append"), st.lists(st.integers(0, 1), min_size=B, max_size=B)),
    st.tuples(st.just("fork"), st.integers(0, B - 1), st.integers(0, B - 1)),
    st.tuples(st.just("release"), st.lists(st.booleans(), min_size=B, max_size=B)),
    st.tuples(st.just("truncate"), st.lists(st.integers(0, M * P), min_size=B, max_size=B)),
)


@hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(_OPERATIONS, min_size=1, max_size=15))
def test_any_sequence_gives_the_same_on_numpy_and_on_jax(operations):
    """Up to 16 tokens in each of 4 slots over 11 pages: shortfalls, forks of forks and copies all happen."""
    host = pages.empty(B, M, C, P)
    device = jax.tree.map(jnp.asarray, host)
    for name, *args in operations:
        if name == "fork" and (args[0] == args[1] or host.page_table[args[1], 0] != 0):
            continue
        if name == "truncate":
            args = [np.minimum(args[0], host.lengths)]
        if name in ("reserve", "append"):
            args = [np.minimum(args[0], M * P - host.lengths)]
        args = [np.asarray(a, bool if name == "release" else np.int32) for a in args]
        host_out, device_out = getattr(pages, name)(host, *args), _JITTED[name](device, *args)
        assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (host_out, device_out)), strict=True))
        host, device = (x if isinstance(x, pages.Ownership) else x[0] for x in (host_out, device_out))
        integrity.check_integrity(host)
