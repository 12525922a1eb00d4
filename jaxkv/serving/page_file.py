"""A page as a file. All numbers little-endian:

    magic        8 bytes
    version      u32     goes up when this form or a Fingerprint's parts change
    header size  u32
    header       JSON: key, parent_key, depth, fingerprint, tokens, layout, payload_bytes
    header MAC   32 bytes of HMAC-SHA256 over all before
    payload      one zstd frame of keys, values, scales
    payload MAC  32 bytes of HMAC-SHA256 over header MAC and payload

Nothing is believed before its MAC is checked, and no size field makes a reader allocate more than the file holds; the payload
unpacks to what the layout says, or the file is bad.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import struct
from typing import Any, BinaryIO

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord, from_bytes, to_bytes

MAGIC = b"\x89jaxkv\r\n"  # as PNG's: a transfer that mends line ends or drops the eighth bit shows at once
VERSION = 1
MAC_BYTES = 32
_PREFIX = struct.Struct("<8sII")


class BadFile(Exception):
    """Not a page file of ours, or no longer. `reason` is one word for counting."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True, eq=False)
class PageHeader:
    """What a file says about its page, checked against its MAC."""

    key: bytes
    parent_key: bytes
    depth: int
    fingerprint: Fingerprint
    tokens: np.ndarray  # i32[P]
    layout: PageLayout
    payload_bytes: int
    mac: bytes


def zstd() -> Any:
    """The zstandard package; ImportError names the extra that brings it."""
    try:
        import zstandard
    except ImportError:
        raise ImportError("pages on disk need zstandard: pip install 'jaxkv[serve]'") from None
    return zstandard


def mac_key(secret: bytes) -> bytes:
    """The key of a folder's MACs: not the secret itself, which roots the chains of page keys."""
    return hmac.digest(secret, b"jaxkv page file", "sha256")


def pack(record: PageRecord, key: bytes, level: int) -> bytes:
    """A file's content. `key`: of its MACs; `level`: zstd's."""
    joined = b"".join(to_bytes(array) for array in record.data.arrays)
    payload = zstd().ZstdCompressor(level=level).compress(joined)
    description = {
        "key": record.key.hex(),
        "parent_key": record.parent_key.hex(),
        "depth": record.depth,
        "fingerprint": dataclasses.asdict(record.fingerprint),
        "tokens": record.tokens.tolist(),
        "layout": dataclasses.asdict(record.data.layout),
        "payload_bytes": len(payload),
    }
    header = json.dumps(description).encode()
    head = _PREFIX.pack(MAGIC, VERSION, len(header)) + header
    mac = hmac.digest(key, head, "sha256")
    return b"".join((head, mac, payload, _payload_mac(key, mac, payload)))


def read_header(file: BinaryIO, key: bytes) -> PageHeader:
    """The header of a file open at its start, which then stands at the payload.

    Raises:
      BadFile: anything is wrong with the header, or the file is not as long as it should be.
      OSError: reading failed.
    """
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise BadFile("truncated")
    magic, version, header_bytes = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadFile("magic")
    if version != VERSION:
        raise BadFile("version")
    start = _PREFIX.size + header_bytes + MAC_BYTES
    if start > size:
        raise BadFile("truncated")
    header, mac = file.read(header_bytes), file.read(MAC_BYTES)
    if not hmac.compare_digest(mac, hmac.digest(key, prefix + header, "sha256")):
        raise BadFile("header_checksum")
    parsed = _parse(header, mac)
    if size != start + parsed.payload_bytes + MAC_BYTES:
        raise BadFile("truncated" if size < start + parsed.payload_bytes + MAC_BYTES else "appended")
    return parsed


def read_data(file: BinaryIO, header: PageHeader, key: bytes) -> PageData:
    """The page of a file that `read_header` has read; its arrays are read-only.

    Raises:
      BadFile: the payload is not what was written.
      OSError: reading failed.
    """
    payload, mac = file.read(header.payload_bytes), file.read(MAC_BYTES)
    if not hmac.compare_digest(mac, _payload_mac(key, header.mac, payload)):
        raise BadFile("payload_checksum")
    module, nbytes = zstd(), header.layout.nbytes
    try:
        if module.get_frame_parameters(payload).content_size != nbytes:
            raise BadFile("payload")
        unpacked = module.ZstdDecompressor().decompress(payload, max_output_size=nbytes, allow_extra_data=False)
    except module.ZstdError:
        raise BadFile("payload") from None
    if len(unpacked) != nbytes:
        raise BadFile("payload")
    return from_bytes(unpacked, header.layout)


def _payload_mac(key: bytes, header_mac: bytes, payload: bytes) -> bytes:
    mac = hmac.new(key, header_mac, "sha256")
    mac.update(payload)
    return mac.digest()


def _parse(header: bytes, mac: bytes) -> PageHeader:
    try:
        given = json.loads(header)
        layout: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given["layout"].items()}
        return PageHeader(
            bytes.fromhex(given["key"]),
            bytes.fromhex(given["parent_key"]),
            int(given["depth"]),
            Fingerprint(**given["fingerprint"]),
            np.array(given["tokens"], np.int32),
            PageLayout(**layout),
            int(given["payload_bytes"]),
            mac,
        )
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError):  # the MAC is right: another jaxkv wrote it
        raise BadFile("header") from None
