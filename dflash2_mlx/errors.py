"""Every error a user can meet.

    DFlashError
    ├── ModelNotFound       no such catalogue name, hub id or folder
    ├── DownloadFailed      a file could not be fetched, or did not match its checksum
    ├── BadCheckpoint       a config or tensor file cannot be used
    │   └── PairMismatch    a drafter that does not belong to its target
    ├── InvalidRequest      a request field has an impossible value
    │   ├── UnsupportedField    a field we know but cannot honour
    │   └── ContextExceeded     a prompt longer than the model reads
    │   ├── BodyTooLarge        a request of more bytes, or nested deeper, than is read
    │   └── NotAllowed          a key that is missing or wrong
    ├── ServerBusy          the queue of requests is full, or the server is closing
    ├── OutOfMemory         what was asked for does not fit into the memory there is
    ├── EngineFailed        the engine broke down under a request
    ├── ConnectFailed       no server answers, or a client's file cannot be merged into
    └── RewindFailed        a cache was asked to go back further than it can

Each message is one line: what was seen, what was expected, what to do. The command line prints it
behind `error:` and exits 1; the server sends it with `status`, `code` and `param`.
"""

from typing import ClassVar


class DFlashError(Exception):
    """Something the user can act on; `param` is the field of a request that it is about."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(DFlashError):
    """No such catalogue name, hub id or folder."""

    status = 404
    code = "model_not_found"


class DownloadFailed(DFlashError):
    """A file could not be fetched, or did not match its checksum."""

    status = 502
    code = "download_failed"


class BadCheckpoint(DFlashError):
    """A config or tensor file cannot be used."""

    status = 422
    code = "bad_checkpoint"


class PairMismatch(BadCheckpoint):
    """A drafter that does not belong to its target."""

    code = "pair_mismatch"


class InvalidRequest(DFlashError):
    """A request field has an impossible value."""

    status = 400
    code = "invalid_value"


class UnsupportedField(InvalidRequest):
    """A field we know but cannot honour."""

    code = "unsupported_parameter"


class ContextExceeded(InvalidRequest):
    """A prompt longer than the model reads."""

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    """A request of more bytes, or nested deeper, than is read."""

    status = 413
    code = "request_too_large"


class NotAllowed(InvalidRequest):
    """A key that is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class ServerBusy(DFlashError):
    """The queue of requests is full, or the server is closing."""

    status = 503
    code = "server_busy"
    retry_after_s: ClassVar[int] = 5


class OutOfMemory(DFlashError):
    """What was asked for does not fit into the memory there is."""

    status = 507
    code = "insufficient_memory"


class EngineFailed(DFlashError):
    """The engine broke down under a request; the next one finds it working again."""

    status = 503
    code = "engine_failed"
    retry_after_s: ClassVar[int] = 1


class ConnectFailed(DFlashError):
    """No server answers, or a client's file cannot be merged into."""

    code = "connect_failed"


class RewindFailed(DFlashError):
    """A cache was asked to go back further than it can."""

    code = "rewind_failed"


def unexpected(error: BaseException) -> DFlashError:
    """What a user is told of an error that should never happen; the log has the rest."""
    return DFlashError(f"an unexpected {type(error).__name__} inside the server; its log says more")
