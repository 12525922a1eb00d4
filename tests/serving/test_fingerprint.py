"""What a fingerprint tells apart, and the chain of keys."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest

from jaxkv.serving.fingerprint import Fingerprint, as_tokens, complete_keys, digest_text, page_keys

SECRET = b"a secret of the server"
BASE = Fingerprint("model", "tok", "rope", "adapter", "system", "tenant", 3, "bf16", "KPH", 16)
TEXTS = [name for name, value in BASE.parts() if isinstance(value, str)]
OPTIONAL = [name for name in TEXTS if name not in ("kv_dtype", "layout")]


def variants(name):
    """Every other value a part may be mistaken for."""
    value = getattr(BASE, name)
    if isinstance(value, int):
        return [value + 1] + ([None, 0] if name == "acl_epoch" else [])
    return [value + "x", "", value.swapcase(), value + "\0", "None"] + ([None] if name in OPTIONAL else [])


@pytest.mark.parametrize("name", [name for name, _ in BASE.parts()])
def test_each_part_counts(name):
    roots = {dataclasses.replace(BASE, **{name: value}).root(SECRET) for value in [getattr(BASE, name), *variants(name)]}
    assert len(roots) == 1 + len(variants(name))
    for value in variants(name):
        different = BASE.differences(dataclasses.replace(BASE, **{name: value}))
        assert [part for part, same in different.items() if same == "different"] == [name]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(TEXTS, 2)))
def test_equal_strings_in_two_parts(one, other):
    empty = dataclasses.replace(BASE, **{name: None if name in OPTIONAL else "" for name in TEXTS})
    pairs = [{one: "X"}, {other: "X"}, {one: "X", other: "Y"}, {one: "Y", other: "X"}, {one: "XY"}, {other: "XY"}]
    assert len({dataclasses.replace(empty, **parts).root(SECRET) for parts in pairs}) == len(pairs)


def test_the_root_needs_the_secret_and_nothing_else():
    assert BASE.root(SECRET) == dataclasses.replace(BASE).root(SECRET) != BASE.root(SECRET + b"!")
    assert len(BASE.root(SECRET)) == 32 and hash(BASE) == hash(dataclasses.replace(BASE))


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"tenant": 1}, "tenant must be str or None"),
        ({"kv_dtype": None}, "kv_dtype must be str"),
        ({"acl_epoch": "3"}, "acl_epoch must be int or None"),
        ({"acl_epoch": True}, "acl_epoch must be int"),
        ({"page_size": 16.0}, "page_size must be int"),
    ],
)
def test_types_are_checked(parts, error):
    with pytest.raises(TypeError, match=error):
        dataclasses.replace(BASE, **parts)


def test_a_page_has_a_token():
    with pytest.raises(ValueError, match="page_size=0"):
        dataclasses.replace(BASE, page_size=0)


def test_keys_are_a_chain_of_digests():
    tokens, root = np.arange(11, dtype=np.int32), BASE.root(SECRET)
    first = hashlib.sha256(root + np.arange(4, dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()
    assert page_keys(root, tokens, 4) == [first, second]
    assert page_keys(root, tokens[:3], 4) == [] and page_keys(first, tokens[4:], 4) == [second]
    for known in ([], [first], [first, second], [first, second, b"past the end"]):
        assert complete_keys(root, tokens, 4, known) == [first, second]
    with pytest.raises(ValueError, match="of other tokens or of another fingerprint"):
        complete_keys(root, tokens, 4, [second])


def test_a_key_names_the_whole_prefix():
    tokens = np.arange(12, dtype=np.int32)
    changed = tokens.copy()
    changed[0] += 1
    pairs = list(zip(page_keys(b"r", tokens, 4), page_keys(b"r", changed, 4), strict=True))
    assert len(pairs) == 3 and all(a != b for a, b in pairs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, ">i4"])
def test_tokens_of_any_integer_type_give_the_same_keys(dtype):
    tokens = [1, 2, 3, 4]
    assert page_keys(b"r", np.array(tokens, dtype), 2) == page_keys(b"r", tokens, 2)
    assert as_tokens(np.array(tokens, dtype)).dtype == np.dtype("<i4")


def test_what_is_no_token_is_refused():
    for bad in ([2**31], np.array([2**32 - 1], np.uint32), [-(2**31) - 1]):
        with pytest.raises(ValueError, match="must fit into int32"):
            as_tokens(bad)
    for bad in ([1.0], [[1]], [True]):
        with pytest.raises(TypeError, match="one axis of integers"):
            as_tokens(bad)
    assert as_tokens([]).size == 0 and as_tokens([2**31 - 1, -(2**31)]).tolist() == [2**31 - 1, -(2**31)]


def test_digest_text():
    assert digest_text("") == hashlib.sha256(b"").hexdigest() != digest_text("x")
    assert len(digest_text("\ud800")) == 64
