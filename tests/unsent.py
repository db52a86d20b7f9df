"""What gRPC's own client says where it lost an answer."""

from typing import Final

UNSENT: Final = "Internal error from Core"
"""What the client itself says, with INTERNAL, where its stream ended while it sent: the server's
answer is lost to it."""
