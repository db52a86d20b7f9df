"""Writes an instance of very many messages straight to a store, which our services then serve.

python -m benchmarks.volume file:///tmp/volume --waiting 1e7
python -m benchmarks.volume file:///tmp/volume --waiting 9e6 --delayed 1e6 --queues 100
python -m benchmarks.volume file:///tmp/volume --done 9e6 --failed 1e5 --expired 9e5 --scattered
"""

from __future__ import annotations

import argparse
import asyncio
import resource

from benchmarks.volume import Volume, write


def _number(text: str) -> int:
    return int(float(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.volume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", help="URL of the instance's root; there must be none yet")
    base = Volume()
    for name, what in (
        ("waiting", "messages that wait to be claimed"),
        ("delayed", "messages that fall due within hours"),
        ("in_flight", "messages claimed by a consumer that is gone"),
        ("done", "messages acked"),
        ("failed", "dead letters, with their attempts"),
        ("expired", "messages that wait past their retention"),
        ("cleaned", "messages before all others of which nothing is left"),
        ("queues", "how many queues share them in turn"),
        ("payload_bytes", "bytes of each payload"),
        ("entry", "messages of one commit"),
        ("done_retention_s", "how long queues keep what is done, in seconds"),
    ):
        flag = "--" + name.replace("_", "-")
        default = getattr(base, name)
        parser.add_argument(flag, type=_number, default=default, help=f"{what}: {default}")
    parser.add_argument("--days", type=float, default=base.days, help="how far back they came")
    parser.add_argument("--queue", default=base.queue, help=f"name of the queues: {base.queue}")
    parser.add_argument(
        "--scattered",
        action="store_true",
        help="what became of the messages does not depend on their age",
    )
    return parser


def main() -> None:
    """Writes the instance, and prints how long that took."""
    given = vars(_parser().parse_args())
    root = given.pop("root")
    volume = Volume(**given)
    for name, wrote in asyncio.run(write(root, volume)).items():
        rate = volume.stored / wrote.seconds
        print(f"{name:7} {wrote.rows:10,} rows {wrote.seconds:7.1f} s {rate:9,.0f} messages/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak {peak} MiB")


if __name__ == "__main__":
    main()
