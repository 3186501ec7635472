"""The server's TCP socket, bound before anything heavy is imported: a taken port is known at once."""

from __future__ import annotations

import socket

from pagemill.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError saying why it cannot be."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, ValueError) as error:  # ValueError: of names that can be no host's
        raise ConfigError(f"host is {host!r}: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port, or 0 "
            "for a free one"
        ) from None
    return bound
