"""Sizes and times that both ends of every connection agree on, each with its reason.

These are the gRPC channel arguments of servers and of channels between services; the public client
takes its own from the same numbers.
"""

from __future__ import annotations

import resource

MEBIBYTE = 1024 * 1024

PAYLOAD_BYTES_MAX = 64 * MEBIBYTE
"""The largest payload by default; a setting of the instance may change it."""

HEADERS_COUNT_MAX = 255
"""Headers per message: their count is a u8 on disk (RFC 0001, metadata log)."""

HEADER_TEXT_BYTES_MAX = 65_535
"""Bytes of one header's key or value: the length of a Utf8 is a u16 on disk."""

HEADERS_BYTES_MAX = HEADERS_COUNT_MAX * (2 * HEADER_TEXT_BYTES_MAX + 16)
"""All headers of one message on the wire: 255 full keys and values, tags and lengths (33 MB)."""

RETENTION_S_MAX = (1 << 32) - 1
"""The longest retention that ends, in seconds (136 years): it is a u32 on disk."""

MESSAGE_DELAY_MS_MAX = 100 * 31_557_600 * 1000
"""100 years: the most that the setting of the longest delay may ask."""

REQUEST_ID_BYTES_MAX = 128
"""A UUID has 36; those of publishes are stored for ten minutes."""

HEADROOM_BYTES = 1 * MEBIBYTE
"""For everything else in a request, and for the framing of the messages of a full batch."""

PAYLOAD_BYTES_CEILING = 1024 * MEBIBYTE
"""The most the payload setting may ask: protobuf ends at 2 GiB, and each call is in memory."""

REQUESTS_BYTES_MAX = 96 * MEBIBYTE
"""Bytes of requests over 32 KiB in work at once, a single larger one aside; the others wait. Each
takes three to four times its bytes in work, so this is some 400 MB at worst."""

ARRIVING_AT_ONCE = 4
"""Requests that may be arriving at once while they are large, of methods with payloads and of the
others. The bytes of a request are in memory before they can be seen: of four of 64 MiB, 256 MiB."""

STREAM_MESSAGE_BYTES_MAX = 2 * MEBIBYTE
"""The largest message on a stream: what is larger is a call of its own, and has its turn to arrive.
Producers gather no more than a megabyte for a stream."""

STREAMS_SUDDEN_BYTES_MAX = 256 * MEBIBYTE
"""By how much a process may grow within some seconds while streams wait for messages, besides twice
what it holds for its callers; over it the streams are ended. Above what caches and commits of a
busy process take meanwhile."""

STREAMS_LASTING_BYTES_MAX = 384 * MEBIBYTE
"""By how much it may grow in any time, besides the same. Caches and leases take less: a broker grew
by 220 MB with 300,000 messages, of which 200,000 were in flight."""

SILENT_CALLS_MAX = 1_000
"""Calls whose request has not come, of methods with payloads and of the others, and streams without
their first one. The oldest is ended for a further one: calls in flight are bounded, and silent
callers must leave room for others."""

PROBE_STREAMS_MAX = 256
"""Watches of health, and streams of reflection, of each port: the few that look after a process,
many times. Anyone may open them, so one more ends the oldest."""

PROBES_AT_ONCE = 2
"""Requests of health and reflection that may arrive at once; they wait for no others."""

PASSED_OVER_AT_ONCE = 1
"""Requests that arrive at once only to be passed over, while they are large: on streams of callers
without a good proof, and of methods that are not served."""

ARRIVING_GROWTH_BYTES_MAX = 8 * MEBIBYTE
"""By how much the process may have grown since slow requests began to arrive for more to do so,
besides a quarter of a megabyte for each of them."""

HEALTH_PREFIX = "/grpc.health."
PROBE_PREFIXES = (HEALTH_PREFIX, "/grpc.reflection.")
"""Methods that are answered in every state."""

ADMISSION_CALLS_MAX = 10_000
"""Calls in flight per process. A waiting claim costs about 20 KiB, so this is some 200 MB at worst;
over it, callers are asked to wait instead of all becoming slow."""

