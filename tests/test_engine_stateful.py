"""Any history of verbs against a naive model: lists of tokens, and logits recomputed from scratch by `score`."""

import engine
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from engine import ATOL, B, C, P, S, V
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxkv
from jaxkv.kv import pages

ROW = st.integers(0, B - 1)
TEXT = st.tuples(st.integers(1, 40), st.integers(0, 9)).map(lambda pair: engine.prompt(*pair))


class EngineMachine(RuleBasedStateMachine):
    model = None  # set by the test

    @initialize()
    def start(self):
        self.state = engine.new_state(self.model)
        self.text = [[] for _ in range(B)]
        self.used = []

    def call(self, verb, needed):
        """Runs a verb on the state, keeps its successor and returns what else it gives; None if it was refused.

        needed: {slot: new total}. A refusal must be due: a row too long, or too few pages; and it must leave the state as it was.
        """
        try:
            result = verb(self.state)
        except ValueError as error:
            too_long = any(total > S for total in needed.values())
            # A slot needs its new pages and perhaps a copy of the one it shares.
            most = sum(-(-total // P) - len(self.text[row]) // P for row, total in needed.items())
            assert too_long or pages.free_pages(self.state.kv.own) < most, error
            assert ("max_tokens_per_slot" in str(error)) == too_long, error
            return None
        successor, got = result if type(result) is tuple else (result, True)
        if successor is not self.state:
            self.used.append(self.state)
            self.state = successor
        return got

    def close(self, logits, row):
        expected = engine.oracle(self.model, self.text[row])[-1]
        np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)

    def total(self, row, more):
        return len(self.text[row]) + more

    @rule(rows=st.lists(ROW, min_size=1, max_size=3, unique=True), texts=st.lists(TEXT, min_size=3, max_size=3))
    def prefill(self, rows, texts):
        texts = texts[: len(rows)]
        needed = {row: self.total(row, len(text)) for row, text in zip(rows, texts, strict=True)}
        logits = self.call(lambda s: jaxkv.prefill(s, texts, rows=rows), needed)
        for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
            if logits is not None:
                self.text[row] += text
                self.close(logits[i], row)

    @rule(rows=st.lists(ROW, min_size=1, max_size=B, unique=True), token=st.integers(0, V - 1))
    def decode(self, rows, token):
        logits = self.call(lambda s: jaxkv.decode(s, [token] * len(rows), rows=rows), {row: self.total(row, 1) for row in rows})
        for i, row in enumerate(rows):
            if logits is not None:
                self.text[row] += [token]
                self.close(logits[i], row)

    @rule(
        rows=st.lists(ROW, min_size=1, max_size=3, unique=True),
        text=TEXT,
        count=st.integers(0, 3),
        chunk_size=st.sampled_from([512, 9]),
    )
    def generate(self, rows, text, count, chunk_size):
        """The first row gets a text, the others go on from what they hold (one token, if that is nothing)."""
        texts = [text, *([] if self.text[row] else [5] for row in rows[1:])]
        needed = {row: self.total(row, len(t) + count) for row, t in zip(rows, texts, strict=True)}
        output = self.call(lambda s: jaxkv.generate(s, texts, rows=rows, max_new_tokens=count, chunk_size=chunk_size), needed)
        if output is not None:
            for row, t, got in zip(rows, texts, output.tokens, strict=True):
                self.text[row] += t
                assert got.tolist() == engine.greedy(self.model, self.text[row], count)
                self.text[row] += got.tolist()

    @rule(row=ROW, text=TEXT, read=st.integers(0, 3))
    def stream_and_leave(self, row, text, read):
        run = self.call(
            lambda s: (s, jaxkv.generate(s, [text], rows=[row], max_new_tokens=5, stream=True)),
            {row: self.total(row, len(text) + 5)},
        )
        if run is not None:
            for _, _ in zip(range(read), run, strict=False):
                pass
            self.used.append(self.state)
            self.state, output = run.finish()
            self.text[row] += text + output.tokens[0].tolist()

    @precondition(lambda self: 0 < sum(map(bool, self.text)) < B)
    @rule(data=st.data())
    def fork(self, data):
        empty = [row for row in range(B) if not self.text[row]]
        dst = data.draw(st.lists(st.sampled_from(empty), min_size=1, unique=True))
        sources = st.sampled_from([row for row in range(B) if self.text[row]])
        src = data.draw(st.lists(sources, min_size=len(dst), max_size=len(dst)))
        assert self.call(lambda s: jaxkv.fork(s, src, dst), {}) is not None
        for a, b in zip(src, dst, strict=True):
            self.text[b] = list(self.text[a])

    @rule(row=ROW, share=st.floats(0, 1))
    def truncate(self, row, share):
        length = round(share * len(self.text[row]))
        self.state = jaxkv.truncate(self.state, [row], [length])
        self.text[row] = self.text[row][:length]

    @rule(rows=st.lists(ROW, max_size=2, unique=True))
    def release(self, rows):
        self.state = jaxkv.release(self.state, rows)
        for row in rows:
            self.text[row] = []

    @invariant()
    def state_holds_the_texts(self):
        if not hasattr(self, "state"):
            return
        jaxkv.check_integrity(self.state)
        assert self.state.num_tokens.tolist() == list(map(len, self.text))
        for row, text in enumerate(self.text):
            assert self.state.tokens(row).tolist() == text
        held = [pages.num_pages_needed(len(text), P) for text in self.text]
        assert pages.pages_in_use(self.state.kv.own) <= min(sum(held), C - 1)
        if self.used:
            with pytest.raises(jaxkv.StaleStateError):
                jaxkv.check_integrity(self.used[-1])

    def teardown(self):
        if hasattr(self, "state"):
            for row, text in enumerate(self.text):
                if 0 < len(text) < S:
                    self.call(lambda s, row=row: jaxkv.decode(s, [1], rows=[row]), {row: len(text) + 1})
            engine.assert_all_pages_return(self.state)


@pytest.mark.parametrize("examples, steps", [(15, 20), pytest.param(60, 40, marks=pytest.mark.slow)])
def test_any_history_of_verbs(model, examples, steps):
    machine = type("Machine", (EngineMachine,), {"model": model})
    settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    hypothesis.stateful.run_state_machine_as_test(machine, settings=settings)
