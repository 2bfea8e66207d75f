"""Hostile requests in great number against one server, with honest ones between them."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hostile_bodies import Target
from hostile_http import Attack, draw_attack, honest_requests
from http_load import MOST_BYTES, NO_ANSWER, Connections, read_answer

Reply = tuple[int, dict[str, str], bytes]
PATIENCE_S = 30.0  # for an answer that must come
GLANCE_S = 0.2  # for one that need not
HONEST_EVERY = 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST and drops what is unsent


@dataclass
class HostileReport:
    """What was sent, what came back, and what should not have."""

    sent: int = 0
    honest: int = 0
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"{self.sent} hostile requests, {self.honest} honest ones between them"]
        for kind, counts in sorted(self.statuses.items()):
            words = ", ".join(f"{n} x {status or 'none'}" for status, n in sorted(counts.items()))
            rows.append(f"  {kind:22} {words}")
        return "\n".join(rows)


async def send_attack(port: int, attack: Attack) -> list[Reply]:
    """Behave as the attack says; the answers that came, an empty list where none did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MOST_BYTES)
    if attack.ending == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):  # a server may close before it has read everything
        for part in attack.parts:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
            await asyncio.sleep(attack.pause_s)
        if attack.ending == "half-close":
            writer.write_eof()
    replies: list[Reply] = []
    patience = PATIENCE_S if attack.ending == "wait" else GLANCE_S
    with contextlib.suppress(OSError, EOFError):
        while len(replies) < attack.answers and not attack.is_deaf:
            try:
                reading = read_answer(reader, has_body=not attack.parts[0].startswith(b"HEAD"))
                replies.append(await asyncio.wait_for(reading, patience))
            except TimeoutError:
                if attack.ending == "wait":
                    raise
                break
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return replies


def find_problem(reply: Reply) -> str | None:
    """What no server should answer, whatever it was asked."""
    status, headers, body = reply
    if status >= 500:
        return f"status {status}: {body[:300]!r}"
    if b"Traceback" in body or b'File "' in body:
        return f"a traceback: {body[:300]!r}"
    if body and headers.get("content-type", "").startswith("application/json"):
        try:
            said = json.loads(body, parse_constant=refuse_constant)
        except ValueError as error:
            return f"status {status} with what is no JSON ({error}): {body[:100]!r}"
        if status >= 400 and not isinstance(said.get("error"), str):
            return f"status {status} without its reason: {body[:300]!r}"
    return None


def refuse_constant(word: str) -> None:
    """NaN and Infinity are no JSON, though Python reads them."""
    raise ValueError(f"{word} in it")


def simplify(value: Any) -> Any:
    """An answer without what differs from one time to the next: durations, last digits."""
    if isinstance(value, dict):
        return {k: simplify(v) for k, v in value.items() if k not in ("timing_ms", "id")}
    if isinstance(value, list):
        return [simplify(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


async def run_hostile(
    port: int,
    target: Target,
    *,
    count: int,
    seed: int,
    at_once: int = 16,
    each: Callable[[int], None] = lambda number: None,
) -> HostileReport:
    """So many attacks, some at a time; each: called with the number of those sent so far.

    An attack depends on the seed and its number alone: `draw_attack(target, Random("SEED-NUMBER"))`
    makes the one again that a problem names.
    """
    report, numbers = HostileReport(), iter(range(count))
    honest, connections = honest_requests(target), Connections(port)
    wanted = [await connections.exchange(request) for request in honest]
    assert [status for status, _, _ in wanted] == [200, 200], wanted

    async def attack_once(number: int) -> None:
        attack = draw_attack(target, random.Random(f"{seed}-{number}"))
        counts = report.statuses.setdefault(attack.kind, Counter())
        try:
            replies = await send_attack(port, attack)
        except (OSError, TimeoutError) as error:
            report.problems.append(f"{number} {attack.kind}: {error!r}")
            return
        counts.update(status for status, _, _ in replies or [(NO_ANSWER, {}, b"")])
        found = filter(None, map(find_problem, replies))
        report.problems += [f"{number} {attack.kind}: {problem}" for problem in found]

    async def ask_honestly(number: int) -> None:
        which = number // HONEST_EVERY % len(honest)
        status, _, body = await connections.exchange(honest[which])
        report.honest += 1
        if status != 200 or simplify(json.loads(body)) != simplify(json.loads(wanted[which][2])):
            report.problems.append(f"an honest request after {number}: {status} {body[:200]!r}")

    async def attacker() -> None:
        for number in numbers:
            await attack_once(number)
            if number % HONEST_EVERY == 0:
                await ask_honestly(number)
            report.sent += 1
            each(report.sent)

    await asyncio.gather(*(attacker() for _ in range(at_once)))
    connections.close()
    return report


async def hold_connections(port: int, begin: bytes, *, count: int, seconds: float) -> list[int]:
    """Connections that send the same beginning and wait: their statuses, NO_ANSWER where closed.

    Those which are neither answered nor closed after so many seconds are -1.
    """

    async def hold() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MOST_BYTES)
        try:
            writer.write(begin)
            return (await asyncio.wait_for(read_answer(reader), seconds))[0]
        except TimeoutError:
            return -1
        except (OSError, EOFError):
            return NO_ANSWER
        finally:
            writer.close()

    return list(await asyncio.gather(*(hold() for _ in range(count))))
