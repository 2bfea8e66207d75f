"""Request bodies: read within limits of size and time, decompressed, and split into files."""

import asyncio
import re
import threading
import zlib
from urllib.parse import unquote

from starlette.requests import Request

from phalanx.serve.api_error import ApiError, ClientDisconnected, refuse_busy
from phalanx.serve.images import ImageFile
from phalanx.units import format_bytes

_ENCODINGS = {"gzip": 31, "deflate": 47}  # zlib's wbits: only gzip; zlib or gzip, by the header
_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILENAME_STAR = re.compile(rb"filename\*=(?:utf-8|iso-8859-1)'[^']*'([^;\s]+)", re.IGNORECASE)
_MAX_PART_HEADERS = 16 * 1024


class BodyReader:
    """Reads bodies; all those in memory at the same time share a limit, `total_bytes`.

    max_bytes: of one body. max_s: from the headers to the last byte. Connections count the bytes
    they hold until the response is sent; decompressed bodies count as well.
    """

    def __init__(self, *, max_bytes: int, max_s: float, total_bytes: int) -> None:
        self.max_bytes, self._max_s, self._total_bytes = max_bytes, max_s, total_bytes
        self._held = 0  # bytes, both as sent and decompressed; changed by several threads
        self._lock = threading.Lock()

    @property
    def is_over_limit(self) -> bool:
        """Whether all bodies together exceed their limit."""
        return self._held > self._total_bytes

    def add_held_bytes(self, size: int) -> None:
        """Add to the number of bytes in memory; negative when bytes are freed."""
        with self._lock:
            self._held += size

    async def read(self, request: Request) -> bytes:
        """The whole body as sent; raises ApiError or ClientDisconnected."""
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self._refuse_large(int(length))
        try:
            async with asyncio.timeout(self._max_s):
                chunks = await self._collect(request)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request was not complete after {self._max_s:g} s",
                headers={"Connection": "close"},
            ) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _collect(self, request: Request) -> list[bytes]:
        chunks, size = list[bytes](), 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            if chunk:
                chunks.append(chunk)
                size += len(chunk)
                self._refuse_large(size)
            if self.is_over_limit:
                raise _refuse_together()
            if not message.get("more_body"):
                return chunks

    def _refuse_large(self, size: int) -> None:
        if size > self.max_bytes:
            most = format_bytes(self.max_bytes)
            raise ApiError(
                413,
                f"the request is larger than {most}, the limit of --max-request-mib; send fewer "
                "or smaller images",
            )

    def decompress(self, body: bytes, encoding: str) -> bytes:
        """The decompressed body, whose bytes the caller counts; raises ApiError."""
        encoding = encoding.strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding not in _ENCODINGS:
            raise ApiError(
                415, f"Content-Encoding {encoding[:40]!r} is not known; use gzip, deflate or none"
            )
        decompressor = zlib.decompressobj(_ENCODINGS[encoding])
        room = max(0, self._total_bytes - self._held)
        try:
            content = decompressor.decompress(body, min(self.max_bytes, room) + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body is not {encoding}: {error}") from None
        self._refuse_large(len(content))
        if len(content) > room:
            raise _refuse_together()
        if not decompressor.eof:
            raise ApiError(400, f"the body ends in the middle of its {encoding} data")
        return content


def _refuse_together() -> ApiError:
    return refuse_busy("too many large requests at once")


def find_boundary(content_type: str) -> bytes:
    """The boundary between the parts of a multipart body; raises ApiError if there is none."""
    found = _BOUNDARY.search(content_type)
    if found is None or not found[1].isascii():
        raise ApiError(400, "multipart/form-data needs a boundary in its Content-Type")
    return found[1].encode()


def split_multipart(body: bytes, boundary: bytes, *, most: int) -> list[ImageFile]:
    """The files of a multipart body; raises ApiError if it is malformed or has more than `most`."""
    delimiter = b"\r\n--" + boundary
    # the first delimiter may be at the very beginning, without a line break
    pieces = (b"\r\n" + body).split(delimiter, most + 2)
    if len(pieces) > most + 2:
        raise ApiError(413, f"more than {most:,} images in one request; send them in several")
    last = pieces[-1]
    if len(pieces) < 2 or not last.startswith(b"--"):
        raise ApiError(400, "the multipart body has no end; it was cut off, or is none")
    files = []
    for number, piece in enumerate(pieces[1:-1], start=1):
        head, found, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
        if not found or not head.startswith(b"\r\n") or len(head) > _MAX_PART_HEADERS:
            raise ApiError(400, f"part {number} of the multipart body has no headers")
        files.append(ImageFile(_find_name(head) or f"image {number}", data))
    if not files:
        raise ApiError(400, "the multipart body has no part; send an image as a file")
    return files


def _find_name(head: bytes) -> str:
    """The file name in the headers of a part, without its folders."""
    if star := _FILENAME_STAR.search(head):
        name = unquote(star[1].decode("ascii", "replace"), errors="replace")
    elif plain := _FILENAME.search(head):
        name = re.sub(rb"\\(.)", rb"\1", plain[1]).decode("utf-8", "replace")
    else:
        return ""
    return name.replace("\\", "/").rpartition("/")[2][:255]
