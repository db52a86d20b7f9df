"""`python -m tests.mutants`: changes the code in one place, tests it, and lists what survives.

    python -m tests.mutants --sample 300                            of all that is in scope
    python -m tests.mutants services/broker/core/moves.py           all changes of one file

All tests of `TESTS` run once without a change, which says what each of them calls. Then each change
is tried in a fork of the process that has loaded them, on those that call the changed function, the
shortest first. Only what functions do is changed, and no file is. `--with` adds other tests.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import pickle
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Final, NamedTuple

import pytest
from hypothesis import Phase, settings

from tests.mutants.source import Mutant, changed_code, changed_source, mutants_of

JUDGING: Final = ("entries", "routing", "pieces", "route", "backfill", "reserve")
CHANGED: Final = ["services/broker/core", *(f"services/router/{name}.py" for name in JUDGING)]
TESTS: Final = {
    "services/broker/core": "tests/unit/broker/core",
    "services/router": "tests/unit/router",
}
SURVIVED: Final = "SURVIVED"
NOT_CALLED: Final = "NOT CALLED"
# Of processor time and memory: a change may make a loop endless.
SECONDS_MAX: Final = 900
BYTES_MAX: Final = 4 << 30


class Function(NamedTuple):
    """A function or method of a file, which no other function contains."""

    path: str
    name: str


class Calls(NamedTuple):
    """What a test calls, and the processor time that it takes."""

    functions: frozenset[Function]
    seconds: float


class Trial:
    """A plugin of pytest that tries changes in place of one run of the tests."""

    def __init__(self, mutants: list[Mutant], sample: int | None) -> None:
        self._mutants = mutants
        self._sample = sample
        self._outcomes: Counter[str] = Counter()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        calls = observe(session)
        for mutant in self._mutants:
            if self._outcomes.total() == self._sample:
                break
            code = changed_code(mutant)
            if code is not None:
                self._try(session, mutant, code, calls)
        return True

    def pytest_sessionfinish(self) -> None:
        print(f"{self._outcomes.total()} changes tried: {dict(self._outcomes)}")

    def _try(
        self, session: pytest.Session, mutant: Mutant, code: CodeType, calls: list[Calls]
    ) -> None:
        function = Function(code.co_filename, code.co_qualname)
        chosen = [index for index, one in enumerate(calls) if function in one.functions]
        chosen.sort(key=lambda index: calls[index].seconds)
        items = [session.items[index] for index in chosen]
        seconds = 5 + 5 * sum(calls[index].seconds for index in chosen)

        def passes() -> bool:
            put(code)
            return run(session, items)

        outcome = in_fork(passes, int(seconds)) if items else NOT_CALLED
        self._outcomes[outcome] += 1
        print(
            f"{outcome}: {mutant.path}:{mutant.line} {mutant.operator}, {len(chosen)} tests",
            flush=True,
        )
        if outcome in (SURVIVED, NOT_CALLED):
            print(difference(mutant), flush=True)


def put(code: CodeType) -> None:
    """Let the function of this file, name and line run this code."""
    gc.unfreeze()
    functions = [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and function.__code__.co_qualname == code.co_qualname
        and function.__code__.co_filename == code.co_filename
        and function.__code__.co_firstlineno == code.co_firstlineno
    ]
    assert functions, f"{code.co_qualname} is not loaded"
    for function in functions:
        function.__code__ = code
    gc.freeze()


def observe(session: pytest.Session) -> list[Calls]:
    """What each test calls, from one run in a fork: later forks begin without its traces."""
    with tempfile.NamedTemporaryFile() as file:

        def passes() -> bool:
            calls = [_watch(session, item) for item in session.items]
            Path(file.name).write_bytes(pickle.dumps(calls))
            return not session.testsfailed

        if (outcome := in_fork(passes)) != SURVIVED:
            sys.exit(f"the tests fail without a change: {outcome}")
        calls: list[Calls] = pickle.loads(Path(file.name).read_bytes())
        return calls


def _watch(session: pytest.Session, item: pytest.Item) -> Calls:
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        codes.add(frame.f_code)

    began_s = time.process_time()
    sys.setprofile(note)
    run(session, [item])
    sys.setprofile(None)
    seconds = time.process_time() - began_s
    functions = {
        Function(code.co_filename, code.co_qualname.partition(".<locals>")[0]) for code in codes
    }
    return Calls(frozenset(one for one in functions if "/services/" in one.path), seconds)


def run(session: pytest.Session, items: list[pytest.Item]) -> bool:
    """Whether all of them pass; ends with the first that fails."""
    for item in items:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            return False
    return True


def in_fork(passes: Callable[[], bool], seconds: int = SECONDS_MAX) -> str:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES_MAX, BYTES_MAX))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        code = 2
        try:
            code = 0 if passes() else 1
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return "endless"
    return {0: SURVIVED, 1: "killed"}.get(os.WEXITSTATUS(status), "broken")


def difference(mutant: Mutant) -> str:
    before, after = mutant.path.read_text(), changed_source(mutant)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(f"    {line}" for line in lines if not line.startswith(("---", "+++", "@@")))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", default=CHANGED, help="Files or folders to change.")
    parser.add_argument("--sample", type=int, help="How many changes; all without it.")
    parser.add_argument("--seed", type=int, default=1, help="Of the sample.")
    parser.add_argument("--with", dest="tests", nargs="*", default=[], help="More tests.")
    options = parser.parse_args()
    files = sorted({file for path in options.paths for file in files_of(Path(path))})
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(options.seed).shuffle(mutants)
    tests = {test for code, test in TESTS.items() for file in files if file.is_relative_to(code)}
    settings.register_profile(
        "mutants",
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
    flags = ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
    # This module imports Hypothesis before pytest can rewrite it.
    flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not compose and not proof"]
    sys.exit(
        pytest.main([*flags, *sorted(tests), *options.tests], [Trial(mutants, options.sample)])
    )


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    main()
