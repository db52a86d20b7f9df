"""`python -m tests.judge HISTORY.jsonl…`: judge histories that clients wrote down.

Several files are one history: of several clients, by the same clock. Ends with 0 if nothing was
found, with 1 if a rule is broken, and with 2 if a line is not of the format.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.judge.edn import export
from tests.judge.facts import Facts
from tests.judge.histories import Malformed, read
from tests.judge.parts import judge

SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="HISTORY.jsonl")
    parser.add_argument(
        "--edn",
        type=Path,
        metavar="FOLDER",
        help="also write it for Jepsen, with the whole history in memory",
    )
    given = parser.parse_args()
    try:
        verdict = judge(given.files)
    except Malformed as error:
        print(error, file=sys.stderr)
        return 2
    for (f, outcome), count in sorted(verdict.counts.items()):
        print(f"{f:14} {outcome:5} {count}")
    if given.edn:
        export(Facts(read(given.files)), given.edn)
        print(f"for Jepsen: {given.edn}")
    for fault in verdict.faults[:SHOWN]:
        print(f"  {fault}")
    print(f"{verdict.deliveries_count} deliveries, {len(verdict.faults)} faults")
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
