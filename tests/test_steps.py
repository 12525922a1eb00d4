"""The jitted steps: nothing is traced twice, nothing is copied that should stay in place, a loop gives what single steps give."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import ATOL, B, P, V, greedy, make_model, new_state, prompt, tiny_config

import jaxkv
from jaxkv import Sampling
from jaxkv.kv import integrity, pages
from jaxkv.kv.state import empty_pools
from jaxkv.model.decoder import Kernels
from jaxkv.model.params import Storage, init_params
from jaxkv.planning.shapes import first_layers
from jaxkv.state import Static
from jaxkv.steps import MAX_STEPS, Loop, Pools, step

# Nothing is traced after warm-up


def warm_up(model):
    """What a user does; every test here that counts has this one shape of state."""
    jaxkv.warmup(new_state(model))


@contextlib.contextmanager
def counting_compilations():
    """A list that receives the name of whatever XLA compiles meanwhile, the smallest jnp call included."""
    compiled = []

    def listen(name, seconds, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name", name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


OPTIONS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, seed=3),
    Sampling(temperature=1.0),
    Sampling(logprobs=0),
    Sampling(logprobs=20, temperature=1.5, top_k=100),
    Sampling(logit_bias={3: 5.0, 7: -np.inf}),
    Sampling(logit_bias={t: 0.5 for t in range(100)}, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(stop_token_ids=[5]),
    Sampling(stop_token_ids=list(range(40)), ignore_eos=True),
    Sampling(n=2, temperature=1.0, seed=5),
    Sampling(max_new_tokens=3),
]


def test_nothing_is_compiled_after_warm_up(model):
    """Not the steps only: no jnp call of a generate meets a new shape, whatever the lengths, rows and options are.

    Draws without a seed and rows that continue without new tokens are among them.
    """
    warm_up(model)
    before = jaxkv.trace_counts()
    rng = np.random.default_rng(0)
    with counting_compilations() as compiled:
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80):
            for options in (OPTIONS[length % len(OPTIONS)], OPTIONS[(3 * length + 1) % len(OPTIONS)]):
                num_rows = int(rng.integers(1, 3)) if options.n > 1 else int(rng.integers(1, B + 1))
                rows = rng.permutation(B)[:num_rows]
                texts = [prompt(int(rng.integers(1, length + 1)), i) for i in range(num_rows - 1)] + [prompt(length)]
                count = None if options.max_new_tokens else int(rng.integers(0, 6))
                state, _ = jaxkv.generate(
                    new_state(model), texts, rows=rows, max_new_tokens=count, sampling=options, chunk_size=(512, 33, 8)[length % 3]
                )
                state, _ = jaxkv.generate(state, [[]] * num_rows, rows=rows, max_new_tokens=2, stream=True).finish()
    assert jaxkv.trace_counts() == before
    assert compiled == []


def test_verbs_compile_nothing_after_warm_up(model):
    """Whatever the number of rows and their order, with and without pending tokens."""
    warm_up(model)
    before = jaxkv.trace_counts()
    with counting_compilations() as compiled:
        for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65):
            state, _ = jaxkv.prefill(new_state(model), [prompt(length), prompt(1)], rows=[length % 4, (length + 1) % 4])
            state, _ = jaxkv.decode(state, [1], rows=[length % 4])
            state, _ = jaxkv.decode(state, [1, 2, 3, 4])
            state, _ = jaxkv.prefill(state, [prompt(length // 3 + 1)], rows=[2])
            state = jaxkv.fork(jaxkv.release(state, [3]), 0, 3)
            for rows in ([3], [1, 0], [2, 0, 1], [3, 1, 2, 0], range(4)):
                state, _ = jaxkv.decode(state, [1] * len(rows), rows=rows)
                state, logits = jaxkv.prefill(state, [[1, 2]] * len(rows), rows=rows)
                assert logits.shape == (len(rows), V)
            state, _ = jaxkv.generate(state, [[5], []], rows=[1, 2], max_new_tokens=2)
            state, _ = jaxkv.decode(state, [7, 7], rows=[1, 3])  # one of them has a pending token
            state.tokens(1)
            jaxkv.release(jaxkv.truncate(state, [0], [1]), [0])
    assert jaxkv.trace_counts() == before
    assert compiled == []


def test_prefill_runs_a_long_prompt_in_the_chunks_of_generate():
    """One bucket rule: what `generate` compiled for prompts of these lengths serves the verb, and gives the same logits."""
    model = make_model(tiny_config(max_positions=2048))
    texts = [prompt(1030), prompt(7)]

    def fresh():
        return jaxkv.init_state(model, num_slots=2, max_tokens_per_slot=1100)

    state, _ = jaxkv.generate(fresh(), texts, max_new_tokens=0)
    before = jaxkv.trace_counts()
    state, logits = jaxkv.prefill(fresh(), texts)
    after = jaxkv.trace_counts()
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)} == {}
    expected = [np.asarray(jaxkv.score(model, [text]))[0] for text in texts]
    np.testing.assert_allclose(logits, [e[-1] for e in expected], atol=ATOL, rtol=0)
    jaxkv.check_integrity(state)
    assert state.tokens(0).tolist() == texts[0]
    state, output = jaxkv.generate(jaxkv.release(state, [0]), [[]], rows=[1], max_new_tokens=2)  # leaves a pending token
    history = texts[1] + output.tokens[0].tolist()
    state, every = jaxkv.prefill(state, [texts[0][:520], texts[0]], rows=[1, 0], all_logits=True)
    assert every.shape == (2, 1030, V)
    np.testing.assert_allclose(every[1], expected[0], atol=ATOL, rtol=0)
    whole = np.asarray(jaxkv.score(model, [history + texts[0][:520]]))[0, len(history) :]
    np.testing.assert_allclose(every[0, :520], whole, atol=ATOL, rtol=0)
    assert not every[0, 520:].any()


def test_warmup_leaves_the_state_as_it_was_and_nothing_to_trace(model):
    """Slots of a shape that no other test uses, so that only `warmup` can have compiled for it."""

    def fresh():
        return new_state(model, num_slots=2, max_tokens_per_slot=24, num_pages=7)

    state, _ = jaxkv.generate(fresh(), [prompt(7), prompt(19)], rows=[1, 0], max_new_tokens=[3, 0])
    stale, before = state, (state.num_tokens.tolist(), [state.tokens(row).tolist() for row in range(2)])
    state = jaxkv.warmup(state)
    with pytest.raises(jaxkv.StaleStateError):
        jaxkv.check_integrity(stale)
    jaxkv.check_integrity(state)
    assert (state.num_tokens.tolist(), [state.tokens(row).tolist() for row in range(2)]) == before
    expected = [greedy(model, before[1][row], 4) for row in (1, 0)]
    traced = jaxkv.trace_counts()
    with counting_compilations() as compiled:
        state, output = jaxkv.generate(state, [[], []], rows=[1, 0], max_new_tokens=4)
        assert [t.tolist() for t in output.tokens] == expected
        assert output.timings.compile_s == 0
        for i, length in enumerate((1, 2, 8, 15, 16, 17, 18, 20)):
            options = OPTIONS[i % len(OPTIONS)]
            texts = [prompt(length)] * (1 if options.n > 1 else 1 + i % 2)
            state, _ = jaxkv.generate(fresh(), texts, max_new_tokens=2, sampling=options)
            state, _ = jaxkv.generate(state, [[]] * len(texts), max_new_tokens=1, chunk_size=5)
            state, _ = jaxkv.prefill(jaxkv.release(state, [0]), [prompt(length)])
            state, _ = jaxkv.decode(jaxkv.fork(jaxkv.release(state, [1]), 0, 1), [1, 1], rows=[1, 0])
    assert jaxkv.trace_counts() == traced
    assert compiled == []


def test_two_models_of_one_shape_share_their_traces(model):
    warm_up(model)
    before = jaxkv.trace_counts()
    other = make_model(seed=1, eos=(3,))
    _, output = jaxkv.generate(new_state(other, seed=5), [prompt(9)], max_new_tokens=2)
    assert jaxkv.trace_counts() == before
    assert output.tokens[0].tolist() == greedy(other, prompt(9), 2)


def test_trace_counts_are_a_copy():
    jaxkv.trace_counts()["decode"] = -1
    assert jaxkv.trace_counts().get("decode") != -1


# decode_many with a loop on the device, as TPU and GPU run it


def started(model, limits, sampling=None):
    """(state, loop, options) of slots after their prompts, pages reserved; sampling as generate would set it up."""
    texts = [prompt(20), prompt(9), prompt(16)]
    state, logits = jaxkv.prefill(new_state(model), texts)
    before = state.kv.lengths.copy()
    room = np.maximum(np.array([*limits, 0]) - 1, 0)
    own, copies, shortfall = pages.reserve(state.kv.own, room)
    assert not shortfall and (copies.dst == state.kv.refcounts.size).all()
    options = (sampling or Sampling()).arrays(
        num_slots=B,
        rows=[0, 1, 2],
        vocab_size=V,
        eos_token_ids=(),
        seeds=[1, 2, 3],
        prompt_lengths=before[:3],
        max_tokens=before[:3] + limits,
    )
    loop = Loop(
        pools=Pools(state.kv.k_pages, state.kv.v_pages, state.kv.kv_scales, state.history),
        own=jax.tree.map(jnp.asarray, own),
        token=jnp.zeros(B, jnp.int32),
        done=jnp.array([False, False, False, True]),
        shortfall=jnp.zeros((), jnp.int32),
    )
    prompt_logits = jnp.zeros((B, V)).at[:3].set(logits)
    loop, emitted = step("first_tokens", "cpu")(loop, prompt_logits, options, ~np.asarray(loop.done), own.lengths)
    return texts, state, loop, options, emitted


def run(model, state, loop, options, counts, looped):
    """Emitted tokens of each slot over several dispatches, and the loop."""
    out = [[] for _ in range(B)]
    for count in counts:
        halt = np.zeros(B, bool)
        loop, emitted = step("decode_many", "cpu")(
            model.params, loop, options, halt, np.int32(count), static=state.static, looped=looped
        )
        assert emitted.valid.shape == (MAX_STEPS if looped else 1, B)
        for i in range(emitted.valid.shape[0]):
            for row in np.flatnonzero(emitted.valid[i]):
                assert i < count, "a step past the last asked for"
                out[row].append(int(emitted.sampled.tokens[i, row]))
    return out, loop


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.3, seed=[4, 5, 6], repetition_penalty=1.1)])
def test_a_loop_on_the_device_gives_the_tokens_of_single_steps(model, sampling):
    limits = np.array([14, 3, 9])
    texts, state, loop, options, first = started(model, limits, sampling)
    single, _ = run(model, state, loop, options, [1] * 13, looped=False)
    texts, state, loop, options, first = started(model, limits, sampling)
    looped, loop = run(model, state, loop, options, [5, 1, 32], looped=True)
    assert looped == single
    assert [len(t) for t in looped] == [13, 2, 8, 0]
    assert loop.done.all() and loop.shortfall == 0
    tokens = [[int(first.sampled.tokens[0, row]), *looped[row]] for row in range(3)]
    if sampling == Sampling():
        assert tokens == [greedy(model, text, n) for text, n in zip(texts, limits, strict=True)]
    for row in range(3):
        total = len(texts[row]) + limits[row]
        assert loop.own.lengths[row] == total - 1  # the last token is pending
        assert loop.pools.history[row, :total].tolist() == texts[row] + tokens[row]
    integrity.check_integrity(loop.own)


def test_a_loop_ends_when_every_row_is_done_and_halts_who_is_told_to(model):
    texts, state, loop, options, first = started(model, np.array([30, 30, 30]))
    expected = [greedy(model, text, 4) for text in texts]
    stop_ids = options.stop_ids.copy()
    for row in range(3):
        stop_ids[row, 0] = expected[row][2]
    options = jax.tree.map(jnp.asarray, options)
    options = type(options)(**{**vars(options), "stop_ids": jnp.asarray(stop_ids)})
    loop, emitted = step("decode_many", "cpu")(
        model.params, loop, options, np.array([False, True, False, False]), np.int32(MAX_STEPS), static=state.static, looped=True
    )
    for row in range(3):
        want = expected[row].index(expected[row][2], 1) if row != 1 else 0
        assert emitted.valid[:, row].sum() == want
        assert loop.own.lengths[row] == len(texts[row]) + want
    assert loop.done.all()
    again, after = step("decode_many", "cpu")(
        model.params, loop, options, np.zeros(B, bool), np.int32(MAX_STEPS), static=state.static, looped=True
    )
    assert not after.valid.any()  # nobody is left: not one step
    assert again.own.lengths.tolist()[1] == len(texts[1])


def test_a_loop_that_lacks_pages_stops_and_says_how_many(model):
    """The pages of generate are reserved before; should that ever be wrong, no token is written to a page that is not there."""
    texts, state, loop, options, _ = started(model, np.array([14, 3, 9]))
    held = np.asarray(loop.own.refcounts).copy()
    held[1:] = np.maximum(held[1:], 1)  # somebody else took every free page
    table = np.asarray(loop.own.page_table).copy()
    table[:, 3:] = 0
    loop = Loop(**{**vars(loop), "own": pages.Ownership(jnp.asarray(table), loop.own.lengths, jnp.asarray(held), P)})
    loop, emitted = step("decode_many", "cpu")(
        model.params, loop, options, np.zeros(B, bool), np.int32(MAX_STEPS), static=state.static, looped=True
    )
    assert loop.shortfall > 0 and loop.done.all()
    assert int(emitted.valid[:, 0].sum()) == 24 - 20  # what fits the three pages of slot 0


# Memory: the pool is updated in place


def abstract_loop(config, kv_dtype, num_pages, page_size=16, num_slots=2, pages_per_slot=8):
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype)
    pools = jax.eval_shape(lambda: empty_pools(config, num_pages, page_size, kv_dtype, "cpu"))
    pools = Pools(*pools, shape((num_slots, page_size * pages_per_slot), jnp.int32))
    own = pages.Ownership(
        shape((num_slots, pages_per_slot), jnp.int32), shape((num_slots,), jnp.int32), shape((num_pages,), jnp.int32), page_size
    )
    flags, tokens = shape((num_slots,), bool), shape((num_slots,), jnp.int32)
    return Loop(pools, own, tokens, flags, shape((), jnp.int32))


def lowered(name, config, kv_dtype, num_pages, T=1, looped=False):
    storage = Storage("float32", "float32", "cpu")
    static = Static(config, "float32", Kernels())
    params = init_params(config, jax.random.key(0), storage)
    loop = abstract_loop(config, kv_dtype, num_pages)
    slots, M = loop.own.page_table.shape
    i32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    if name == "decode_many":
        options = Sampling().arrays(
            num_slots=slots, rows=range(slots), vocab_size=V, eos_token_ids=(), seeds=[0] * slots, prompt_lengths=[1] * slots
        )
        args = (params, loop, options, np.zeros(slots, bool), np.int32(1))
        return loop, step(name, "cpu").lower(*args, static=static, looped=looped)
    args = (params, loop.pools, i32(slots, M), i32(slots), i32(slots), i32(slots, T), i32(slots))
    return loop, step(name, "cpu").lower(*args, static=static, all_logits=False)


MEMORY = [
    ("decode", 1, "float32", {}),
    ("decode", 2, "bfloat16", {}),
    ("decode_many", 1, "bfloat16", {}),
    ("prefill", 1, "bfloat16", dict(T=32)),
    ("decode_many", 1, "float32", dict(looped=True)),
    ("decode", 2, "float32", dict(num_layers=1)),  # its keys are there before it has read the pool
]
MORE_MEMORY = [
    ("decode_many", 2, "float32", {}),
    ("decode", 1, "bfloat16", {}),
    ("decode", 2, "float32", {}),
    ("decode", 4, "float16", {}),
    ("decode_many", 1, "float32", {}),
    ("decode_many", 2, "bfloat16", {}),
    ("prefill", 2, "float32", dict(T=32)),
    ("prefill", 1, "float32", dict(T=32)),
    ("decode_many", 2, "bfloat16", dict(looped=True)),
    ("decode", 1, "int8", dict(num_layers=1)),
    ("decode_many", 2, "bfloat16", dict(num_layers=1)),
    ("prefill", 2, "float32", dict(num_layers=1, T=32)),
]


@pytest.mark.parametrize(
    "name, num_kv_heads, kv_dtype, more", [*MEMORY, *(pytest.param(*m, marks=pytest.mark.slow) for m in MORE_MEMORY)]
)
def test_the_pool_is_updated_in_place(name, num_kv_heads, kv_dtype, more):
    """Alias bytes cover the pools, and no temporary is as large as one layer's keys."""
    options = {"num_layers": 2} | more
    config = first_layers(tiny_config(num_kv_heads=num_kv_heads), options.pop("num_layers"))
    loop, program = lowered(name, config, kv_dtype, num_pages=8192, **options)
    memory = program.compile().memory_analysis()
    pool = loop.pools.k_pages
    pool_bytes = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // config.num_layers, f"{memory.temp_size_in_bytes:,} of {pool_bytes:,}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "decode_many"])
def test_temporaries_do_not_grow_with_the_pool(name):
    config = tiny_config(num_kv_heads=1)
    small, large = (lowered(name, config, "float32", n)[1].compile().memory_analysis().temp_size_in_bytes for n in (256, 16384))
    assert large < small + 2 * 4 * 16384  # the refcounts, twice
