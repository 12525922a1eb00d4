"""Pages in host memory: exact where they should be, near where they may be, and gone in the right order."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import tier_pages
from tier_pages import FINGERPRINT, LAYOUT, LAYOUTS, as_float32, bits, changed, load, make_chain, make_data

from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord
from jaxkv.serving.page_int8 import _spread, applies_to, from_int8, to_int8
from pallas_kernels import quantise as pool_quantise

BIG = 1 << 20


def names(layouts):
    return [layout.dtype for layout in layouts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=names(LAYOUTS))
def test_pages_come_back_bit_by_bit(layout):
    tier, (record,) = HostTier(BIG), make_chain(1, layout=layout)
    wanted = bits(record.data)
    assert tier.store(record) and record.key in tier
    for array in record.data.arrays:
        array[...] = 0  # the caller's buffer is the caller's
    data = load(tier, record)
    assert bits(data) == wanted
    assert tier.nbytes == layout.nbytes == data.nbytes
    with pytest.raises(ValueError, match="read-only"):
        data.k[...] = 0
    assert tier.counts.as_dict() == {"events": {"store": 1, "hit": 1}, "misses": {}, "failures": {}}


def test_a_slice_of_a_larger_array_does_not_hold_all_of_it():
    whole = np.zeros((tier_pages.L, 64, tier_pages.K, tier_pages.P, tier_pages.H), np.float32)
    (record,) = make_chain(1)
    tier = HostTier(BIG)
    tier.store(dataclasses.replace(record, data=PageData(whole[:, 3], whole[:, 4])))
    data = load(tier, record)
    assert all(a.base is None or a.base.nbytes == a.nbytes for a in data.arrays)


# int8


@pytest.mark.parametrize("layout", LAYOUTS, ids=names(LAYOUTS))
def test_int8_keeps_8_bit_pages_exact_and_floats_near(layout):
    tier, (record,) = HostTier(BIG, "int8"), make_chain(1, layout=layout)
    if layout.dtype == "uint16":
        floats = make_data(0, PageLayout(layout.shape, "bfloat16"))
        record = dataclasses.replace(record, data=PageData(floats.k.view(np.uint16), floats.v.view(np.uint16)))
    assert tier.store(record)
    data = load(tier, record)
    assert data.layout == layout
    if not applies_to(layout):
        assert bits(data) == bits(record.data)
        return
    assert tier.nbytes < layout.nbytes
    for got, given in ((data.k, record.data.k), (data.v, record.data.v)):
        error, scale = np.abs(as_float32(got) - as_float32(given)), np.abs(as_float32(given)).max() / 127
        assert 0 < error.max() < 3 * scale


def test_int8_takes_the_bytes_it_says():
    layout = PageLayout((18, 1, 16, 256), "float32")
    tier = HostTier(1 << 22, "int8")
    tier.store(make_chain(1, changed(page_size=16), layout)[0])
    values, scales, means = 2 * 18 * 16 * 256, 2 * 18 * 16 * 4, 2 * 18 * 256 * 2
    assert tier.nbytes == values + scales + means < layout.nbytes / 3.5


@pytest.mark.parametrize("head_dim", [1, 16, 80, 96, 128, 256])
def test_int8_rounds_as_pools_do(head_dim):
    data = make_data(3, PageLayout((2, 1, 8, head_dim), "float32"))
    page = to_int8(data)
    rest = _spread(data.k - page.k.mean.astype(np.float32))
    values, scale = pool_quantise(rest, np.int8)
    np.testing.assert_array_equal(page.k.scale, scale)
    np.testing.assert_array_equal(page.k.values, values)
    np.testing.assert_allclose(_spread(rest), data.k - page.k.mean.astype(np.float32), atol=1e-5)
    # Orthogonal, so a vector's error is that of its rounding: half a step a channel at most.
    error = np.linalg.norm(from_int8(page, data.layout).k - data.k, axis=-1)
    assert (error <= page.k.scale * 0.5 * np.sqrt(head_dim) * 1.001 + 1e-6).all()


def test_int8_survives_what_real_keys_look_like():
    """A large common offset and a few large channels, which plain int8 with one scale a vector loses most bits to."""
    data = make_data(4, PageLayout((2, 1, 16, 256), "float32"))
    k = data.k + 20 * np.random.default_rng(5).standard_normal(256).astype(np.float32)
    k[..., 7] *= 30
    plain = np.round(k / (np.abs(k).max(-1, keepdims=True) / 127)) * (np.abs(k).max(-1, keepdims=True) / 127)
    ours = from_int8(to_int8(PageData(k, k)), data.layout).k
    assert np.abs(ours - k).mean() < np.abs(plain - k).mean() / 5


def test_int8_of_zeros_and_of_equal_tokens_is_exact():
    for k in (np.zeros((1, 1, 4, 16), np.float32), np.broadcast_to(np.arange(16, dtype=np.float32), (1, 1, 4, 16)).copy()):
        assert bits(from_int8(to_int8(PageData(k, k)), PageData(k, k).layout)) == bits(PageData(k, k))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_int8_at_the_ends_of_a_dtype(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    most = float(ml_dtypes.finfo(kind).max)
    for value in (most, -most, float(ml_dtypes.finfo(kind).tiny)):
        k = np.full((1, 1, 4, 16), value).astype(kind)
        k[0, 0, 1] = 0
        page = to_int8(PageData(k, k))
        if page is None:
            assert dtype != "float16"  # a sum overflows float32
        else:
            assert np.isfinite(from_int8(page, PageData(k, k).layout).k.astype(np.float32)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_refuses_what_is_not_finite(bad):
    tier, (record,) = HostTier(BIG, "int8"), make_chain(1)
    record.data.v[1, 0, 2, 3] = bad
    assert not tier.store(record) and record.key not in tier and tier.nbytes == 0
    assert tier.counts.failures == {"not_finite": 1}
    assert HostTier(BIG).store(record)


# What is kept


def test_the_least_recently_used_leaves_first():
    a, b, c, d = make_chain(4)
    tier = HostTier(3 * LAYOUT.nbytes)
    for record in (a, b, c):
        tier.store(record)
    assert load(tier, a) is not None
    tier.store(b)  # there already: used, and not held twice
    assert tier.nbytes == 3 * LAYOUT.nbytes and tier.num_pages == 3
    tier.store(d)
    assert [r.key in tier for r in (a, b, c, d)] == [True, True, False, True]
    assert tier.counts.events["evict"] == 1 and tier.nbytes == 3 * LAYOUT.nbytes


def test_a_touched_chain_leaves_deepest_first():
    chain, others = make_chain(4), make_chain(4, seed=1)
    tier = HostTier(4 * LAYOUT.nbytes)
    for record in chain:
        tier.store(record)
    assert tier.touch([r.key for r in chain] + [others[0].key]) == 4
    for i, record in enumerate(others, 1):
        tier.store(record)
        assert [r.key in tier for r in chain] == [True] * (4 - i) + [False] * i


def test_a_page_larger_than_the_tier_changes_nothing():
    (record,) = make_chain(1)
    tier = HostTier(LAYOUT.nbytes - 1)
    assert not tier.store(record) and tier.nbytes == 0
    assert tier.counts.failures == {"too_large": 1}
    assert HostTier(LAYOUT.nbytes).store(record)
    assert HostTier(LAYOUT.nbytes - 1, "int8").store(record)


@pytest.mark.parametrize(
    "reason, other",
    [
        ("absent", dict(key=bytes(32))),
        ("fingerprint", dict(fingerprint=changed(acl_epoch=2))),
        ("tokens", dict(tokens=np.zeros(tier_pages.P, np.int32))),
        ("tokens", dict(tokens=np.zeros(0, np.int32))),
        ("layout", dict(layout=PageLayout(LAYOUT.shape, "uint16"))),
        ("layout", dict(layout=PageLayout((4, 1, 4, 16), "float32"))),
    ],
)
@pytest.mark.parametrize("store_dtype", [None, "int8"])
def test_a_doubt_is_a_miss_with_its_reason(reason, other, store_dtype):
    tier, (record,) = HostTier(BIG, store_dtype), make_chain(1)
    tier.store(record)
    assert load(tier, record, **other) is None
    assert tier.counts.misses == {reason: 1}
    assert load(tier, record) is not None


@pytest.mark.parametrize("store_dtype", [None, "int8"])
def test_a_stray_write_is_a_miss(store_dtype):
    tier, (record,) = HostTier(BIG, store_dtype), make_chain(1)
    tier.store(record)
    array = tier._entries[record.key].page.arrays[1]
    array.flags.writeable = True
    array.view(np.uint8).reshape(-1)[5] ^= 16
    assert load(tier, record) is None and record.key not in tier and tier.nbytes == 0
    assert tier.counts.misses == {"checksum": 1}
    assert tier.store(record) and load(tier, record) is not None


def test_dropping():
    tier, old, new = HostTier(BIG), make_chain(3), make_chain(2, changed(acl_epoch=2))
    for record in old + new:
        tier.store(record)
    with pytest.raises(ZeroDivisionError):
        tier.drop_where(lambda fingerprint: 1 // (fingerprint.acl_epoch - 2))
    assert tier.num_pages == 5
    assert tier.drop_where(lambda fingerprint: fingerprint.acl_epoch < 2) == 3
    assert [r.key in tier for r in old + new] == [False] * 3 + [True] * 2
    assert tier.drop(new[0].key) and not tier.drop(new[0].key)
    assert tier.nbytes == LAYOUT.nbytes and tier.num_pages == 1


@pytest.mark.parametrize("args", [(-1,), (0, "fp8"), (0, "float32")])
def test_bad_arguments(args):
    with pytest.raises(ValueError):
        HostTier(*args)


# Records


def test_arrays_that_are_no_page():
    k = np.zeros((1, 1, 4, 16), np.float32)
    for bad in (
        (k, k[:, :, :2]),
        (k, k.astype(np.float16)),
        (k[0], k[0]),
        (k.astype(np.float64), k.astype(np.float64)),
        (k[:0], k[:0]),
        (k, k, np.zeros((1, 2, 1, 128))),
        (k, k, np.zeros(128, np.float32)),
    ):
        with pytest.raises(ValueError):
            PageData(*bad)


@pytest.mark.parametrize(
    "bad",
    [
        dict(key=b"short"),
        dict(parent_key=b""),
        dict(depth=-1),
        dict(tokens=np.zeros(tier_pages.P)),
        dict(tokens=np.zeros(tier_pages.P + 1, np.int32)),
        dict(fingerprint=changed(page_size=8)),
        dict(data=make_data(0, PageLayout((1, 1, 8, 16), "float32"))),
    ],
)
def test_records_that_disagree_with_themselves(bad):
    given = dict(
        key=bytes(32),
        parent_key=bytes(32),
        depth=0,
        fingerprint=FINGERPRINT,
        tokens=np.zeros(tier_pages.P, np.int32),
        data=make_data(0),
    )
    PageRecord(**given)
    with pytest.raises(ValueError):
        PageRecord(**given | bad)
