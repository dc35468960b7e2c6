"""What the guard goes by; imports nothing, so that a command line can be refused quickly."""

from collections.abc import Collection
from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Rules:
    """`hosts` None lets every Host header pass; `key` None asks for none."""

    hosts: Collection[str] | None = LOOPBACK
    origins: Collection[str] = ()
    key: str | None = None
