"""What every test starts from: a cache of its own, verifiers on, fixed seeds, and golden files."""

from __future__ import annotations

import difflib
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[[str, str], None]

_made = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/ with what the tests get"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A fresh cache for each run, unless TEST_CACHE_DIR names one: that is how a warm run is tested."""
    os.environ["HOTLOOP_CHECK"] = "1"
    # Threads of several test processes share the cores: one that waits must not keep another from working.
    # Read when a worker, or a test's own process, loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    given = os.environ.get("TEST_CACHE_DIR")
    if given:
        os.environ["HOTLOOP_CACHE_DIR"] = os.path.abspath(given)
    elif not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the controller's
        config.stash[_made] = os.environ["HOTLOOP_CACHE_DIR"] = tempfile.mkdtemp(prefix="hotloop-test-")


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_made, None)
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers whichever tests ran before."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares with tests/golden/<name>; `pytest --update-golden` rewrites the file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(
                f"{path} is missing: make it with pytest --update-golden, and read it before committing"
            )
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            lines = expected.splitlines(), text.splitlines()
            diff = "\n".join(difflib.unified_diff(*lines, f"golden/{name}", "this run", lineterm=""))
            pytest.fail(
                f"differs from golden/{name} (pytest --update-golden accepts it):\n{diff}", pytrace=False
            )

    return compare
