"""Long random histories, in the proportions of a working day; Hypothesis prefers short odd ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from services.broker.core.commands import Purge
from tests.forms import seeds
from tests.unit.broker.core.histories.histories import QUEUES
from tests.unit.broker.core.histories.test_histories import Histories

LEASES_MS = (20, 200, 2000, 2000, 60_000)
UNDURABLE_MAX = 4


class Day:
    """Drives a history by dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = Histories()
        self.rules: list[tuple[int, Callable[[], None]]] = [
            (5, self.change_queues),
            (8, self.assign),
            (2, self.backfill),
            (8, self.claim),
            (2, self.peek),
            (18, self.finish),
            (9, self.repair),
            (5, lambda: self.machine.wait(self.dice.choice([5, 30, 60, 200, 1000]))),
            (5, self.machine.answer),
            (8, self.commit),
            (8, self.durable),
            (1, self.crash),
        ]

    def run(self, steps: int) -> None:
        dice, machine = self.dice, self.machine
        weights = [weight for weight, _ in self.rules]
        try:
            machine.begin(dice.randint(1, 4), dice.choice([2, 50]), self.kinds(20))
            for _ in range(steps):
                dice.choices(self.rules, weights)[0][1]()
                machine.counts_match()
            machine.nothing_is_lost_in_the_end()
        finally:
            machine.close()

    def kinds(self, most: int) -> list[tuple[str, int, int, int]]:
        dice = self.dice
        later = dice.choice([0, 0, 50, 100, 100, 100, 400, 3000])
        urgency = dice.choice([[0, 0, 0, 7], [128], [0, 128]])
        return [
            (
                dice.choice(QUEUES),
                dice.choice(urgency),
                dice.choice([0, 0, later]),
                dice.choice([0, 0, 0, 0, 60, 500]),
            )
            for _ in range(dice.randint(0, most))
        ]

    def chosen(self) -> list[int]:
        return [self.dice.randint(0, 40) for _ in range(self.dice.randint(1, 6))]

    def slow(self) -> bool:
        return self.dice.random() < 0.3

    def queue_id(self) -> str:
        return self.dice.choice(QUEUES)

    def change_queues(self) -> None:
        dice, machine, queue_id = self.dice, self.machine, self.queue_id()
        match dice.randrange(20):
            case 0:
                machine.delete(queue_id, 0, dice.choice([1, 1, 1, 1, 34]))
            case 1 | 2 | 3 | 4:
                machine.create(queue_id, dice.randint(1, 4), dice.choice([2, 5, 50]), self.slow())
            case 5 | 6 | 7 | 8:
                machine.update(queue_id, dice.randint(1, 4), dice.choice([1, 9, 50]))
            case 9 | 10 | 11 | 12:
                machine.sweep(queue_id)

    def assign(self) -> None:
        dice = self.dice
        back = dice.choice([0] * 9 + [1])
        twice = self.slow() and self.slow()
        self.machine.assign(dice.choice([1, 2]), back, self.kinds(14), twice, self.slow())

    def backfill(self) -> None:
        dice = self.dice
        back, beyond = dice.choice([(0, 0), (0, 0), (10, 0), (0, 10)])
        later_ms, log, count = dice.choice([0, 0, 100]), dice.choice([1, 2]), dice.randint(0, 6)
        self.machine.backfill(self.queue_id(), log, back, beyond, later_ms, count, self.slow())

    def claim(self) -> None:
        dice = self.dice
        away = dice.choice([None, None, None, 0, 1])
        lease_ms = dice.choice(LEASES_MS)
        at_once = dice.choice([True, False])
        self.machine.claim(
            self.queue_id(), dice.randint(1, 12), lease_ms, away, self.slow(), at_once
        )

    def peek(self) -> None:
        self.machine.peek(self.queue_id(), self.dice.randint(1, 12), self.dice.choice([None, 0]))

    def finish(self) -> None:
        dice, machine, chosen = self.dice, self.machine, self.chosen()
        match dice.choices("anxerf", (5, 4, 2, 4, 3, 1))[0]:
            case "a":
                machine.ack(chosen)
            case "n":
                machine.nack(chosen, dice.choice([0, 50, 51, 300]), self.slow(), self.slow())
            case "x":
                machine.extend(chosen, dice.choice([0, 30, 500]))
            case "e":
                machine.expire(dice.randint(1, 9), self.slow())
            case "r":
                machine.release(chosen, False)
            case "f":
                machine.fail(chosen)

    def repair(self) -> None:
        dice, machine, queue_id = self.dice, self.machine, self.queue_id()
        match dice.choices("pcrlbd", (1, 5, 5, 6, 3, 4))[0]:
            case "p":
                kinds = {Purge.AVAILABLE} if self.slow() else {dice.choice(list(Purge))}
                machine.purge(queue_id, kinds, 0)
            case "c":
                machine.cancel(queue_id, dice.randint(0, 40), self.slow())
            case "r":
                later_ms = dice.choice([-100, 0, 50, 100, 100, 400, 3000])
                machine.reschedule(queue_id, dice.randint(0, 40), later_ms, self.slow())
            case "l":
                machine.look(queue_id, dice.choice([1, 3, 100]), self.slow())
            case "b":
                machine.browse(queue_id, dice.choice([1, 2, 5, 100]))
            case "d":
                chosen = [dice.random() < 0.6 for _ in range(3)]
                machine.redrive(queue_id, self.queue_id(), chosen, 0)

    def commit(self) -> None:
        if len(self.machine.written) < UNDURABLE_MAX:
            self.machine.commit(self.slow())

    def durable(self) -> None:
        if self.machine.written:
            self.machine.durable()

    def crash(self) -> None:
        if self.slow():
            self.machine.crash(self.dice.randint(0, 3), self.dice.choice([0, 100, 1000]))


@pytest.mark.parametrize("seed", seeds(30, 2))
def test_a_long_history_keeps_every_promise(seed: int) -> None:
    Day(seed).run(400)
