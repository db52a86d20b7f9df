"""What a token may see of an instance, so that a look with one token serves others.

Each broker judges by the policy that it has loaded itself, and so does this: a queue is seen where
each broker that has some of it permits to inspect it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slatemq import Caller, Queue
from slatemq._admin.instance import Status
from slatemq._patterns import Pattern


class Sight:
    """What one token may see, as the brokers said it."""

    def __init__(self, callers: Mapping[int, Caller]) -> None:
        """`callers`: who has the token, by broker shard; those that did not answer are missing."""
        self._callers = dict(callers)
        self._patterns = {shard: Pattern(one.inspected_queues) for shard, one in callers.items()}
        operating = ["operate" in one.verbs for one in callers.values()]
        self._sees_routes = bool(operating) and all(operating)

    def covers(self, other: Sight) -> bool:
        """Whether all that the other one sees is in this one, by what the patterns say."""
        if other._sees_routes and not self._sees_routes:
            return False
        return all(
            shard in self._patterns and self._matches_all(shard, caller)
            for shard, caller in other._callers.items()
        )

    def _matches_all(self, shard: int, caller: Caller) -> bool:
        # A pattern that matches the text of another one matches all that that one matches: no `*`
        # of the other's text can meet anything but a `*` of this one.
        mine = self._patterns[shard]
        return all(mine.matches(pattern) for pattern in caller.inspected_queues)

    def restricted(self, status: Status) -> Status:
        """What of a look may be shown, and why the rest is not."""
        brokers = (one.shard for one in status.services if one.service == "broker")
        silent = {shard for shard in brokers if shard not in self._callers}
        return replace(
            status,
            routes=status.routes if self._sees_routes else [],
            queues=[queue for queue in status.queues if self._sees(queue)],
            unlisted_brokers=sorted(silent.union(status.unlisted_brokers)),
            refusals=self._refusals(),
        )

    def _sees(self, queue: Queue) -> bool:
        return all(
            shard in self._patterns and self._patterns[shard].matches(queue.queue_id)
            for shard in queue.broker_shards
        )

    def _refusals(self) -> list[str]:
        lacks = [
            f"{what} are not shown: no rule permits {one.principal!r} to {verb}"
            for one in self._callers.values()
            for what, verb, has in (
                ("routes", "operate", "operate" in one.verbs),
                ("queues", "inspect", one.inspected_queues),
            )
            if not has
        ]
        return list(dict.fromkeys(lacks))
