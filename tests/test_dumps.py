"""Dumps and logs: the files users rely on, text made only for a reader, and no compile failed by a disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.config import Config
from hotloop.dumps import ARTIFACTS, FILES, Kind, Log
from hotloop.errors import OptionError


def never() -> str:
    raise AssertionError("text was made that nobody reads")


def dumping(path: Path, graph_id: int = 0, kind: Kind = "inference") -> Log:
    return Log(Config(debug=True, debug_dir=str(path)), graph_id=graph_id, kind=kind)


def test_a_log_that_is_off_makes_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Log(Config()) as log:
        for name in FILES:
            log.stage(name, never)
        for name in ARTIFACTS:
            log.artifact(name, never)
        log.refuse_fusion("a", "b", never)
        assert log.refusals == ()
        assert log.directory is None
    assert list(tmp_path.iterdir()) == []


def test_dumps_have_the_names_users_rely_on(tmp_path: Path) -> None:
    with dumping(tmp_path, 3, "forward") as log:
        for name in FILES:
            log.stage(name, lambda name=name: f"text of {name}")
        log.stage("memory", lambda: "arena")
        log.stage("loops", lambda: "nest")
        log.stage("output_code", lambda: "second")
        log.refuse_fusion("op0", "op1", "sizes differ")
    folder = tmp_path / "hotloop" / "model__3_forward_0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "01_memory.txt",
        "02_loops.txt",
        "fusion_refused.txt",
        "fx_graph_readable.py",
        "fx_graph_runnable.py",
        "fx_graph_transformed.py",
        "ir_post_fusion.txt",
        "ir_pre_fusion.txt",
        "output_code.py",
        "output_code_1.py",
    ]
    assert (folder / "ir_pre_fusion.txt").read_text() == "text of ir_pre_fusion"
    assert (folder / "output_code_1.py").read_text() == "second"
    assert (folder / "fusion_refused.txt").read_text() == "op0 + op1: sizes differ\n"


def test_each_compile_has_its_own_folder(tmp_path: Path) -> None:
    names = [log.directory.name for log in (dumping(tmp_path), dumping(tmp_path)) if log.directory]
    assert names == ["model__0_inference_0", "model__0_inference_1"]


def test_refusals_are_written_once_and_survive_a_failed_compile(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), dumping(tmp_path) as log:
        log.refuse_fusion("a", "b", "first")
        log.stage("ir_post_fusion", lambda: "x")
        log.refuse_fusion("c", "d", lambda: "second")
        raise ZeroDivisionError
    file = tmp_path / "hotloop" / "model__0_inference_0" / "fusion_refused.txt"
    assert file.read_text().splitlines() == ["a + b: first", "c + d: second"]


def test_the_file_says_that_nothing_was_refused(tmp_path: Path) -> None:
    with dumping(tmp_path, 1) as log:
        log.stage("ir_post_fusion", lambda: "x")
    assert (tmp_path / "hotloop" / "model__1_inference_0" / "fusion_refused.txt").read_text() == (
        "nothing was refused\n"
    )
    with pytest.raises(ZeroDivisionError), dumping(tmp_path, 2) as log:
        log.stage("ir_pre_fusion", lambda: "x")
        raise ZeroDivisionError  # before fusion: nothing is known about refusals
    assert not (tmp_path / "hotloop" / "model__2_inference_0" / "fusion_refused.txt").exists()


def test_refusals_can_be_recorded_without_dumps() -> None:
    log = Log(Config(), record=True)
    log.refuse_fusion("a", "b", "peak memory")
    assert [str(refusal) for refusal in log.refusals] == ["a + b: peak memory"]
    assert log.directory is None


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "hotloop").write_text("a file where the folder should be")
    log = dumping(tmp_path)
    with pytest.warns(UserWarning, match="cannot write its dumps") as caught:
        log.stage("ir_pre_fusion", lambda: "x")
        log.stage("ir_post_fusion", never)
        log.close()
    assert len(caught) == 1


def test_an_unknown_artifact_is_named() -> None:
    with pytest.raises(OptionError, match="did you mean 'fusion'"):
        Log(Config()).artifact("fusions", never)


SCRIPT = """
import torch
from hotloop.config import resolve
from hotloop.dumps import Log
if {set_logs!r}:
    torch._logging.set_logs(**{set_logs!r})
with Log(resolve(), graph_id=7) as log:
    for name in ("output_code", "ir_pre_fusion", "fx_graph_transformed"):
        log.stage(name, lambda: "STAGE " + name)
    for name in ("kernel_code", "schedule", "perf_hints", "autotuning", "fusion"):
        log.artifact(name, lambda: "ARTIFACT " + name)
    log.refuse_fusion("u", "v", "REASON")
"""


def lines_of(
    cwd: Path, torch_logs: str, set_logs: dict[str, bool] | None = None, **environment: str
) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    env |= environment | ({"TORCH_LOGS": torch_logs} if torch_logs else {})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(set_logs=set_logs or {})],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return [re.sub(r".*model__7_inference(_0)?: ", "", line) for line in done.stderr.splitlines()]


def test_torch_logs_shows_what_was_asked_for_once(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "output_code,fusion,schedule,post_grad_graphs") == [
        "STAGE output_code",
        "STAGE fx_graph_transformed",
        "ARTIFACT schedule",
        "ARTIFACT fusion",
        "not fused: u + v: REASON",
    ]
    assert list(tmp_path.iterdir()) == []


def test_set_logs_after_import_works_as_well(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "", {"kernel_code": True}) == ["ARTIFACT kernel_code"]


def test_torch_compile_debug_dumps_beside_dynamo(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "", TORCH_COMPILE_DEBUG="1")
    (run,) = (tmp_path / "torch_compile_debug").glob("run_*-pid_*")
    folder = run / "hotloop" / "model__7_inference_0"
    assert lines == [f"dumps of every stage are written to {folder}"]
    assert (run / "hotloop" / "model__7_inference_0" / "output_code.py").read_text() == "STAGE output_code"
