"""A receipt says why so much was reused, as JSON, and names nobody."""

import dataclasses
import json

import numpy as np
import pytest
from cache_world import fingerprint

from jaxkv.serving.page_cache import PageCache

TOKENS = np.arange(7, dtype=np.int32)


@pytest.fixture
def cache():
    """A cache that knows TOKENS of tenant a."""
    cache = PageCache(16, 2, secret=b"a secret of the server", clock=lambda: 0.0)
    publish(cache, fingerprint("a"))
    return cache


def publish(cache, fp, tokens=TOKENS):
    cache.allocate(1, fp.tenant, 4)
    cache.publish(1, fp, tokens)
    cache.release(1)


def receipt(cache, fp, tokens=TOKENS, public=None):
    match = cache.match(fp, tokens, public=public)
    return cache.receipt(match).to_json(len(tokens), {"device": match.num_tokens})


def test_a_hit(cache):
    got = receipt(cache, fingerprint("a"))
    assert got["decision"] == "reuse" and got["reusable_tokens"] == 6 and got["suffix_tokens"] == 1
    assert got["gates"] == {"cross_tenant": "pass", "acl_epoch_mismatch": "pass", "active_sequence": "never_evict"}
    assert {part["nearest"] for part in got["parts"].values()} == {"same"}
    assert json.loads(json.dumps(got)) == got


def test_a_prompt_nobody_sent(cache):
    got = receipt(cache, fingerprint("a"), TOKENS + 100)
    assert got["decision"] == "recompute" and got["reusable_tokens"] == 0 and got["suffix_tokens"] == 7
    assert got["gates"]["cross_tenant"] == "pass"


def test_another_tenant_is_rejected(cache):
    got = receipt(cache, fingerprint("b"))
    assert got["decision"] == "recompute" and got["gates"]["cross_tenant"] == "reject"
    assert [name for name, part in got["parts"].items() if part["nearest"] == "different"] == ["tenant"]


def test_what_another_tenant_sent_cannot_be_read_off(cache):
    """Whether or not the other tenant has this prompt cached, the receipt is the same."""
    known, unknown = receipt(cache, fingerprint("b")), receipt(cache, fingerprint("b"), TOKENS + 100)
    assert known == unknown


def test_a_public_prefix(cache):
    publish(cache, fingerprint(None))
    got = receipt(cache, fingerprint("b"), public=fingerprint(None))
    assert got["decision"] == "reuse" and got["gates"]["cross_tenant"] == "public"
    assert [name for name, part in got["parts"].items() if part["nearest"] == "different"] == ["tenant", "acl_epoch"]


def test_another_epoch_is_a_miss(cache):
    got = receipt(cache, fingerprint("a", epoch=2))
    assert got["decision"] == "recompute" and got["gates"]["acl_epoch_mismatch"] == "miss_and_recompute"


def test_an_empty_cache():
    cache = PageCache(16, 2, secret=b"a secret of the server", clock=lambda: 0.0)
    got = receipt(cache, fingerprint("a"))
    assert got["decision"] == "recompute" and {part["nearest"] for part in got["parts"].values()} == {None}


def test_digests_name_nobody_and_need_the_secret(cache):
    fp = dataclasses.replace(fingerprint("a"), adapter="a", system_prompt="")
    parts = receipt(cache, fp)["parts"]
    assert parts["tenant"]["digest"] != parts["adapter"]["digest"]  # the same text in two parts
    assert parts["system_prompt"]["digest"] and receipt(cache, fingerprint("a"))["parts"]["system_prompt"]["digest"] is None
    other = PageCache(16, 2, secret=b"another", clock=lambda: 0.0)
    assert receipt(other, fp)["parts"]["tenant"]["digest"] != parts["tenant"]["digest"]


def test_a_receipt_tells_neither_tenant_nor_secret_and_is_nobodys_to_change(cache):
    kept = cache.receipt(cache.match(fingerprint("a"), TOKENS))
    assert "tenant='a'" not in repr(kept) and b"server" not in repr(kept).encode()
    kept.to_json(7, {})["gates"]["cross_tenant"] = "changed"
    assert kept.to_json(7, {})["gates"]["cross_tenant"] == "pass"
