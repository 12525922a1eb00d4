"""What a cached page depends on besides its tokens, and the chain of digests that names a page.

    root(fingerprint) --tokens of page 0--> keys[0] --tokens of page 1--> keys[1] ...

    root = HMAC-SHA256(secret, fingerprint)        keys[i] = SHA-256(keys[i - 1] || page i's tokens as int32 LE)

A key so names one prefix under one fingerprint. Without the server's secret nobody can tell which prefix it is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_FORMAT = b"jaxkv fingerprint 1"
_INT32 = np.iinfo(np.int32)
NextKey = Callable[[bytes, bytes], bytes]  # `next_key`, or what remembers its results


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything but the tokens that a page's content, or the right to read it, depends on.

    None is "not set" and differs from "". Large things (weights, an adapter, a system prompt) come as digests.
    """

    model_revision: str | None  # digest of weights and config
    tokenizer_revision: str | None
    position_encoding: str | None  # RoPE settings
    adapter: str | None  # digest of the adapter's weights, never its name alone
    system_prompt: str | None  # digest_text(...)
    tenant: str | None  # None: public, published by the operator
    acl_epoch: int | None  # goes up when the tenant's rights change
    kv_dtype: str
    layout: str  # how a page lies in memory
    page_size: int  # P, tokens

    def __post_init__(self):
        for name, value in self.parts():
            allowed = _TYPES[name]
            if type(value) not in allowed:
                wanted = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
                raise TypeError(f"fingerprint part {name} must be {wanted}, it is {value!r}")
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1 token")

    def parts(self) -> tuple[tuple[str, str | int | None], ...]:
        """Returns (name, value) of every part, in order."""
        return tuple((name, getattr(self, name)) for name in _TYPES)

    def encode(self) -> bytes:
        """Returns bytes that no other fingerprint has: each part with its name, its type and their lengths."""
        return self._encoded

    @functools.cached_property
    def _encoded(self) -> bytes:
        fields = [_FORMAT]
        for name, value in self.parts():
            kind = b"none" if value is None else type(value).__name__.encode()
            fields += [name.encode(), kind, b"" if value is None else str(value).encode("utf-8", "surrogatepass")]
        return b"".join(len(field).to_bytes(8, "little") + field for field in fields)

    def root(self, secret: bytes) -> bytes:
        """Returns the 32 bytes that this fingerprint's chains start from."""
        return hmac.digest(secret, self.encode(), "sha256")

    def differences(self, other: Fingerprint) -> dict[str, str]:
        """Returns "same" or "different" for each part."""
        pairs = zip(self.parts(), other.parts(), strict=True)
        return {name: "same" if mine == theirs else "different" for (name, mine), (_, theirs) in pairs}


_TEXT, _NUMBER, _NONE = str, int, type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "model_revision": (_TEXT, _NONE),
    "tokenizer_revision": (_TEXT, _NONE),
    "position_encoding": (_TEXT, _NONE),
    "adapter": (_TEXT, _NONE),
    "system_prompt": (_TEXT, _NONE),
    "tenant": (_TEXT, _NONE),
    "acl_epoch": (_NUMBER, _NONE),
    "kv_dtype": (_TEXT,),
    "layout": (_TEXT,),
    "page_size": (_NUMBER,),
}


def digest_text(text: str) -> str:
    """Returns the SHA-256 of a text, as hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def as_tokens(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns token ids as one axis of little-endian int32. Anything that is not one, or does not fit: an error."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.zeros(0, "<i4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be one axis of integers, got {array.dtype}{list(array.shape)}")
    if array.dtype.itemsize > 4 or array.dtype == np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise ValueError(f"token ids {low}..{high} must fit into int32")
    return np.ascontiguousarray(array, "<i4")


def next_key(key: bytes, page: bytes) -> bytes:
    """Returns the key of the page after that of `key`, or after a root: `page` is its tokens as int32 LE."""
    return hashlib.sha256(key + page).digest()


def page_keys(root: bytes, tokens: Sequence[int] | np.ndarray, page_size: int) -> list[bytes]:
    """Returns the key of each full page of tokens, 32 bytes each. `root` may be a page's key: the chain goes on there."""
    return list(iter_page_keys(root, as_tokens(tokens), page_size))


def iter_page_keys(root: bytes, tokens: np.ndarray, page_size: int, next_key: NextKey = next_key) -> Iterator[bytes]:
    """Yields what `page_keys` returns, for a reader that stops at the first key nobody knows. tokens: as_tokens(...)."""
    key, data, step = root, tokens.tobytes(), 4 * page_size
    for start in range(0, len(data) // step * step, step):
        key = next_key(key, data[start : start + step])
        yield key


def complete_keys(
    root: bytes, tokens: np.ndarray, page_size: int, known: Sequence[bytes], next_key: NextKey = next_key
) -> list[bytes]:
    """Returns what `page_keys` returns, given its first keys. Raises ValueError if they are another prompt's or root's.

    Of the known keys only the first is computed again.
    """
    num_full = len(tokens) // page_size
    keys = list(known[:num_full])
    if keys and page_keys(root, tokens[:page_size], page_size) != keys[:1]:
        raise ValueError("the keys given are of other tokens or of another fingerprint")
    return keys + list(iter_page_keys(keys[-1] if keys else root, tokens[len(keys) * page_size :], page_size, next_key))
