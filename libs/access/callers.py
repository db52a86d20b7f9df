"""The caller of each call: who it is, what it may do, and what it takes.

A process that has no policy has one caller, which may do everything.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakValueDictionary

from libs.access.authentication import Authenticator, Proof
from libs.access.explanations import Explanation, explain
from libs.access.jwt_tokens import JwtTokens, issuers_file
from libs.access.methods import MethodAccess
from libs.access.policy import Policy, Rights
from libs.access.principals import ANONYMOUS, Principal
from libs.access.quotas import PrincipalQuota, Usage
from libs.access.reloading import ReloadedFile, Taken
from libs.access.token_file import TokenFile
from libs.access.verbs import Verb
from libs.events.slatemq.headers import BACKEND_HEADERS
from slatemq.errors import InvalidArgument, PermissionDenied, Unauthenticated

KEPT_MAX: Final = 10_000
"""Callers by certificate, and quotas: how many are kept for those who come again. Of quotas, twice
as many as are in use, where that is more."""

NAMED_MAX: Final = 10_000
"""Queues that one request names, as often as it names them. All are judged in one step of the event
loop: some 10 ms."""

JUDGED_STEPS: Final = 100_000
"""What conditions of publishes may cost in one step of the event loop: some 100 ms at most. A macro
over all headers costs up to half of it for one message."""

Run = tuple[int, Mapping[str, str], int, int]
"""Messages to be published: their place in the request, headers, number and bytes."""


class Caller:
    """Who calls.

    Attributes:
        principal: Who it is.
    """

    def __init__(
        self, principal: Principal, policy: ReloadedFile[Policy], quota: PrincipalQuota
    ) -> None:
        """Judge by the policy that is in force at each call; `quota` is of the principal's name."""
        self.principal = principal
        self._policy = policy
        self._version = policy.version
        self._rights = policy.value.rights(principal)
        self._quota = quota

    @property
    def rights(self) -> Rights:
        """What it may do."""
        self._renew()
        return self._rights

    @property
    def quota(self) -> PrincipalQuota:
        """What it takes of this process."""
        self._renew()
        return self._quota

    def _renew(self) -> None:
        version = self._policy.version
        if self._version == version:
            return
        policy = self._policy.value
        self._rights = policy.rights(self.principal)
        self._quota.set_limits(policy.limits(self.principal))
        self._version = version

    def require(self, verb: Verb, queue: str = "") -> None:
        """Raises PermissionDenied unless it may do this on the queue; see `Rights.decide`."""
        decision = self.rights.decide(verb, queue)
        if not decision.is_permitted:
            raise PermissionDenied(decision.reason, metadata={"verb": verb, "queue": queue})

    def require_publish(self, headers: Mapping[str, str]) -> None:
        """Raises PermissionDenied unless it may publish a message with these headers."""
        queue = headers.get("queue", "")
        decision = self.rights.decide("publish", queue, headers)
        if not decision.is_permitted:
            raise PermissionDenied(decision.reason, metadata={"verb": "publish", "queue": queue})

    def require_edit(self, headers: Mapping[str, str], direct_queue_id: str) -> None:
        """Raises PermissionDenied unless it may change a stored message in all queues that have it.

        That is for editors of the queue that the message was pushed to, else of the one that its
        header `queue` names, else of all queues: a filter of one's own may take messages of others.
        A task or an event of event queues is for those who may publish it.
        """
        self.require("edit", direct_queue_id or headers.get("queue", ""))
        if any(name in headers for name in BACKEND_HEADERS):
            self.require_publish(headers)

    async def publish(self, runs: Iterable[Run], item: str = "run") -> None:
        """Admit messages; those of a run have the same headers.

        Others have their turns while conditions are judged that take long.

        Raises:
            PermissionDenied: A run is not permitted; its metadata has the queue, and as `item` the
                place of the run. Then their bytes count, as of one message; so they do where the
                call ends before all are judged.
            ResourceExhausted: The caller has reached its limit.
        """
        messages_count = bytes_count = steps_count = 0
        runs = iter(runs)
        for place, headers, count, size_bytes in runs:
            try:
                steps_count += self.rights.condition_cost
                if steps_count > JUDGED_STEPS:
                    steps_count = 0
                    await asyncio.sleep(0)
                self.require_publish(headers)
            except (PermissionDenied, asyncio.CancelledError) as error:
                if isinstance(error, PermissionDenied):
                    error.metadata[item] = str(place)
                rest_bytes = sum(size_bytes for *_, size_bytes in runs)
                self.quota.charge(bytes_count + size_bytes + rest_bytes)
                raise
            messages_count += count
            bytes_count += size_bytes
        self.quota.publish(messages_count, bytes_count)

    def check(self, method: MethodAccess, request: Any) -> None:
        """Raises PermissionDenied or Unauthenticated unless it may make this call.

        The queues that the request names are judged here; others by the RPC itself. Raises
        InvalidArgument where it names too many.
        """
        self.check_queues(method, method.queues(request))

    def check_queues(self, method: MethodAccess, queues: Iterable[str]) -> None:
        """Like `check`, for the queues that a request has named."""
        if method.caller == "authenticated":
            # What it may do, it cannot do without the addresses of the processes.
            if self.principal is ANONYMOUS and not self.rights.permits_anything:
                raise _unproven()
            return
        verb = cast("Verb", method.caller)  # The door lets through no other kind of call.
        named = list(islice(queues, NAMED_MAX + 1))
        if len(named) > NAMED_MAX:
            raise InvalidArgument(
                method.queues_field,
                f"must name at most {NAMED_MAX} queues",
                reason="TOO_MANY_ITEMS",
            )
        rights = self.rights
        for queue in named if len(named) == 1 else dict.fromkeys(named):
            if not rights.permits(verb, queue):
                self._require(verb, queue)
        if not named and not rights.permits_some(verb):
            self._require(verb, "")

    def _require(self, verb: Verb, queue: str) -> None:
        try:
            self.require(verb, queue)
        except PermissionDenied:
            if self.principal is ANONYMOUS:
                raise _unproven() from None
            raise


