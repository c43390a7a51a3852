"""`genesis serve`."""

import os
import signal
from pathlib import Path

from genesis.arguments import Parser
from genesis.cli.device import add_device_options, read_device
from genesis.errors import UserError
from genesis.generate.load import Loaded, load_decoder
from genesis.serve.catalogue import Catalogue, Entry
from genesis.serve.guard import Guard, is_loopback
from genesis.serve.pool import Limits
from genesis.serve.server import Server, bind, serve

_TOKEN_VARIABLE = "GENESIS_TOKEN"
_DEFAULT_PORT = 8000
_DESCRIPTION = """Serves the checkpoints of runs, new ones as they come: a page to watch a model grow, and OpenAI's
/v1/completions and /v1/models, which any client of theirs can use. It answers this machine alone; at other addresses
it wants a token.
Example: genesis serve runs/demo/run"""


def main(argv: list[str]) -> int:
    """Runs `genesis serve` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    token = (os.environ.get(_TOKEN_VARIABLE) or None) if arguments.token is None else arguments.token
    guard = Guard(token, is_public=arguments.public)
    limits = Limits(
        max_concurrent=arguments.max_concurrent,
        max_queue=arguments.max_queue,
        max_models=arguments.max_models,
        max_request_seconds=arguments.max_request_seconds,
        max_write_seconds=arguments.max_write_seconds,
    )
    device, dtype = read_device(arguments)
    catalogue = Catalogue(arguments.model)

    def load(entry: Entry) -> Loaded:
        return load_decoder(entry.path, arguments.tokenizer, device=device, dtype=dtype)

    with bind(arguments.host, arguments.port) as sock:
        address, port = sock.getsockname()[:2]
        if not is_loopback(address) and guard.token is None and not guard.is_public:
            raise UserError(
                f"{arguments.host} can be reached from other machines: give a token by {_TOKEN_VARIABLE} or --token "
                "(--help tells of --public, too)"
            )
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}/"
        count = len(catalogue.entries())
        line = f"{url} serves {count} model{'' if count == 1 else 's'} of {', '.join(map(str, arguments.model))}"
        ended_by = serve(
            lambda: Server(catalogue, load, guard, limits), sock, lambda: print(f"{line}; Ctrl-C ends it", flush=True)
        )
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _build_parser() -> Parser:
    parser = Parser(prog="genesis serve", description=_DESCRIPTION)
    add = parser.add_argument
    limits = Limits()
    add(
        "model",
        type=Path,
        nargs="+",
        help="a run, RUN/best, RUN/STEP, or a checkpoint's or export's path; several are served under their names",
    )
    add("--host", default="127.0.0.1", help="the address to listen on; default 127.0.0.1, which is this machine alone")
    add("--port", type=int, default=_DEFAULT_PORT, help=f"default {_DEFAULT_PORT}; 0 takes any free one")
    add(
        "--token",
        help=f"what clients must bring as api_key; better by the variable {_TOKEN_VARIABLE}, which `ps` does not show",
    )
    add(
        "--public",
        action="store_true",
        help="no token at any address: whoever reaches the port may see the list of models and use them, through any "
        "host name, and any site may show the page in a frame; for a server that something else guards",
    )
    add_device_options(parser)
    add("--max_concurrent", type=int, default=limits.max_concurrent, help="texts that a model continues together")
    add(
        "--max_queue",
        type=int,
        default=limits.max_queue,
        help="texts that wait; beyond, clients are told to come again",
    )
    add("--max_models", type=int, default=limits.max_models, help="checkpoints in memory at a time")
    add(
        "--max_request_seconds", type=float, default=limits.max_request_seconds, help="from a request to its last token"
    )
    add(
        "--max_write_seconds",
        type=float,
        default=limits.max_write_seconds,
        help="that a stream may wait for its reader",
    )
    add("--tokenizer", type=Path, help="file or directory; default: the one that belongs to the checkpoint")
    return parser
