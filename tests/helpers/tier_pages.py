"""Pages for tests of the tiers: chains under real keys, in every form that a pool has."""

import dataclasses

import ml_dtypes
import numpy as np

from jaxkv.serving.fingerprint import Fingerprint, page_keys
from jaxkv.serving.page_data import DTYPES, PageData, PageLayout, PageRecord

SECRET = b"a secret of the server"
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
