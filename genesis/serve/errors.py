"""What a client is told when its request cannot be answered, in OpenAI's form."""

from typing import Any

from genesis.errors import UserError


class ApiError(UserError):
    """A request that is refused, or that failed.

    Args:
        message: One line with the value and the remedy.
        status: Of HTTP.
        param: The field of the request that is at fault.
        code: A word for programs.
        retry_after_seconds: When it may go better.
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
        """Returns the JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: UserError) -> ApiError:
    """Returns what a client is told of an error that comes from below: the model cannot be had."""
    return error if isinstance(error, ApiError) else ApiError(str(error), status=500, code="model_not_loaded")


def busy(message: str) -> ApiError:
    """Returns the refusal of a request that there is no room for at the moment."""
    return ApiError(message, status=429, code="server_busy", retry_after_seconds=1)


def stopping() -> ApiError:
    """Returns the end of whatever is under way when the server ends."""
    return ApiError("the server is ending", status=503, code="server_ending")
