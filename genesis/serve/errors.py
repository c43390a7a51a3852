"""Errors that clients receive, in the form of OpenAI's API."""

from typing import Any

from genesis.base.errors import UserError


class ApiError(UserError):
    """A request that was refused or that failed.

    Args:
        message: One line with the value and the remedy.
        status: The HTTP status.
        param: The field of the request that is invalid.
        code: A short identifier for programs.
        retry_after_seconds: How long the client should wait before it retries.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the response."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: UserError) -> ApiError:
    """Returns the client's form of an error from a lower layer, which means that the model cannot be loaded."""
    return error if isinstance(error, ApiError) else ApiError(str(error), status=500, code="model_not_loaded")


def busy(message: str) -> ApiError:
    """Returns the error for a request that the server has no capacity for at the moment."""
    return ApiError(message, status=429, code="server_busy", retry_after_seconds=1)


def out_of_memory() -> ApiError:
    """Returns the error for a request that the memory is not enough for."""
    message = "the memory is not enough for the request: shorten the prompt, or try again"
    return ApiError(message, status=503, code="out_of_memory")


def stopping() -> ApiError:
    """Returns the error for requests that are active when the server stops."""
    return ApiError("the server is shutting down", status=503, code="server_ending")
