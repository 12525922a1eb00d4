"""Files of pages that are wrong in one way each: a miss, whatever is in them."""

import hashlib
import hmac
import json
import os
import tracemalloc

import numpy as np
import pytest
import tier_pages
import zstandard
from tier_pages import FINGERPRINT, LAYOUT, SECRET, bits, changed, load, make_chain, open_tier, path_of, stored

from jaxkv.serving import page_file
from jaxkv.serving.page_data import PageLayout


def damaged(tmp_path, content, tier=None):
    """The reason of the miss that this content gives, after checking that it is one and that the page can be stored anew."""
    tier, (record,) = tier or open_tier(tmp_path), make_chain(1)
    path_of(tier, record).write_bytes(content)
    before = tier.counts.misses.copy()
    assert load(tier, record) is None
    (reason,) = tier.counts.misses - before
    assert record.key not in tier and not path_of(tier, record).exists()
    return reason


def parts_of(content):
    """{name: (start, end)} of everything in a file."""
    header_end = 16 + int.from_bytes(content[12:16], "little")
    ends = dict(magic=8, version=12, header_size=16, header=header_end, header_mac=header_end + 32)
    ends |= dict(payload=len(content) - 32, payload_mac=len(content))
    starts = [0, *ends.values()]
    return {name: (start, end) for (name, end), start in zip(ends.items(), starts, strict=False)}


def test_every_byte_of_a_file_counts(tmp_path):
    tier, (record,) = stored(tmp_path)
    content = path_of(tier, record).read_bytes()
    expected = dict(
        magic={"magic"},
        version={"version"},
        header_size={"truncated", "header_checksum"},
        header={"header_checksum"},
        header_mac={"header_checksum"},
        payload={"payload_checksum"},
        payload_mac={"payload_checksum"},
    )
    for name, (start, end) in parts_of(content).items():
        reasons = set()
        for i in range(start, end):
            flipped = bytearray(content)
            flipped[i] ^= 1 << i % 8
            reasons.add(damaged(tmp_path, flipped, tier))
        assert reasons <= expected[name], name
    assert tier.store(record) and bits(load(tier, record)) == bits(record.data)


def test_every_length_but_the_right_one_is_a_miss(tmp_path):
    tier, (record,) = stored(tmp_path)
    content = path_of(tier, record).read_bytes()
    cuts = {0, 1, *(end + d for _, end in parts_of(content).values() for d in (-1, 0, 1))} - {len(content), len(content) + 1}
    for cut in sorted(cuts):
        assert damaged(tmp_path, content[:cut], tier) == "truncated"
    for extra in (b"\0", content, bytes(1 << 20)):
        assert damaged(tmp_path, content + extra, tier) == "appended"


def test_anything_else_is_a_miss(tmp_path):
    tier, (first, second) = stored(tmp_path, 2)
    contents = [path_of(tier, record).read_bytes() for record in (first, second)]
    assert damaged(tmp_path, contents[1], tier) == "key"
    split = parts_of(contents[0])["payload"][0]
    if len(contents[0]) == len(contents[1]):
        assert damaged(tmp_path, contents[0][:split] + contents[1][split:], tier) == "payload_checksum"
    rng = np.random.default_rng(0)
    for size in (1, 15, 16, 17, 100, 5000):
        assert damaged(tmp_path, rng.bytes(size), tier) in ("magic", "truncated")
    assert damaged(tmp_path, contents[0], open_tier(tmp_path, secret=b"another")) == "header_checksum"


def test_swapped_files_are_misses_for_both(tmp_path):
    tier, (a, b) = stored(tmp_path, 2)
    os.rename(path_of(tier, a), tmp_path / "aside")
    os.rename(path_of(tier, b), path_of(tier, a))
    os.rename(tmp_path / "aside", path_of(tier, b))
    assert load(tier, a) is None and load(tier, b) is None
    assert tier.counts.misses == {"key": 2}


def forged(record, payload, **changes):
    """A file with right MACs around what nobody wrote."""
    key = page_file.mac_key(SECRET)
    content = page_file.pack(record, key, 1)
    start, end = parts_of(content)["header"]
    header = json.loads(content[start:end]) | {"payload_bytes": len(payload)} | changes
    text = json.dumps(header).encode()
    head = content[:12] + len(text).to_bytes(4, "little") + text
    mac = hmac.digest(key, head, "sha256")
    return head + mac + payload + hmac.digest(key, mac + payload, hashlib.sha256)


@pytest.mark.parametrize("n", [1 << 26, LAYOUT.nbytes + 1, LAYOUT.nbytes - 1, 0])
def test_a_payload_unpacks_to_what_the_layout_says(tmp_path, n):
    (record,) = make_chain(1)
    bomb = zstandard.ZstdCompressor().compress(bytes(n))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(min(n, 1 << 20)))
    tier = open_tier(tmp_path)
    tracemalloc.start()
    for payload in (bomb, unsized, bomb + b"x", b"", b"no zstd at all"):
        assert damaged(tmp_path, forged(record, payload), tier) == "payload"
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_headers_that_another_version_might_write(tmp_path):
    (record,) = make_chain(1)
    payload = zstandard.ZstdCompressor().compress(bytes(LAYOUT.nbytes))
    fingerprint = {name: value for name, value in FINGERPRINT.parts()}
    layout = {"shape": LAYOUT.shape, "dtype": "float32", "scales_shape": None}
    for changes in (
        dict(fingerprint=fingerprint | {"more": 1}),
        dict(fingerprint=fingerprint | {"acl_epoch": True}),
        dict(fingerprint=None),
        dict(layout=layout | {"dtype": "object"}),
        dict(layout=layout | {"shape": [1, 2, 3]}),
        dict(layout=[]),
        dict(tokens=["a"]),
        dict(tokens=[1 << 40]),
        dict(key="no hex"),
        dict(payload_bytes="many"),
    ):
        assert damaged(tmp_path, forged(record, payload, **changes)) == "header", changes
    assert damaged(tmp_path, forged(record, payload, payload_bytes=1 << 60)) == "truncated"
    assert damaged(tmp_path, forged(record, payload, payload_bytes=-1)) == "appended"


def test_neither_links_nor_pipes_nor_folders_are_read(tmp_path):
    tier, (a, b) = stored(tmp_path, 2)
    os.rename(path_of(tier, a), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path_of(tier, a))
    assert load(tier, a) is None
    for make in (os.mkfifo, os.mkdir):
        (path := path_of(tier, b)).unlink(missing_ok=True)
        make(path)
        assert load(tier, b) is None
    assert tier.counts.misses["io"] == 2 and not tier.counts.events["hit"]


@pytest.mark.parametrize(
    "reason, other",
    [
        ("absent", dict(key=bytes(32))),
        ("fingerprint", dict(fingerprint=changed(tenant=None))),
        ("tokens", dict(tokens=np.zeros(tier_pages.P, np.int32))),
        ("layout", dict(layout=PageLayout(LAYOUT.shape, "uint16"))),
        ("layout", dict(layout=PageLayout((4, 1, 4, 16), "float32"))),
    ],
)
def test_a_doubt_is_a_miss_and_the_file_stays(tmp_path, reason, other):
    tier, (record,) = stored(tmp_path)
    assert load(tier, record, **other) is None
    assert tier.counts.misses == {reason: 1}
    assert load(tier, record) is not None
