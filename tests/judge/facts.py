"""From operations to messages, deliveries, and what consumers did with their leases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.judge.histories import FAIL, INFO, NEVER, OK, Operation

Copy = tuple[str, int]
"""A message in one queue: the queue, and the message's ID."""


@dataclass(slots=True)
class Sent:
    """A message that a client published, pushed or transferred.

    Attributes:
        only: The one queue that it is for; empty: those whose filters take it.
        delay_ms: It may not come earlier than that after `began`.
        retention_ms: It may not come later than that after `ended`; 0: without end.
        together: The operation that it takes effect with, when that is more than a publish.
        digest: Names its payload; empty where the client did not write one down.
    """

    key: str
    headers: Mapping[str, str]
    began: int
    ended: int
    outcome: str
    only: str = ""
    delay_ms: float = 0
    retention_ms: float = 0
    together: Operation | None = None
    digest: str = ""


@dataclass(slots=True)
class Delivery:
    """One claimed message.

    Attributes:
        starts_ms, deadline_ms: Its lease by the clock of the broker.
        has_room: Its claim asked for more messages than it got.
        headers: None where the client did not write them down.
        digest: Empty where it did not.
    """

    queue: str
    key: str
    message_id: int
    attempt: int
    token: str
    starts_ms: float
    deadline_ms: float
    began: int
    ended: int
    has_room: bool = False
    headers: Mapping[str, str] | None = None
    digest: str = ""


@dataclass(slots=True)
class Use:
    """What a consumer did with one lease.

    Attributes:
        kind: `ack`, `nack`, `release`, `fail`, `extend`, `complete` or `transfer`.
        delay_ms: The message may not come again earlier than that after `began`; None: than the
            backoff of its queue.
        deadline_ms: The new end of the lease, of an extension.
    """

    kind: str
    began: int
    ended: int
    outcome: str
    delay_ms: float | None = 0
    deadline_ms: float = 0
    operation: Operation | None = None

    @property
    def finishes(self) -> bool:
        """Whether the message is done after it."""
        return self.kind in ("ack", "complete", "transfer")


@dataclass(slots=True)
class Filter:
    """A filter of a queue, from a moment between `began` and `ended` on."""

    expression: str
    began: int
    ended: int


@dataclass(slots=True)
class Dead:
    """A dead letter that was left at the end, and what its broker says of its last attempt."""

    message_id: int
    attempt: int
    reason: str


@dataclass(slots=True)
class Queue:
    """What clients did to a queue."""

    name: str
    began: int = 0
    ended: int = NEVER
    max_attempts: int = 0
    partitions_count: int = 1
    backoff_ms: float = 0
    filters: list[Filter] = field(default_factory=list)
    purges: list[Operation] = field(default_factory=list)
    pauses: list[tuple[int, int]] = field(default_factory=list)
    redrives: list[Operation] = field(default_factory=list)
    moves: list[Operation] = field(default_factory=list)
    unknown_claims: list[Operation] = field(default_factory=list)
    drained_at: int = 0
    dead: dict[int, Dead] = field(default_factory=dict)


class Uses(dict[str, tuple[Use, ...]]):
    """What consumers did, by token. Most tokens have one use, and a tuple takes the least room."""

    def __missing__(self, token: str) -> tuple[Use, ...]:
        return ()


