"""`make fuzz`: fuzzes what reads bytes of others, guided by coverage.

    python -m tests.fuzz --seconds 300            every target, one after the other
    python -m tests.fuzz record --seconds 600     one of them
    python -m tests.fuzz record --replay FILE     one input, without atheris

After each target its corpus, `tests/fuzz/corpus/<target>/`, and the inputs that reached new code
are merged into a set of which each input reaches something that the smaller ones do not: commit it.
An input that crashes a target is left beside them as `crash-…`, and the exit code is 1: fix what it
found, and give the file a name that says what it is. Files with such names stay as they are.

At the end stands the table of docs/reliability.md. Needs requirements/fuzz.txt, which `make fuzz`
installs.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"

INPUT_BYTES_MAX: Final = 4096
"""Longer inputs reach no other code, and would make the corpus large."""

INPUTS_MAX: Final = 400
"""Inputs of a target that the corpus keeps: they are replayed in each `make test`."""

CORPUS_BYTES_MAX: Final = 64 << 10
"""Of one target's inputs together, so that all of them stay far below a megabyte."""

TARGETS: Final = (
    "record",
    "key",
    "log-entry",
    "pack",
    "arrow",
    "object",
    "request",
    "answer",
    "token",
    "http",
    "expression",
    "queue-file",
    "document",
    "encryption",
    "event",
    "delivery",
    "s3-notification",
)

_DIGEST: Final = re.compile("[0-9a-f]{40}")
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units: +(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", choices=TARGETS, help="all where none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--replay", type=Path, help="run this one input")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations; 0: by the time")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return _fuzz(given.target, given.inside)
    if given.replay is not None:
        return _replay(given.target, given.replay)
    targets = [given.target] if given.target else TARGETS
    tried = {target: _run(target, given.seconds, given.seed) for target in targets}
    print("\n| target | inputs tried | in the corpus | bytes |\n|---|---|---|---|")
    for target, count in tried.items():
        sizes = [path.stat().st_size for path in (CORPUS / target).iterdir()]
        print(f"| `{target}` | {count or 0:,} | {len(sizes)} | {sum(sizes):,} |")
    crashed = [target for target, count in tried.items() if count is None]
    if crashed:
        print(f"crashes: {', '.join(crashed)}", file=sys.stderr)
    return 1 if crashed else 0


def _replay(target: str, file: Path) -> int:
    import_module("tests.fuzz.targets").TARGETS[target](file.read_bytes())
    return 0


def _run(target: str, seconds: int, seed: int) -> int | None:
    """Fuzz one target, and keep what is new; how many inputs were tried, None after a crash."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    before = len(list(folder.iterdir()))
    with tempfile.TemporaryDirectory(prefix="slatemq-fuzz-") as name:
        new, merged = Path(name, "new"), Path(name, "merged")
        new.mkdir()
        merged.mkdir()
        fuzzed = _libfuzzer(
            target,
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-artifact_prefix={folder}/",
            "-timeout=120",
            "-print_final_stats=1",
            "-verbosity=0",
            new,
            folder,
        )
        executed = _EXECUTED.search(fuzzed.stderr)
        if fuzzed.returncode or executed is None:
            print(fuzzed.stderr, file=sys.stderr)
            return None
        count = len(list(new.iterdir()))
        print(f"{target}: {before} inputs, {count} more reached new code", flush=True)
        result = _libfuzzer(target, "-merge=1", merged, folder, new)
        if result.returncode:
            print(result.stderr, file=sys.stderr)
            return None
        _keep(folder, (path.read_bytes() for path in merged.iterdir()))
    return int(executed[1])


def _keep(folder: Path, contents: Iterable[bytes]) -> None:
    """Make these the inputs of a folder, the smallest first, as far as there is room."""
    for path in folder.iterdir():
        if _DIGEST.fullmatch(path.name):
            path.unlink()
    named = [path.read_bytes() for path in folder.iterdir()]
    found = sorted((content for content in contents if content not in named), key=len)
    size_bytes, kept = 0, 0
    for content in found[:INPUTS_MAX]:
        size_bytes += len(content)
        if size_bytes > CORPUS_BYTES_MAX:
            break
        (folder / hashlib.sha1(content, usedforsecurity=False).hexdigest()).write_bytes(content)
        kept += 1
    left_out = f", {len(found) - kept} have no room" if kept < len(found) else ""
    print(f"  {kept} inputs reach all that was reached, {len(named)} more have names{left_out}")


def _libfuzzer(target: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run libFuzzer on a target. It starts itself again to merge, so it gets a file to execute."""
    with tempfile.TemporaryDirectory(prefix="slatemq-fuzz-") as name:
        script = Path(name, "fuzz")
        python = shlex.join([sys.executable, "-m", "tests.fuzz", target, "--inside", str(script)])
        script.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        script.chmod(0o700)
        return subprocess.run(
            [script, f"-max_len={INPUT_BYTES_MAX}", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )


def _fuzz(target: str, command: list[str]) -> int:
    logging.disable()  # what is refused is logged, too
    # Loaded here: the rest of this module runs without it.
    atheris: Any = import_module("atheris")
    with atheris.instrument_imports(include=["libs", "services", "slatemq"]):
        function = import_module("tests.fuzz.targets").TARGETS[target]
        function.run  # noqa: B018 - loads it, to be instrumented
    atheris.Setup(command, function)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
