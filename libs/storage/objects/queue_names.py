"""The broker shards that may use a queue's name: numbered objects, the highest is valid.

    queue-names/<SHA-256 of the queue ID, hex>/<number, 20 digits>.json
        {"queue_id": "orders", "broker_shards": [3], "since": [1], "nonce": "8f…"}  for shard 3
        {"queue_id": "orders", "broker_shards": [], "since": [], "nonce": "02…"}  the name is free

The shards are those of the queue's partitions, by index; one for a queue without any. `since` has
for each the number of the claim that put the partition there: a claim that moves one leaves those
of the others as they are.

An object is created only if it is absent and never changed, so a claim is a compare-and-swap on the
number before it, and a store needs no more than create-if-absent. The first object of a name and
the highest are never removed; a claim removes those between. After that a claimant that read long
ago can create a used number again, so a claim other than the first is valid only once it was seen
to be the highest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple

from libs.storage.errors import CorruptRecord, ObjectNotFound
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects

FOLDER: Final = "queue-names"
READS_AT_ONCE: Final = 32

CLAIM_PATH: Final = re.compile(rf"{FOLDER}/[0-9a-f]{{64}}/[0-9]{{20}}\.json")
"""Other objects below the folder are not SlateMQ's, and are passed over."""

_NONCE_BYTES: Final = 8


class ClaimedPlace(NamedTuple):
    """Where a partition is: its shard, None where it has none; and by the claim of which number."""

    shard: int | None
    number: int


class NameClaim(NamedTuple):
    """The valid object of a name: its number, and the shards, none where the name is free."""

    number: int
    broker_shards: tuple[int, ...]
    since: tuple[int, ...]

    def place_of(self, partition: int) -> ClaimedPlace:
        """Where a partition is; 0 is the one of a queue without partitions."""
        if partition < len(self.broker_shards):
            return ClaimedPlace(self.broker_shards[partition], self.since[partition])
        return ClaimedPlace(None, self.number)


UNCLAIMED: Final = NameClaim(0, (), ())
"""The claim of a name that was never used."""


