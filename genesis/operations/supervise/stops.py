"""Why a supervisor shall save and stop: a signal, a file, or a URL that announces the end of the machine."""

import contextlib
import http
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_URL_EVERY_SECONDS: Final = 5.0
_URL_LIMIT_SECONDS: Final = 2.0


class StopRequests:
    """Notices requests to save and stop; the first one counts.

    Args:
        file: Its existence is a request; None for none.
        url: An answer with status 200 is a request, as those of clouds that announce the end of a machine.
    """

    def __init__(self, file: Path | None = None, url: str | None = None) -> None:
        self._file, self._url = file, url
        self._reason: str | None = None
        self._requested = threading.Event()
        self._left = threading.Event()
        self.is_interrupted = False

    def find(self) -> str | None:
        """Returns why the run shall save and stop, or None."""
        if self._reason is None and self._file is not None and self._file.exists():
            self._request(f"{self._file} exists")
        return self._reason

    def wait(self, seconds: float) -> None:
        """Waits, but not beyond a request."""
        self._requested.wait(seconds)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notices signals and the URL within this context. Only the main thread may enter it."""
        previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        if self._url is not None:
            threading.Thread(target=self._ask, args=(self._url,), name="preemption-notice", daemon=True).start()
        try:
            yield
        finally:
            self._left.set()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _request(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._requested.set()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = self.is_interrupted or (self._reason is None and number == signal.SIGINT)
        self._request(f"the supervisor got {signal.Signals(number).name}")

    def _ask(self, url: str) -> None:
        while not self._left.wait(_URL_EVERY_SECONDS) and self._reason is None:
            # Most of the time there is no notice: an error, usually 404, or nobody who answers.
            with (
                contextlib.suppress(urllib.error.URLError, OSError, ValueError),
                urllib.request.urlopen(url, timeout=_URL_LIMIT_SECONDS) as answer,
            ):
                if answer.status == http.HTTPStatus.OK:
                    self._request(f"{url} announces the end of this machine")
