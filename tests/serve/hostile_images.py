"""Image files that lie, explode or break off; each as the body of a request."""

import io
import random
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

Draw = random.Random


@cache
def make_photo(kind: str = "JPEG", size: int = 48, seed: int = 0) -> bytes:
    """A real file of noise and a gradient."""
    noise = np.random.default_rng(seed).integers(0, 60, (size, size, 3))
    ramp = np.linspace(0, 190, size).astype(int)[:, None, None]
    file = io.BytesIO()
    Image.fromarray((noise + ramp).astype(np.uint8)).save(file, kind)
    return file.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its right checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@cache
def make_png_bomb(side: int, *, real: bool) -> bytes:
    """A black-and-white PNG of side x side pixels: all its rows in a few kilobytes, or none."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pack, parts = zlib.compressobj(9), []
    row = bytes(1 + (side + 7) // 8)
    for _ in range(side if real else 1):
        parts.append(pack.compress(row))
    data = b"".join([*parts, pack.flush()])
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", data)
        + png_chunk(b"IEND", b"")
    )


@cache
def make_text_bomb() -> bytes:
    """A small PNG with a comment, a colour profile and a text that unpack to 64 MiB each."""
    whole, packed = make_photo("PNG"), zlib.compress(bytes(1 << 26), 9)
    extra = png_chunk(b"zTXt", b"Comment\0\0" + packed)
    extra += png_chunk(b"iCCP", b"profile\0\0" + packed)
    extra += png_chunk(b"iTXt", b"x\0\1\0\0\0" + packed)
    end = 8 + 25  # after the header chunk
    return whole[:end] + extra + whole[end:]


def fuzzed(draw: Draw) -> bytes:
    """Some bytes are others."""
    data = bytearray(make_photo(draw.choice(("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"))))
    for _ in range(draw.choice((1, 3, 20, 200))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def truncated(draw: Draw) -> bytes:
    """Only its first part."""
    data = make_photo(draw.choice(("JPEG", "PNG", "GIF", "BMP", "WEBP")))
    return data[: draw.randrange(len(data) - 2)]


def spliced(draw: Draw) -> bytes:
    """A piece is missing, double or in the wrong place."""
    data = make_photo(draw.choice(("JPEG", "PNG", "GIF")))
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return draw.choice((data[:a] + data[b:], data[:b] + data[a:], data[a:b] + data[:a]))


def noise(draw: Draw) -> bytes:
    """No image at all, though some begin like one."""
    begin = (
        b"",
        b"\xff\xd8\xff\xe0",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"II*\0",
    )
    return draw.choice(begin) + draw.randbytes(draw.choice((0, 1, 30, 3000)))


def bomb(draw: Draw) -> bytes:
    """Few bytes that ask for gigabytes of pixels."""
    return draw.choice(BOMBS)()


def jpeg_of_another_size() -> bytes:
    """A JPEG whose header says 65,500 x 65,500."""
    data = make_photo("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", 65500, 65500) + data[at + 4 :]


def gif_of_another_size() -> bytes:
    """A GIF whose screen is 65,535 x 65,535."""
    data = make_photo("GIF")
    return data[:6] + struct.pack("<HH", 65535, 65535) + data[10:]


def bmp_of_another_size() -> bytes:
    """A BMP of 2**31 - 1 columns and a negative number of rows."""
    data = make_photo("BMP")
    return data[:18] + struct.pack("<ii", 2**31 - 1, -(2**31)) + data[26:]


def tiff_in_a_circle() -> bytes:
    """A TIFF whose next directory is its first one."""
    entry = struct.pack("<HHII", 256, 3, 1, 8)
    return b"II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 8)


BOMBS = (
    lambda: make_png_bomb(20_000, real=True),
    lambda: make_png_bomb(9_000, real=True),
    lambda: make_png_bomb(2**31 - 1, real=False),
    make_text_bomb,
    jpeg_of_another_size,
    gif_of_another_size,
    bmp_of_another_size,
    tiff_in_a_circle,
    lambda: b"P6 100000 100000 255\n" + bytes(100),
    lambda: b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "' + b"c" * 999 + b'">]><svg>&b;</svg>',
    lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99999 99999\n",
)
IMAGE_KINDS = {
    "fuzzed image": fuzzed,
    "truncated image": truncated,
    "spliced image": spliced,
    "noise for an image": noise,
    "image bomb": bomb,
}
