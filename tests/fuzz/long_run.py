"""Random programs for a given time, in many processes.

What comes in: minutes, processes, the first seed. What goes out: how many programs were judged, and every
seed that differs, with its program made small: on the terminal at the end, and in a file that is rewritten at
each find. What holds in between: a process answers for one group of seeds at a time; one that ends or keeps
silent is replaced, and its seeds are run one by one, so that a crash has a seed too.

    PYTHONPATH=src:tests python tests/fuzz/long_run.py --minutes 9 --processes 16 --seed 0 --results found.txt

Next: fuzz.py, which judges a group.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fuzz import GROUP, outcomes, shrink
from generator import generate

_SILENCE = 240.0  # seconds without a word, after which a process is taken for hung
_ALIKE = 2  # failures of one kind that a process makes small
_LIFE = 60  # groups, after which a process is replaced: what it has compiled stays loaded


# --- a process that judges ----------------------------------------------------------------------------------


def serve(shrinking: float) -> None:
    """Judge the groups of seeds that come in, one line of JSON each, and answer in lines of JSON."""
    kinds: Counter[str] = Counter()
    for line in sys.stdin:
        seeds = json.loads(line)
        _say({"ready": False})
        for seed, (program, failure, judged) in zip(seeds, outcomes(seeds), strict=True):
            answer = {"seed": seed, "judged": judged, "kinds": program.kinds()}
            _say(answer)
            if failure is None:
                continue
            kind = failure.engine + re.sub(r"\d.*", "", failure.text)
            kinds[kind] += 1
            found = {"failed": seed, "engine": failure.engine, "text": failure.text, "program": str(program)}
            _say(found)
            if kinds[kind] <= _ALIKE:
                _say({**found, "shrunk": str(shrink(failure, shrinking))})
        _say({"ready": True})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# --- the one that hands out seeds ---------------------------------------------------------------------------


@dataclass
class Found:
    """All that the processes have said."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)

    def hear(self, said: dict[str, Any]) -> None:
        if "seed" in said:
            self.counts["judged" if said["judged"] else "not judged"] += 1
            self.counts.update(said["kinds"] if said["judged"] else ())
        elif "failed" in said:
            self.failures[said["failed"]] = said

    def summary(self, seconds: float, last: int) -> str:
        lines = [f"{dict(self.counts)} in {seconds:.0f} s; the next seed is {last}"]
        lines.append(f"{len(self.failures)} seeds differ: {' '.join(map(str, sorted(self.failures)))}")
        for seed, said in sorted(self.failures.items()):
            lines.append(f"--- seed {seed} {said['engine']}: {said['text']}")
            lines.append(said.get("shrunk") or said["program"])
        return "\n".join(lines) + "\n"


class Worker:
    """A process, and a thread that reads what it says."""

    def __init__(self, command: Sequence[str], words: queue.Queue[Any]) -> None:
        self.groups = 0
        self.heard = time.monotonic()
        self.open: list[int] = []  # seeds without an answer
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )  # fmt: skip
        threading.Thread(target=self._read, args=(words,), daemon=True).start()

    def _read(self, words: queue.Queue[Any]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                words.put((self, json.loads(line)))
        words.put((self, None))

    def give(self, seeds: Sequence[int]) -> None:
        assert self._process.stdin is not None
        self.open = list(seeds)
        self.heard = time.monotonic()
        self.groups += 1
        try:
            self._process.stdin.write(json.dumps(self.open) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the thread that reads hears of its end

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def why(self) -> str:
        """How it ended, with its last words."""
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read()[-600:].strip()
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"{how}: {last}"


class Run:
    """Processes at work on groups of seeds until time is up."""

    def __init__(self, given: argparse.Namespace, command: Sequence[str]) -> None:
        self._given = given
        self._command = command
        self._start = time.monotonic()
        self._next = given.seed
        self._alone: deque[int] = deque()  # seeds of processes that ended
        self._words: queue.Queue[Any] = queue.Queue()
        self._workers: set[Worker] = set()
        self.found = Found()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def summary(self) -> str:
        return self.found.summary(self.seconds, self._next)

    def seeds(self) -> list[int]:
        """What to judge next."""
        if self._alone:
            return [self._alone.popleft()]
        if self.seconds > self._given.minutes * 60:
            return []
        first, self._next = self._next, self._next + GROUP
        return list(range(first, self._next))

    def start_one(self) -> None:
        seeds = self.seeds()
        if not seeds:
            return
        worker = Worker(self._command, self._words)
        self._workers.add(worker)
        worker.give(seeds)

    def wait(self) -> None:
        for _ in range(self._given.processes):
            self.start_one()
        spoken = 0.0
        while self._workers:
            try:
                worker, said = self._words.get(timeout=5)
                self.hear(worker, said)
            except queue.Empty:
                pass
            for worker in list(self._workers):
                if time.monotonic() - worker.heard > _SILENCE:
                    worker.kill()
            if self.seconds - spoken > 60:
                spoken = self.seconds
                failed = sorted(self.found.failures)
                sys.stdout.write(f"... {spoken:.0f} s: {dict(self.found.counts)}, different: {failed}\n")
                sys.stdout.flush()
            if self.seconds > self._given.minutes * 60 + self._given.grace:
                for worker in list(self._workers):
                    worker.kill()
                break

    def hear(self, worker: Worker, said: dict[str, Any] | None) -> None:
        worker.heard = time.monotonic()
        if said is None:
            self.ended(worker)
            return
        self.found.hear(said)
        if "seed" in said:
            worker.open.remove(said["seed"])
        if "failed" in said:
            self.write()
        if not said.get("ready"):
            return
        seeds = self.seeds() if worker.groups < _LIFE else []
        if seeds:
            worker.give(seeds)
        else:
            worker.dismiss()

    def ended(self, worker: Worker) -> None:
        self._workers.discard(worker)
        why = worker.why()
        if len(worker.open) == 1 and worker.groups == 1:
            (seed,) = worker.open
            program = str(generate(seed))
            self.found.hear({"failed": seed, "engine": "process", "text": why, "program": program})
            self.write()
        else:
            self._alone.extend(worker.open)
        self.start_one()

    def write(self) -> None:
        if self._given.results:
            Path(self._given.results).write_text(self.summary(), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9.0, help="no group is begun after these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--results", help="a file for the summary")
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds to make a failure small")
    parser.add_argument("--grace", type=float, default=45.0, help="seconds for groups begun in time")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Judge for the given time; the exit status is 1 where a program differs."""
    given = parser().parse_args()
    if given.serve is not None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        serve(given.serve)
        return
    cache = tempfile.mkdtemp(prefix="hotloop-fuzz-")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ["HOTLOOP_CACHE_DIR"] = cache
    run = Run(given, [sys.executable, __file__, "--serve", str(given.shrink)])
    try:
        run.wait()
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    run.write()
    sys.stdout.write(run.summary())
    sys.exit(1 if run.found.failures else 0)


if __name__ == "__main__":
    main()
