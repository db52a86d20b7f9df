"""The doors of a process: the port for clients, and the port for services.

::

    clients ──► client door ── who calls? may it? ──► handlers of all services
    services ─► service door ── (mTLS: services alone get in) ──────┘

Each RPC's proto says who may call it (`slatemq/v1/access.proto`). The client door refuses what is
for services, with a policy or without; with one, it asks it about everything else. Who calls, and
whether the limits of that principal leave room for the call, is judged before a request is read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc.aio

from libs.access.audit import AUDITED, subjects_of
from libs.access.current import current_caller
from libs.access.methods import MethodAccess, access_of
from libs.serving.limits import PROBE_PREFIXES
from libs.serving.requests.auditing import Auditor
from libs.serving.tls import identities, is_old
from slatemq.errors import PermissionDenied, SlateMQError, Unauthenticated

if TYPE_CHECKING:
    from libs.access.callers import Caller, Callers
    from libs.access.quotas import Place

NO_PLACE: Final = nullcontext()
"""That of a call which is not counted."""

Context = grpc.aio.ServicerContext[Any, Any]


class Judge(Protocol):
    """Judges the calls of one method."""

    async def enter(self, context: Context) -> AbstractContextManager[None]:
        """Let a call in, before its request is read: its place, for as long as it lasts.

        Its caller becomes the current one.

        Raises:
            Unauthenticated: Who calls is not proven.
            PermissionDenied: No caller may make this call here.
            ResourceExhausted: The caller has reached its limit, or as Unavailable.
            Unavailable: Who calls cannot be found out now.
        """

    async def judge(self, context: Context, request: Any) -> None:
        """Let a request be served; as `enter` for who calls, since a token may have ended.

        Raises:
            PermissionDenied: The caller may not make this call.
        """

    async def renew(self, context: Context) -> None:
        """Let one more response of a stream go; raises as `enter` once its token has ended."""


class Door(Protocol):
    """One port of a process."""

    def judge_of(self, method: str) -> Judge | None:
        """What judges the calls of a method; None lets all of them in."""


class ServiceDoor:
    """The port for services: its handshake lets in certificates of our authorities alone."""

    def __init__(self, identity: str = "") -> None:
        """Let in those whose certificate has this name; empty, as without TLS: everybody."""
        self._judge = _ByIdentity(identity) if identity else None

    def judge_of(self, method: str) -> Judge | None:
        return None if method.startswith(PROBE_PREFIXES) else self._judge


class ClientDoor:
    """The port for clients."""

    def __init__(self, callers: Callers | None, auditor: Auditor) -> None:
        """Judge calls by the policy of `callers`; without one, all clients may do everything.

        The acts of callers are recorded where there is a policy: without, no caller has a name.
        """
        self._callers = callers
        self._auditor = auditor

    def judge_of(self, method: str) -> Judge | None:
        try:
            access = access_of(method)
        except LookupError:
            # Nothing says who may call it, so no policy can permit it.
            return None if self._callers is None else _ForServices()
        if access.caller == "anyone":
            return None
        if self._callers is None:
            return _ForServices() if access.caller == "service" else None
        return _ByPolicy(self._callers, self._auditor, method, access)


class _ByIdentity:
    def __init__(self, identity: str) -> None:
        self._identity = identity

    async def enter(self, context: Context) -> AbstractContextManager[None]:
        if self._identity not in _proven_names(context):
            raise PermissionDenied(
                f"the certificate does not have the name {self._identity}",
                reason="FOR_SERVICES_ALONE",
            )
        return NO_PLACE

    async def judge(self, context: Context, request: Any) -> None:
        """Nothing: the certificate is that of the connection."""

    async def renew(self, context: Context) -> None:
        """Nothing, likewise."""


class _ForServices:
    async def enter(self, context: Context) -> AbstractContextManager[None]:
        raise _for_services()

    async def judge(self, context: Context, request: Any) -> None:
        await self.enter(context)

    async def renew(self, context: Context) -> None:
        await self.enter(context)


def _for_services() -> PermissionDenied:
    return PermissionDenied(
        "only services call this, on their own port", reason="FOR_SERVICES_ALONE"
    )


class _ByPolicy:
    def __init__(
        self, callers: Callers, auditor: Auditor, method: str, access: MethodAccess
    ) -> None:
        self._callers = callers
        self._auditor = auditor
        self._method = method
        self._access = access
        self._is_audited = access.caller in AUDITED
        self._place: Place | None = None
        if access.is_stream:
            self._place = "open_streams"
        elif access.is_claim:
            self._place = "waiting_claims"
        # On a stream each publish is answered for itself.
        self._is_publish = access.caller == "publish" and not access.is_stream

    async def enter(self, context: Context) -> AbstractContextManager[None]:
        caller: Caller | None = None
        try:
            caller = await self._caller(context)
            if self._access.caller == "service":
                raise _for_services()
        except SlateMQError:
            if self._is_audited:
                principal = None if caller is None else caller.principal
                self._auditor.watch(context, self._method, (), principal)
            raise
        current_caller.set(caller)
        if self._is_publish:
            caller.quota.admit_publish()
        return NO_PLACE if self._place is None else caller.quota.place(self._place)

    async def judge(self, context: Context, request: Any) -> None:
        caller = await self._caller(context)
        if self._is_audited:
            subjects = subjects_of(self._access.queues(request))
            self._auditor.watch(context, self._method, subjects, caller.principal)
        caller.check(self._access, request)
        current_caller.set(caller)

    async def renew(self, context: Context) -> None:
        if self._access.caller != "publish":  # Its answers say what its caller sent itself.
            await self._caller(context)

    async def _caller(self, context: Context) -> Caller:
        authorization = ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                authorization = value if isinstance(value, str) else value.decode("latin-1")
                break
        caller = self._callers.known(authorization) if authorization else None
        return await self._find(context, authorization) if caller is None else caller

    async def _find(self, context: Context, authorization: str) -> Caller:
        return await self._callers.find(authorization, _proven_names(context))


def _proven_names(context: Context) -> frozenset[str]:
    """The names in the caller's certificate. Raises Unauthenticated for TLS before 1.3."""
    auth = context.auth_context()
    if is_old(auth):
        raise Unauthenticated("connect with TLS 1.3", reason="OLD_TLS")
    return identities(auth)