CONNECTIONS_MAX = 4_096
"""Connections of each gRPC port; with less room for open files, a quarter of it. So the store has
the files that it needs: without them, its owner ends."""

HTTP_CONNECTIONS_MAX = 256
"""Connections of the HTTP port; with less room for open files, an eighth of it. A further one takes
the place of the oldest that has no request in work: so those that say nothing, or a byte at a time,
keep no caller out."""

HANDSHAKE_MS_MAX = 10_000
"""From the connection until the peer's first settings; gRPC's own 120 s keep a file open for those
that say nothing."""

CONNECTION_IDLE_MS_MAX = 300_000
"""A connection of a client without a call is closed after this: those that answer pings and do
nothing else would keep others out. One with a stream is not idle, however silent the stream is."""

KEEPALIVE_TIME_MS = 20_000
"""Ping an idle connection this often: below the 60 s after which cloud load balancers forget it."""

KEEPALIVE_TIMEOUT_MS = 10_000
"""Without an answer to a ping for this long, the peer is gone. gRPC needs it twice: what ends the
connection is `grpc.http2.ping_timeout_ms`, which is 60 s unless it is set."""

PING_INTERVAL_MS_MIN = 1_000
"""Peers may ping this often. Clients ping after 5 s of silence, to notice a frozen server soon;
gRPC's own minimum of 5 min would cut them off."""

RECONNECT_BACKOFF_MS_MIN = 50
RECONNECT_BACKOFF_MS_MAX = 1_000
"""A restarted service is back within a second or two: gRPC's 120 s would look like an outage."""

CONNECT_MS_MAX = 5_000
"""How long one try to connect may take; gRPC calls it its least backoff. With less than a busy or
far server needs to answer, no connection would ever come about."""

CALL_DEADLINE_MS = 10_000
"""Of a call between services that states none of its own."""


_KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)


def message_bytes_max(payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> int:
    """The largest gRPC message: any legal message fits, in a request and in a response."""
    return payload_bytes_max + HEADERS_BYTES_MAX + HEADROOM_BYTES


def within_open_files(most: int, part: int) -> int:
    """`most`, but not above 1/`part` of the files that the process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // part)


def server_options(
    payload_bytes_max: int = PAYLOAD_BYTES_MAX, idle_ms_max: int = 0
) -> list[tuple[str, int]]:
    """`idle_ms_max`: how long a connection may have no call; 0: as long as it likes."""
    size = message_bytes_max(payload_bytes_max)
    return [
        *([("grpc.max_connection_idle_ms", idle_ms_max)] if idle_ms_max else []),
        # Over the limit, so that what is a little too large gets an answer that says so (the guard
        # holds the limit); gRPC's own refusal comes without details.
        ("grpc.max_receive_message_length", size + size // 4),
        ("grpc.max_send_message_length", size),
        # Without it gRPC widens the window of a stream to megabytes, and reads as much of each
        # request that was not asked for. What was asked for gets the window that it needs.
        ("grpc.http2.bdp_probe", 0),
        # Identity alone: gRPC unpacks without a bound, so a kilobyte of gzip could take a gigabyte.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_allowed_incoming_connections", within_open_files(CONNECTIONS_MAX, 4)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        # One connection has no more calls than the process; gRPC's own bound is 2^31.
        ("grpc.max_concurrent_streams", ADMISSION_CALLS_MAX),
        # Without this Linux lets two processes share a port, each getting half of the calls.
        ("grpc.so_reuseport", 0),
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
    ]


def channel_options(payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> list[tuple[str, int]]:
    size = message_bytes_max(payload_bytes_max)
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        *_KEEPALIVE,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MIN),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS_MAX),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
        # Our own retries know which calls may be repeated; gRPC's would hide an outage.
        ("grpc.enable_retries", 0),
        # One subchannel per channel: a closed channel leaves no backoff behind for the next one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
