"""HTTP load from one process: clients that wait for their answer, and arrivals that do not wait.

Requests are bytes made beforehand, so that the client costs next to nothing. In an open loop the
latency of a request counts from the moment it was due, not from when it was sent: a server that
stops for a second does not get that second for free.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from statistics import mean

NO_ANSWER = 0  # in the place of a status: the connection ended first
TOO_SLOW_S = 120.0
MOST_BYTES = 1 << 26  # of an answer


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    status: int
    due_s: float  # since the start of the load
    latency_s: float
    headers: dict[str, str]
    body: bytes


def build_request(
    path: str, body: bytes = b"", *, method: str = "POST", headers: dict[str, str] | None = None
) -> bytes:
    """A whole request of HTTP/1.1 that leaves the connection open."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_answer(
    reader: asyncio.StreamReader, *, has_body: bool = True
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (their names in lower case) and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ")[1])
    headers = {}
    for line in head[1:-2]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if status == 100:
        return await read_answer(reader, has_body=has_body)
    if not has_body:
        return status, headers, b""
    if headers.get("transfer-encoding") == "chunked":
        return status, headers, await read_chunks(reader)
    return status, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer that comes in chunks."""
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


class Connections:
    """Keep-alive connections to one server; one that is idle is used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.opened = 0

    async def exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request and wait for its answer; NO_ANSWER where the connection ended first."""
        reader, writer = self._idle.pop() if self._idle else await self._open()
        try:
            writer.write(request)
            async with asyncio.timeout(TOO_SLOW_S):
                # a server may answer, and close, before it has read the whole request
                status, headers, body = await read_answer(reader)
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError):
            writer.close()
            return NO_ANSWER, {}, b""
        if headers.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return status, headers, body

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.opened += 1
        return await asyncio.open_connection("127.0.0.1", self._port, limit=MOST_BYTES)

    def close(self) -> None:
        """Close those that are idle."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def run_closed_loop(
    port: int, requests: list[bytes], *, clients: int, seconds: float, count: int | None = None
) -> list[Answer]:
    """Clients that send their next request when the last one is answered, for so many seconds.

    With `count`, until so many requests have been sent.
    """
    connections, begin = Connections(port), time.perf_counter()
    endless, answers, left = cycle(requests), list[Answer](), [count if count else 1 << 60]

    async def client() -> None:
        while left[0] > 0 and (count or time.perf_counter() - begin < seconds):
            left[0] -= 1
            due = time.perf_counter() - begin
            status, headers, body = await connections.exchange(next(endless))
            latency = time.perf_counter() - begin - due
            answers.append(Answer(status, due, latency, headers, body))

    await asyncio.gather(*(client() for _ in range(clients)))
    connections.close()
    return answers


def due_times(rate: float, seconds: float, *, poisson: bool, seed: int = 0) -> Iterator[float]:
    """When requests arrive: at even distances, or as those of many people who do not know of each
    other."""
    draw, now = random.Random(seed), 0.0
    while now < seconds:
        yield now
        now += draw.expovariate(rate) if poisson else 1 / rate


async def run_open_loop(
    port: int,
    requests: list[bytes],
    *,
    rate: float,
    seconds: float,
    poisson: bool = False,
    seed: int = 0,
    each: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Requests that arrive at a rate, whatever has become of those before them."""
    connections, endless, answers = Connections(port), cycle(requests), list[Answer]()
    begin = time.perf_counter()

    async def client(due: float, request: bytes) -> None:
        try:
            status, headers, body = await connections.exchange(request)
        except OSError:  # not even a connection
            status, headers, body = NO_ANSWER, {}, b""
        answer = Answer(status, due, time.perf_counter() - begin - due, headers, body)
        answers.append(answer)
        if each:
            each(answer)

    async with asyncio.TaskGroup() as tasks:
        for due in due_times(rate, seconds, poisson=poisson, seed=seed):
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - begin)))
            tasks.create_task(client(due, next(endless)))
    connections.close()
    return answers


# --- what came of it ---


def count_statuses(answers: list[Answer]) -> dict[int, int]:
    """How many answers of each status, NO_ANSWER among them."""
    return dict(sorted(Counter(answer.status for answer in answers).items()))


def find_percentile(values: list[float], percent: float) -> float:
    """The nearest rank, so that it is a value which occurred."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def find_latencies(answers: list[Answer], *, status: int = 200) -> list[float]:
    """The seconds of the answers with a status, in the order they were due."""
    chosen = [answer for answer in answers if answer.status == status]
    return [answer.latency_s for answer in sorted(chosen, key=lambda answer: answer.due_s)]


def measure_rate(answers: list[Answer], *, clients: int, skip: float = 0.15) -> float:
    """Good answers a second of a closed loop, by Little's law: clients over their mean latency.

    Answers come in bursts, a batch at a time; to count them in a window would depend on where it
    ends. Those of the first part, while the connections opened, and the last of each client, when
    others had stopped, are left out.
    """
    kept = find_latencies(answers)[int(len(answers) * skip) : -clients]
    return clients / mean(kept)


def describe_load(answers: list[Answer]) -> str:
    """One line of rates and latencies, to print."""
    good = find_latencies(answers)
    if not good:
        return f"no good answer: {count_statuses(answers)}"
    ms = ", ".join(f"p{p} {1e3 * find_percentile(good, p):.1f}" for p in (50, 95, 99))
    return f"{len(good)} good answers, ms: {ms}; statuses {count_statuses(answers)}"
