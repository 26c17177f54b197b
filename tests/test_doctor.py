"""`hotloop doctor` and `hotloop cache`: what is wrong with a machine, in one line each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.runtime.cache import Cache
from hotloop.tools.cli import main
from hotloop.tools.doctor import Finding, examine


def by_name() -> dict[str, Finding]:
    return {finding.what: finding for finding in examine()}


def test_a_machine_that_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["compiler", "openmp", "cpu", "cache", "gpu", "function"]
    assert re.search(
        r"equal to eager \((no element differs|largest difference .*e-\d\d, relative .*e-\d\d);", lines[-1]
    )


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BAD   compiler  CXX names the C++ compiler '/nonexistent/g++'")
    assert "install g++" in lines[0]
    assert [line.split()[1] for line in lines] == ["compiler", "openmp", "cpu", "cache", "gpu", "function"]
    for line in (lines[1], lines[5]):
        assert line.startswith("skip") and line.endswith("skipped (no compiler)")


def test_a_compiler_that_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("BAD   compiler  /bin/false compiles no function") and "set CXX" in lines[0]
    assert all(lines[k].startswith("skip") for k in (1, 5))


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with hotloop.config.patch(cache_dir=str(tmp_path / "file")):
        found = by_name()
    assert "HOTLOOP_CACHE_DIR" in str(found["cache"]) and not found["cache"].bad
    assert found["function"].mend is None


def test_a_small_cache_is_not_nothing(tmp_path: Path) -> None:
    with hotloop.config.patch(cache_dir=str(tmp_path / "cache")):
        Cache(hotloop.config.cache_dir).put("ab" + "0" * 62, ".bin", b"x" * (240 << 10))
        assert "240.1 KiB used" in by_name()["cache"].found


def test_a_narrower_width_is_noted() -> None:
    with hotloop.config.patch({"cpp.simd": "scalar"}):
        found = by_name()
    if hotloop.config.cpp.simd != "scalar" and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert str(found["cpu"]).startswith("note  cpu") and "scalar is used" in str(found["cpu"])


def test_the_cache_can_be_looked_at_and_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hotloop.config.patch(check=False, cache_dir=str(tmp_path / "cache")):
        torch._dynamo.reset()
        torch.compile(lambda x: x * 0.7071 - 3, backend="hotloop")(torch.randn(5))
        assert main(["cache", "info"]) == 0
        assert f"folder    {tmp_path / 'cache'}" in capsys.readouterr().out
        assert main(["cache", "why"]) == 0
        shown = capsys.readouterr().out
        assert "inference graph, 2 operators from " in shown and "x * 0.7071 - 3" in shown
        assert "cpp_fused_mul_sub_0: never compiled before\n" in shown
        assert main(["cache", "clear"]) == 0
        assert "removed" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*.so"))
