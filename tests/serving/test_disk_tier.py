"""Pages on disk: exact, private, judged anew at every read; whatever the disk does, a miss and not an error."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tier_pages import LAYOUTS, SECRET, bits, changed, load, make_chain, open_tier, path_of, stored

from jaxkv.serving import disk_tier
from jaxkv.serving.disk_tier import DiskTier


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.dtype for layout in LAYOUTS])
def test_pages_come_back_bit_by_bit_to_the_next_process_too(tmp_path, layout):
    tier, (record,) = open_tier(tmp_path), make_chain(1, layout=layout)
    assert record.key not in tier
    assert tier.store(record) and record.key in tier
    for again in (tier, open_tier(tmp_path)):
        assert record.key in again
        data = load(again, record)
        assert bits(data) == bits(record.data)
        assert not data.k.flags.writeable
        assert again.nbytes == path_of(tier, record).stat().st_size
    assert tier.counts.as_dict() == {"events": {"store": 1, "hit": 1}, "misses": {}, "failures": {}}


def test_the_folder_is_private_and_names_say_nothing(tmp_path):
    tier, (record,) = stored(tmp_path)
    assert tier.folder.stat().st_mode & 0o777 == 0o700
    (name,) = os.listdir(tier.folder)
    assert name == f"{record.key.hex()}.page" and (tier.folder / name).stat().st_mode & 0o077 == 0


def test_what_the_constructor_refuses(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for args, message in (
        ((tmp_path / "open", 1, SECRET), "chmod 700"),
        ((tmp_path / "file", 1, SECRET), "cannot use"),
        ((tmp_path / "file" / "below", 1, SECRET), "cannot use"),
        ((tmp_path / "a", -1, SECRET), "capacity_bytes=-1"),
        ((tmp_path / "a", 1, b""), "secret"),
    ):
        with pytest.raises(ValueError, match=message):
            DiskTier(*args)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"jaxkv\[serve\]"):
        DiskTier(tmp_path / "a", 1, SECRET)
    assert not (tmp_path / "a").exists()


# Disks that fail


@pytest.mark.parametrize(
    "function, number, reason",
    [
        ("fsync", errno.ENOSPC, "disk_full"),
        ("fsync", errno.EDQUOT, "disk_full"),
        ("fsync", errno.EIO, "io"),
        ("open", errno.EROFS, "read_only"),  # what tempfile opens with
        ("open", errno.EACCES, "read_only"),
        ("replace", errno.EPERM, "read_only"),
        ("utime", errno.EIO, "io"),
    ],
)
def test_a_store_that_fails_is_counted_logged_once_and_leaves_nothing(tmp_path, monkeypatch, caplog, function, number, reason):
    tier, (kept,) = stored(tmp_path)
    others = make_chain(3, seed=1)

    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        assert [tier.store(record) for record in others] == [False] * 3
    assert tier.counts.failures == {reason: 3} and len(caplog.records) == 1
    assert os.listdir(tier.folder) == [f"{kept.key.hex()}.page"] and tier.num_pages == 1
    assert load(tier, kept) is not None
    assert tier.store(others[0]) and load(tier, others[0]) is not None


def test_a_folder_that_is_deleted_under_us(tmp_path):
    tier, (a, b) = stored(tmp_path, 2)
    for path in tier.folder.iterdir():
        path.unlink()
    tier.folder.rmdir()
    assert load(tier, a) is None and not tier.store(b)
    assert tier.drop_where(lambda fingerprint: True) == 0
    assert tier.counts.misses == {"vanished": 1} and tier.counts.failures["no_folder"] == 1
    assert tier.nbytes == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_still_gives_its_pages(tmp_path):
    tier, (record,) = stored(tmp_path)
    tier.folder.chmod(0o500)
    try:
        again = open_tier(tmp_path)
        assert load(again, record) is not None
        assert not again.store(make_chain(1, seed=1)[0]) and again.counts.failures == {"read_only": 1}
    finally:
        tier.folder.chmod(0o700)


# What is kept


def test_the_least_recently_used_leaves_first_in_the_next_process_too(tmp_path):
    tier, (a, b, c) = stored(tmp_path, 3)
    size = tier.nbytes
    assert load(tier, a) is not None
    tier = open_tier(tmp_path, size + 100)  # compressed sizes differ a little
    d, e = make_chain(2, seed=1)
    assert tier.store(d)
    assert [r.key in tier for r in (a, b, c, d)] == [True, False, True, True] and tier.nbytes <= size + 100
    tier.touch([a.key])
    assert tier.store(e)
    assert [r.key in tier for r in (a, c, d, e)] == [True, False, True, True]
    assert tier.counts.events["evict"] == 2
    assert sum(path.stat().st_size for path in tier.folder.iterdir()) == tier.nbytes


def test_a_touched_chain_leaves_deepest_first(tmp_path):
    tier, chain = stored(tmp_path, 4)
    tier.touch([r.key for r in chain])
    tier = open_tier(tmp_path, tier.nbytes)
    for i, record in enumerate(make_chain(3, seed=1), 1):
        assert tier.store(record)
        left = sum(r.key in tier for r in chain)
        assert left < 4 and [r.key in tier for r in chain] == [True] * left + [False] * (4 - left), i


def test_a_page_larger_than_the_tier_changes_nothing(tmp_path):
    (record,) = make_chain(1)
    tier = open_tier(tmp_path, 1000)
    assert not tier.store(record) and os.listdir(tier.folder) == []
    assert tier.counts.failures == {"too_large": 1}


def test_two_processes_share_a_folder(tmp_path):
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    a, b, c = make_chain(3)
    one.store(a)
    assert a.key not in two  # memory alone answers
    two.refresh()
    assert a.key in two and two.nbytes == one.nbytes and bits(load(two, a)) == bits(a.data)
    assert two.store(a) and two.counts.events["store"] == 0
    two.store(b)
    one.drop(a.key)
    assert a.key in two  # as far as it knows
    assert load(two, a) is None and a.key not in two
    assert load(two, c) is None
    assert two.counts.misses == {"vanished": 1, "absent": 1}
    # What vanished can be stored anew by whoever still believes in it.
    two.store(c)
    os.unlink(path_of(two, c))
    assert c.key in two and two.store(c) and load(two, c) is not None
    assert one.drop_where(lambda fingerprint: True) == 2 and os.listdir(one.folder) == []


def test_a_refresh_looks_at_new_files_only_and_forgets_what_is_gone(tmp_path, monkeypatch):
    one, chain = stored(tmp_path, 3)
    two, (other, later) = open_tier(tmp_path), make_chain(2, seed=1)
    one.store(other)
    one.drop(chain[0].key)
    looked, real = [], os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path, **options: (looked.append(path), real(path, **options))[1])
        two.refresh()
    assert looked == [two.folder, path_of(two, other)]
    assert [r.key in two for r in (*chain, other)] == [False, True, True, True]
    assert two.nbytes == one.nbytes == sum(path.stat().st_size for path in two.folder.iterdir())
    assert two.counts.as_dict() == {"events": {}, "misses": {}, "failures": {}}
    # A page that is loaded by its key, though nobody knew of it, is known from then on.
    one.store(later)
    assert load(two, later) is not None and later.key in two and two.nbytes == one.nbytes
    os.rename(two.folder, tmp_path / "away")
    two.refresh()
    assert two.counts.failures == {"no_folder": 0} and two.num_pages == 4  # as far as memory knows


def test_a_folder_that_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    one, (record,) = stored(tmp_path)
    now, read, real = [time.time()], [], os.scandir
    two = open_tier(tmp_path, wall_clock=lambda: now[0])
    monkeypatch.setattr(os, "scandir", lambda path: (read.append(path), real(path))[1])
    for _ in range(2):
        two.refresh()
    assert len(read) == 2  # it changed a moment ago: what came since may bear the same time
    now[0] += 10
    for _ in range(3):
        two.refresh()
    assert len(read) == 3
    time.sleep(0.01)
    one.drop(record.key)
    two.refresh()
    assert len(read) == 4 and record.key not in two


def test_refreshes_beside_stores_and_loads_agree_with_the_folder(tmp_path):
    """Two processes' worth of threads on one folder: once all is quiet, each knows exactly what is there."""
    tiers = [open_tier(tmp_path) for _ in range(2)]
    records = [record for seed in range(8) for record in make_chain(4, seed=seed)]
    stop, failed = threading.Event(), []

    def work(tier, seed):
        chance = np.random.default_rng(seed)
        try:
            for _ in range(150):
                record = records[chance.integers(len(records))]
                (tier.store if chance.random() < 0.6 else lambda r: tier.drop(r.key))(record)
                other = records[chance.integers(len(records))]
                data = load(tier, other)
                assert data is None or bits(data) == bits(other.data)
        except BaseException as error:
            failed.append(error)

    def look(tier):
        while not stop.is_set():
            tier.refresh()

    workers = [threading.Thread(target=work, args=(tiers[i % 2], i)) for i in range(2)]
    lookers = [threading.Thread(target=look, args=(tier,)) for tier in tiers]
    for thread in workers + lookers:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    for thread in lookers:
        thread.join()
    assert not failed
    names = {path.name for path in tiers[0].folder.iterdir()}
    for tier in tiers:
        tier.refresh()
        assert {f"{key.hex()}.page" for key in tier._files} == names
        assert set(tier.counts.misses) <= {"absent", "vanished"}, tier.counts.misses
        assert tier.nbytes == sum(path.stat().st_size for path in tier.folder.iterdir())


