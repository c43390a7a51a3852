"""HTTP servers on loopback for tests, each in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Answers requests by `handler`, and gives the server's URL.

    Args:
        handler: The class that answers.
        attributes: Attributes of a class derived from it, by which requests find what they are about.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
