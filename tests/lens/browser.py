"""A headless Chromium, driven over the DevTools protocol through a pair of pipes: no driver, no port, no package."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

# The protocol's pipes are descriptors 3 and 4 of the child. Copied out of the way first: they may be each other's.
START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, pipe in zip((3, 4), pipes):
    os.dup2(pipe, fd)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    """One tab."""

    def __init__(self, profile):
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip("no Chromium on this machine (apt-get install chromium)")
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(to_child), str(from_child), program, *flags],
            pass_fds=(to_child, from_child),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._count, self._session = b"", 0, None
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests = []

    def call(self, method, **parameters):
        """One command, and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("the browser went away")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(parameters["args"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message

    def open(self, url, width=1280, height=900, dark=False, touch=False):
        """A page at a window size, by day or by night."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def until(self, condition, seconds=20):
        """Wait for the page."""
        end = time.monotonic() + seconds
        while not self.value(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def value(self, expression):
        """What an expression is, in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def middle(self, selector):
        """The centre of an element's first box, in the window."""
        box = f"document.querySelector({json.dumps(selector)}).getClientRects()[0]"
        return self.value(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")

    def hover(self, selector):
        """Move the mouse there."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector):
        """Click there."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def tap(self, selector):
        """Touch there."""
        x, y = self.middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def press(self, key):
        """Press a key that has a name."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def press_enter(self):
        """Press Enter, which needs the letter that it makes."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
            )
        self.settle()

    def settle(self):
        """Two frames."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def close(self):
        """End the process that was started here."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(10)
