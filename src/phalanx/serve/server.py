"""The server: opens its port, warms up the model, responds, and drains when it has to stop."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import uvicorn

from phalanx.errors import EXIT_LEFT_AT_ONCE, Bug, NetworkError
from phalanx.serve.app import WriteLogLine, build_app
from phalanx.serve.http_protocol import LimitedProtocol
from phalanx.serve.service import ServeLimits, Service
from phalanx.signals import find_stop_signals

_SWITCH_S = 0.0005  # between threads that need Python's lock: a model must not wait for parsing
_SPARE_FILES = 64  # descriptors for other things than connections
_BACKLOG = 1024
_GRACE_S = 0.5  # after a signal: for requests sent before clients could know of it
_READ_TURNS = 10  # of the event loop, so that what has arrived is read
_CHECK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class _ListeningSocket:
    """A bound address, before the server listens there."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address that a browser on this machine opens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def open_port(host: str, port: int) -> Iterator[_ListeningSocket]:
    """A context with a bound port, 0 for any free one; NetworkError if it cannot be bound."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise NetworkError(f"--host {host}: no such address here ({error.strerror})") from None
    taken = socket.socket(family, kind, proto)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _explain_bind(error, host, port) from None
    with taken:
        yield _ListeningSocket(socket=taken, host=host, port=taken.getsockname()[1])


def _explain_bind(error: OSError, host: str, port: int) -> NetworkError:
    where = f"--port {port}"
    if error.errno == errno.EADDRINUSE:
        return NetworkError(
            f"{where}: another program listens on port {port} of {host}; choose another, or "
            "--port 0 for any that is free"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return NetworkError(f"{where}: ports below 1024 need permission; choose a higher one")
    return NetworkError(f"--host {host} {where}: {error.strerror}")


class _Server(uvicorn.Server):
    """Uvicorn's server, with our handling of signals and of slow clients."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        listening: _ListeningSocket,
        protocol: type[LimitedProtocol],
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service, self._listening, self._on_ready = service, listening, on_ready
        self._protocol = protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A context in which signals only stop the server; a second Ctrl-C exits at once."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in find_stop_signals()}
        for number in before:
            loop.add_signal_handler(number, self._handle_signal, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _handle_signal(self, number: int) -> None:
        if self.should_exit and number == signal.SIGINT:
            os._exit(EXIT_LEFT_AT_ONCE)
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True
        self._service.ready = False
        self._protocol.is_stopping = True
        for connection in self.server_state.connections:
            if isinstance(connection, LimitedProtocol) and connection.cycle is not None:
                connection.cycle.keep_alive = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report it."""
        try:
            await super().startup(sockets)
        except OSError as error:  # another program bound the same port, and listened first
            raise _explain_bind(error, self._listening.host, self._listening.port) from None
        self._service.ready = True
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Respond to requests sent before clients could know of the signal, then close."""
        checking = asyncio.create_task(self._check_while_stopping())
        await asyncio.sleep(_GRACE_S)
        for server in self.servers:
            server.close()
        # closing a connection discards what was not read from it
        for _ in range(_READ_TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets)
        checking.cancel()

    async def _check_while_stopping(self) -> None:
        while True:
            self._check_clients()
            await asyncio.sleep(_CHECK_S)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: check for slow clients, and for a broken model."""
        if self._service.batcher.is_broken and not self.should_exit:
            self._stop()
        self._check_clients()
        return await super().on_tick(counter)

    def _check_clients(self) -> None:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.check(now)


def run_server(
    listening: _ListeningSocket,
    service: Service,
    *,
    api_key: str,
    log: WriteLogLine | None,
    on_ready: Callable[[], None],
) -> None:
    """Warm up the models, and serve until a signal; then finish the accepted requests."""
    service.start()
    limits = _cap_connections(service.limits)
    app = build_app(service, url=listening.url, api_key=api_key, log=log)
    protocol = type(
        "_Protocol",
        (LimitedProtocol,),
        {"limits": limits, "bodies": service.bodies, "middleware": app},
    )
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(limits.keep_alive_s),
        timeout_graceful_shutdown=round(limits.drain_s),
    )
    # its warnings are about mistakes of clients
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = _Server(config, service, listening, protocol, on_ready)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        asyncio.run(server.serve(sockets=[listening.socket]))
        if service.batcher.is_broken:
            raise Bug("a model's thread has ended; the log above says why")
    finally:
        sys.setswitchinterval(switch_s)
        service.close()


def _cap_connections(limits: ServeLimits) -> ServeLimits:
    """The limits, with no more connections than the system allows descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(limits, max_connections=max(8, min(wanted, soft) - _SPARE_FILES))
    return limits
