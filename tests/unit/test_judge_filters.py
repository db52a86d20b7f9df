"""Which filters a history may have judged a message by."""

from __future__ import annotations

import random

from tests.judge.facts import Filter
from tests.judge.histories import NEVER
from tests.judge.rules import FiltersInTime


def test_a_message_is_judged_by_the_last_filter_answered_before_it_and_all_later_ones() -> None:
    luck = random.Random(7)
    for _ in range(200):
        filters, now = list[Filter](), 0
        for number in range(luck.randrange(8)):
            now += luck.randrange(10)
            ended = luck.choice([NEVER, now + luck.randrange(20)])
            filters.append(Filter(f"{number}", now, ended))
        found = FiltersInTime(filters)
        for began in range(60):
            answered = [at for at, one in enumerate(filters) if one.ended < began]
            first = max(answered, default=0)
            expected = {
                one.expression
                for at, one in enumerate(filters)
                if at >= first or one.ended == NEVER
            }
            assert found.judging(began) == expected
