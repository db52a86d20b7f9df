"""The doors of a process: the port for clients, and the port for services.

::

    clients ──► client door ── who calls? may it? ──► handlers of all services
    services ─► service door ── (mTLS: services alone get in) ──────┘

Each RPC's proto says who may call it (`slatemq/v1/access.proto`). The client door refuses what is
for services, with a policy or without; with one, it asks it about everything else. Who calls, and
whether the limits of that principal leave room for the call, is judged before a request is read; so
is whether a caller without a proof may make such a call at all.

Each call is a visit, which keeps who makes it: the headers are read, and the token is looked up,
once. A stream asks again only after a change of the files, or when its token ends; then its first
request is judged again, too, since it says what the stream is about. The certificate of its
connection is looked up in the lists of revoked ones, where there are such, likewise. One that is
silent is ended by `open_calls`.

TLS looks at the time in a handshake alone. So a client's certificate that has expired is refused
here, as a token is, however old its connection. Connections of services last: these make new ones
when their files change, and one whose files are late must not end the instance at that second.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import grpc.aio

from libs.access.audit import AUDITED, subjects_of
from libs.access.current import current_caller
from libs.access.methods import MethodAccess, access_of
from libs.access.principals import ANONYMOUS, Principal
from libs.serving.limits import HEALTH_PREFIX
from libs.serving.requests.auditing import Auditor, PendingAct
from libs.serving.requests.open_calls import OpenCall, OpenCalls
from libs.serving.tls import client_certificate, is_old
from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, grpc_code, to_status
from slatemq.errors import PermissionDenied, SlateMQError, Unauthenticated

if TYPE_CHECKING:
    from libs.access.callers import Caller, Callers, Identity
    from libs.access.quotas import CallSlot
    from libs.serving.revocations import Revocations

Context = grpc.aio.ServicerContext[Any, Any]


class Visit:
    """One call that was let in, until the end of the context; this one may do everything.

    Attributes:
        answers_publishes: Whether it is a call that publishes, and its caller is judged.
    """

    __slots__ = ()

    answers_publishes = False

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Note how the handler of the call ended."""

    async def judge(self, request: Any) -> None:
        """Let a request be served; as `Judge.enter` for who calls, since a token may have ended.

        Raises:
            PermissionDenied: The caller may not make this call.
        """

    def charge(self, size_bytes: int) -> None:
        """Count a request of this size that cannot be read: as one publish, if it is to be one."""

    def follow(self, responses: AsyncGenerator[Any, None]) -> None:
        """Have a stream end when it would be refused, even if nothing comes."""

    async def renew(self) -> None:
        """Let one more response of a stream go, or that of a claim.

        Raises as `enter` once its token has ended, and as `judge` once the policy forbids the call.
        """


UNJUDGED: Final = Visit()

current_visit: ContextVar[Visit] = ContextVar("current_visit", default=UNJUDGED)
"""Of the call that a task serves. The guard renews it for each response of a stream; a handler that
would have to undo a response does so before, as does one that has waited for it."""


class Judge(Protocol):
    """Judges the calls of one method."""

    async def enter(self, context: Context) -> Visit:
        """Let a call in, before its request is read.

        Its caller becomes the current one.

        Raises:
            Unauthenticated: The caller's identity is not proven.
            PermissionDenied: No caller may make this call here.
            ResourceExhausted: The caller has reached its limit, or as Unavailable.
            Unavailable: The caller's identity cannot be found out now.
        """


class Door(Protocol):
    """One port of a process."""

    def judge_of(self, method: str) -> Judge | None:
        """What judges the calls of a method; None lets all of them in."""


