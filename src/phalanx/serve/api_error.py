"""What a client is refused with: a status, what is wrong, and the way out."""

from collections.abc import Mapping


class ApiError(Exception):
    """An answer that is no result; the message says what is wrong and what to do."""

    def __init__(
        self, status: int, message: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


class ClientDisconnected(Exception):
    """The client closed its connection before its request was whole; nobody wants an answer."""


def refuse_busy(why: str, wait_s: float = 1.0) -> ApiError:
    """429: there is too much to do already; wait_s: when to come again."""
    return ApiError(
        429, f"{why}; send it again later", headers={"Retry-After": f"{max(1, round(wait_s))}"}
    )
