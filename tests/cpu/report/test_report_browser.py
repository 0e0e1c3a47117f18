"""The page as a browser shows it: Debian's chromium, steered through its debugging pipe, on a phone and on a desk."""

import base64
import io
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freight.bench._record import Record
from freight.bench.report._page import page

CHROMIUM = "/usr/bin/chromium"
PATIENCE = 60.0  # seconds for one answer, on a busy machine
SCREENS = {"phone": (390, 844), "narrow phone": (360, 640), "desk": (1280, 900)}
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --hide-scrollbars "
    "--remote-debugging-pipe"
)

pytestmark = pytest.mark.skipif(not os.access(CHROMIUM, os.X_OK), reason=f"there is no {CHROMIUM}")


class Browser:
    """Chromium with one empty tab. Messages go through two pipes, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        their_input, self._out = os.pipe()
        self._in, their_output = os.pipe()
        pipes = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'  # chromium expects them at 3 and 4
        command = ["bash", "-c", pipes, CHROMIUM, *QUIET.split(), f"--user-data-dir={profile}", "about:blank"]
        with (profile.parent / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=(their_input, their_output),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(their_input)
        os.close(their_output)
        self._ids = itertools.count(1)
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command; returns its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, file: Path, size: tuple[int, int], scheme: str) -> None:
        """Load `file` afresh on a screen of `size`, light or dark."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=size[0] < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, script: str) -> Any:
        """What `script` evaluates to on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the screen, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pixels(self, *, whole: bool = False) -> np.ndarray:
        """The screen as an array of height, width and RGB."""
        image = pytest.importorskip("PIL.Image")
        return np.asarray(image.open(io.BytesIO(self.picture(whole=whole))).convert("RGB"))

    def close(self) -> None:
        """End chromium with all its processes."""
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, "chromium does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "chromium has ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("chromium")
    opened = Browser(folder / "profile")
    yield opened
    opened.close()
    shutil.rmtree(folder, ignore_errors=True)
