"""Settings of the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libs.serving.process.process_config import ProcessConfig
from libs.serving.process.settings import setting

DAY_S: Final = 24 * 3600

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig(ProcessConfig):
    """The SlateMQ console: web pages for people who operate an instance."""

    endpoint: str = setting(
        "host:port of any service of the instance, as clients reach it; several, separated by "
        "commas, are tried in turn.",
        default="127.0.0.1:7420",
    )
    session_s: int = setting(
        "How long a login lasts, in seconds.",
        default=DAY_S // 2,
        minimum=60,
        maximum=30 * DAY_S,
    )
    console_hosts: str = setting(
        "Names besides localhost by which browsers reach a console that listens on loopback, "
        "through a proxy, separated by commas. Requests for other names are refused there.",
        default="",
    )

    @property
    def needs_login(self) -> bool:
        """Whether it shows nothing without one: an instance without a policy has none."""
        return self.is_exposed and not self.insecure

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The names that a request may be for; empty: any.

        On loopback a page of any site could otherwise be read by it, under a name of its own that
        it makes point to 127.0.0.1.
        """
        if self.is_exposed:
            return frozenset()
        named = (name.strip().lower() for name in self.console_hosts.split(","))
        return LOOPBACK_NAMES | {name for name in named if name}
