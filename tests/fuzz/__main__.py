"""`make fuzz`: fuzzes what reads bytes of others, guided by coverage.

    python -m tests.fuzz --seconds 300            every target, one after the other
    python -m tests.fuzz record --seconds 600     one of them
    python -m tests.fuzz record --replay FILE     one input, without atheris

Inputs that reach new code go into `tests/fuzz/corpus/<target>/`: commit them. An input that crashes
a target is left beside them as `crash-…`, and the exit code is 1: fix what it found, and keep it.
Needs requirements/fuzz.txt, which `make fuzz` installs.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"

INPUT_BYTES_MAX: Final = 4096
"""Longer inputs reach no other code, and would make the corpus large."""

INPUTS_MAX: Final = 250
"""Inputs of a target that the corpus keeps: they are replayed in each `make test`."""

TARGETS: Final = (
    "record",
    "key",
    "log-entry",
    "pack",
    "arrow",
    "request",
    "expression",
    "queue-file",
    "event",
    "s3-notification",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", choices=TARGETS, help="all where none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--replay", type=Path, help="run this one input")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: by the time")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return _fuzz(given.target, given.inside)
    if given.replay is not None:
        return _replay(given.target, given.replay)
    crashed = [
        target
        for target in ([given.target] if given.target else TARGETS)
        if not _run(target, given.seconds, given.seed)
    ]
    if crashed:
        print(f"crashes: {', '.join(crashed)}", file=sys.stderr)
    return 1 if crashed else 0


def _replay(target: str, file: Path) -> int:
    import_module("tests.fuzz.targets").TARGETS[target](file.read_bytes())
    return 0


def _run(target: str, seconds: int, seed: int) -> bool:
    """Fuzz one target in a process of its own, and keep what is new; whether nothing crashed."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slatemq-fuzz-") as name:
        new = Path(name)
        print(f"{target}: {seconds} s, from {len(list(folder.iterdir()))} inputs", flush=True)
        flags = [
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-artifact_prefix={folder}/",
            f"-seed={seed}",
            "-timeout=120",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        command = [sys.executable, "-m", "tests.fuzz", target, "--inside", *flags]
        fuzzed = subprocess.run([*command, str(new), str(folder)], check=False)
        if fuzzed.returncode == 0:
            _keep(new, folder)
    return fuzzed.returncode == 0


def _keep(new: Path, folder: Path) -> None:
    """Keep the inputs that reached new code, the smallest first, as long as there is room."""
    room = INPUTS_MAX - len(list(folder.iterdir()))
    found = sorted((path.read_bytes() for path in new.iterdir()), key=len)
    for content in found[: max(room, 0)]:
        (folder / hashlib.sha1(content, usedforsecurity=False).hexdigest()).write_bytes(content)
    print(f"  {len(found)} inputs reached new code, {max(room, 0)} had room", flush=True)


def _fuzz(target: str, flags: list[str]) -> int:
    # Loaded here: the rest of this module runs without it.
    atheris: Any = import_module("atheris")
    with atheris.instrument_imports(include=["libs", "services", "slatemq"]):
        function = import_module("tests.fuzz.targets").TARGETS[target]
    atheris.Setup([sys.argv[0], *flags], function)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
