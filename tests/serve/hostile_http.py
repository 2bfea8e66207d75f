"""Requests that break HTTP itself: heads, lengths, chunks, order, and clients that misbehave."""

import random
from dataclasses import dataclass

from hostile_bodies import BODY_KINDS, Target, infer_body
from hostile_images import IMAGE_KINDS, make_photo
from http_load import build_request

Draw = random.Random


@dataclass(frozen=True)
class Attack:
    """Bytes to send, and how the client behaves."""

    kind: str
    parts: tuple[bytes, ...]
    pause_s: float = 0.0  # between the parts
    ending: str = "wait"  # for an answer; or only "glance", "half-close" and glance, "reset"
    answers: int = 1  # at most, where several requests are in one

    @property
    def is_deaf(self) -> bool:
        """No answer is read."""
        return self.ending == "reset" or self.kind == "deaf client"


def odd_head(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Headers too large, too many, or none."""
    line = b"POST /predict HTTP/1.1\r\nHost: x\r\n"
    heads = (
        line + b"X: " + b"a" * draw.choice((9_000, 70_000, 1_000_000)) + b"\r\n\r\n",
        line + b"".join(b"X-%d: y\r\n" % n for n in range(draw.choice((200, 5000)))) + b"\r\n",
        line + b"\xff\xfe: y\r\n\r\n",
        line + b"no colon\r\n\r\n",
        line + b": empty\r\n\r\n",
        line + b"X: a\0b\r\n\r\n",
        line + b"X: a\r\n folded\r\n\r\n",
        line.replace(b"\r\n", b"\n") + b"\n",
        line + b"Host: y\r\nHost: z\r\n\r\n",
        line + b"Authorization: Bearer " + draw.randbytes(9).hex().encode() * 500 + b"\r\n\r\n",
        line + b"Expect: " + draw.choice((b"100-continue", b"the worst")) + b"\r\n\r\n",
        line + b"Content-Type: " + draw.choice(ODD_TYPES) + b"\r\nContent-Length: 3\r\n\r\nabc",
        line + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        line + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
        line + b"Cookie: " + b"a=b; " * 1000 + b"\r\nContent-Length: 0\r\n\r\n",
        line[:-9] + b"\r\n",
    )
    return (draw.choice(heads),)


ODD_TYPES = (
    b"", b"/", b"image/", b"text/html", b"application/x-python-code", b"multipart/form-data",
    b"multipart/form-data; boundary=", b"multipart/form-data; boundary=" + b"x" * 5000,
    b"image/png; charset=utf-7", b"\xff\xff", b"application/json; charset=utf-16", b"IMAGE/PNG,x/y",
)  # fmt: skip


def odd_line(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """First lines that are no request of HTTP/1.1."""
    lines = (
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + draw.randbytes(200),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1.1\r\n\r\n", b"\r\n\r\n\r\n",
        b"BREW /predict HTTP/1.1\r\nHost: x\r\n\r\n", b"get / http/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TRACE /predict HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /predict HTTP/1.1\r\nHost: x\r\n\r\n",
        b"DELETE /v1/models/x HTTP/1.1\r\nHost: x\r\n\r\n", draw.randbytes(300) + b"\r\n\r\n",
        b"GET http://example.org/ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET  /  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /predict HTTP/1.1 \r\nHost: x\r\n\r\n", b"\0" * 500 + b"\r\n\r\n",
    )  # fmt: skip
    return (draw.choice(lines),)


def odd_path(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Paths and queries that lead nowhere, or should."""
    name = target.name
    paths = (
        "/../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "//predict//",
        "/static/../../pyproject.toml", "/static/%00", "/%00", "/%zz", "/%", "/%c0%af", "/predict/",
        "/predict?top=0", "/predict?top=-1", "/predict?top=999999999999999999999",
        "/predict?top=nan", "/predict?top=1&top=2", "/predict?details=maybe", "/predict?%ff",
        "/predict?" + "a=b&" * 3000, "/predict?top=\u0665", f"/v1/models/{name}:predict:predict",
        f"/v1/models/{name}/versions/0:predict", f"/v1/models/{name}/versions/-1", "/v1/models/",
        f"/v1/models/{name}/versions/{'9' * 300}", f"/v2/models/{name}/versions/x/infer",
        f"/v2/models/{name}%2finfer", "/v2/models/%F0%9F%92%A3/infer", "/v2/models//", "/;", "/?",
        f"/v1/models/../models/{name}:predict", "/" + "a/" * 2000, "/docs/../docs", "/#x",
        "/v1/models/'; DROP:predict", "/metrics?x=%00", "/openapi.json/..",
        "/v2/health/../health/live",
    )  # fmt: skip
    method = draw.choice(("GET", "POST", "POST", "PUT", "HEAD", "PATCH"))
    body = make_photo() if method == "POST" else b""
    kind = {"Content-Type": draw.choice(("image/jpeg", "application/json"))}
    request = build_request(draw.choice(paths), body, method=method, headers=kind)
    return (request.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"),)


def odd_length(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Lengths that are none, two, or another than the body's."""
    body, size = make_photo(), len(make_photo())
    words = (
        b"-1", b"x", b"1e3", b"0x10", b"", b" 5", b"+5", b"9" * 25, b"%d" % 2**62, b"99999999999",
        b"5, 5", b"5\r\nContent-Length: 6", b"%d\r\nTransfer-Encoding: chunked" % size,
        b"%d" % (size - 10), b"1",
    )  # fmt: skip
    line = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: "
    return (line + draw.choice(words) + b"\r\n\r\n", body)


def odd_chunks(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Bodies in chunks that are no chunks."""
    line = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nTransfer-Encoding: "
    line += draw.choice(
        (b"chunked", b"chunked", b"chunked, identity", b"xchunked", b"gzip, chunked")
    )
    chunks = (
        b"FFFFFFFFFFFFFFFF\r\nabc", b"-5\r\nabc", b"zz\r\n", b"3\r\nabcdef\r\n", b"\r\n\r\n",
        b"3;" + b"e" * 90_000 + b"\r\nabc\r\n0\r\n\r\n", b"0\r\n" + b"T: x\r\n" * 5000 + b"\r\n",
        b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n", b"0\r\n\r\n", b"3\r\nab", b"3\nabc\n0\n\n",
    )  # fmt: skip
    return (line + b"\r\n\r\n", draw.choice(chunks))


def odd_form(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """multipart/form-data with the wrong ends, names and numbers of parts."""
    image, mark = make_photo(), draw.choice(("x", "-" * 60, "x" * 69))
    names = ('"../../../etc/passwd"', '"a\0b"', '"' + "n" * 20_000 + '"', "x", '""', '"\u202e.png"')
    part = f"--{mark}\r\nContent-Disposition: form-data; name=f; filename={draw.choice(names)}\r\n"
    part += "Content-Type: image/jpeg\r\n\r\n"
    one = part.encode() + image + b"\r\n"
    end = f"--{mark}--\r\n".encode()
    bodies = (
        one, one + end[:-4], end, b"", one + end, one * draw.choice((2, 300)) + end,
        one + end + one,
        b"--y\r\n" + one, one.replace(b"\r\n", b"\n") + end, one[:200], b"\r\n" * 5000 + one + end,
        one.replace(b"filename", b"file*name") + end,
        one.replace(b"form-data", b"attachment") + end,
        f"--{mark}\r\n".encode() + b"A: b\r\n" * 3000 + b"\r\n\r\n" + end,
        f"--{mark}\r\n\r\n\r\n".encode() * 3000 + end,
    )  # fmt: skip
    kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
    return (build_request("/predict", draw.choice(bodies), headers=kind),)


def pipelined(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Many requests at once, of which some are good."""
    kind = {"Content-Type": "image/jpeg"}
    good = build_request("/predict", make_photo(), headers=kind)
    bad = build_request("/predict", b"no image", headers=kind)
    look = build_request("/v2/health/live", method="GET")
    junk = b"x" * 100 + b"\r\n\r\n"
    chosen = [draw.choice((good, bad, look, look)) for _ in range(12)]
    return (b"".join([*chosen, draw.choice((junk, b"", good[:40]))]),)


def deaf(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Asks for long answers again and again, and reads none."""
    return (build_request("/openapi.json", method="GET") * 300,)


def abandoned(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """Half a request, and then nothing more."""
    whole = build_request("/predict", make_photo(), headers={"Content-Type": "image/jpeg"})
    return (whole[: draw.randrange(1, len(whole))],)


def dripping(target: Target, draw: Draw) -> tuple[bytes, ...]:
    """A few bytes, and then one by one."""
    whole = build_request("/predict", make_photo(), headers={"Content-Type": "image/jpeg"})
    begin = draw.choice((1, 30, len(whole) - 60))
    return (whole[:begin], *(whole[n : n + 1] for n in range(begin, begin + 8)))


RUDE = ("glance", "glance", "half-close", "reset")
HTTP_KINDS = {  # with how the client behaves
    "odd head": (odd_head, ("glance", "half-close")),
    "odd line": (odd_line, ("glance", "half-close")),
    "odd path": (odd_path, ("wait",)),
    "odd length": (odd_length, RUDE),
    "odd chunks": (odd_chunks, RUDE),
    "odd form": (odd_form, ("wait",)),
    "pipelined": (pipelined, RUDE),
    "deaf client": (deaf, ("reset", "glance")),
    "abandoned": (abandoned, RUDE),
    "dripping": (dripping, ("glance", "half-close")),
}


def draw_attack(target: Target, draw: Draw) -> Attack:
    """One of all kinds, each as likely."""
    kind = draw.choice((*IMAGE_KINDS, *BODY_KINDS, *HTTP_KINDS))
    if kind in IMAGE_KINDS:
        return Attack(kind, (image_request(target, draw, IMAGE_KINDS[kind](draw)),))
    if kind in BODY_KINDS:
        path, headers, body = BODY_KINDS[kind](target, draw)
        return Attack(kind, (build_request(path, body, headers=headers),))
    make, endings = HTTP_KINDS[kind]
    pause = 0.02 if kind == "dripping" else 0.0
    answers = 13 if kind == "pipelined" else 1
    return Attack(kind, make(target, draw), pause, draw.choice(endings), answers)


def image_request(target: Target, draw: Draw, image: bytes) -> bytes:
    """An image file for /predict, under some content type."""
    kind = draw.choice(("image/jpeg", "image/png", "application/octet-stream", "image/x-odd"))
    path = draw.choice(("/predict", "/predict?details=true", "/predict?top=3"))
    return build_request(path, image, headers={"Content-Type": kind})


def honest_requests(target: Target) -> list[bytes]:
    """What a good client sends meanwhile: an image file, and a tensor."""
    path, headers, body = infer_body(target)
    photo = build_request("/predict", make_photo(), headers={"Content-Type": "image/jpeg"})
    return [photo, build_request(path, body, headers=headers)]
