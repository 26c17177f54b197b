"""The command `hotloop`.

In: its arguments. Out: text for a person, and an exit status. Next: the tool of each subcommand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hotloop import config
from hotloop.runtime.cache import Cache, count_reasons, format_bytes
from hotloop.tools.doctor import examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status, 0 when all is well."""
    parser = argparse.ArgumentParser(prog="hotloop", description="Tools of the hotloop compiler.")
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="what is kept on disk")
    cache.add_argument(
        "action",
        choices=("info", "clear", "why"),
        help="info: sizes and hit rate; clear: remove everything; why: the reason of each miss",
    )
    cache.add_argument("--last", type=int, default=20, metavar="N", help="why: show the last N misses (20)")
    commands.add_parser("doctor", help="check compiler, OpenMP, CPU, cache and GPU, and run a small function")
    parsed = parser.parse_args(arguments)
    if parsed.command == "doctor":
        return _doctor()
    return _cache(parsed.action, parsed.last)


def _doctor() -> int:
    bad = False
    for finding in examine():
        _say(str(finding))
        bad = bad or finding.bad
    return 1 if bad else 0


def _cache(action: str, last: int) -> int:
    cache = Cache(config.cache_dir, config.cache_limit)
    if action == "info":
        info = cache.info()
        _say(f"folder    {info.directory}")
        _say(f"files     {info.files}")
        _say(f"size      {format_bytes(info.bytes)} of at most {format_bytes(info.limit)}")
        _say(f"look-ups  {info.hits} hits, {info.misses} misses ({info.hit_rate:.0%} hits)")
    elif action == "clear":
        _say(f"removed {cache.clear()} files from {cache.directory}")
    else:
        misses = cache.why()
        for reason, count in count_reasons(misses):
            _say(f"{count:6}  {reason}")
        for name, reason in misses[-last:] if last > 0 else []:
            _say(f"{name}: {reason}")
        if not misses:
            _say("no miss noted")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
