"""Pages for tests of the tiers: chains under real keys, in every form that a pool has."""

import dataclasses
import threading
from concurrent.futures import wait

import ml_dtypes
import numpy as np

from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.fingerprint import Fingerprint, page_keys
from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.page_data import DTYPES, PageData, PageLayout, PageRecord
from jaxkv.serving.tier_counts import TierCounts

SECRET = b"a secret of the server"
BIG = 1 << 30  # bytes
PAGE_S = 1.0  # what computing a page takes in these tests, unless one says otherwise: so long that every tier pays
L, K, P, H = 2, 2, 4, 16
LAYOUT = PageLayout((L, K, P, H), "float32")
# Every form of a pool; the 8-bit ones carry their scales.
LAYOUTS = [PageLayout((L, K, P, H), dtype) for dtype in ("float32", "float16", "bfloat16", "uint16")]
LAYOUTS += [PageLayout((L, K, P, H), dtype, (L, 2, 1, 128)) for dtype in ("int8", "uint8", "float8_e4m3fn")]

FINGERPRINT = Fingerprint(
    model_revision="model",
    tokenizer_revision="tokenizer",
    position_encoding="rope",
    adapter=None,
    system_prompt=None,
    tenant="tenant",
    acl_epoch=1,
    kv_dtype="float32",
    layout="plain",
    page_size=P,
)


def changed(**parts) -> Fingerprint:
    """FINGERPRINT with other parts."""
    return dataclasses.replace(FINGERPRINT, **parts)


def make_data(seed: int, layout: PageLayout = LAYOUT) -> PageData:
    """A page of random numbers; of random bits where a pool holds bits, NaN patterns among them."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[layout.dtype]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        k, v = (rng.integers(info.min, info.max, layout.shape, dtype, endpoint=True) for _ in "kv")
    else:
        k, v = (rng.standard_normal(layout.shape, np.float32).astype(dtype) for _ in "kv")
    scales = rng.standard_normal(layout.scales_shape, np.float32) if layout.scales_shape else None
    return PageData(k, v, scales)


def make_chain(
    num_pages: int, fingerprint: Fingerprint = FINGERPRINT, layout: PageLayout = LAYOUT, seed: int = 0
) -> list[PageRecord]:
    """The pages of one prefix, first page first."""
    size = fingerprint.page_size
    tokens = np.random.default_rng(seed).integers(0, 1000, num_pages * size, np.int32)
    root = fingerprint.root(SECRET)
    keys = [root, *page_keys(root, tokens, size)]
    return [
        PageRecord(keys[i + 1], keys[i], i, fingerprint, tokens[i * size : (i + 1) * size], make_data(1000 * seed + i, layout))
        for i in range(num_pages)
    ]


def load(tier, record: PageRecord, **other):
    """What the tier gives for a record; `other`: what is asked for instead."""
    wanted = dict(key=record.key, fingerprint=record.fingerprint, tokens=record.tokens, layout=record.data.layout) | other
    return tier.load(**wanted)


def bits(data: PageData) -> list[tuple]:
    """All that must be equal for two pages to be the same."""
    return [(a.dtype.name, a.shape, a.tobytes()) for a in data.arrays]


def as_float32(array: np.ndarray) -> np.ndarray:
    """The numbers of a pool of floats."""
    return (array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array).astype(np.float32)


def host(folder) -> HostTier:
    """A host tier with room for everything."""
    return HostTier(BIG)


def host_int8(folder) -> HostTier:
    """The same, which keeps int8."""
    return HostTier(BIG, "int8")


def store(tiers, records, num_pages=None):
    """Stores pages wherever there is room, as `Restores` does."""
    count = len(records) if num_pages is None else num_pages
    return tiers.store_async(records, count, tiers.takers(count, PAGE_S))


def run_of(tiers, keys, page_s=PAGE_S):
    """(tier, pages) that `how_many` names."""
    return tuple(tiers.how_many(keys, page_s))[:2]


def all_done(futures):
    """The results of what Tiers returns by tier."""
    wait(futures.values())
    return {name: future.result() for name, future in futures.items()}


def open_tier(folder, capacity_bytes=BIG, **options) -> DiskTier:
    """The disk tier of a folder."""
    return DiskTier(folder / "tier", capacity_bytes, options.pop("secret", SECRET), **options)


def path_of(tier, record):
    """A page's file."""
    return tier.folder / f"{record.key.hex()}.page"


def stored(folder, num_pages=1, **options):
    """(a disk tier, the chain that it holds)"""
    tier, chain = open_tier(folder, **options), make_chain(num_pages)
    assert all(tier.store(record) for record in chain)
    return tier, chain


class Slow:
    """A tier whose methods wait until they may go on, or fail."""

    name = "slow"

    def __init__(self):
        self.counts, self.go, self.error, self.held = TierCounts(), threading.Event(), None, {}
        self.nbytes = self.num_pages = 0

    def refresh(self):
        pass

    def __contains__(self, key):
        return key in self.held

    def _wait(self):
        assert self.go.wait(30)
        if self.error:
            raise self.error

    def store(self, record):
        self._wait()
        self.held[record.key] = record
        return True

    def load(self, key, fingerprint, tokens, layout):
        self._wait()
        return self.held[key].data if key in self.held else None

    def touch(self, keys):
        self._wait()
        return len(keys)

    def drop_where(self, predicate):
        self._wait()
        gone = [key for key, record in self.held.items() if predicate(record.fingerprint)]
        for key in gone:
            del self.held[key]
        return len(gone)
