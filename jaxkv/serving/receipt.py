"""Why a request reused what it did: for the operator, as JSON.

Parts are shown as digests keyed by the server's secret, so that a receipt names no tenant and no short secret can be
guessed from it. They are compared with the nearest fingerprint that has entries: the request's own if it has any, the
public one if its pages came from there, else the one that differs in the fewest parts, whatever its tokens. What a
receipt says about other tenants is so only that there are some.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxkv.serving.fingerprint import Fingerprint

Digest = Callable[[str, str | int | None], str | None]
_LOOKED_AT = 64  # fingerprints: each costs 5 us, and every request that finds nothing pays for them


@dataclasses.dataclass(frozen=True)
class Receipt:
    """One request's use of the prefix cache."""

    fingerprint: Fingerprint = dataclasses.field(repr=False)  # it names the tenant
    nearest: dict[str, str | None]  # of each part: "same", "different" or None: not told
    gates: dict[str, str]
    digest: Digest = dataclasses.field(repr=False)

    def to_json(self, num_tokens: int, cached: Mapping[str, int]) -> dict[str, Any]:
        """Returns the receipt as what the json module takes.

        Args:
          num_tokens: of the prompt.
          cached: tokens of it that were found, by tier.
        """
        found = sum(cached.values())
        return {
            "parts": {
                name: {"digest": self.digest(name, value), "nearest": self.nearest[name]}
                for name, value in self.fingerprint.parts()
            },
            "reusable_tokens": found,
            "suffix_tokens": num_tokens - found,
            "gates": dict(self.gates),
            "decision": "reuse" if found else "recompute",
            "cached_tokens": dict(cached),
        }

    def restored(self, is_public: bool) -> Receipt:
        """Returns the receipt once pages came back from a tier, the operator's public ones or the tenant's own."""
        return dataclasses.replace(self, gates=self.gates | {"cross_tenant": "public"}) if is_public else self


def make_receipt(
    fingerprint: Fingerprint,
    known: Iterable[Fingerprint],
    *,
    secret: bytes,
    is_public: bool,
) -> Receipt:
    """Returns the receipt of a prompt that was looked up.

    Args:
      known: the fingerprints that have entries.
      is_public: what was found is the operator's.
    """
    nearest = _nearest(fingerprint, known, is_public)
    same = fingerprint.differences(nearest) if nearest is not None else {}
    crossing = "public" if is_public else "reject" if same.get("tenant") == "different" else "pass"
    own_epoch = is_public or same.get("tenant") == "different" or same.get("acl_epoch") != "different"
    return Receipt(
        fingerprint,
        # Of another tenant's fingerprint nothing else is told.
        nearest={name: same.get(name) if crossing != "reject" or name == "tenant" else None for name, _ in fingerprint.parts()},
        gates={
            "cross_tenant": crossing,
            "acl_epoch_mismatch": "pass" if own_epoch else "miss_and_recompute",
            "active_sequence": "never_evict",
        },
        digest=lambda name, value: _digest(secret, name, value),
    )


def _nearest(fingerprint: Fingerprint, known: Iterable[Fingerprint], is_public: bool) -> Fingerprint | None:
    """Returns the known fingerprint with the fewest parts that differ, the first of equals, of the first _LOOKED_AT."""

    def distance(other: Fingerprint) -> tuple[bool, int]:
        wrong_scope = is_public and other.tenant is not None
        return wrong_scope, sum(same == "different" for same in fingerprint.differences(other).values())

    if not is_public and isinstance(known, dict) and fingerprint in known:
        return fingerprint
    return min(itertools.islice(known, _LOOKED_AT), key=distance, default=None)


def _digest(secret: bytes, name: str, value: str | int | None) -> str | None:
    if value is None:
        return None
    text = f"{type(value).__name__}:{value}".encode("utf-8", "surrogatepass")
    return hmac.digest(hashlib.sha256(secret + name.encode()).digest(), text, "sha256").hex()[:16]
