"""The output file: whole records whatever happens, and nobody else's file touched."""

import errno
import json
import os
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.serving.batch import OutputFile, claim
from jaxkv.serving.batch.output_file import encode, replace, scan_records


def record(line, text="", error=None):
    return {"custom_id": f"r{line}", "line": line, "text": text, "error": error}


def write(path, *lines):
    with OutputFile(path) as output:
        for line in lines:
            output.append(record(line))


def test_records_are_lines_of_json(tmp_path):
    path = tmp_path / "out"
    texts = ["plain", "für Ω 猫", "line\u2028ends\x85\n\r\x0b", "\ud800 alone", "\x00"]
    with OutputFile(path) as output:
        for line, text in enumerate(texts, 1):
            output.append(record(line, text))
    assert [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()] == texts
    assert "für Ω 猫".encode() in path.read_bytes()
    scan = scan_records(path)
    assert scan.lines.tolist() == [1, 2, 3, 4, 5] and scan.starts[-1] == path.stat().st_size and not scan.failed.any()


def test_records_reach_the_disk_within_a_fraction_of_a_second(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    with OutputFile(tmp_path / "out") as output:
        for line in range(1, 200):
            output.append(record(line))
        deadline = time.monotonic() + 5
        while (not synced or synced[-1] < output.nbytes) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert synced[-1] == output.nbytes
        assert len(synced) < 20  # many records share one
        output.append(record(200))
    assert synced[-1] == output.nbytes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_file_cut_at_any_byte_goes_on_from_its_whole_records(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "cut"
    path.unlink(missing_ok=True)
    texts = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=6))
    whole = [encode(record(i, text)) for i, text in enumerate(texts, 1)]
    joined = b"".join(whole)
    cut = data.draw(st.integers(0, len(joined)))
    garbage = data.draw(st.sampled_from([b"", b"\0" * 9, b"\0\n", b"{}\n", b'{"line": true, "error": null}\n', b"\n\n"]))
    content = joined[:cut] + garbage
    path.write_bytes(content)
    with OutputFile(path) as output:
        scan = output.recover()
        done = scan.lines.tolist()
        kept = sum(len("".join(map(chr, b))) for b in whole[: len(done)])
        assert done == list(range(1, len(done) + 1))
        # every record whose bytes are all there is kept (what follows the cut may complete one), and so is nothing else
        ends = [sum(map(len, whole[:i])) for i in range(len(whole) + 1)]
        assert kept == max(end for end in ends if content[:end] == joined[:end]) == path.stat().st_size == output.nbytes
        for line in range(len(done) + 1, len(texts) + 1):
            output.append(record(line, texts[line - 1]))
    assert path.read_bytes() == joined


def test_what_is_no_output_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "out"
    for content, words in [
        (b"hello\n" + encode(record(1)), "line 1 is no record"),
        (encode(record(1)) + b'{"line": 2}\n' + encode(record(3)), "line 2 is no record"),
    ]:
        path.write_bytes(content)
        with OutputFile(path) as output, pytest.raises(ValueError, match=words):
            output.recover()
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match="no file that answers"):
        OutputFile(tmp_path)


def test_two_processes_do_not_write_one_output(tmp_path):
    path = tmp_path / "out"
    program = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(ValueError, match="being written by another process"):
            OutputFile(path)
        other.stdin.close()
    write(path, 1)


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch, written):
    path = tmp_path / "out"
    write(path, 1, 2)
    before = path.read_bytes()

    def full(fd, data, real=os.write):
        if len(data) < len(encode(record(3))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:written])

    with OutputFile(path) as output:
        output.recover()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match=rf"No space left on device. Its {len(before)} bytes are whole records: make room"):
                output.append(record(3))
        assert path.read_bytes() == before
        output.append(record(3))
    assert scan_records(path).lines.tolist() == [1, 2, 3]


def test_an_fsync_that_fails_stops_the_job(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    output = OutputFile(tmp_path / "out")
    output.append(record(1))
    with pytest.raises(OSError, match="Input/output error"):
        for _ in range(500):
            time.sleep(0.01)
            output.append(record(2))
    with pytest.raises(OSError, match="Input/output error"):
        output.close()


def test_sorting_replaces_the_file_whole(tmp_path, monkeypatch):
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    with OutputFile(link) as output:
        for line in (30, 2, 9, 1, 100):
            output.append(record(line, "x" * line))
        os.chmod(path, 0o640)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("killed")))
            with pytest.raises(OSError, match="killed"):
                output.sort()
        assert scan_records(path).lines.tolist() == [30, 2, 9, 1, 100]
        output.sort()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [record(n, "x" * n) for n in (1, 2, 9, 30, 100)]
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    inode = path.stat().st_ino
    with OutputFile(path) as output:
        output.sort()
    assert path.stat().st_ino == inode  # sorted already
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "out"]


def test_replace_is_whole_or_nothing(tmp_path):
    path = tmp_path / "file"
    replace(path, lambda file: file.write(b"one"))
    (tmp_path / ".file.tmp").write_bytes(b"left by a kill, and longer")
    replace(path, lambda file: file.write(b"two"))
    with pytest.raises(ZeroDivisionError):
        replace(path, lambda file: (file.write(b"three"), 1 / 0))
    assert path.read_bytes() == b"two" and [*tmp_path.iterdir()] == [path]


def test_an_output_belongs_to_its_job(tmp_path):
    path, job = tmp_path / "out", {"input_sha256": "0" * 64, "seed": 1, "top_p": None}
    claim(path, {"seed": 7}, has_records=False)
    claim(path, job, has_records=False)  # nothing to lose: it changes hands
    claim(path, job, has_records=True)
    other = {"input_sha256": "1" * 64, "seed": 2, "top_p": None, "new": 1}
    with pytest.raises(
        ValueError, match="another job's: input_sha256 was .*; seed was 1 and is 2; new was not given and is 1"
    ) as told:
        claim(path, other, has_records=True)
    assert "give another output, or delete out and out.job.json" in str(told.value)
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "out.job.json").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            claim(path, job, has_records=True)
    (tmp_path / "out.job.json").unlink()
    with pytest.raises(ValueError, match="no out.job.json beside it"):
        claim(path, job, has_records=True)
