"""Access control in a simulated world: a policy and tokens, in files that all services read.

The clients of the world may do everything. A guest may publish messages of one color, and may
consume one queue at times: an operator changes the policy again and again.
"""

from __future__ import annotations

import asyncio
import base64
import random
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from libs.access import token_file
from slatemq import Credentials
from slatemq._file_status import LOOK_S
from slatemq._tokens import BLOCK, COST, PARALLEL, hash_token
from slatemq.client import Client
from slatemq.errors import PermissionDenied, SlateMQError, Unauthenticated
from tests.simulation.cluster import Cluster
from tests.simulation.judge import Judge, Violated
from tests.simulation.workload import COLORS, Consumer, Workload, now_ms

QUEUE: Final = "all"
"""What the guest may consume at times."""

COLOR: Final = "black"
"""Of the messages that the guest may publish."""

REFUSED: Final = (PermissionDenied, Unauthenticated)

NOTICE_S: Final = LOOK_S + 1.0
"""How long after a change of the policy a service that does not stand still may go by the old one:
until it looks at the file, and has read it."""


def _token(name: str) -> str:
    return f"smq_{name}_{name[0] * 24}"


WORKER: Final = Credentials(token=_token("worker"))
GUEST: Final = Credentials(token=_token("guest"))

_hash: Final = lru_cache(hash_token)
"""A function of its arguments alone, which takes 50 ms: each life of each process calls it."""


class Access:
    """The policy and the tokens of a world, and the guest.

    Attributes:
        settings: Of the services.
        tasks: What the guest and the operator of the policy do.
    """

    def __init__(self, cluster: Cluster, judge: Judge, workload: Workload, seed: str) -> None:
        self._cluster = cluster
        self._judge = judge
        self._workload = workload
        self._chance = random.Random(f"{seed}/access")
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._policy = Path(self._folder.name) / "policy.yaml"
        tokens = Path(self._folder.name) / "tokens.yaml"
        tokens.write_text("tokens:\n" + "".join(map(_entry, ("worker", "guest"))))
        self._revoked_s: float | None = None
        self._comment = ""
        self._allow(consume=True)
        public: Any = token_file
        public.hash_token = _hash
        self.settings = {"access_policy": str(self._policy), "access_tokens": str(tokens)}
        self.tasks: list[asyncio.Task[None]] = []
        workload.credentials = WORKER

    def begin(self) -> None:
        for name, work in (("guest", self._visit), ("policy", self._change_policy)):
            self.tasks.append(self._cluster.client_machine(name).run(work()))
        guest = Consumer(QUEUE, "guest-consumer", GUEST, self._check_claim)
        self.tasks.append(self._workload.consume_as(guest))

    def close(self) -> None:
        self._folder.cleanup()

    def _allow(self, *, consume: bool) -> None:
        rules = [f"{{verbs: [publish], when: headers.color == '{COLOR}'}}"]
        if consume:
            rules.append(f"{{verbs: [consume], queues: [{QUEUE}]}}")
        # Each has a size of its own: services see a change whatever the clock of this machine says.
        self._comment += "#"
        self._policy.write_text(
            f"{self._comment}\n"
            "roles:\n"
            "  all: [{verbs: [publish, consume, inspect, edit, administer, operate]}]\n"
            f"  guest: [{', '.join(rules)}]\n"
            "bindings:\n"
            "  - {principals: [worker], roles: [all]}\n"
            "  - {principals: [guest], roles: [guest]}\n"
        )
        self._revoked_s = None if consume else self._cluster.loop.time()

    async def _change_policy(self) -> None:
        may_consume = True
        while not self._workload.calm:
            await asyncio.sleep(self._chance.uniform(1.0, 12.0))
            may_consume = not may_consume
            self._allow(consume=may_consume)
            self._cluster.tell(f"the guest may {'' if may_consume else 'not '}consume {QUEUE}")

    def _check_claim(self, claimed_s: float) -> None:
        """A claim that was begun at that time gave messages to the guest."""
        if self._revoked_s is None:
            return
        known_s = max(self._revoked_s, self._cluster.loop.resumed_s) + NOTICE_S
        if claimed_s > known_s:
            raise Violated(f"{QUEUE} gives messages to a guest who may not consume it any more")

    # --- The guest ----------------------------------------------------------

    async def _visit(self) -> None:
        chance = random.Random(self._chance.random())
        number = 0
        async with await self._workload.connected(GUEST) as client:
            while not self._workload.stopping:
                await asyncio.sleep(chance.expovariate(1))
                number += 1
                color = chance.choice((COLOR, *COLORS))
                await self._publish(client, f"guest/{number}".encode(), color)

    async def _publish(self, client: Client, key: bytes, color: str) -> None:
        headers = {"color": color, "rank": "1"}
        self._judge.publishing(key, headers, 0, now_ms())
        if color != COLOR:
            self._judge.forbidden(key)
        try:
            done = await client.publish(key, headers=headers)
        except REFUSED as error:
            if color == COLOR:
                raise Violated(f"the guest may publish {key!r}: {error!r}") from error
        except SlateMQError as error:
            self._workload.note_error(f"publishing {key!r}", error)
        else:
            if color != COLOR:
                raise Violated(f"the guest published {key!r}, which no rule permits")
            self._judge.published(key, done.message_id, done.received_at_ms)


def _entry(name: str) -> str:
    salt = name.encode().ljust(16, b".")
    digest = _hash(_token(name), salt, (COST, BLOCK, PARALLEL))
    hashed = ":".join(base64.urlsafe_b64encode(one).decode().rstrip("=") for one in (salt, digest))
    cost = f"scrypt:{COST}:{BLOCK}:{PARALLEL}"
    return f"  - {{id: {name}, principal: {name}, hash: '{cost}:{hashed}'}}\n"
