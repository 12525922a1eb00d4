"""The items of the TPU write kernel, a page of a row in a layer that new tokens fall into, and the copies that each needs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.common import ceil_divide, divide, start_copy, wait_parts

CURSOR = LAYER, ROW, PAGE, LEFT, SLOT = range(5)


@dataclasses.dataclass(frozen=True)
class Item:
    """One page that new tokens fall into: rows [begin, end) of it, of which row 0 would hold the chunk's token `first`."""

    page: jax.Array  # of the pool
    begin: jax.Array
    end: jax.Array
    first: jax.Array  # may be negative

    def tiles(self, plan):
        """Returns the first tile touched and the one after the last."""
        return divide(self.begin, plan.sub), ceil_divide(self.end, plan.sub)

    def partial(self, plan):
        """Returns whether the first tile keeps old tokens, and whether another one, the last, does."""
        lo, hi = self.tiles(plan)
        ragged_begin, ragged_end = self.begin != lo * plan.sub, self.end != hi * plan.sub
        return ragged_begin | (ragged_end & (hi - lo == 1)), ragged_end & (hi - lo > 1)

    def whole(self, plan):
        return (self.begin == 0) & (self.end == plan.P)


class Items:
    """The items of a core's layers, and the copies that each needs."""

    def __init__(self, plan, scalars, news, pools, buffers, windows, semaphores, cursor, written):
        self.plan, self.news, self.pools, self.buffers, self.windows = plan, news, pools, buffers, windows
        self.table, self.lengths, self.counts, self.offset = scalars
        self.reads, self.writes = semaphores
        self.cursor, self.written = cursor, written

    def pages(self, row):
        """Returns the first page of the row that new tokens fall into, and how many there are."""
        plan = self.plan
        length, count = self.lengths[row], self.counts[row]
        first = divide(length, plan.P)
        return first, jnp.where(count > 0, jnp.minimum(ceil_divide(length + count, plan.P), plan.M) - first, 0)

    def item(self, layer, row, page):
        plan = self.plan
        start = page * plan.P - self.lengths[row]
        index = jnp.minimum(row * plan.M + page, plan.B * plan.M - 1)
        # A clipped id keeps memory safe where the table holds nonsense.
        page = jnp.clip(self.table[index] + self.offset[0] + layer * plan.C, 0, plan.num_pages - 1)
        return Item(page, jnp.maximum(-start, 0), jnp.minimum(self.counts[row] - start, plan.P), start)

    def begin(self, layer, end):
        self._move(layer, -1, 0, 0, end)
        self.cursor[SLOT] = 0
        for slot in range(self.plan.stages):
            self.written[slot] = 0
        lax.fori_loop(0, self.plan.ahead, lambda slot, _: self._fetch(slot, end), None)

    def _move(self, layer, row, page, left, end):
        """Sets the cursor, in the next row that writes if nothing is left in this one; layer `end` means none."""

        def enter(state):
            layer, row, _, _ = state
            wrap = row + 1 == self.plan.B
            layer, row = jnp.where(wrap, layer + 1, layer), jnp.where(wrap, 0, row + 1)
            return layer, row, *self.pages(row)

        state = tuple(jnp.int32(x) for x in (layer, row, page, left))
        state = lax.while_loop(lambda state: (state[3] <= 0) & (state[0] < end), enter, state)
        self.cursor[LAYER], self.cursor[ROW], self.cursor[PAGE], self.cursor[LEFT] = state

    def next(self, end):
        """Returns the buffer of the item in turn, and starts the reads of one to come."""
        slot, stages = self.cursor[SLOT], self.plan.stages
        wrap = lambda x: jnp.where(x >= stages, x - stages, x)
        self.cursor[SLOT] = wrap(slot + 1)
        self._fetch(wrap(slot + self.plan.ahead), end)
        return slot

    def _fetch(self, slot, end):
        cursor = self.cursor

        @pl.when(cursor[LAYER] < end)
        def _():
            layer, row, page = cursor[LAYER], cursor[ROW], cursor[PAGE]
            self.wait_written(slot)
            self._read(
                self.item(layer, row, page), layer, row, slot, lambda source, to: start_copy(source, to, self.reads.at[slot])
            )
            self._move(layer, row, page + 1, cursor[LEFT] - 1, end)

    def wait_read(self, item, layer, row, slot):
        self._read(item, layer, row, slot, lambda source, to: pltpu.make_async_copy(source, to, self.reads.at[slot]).wait())

    def _read(self, item, layer, row, slot, copy):
        """Does `copy` for everything that an item needs: partial tiles, scales, its part of the chunk."""
        plan = self.plan
        lo, hi = item.tiles(plan)
        for tile, needed in zip((lo, hi - 1), item.partial(plan), strict=True):

            @pl.when(needed)
            def _(tile=tile):
                for pool, buffer in zip(self.pools[:2], self.buffers[:2], strict=True):
                    copy(self.tile(pool.at[item.page], tile), self.tile(buffer.at[slot], tile))

        if plan.num_pools == 3:
            copy(self.pools[2].at[item.page], self.buffers[2].at[slot])
        if plan.window:
            at = self.window(item)
            for new, window in zip(self.news, self.windows, strict=True):
                copy(new.at[layer, row, pl.ds(at, plan.window)], window.at[slot])

    def window(self, item):
        """Returns the first token of the chunk that is copied for the item."""
        return jnp.clip(item.first, 0, self.plan.T - self.plan.window)

    def tile(self, page, index):
        """Returns tile `index` of a page, or of a buffer that may hold a single tile."""
        sub = self.plan.sub
        at = 0 if page.shape[1] == sub else pl.multiple_of(index * sub, sub)
        return page.at[:, pl.ds(at, sub)]

    def write(self, item, slot):
        """Starts the copies back into the pool."""
        plan, pools, buffers = self.plan, self.pools, self.buffers
        lo, hi = item.tiles(plan)
        self.written[slot] = hi - lo
        whole = item.whole(plan) if plan.rows == plan.P else False

        @pl.when(whole)
        def _():
            for pool, buffer in zip(pools[:2], buffers[:2], strict=True):
                start_copy(buffer.at[slot], pool.at[item.page], self.writes.at[slot])

        def one(tile, _):
            for pool, buffer in zip(pools[:2], buffers[:2], strict=True):
                start_copy(self.tile(buffer.at[slot], tile), self.tile(pool.at[item.page], tile), self.writes.at[slot])

        lax.fori_loop(lo, jnp.where(whole, lo, hi), one, None)
        if plan.num_pools == 3:
            start_copy(buffers[2].at[slot], pools[2].at[item.page], self.writes.at[slot])

    def wait_written(self, slot):
        """Waits until what was last written from a buffer is in the pool."""
        plan, semaphore = self.plan, self.writes.at[slot]
        count = self.written[slot]
        self.written[slot] = 0
        for buffer in self.buffers[:2]:
            wait_parts(lambda n, buffer=buffer: buffer.at[slot, :, pl.ds(0, n * plan.sub)], count, plan.rows // plan.sub, semaphore)
        if plan.num_pools == 3:

            @pl.when(count > 0)
            def _():
                pltpu.make_async_copy(self.buffers[2].at[slot], self.buffers[2].at[slot], semaphore).wait()
