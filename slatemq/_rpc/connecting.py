"""How a client's channels are opened: plain or TLS, with the metadata of every call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import grpc.aio

from slatemq._rpc.forks import note_channel
from slatemq._rpc.metadata_channels import CallMetadata, channel_with
from slatemq._rpc.tls import CertificateFiles, ChannelTls, channel_to
from slatemq._rpc.tls_probe import tls_mismatch
from slatemq._secrets import path_of
from slatemq.credentials import Credentials, TokenSource, is_loopback
from slatemq.errors import InvalidArgument, SlateMQError

Proof = tuple[int, int]
"""A number each of certificate and token, which grows with each new one."""


class Connecting:
    """Opens the channels of one client."""

    def __init__(
        self, credentials: Credentials | None = None, context: CallMetadata | None = None
    ) -> None:
        """Prove these credentials; give every call the trace context, where there is any.

        Raises:
            InvalidArgument: A file of the credentials is not usable.
        """
        credentials = credentials or Credentials()
        self._tls = None
        self._has_certificate = credentials.cert is not None
        if credentials.is_tls:
            files = CertificateFiles(
                *map(_path, (credentials.ca, credentials.cert, credentials.key))
            )
            self._tls = ChannelTls(files, credentials.server_name)
        sources = [context] if context is not None else []
        self._token: TokenSource | None = None
        if credentials.token or credentials.token_file:
            self._token = TokenSource(credentials)
            sources.append(self._token.metadata)
        self._metadata: CallMetadata | None = None
        if len(sources) == 1:
            self._metadata = sources[0]
        elif sources:
            self._metadata = lambda: (*chain.from_iterable(source() for source in sources),)

    @property
    def version(self) -> int:
        """Grows when certificates change: channels opened before it should be opened again."""
        return 0 if self._tls is None else self._tls.version

    @property
    def proof(self) -> Proof:
        """Which token and which certificate calls that begin now have."""
        return self.version, 0 if self._token is None else self._token.version

    async def mismatch(self, address: str) -> SlateMQError | None:
        """The error about a server that wants another kind of client: with TLS, for example."""
        return await tls_mismatch(
            address, is_tls=self._tls is not None, has_certificate=self._has_certificate
        )

    def open(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel to `host:port`.

        Raises:
            InvalidArgument: A token would be sent over a network without TLS.
        """
        if self._tls is None and self._token is not None and not is_loopback(address):
            raise InvalidArgument(
                "credentials", f"a token is sent to another machine by TLS alone, not to {address}"
            )
        channel = channel_to(address, options, self._tls)
        note_channel(channel)
        return channel if self._metadata is None else channel_with(self._metadata, channel)


def _path(file: str | Path | None) -> Path | None:
    return None if file is None else path_of(file)
