"""The copies of the TPU decode kernel: a cursor over the rows' pages that runs ahead of the block in use."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.common import ceil_divide, divide, start_copy, wait_parts

CURSOR = ROW, AT, LEFT, SLOT = range(4)
UNROLL = 8  # pages whose copies are started by one stretch of straight code


class Copies:
    """Copies of the rows' pages into VMEM, block after block, in the order in which they are used.

    The cursor says what is copied next: pages table[AT .. AT + LEFT) of row ROW; and which buffer is used next: SLOT.
    """

    def __init__(self, plan, scalars, pools, buffers, semaphores, cursor):
        self.plan, self.pools, self.buffers, self.semaphores, self.cursor = plan, pools, buffers, semaphores, cursor
        self.table, self.lengths, self.starts, self.offset = scalars

    def bounds(self, row):
        """Returns the row's first and one-past-last token in use, none past the end of the table."""
        return self.starts[row], jnp.minimum(self.lengths[row], self.plan.M * self.plan.P)

    def pages(self, row):
        """Returns the row's first page in use, and how many from there on."""
        lo, hi = self.bounds(row)
        first = divide(lo, self.plan.P)
        return first, jnp.where(lo < hi, ceil_divide(hi, self.plan.P) - first, 0)

    def begin(self, row, end):
        """Starts the first copies of the rows [row, end)."""
        self._move(row - 1, 0, 0, end)
        lax.fori_loop(0, self.plan.stages - 1, lambda slot, _: self._fetch(slot, end), None)
        self.cursor[SLOT] = 0

    def _move(self, row, at, left, end):
        """Sets the cursor, in the next row with pages in use if none is left in this one; at the end it fetches nothing."""

        def enter(state):
            row = state[0] + 1
            last = jnp.minimum(row, end - 1)
            first, count = self.pages(last)
            more = row < end
            return row, jnp.where(more, last * self.plan.M + first, 0), jnp.where(more, count, 0)

        moved = lax.while_loop(lambda state: (state[2] <= 0) & (state[0] < end), enter, tuple(map(jnp.int32, (row, at, left))))
        self.cursor[ROW], self.cursor[AT], self.cursor[LEFT] = moved

    def next(self, left, end):
        """Returns the buffer that holds the row's next `left` pages, at most a block; starts the copies of a block to come."""
        slot, block = self.cursor[SLOT], self.plan.block
        before = jnp.where(slot == 0, self.plan.stages - 1, slot - 1)  # its block was used up in the last step
        self.cursor[SLOT] = jnp.where(slot == self.plan.stages - 1, 0, slot + 1)
        self._fetch(before, end)
        for buffer in self.buffers:
            wait_parts(
                lambda n, buffer=buffer: buffer.at[slot, pl.ds(0, n)], jnp.minimum(left, block), block, self.semaphores.at[slot]
            )
        return slot

    def _fetch(self, slot, end):
        block, cursor = self.plan.block, self.cursor
        at, left = cursor[AT], cursor[LEFT]
        if block <= UNROLL:
            self._copy_pages(slot, at, left, 0, block)
        else:
            groups = ceil_divide(jnp.clip(left, 0, block), UNROLL)
            lax.fori_loop(0, groups, lambda i, _: self._copy_pages(slot, at, jnp.minimum(left, block), i * UNROLL, UNROLL), None)
        self._move(cursor[ROW], at + block, left - block, end)

    def _copy_pages(self, slot, at, left, first, count):
        """Starts the copies of pages [first, first + count) of a block, as far as there are `left` in it."""
        for j in range(count):
            # A clipped id keeps memory safe where the table holds nonsense, for less than a bounds check costs.
            page = jnp.clip(self.table[at + first + j] + self.offset[0], 0, self.plan.num_pages - 1)

            @pl.when(first + j < left)
            def _(to=first + j, page=page):
                for pool, buffer in zip(self.pools, self.buffers, strict=True):
                    start_copy(pool.at[page], buffer.at[slot, to], self.semaphores.at[slot])
