"""Connections: uvicorn's protocol, with limits on what clients send and how slowly.

Uvicorn itself limits neither the size of headers nor how long they take, and waits forever for
clients that do not read their response.
"""

import time
from typing import Any

import orjson
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from phalanx.serve.app import RequestMiddleware
from phalanx.serve.body import BodyReader
from phalanx.serve.service import CYCLE_KEY, REFUSED_KEY, ServeLimits

_MAX_HEADER_BYTES = 32 * 1024
_LARGE_HEADERS = f"the headers are larger than {_MAX_HEADER_BYTES:,} bytes"
_DISCARD_S = 5.0  # for the rest of a body that was refused
_WRITE_S = 30.0  # without the client reading a byte of its response


class _RequestParser(HttpRequestParser):
    """Parses a request that offers an upgrade, as Java's client does, as if it did not.

    Httptools would take its body for the first bytes of the other protocol.
    """

    def __init__(self, protocol: "LimitedProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        """Parse what came, a head that offers an upgrade once more without the offer."""
        while True:
            try:
                return super().feed_data(data)
            except HttpParserUpgrade as upgrade:
                if not self.offers_upgrade():
                    return None
                data = self._protocol.build_head() + data[upgrade.args[0] :]

    def offers_upgrade(self) -> bool:
        """Whether the request can be answered without the upgrade: CONNECT cannot."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"


class LimitedProtocol(HttpToolsProtocol):
    """A connection that is closed when its client sends too much or too slowly."""

    limits = ServeLimits()  # like the next three, set on a subclass by the server
    bodies = BodyReader(max_bytes=0, max_s=0.0, total_bytes=0)
    parser: _RequestParser
    middleware: RequestMiddleware  # logs and counts
    is_stopping = False  # if so, connections are not kept for another request

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _RequestParser(self)
        self._since = time.monotonic()  # start of the connection, or of the current request
        self._in_headers = False
        self._unfinished_bytes = 0  # read so far of incomplete headers
        self._header_bytes = 0  # of the path and the complete headers
        self._body_done = True
        self._answered_at = 0.0
        self._discarded = 0
        self._held = 0  # bytes of bodies whose response has not been sent
        self._unwritten, self._unwritten_since = 0, 0.0

    # --- called by asyncio ---

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "too many connections; try again later")

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that arrived, within the limits."""
        if self.transport.is_closing():
            return
        began_before = self._in_headers
        super().data_received(data)
        if not self._in_headers or self.transport.is_closing():
            return
        self._unfinished_bytes = len(data) + self._unfinished_bytes * began_before
        if self._unfinished_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, _LARGE_HEADERS)

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        """Called at the beginning of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        self._since = time.monotonic()
        self._body_done = False
        self._discarded = 0

    def on_url(self, url: bytes) -> None:
        """Called with part of the path."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with a header, which may also follow the body."""
        self._count_header(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        """Count bytes of headers; if this raises, the parser calls send_400_response."""
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(_LARGE_HEADERS)

    def on_headers_complete(self) -> None:
        """Called when the request can be handled."""
        if self.parser.offers_upgrade():
            return  # the parser begins the request once more
        self._in_headers = False
        super().on_headers_complete()
        self.cycle.scope[CYCLE_KEY] = self.cycle  # type: ignore[literal-required]
        if self.is_stopping:
            self.cycle.keep_alive = False

    def build_head(self) -> bytes:
        """The head of the request as it came, but for an upgrade."""
        first = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (*first, b"".join(kept))

    def on_body(self, body: bytes) -> None:
        """Keep part of the body, or discard it if the response has already been sent."""
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self.limits.max_request_bytes:
                self.transport.abort()
            return
        # the handler is woken once: when the body is complete, or too large
        self.cycle.body += body
        self._held += len(body)
        self.bodies.add_held_bytes(len(body))
        if len(self.cycle.body) > self.limits.max_request_bytes or self.bodies.is_over_limit:
            self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Called when the request is complete."""
        if self.parser.offers_upgrade():
            return
        self._body_done = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called when the response is written."""
        self._answered_at = time.monotonic()
        self._release()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        self._release()
        super().connection_lost(exc)

    def _release(self) -> None:
        self.bodies.add_held_bytes(-self._held)
        self._held = 0

    def shutdown(self) -> None:
        """Close the connection, after responding to a request that has begun."""
        if not self._in_headers:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP, or whose headers are too large."""
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, _LARGE_HEADERS)
        else:
            self._refuse(400, "this is not an HTTP request")

    # --- limits ---

    def check(self, now: float) -> None:
        """Close the connection if its client is too slow; called ten times a second."""
        if self.transport is None or self._check_writing(now):
            return
        if self.transport.is_closing():
            return
        if self._in_headers and now - self._since > self.limits.header_s:
            self._refuse(408, f"the headers were not complete after {self.limits.header_s:g} s")
        if self.cycle is None and not self._in_headers and now - self._since > self.limits.header_s:
            self.transport.abort()  # nothing arrived: there is no request to respond to
        if self._in_headers or self.cycle is None or not self.cycle.response_complete:
            return
        # after a response: an idle connection, or the rest of a refused body
        most_s = self.limits.keep_alive_s if self._body_done else _DISCARD_S
        if now - self._answered_at > most_s:
            self.transport.abort()

    def _check_writing(self, now: float) -> bool:
        """Whether the connection was closed because its client does not read the response."""
        size = self.transport.get_write_buffer_size()
        if size != self._unwritten or not size:
            self._unwritten, self._unwritten_since = size, now
            return False
        if now - self._unwritten_since > _WRITE_S:
            self.transport.abort()
            return True
        return False

    def _refuse(self, status: int, message: str) -> None:
        """Respond with an error and close, unless a response has already begun."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            cycle.disconnected = True  # so that its handler does not respond
            cycle.scope[REFUSED_KEY] = status, message  # type: ignore[literal-required]
            cycle.message_event.set()
        else:
            path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
            self.middleware.record_refusal(self.client, path, status, message)
        body = orjson.dumps({"error": message})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
