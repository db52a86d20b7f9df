"""The settings of processes that commit, and the pace and the cost that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libs.serving.process.config import OwnerConfig
from libs.serving.process.exits import FatalError
from libs.serving.process.settings import setting
from libs.serving.process.store_costs import costs_of
from libs.storage.database.pace import (
    INTERVAL_S_MAX,
    BudgetPace,
    FixedPace,
    LatencyPace,
    Pace,
)
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database

AUTO: Final = "auto"

FLUSH_PUTS: Final = 2
"""PUTs that move the rows of some commits into a table: the table, and the manifest."""

COMMIT_INTERVAL_MS_MAX: Final = int(INTERVAL_S_MAX * 1000)


@dataclass(frozen=True, kw_only=True)
class CommitConfig(OwnerConfig):
    """The settings of a process that owns a shard."""

    commit_interval_ms: str = setting(
        "Least time between the starts of two commits, in ms: 0 is right on a disk; where each "
        "commit is a paid request, 100 or so saves money for latency. `auto` keeps "
        "commit_budget_usd or commit_goal_ms.",
        default="0",
    )
    commit_budget_usd: int = setting(
        "With commit_interval_ms=auto: what the requests of this process may cost in a month of 30 "
        "days, in USD, by store_prices and wal_store_prices; 0 states no budget.",
        default=0,
        minimum=0,
    )
    commit_goal_ms: int = setting(
        "With commit_interval_ms=auto: within what time a change is to be durable, in ms, with as "
        "few commits as that permits; 0 states no goal.",
        default=0,
        minimum=0,
        maximum=COMMIT_INTERVAL_MS_MAX,
    )


def check_pace(config: CommitConfig) -> None:
    """Raise FatalError for settings of commits that mean nothing."""
    if wrong := _wrong(config):
        raise FatalError.usage(wrong)


def _wrong(config: CommitConfig) -> str:
    text = config.commit_interval_ms
    goals = [name for name in ("commit_budget_usd", "commit_goal_ms") if getattr(config, name)]
    if text == AUTO:
        if len(goals) == 1:
            return ""
        return "commit_interval_ms=auto needs one of commit_budget_usd and commit_goal_ms: set one"
    if not (text.isascii() and text.isdigit() and int(text) <= COMMIT_INTERVAL_MS_MAX):
        return (
            f"commit_interval_ms is {text!r}: set auto, or a whole number of ms up to "
            f"{COMMIT_INTERVAL_MS_MAX}"
        )
    if goals:
        return f"{goals[0]} has no effect with commit_interval_ms={text}: set that to auto"
    return ""


def pace_of(config: CommitConfig, root: Root, database: Database) -> Pace:
    """How often the owner of this database, which is open, commits.

    The settings have passed `check_pace`. Raises FatalError for prices that mean nothing.
    """
    if config.commit_interval_ms != AUTO:
        return FixedPace(int(config.commit_interval_ms))
    if config.commit_goal_ms:
        return LatencyPace(config.commit_goal_ms)
    texts = config.store_prices, config.wal_store_prices
    costs = costs_of(*texts, root.address, root.wal_address)

    def spent_usd() -> float:
        return costs.usd(database.statistics(), root.objects.counts)

    # Where the WAL costs nothing, the tables do.
    puts_usd = costs.wal["put"] + FLUSH_PUTS * costs.root["put"] / database.flush_commits
    return BudgetPace(config.commit_budget_usd, puts_usd / 1e6, spent_usd)
