"""How a request is refused: a status, what is wrong, and how to fix it."""

from collections.abc import Mapping


class ApiError(Exception):
    """A response other than a result; the message says what is wrong and what to do."""

    def __init__(
        self, status: int, message: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


class ClientDisconnected(Exception):
    """The client closed its connection before its request was complete; no response is needed."""


def refuse_busy(why: str, wait_s: float = 1.0) -> ApiError:
    """429: the server is overloaded; wait_s: after how many seconds to retry."""
    return ApiError(
        429, f"{why}; send it again later", headers={"Retry-After": f"{max(1, round(wait_s))}"}
    )
