"""Who may have which page back: no fingerprint another's, in any tier."""

import dataclasses

import numpy as np
import pytest
from tier_pages import FINGERPRINT, SECRET, all_done, changed, host, host_int8, load, make_chain, open_tier, run_of, store

from jaxkv.serving.fingerprint import Fingerprint, page_keys


def pairs():
    parts = dict(FINGERPRINT.parts())
    texts = [name for name, value in parts.items() if name not in ("acl_epoch", "page_size")]
    optional = [name for name in texts if name not in ("kv_dtype", "layout")]
    bare = changed(**dict.fromkeys(optional), acl_epoch=None, kv_dtype="", layout="")
    for name in texts:
        yield name, "different", changed(**{name: "one"}), changed(**{name: "two"})
        yield name, "case", changed(**{name: "one"}), changed(**{name: "One"})
        yield name, "empty against set", changed(**{name: ""}), changed(**{name: "one"})
        for other in texts:
            if other != name:
                one, two = (dataclasses.replace(bare, **{part: "equal"}) for part in (name, other))
                yield name, f"equal string in {other}", one, two
    for name in optional:
        yield name, "unset against set", changed(**{name: None}), changed(**{name: "one"})
        yield name, "unset against empty", changed(**{name: None}), changed(**{name: ""})
        yield name, "unset against its name", changed(**{name: None}), changed(**{name: "None"})
    for old, new in ((1, 2), (2, 1), (None, 0), (None, 1), (0, 1)):
        yield "acl_epoch", f"{old} against {new}", changed(acl_epoch=old), changed(acl_epoch=new)
    yield "acl_epoch", "equal to a text", changed(acl_epoch=1, adapter=None), changed(acl_epoch=None, adapter="1")


PAIRS = list(pairs())


def keys_of(fingerprint: Fingerprint, tokens) -> list[bytes]:
    return page_keys(fingerprint.root(SECRET), tokens, fingerprint.page_size)


@pytest.mark.parametrize("make", [host, host_int8, open_tier])
def test_no_page_crosses_a_fingerprint(tmp_path, make):
    tier = make(tmp_path)
    assert {name for name, *_ in PAIRS} == {name for name, _ in FINGERPRINT.parts()} - {"page_size"}
    for name, way, one, two in PAIRS:
        for mine, theirs in ((one, two), (two, one)):
            (record,) = make_chain(1, mine)
            assert tier.store(record)
            assert load(tier, record) is not None, (name, way)  # the same: the positive control
            (key,) = keys_of(theirs, record.tokens)
            assert key not in tier and load(tier, record, key=key, fingerprint=theirs) is None, (name, way)
            # Even whoever had the key: the fingerprint is compared itself.
            before = tier.counts.misses["fingerprint"]
            assert load(tier, record, fingerprint=theirs) is None, (name, way)
            assert tier.counts.misses["fingerprint"] == before + 1
            tier.drop(record.key)
    assert tier.num_pages == 0


@pytest.mark.parametrize("make", [host, host_int8, open_tier])
def test_another_page_size_is_another_page(tmp_path, make):
    tier, (record,) = make(tmp_path), make_chain(1)
    tier.store(record)
    assert load(tier, record, fingerprint=changed(page_size=2), tokens=record.tokens[:2]) is None
    assert load(tier, record, fingerprint=changed(page_size=8), tokens=np.tile(record.tokens, 2)) is None
    assert load(tier, record, tokens=record.tokens[::-1]) is None
    assert load(tier, record) is not None


@pytest.mark.parametrize("make", [host, open_tier])
@pytest.mark.parametrize("part, old, new", [("model_revision", "w1", "w2"), ("acl_epoch", 1, 2)])
def test_an_epoch_or_weights_that_move_on_match_nothing_older(tmp_path, open_tiers, make, part, old, new):
    before, after = changed(**{part: old}), changed(**{part: new})
    tier, chain = make(tmp_path), make_chain(3, before)
    tiers = open_tiers(tier)
    all_done(store(tiers, chain))
    tokens = np.concatenate([record.tokens for record in chain])
    keys = keys_of(after, tokens)
    assert run_of(tiers, keys) == (None, 0)  # at once, before anything is freed
    assert tiers.load_async(keys, after, tokens, tier.name).result() == []
    assert tiers.load_async([r.key for r in chain], after, tokens, tier.name).result() == []
    assert all_done(tiers.drop_where(lambda fingerprint: fingerprint != after)) == {tier.name: 3}
    assert tier.num_pages == 0 and tier.nbytes == 0