def test_capacity_covers_what_others_wrote(tmp_path):
    size = stored(tmp_path, 1)[0].nbytes
    capacity = 40 * size
    tiers = [open_tier(tmp_path, capacity) for _ in range(2)]
    for i in range(100):
        (record,) = make_chain(1, seed=100 + i)
        assert tiers[i % 2].store(record)
    held = sum(path.stat().st_size for path in tiers[0].folder.iterdir())
    assert capacity * 0.9 < held < capacity * (1 + 2 / 16 + 0.05)


def test_dropping_reads_headers_where_it_must(tmp_path):
    tier, old = stored(tmp_path, 3)
    for record in (new := make_chain(2, changed(acl_epoch=2))):
        tier.store(record)
    (tier.folder / f"{'0' * 64}.page").write_bytes(b"of somebody else")
    again = open_tier(tmp_path)
    with pytest.raises(ZeroDivisionError):
        again.drop_where(lambda fingerprint: 1 // (fingerprint.acl_epoch - 2))
    assert again.num_pages == 6
    assert again.drop_where(lambda fingerprint: fingerprint.acl_epoch < 2) == 3
    assert all(load(again, record) is not None for record in new) and again.num_pages == 3
    assert [load(tier, record) for record in old] == [None] * 3


def test_interrupted_writes_are_removed_once_they_are_old(tmp_path):
    tier, (record,) = stored(tmp_path)
    names = [f".{path_of(tier, record).name}.abc.tmp", f".{path_of(tier, record).name}.def.tmp", "notes.txt", ".hidden.tmp"]
    for name in names:
        (tier.folder / name).write_bytes(b"x")
    os.utime(tier.folder / names[0], (time.time() - 4000,) * 2)
    again = open_tier(tmp_path)
    assert sorted(os.listdir(tier.folder)) == sorted([path_of(tier, record).name, *names[1:]])
    assert again.counts.events == {"stale_temp_removed": 1} and again.num_pages == 1
    open_tier(tmp_path, wall_clock=lambda: time.time() + 4000)
    assert sorted(os.listdir(tier.folder)) == sorted([path_of(tier, record).name, *names[2:]])


def test_opening_ten_thousand_files_reads_none(tmp_path, monkeypatch):
    tier, (record,) = stored(tmp_path)
    for i in range(10_000):
        os.link(path_of(tier, record), tier.folder / f"{i:064x}.page")
    monkeypatch.setattr(disk_tier, "read_header", None)
    started = time.process_time()
    again = open_tier(tmp_path)
    assert time.process_time() - started < 1
    assert again.num_pages == 10_001 and record.key in again


# Killed writers

WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from tier_pages import SECRET, bits, load, make_chain
from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.page_data import PageLayout
from tier_pages import changed

folder, layout = Path(sys.argv[1]), PageLayout((4, 2, 16, 256), "float32")
chains = [make_chain(8, changed(page_size=16), layout, seed) for seed in range(4)]
records = [record for chain in chains for record in chain]
pause, whole, unfinished = random.Random(0), 0, 0
for kill in range(int(sys.argv[2])):
    ready, ours = os.pipe()
    child = os.fork()
    if child == 0:
        tier = DiskTier(folder, 1 << 30, SECRET)
        os.write(ours, b"x")
        while True:
            for record in records:
                tier.drop(record.key)
                tier.store(record)
    os.read(ready, 1)
    time.sleep(pause.uniform(0.005, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tier = DiskTier(folder, 1 << 30, SECRET)
    for record in records:
        data = load(tier, record)
        whole += data is not None
        assert data is None or bits(data) == bits(record.data)
    assert set(tier.counts.misses) <= {"absent"}, tier.counts.misses
    unfinished += any(name.endswith(".tmp") for name in os.listdir(folder))
    tier = DiskTier(folder, 1 << 30, SECRET, stale_temp_s=-1)
    assert not any(name.endswith(".tmp") for name in os.listdir(folder))
print(whole, unfinished)
"""


def test_a_writer_killed_at_any_moment_leaves_no_wrong_file(tmp_path):
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'helpers'}"}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "tier"), "10"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, _unfinished = map(int, done.stdout.split())
    assert whole > 0
