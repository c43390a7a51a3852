"""The HTTP server: OpenAI's completions, chat completions and models, vLLM's scores, and the page that uses them."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any, Final, Literal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from genesis.base.errors import UserError
from genesis.chat.pool import POOL
from genesis.generate.load import Loaded
from genesis.serve.catalogue import Catalogue, Entry
from genesis.serve.completion import Completion, error_event
from genesis.serve.connections import KEEPALIVE_SECONDS, Connections, count_connections, find_connection
from genesis.serve.errors import ApiError, as_api_error, out_of_memory
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits, ModelPool
from genesis.serve.preparer import MAX_BODY_BYTES, Preparer
from genesis.serve.repeats import RepeatFilter
from genesis.serve.request import parse_load
from genesis.serve.scoring import Scoring, check_can_answer

_SEND_BUFFER_BYTES: Final = 2**16
"""Size of the kernel's send buffer, which bounds the unsent data of a client that has stopped reading."""
_SHUTDOWN_SECONDS: Final = 5.0
_BODY_SECONDS: Final = 10.0
"""Also how long the rest of a body is read after an answer that did not need it: some clients read it only then."""
_LEAST_BYTES_PER_SECOND: Final = 2**15
"""A body has ten seconds, and a second more for each so many bytes that have come."""
_CROWDED_WRITE_SECONDS: Final = 1.0
"""How long an answer may stay unread while texts wait for the row that it holds."""
_BACKLOG: Final = 4096
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Use = Literal["chat", "text", "scores"]
"""A model with a chat template, one without, or a reward model."""
_log = logging.getLogger(__name__)
_LOGGERS: Final = (__name__, f"{__name__}.http", "genesis.serve.connections", "genesis.serve.worker", "asyncio")
"""The loggers whose repeated lines are counted: those of what clients can cause."""