class ServiceDoor:
    """The port for services: its handshake lets in certificates of our authorities alone.

    Attributes:
        open_calls: The streams that it has let in.
    """

    def __init__(
        self,
        identity: str = "",
        revoked: Revocations | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        """Let in those whose certificate has this DNS name; empty, as without TLS: everybody.

        `auditor` records the calls of others.
        """
        self._identity = identity
        self._certificates = Certificates(revoked)
        self._auditor = auditor
        self.open_calls = OpenCalls(lambda: (self._certificates.version, None))

    def judge_of(self, method: str) -> Judge | None:
        if not self._identity or method.startswith(HEALTH_PREFIX):
            return None
        return _ByIdentity(
            self._identity, self._certificates, self.open_calls, self._auditor, method
        )


class ClientDoor:
    """The port for clients.

    Attributes:
        open_calls: The streams and waiting claims that it has let in.
    """

    def __init__(
        self,
        callers: Callers | None,
        auditor: Auditor,
        revoked: Revocations | None = None,
        *,
        has_tls: bool = False,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Judge calls by the policy of `callers`; without one, all clients may do everything.

        The acts of callers are recorded where there is a policy: without, no caller has a name.
        With TLS, connections of an old version, or with a certificate that is revoked or has
        expired by the clock, are refused always.
        """
        self._callers = callers
        self._auditor = auditor
        self._certificates = Certificates(revoked, clock_s)
        self.open_calls = OpenCalls(self._version, clock_s)
        self._has_tls = has_tls

    def _version(self) -> object:
        return self._certificates.version, self._callers and self._callers.version

    def _by_connection(self, *, publishes: bool) -> Judge | None:
        if not self._has_tls:
            return None
        return _ByConnection(self._certificates, self.open_calls, publishes=publishes)

    def judge_of(self, method: str) -> Judge | None:
        try:
            access = access_of(method)
        except LookupError:
            # Nothing says who may call it, so no policy can permit it.
            return self._by_connection(publishes=False) if self._callers is None else _ForServices()
        if access.caller == "anyone":
            return None
        if self._callers is None:
            if access.caller == "service":
                return _ForServices()
            return self._by_connection(publishes=access.publishes)
        return _ByPolicy(
            self._callers, self._certificates, self.open_calls, self._auditor, method, access
        )


class Certified(NamedTuple):
    """What the certificate of a connection proves.

    Attributes:
        names: The names in it; empty without one.
        dns_names: Those of DNS among them.
        version: That of the lists in which it was looked up.
        until_s: When it expires, in seconds since the Unix epoch.
    """

    names: frozenset[str]
    dns_names: frozenset[str]
    version: int
    until_s: float


class Certificates:
    """What the certificates of clients prove."""

    def __init__(
        self, revoked: Revocations | None, clock_s: Callable[[], float] | None = None
    ) -> None:
        """`revoked`: the certificates that prove nothing; without a clock, none expires."""
        self._revoked = revoked
        self._clock_s = clock_s

    @property
    def version(self) -> int:
        """That of the lists."""
        return 0 if self._revoked is None else self._revoked.version

    def look(self, context: Context) -> Certified:
        """Find out what the caller's certificate proves.

        Raises:
            Unauthenticated: It is revoked, has expired or has a name that is refused, or the
                connection is TLS before 1.3.
        """
        version = self.version
        auth = context.auth_context()
        if is_old(auth):
            raise Unauthenticated("connect with TLS 1.3", reason="OLD_TLS")
        if self._revoked is not None:
            self._revoked.value.check(auth)
        certificate = client_certificate(auth)
        until_s = inf if self._clock_s is None else certificate.expires_at_s
        if self._clock_s is not None and self._clock_s() >= until_s:
            raise Unauthenticated(
                "the certificate of this connection has expired: connect with a new one",
                reason="CERTIFICATE_EXPIRED",
            )
        return Certified(certificate.names, certificate.dns_names, version, until_s)

    def look_again(self, context: Context, before: Certified) -> Certified:
        """What it proves now; as `look`, where something may have changed."""
        is_over = self._clock_s is not None and self._clock_s() >= before.until_s
        return before if self.version == before.version and not is_over else self.look(context)


class _CertifiedVisit(Visit):
    """A call whose connection has a good certificate, or needs none."""

    __slots__ = ("_certificates", "_certified", "_context", "_open", "_open_calls", "_publishes")

    def __init__(
        self,
        certificates: Certificates,
        open_calls: OpenCalls,
        context: Context,
        certified: Certified,
        *,
        publishes: bool = False,
    ) -> None:
        self._certificates = certificates
        self._open_calls = open_calls
        self._context = context
        self._certified = certified
        self._open: OpenCall | None = None
        self._publishes = publishes

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        refusal = self._leave(error)
        if refusal is not None:
            raise refusal from None

    async def judge(self, request: Any) -> None:
        await self._judge_again()

    def follow(self, responses: AsyncGenerator[Any, None]) -> None:
        if not self._publishes:  # Those say what the caller sent itself.
            self._stay(responses)

    async def renew(self) -> None:
        if not self._publishes:
            await self._judge_again()

    async def _judge_again(self) -> None:
        """Raise what the first request would be refused with now, if it has come."""
        self._look_again()

    def _stay(self, responses: AsyncGenerator[Any, None] | None = None) -> None:
        self._open = OpenCall(
            self._judge_open, self._version, self._until_s, responses, self._abort
        )
        self._open_calls.add(self._open)

    async def _abort(self, refusal: SlateMQError) -> None:
        status = to_status(refusal)
        details = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        with suppress(Exception):  # Always AbortError; or the caller is gone.
            await self._context.abort(grpc_code(status), status.message, details)

    def _leave(self, error: BaseException | None) -> SlateMQError | None:
        """The refusal that has ended the call, if one has."""
        self._end_alone()
        return None if self._open is None else self._open.refusal_for(error)

    def _end_alone(self) -> None:
        """Not be ended from outside any more: its handler cleans up."""
        if self._open is not None:
            self._open_calls.remove(self._open)

    @property
    def _version(self) -> object:
        """That of the files, before it was judged the last time."""
        return self._certified.version, None

    @property
    def _until_s(self) -> float:
        return self._certified.until_s

    async def _judge_open(self) -> float:
        """As `OpenCall.judge`: in another task, so the caller stays as it is."""
        return self._certificates.look_again(self._context, self._certified).until_s

    def _look_again(self) -> None:
        """Raise Unauthenticated once the certificate of the connection proves nothing more."""
        try:
            self._certified = self._certificates.look_again(self._context, self._certified)
        except Unauthenticated:
            self._end_alone()
            raise


class _ByConnection:
    """Lets in everyone whose TLS is new enough, and whose certificate is not revoked."""

    def __init__(
        self, certificates: Certificates, open_calls: OpenCalls, *, publishes: bool
    ) -> None:
        self._certificates = certificates
        self._open_calls = open_calls
        self._publishes = publishes

    async def enter(self, context: Context) -> Visit:
        certified = self._certificates.look(context)
        return _CertifiedVisit(
            self._certificates, self._open_calls, context, certified, publishes=self._publishes
        )


class _ByIdentity:
    def __init__(
        self,
        identity: str,
        certificates: Certificates,
        open_calls: OpenCalls,
        auditor: Auditor | None,
        method: str,
    ) -> None:
        self._identity = identity
        self._certificates = certificates
        self._open_calls = open_calls
        self._auditor = auditor
        self._method = method

    async def enter(self, context: Context) -> Visit:
        caller: Principal | None = None
        try:
            certified = self._certificates.look(context)
            if self._identity not in certified.dns_names:
                names = certified.names
                caller = Principal(min(names), "certificate") if names else None
                raise PermissionDenied(
                    f"the certificate does not have the DNS name {self._identity}",
                    reason="FOR_SERVICES_ALONE",
                )
        except SlateMQError as error:
            if self._auditor is not None:
                self._auditor.watch(context, self._method, (), (), caller, error)
            raise
        return _CertifiedVisit(self._certificates, self._open_calls, context, certified)


class _ForServices:
    async def enter(self, context: Context) -> Visit:
        raise _for_services()


def _for_services() -> PermissionDenied:
    return PermissionDenied(
        "only services call this, on their own port", reason="FOR_SERVICES_ALONE"
    )


class _ByPolicy:
    def __init__(
        self,
        callers: Callers,
        certificates: Certificates,
        open_calls: OpenCalls,
        auditor: Auditor,
        method: str,
        access: MethodAccess,
    ) -> None:
        self._callers = callers
        self.certificates = certificates
        self.open_calls = open_calls
        self._auditor = auditor
        self._method = method
        self._access = access
        self.is_audited = access.caller in AUDITED
        self._place: CallSlot | None = None
        if access.is_stream:
            self._place = "open_streams"
        elif access.waits:
            self._place = "waiting_claims"
        self.waits = self._place == "waiting_claims"
        self.answers_publishes = access.publishes
        # On a stream each publish is answered for itself.
        self._is_publish = self.answers_publishes and not access.is_stream

    async def enter(self, context: Context) -> Visit:
        identity: Identity | None = None
        try:
            certified = self.certificates.look(context)
            identity = await self._callers.identify(
                _authorization(context), certified.names, context.peer
            )
            if self._access.caller == "service":
                raise _for_services()
            if identity.caller.principal is ANONYMOUS:
                identity.caller.check_queues(self._access, ())
        except SlateMQError as error:
            is_proof_refused = identity is None and isinstance(error, Unauthenticated)
            if self.is_audited or is_proof_refused:
                self.record(context, identity, None, error)
            raise
        caller = identity.caller
        current_caller.set(caller)
        try:
            if self._is_publish:
                caller.quota.admit_publish()
            elif not self.answers_publishes:
                await caller.quota.pace(context.time_remaining())
        except SlateMQError as error:
            self.refuse(context, identity, error)
            raise
        place = None if self._place is None else caller.quota.place(self._place)
        return _JudgedVisit(self, context, certified, identity, place)

    def check(self, context: Context, identity: Identity, request: Any) -> PendingAct | None:
        """Let the caller make this call; returns the act that it is, if it is one.

        Raises PermissionDenied or Unauthenticated unless the caller may make it.
        """
        try:
            identity.caller.check(self._access, request)
        except SlateMQError as error:
            if self.is_audited:
                self.record(context, identity, request, error)
            raise
        return self.record(context, identity, request) if self.is_audited else None

    def refuse(self, context: Context, identity: Identity, error: SlateMQError) -> None:
        """Record an act that is refused before its request is judged, and may not be known."""
        if self.is_audited:
            self.record(context, identity, None, error)

    def named(self, request: Any) -> tuple[str, ...]:
        """The queues that a stream is about, by its first request, or a call that may wait."""
        lasts = self._access.is_stream or self._access.waits
        return tuple(dict.fromkeys(self._access.queues(request))) if lasts else ()

    def check_again(self, caller: Caller, queues: tuple[str, ...]) -> None:
        """Like `check`, of a stream's first request, which is not a second act."""
        caller.check_queues(self._access, queues)

    def record(
        self,
        context: Context,
        identity: Identity | None,
        request: Any,
        refusal: SlateMQError | None = None,
    ) -> PendingAct:
        """Record an act; `request` is None where it was not read."""
        principal = None if identity is None else identity.caller.principal
        subjects: tuple[str, ...] = ()
        details: tuple[str, ...] = ()
        if request is not None:
            subjects = subjects_of(self._access.queues(request))
            details = subjects_of(self._access.details(request))
        return self._auditor.watch(context, self._method, subjects, details, principal, refusal)


class _JudgedVisit(_CertifiedVisit):
    __slots__ = (
        "_act",
        "_identity",
        "_is_judged",
        "_judge",
        "_place",
        "_queues",
        "answers_publishes",
    )

    def __init__(
        self,
        judge: _ByPolicy,
        context: Context,
        certified: Certified,
        identity: Identity,
        place: AbstractContextManager[None] | None,
    ) -> None:
        super().__init__(
            judge.certificates,
            judge.open_calls,
            context,
            certified,
            publishes=judge.answers_publishes,
        )
        self.answers_publishes = judge.answers_publishes
        self._judge = judge
        self._identity = identity
        self._place = place
        self._act: PendingAct | None = None
        self._is_judged = False
        self._queues: tuple[str, ...] | None = None

    def __enter__(self) -> Visit:
        if (place := self._place) is not None:
            try:
                place.__enter__()
            except SlateMQError as error:
                self._judge.refuse(self._context, self._identity, error)
                raise
            # Called when gRPC has sent the last response: until its caller reads it, it is memory.
            context: Any = self._context
            context.add_done_callback(lambda _: place.__exit__(None, None, None))
        if self._judge.waits:
            self._stay()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        refusal = self._leave(error)
        if self._act is not None:
            self._act.handled(refusal or error)
        elif not self._is_judged and isinstance(error, SlateMQError):
            self._judge.refuse(self._context, self._identity, error)
        if refusal is not None:
            self._note_unproven(refusal)
            raise refusal from None

    async def judge(self, request: Any) -> None:
        self._is_judged = True
        await self._judge_again()
        self._act = self._judge.check(self._context, self._identity, request)
        if self._queues is None:
            self._queues = self._judge.named(request)

    def charge(self, size_bytes: int) -> None:
        if self.answers_publishes:
            self._identity.caller.quota.charge(size_bytes)

    @property
    def _version(self) -> object:
        return self._certified.version, self._identity.version

    @property
    def _until_s(self) -> float:
        return min(self._certified.until_s, self._identity.until_s)

    async def _judge_open(self) -> float:
        certified_s = await super()._judge_open()
        caller, proven_s = await self._identity.prove()
        if self._queues is not None:
            self._judge.check_again(caller, self._queues)
        return min(certified_s, proven_s)

    async def _judge_again(self) -> None:
        try:
            self._look_again()
            if await self._identity.renew():
                current_caller.set(self._identity.caller)
                if self._queues is not None:
                    self._judge.check_again(self._identity.caller, self._queues)
        except SlateMQError as error:
            self._end_alone()
            self._note_unproven(error)
            raise

    def _note_unproven(self, error: SlateMQError) -> None:
        """Record that the proof has ended, unless an act that says so is on its way."""
        is_acting = self._queues is not None and self._judge.is_audited
        if isinstance(error, Unauthenticated) and not is_acting:
            self._judge.record(self._context, self._identity, None, error)


def _authorization(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""
