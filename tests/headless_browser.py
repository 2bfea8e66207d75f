"""Chromium without a window, steered over a pipe by the DevTools protocol, for tests of pages."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from select import select

import pytest

PATIENCE_S = 30.0
_AS_3_AND_4 = """
import os, sys
spare = [os.dup(int(number)) for number in sys.argv[1:3]]  # so that neither overwrites the other
while min(spare) < 5:
    spare = [os.dup(number) for number in spare]
os.dup2(spare[0], 3)
os.dup2(spare[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""  # the numbers at which the browser expects its pipe


def find_chromium() -> str:
    """The browser's command; a test that needs it is skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if shutil.which(name):
            return name
    pytest.skip("needs a Chromium browser (apt-get install chromium)")


class Browser:
    """One browser with one tab; errors of the page's scripts and its console are kept."""

    def __init__(self, profile: Path):
        command = find_chromium()
        take, self._out = os.pipe()
        self._in, give = os.pipe()
        words = [
            command, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-dev-shm-usage", "--force-color-profile=srgb", f"--user-data-dir={profile}",
            "--disable-extensions", "--mute-audio", "--lang=en", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, str(take), str(give), *words],
            pass_fds=(take, give),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(take)
        os.close(give)
        self._number, self._unread, self._session = 0, b"", None
        self.events, self.requested = [], []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    # --- the protocol ---

    def send(self, method: str, **params):
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        end = time.monotonic() + PATIENCE_S
        while True:
            found = self._read_message(end, f"answers {method}")
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def _read_message(self, end: float, wanted: str) -> dict:
        while b"\0" not in self._unread:
            left = end - time.monotonic()
            assert left > 0 and select([self._in], [], [], left)[0], f"no longer {wanted}"
            more = os.read(self._in, 1 << 20)
            assert more, f"the browser ended before it {wanted}"
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        found = json.loads(text)
        if "method" in found:
            self.events.append(found)
        return found

    @property
    def complaints(self) -> list[str]:
        """Errors of scripts, of the console and of the content policy."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    @property
    def addresses(self) -> list[str]:
        """What was asked for over the network, in order."""
        sent = (e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [one["request"]["url"] for one in sent if one["request"]["url"].startswith("http")]

    # --- what a person does ---

    def open(self, address: str) -> None:
        """Load a page, and forget what came before."""
        self.events.clear()
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str, **more):
        """The value of an expression; a promise is awaited."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, **more
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str):
        """The value of an expression, once it is true."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = self.run(condition)
            if found:
                return found
            assert time.monotonic() < end, f"never came true: {condition}\n{self.text()[:2000]}"
            time.sleep(0.03)

    def text(self) -> str:
        """What is to be read on the page."""
        return self.run("document.body.innerText")

    def press(self, key: str, *, code: int, text: str = "", **more) -> None:
        """Press a key and let it go."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, **more}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def press_tab(self) -> None:
        """Go on to what the keyboard reaches next."""
        self.press("Tab", code=9)

    def press_space(self) -> None:
        """Press what has the focus."""
        self.press(" ", code=32, text=" ")

    def choose(self, selector: str, *files: Path) -> None:
        """Choose files in a file input."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop(self, *files: Path, x: int = 200, y: int = 200) -> None:
        """Drag files over the page and let them go."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for what in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=what, x=x, y=y, data=data)

    def resize(self, width: int, height: int = 800, *, dark: bool = False, still: bool = False):
        """A window of so many pixels, and what its owner prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=listed)

    def draw(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def read_roles(self) -> list[tuple[str, str]]:
        """What a screen reader is told: role and name of everything that is not passed over."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
