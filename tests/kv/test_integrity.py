"""The audit of page ownership: what is sound passes, and each contradiction is named with its slot, page and numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.kv import integrity, pages


def test_integrity_names_what_is_wrong():
    own, _, _ = pages.append(pages.empty(4, 4, 12, 4), np.array([6, 0, 3, 0]))
    good = pages.fork(own, 0, 1)  # rows [1 2 0 0] [1 2 0 0] [3 0 0 0] [0 0 0 0]

    def broken(**edits):
        arrays = {f: getattr(good, f).copy() for f in ("page_table", "lengths", "refcounts")}
        for name, (index, value) in edits.items():
            arrays[name][index] = value
        return pages.Ownership(**arrays, page_size=4)

    for own, match in (
        (broken(page_table=((0, 1), 12)), r"slot 0 entry 1: page 12 is outside \[0, 12\)"),
        (broken(page_table=((0, 1), -1)), r"slot 0 entry 1: page -1"),
        (broken(page_table=((0, 0), 0)), r"slot 0 entry 0 is page 0, but its 1 pages must be a prefix"),
        (broken(page_table=((2, 2), 5), refcounts=(5, 1)), r"slot 2 entry 1 is page 0"),
        (broken(lengths=(0, 9)), r"slot 0: 9 tokens need 3 pages, it owns 2"),
        (broken(lengths=(2, -1)), r"slot 2: -1 tokens"),
        (broken(refcounts=(0, 1)), r"refcounts\[0\] = 1"),
        (broken(refcounts=(2, 1)), r"page 2: refcount 1, but 2 entries of slots \[0 1\]"),
        (broken(refcounts=(9, -1)), r"page 9: refcount -1, but 0 entries"),
        (broken(refcounts=(9, 1)), r"page 9: refcount 1, but 0 entries"),
        (broken(page_table=((2, 1), 3), refcounts=(3, 2)), r"page 3 is entry 0 of slot 2 and entry 1"),
        (broken(page_table=((2, 1), 1), refcounts=(1, 3)), r"page 1 is entry"),
        (broken(lengths=(1, 4)), r"page 2 has 2 holders but slot 1 only reserved it: entry 1, 4 tokens"),
        (dataclasses.replace(good, lengths=good.lengths.astype(np.int64)), r"lengths must be int32"),
        (dataclasses.replace(good, lengths=good.lengths[:2]), r"4 rows in the page_table but 2 lengths"),
    ):
        for each in (own, jax.tree.map(jnp.asarray, own)):
            if jax.tree.leaves(each)[1].dtype == jax.tree.leaves(own)[1].dtype:
                with pytest.raises(integrity.IntegrityError, match=match):
                    integrity.check_integrity(each)
    integrity.check_integrity(good)
    integrity.check_integrity(jax.tree.map(jnp.asarray, good))