class Facts:
    """What a history says. It keeps no operation but those that rules look at as a whole.

    Attributes:
        sent: By key. A key has more than one where it was pushed or transferred on.
        ids: By key, each once.
        deliveries: By copy, in the order of their leases by the broker's clock.
        uses: By lease token; of one that was never used there is none.
        ahead_ms: How far the clock of a service was ahead of real time at most.
        troubles: In which what is stored could not be read, or not in time, in order.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.sent: dict[str, list[Sent]] = defaultdict(list)
        self.deliveries: dict[Copy, list[Delivery]] = defaultdict(list)
        self.uses = Uses()
        self.queues: dict[str, Queue] = {}
        self.executions: list[Operation] = []
        self.ids: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, Delivery] = {}
        self.repeated_tokens: list[str] = []
        self.ahead_ms = 0.0
        self.troubles: list[Operation] = []
        self._paused: dict[str, int] = {}
        self._headers: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
        for one in operations:
            getattr(self, f"_{one.f.replace('-', '_')}")(one)
        for name, began in self._paused.items():  # And never resumed.
            self.queue(name).pauses.append((began, NEVER))
        for copies in self.deliveries.values():
            copies.sort(key=lambda one: (one.starts_ms, one.ended))

    def queue(self, name: str) -> Queue:
        if name not in self.queues:
            self.queues[name] = Queue(name)
        return self.queues[name]

    # --- Messages -----------------------------------------------------------

    def _publish(self, one: Operation) -> None:
        messages = one.value["messages"]
        for message in messages:
            self._send(message, one)
        if one.outcome == OK and "ids" in one.result:
            for message, message_id in zip(messages, one.result["ids"], strict=True):
                self._note_id(message["key"], message_id)

    def _claim(self, one: Operation) -> None:
        name = one.value["queue"]
        if one.outcome == INFO:
            self.queue(name).unknown_claims.append(one)
        messages = one.result.get("messages", ()) if one.outcome == OK else ()
        for message in messages:
            lease_ms = message.get("lease_ms", one.value["lease_ms"])
            headers = message.get("headers")
            delivery = Delivery(
                name,
                message["key"],
                message["id"],
                message["attempt"],
                message["token"],
                message["deadline_ms"] - lease_ms,
                message["deadline_ms"],
                one.began,
                one.ended,
                len(messages) < one.value.get("max", 1),
                None if headers is None else self._shared(headers),
                message.get("digest", ""),
            )
            self.deliveries[name, delivery.message_id].append(delivery)
            self._note_id(delivery.key, delivery.message_id)
            if delivery.token in self.tokens:
                self.repeated_tokens.append(delivery.token)
            self.tokens[delivery.token] = delivery

    def _send(
        self, message: Mapping[str, Any], one: Operation, together: Operation | None = None
    ) -> None:
        sent = Sent(
            message["key"],
            self._shared(message.get("headers", {})),
            one.began,
            one.ended,
            one.outcome,
            message.get("queue", ""),
            message.get("delay_ms", 0),
            message.get("retention_ms", 0),
            together,
            message.get("digest", ""),
        )
        self.sent[sent.key].append(sent)

    def _note_id(self, key: str, message_id: int) -> None:
        known = self.ids.get(key, ())
        if message_id not in known:
            self.ids[key] = (*known, message_id)

    def _shared(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The same headers, kept once however many messages have them."""
        return self._headers.setdefault(tuple(headers.items()), headers)

    # --- Leases -------------------------------------------------------------

    def _ack(self, one: Operation) -> None:
        self._results("ack", one)

    def _nack(self, one: Operation) -> None:
        if one.value.get("release"):
            self._results("release", one, one.value.get("delay_ms", 0))
        else:
            self._results("nack", one, one.value.get("delay_ms"))

    def _extend(self, one: Operation) -> None:
        self._results("extend", one)

    def _results(self, kind: str, one: Operation, delay_ms: float | None = 0) -> None:
        tokens = one.value["tokens"]
        results = one.result.get("results") if one.outcome == OK else None
        deadlines = one.result.get("deadlines_ms", [0] * len(tokens))
        for place, token in enumerate(tokens):
            outcome = {"ok": OK, "unknown": INFO}.get(results[place], FAIL) if results else INFO
            if one.outcome == FAIL:
                outcome = FAIL
            ended = NEVER if outcome == INFO else one.ended
            deadline = deadlines[place] if results else 0
            use = Use(kind, one.began, ended, outcome, delay_ms, deadline)
            self.uses[token] = (*self.uses[token], use)

    def _execute(self, one: Operation) -> None:
        self.executions.append(one)
        for command in one.value["commands"]:
            match command["do"]:
                case "push":
                    self._send(command, one, together=one)
                case "transfer":
                    self._use(one, command)
                    delivery = self.tokens.get(command["token"])
                    if delivery is not None:
                        moved = {"key": delivery.key, "queue": command["queue"]}
                        self._send(moved, one, together=one)
                case _:
                    self._use(one, command)

    def _use(self, one: Operation, command: Mapping[str, Any]) -> None:
        delay = command.get("delay_ms", 0)
        use = Use(command["do"], one.began, one.ended, one.outcome, delay, 0, one)
        self.uses[command["token"]] = (*self.uses[command["token"]], use)

    # --- Queues -------------------------------------------------------------

    def _create_queue(self, one: Operation) -> None:
        if one.outcome == FAIL:
            return
        queue = self.queue(one.value["queue"])
        if not queue.filters:
            queue.began = one.began
        queue.ended = one.ended  # Of the last creation, which a purge comes before.
        queue.max_attempts = one.value.get("max_attempts", 0)
        queue.partitions_count = one.value.get("partitions") or 1
        queue.backoff_ms = one.value.get("backoff_ms", 0)
        default = f'headers["queue"] == "{queue.name}"'
        text = one.value.get("filter", "") or default
        queue.filters.append(Filter(text, one.began, one.ended))

    def _update_queue(self, one: Operation) -> None:
        if one.may_have_happened and one.value.get("filter"):
            queue = self.queue(one.value["queue"])
            queue.filters.append(Filter(one.value["filter"], one.began, one.ended))

    def _delete_queue(self, one: Operation) -> None:
        self._purge(one)
        self._resume(one)

    def _purge(self, one: Operation) -> None:
        if one.may_have_happened:
            self.queue(one.value["queue"]).purges.append(one)

    def _redrive(self, one: Operation) -> None:
        if one.may_have_happened:
            self.queue(one.value["queue"]).redrives.append(one)

    def _move(self, one: Operation) -> None:
        if one.may_have_happened:
            self.queue(one.value["queue"]).moves.append(one)

    def _pause(self, one: Operation) -> None:
        if one.outcome == OK:
            self._paused.setdefault(one.value["queue"], one.ended)

    def _resume(self, one: Operation) -> None:
        if not one.may_have_happened:
            return
        began = self._paused.pop(one.value["queue"], None)
        if began is not None:
            self.queue(one.value["queue"]).pauses.append((began, one.began))

    def _drain(self, one: Operation) -> None:
        if one.outcome == OK:
            queue = self.queue(one.value["queue"])
            queue.drained_at = one.began
            for dead in one.result.get("dead", ()):
                queue.dead[dead["id"]] = Dead(dead["id"], dead["attempt"], dead["reason"])

    def _trouble(self, one: Operation) -> None:
        self.troubles.append(one)

    def _clock(self, one: Operation) -> None:
        self.ahead_ms = max(self.ahead_ms, one.value["ahead_ms"])
