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


@pytest.fixture(scope="module")
def file(gallery: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(gallery, problems=["record <b>disk</b>.json is not JSON"]), encoding="utf-8")
    return path


SENT = "Network.requestWillBeSent"
ELSEWHERE = "http://127.0.0.1:9/x.png"  # where nobody answers
EVERYWHERE = pytest.mark.parametrize("screen", SCREENS)
IN_BOTH = pytest.mark.parametrize("scheme", ["light", "dark"])

# Of every element that the selector names: where it lies, in pixels of the page.
BOXES = """
[...document.querySelectorAll(%r)].map(element => {
    const box = element.getBoundingClientRect();
    return [box.left, box.top + scrollY, box.right, box.bottom + scrollY];
})
"""
# The contrast of every piece of text with what is behind it, worst first, as WCAG defines it.
CONTRASTS = """
(() => {
    const luminance = colour => {
        const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor;
            if (!/, 0\\)$/.test(colour)) return colour;
        }
    };
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement, style = getComputedStyle(element);
        if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
        const colour = element instanceof SVGElement ? style.fill : style.color;
        const [dim, bright] = [colour, behind(element)].map(luminance).sort((one, other) => one - other);
        found.push([(bright + 0.05) / (dim + 0.05), texts.currentNode.data.trim()]);
    }
    return found.sort((one, other) => one[0] - other[0]);
})()
"""


def requests(browser: Browser) -> list[str]:
    """What was asked for since the page was opened, the page itself left out."""
    sent = [event["params"]["request"]["url"] for event in browser.events if event.get("method") == SENT]
    return [url for url in sent if not url.startswith("file://")]


@IN_BOTH
@EVERYWHERE
def test_page_fits_the_screen(screen: str, scheme: str, browser: Browser, file: Path) -> None:
    """Nothing makes the page scroll sideways; only tables do, each in a box of its own. Unfolded too."""
    browser.open(file, SCREENS[screen], scheme)
    width = SCREENS[screen][0]
    for _ in range(2):
        assert browser.value("innerWidth") == width, "a phone would zoom out to show what is too wide"
        assert browser.value("document.documentElement.scrollWidth") == width
        for selector in ("h1", "h2", "h3", "p", "dl", "nav a", "figure", "li", "summary", ".scroll", ".balance"):
            for left, _, right, _ in browser.value(BOXES % selector):
                assert left >= 0, selector
                assert right <= width, selector
        browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")


@EVERYWHERE
def test_tables_scroll_to_their_end(screen: str, browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS[screen], "light")
    wide = browser.value(
        "[...document.querySelectorAll('.scroll')].filter(box => box.checkVisibility()).map(box => {"
        "box.scrollLeft = 1e6; return [box.scrollWidth - box.clientWidth, box.scrollLeft, box.tabIndex]})"
    )
    assert len(wide) == 7
    assert all(abs(hidden - scrolled) <= 1 and tab == 0 for hidden, scrolled, tab in wide)
    assert screen == "desk" or any(hidden > 0 for hidden, _, _ in wide)


@EVERYWHERE
def test_texts_stay_in_their_cells(screen: str, browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS[screen], "light")
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    spilling = browser.value(
        "[...document.querySelectorAll('th, td')].filter(cell => cell.scrollWidth > cell.clientWidth"
        " && getComputedStyle(cell).textOverflow != 'ellipsis').map(cell => cell.textContent)"
    )
    assert spilling == []


def test_tables_fit_a_desk(browser: Browser, file: Path) -> None:
    """Of ordinary records, no column is out of sight where there is room, and numbers stay on one line."""
    browser.open(file, SCREENS["desk"], "light")
    tables = browser.value(
        "[...document.querySelectorAll('#r1 .group > .scroll')].map(box => box.scrollWidth - box.clientWidth)"
    )
    assert tables == [0, 0, 0]
    heights = browser.value("[...document.querySelectorAll('#r1 td.number b')].map(one => one.getClientRects().length)")
    assert set(heights) == {1}


@IN_BOTH
@EVERYWHERE
def test_nothing_is_requested_and_nothing_is_wrong(screen: str, scheme: str, browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS[screen], scheme)
    browser.value("1")  # what is on its way arrives before the answer
    assert requests(browser) == []
    spoken = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"}
    assert [event for event in browser.events if event.get("method") in spoken] == []
    assert any(event.get("method") == SENT for event in browser.events), "the page itself was seen being asked for"


def test_a_request_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(f"<!DOCTYPE html><img src='{ELSEWHERE}'><script>console.log('x'); missing()</script>")
    browser.open(file, SCREENS["desk"], "light")
    browser.value("1")
    assert requests(browser) == [ELSEWHERE]
    methods = [event.get("method") for event in browser.events]
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= set(methods)


