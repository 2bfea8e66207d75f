"""A connection to a server that is reused for many requests, and its errors."""

import json
import math
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
    RemoteDisconnected,
)
from typing import Any
from urllib.parse import urlsplit

from phalanx.errors import ConfigError
from phalanx.units import format_bytes

_MOST_WAIT_S = 60.0  # that a server may ask for
_MOST_SHOWN = 300  # characters of what a server says is wrong
_MOST_BYTES = 256 * 2**20  # of an answer: thousands of images with a thousand logits each
_MOST_PAGE = 64 * 1024  # bytes in which a web page has its title
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE)


class _ReplyTooLarge(HTTPException):
    """An answer that is too large for a request about images."""


_FAILURES = (  # the first kind that fits
    (TimeoutError, "no {what} from {place} within {seconds:g} s"),
    (ConnectionRefusedError, "{place} refused the connection"),
    (socket.gaierror, "{host} is not a known host"),
    (ssl.SSLError, "{place}: TLS failed ({reason})"),
    (ConnectionError, "{place} closed the connection without an answer"),
    (
        _ReplyTooLarge,
        f"{{place}} sends an answer of more than {format_bytes(_MOST_BYTES)}, which does not look "
        "like an inference server",
    ),
    (IncompleteRead, "{place} closed the connection in the middle of an answer"),
    (HTTPException, "{place} does not speak HTTP ({kind})"),
)


class RequestFailed(Exception):
    """A request without an answer; its text is the kind of failure that it is counted as."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and the key that it requires."""

    scheme: str
    host: str
    port: int
    prefix: str = ""  # of all paths, where a proxy has the server under one
    api_key: str | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Host and port, for a message."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{self.scheme}://{self.place}{self.prefix}/"


def parse_address(url: str, *, api_key: str | None = None) -> ServerAddress:
    """The address in a URL such as http://localhost:8000; raises ConfigError."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    wrong = (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or any(ord(letter) <= 32 or ord(letter) == 127 for letter in whole)
    )
    if wrong or parts.username is not None:
        way_out = "; give the key by --api-key-file" * (parts.username is not None)
        raise ConfigError(
            f"--url {url}: expected an address such as http://127.0.0.1:8000{way_out}"
        )
    assert parts.hostname
    usual = {"http": 80, "https": 443}[parts.scheme]
    return ServerAddress(
        parts.scheme, parts.hostname, port or usual, parts.path.rstrip("/"), api_key
    )


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]  # names in small letters
    body: bytes

    @property
    def wait_s(self) -> float | None:
        """How long to wait before the next attempt, if the server gives a time."""
        try:
            wait = float(self.headers["retry-after"])
        except (KeyError, ValueError):
            return None
        return min(max(wait, 0.0), _MOST_WAIT_S) if math.isfinite(wait) else None

    def read_json(self) -> Any:
        """The value of a JSON body; raises RequestFailed for another."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise RequestFailed(f"HTTP {self.status} with a body that is not JSON") from None

    @property
    def error(self) -> str:
        """The server's error message, on one line; of an unknown body, its beginning."""
        try:
            found = str(json.loads(self.body)["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            found = " ".join(self.body[:_MOST_PAGE].decode(errors="replace").split())
            if found.startswith("<"):
                title = _TITLE.search(found)
                found = f"a web page, {title[1].strip()!r}" if title else "a web page"
        return " ".join(found.split())[:_MOST_SHOWN]


class Connection:
    """A connection that stays open, for a single thread. Close it, or use it as a context."""

    def __init__(self, address: ServerAddress, *, timeout_s: float) -> None:
        kind = {"http": HTTPConnection, "https": HTTPSConnection}[address.scheme]
        self._http = kind(address.host, address.port, timeout=timeout_s)
        self._address, self._timeout_s = address, timeout_s

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def open(self) -> None:
        """Connect now instead of at the first request; raises RequestFailed."""
        if self._http.sock is None:
            try:
                self._http.connect()
            except (OSError, HTTPException) as error:
                raise RequestFailed(self._name_failure(error, "connect")) from None

    def get(self, path: str) -> Reply:
        """The answer to GET; raises RequestFailed."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer to POST; raises RequestFailed."""
        return self._ask("POST", path, body, headers)

    def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        key = self._address.api_key
        sent = {**headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        is_reused = self._http.sock is not None
        self.open()
        try:
            return self._exchange(method, self._address.prefix + path, body, sent)
        except (OSError, HTTPException) as error:
            self.close()
            # a server may close a connection that rested just when it is used again; what it
            # did not begin to answer is asked for once more
            if is_reused and isinstance(error, RemoteDisconnected | ConnectionResetError):
                return self._ask(method, path, body, headers)
            raise RequestFailed(self._name_failure(error, "answer")) from None

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        try:
            self._http.request(method, path, body, dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            # it refused what was too large without reading it all: the answer says so
            if self._http.sock is None:
                raise
        answer = self._http.getresponse()
        received = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, received, _read_body(answer))

    def _name_failure(self, error: Exception, what: str) -> str:
        """The kind of a failure, in words that do not depend on the request."""
        words = next((words for kind, words in _FAILURES if isinstance(error, kind)), "")
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return (words or "no {what} from {place}: {reason}").format(
            place=self._address.place,
            host=self._address.host,
            what=what,
            seconds=self._timeout_s,
            reason=getattr(error, "reason", None) or reason,
            kind=type(error).__name__,
        )


def _read_body(answer: HTTPResponse) -> bytes:
    """The body of an answer; raises _ReplyTooLarge if it is too large."""
    if (answer.length or 0) > _MOST_BYTES:  # so much is announced; memory would be taken for it
        raise _ReplyTooLarge
    body = answer.read(_MOST_BYTES + 1 if answer.length is None else None)
    if len(body) > _MOST_BYTES:
        raise _ReplyTooLarge
    return body
