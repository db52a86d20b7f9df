"""Stores of released versions, kept to be opened, drained and verified for ever.

`NAME.tar.gz` is the root of an instance as a killed version NAME left it, `NAME.json` what must be
in it. `python -m tests.kept_stores NAME` makes both with the code of this checkout: at each tag,
with the tag's name. Until the first tag the one store is `unreleased`: a commit that changes what
is stored makes it again with the same command. What a tag has made is never made again.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import slatemq

FOLDER: Final = Path(__file__).parent
LARGE: Final = "large"
"""The name of a payload that has an object of its own."""

_LARGE_PAYLOAD: Final = "large " * 12_000

LATER_S: Final = 60
"""From then on, all is due that was delayed when the store was made."""


@dataclass
class Contents:
    """Payloads by queue: that can be claimed, that are done, and that are dead letters."""

    claimable: dict[str, list[str]] = field(default_factory=dict)
    done: dict[str, list[str]] = field(default_factory=dict)
    dead: dict[str, list[str]] = field(default_factory=dict)


# Python 3.11 has it from 3.11.4 on.
DATA_FILTER: Any = getattr(tarfile, "data_filter", lambda member, path: member)


def names() -> list[str]:
    """All stores that are kept."""
    return sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz"))


def unpack(name: str, folder: Path) -> Contents:
    """The store, below the folder, and what must be in it."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as packed:
        packed.extraction_filter = DATA_FILTER
        packed.extractall(folder)
    return Contents(**json.loads((FOLDER / f"{name}.json").read_text()))


def pack(name: str, root: Path, contents: Contents) -> None:
    """Keep a store."""

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if entry.name.split("/")[0] == "logs" else entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=9) as out:
        for path in sorted(root.iterdir()):
            out.add(path, path.name, filter=wanted)
    (FOLDER / f"{name}.tar.gz").write_bytes(packed.getvalue())
    text = json.dumps(asdict(contents), indent=1, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n")


async def fill(client: slatemq.Client) -> Contents:
    """Make messages in every state, which never expire; returns what then is where."""
    contents = Contents()
    for queue, more in (
        ("waiting", {"priority": "int(headers.p)"}),
        ("later", {"default_delay": LATER_S}),
        ("leased", {}),
        ("done", {}),
        ("dead", {"max_attempts": 1}),
        ("pushed", {"with_queue": "done"}),
        ("redriven", {"max_attempts": 1}),
    ):
        await client.create_queue(
            queue, backoff=slatemq.Backoff.none(), done_retention=0, failed_retention=0, **more
        )
        texts = [f"{queue} {n}" for n in range(5)] if queue != "pushed" else []
        if queue == "waiting":
            texts.append(LARGE)
        for n, text in enumerate(texts):
            await client.publish(_payload_of(text), {"queue": queue, "p": str(n)}, retention=0)
        contents.claimable[queue] = texts
    for message in await _claimed(client, "leased", 5):
        assert message.attempts_count == 1  # its lease is left to end
    for n, message in enumerate(await _claimed(client, "done", 5)):
        commands: list[slatemq.Complete | slatemq.Push] = [slatemq.Complete(message)]
        commands.append(slatemq.Push("pushed", f"pushed {n}", retention=0))
        await client.execute(commands)
        contents.claimable["pushed"].append(f"pushed {n}")
    contents.done["done"] = contents.claimable.pop("done")
    for queue in ("dead", "redriven"):
        for message in await _claimed(client, queue, 5):
            await message.nack("it does not work")
    contents.dead["dead"] = contents.claimable.pop("dead")
    await client.wait_redrive(await client.start_redrive("redriven"))
    await client.delete_queue((await client.create_queue("gone")).queue_id)
    return contents


async def _claimed(client: slatemq.Client, queue: str, count: int) -> list[slatemq.Received]:
    claimed: list[slatemq.Received] = []
    while len(claimed) < count:
        claimed += await client.claim(queue, count, wait=10)
    return claimed


def text_of(payload: bytes) -> str:
    """As it stands in the contents."""
    text = payload.decode()
    return LARGE if text == _LARGE_PAYLOAD else text


def _payload_of(text: str) -> str:
    return _LARGE_PAYLOAD if text == LARGE else text


async def texts_in(
    client: slatemq.Client, queue: str, state: Literal["done", "failed"]
) -> AsyncIterator[str]:
    """Of the entries of a queue in a state."""
    async for entry in client.list_entries(queue, state, view="full"):
        assert entry.message is not None
        yield text_of(entry.message.payload)
