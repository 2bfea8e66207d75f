"""Whatever is sent to the server: no 500, no crash, nothing kept, and honest clients are served.

PHALANX_HOSTILE_REQUESTS and PHALANX_HOSTILE_SEED set the number and the seed of the slow proof.
"""

import asyncio
import os
import signal
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("onnxruntime", reason="needs the packages of phalanx[serve]")

from hostile_http import honest_requests
from hostile_run import hold_connections, run_hostile
from http_load import Connections
from served_model import Holdings, Server, open_server, wait_until
from small_server import write_model

COUNT = int(os.environ.get("PHALANX_HOSTILE_REQUESTS", "10000"))
SEED = int(os.environ.get("PHALANX_HOSTILE_SEED", "0"))
MOST_GROWTH_MIB = 24  # between the medians of three marks early and three late: it goes up and down
WARNINGS = ("Traceback", "RuntimeWarning", "Task exception", "never retrieved")


def check_unharmed(server: Server, before: Holdings) -> None:
    """It lives, has let go of what it held for clients, and has nothing to complain about."""
    assert server.process.poll() is None, server.log.read_text()[-3000:]

    def let_go() -> bool:
        now = server.measure()
        return now.files <= before.files + 2 and now.threads <= before.threads + 2

    assert wait_until(let_go, 15), f"before: {before}; after: {server.measure()}"
    log = server.log.read_text(errors="replace")
    assert not [word for word in WARNINGS if word in log], log[-3000:]


def end_gracefully(server: Server) -> int:
    """The exit code after SIGTERM."""
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout=30)


def test_three_hundred_hostile_requests(tmp_path: Path) -> None:
    with open_server([write_model(tmp_path / "small.onnx")], tmp_path) as server:
        target = server.find_target()
        asyncio.run(run_hostile(server.port, target, count=20, seed=99))  # its threads start
        before = server.measure()
        report = asyncio.run(run_hostile(server.port, target, count=300, seed=1))
        assert report.problems == []
        assert report.sent == 300 and report.honest == 30
        assert sum(counts[400] for counts in report.statuses.values()) > 50, str(report)
        check_unharmed(server, before)
        assert end_gracefully(server) == 0


@pytest.mark.slow
def test_ten_thousand_hostile_requests(tmp_path: Path) -> None:
    marks: dict[int, Holdings] = {}
    with open_server([write_model(tmp_path / "small.onnx")], tmp_path) as server:
        target = server.find_target()

        def note(number: int) -> None:
            if number % max(1, COUNT // 10) == 0:
                marks[number] = server.measure()

        asyncio.run(run_hostile(server.port, target, count=200, seed=SEED + 1))
        before = server.measure()
        report = asyncio.run(run_hostile(server.port, target, count=COUNT, seed=SEED, each=note))
        print(report, *(f"{number:6} {held}" for number, held in marks.items()), sep="\n")
        assert report.problems == []
        check_unharmed(server, before)
        memory = [held.memory_mib for held in marks.values()]
        assert median(memory[-3:]) - median(memory[1:4]) < MOST_GROWTH_MIB, marks
        assert end_gracefully(server) == 0


@pytest.mark.slow
def test_slow_and_idle_clients_do_not_keep_others_waiting(tmp_path: Path) -> None:
    """Two hundred of each kind at once; all are answered or closed within the limits."""
    words = [write_model(tmp_path / "small.onnx"), "--request-timeout", 4]
    with open_server(words, tmp_path) as server:
        target = server.find_target()
        honest = honest_requests(target)[0]
        before = server.measure()
        begins = {
            "nothing": b"",
            "head": b"POST /predict HTTP/1.1\r\nHost: x\r\nX-Slow: ",
            "body": honest[:-100],
            "chunk": b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        }

        async def attack() -> tuple[dict[str, list[int]], list[int]]:
            held = {
                name: asyncio.create_task(
                    hold_connections(server.port, begin, count=200, seconds=20)
                )
                for name, begin in begins.items()
            }
            connections, statuses = Connections(server.port), []
            for _ in range(20):
                await asyncio.sleep(0.1)
                statuses.append((await connections.exchange(honest))[0])
            connections.close()
            return {name: await task for name, task in held.items()}, statuses

        held, statuses = asyncio.run(attack())
        assert statuses == [200] * 20
        for name, found in held.items():
            assert set(found) <= {0, 400, 408}, f"{name}: {set(found)}"
        check_unharmed(server, before)
