"""Any history of ownership calls against a naive model, through the contents of a pool that the calls address.

The model knows two things in plain Python: what each slot should say (a list of tokens), and which pages a slow and
obvious allocator would have given it. The pool is written only through page_table and copies, as the device does, and
a page that nobody owns is poisoned at once: one freed too early, shared too long or not copied shows as a wrong token.
"""

import hypothesis
import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxkv.kv import integrity, pages

B, M, P = 4, 5, 3
POISON = -1


class NaivePages:
    """Ownership as a list of page lists, one page at a time."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.owned = [[] for _ in range(B)]

    def holders(self, page):
        return sum(page in row for row in self.owned)

    def free(self):
        return [page for page in range(1, self.num_pages) if not self.holders(page)]

    def reserve(self, lengths, tokens):
        """Returns ({slot: (src, dst)}, shortfall) and takes the pages unless some are missing."""
        before, missing, copies = [list(row) for row in self.owned], 0, {}
        for slot, (length, more) in enumerate(zip(lengths, tokens, strict=True)):
            free = self.free()
            at, row = length // P, self.owned[slot]
            if more and length % P and self.holders(row[at]) > 1:
                src = row[at]
                if free:
                    row[at] = free.pop(0)
                    copies[slot] = (src, row[at])
                else:
                    missing += 1
                    row[at] = -missing  # stands for a page that is not there: this slot would have left src
            while more and len(row) * P < length + more:
                missing += not free
                row.append(free.pop(0) if free else -missing)
        if missing:
            self.owned = before
        return ({}, missing) if missing else (copies, 0)


class OwnershipMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.sampled_from([4, 8, 13, 25]))
    def start(self, num_pages):
        self.own = pages.empty(B, M, num_pages, P)
        self.naive = NaivePages(num_pages)
        self.text = [[] for _ in range(B)]
        self.pool = np.full((num_pages, P), POISON)
        self.next_token = 0

    def lengths(self):
        return [len(text) for text in self.text]

    def moved(self, own):
        """Takes the successor over and poisons every page that has no owner now."""
        self.own = own
        self.pool[own.refcounts == 0] = POISON

    def take(self, verb, tokens):
        """Runs reserve or append; returns whether it worked, with the copies made in the pool."""
        tokens = [min(more, M * P - length) for more, length in zip(tokens, self.lengths(), strict=True)]
        table, lengths, refcounts = (array.copy() for array in (self.own.page_table, self.own.lengths, self.own.refcounts))
        own, copies, shortfall = verb(self.own, tokens)
        want_copies, want_shortfall = self.naive.reserve(self.lengths(), tokens)
        assert shortfall == want_shortfall
        made = {b: (src, dst) for b, (src, dst) in enumerate(zip(*copies, strict=True)) if dst < self.pool.shape[0]}
        assert made == want_copies
        np.testing.assert_array_equal(self.own.page_table, table)  # the input is not touched, worked or not
        np.testing.assert_array_equal(self.own.lengths, lengths)
        np.testing.assert_array_equal(self.own.refcounts, refcounts)
        if shortfall:
            assert own is self.own
            return []
        dst = np.minimum(copies.dst, self.pool.shape[0])
        padded = np.vstack([self.pool, self.pool[:1]])  # one more row takes what jax would drop
        padded[dst] = self.pool[copies.src]
        self.pool = padded[:-1]
        self.moved(own)
        return tokens

    def write(self, slot, more):
        for position in range(len(self.text[slot]), len(self.text[slot]) + more):
            page = self.own.page_table[slot, position // P]
            assert self.own.refcounts[page] == 1, "a page is written while another slot holds it"
            self.pool[page, position % P] = self.next_token
            self.text[slot].append(self.next_token)
            self.next_token += 1

    @rule(tokens=st.lists(st.integers(0, 7), min_size=B, max_size=B))
    def append(self, tokens):
        for slot, more in enumerate(self.take(pages.append, tokens)):
            self.write(slot, more)

    @rule(active=st.lists(st.integers(0, 1), min_size=B, max_size=B), steps=st.integers(1, 4))
    def decode(self, active, steps):
        for _ in range(steps):
            self.append(active)

    @rule(tokens=st.lists(st.integers(0, 7), min_size=B, max_size=B))
    def reserve(self, tokens):
        self.take(pages.reserve, tokens)

    def empty_slots(self):
        return [slot for slot in range(B) if not self.naive.owned[slot]]

    @precondition(lambda self: 0 < len(self.empty_slots()) < B)
    @rule(data=st.data())
    def fork(self, data):
        dst = data.draw(st.lists(st.sampled_from(self.empty_slots()), min_size=1, unique=True))
        sources = [slot for slot in range(B) if slot not in self.empty_slots()]
        src = data.draw(st.lists(st.sampled_from(sources), min_size=len(dst), max_size=len(dst)))
        self.moved(pages.fork(self.own, src, dst) if len(dst) > 1 else pages.fork(self.own, src[0], dst[0]))
        for a, b in zip(src, dst, strict=True):
            self.text[b] = list(self.text[a])
            self.naive.owned[b] = self.naive.owned[a][: -(-len(self.text[a]) // P)]

    @rule(slots=st.lists(st.integers(0, B - 1), unique=True), as_mask=st.booleans())
    def release(self, slots, as_mask):
        self.moved(pages.release(self.own, np.isin(np.arange(B), slots) if as_mask else slots))
        for slot in slots:
            self.text[slot], self.naive.owned[slot] = [], []

    @rule(keep=st.lists(st.integers(0, M * P), min_size=B, max_size=B))
    def truncate(self, keep):
        keep = [min(n, length) for n, length in zip(keep, self.lengths(), strict=True)]
        self.moved(pages.truncate(self.own, keep))
        for slot, n in enumerate(keep):
            self.text[slot] = self.text[slot][:n]
            self.naive.owned[slot] = self.naive.owned[slot][: -(-n // P)]

    @invariant()
    def every_slot_reads_back(self):
        if not hasattr(self, "own"):
            return
        integrity.check_integrity(self.own)
        assert self.own.lengths.tolist() == self.lengths()
        for slot, text in enumerate(self.text):
            row = self.own.page_table[slot]
            assert [page for page in row if page] == self.naive.owned[slot]
            assert self.pool[row].reshape(-1)[: len(text)].tolist() == text
        assert pages.free_pages(self.own) == len(self.naive.free())
        assert (self.pool[0] == POISON).all()

    def teardown(self):
        if not hasattr(self, "own"):
            return
        order = sorted(range(B), key=lambda slot: (self.next_token * (slot + 1)) % 5)
        for slot in order:
            self.release([slot], as_mask=False)
            self.every_slot_reads_back()
        assert pages.free_pages(self.own) == self.pool.shape[0] - 1


OwnershipMachine.TestCase.settings = hypothesis.settings(max_examples=120, stateful_step_count=30, deadline=None)
TestOwnership = OwnershipMachine.TestCase
