"""The server's TCP socket, open before anything heavy is imported: a taken port is known at once."""

from __future__ import annotations

import socket

from pagemill.errors import ConfigError

_BACKLOG = 2048  # connections that wait to be taken; the HTTP server's own number


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raises ConfigError saying why it cannot."""
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
        bound.listen(_BACKLOG)  # two sockets may be bound to one port as long as neither listens
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error) from None
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error that says where the server could not listen, and what to do."""
    return ConfigError(
        f"cannot listen on {host} port {port}: {error.strerror}; choose another --port, or 0 "
        "for a free one"
    )