def test_policy_stops_what_would_come_from_elsewhere(browser: Browser, file: Path, tmp_path: Path) -> None:
    """Were a text to get out of its place after all, the browser would run and fetch nothing of it."""
    poison = f"<main><script>document.title = 'gone'</script><img src='{ELSEWHERE}'>"
    poisoned = tmp_path / "poisoned.html"
    poisoned.write_text(file.read_text().replace("<main>", poison))
    browser.open(poisoned, SCREENS["desk"], "light")
    assert browser.value("document.title") == "What freight measured"
    failed = [event["params"] for event in browser.events if event.get("method") == "Network.loadingFailed"]
    assert [params.get("blockedReason") for params in failed] == ["csp"]
    assert requests(browser) == [ELSEWHERE]  # the one that was blocked


def test_hostile_texts_are_shown_as_texts(browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS["desk"], "light")
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.value("document.scripts.length") == 0
    assert browser.value("document.querySelectorAll('img, iframe, object, embed, link, form, base').length") == 0
    shown = browser.value("document.body.innerText")
    assert shown.count('<script>alert("x")</script> | $a_b$ *c* `d` ]]> -->') >= 10
    assert "record <b>disk</b>.json is not JSON" in shown
    assert "数据 😀" in shown


@EVERYWHERE
def test_light_and_dark_differ(screen: str, browser: Browser, file: Path) -> None:
    means = {}
    for scheme in ("light", "dark"):
        browser.open(file, SCREENS[screen], scheme)
        means[scheme] = browser.pixels().mean()
    assert means["light"] > 225
    assert means["dark"] < 45


@IN_BOTH
def test_every_text_can_be_read(scheme: str, browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS["phone"], scheme)
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    contrasts = browser.value(CONTRASTS)
    assert len(contrasts) > 500
    assert contrasts[0][0] >= 4.5, contrasts[:5]


@EVERYWHERE
def test_letters_are_large_enough(screen: str, browser: Browser, file: Path) -> None:
    """As shown: a plot is scaled to the screen, and its letters with it."""
    browser.open(file, SCREENS[screen], "light")
    html = browser.value(
        "Math.min(...[...document.querySelectorAll('p, td, th, li, small, dt, dd, a')]"
        ".map(one => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert html >= 11
    plots = browser.value(
        "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')]"
        ".map(text => parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / 330))"
    )
    assert len(plots) > 50
    assert min(plots) >= 8.5


@IN_BOTH
@EVERYWHERE
def test_plots_are_visible(screen: str, scheme: str, browser: Browser, file: Path) -> None:
    """In the picture: each plot has ink, the subject's colour, and its letters inside."""
    browser.open(file, SCREENS[screen], scheme)
    boxes = browser.value(BOXES % "figure svg")
    assert len(boxes) == 7
    pixels = browser.pixels(whole=True).astype(int)
    subject = {"light": (0x0B, 0x64, 0xB0), "dark": (0x58, 0xAE, 0xF5)}[scheme]
    for left, top, right, bottom in boxes:
        assert right - left >= 0.9 * min(SCREENS[screen][0], 440)
        plot = pixels[round(top) : round(bottom), round(left) : round(right)]
        near = (abs(plot - subject).sum(axis=2) < 30).sum()
        background = (abs(plot - plot[0, 0]).sum(axis=2) < 30).mean()
        assert near > 150
        assert 0.5 < background < 0.97


@EVERYWHERE
def test_letters_of_plots_stay_inside_and_apart(screen: str, browser: Browser, file: Path) -> None:
    """With the fonts of this machine, which are not those that the plots were laid out with."""
    browser.open(file, SCREENS[screen], "light")
    for index in range(browser.value("document.querySelectorAll('figure svg').length")):
        [plot] = browser.value(BOXES % "figure svg")[index : index + 1]
        texts = browser.value(
            f"[...document.querySelectorAll('figure svg')[{index}].querySelectorAll('text')].map(text => {{"
            "const box = text.getBoundingClientRect();"
            "return [box.left, box.top + scrollY, box.right, box.bottom + scrollY, text.textContent]})"
        )
        for left, top, right, bottom, text in texts:
            assert left >= plot[0] - 1, text
            assert right <= plot[2] + 1, text
            assert top >= plot[1] - 1, text
            assert bottom <= plot[3] + 1, text
        for (left, top, right, bottom, one), other in itertools.combinations(texts, 2):
            across = min(right, other[2]) - max(left, other[0])
            down = min(bottom, other[3]) - max(top, other[1])
            assert across <= 1 or down <= 0.4 * (bottom - top), (one, other[4])


@EVERYWHERE
def test_links_scroll_to_their_group(screen: str, browser: Browser, file: Path) -> None:
    browser.open(file, SCREENS[screen], "light")
    count = browser.value("document.querySelectorAll('nav a').length")
    assert count == 7
    for index in range(count):
        browser.value(f"document.querySelectorAll('nav a')[{index}].click()")
        target = browser.value(
            f"document.querySelector(document.querySelectorAll('nav a')[{index}].hash).getBoundingClientRect().top"
        )
        assert -1 <= target < SCREENS[screen][1]


def test_a_page_without_records_is_a_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "empty.html"
    file.write_text(page([]))
    browser.open(file, SCREENS["phone"], "dark")
    assert "What freight measured" in browser.value("document.body.innerText")
    assert browser.value("document.documentElement.scrollWidth") == SCREENS["phone"][0]
