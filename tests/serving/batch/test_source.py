"""The input file: lines, offsets, ids that come twice, shards."""

import codecs
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.serving.batch import source
from jaxkv.serving.batch.source import Source


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def test_lines_are_found_by_number_and_blank_ones_count(tmp_path):
    path = write(tmp_path / "in", {"a": 1}, b"\n", b" \t\r\n", {"b": 2}, b'{"no": "end"}\n', b"\xef\xbb\xbf\r\n", b"\xef\xbb\xbf")
    with Source(path) as found:
        assert found.lines.tolist() == [1, 4, 5]
        assert [found.read(n) for n in (1, 4, 5)] == [b'{"a": 1}\n', b'{"b": 2}\n', b'{"no": "end"}\n']
        assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n\n"])
def test_a_file_without_lines(content, tmp_path):
    with Source(write(tmp_path / "in", content)) as found:
        assert found.lines.size == 0


def test_ids_that_come_twice(tmp_path):
    ids = ["a", "b", 7, "a", None, "7", "5", "a", "\ud800", "\ud800"]
    lines = [{"custom_id": id} if id is not None else {"no": "id"} for id in ids]
    with Source(write(tmp_path / "in", *lines, b"\n", b"broken\n", {"custom_id": "12"}, {"custom_id": "11"})) as found:
        # line 5 has no id, so "5" is its id; the same goes for line 12, which cannot be read, but not for line 11, which is none
        firsts = {n: found.first_with_id_of(n) for n in found.lines.tolist()}
        assert {n: first for n, first in firsts.items() if n != first} == {4: 1, 8: 1, 6: 3, 7: 5, 10: 9, 13: 12}


def test_ids_whose_hashes_are_equal_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "hash_of", lambda custom_id: 1)
    with Source(write(tmp_path / "in", {"custom_id": "a"}, {"custom_id": "b"}, {"custom_id": "a"})) as found:
        assert [found.first_with_id_of(n) for n in (1, 2, 3)] == [1, 2, 1]


def test_a_line_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 20)
    path = write(tmp_path / "in", {"a": 1}, b"x" * 100 + b"\n", b"y" * 19 + b"\n", b"z" * 20 + b"\n", {"b": 2}, b"w" * 100)
    with Source(path) as found:
        assert [found.read(n) for n in range(1, 7)] == [b'{"a": 1}\n', None, b"y" * 19 + b"\n", None, b'{"b": 2}\n', None]
        assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_shards_part_the_lines_by_number(tmp_path):
    path = write(tmp_path / "in", *[{"custom_id": str(i % 5)} for i in range(10)])
    shards = []
    for index in range(3):
        with Source(path, num_shards=3, shard_index=index) as found:
            assert all(n % 3 == index for n in found.lines)
            shards += found.lines.tolist()
            assert [found.first_with_id_of(n) for n in found.lines.tolist()] == [(n - 1) % 5 + 1 for n in found.lines.tolist()]
    assert sorted(shards) == list(range(1, 11))


def test_misuse(tmp_path):
    with pytest.raises(FileNotFoundError):
        Source(tmp_path / "absent")
    with pytest.raises(ValueError, match="is no file"):
        Source(tmp_path)
    with pytest.raises(ValueError, match="shard_index must be in 0 to 1 with num_shards=2, got 2"):
        Source(write(tmp_path / "in", {}), num_shards=2, shard_index=2)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_lines(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any_bytes"
    path.write_bytes(content)
    with Source(path) as found:
        lines = content.split(b"\n")
        wanted = {i: line for i, line in enumerate(lines, 1) if line.strip() not in (b"", codecs.BOM_UTF8)}
        assert {n: found.read(n).removesuffix(b"\n") for n in found.lines.tolist()} == wanted
        assert all(found.first_with_id_of(n) <= n for n in found.lines.tolist())