class QueueNames:
    """The names of one root. Every method raises StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def get(self, queue_id: str) -> NameClaim:
        """The valid claim. Raises CorruptRecord. Costs a LIST, and a GET if there is one."""
        found = await self._objects.last(_folder(queue_id), CLAIM_PATH)
        return _decode(queue_id, *found) if found else UNCLAIMED

    async def valid(
        self,
    ) -> AsyncIterator[tuple[str, int, tuple[str, NameClaim] | CorruptRecord]]:
        """The valid object of every name that was ever used: a LIST, and a GET for each.

        Yields its path, when it was written in ms, and the queue with its claim, or what is wrong.
        """
        claims = await self._objects.describe(FOLDER, matching=CLAIM_PATH)
        infos = list({info.path.rpartition("/")[0]: info for info in claims}.values())
        for start in range(0, len(infos), READS_AT_ONCE):
            some = infos[start : start + READS_AT_ONCE]
            read = await asyncio.gather(*(self._read(info.path) for info in some))
            for info, found in zip(some, read, strict=True):
                if found is not None:
                    yield info.path, info.modified_ms, found

    async def numbers(self) -> Mapping[str, int]:
        """The numbers of the valid objects of all names, by their folders: a LIST."""
        paths = await self._objects.list(FOLDER, CLAIM_PATH)
        return {path.rpartition("/")[0]: _number(path) for path in paths}

    async def claimed_again(self, since: Mapping[str, int]) -> list[str]:
        """The queues of names in use before that were claimed since: they moved, or are new."""
        found = []
        for folder, number in (await self.numbers()).items():
            if number > max(since.get(folder, 0), 1):
                read = await self._read(f"{folder}/{number:020}.json")
                if isinstance(read, tuple) and read[1].broker_shards:
                    found.append(read[0])
        return found

    async def _read(self, path: str) -> tuple[str, NameClaim] | CorruptRecord | None:
        try:
            data = await self._objects.get(path)
            queue_id = str(load_json(data)["queue_id"])
            if not path.startswith(f"{_folder(queue_id)}/"):
                raise ValueError(f"it is about {queue_id!r}, whose claims are elsewhere")
            return queue_id, _decode(queue_id, path, data)
        except ObjectNotFound:
            return None  # removed by a newer claim
        except CorruptRecord as error:
            return error
        except (ValueError, KeyError, TypeError) as error:
            return CorruptRecord("queue name", f"{path}: {error}")

    async def claim(self, queue_id: str, broker_shards: tuple[int, ...], after: NameClaim) -> bool:
        """Claim the name for these shards, durably, if `after` is still valid.

        False: another claim was first; read again. Costs a PUT, and a LIST unless it is the first.
        """
        number = after.number + 1
        since = (number,) * len(broker_shards)
        return await self._claim(queue_id, NameClaim(number, broker_shards, since), after)

    async def place(self, queue_id: str, partition: int, shard: int, after: NameClaim) -> bool:
        """Claim the name for this shard in place of that which has the partition; as `claim`."""
        number = after.number + 1
        shards, since = list(after.broker_shards), list(after.since)
        shards[partition], since[partition] = shard, number
        return await self._claim(queue_id, NameClaim(number, (*shards,), (*since,)), after)

    async def _claim(self, queue_id: str, claim: NameClaim, after: NameClaim) -> bool:
        if not await self._create(queue_id, claim):
            return False
        if after == UNCLAIMED:
            return True
        paths = await self._objects.list(_folder(queue_id), CLAIM_PATH)
        is_highest = _number(paths[-1]) == claim.number
        if is_highest:
            await asyncio.gather(*(self._objects.delete(path) for path in paths[1:-1]))
        return is_highest

    async def free(self, queue_id: str, after: NameClaim) -> None:
        """Free the name if `after` is still valid, else do nothing. Costs a PUT."""
        await self._create(queue_id, NameClaim(after.number + 1, (), ()))

    async def _create(self, queue_id: str, claim: NameClaim) -> bool:
        content = {
            "queue_id": queue_id,
            "broker_shards": claim.broker_shards,
            "since": claim.since,
            # Objects that compete for a path must differ: see Objects.put_if_absent.
            "nonce": secrets.token_hex(_NONCE_BYTES),
        }
        path = f"{_folder(queue_id)}/{claim.number:020}.json"
        return await self._objects.put_if_absent(path, json.dumps(content).encode())


def named_shards(broker_shards: Sequence[int]) -> str:
    """For people: "broker 3", "brokers 3 and 7", "no broker"."""
    if not broker_shards:
        return "no broker"
    *others, last = map(str, broker_shards)
    return f"brokers {', '.join(others)} and {last}" if others else f"broker {last}"


def _decode(queue_id: str, path: str, data: bytes) -> NameClaim:
    try:
        content = load_json(data)
        number, shards, since = _number(path), content["broker_shards"], content["since"]
        if content["queue_id"] != queue_id or not _are_shards(shards):
            raise ValueError(f"it is about {content['queue_id']!r} on {shards!r}")
        if not _are_numbers(since, number) or len(since) != len(shards):
            raise ValueError(f"{since!r} are not the claims of {len(shards)} shards")
        return NameClaim(number, tuple(shards), tuple(since))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord("queue name", f"{path}: {error}") from error


def _are_shards(found: object) -> bool:
    """Whether a record's field is a list of shards, each once."""
    return (
        isinstance(found, list)
        and all(type(shard) is int and shard >= 0 for shard in found)
        and len(set(found)) == len(found)
    )


def _are_numbers(found: object, last: int) -> bool:
    """Whether a record's field is a list of numbers of claims up to its own."""
    return isinstance(found, list) and all(type(one) is int and 0 < one <= last for one in found)


def _folder(queue_id: str) -> str:
    # Hashed: a queue may be called `..`, and some file systems take `a` and `A` for one name.
    return f"{FOLDER}/{hashlib.sha256(queue_id.encode()).hexdigest()}"


def _number(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".json"))