class Server:
    """Answers requests in a single event loop.

    Args:
        catalogue: The models that clients can request.
        load: Loads one of these models; called in a thread.
        guard: The access rule.
        limits: The capacity limits.
        find_use: What one of the models is for; called in a thread, once for the models of a run.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        load: Callable[[Entry], Loaded],
        guard: Guard,
        limits: Limits,
        find_use: Callable[[Entry], Use] = lambda _: "chat",
    ) -> None:
        self._catalogue, self._guard, self.limits = catalogue, guard, limits
        self._find_use = find_use
        self._uses: dict[str, Use] = {}
        self.pool = ModelPool(load, limits)
        self.preparer = Preparer(limits.max_concurrent)
        self._page = _read_page()

    def build_app(self) -> web.Application:
        """Returns the aiohttp application."""
        app = web.Application(middlewares=[self._answer_errors, self._check], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(self._add_headers)
        app.add_routes(
            [
                web.get("/", partial(self._show_page, name="index.html")),
                web.get("/page/{name}", self._show_page),
                web.get("/api/models", self._list_entries),
                web.get("/api/status", self._show_status),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._show_model),
                web.post("/v1/completions", partial(self._complete, is_chat=False)),
                web.post("/v1/chat/completions", partial(self._complete, is_chat=True)),
                web.post("/v1/score", partial(self._complete, is_chat=True, is_score=True)),
                web.post("/v1/load_weights", self._load_weights),
            ]
        )
        return app

    def count_write_seconds(self) -> float:
        """Returns how long a client may leave its answer unread; its texts keep their rows meanwhile."""
        limit = self.limits.max_write_seconds
        return min(limit, _CROWDED_WRITE_SECONDS) if self.pool.num_waiting else limit

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Turns every error into a response in OpenAI's form."""
        try:
            return await handler(request)
        except UserError as error:
            return _answer(self._tell(error), request)
        except web.HTTPException as error:
            return _answer(_translate(error, request), request)
        except TimeoutError:
            return _answer(self._timed_out(), request)
        except ConnectionError:  # the client has disconnected, so that nobody would read a response
            raise
        except MemoryError:
            return _answer(out_of_memory(), request)
        except Exception:
            _log.exception("a request failed")
            internal = ApiError("internal error; see the server's log", status=500, code="server_failed")
            return _answer(internal, request)

    @web.middleware
    async def _check(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = find_connection(request)
        with connection.request(request.content):
            self._guard.check_site(request.headers)
            if request.path != "/" and not request.path.startswith("/page/"):  # the page contains no data of the run
                self._guard.check_token(request.headers)
                connection.is_known = True
            return await handler(request)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self._guard.answer_headers())
        response.headers.setdefault("Cache-Control", "no-store")

    async def _show_page(self, request: web.Request, name: str | None = None) -> web.Response:
        file = self._page.get(name or request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        content, kind = file
        return web.Response(body=content, content_type=kind, charset="utf-8", headers={"Cache-Control": "no-cache"})

    async def _list_entries(self, request: web.Request) -> web.Response:
        entries, newest = await asyncio.to_thread(lambda: (self._catalogue.entries(), self._catalogue.newest()))
        uses = await asyncio.to_thread(lambda: [self._use(entry) for entry in entries])
        return web.json_response(
            {
                "models": [_describe_entry(*pair) for pair in zip(entries, uses, strict=True)],
                "latest": {name: entry.id for name, entry in newest.items()},
            }
        )

    def _use(self, entry: Entry) -> Use:
        """Returns what a model is for; the checkpoints of a run have one shape and one tokenizer."""
        if entry.run not in self._uses:
            try:
                self._uses[entry.run] = self._find_use(entry)
            except (UserError, OSError) as error:
                _log.warning("%s: no chat: %s", entry.id, error)
                self._uses[entry.run] = "text"
        return self._uses[entry.run]

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(self.pool.status())

    async def _list_models(self, request: web.Request) -> web.Response:
        by_id = await asyncio.to_thread(self._catalogue.by_id)
        return web.json_response({"object": "list", "data": [_describe_model(*item) for item in by_id.items()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return web.json_response(_describe_model(name, await asyncio.to_thread(self._catalogue.find, name)))

    async def _complete(self, request: web.Request, *, is_chat: bool, is_score: bool = False) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self.limits.max_request_seconds
        async with AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                with self.preparer.holding() as hold:
                    body = await self._read(request, hold)
                    connection = find_connection(request)
                    stack.enter_context(connection.work())
                    asked = await self.preparer.read(body, is_chat=is_chat, is_score=is_score, client=connection.client)
                    entry = await asyncio.to_thread(self._catalogue.find, asked.model)
                    worker = await stack.enter_async_context(self.pool.lend(entry, asked.num_texts, connection.client))
                    facts = worker.loaded.result()
                    check_can_answer(asked, facts)
                    prompts = await self.preparer.encode(asked, body, facts, client=connection.client)
                del body
                grammar = await self.preparer.compile(asked, facts, client=connection.client)
            if asked.is_score:
                scoring = stack.enter_context(Scoring(entry.id, worker, prompts, connection.client))
                async with asyncio.timeout_at(deadline):
                    return web.json_response(await scoring.collect())
            # On a public server nobody learns by the time of an answer what others have asked.
            scope = connection.client if self._guard.is_public else ""
            completion = stack.enter_context(
                Completion(asked, entry.id, worker, facts, prompts, connection.client, grammar, scope)
            )
            if asked.is_stream:
                return await self._stream(request, completion, deadline)
            async with asyncio.timeout_at(deadline):
                return web.json_response(await completion.collect())

    async def _load_weights(self, request: web.Request) -> web.Response:
        """Adds weights to the models, and loads them before the first request for them."""
        deadline = asyncio.get_running_loop().time() + self.limits.max_request_seconds
        async with asyncio.timeout_at(deadline):
            with self.preparer.holding() as hold:
                name, digest = parse_load(await self._read(request, hold))
            connection = find_connection(request)
            with connection.work():
                entry = await asyncio.to_thread(self._catalogue.add, name, digest)
                async with self.pool.lend(entry, 1, connection.client):
                    return web.json_response({**_describe_model(entry.id, entry), "digest": digest})

    async def _read(self, request: web.Request, hold: Callable[[int], None]) -> bytes:
        if request.content_type != "application/json":
            raise ApiError(
                f"the body has type {request.content_type[:100]!r}: send 'Content-Type: application/json'", status=415
            )
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError("the body has a Content-Encoding: send the body without one", status=415)
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
        body = bytearray()
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(_BODY_SECONDS) as limit:
                while chunk := await request.content.readany():
                    hold(len(chunk))
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
                    limit.reschedule(begin + _BODY_SECONDS + len(body) / _LEAST_BYTES_PER_SECOND)
        except web.RequestPayloadError:
            raise ApiError("the body is incomplete: the client closed it too early") from None
        except TimeoutError:
            raise ApiError(
                f"the body arrived too slowly: only {len(body):,} bytes in "
                f"{asyncio.get_running_loop().time() - begin:.0f} s; send it faster",
                status=408,
            ) from None
        return bytes(body)

    async def _stream(self, request: web.Request, completion: Completion, deadline: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async with asyncio.timeout_at(deadline):
                async for event in completion.events():
                    await response.write(event)
        except UserError as error:
            await response.write(error_event(self._tell(error)))
        except TimeoutError:
            await response.write(error_event(self._timed_out()))
        except MemoryError:
            await response.write(error_event(out_of_memory()))
        except Exception:
            _hang_up(request)  # the response has begun, so that an error response would corrupt it
            raise
        return response

    def _tell(self, error: UserError) -> ApiError:
        """Returns the client's form of an error; on a public server the message contains no paths of this machine."""
        if isinstance(error, ApiError) or not self._guard.is_public:
            return as_api_error(error)
        _log.error("%s", error)
        return as_api_error(UserError("the model cannot be loaded; see the server's log for the cause"))

    def _timed_out(self) -> ApiError:
        message = f"the request took longer than {self.limits.max_request_seconds:g} s: request fewer tokens"
        return ApiError(message, status=503, code="request_timeout")


def serve(build_server: Callable[[], Server], sock: socket.socket, announce: Callable[[], None]) -> signal.Signals:
    """Serves on `sock` until a signal arrives, and returns that signal; a second signal ends the process at once.

    Args:
        build_server: Builds the server; called in the event loop.
        sock: A listening socket, as `bind` returns it.
        announce: Called as soon as the server answers requests.
    """
    return asyncio.run(_serve(build_server, sock, announce))


async def _serve(
    build_server: Callable[[], Server], sock: socket.socket, announce: Callable[[], None]
) -> signal.Signals:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end, number, ended)
    async with answering(build_server(), sock):
        announce()
        return await ended


@asynccontextmanager
async def answering(server: Server, sock: socket.socket) -> AsyncIterator[None]:
    """Serves on `sock` inside the context; at its exit active requests get an error and all models are released."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_our_fault)
    repeats = RepeatFilter()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(repeats)
    runner = web.AppRunner(
        server.build_app(),
        handler_cancellation=True,  # a client that disconnects frees its row in the batch
        access_log=None,
        auto_decompress=False,
        logger=logger,
        keepalive_timeout=KEEPALIVE_SECONDS,
        lingering_time=_BODY_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    connections = Connections(sock, runner.server, count_connections(), server.count_write_seconds)
    try:
        yield
    finally:
        connections.close()
        server.pool.close()
        POOL.end()  # threads that wait for a template would keep the process
        server.preparer.close()
        await runner.cleanup()
        await asyncio.to_thread(server.pool.join)
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(repeats)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Keeps records of our own errors; drops disconnects and malformed HTTP, whose text may contain a prompt."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


def _end(number: signal.Signals, ended: asyncio.Future[signal.Signals]) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(other)
        signal.signal(other, signal.SIG_DFL)
    if not ended.done():
        ended.set_result(number)


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        UserError: The host does not exist, or the port is invalid, in use or not permitted.
    """
    if not 0 <= port <= 65_535:
        raise UserError(f"port {port} is out of range: give a port from 1 to 65535, or 0 for any free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot resolve host {host!r}: {error}; give an address of this machine by --host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # inherited by accepted connections
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use: give another by --port, or 0 for any") from None
        raise UserError(
            f"cannot listen on {host}, port {port}: {error.strerror}; give others by --host and --port"
        ) from None
    return sock


def _read_page() -> dict[str, tuple[bytes, str]]:
    """Returns the page's files, each with its content type."""
    files = [file for file in (resources.files(__package__) / "page").iterdir() if file.is_file()]
    return {file.name: (file.read_bytes(), _TYPES[file.name.rpartition(".")[2]]) for file in files}


def _answer(error: ApiError, request: web.Request) -> web.Response:
    response = web.json_response(error.body(), status=error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
        response.force_close()  # further requests that a stranger has sent at once are not looked at
    if not request.content.is_eof():  # the client must not send its next request behind the rest of this body
        response.force_close()
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    elif error.status >= 500:
        response.headers["X-Should-Retry"] = "false"  # OpenAI's client would retry twice, with the same result
    return response


def _translate(error: web.HTTPException, request: web.Request) -> ApiError:
    known = {
        404: f"no such path: {request.path[:100]!r}",
        405: f"method {request.method[:20]!r} is not allowed for {request.path[:100]!r}",
        413: f"the body has more than {MAX_BODY_BYTES:,} bytes: send a shorter prompt",
    }
    param = "prompt" if error.status == 413 else None
    return ApiError(known.get(error.status, error.reason), status=error.status, param=param)


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _describe_model(name: str, entry: Entry) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(entry.created_seconds), "owned_by": "genesis"}


def _describe_entry(entry: Entry, use: Use) -> dict[str, Any]:
    return {
        "has_chat": use == "chat",
        "has_scores": use == "scores",
        "id": entry.id,
        "run": entry.run,
        "step": entry.step,
        "tokens_seen": entry.tokens_seen,
        "train_loss": entry.train_loss,
        "validation_loss": entry.validation_loss,
    }
