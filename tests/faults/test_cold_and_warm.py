"""The cache through torch.compile: a second process compiles nothing, no damage reaches a result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hotloop import backend
from hotloop.runtime import build as build_module
from hotloop.runtime.cache import Cache

SCRIPT = """
import torch
def f(x, w):
    return torch.softmax(x @ w, -1).relu().sum(0) * 0.5
x, w = torch.ones(6, 8), torch.linspace(-1, 1, 40).reshape(8, 5)
g = torch.compile(f, backend="hotloop")
torch.testing.assert_close(g(x, w), f(x, w))
x.requires_grad_()
assert torch.autograd.grad(g(x, w).sum(), x)[0].shape == x.shape
"""


def in_a_process(folder: Path, **environment: str) -> None:
    env = {**os.environ, "HOTLOOP_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    in_a_process(tmp_path / "cache")
    cold = Cache(tmp_path / "cache").info()
    assert cold.misses > 0 and cold.files > 0
    in_a_process(tmp_path / "cache")
    warm = Cache(tmp_path / "cache").info()
    assert warm.misses == cold.misses and warm.hits > cold.hits
    assert warm.files == cold.files and warm.bytes == cold.bytes


# ---------------------------------------------------------------- a folder that changes under the process


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget(monkeypatch)
    yield
    torch._dynamo.reset()


def compiled(value: float, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: x * value - 1, backend="hotloop", options={"cache_dir": str(folder)})


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has loaded and looked up, as if it were another one."""
    torch._dynamo.reset()
    monkeypatch.setattr(build_module, "_LOADED", {})
    backend._builder.cache_clear()


def test_a_folder_deleted_between_calls_and_between_compiles(tmp_path: Path) -> None:
    folder, x = tmp_path / "cache", torch.randn(9)
    first = compiled(0.601, folder)
    torch.testing.assert_close(first(x), x * 0.601 - 1)
    shutil.rmtree(folder)
    torch.testing.assert_close(first(x), x * 0.601 - 1)
    torch.testing.assert_close(compiled(0.602, folder)(x), x * 0.602 - 1)
    assert list(folder.rglob("*.so"))


@pytest.mark.parametrize("damage", [b"", b"not a library", b"\x7fELF\x02\x01\x01" + bytes(200)])
def test_a_damaged_library_is_compiled_again(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, x = tmp_path / "cache", torch.randn(9)
    torch.testing.assert_close(compiled(0.603, folder)(x), x * 0.603 - 1)
    (library,) = folder.rglob("*.so")
    whole = library.read_bytes()
    # A new file: the old one is mapped into this process.
    library.unlink()
    library.write_bytes(damage)
    forget(monkeypatch)
    torch.testing.assert_close(compiled(0.603, folder)(x), x * 0.603 - 1)
    assert library.read_bytes() == whole
    assert any("corrupt" in why for _, why in Cache(folder).why())


def test_a_library_whose_record_was_damaged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, x = tmp_path / "cache", torch.randn(9)
    torch.testing.assert_close(compiled(0.604, folder)(x), x * 0.604 - 1)
    (library,) = folder.rglob("*.so")
    for file in library.parent.iterdir():
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[: len(data) // 2])
    forget(monkeypatch)
    torch.testing.assert_close(compiled(0.604, folder)(x), x * 0.604 - 1)
    records = [file for file in library.parent.iterdir() if file.name.startswith(library.stem)]
    assert any(json.loads(file.read_bytes()) for file in records if file.name.endswith(".so.meta"))
