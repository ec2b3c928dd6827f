"""Drives a headless Chromium by its DevTools protocol, over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Against a browser that hangs; nothing is measured by it.
_ANSWER_S_MAX = 300


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """A browser with one page. `complaints` has what the page logs, throws or is denied."""

    def __init__(self, binary: str):
        self._profile = tempfile.TemporaryDirectory(prefix="page_test.", ignore_cleanup_errors=True)
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        # The protocol wants the descriptors 3 and 4.
        redirect = f'exec "$@" 3<&{commands_read} 4>&{answers_write}'
        options = [
            "--headless=new",
            "--no-sandbox",  # a container's root has none
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", binary, *options],
            pass_fds=(commands_read, answers_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "TZ": "UTC", "HOME": self._profile.name},
        )
        os.close(commands_read)
        os.close(answers_write)
        self._buffer = b""
        self._next_id = 0
        self._session = ""
        self.complaints: list[str] = []
        self._open_page()

    def close(self) -> None:
        try:
            self._session = ""
            self.command("Browser.close")
        except RuntimeError:
            self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._log.close()
        self._profile.cleanup()

    def command(self, method: str, **parameters):
        """Sends a command and returns its result."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._take_event(answer)

    def run(self, script: str):
        """Returns the value of a JavaScript expression, or of the promise that it is."""
        answer = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Returns once the JavaScript expression is true. Says what it is when it does not come."""
        answer = self.run(
            "new Promise((resolve) => {"
            f"  const end = performance.now() + {_ANSWER_S_MAX * 500};"
            f"  const look = () => ({condition}) ? resolve(true)"
            "     : performance.now() > end ? resolve(false) : setTimeout(look, 20);"
            "  look(); })"
        )
        if not answer:
            text = self.run("document.body.innerText")
            raise AssertionError(f"never came: {condition}. The page says:\n{text[:3000]}")

    def open(self, url: str) -> None:
        """Opens a page anew, also one that is open."""
        for address in ("about:blank", url):
            self.complaints.clear()
            self.command("Page.navigate", url=address)
            self.wait_until(
                f"location.href === {json.dumps(address)} && document.readyState === 'complete'"
            )

    def run_before_pages(self, script: str) -> str:
        """Runs a script in each page before its own, until stop_running_before_pages()."""
        return self.command("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]

    def stop_running_before_pages(self, identifier: str) -> None:
        self.command("Page.removeScriptToEvaluateOnNewDocument", identifier=identifier)

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}[key]
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def screenshot(self, is_whole: bool = False) -> bytes:
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=is_whole)
        return base64.b64decode(answer["data"])

    def _open_page(self) -> None:
        targets = self.command("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.command("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def _receive(self) -> dict:
        deadline = time.monotonic() + _ANSWER_S_MAX
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0, deadline - time.monotonic())
            )
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                self._log.seek(0)
                log = self._log.read().decode(errors="replace")[-3000:]
                raise RuntimeError(f"{'Chromium ended' if ready else 'no answer'}: {log}")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _take_event(self, event: dict) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.complaints.append(f"exception: {text}")
        elif method == "Runtime.consoleAPICalled":
            texts = [str(one.get("value", one.get("description"))) for one in parameters["args"]]
            self.complaints.append(f"console.{parameters['type']}: {' '.join(texts)}")
        elif method == "Log.entryAdded":
            entry = parameters["entry"]
            self.complaints.append(f"{entry['source']} {entry['level']}: {entry['text']}")
