"""`ServerArgs`, the one list of the HTTP server's own arguments; flags derive from it as from EngineArgs."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.service_checks import LONGEST_S
from pagemill.engine_args import arg
from pagemill.errors import ConfigError
from pagemill.path_names import check_path

MAX_PORT = 65535


@dataclass
class ServerArgs:
    """Arguments of `pagemill serve` beside the engine's."""

    host: str = arg("0.0.0.0", "server", "address to listen on")
    port: int = arg(8000, "server", "port to listen on; 0: any free one, which the log names")
    uds: str | None = arg(None, "server", "path of a unix socket to listen on instead")
    api_key: list[str] = arg([], "server", "keys that a client may send; none: no key is asked for")
    chat_template: str | None = arg(
        None, "server", "Jinja file, or the template itself; default: the model's"
    )
    ssl_keyfile: str | None = arg(None, "server", "private key, PEM")
    ssl_certfile: str | None = arg(None, "server", "certificate, PEM")
    root_path: str = arg("", "server", "path prefix that a proxy in front strips")
    allowed_origins: list[str] = arg(["*"], "server", "origins that browsers may call from")
    disable_log_requests: bool = arg(False, "server", "no log line a request")
    start_timeout: float | None = arg(
        None, "server", "seconds after which a request that was not begun gets 504; default: none"
    )
    request_timeout: float | None = arg(
        None, "server", "seconds after which a request that is not finished gets 504; default: none"
    )
    send_timeout: float = arg(
        60.0,
        "server",
        "seconds after which a client that reads nothing of what waits for it is disconnected",
    )
    shutdown_timeout: float = arg(
        20.0,
        "server",
        "seconds that open requests have to end after SIGTERM or SIGINT; then they are aborted",
    )
    max_body_bytes: int = arg(
        64 * 2**20, "server", "largest request body; a larger one gets 413; default: 64MiB"
    )

    def check(self) -> None:
        """Raise ConfigError for a value that cannot be."""
        for name in ("uds", "ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None:
                check_path(name, path)
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port is {self.port}; it must be from 0 to {MAX_PORT}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes is {self.max_body_bytes}; it must be at least 1")
        for name in ("start_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= LONGEST_S:
                raise ConfigError(
                    f"{name} is {seconds}; it must be a number of seconds greater than 0 and at most "
                    f"{LONGEST_S:g}, or left out for no limit"
                )
        if not 0 < self.send_timeout <= LONGEST_S:
            raise ConfigError(
                f"send_timeout is {self.send_timeout}; it must be a number of seconds greater than 0 and at "
                f"most {LONGEST_S:g}"
            )
        if not 0 <= self.shutdown_timeout <= LONGEST_S:
            raise ConfigError(
                f"shutdown_timeout is {self.shutdown_timeout}; it must be a number of seconds from 0 to "
                f"{LONGEST_S:g}"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both")
        if any(not key for key in self.api_key):
            raise ConfigError("api_key holds an empty key; leave it out to ask for none")
