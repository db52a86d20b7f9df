"""Places that all callers want and a setting bounds: one principal has half of them at most.

Where services want them, too, all principals together leave a tenth of the places to those: else
nothing would be routed meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from libs.access.principals import PLACE_RETRY_MS
from slatemq.errors import ResourceExhausted

if TYPE_CHECKING:
    from libs.access.quotas import PrincipalQuota


class Shares:
    """The places that are taken, of all callers and of each principal.

    Attributes:
        count: All places that are taken.
        held: Those of principals by name, of those that hold any.
    """

    def __init__(
        self,
        setting: str,
        places_max: int,
        what: str,
        full: tuple[str, str],
        *,
        for_services: bool = False,
    ) -> None:
        """`what` is what takes a place, in the words of errors.

        `full` is the reason and the message of errors where no place is left. `for_services` says
        whether services want places, too.
        """
        self.count = 0
        self.held: dict[str, int] = {}
        self._held_count = 0
        self._max: Final = places_max
        self._half: Final = (places_max + 1) // 2
        left = max(1, places_max // 10) if for_services else 0
        self._held_max: Final = max(1, places_max - left)
        self._setting = setting
        self._what = what
        self._reason, self._message = full
        self._bound = f"share of {setting} ({places_max})"
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until no place is taken."""
        await self._idle.wait()

    def check(self) -> None:
        """Raise ResourceExhausted where no place is left."""
        if self.count >= self._max:
            raise self._refused(self._message)

    def place(self, quota: PrincipalQuota | None) -> AbstractContextManager[None]:
        """Take a place until the end of the context, or raise ResourceExhausted.

        It is of the principal that took it, also where its caller is another one by then. Calls of
        services, and all without a policy, have no quota, and no share.
        """
        return _Place(self, quota)

    def take(self, quota: PrincipalQuota | None) -> None:
        self.check()
        if quota is not None:
            count = self.held.get(quota.name, 0)
            if count >= self._half:
                raise quota.refuse_share(self._setting, f"{count} {self._what}, its {self._bound}")
            if self._held_count >= self._held_max:
                held = f"{self._held_count} {self._what}"
                raise self._refused(f"all principals have {held}, their {self._bound}")
            self.held[quota.name] = count + 1
            self._held_count += 1
        self.count += 1
        self._idle.clear()

    def release(self, quota: PrincipalQuota | None) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()
        if quota is not None:
            self._held_count -= 1
            count = self.held.pop(quota.name) - 1
            if count:
                self.held[quota.name] = count

    def _refused(self, message: str) -> ResourceExhausted:
        return ResourceExhausted(message, reason=self._reason, retry_after_ms=PLACE_RETRY_MS)


class _Place:
    __slots__ = ("_quota", "_shares")

    def __init__(self, shares: Shares, quota: PrincipalQuota | None) -> None:
        self._shares = shares
        self._quota = quota

    def __enter__(self) -> None:
        self._shares.take(self._quota)

    def __exit__(self, *_: object) -> None:
        self._shares.release(self._quota)
