"""The page at /: nothing from elsewhere, and a real browser can chat with it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from browser import CHROMIUM, Tab, browser
from served import ChatTokenizer, last_line, listening, saying_pair, served

from dflash2_mlx.server.rules import Rules

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
LONG = "word " * 600


class Thinker(ChatTokenizer):
    think_start, think_end = "<think>", "</think>"


def test_the_page_may_only_run_itself_and_talk_to_its_server() -> None:
    with served() as http:
        answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]+='", policy[name])
    assert not re.search(r"https?://|//\w+\.\w|@import|<link[^>]+stylesheet| src=", answer.text)
    assert " on" + "click" not in answer.text
    assert " style=" not in answer.text


def test_the_page_is_small() -> None:
    with served() as http:
        assert len(http.get("/").content) < 20_000


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@contextmanager
def visiting(tab: Tab, pair: Any = None, **options: Any) -> Iterator[Any]:
    """The page of a server, left before the server ends; yields the worker."""
    with listening(pair, **options) as (address, worker):
        tab.problems.clear()
        tab.open(f"http://127.0.0.1:{address[1]}/")
        tab.until("document.activeElement.id == 'say'")
        yield worker
        tab.open("about:blank")


def say(tab: Tab, text: str) -> None:
    tab.type(text)
    tab.press("Enter")


def shown(tab: Tab, id_: str) -> str:
    return str(tab.run(f"document.getElementById('{id_}').textContent"))


PIECES = "[...document.querySelectorAll('.piece')]"
FACTS = "[...document.querySelectorAll('.facts')]"
READY = "document.getElementById('send').checkVisibility()"
DONE = f"{FACTS}.length == {{}} && {FACTS}.every(f => f.textContent.includes('per pass'))"
DONE += f" && {READY}"


@needs_browser
def test_an_answer_streams_in_with_all_that_happened(tab: Tab) -> None:
    said = "<think>\nhm\n</think>\n\nFirst <b>line</b>\nsecond"
    with visiting(tab, saying_pair(lambda prompt: said, Thinker())):
        say(tab, "Hi")
        tab.until(DONE.format(1))
        parts = tab.run("[...document.querySelectorAll('.turn')].map(t => t.innerText)")
        shares = tab.run(f"{PIECES}.map(piece => +piece.style.getPropertyValue('--share'))")
        tab.until("document.getElementById('running').textContent == '0'")
        assert parts[0] == "Hi"
        assert "First <b>line</b>\nsecond" in parts[1]
        assert tab.run("document.querySelector('.thought div').textContent") == "hm"
        assert 0.5 < sum(shares) / len(shares) < 0.8
        assert float(shown(tab, "rate").replace(",", "")) > 0
        assert float(shown(tab, "perpass")) > 1
        assert shown(tab, "tokens") == str(len(said) + 1)
        assert shown(tab, "drafting") == "on"
        assert shown(tab, "prompt") == str(len("user: Hi\n") + 1)
        assert shown(tab, "cached") == "0"
        assert shown(tab, "model") == "tiny"
        assert re.fullmatch(r"\d+ MB", shown(tab, "memory"))
        kept = tab.run("[...document.querySelectorAll('meter')].map(m => m.value)")
        assert kept == sorted(kept, reverse=True)
        assert len(kept) == 2
    assert tab.problems == []


@needs_browser
def test_a_second_question_takes_the_first_along_and_a_new_chat_does_not(tab: Tab) -> None:
    asked: list[str] = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        return "yes"

    with visiting(tab, saying_pair(script)):
        say(tab, "one")
        tab.until(DONE.format(1))
        say(tab, "two")
        tab.until(DONE.format(2))
        assert asked[-1] == "user: one\nassistant: yes\nuser: two\n"
        tab.run("document.getElementById('fresh').click()")
        say(tab, "three")
        tab.until(DONE.format(1))
    assert asked[-1] == "user: three\n"
    assert tab.problems == []


@needs_browser
def test_an_error_is_shown_and_the_question_kept(tab: Tab) -> None:
    with visiting(tab, saying_pair(context_limit=40)):
        say(tab, "x" * 60)
        tab.until(f"document.querySelector('[role=alert]') && {READY}")
        assert "maximum context length is 40 tokens" in tab.run(
            "document.querySelector('[role=alert]').textContent"
        )
        assert tab.run("document.getElementById('say').value") == "x" * 60
        tab.run("document.getElementById('say').value = ''")
        say(tab, "short")
        tab.until(DONE.format(1))
    assert [problem for problem in tab.problems if "400" not in problem] == []


@needs_browser
def test_a_key_is_asked_for_where_one_is_needed(tab: Tab) -> None:
    with visiting(tab, rules=Rules(key="k-123")):
        assert not tab.run("document.getElementById('key').checkVisibility()")
        say(tab, "Hi")
        tab.until(f"document.getElementById('key').checkVisibility() && {READY}")
        assert tab.run("document.activeElement.id") == "key"
        say(tab, "k-123")
        tab.until(DONE.format(1))
        assert not tab.run("document.getElementById('key').checkVisibility()")


@needs_browser
def test_escape_stops_an_answer_and_its_work(tab: Tab) -> None:
    endless = saying_pair(lambda prompt: LONG * 20, context_limit=70_000)
    with visiting(tab, endless) as worker:
        say(tab, "Hi")
        tab.until("document.querySelectorAll('.piece').length > 3")
        tab.until("document.getElementById('running').textContent == '1'")
        assert tab.run("document.getElementById('stop').checkVisibility()")
        tab.press("Escape")
        tab.until(READY)
        tab.until("document.getElementById('running').textContent == '0'")
        assert worker.health().running == 0
        assert worker.tally.outcomes["cancelled"] == 1
        assert tab.run("document.querySelector('[role=alert]')") is None


@needs_browser
def test_light_dark_and_narrow(tab: Tab) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with visiting(tab, saying_pair(last_line)):
        tab.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "light"}],
        )
        light = tab.run(paper)
        tab.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark"}],
        )
        assert tab.run(paper) != light
        tab.do(
            "Emulation.setDeviceMetricsOverride",
            width=360, height=700, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        assert tab.run("document.documentElement.scrollWidth") <= 360
        assert tab.run("document.getElementById('say').checkVisibility()")
