"""The store on disk: what is kept comes back, what is missing says why, what is too much goes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from hotloop import config
from hotloop.runtime.cache import Cache, count_reasons, digest, format_bytes
from hotloop.tools.cli import main

KEY = "ab" + "0" * 62


def test_round_trip(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.get(KEY, ".cpp") is None
    assert cache.put(KEY, ".cpp", b"int x;\n", "x") is not None
    assert cache.get(KEY, ".cpp") == b"int x;\n"
    assert Cache(tmp_path / "cache").get(KEY, ".cpp") == b"int x;\n"
    assert cache.get(KEY, ".so") is None
    assert cache.put_json(KEY, {"best": "gemm_6x64", "us": [1.5, 2]})
    assert cache.get_json(KEY) == {"best": "gemm_6x64", "us": [1.5, 2]}
    assert cache.put("cd" + KEY[2:], ".bin", b"") is not None
    assert cache.get("cd" + KEY[2:], ".bin") == b""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_folders_and_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = Cache(tmp_path / "cache")
        cache.put(KEY, ".so", b"x", "x", {"source": "x"})
        cache.get(KEY, ".cpp")
        with cache.scratch() as scratch:
            assert scratch.stat().st_mode & 0o077 == 0
    finally:
        os.umask(old)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_scratch_is_removed_whatever_happens(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt), cache.scratch() as scratch:
        (scratch / "half.so").write_bytes(b"x")
        raise KeyboardInterrupt
    assert not scratch.exists()
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_miss_says_why(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    parts = {"source": "a", "flags": "-O3", "compiler": "1"}
    assert cache.get(digest(parts), ".so", "kernel", parts) is None
    cache.put(digest(parts), ".so", b"x", "kernel", parts)
    assert cache.get(digest(parts), ".so", "kernel", parts) is not None
    newer = {**parts, "flags": "-O2", "compiler": "2"}
    assert cache.get(digest(newer), ".so", "kernel", newer) is None
    cache.path(digest(parts), ".so").unlink()
    assert cache.get(digest(parts), ".so", "kernel", parts) is None
    assert cache.why() == [
        ("kernel", "never compiled before"),
        ("kernel", "changed: flags, compiler"),
        ("kernel", "kept once, and removed since"),
    ]
    assert count_reasons(cache.why())[0][1] == 1


def test_a_miss_is_compared_with_the_same_thing_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    parts = {"source": "a", "flags": "-O3"}
    cache.put(digest(parts), ".so", b"x", "cpp_fused_add_0", parts, of="a")
    other, newer = {**parts, "source": "b"}, {**parts, "flags": "-O2"}
    assert cache.get(digest(other), ".so", "cpp_fused_add_0", other, of="b") is None
    assert cache.get(digest(newer), ".so", "cpp_fused_add_0", newer, of="a") is None
    assert [why for _, why in cache.why()] == ["never compiled before", "changed: flags"]


def test_info_counts_over_processes(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.get(KEY, ".cpp")
    cache.put(KEY, ".cpp", b"0123456789")
    for _ in range(3):
        cache.get(KEY, ".cpp")
    cache.flush()
    info = Cache(tmp_path / "cache").info()
    kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "objects").rglob("*.*"))
    assert kept > 10
    assert (info.files, info.bytes, info.hits, info.misses) == (1, kept, 3, 1)
    assert info.hit_rate == 0.75
    assert cache.clear() == 1
    info = cache.info()
    assert (info.files, info.bytes, info.hits, info.misses, info.hit_rate) == (0, 0, 0, 0, 0.0)
    assert cache.put(KEY, ".cpp", b"again") is not None
    assert cache.get(KEY, ".cpp") == b"again"


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit=1 << 30)
    keys = [f"{index:064x}" for index in range(12)]
    for index, key in enumerate(keys):
        path = cache.put(key, ".bin", bytes(1000))
        assert path is not None
        os.utime(path, (time.time() - 10_000 + index,) * 2)
    assert cache.get(keys[0], ".bin") is not None  # a use: now the youngest
    cache.limit = cache.info().bytes - 1
    cache.sweep()
    left = [key for key in keys if cache.get(key, ".bin") is not None]
    assert left == [keys[0], *keys[4:]]
    assert cache.info().bytes <= 0.8 * cache.limit


def test_what_is_written_stays_within_the_limit(tmp_path: Path) -> None:
    """Over many short processes too, each of which writes little; records and last keys count."""
    limit = 200_000
    most = 0
    for process in range(40):
        cache = Cache(tmp_path / "cache", limit=limit)
        for index in range(10):
            parts = {"source": f"{process} {index}"}
            cache.put(digest(parts), ".bin", bytes(2000), "x", parts, of=parts["source"])
            most = max(most, cache.info().bytes)
    assert 0.5 * limit < most < 1.3 * limit
    assert cache.get(digest(parts), ".bin") is not None
    names = list((tmp_path / "cache" / "names").iterdir())
    assert len(names) < 150


def test_the_limit_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), "cache_limit": 1 << 16}
    with config.patch(options):
        assert main(["cache", "info"]) == 0
    assert "of at most 64.0 KiB" in capsys.readouterr().out
    f = torch.compile(lambda x: x * 0.811 + 2, backend="hotloop", options={**options, "cache_limit": 0})
    for size in range(1, 4):  # nothing may stay, and everything works
        torch._dynamo.reset()
        x = torch.randn(size)
        torch.testing.assert_close(f(x), x * 0.811 + 2)
    assert Cache(tmp_path / "cache").info().files <= 1


def test_events_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.runtime.cache._EVENTS_LIMIT", 2000)
    cache = Cache(tmp_path / "cache")
    for index in range(200):
        cache.get(f"{index:064x}", ".cpp")
    sizes = [path.stat().st_size for path in (tmp_path / "cache").glob("events*.jsonl")]
    assert len(sizes) == 2 and sum(sizes) < 5000
    assert cache.why()[-1][0] == f"{199:064x}"[:16]


def test_a_torn_event_is_skipped(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.get(KEY, ".cpp", "first")
    with open(tmp_path / "cache" / "events.jsonl", "a") as file:
        file.write('{"event": "mi\n[1]\n')
    cache.get(KEY, ".cpp", "second")
    assert [name for name, _ in cache.why()] == ["first", "second"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(cache_dir=str(tmp_path / "cache")):
        assert main(["cache", "why"]) == 0
        assert capsys.readouterr().out == "no miss noted\n"
        cache = Cache(tmp_path / "cache")
        cache.get(KEY, ".so", "cpp_fused_add_0")
        cache.put(KEY, ".so", bytes(2048), "cpp_fused_add_0")
        cache.get(KEY, ".so", "cpp_fused_add_0")
        cache.flush()
        assert main(["cache", "info"]) == 0
        printed = capsys.readouterr().out
        assert "2.1 KiB of at most 2.0 GiB" in printed and "1 hits, 1 misses (50% hits)" in printed
        assert main(["cache", "why"]) == 0
        assert "cpp_fused_add_0: never compiled before\n" in capsys.readouterr().out
        assert main(["cache", "clear"]) == 0
        assert capsys.readouterr().out.startswith("removed 1 files")
    with pytest.raises(SystemExit):
        main(["cache", "burn"])
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5120.0 GiB",
    ]


def test_record_of_another_format_is_a_miss(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    path = cache.put(KEY, ".cpp", b"x")
    assert path is not None
    meta = path.with_name(path.name + ".meta")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    assert cache.get(KEY, ".cpp", "x") is None
    assert cache.why() == [("x", "written by another version of hotloop")]
