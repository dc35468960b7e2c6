"""Chromium without a window, told what to do over a pipe in DevTools' protocol."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
# A promise that is kept once the page looks as wanted.
UNTIL = """new Promise((keep, fail) => {{
  const look = () => {{ if ({wanted}) {{ watch.disconnect(); keep(true); }} }};
  const watch = new MutationObserver(look);
  const all = {{subtree: true, childList: true, characterData: true, attributes: true}};
  watch.observe(document, all);
  setTimeout(() => fail(new Error("not seen: " + {quoted})), {limit_ms});
  look();
}})"""


class Tab:
    """One page. Problems that the browser reports, a blocked script too, are in `problems`."""

    def __init__(self, commands: int, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self._last_id = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._last_id:
                assert "error" not in heard, heard["error"]
                return dict(heard["result"])

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.do("Page.navigate", url=url)
        while self._hear().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """What a script comes to, awaited if it is a promise."""
        done = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, wanted: str, limit_s: float = 60) -> None:
        """Wait until an expression is true; it is looked at whenever the page changes."""
        limit_ms = int(1000 * limit_s)
        self.run(UNTIL.format(wanted=wanted, quoted=json.dumps(wanted), limit_ms=limit_ms))

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.do("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key that needs no other."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.do("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        self.do("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def _hear(self) -> dict[str, Any]:
        heard = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            heard += byte
        message: dict[str, Any] = json.loads(heard)
        if message.get("method") == "Log.entryAdded":
            self.problems.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A browser with a fresh profile in `folder`; it ends with the block."""
    assert CHROMIUM is not None
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
               "--disable-dev-shm-usage", "--disable-background-networking",
               "--remote-debugging-pipe", f"--user-data-dir={folder}"]  # fmt: skip
    # The browser reads commands from its descriptor 3 and writes to 4.
    script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, "browser", *command],
        pass_fds=(to_read, to_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_read)
    os.close(to_write)
    with open(answers, "rb", buffering=0) as heard:
        try:
            yield Tab(commands, heard)
        finally:
            os.close(commands)  # it ends when nobody commands it
            process.wait(timeout=20)