class Identity:
    """Who makes one call, for as long as the call lasts.

    Attributes:
        caller: Who calls.
        until_s: Until when the proof counts, in seconds since the Unix epoch.
        version: That of the files when the proof was asked for.
    """

    __slots__ = ("_authorization", "_callers", "_certified", "caller", "until_s", "version")

    def __init__(
        self,
        callers: Callers,
        authorization: str,
        certified: Collection[str],
        proof: Proof[Caller],
        version: int,
    ) -> None:
        self._callers = callers
        self._authorization = authorization
        self._certified = certified
        self.caller, self.until_s = proof
        self.version = version

    async def prove(self) -> Proof[Caller]:
        """Find out who it is now; `caller` stays. Raises as `renew`."""
        return await self._callers.prove(self._authorization, self._certified)

    async def renew(self) -> bool:
        """Find out again where files have changed, or the proof has ended; whether it was so.

        Raises:
            Unauthenticated, ResourceExhausted, Unavailable: As of `Authenticator.prove`.
        """
        callers = self._callers
        if self.version == callers.version and callers.clock_s() < self.until_s:
            return False
        version = callers.version
        self.caller, self.until_s = await self.prove()
        self.version = version
        return True


class Callers:
    """The callers of this process, by what they prove.

    Attributes:
        files: What is read again when it changes.
        usage: What they take together.
        clock_s: Gives the time, in seconds since the Unix epoch.
    """

    def __init__(
        self,
        policy: ReloadedFile[Policy],
        tokens: ReloadedFile[TokenFile] | None = None,
        issuers: ReloadedFile[JwtTokens] | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Judge by this policy, and accept the tokens of these files."""
        self.clock_s = clock_s
        self._authenticator = Authenticator(tokens, issuers, self._caller, clock_s)
        self._policy = policy
        self.files = [file for file in (policy, tokens, issuers) if file is not None]
        self._certified: OrderedDict[str, Proof[Caller]] = OrderedDict()
        self._quotas: dict[str, PrincipalQuota] = {}
        self._left_count = 0  # of quotas, by the last look for idle ones
        self.usage = Usage()
        self._anonymous = Proof(self._caller(ANONYMOUS), math.inf)

    @property
    def version(self) -> int:
        """Raised whenever one of the files has changed."""
        return self._policy.version + self._authenticator.files_version

    async def identify(
        self,
        authorization: str,
        certified: Collection[str] = (),
        peer: Callable[[], str] = str,
    ) -> Identity:
        """Who makes a call; arguments and errors as of `prove`."""
        version = self.version
        proof = await self.prove(authorization, certified, peer)
        return Identity(self, authorization, certified, proof, version)

    async def prove(
        self, authorization: str, certified: Collection[str], peer: Callable[[], str] = str
    ) -> Proof[Caller]:
        """The caller that something proves.

        Args:
            authorization: The header of this name; empty: none.
            certified: The names in the client certificate of the connection.
            peer: Returns where the call comes from; it is called before this waits, or not at all.

        Raises:
            Unauthenticated, ResourceExhausted, Unavailable: As of `Authenticator.prove`.
        """
        if authorization:
            return await self._authenticator.prove(authorization, peer)
        names = self._policy.value.certificates
        for name in sorted(certified):
            if names.matches(name):
                return self._by_certificate(name)
        return self._anonymous

    def _by_certificate(self, name: str) -> Proof[Caller]:
        proof = self._certified.get(name)
        if proof is None:
            caller = self._caller(Principal(name, "certificate"))
            proof = self._certified[name] = Proof(caller, math.inf)
            if len(self._certified) > KEPT_MAX:
                self._certified.popitem(last=False)
        self._certified.move_to_end(name)
        return proof

    def explain(
        self, principal: Principal, verb: Verb, queue: str, headers: Mapping[str, str]
    ) -> tuple[ReloadedFile[Policy], Explanation]:
        """What the policy permits, and the file that it is."""
        return self._policy, explain(self._policy.value, principal, verb, queue, headers)

    async def watch_files(self, taken: Taken) -> None:
        """Read the files again when they change, for ever; call `taken` after each new version."""
        await asyncio.gather(self._policy.watch(taken), self._authenticator.watch_files(taken))

    def _caller(self, principal: Principal) -> Caller:
        quota = self._quota(principal, self._policy.value)
        return Caller(principal, self._policy, quota)

    def _quota(self, principal: Principal, policy: Policy) -> PrincipalQuota:
        """The quota of a principal's name: two tokens of one principal share it."""
        limits = policy.limits(principal)
        quota = self._quotas.get(principal.name)
        if quota is not None:
            quota.set_limits(limits)
            return quota
        # Twice as many: where all of them are held, each new one would cost a pass else.
        if len(self._quotas) >= max(KEPT_MAX, 2 * self._left_count):
            self._forget_idle()
            self._left_count = len(self._quotas)
        made = PrincipalQuota(principal.name, limits, usage=self.usage)
        self._quotas[principal.name] = made
        return made

    def _forget_idle(self) -> None:
        """Forget the quotas that are idle and that no caller holds.

        Beside one that a caller holds, another token of its principal would get a second one.
        """
        held = WeakValueDictionary(self._quotas)
        self._quotas = {name: one for name, one in self._quotas.items() if not one.is_idle}
        self._quotas.update(held)


def callers_of(policy: str, tokens: str, issuers: str) -> Callers:
    """The callers of these files; for an empty name, no file is read.

    Raises:
        InvalidArgument: A file is not usable; names the key and the line.
    """
    return Callers(
        ReloadedFile.of_document(Path(policy), Policy),
        ReloadedFile.of_document(Path(tokens), TokenFile) if tokens else None,
        issuers_file(Path(issuers)) if issuers else None,
    )


def _unproven() -> Unauthenticated:
    return Unauthenticated(
        "this call needs a token or a client certificate; a policy may permit it to `anonymous`"
    )
