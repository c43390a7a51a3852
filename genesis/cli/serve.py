"""`genesis serve`."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from genesis.base.arguments import Parser, read_gigabytes
from genesis.base.available_memory import available_memory
from genesis.base.device import is_host
from genesis.base.errors import UserError, numbered
from genesis.chat.render import read_template
from genesis.cli.device import add_device_options, read_device
from genesis.generate.load import Loaded, has_chat_template, load_decoder, read_config
from genesis.generate.shared import SharedBases
from genesis.model.decoder import refuse_body
from genesis.serve.catalogue import Catalogue, Entry
from genesis.serve.guard import Guard, is_loopback
from genesis.serve.pool import Limits
from genesis.serve.server import Server, Use, bind, serve

_TOKEN_VARIABLE = "GENESIS_TOKEN"
_DEFAULT_PORT = 8000
_CACHE_SHARE = 0.5
"""The share of the available memory that full caches and beginnings of prompts may take by default."""
_DESCRIPTION = """Serves the checkpoints of runs, including new ones while a run trains: a web page to watch a model
learn, and OpenAI's /v1/completions, /v1/chat/completions and /v1/models for any OpenAI client. By default only this
machine can connect; other addresses require a token.
Example: genesis serve runs/demo/run"""


def main(argv: list[str]) -> int:
    """Runs `genesis serve` and returns its exit status."""
    arguments = _build_parser().parse_args(argv)
    token = (os.environ.get(_TOKEN_VARIABLE) or None) if arguments.token is None else arguments.token
    adapters = _read_adapters(arguments.adapter)
    guard = Guard(token, is_public=arguments.public)
    limits = Limits(
        max_concurrent=Limits.max_concurrent if arguments.max_concurrent is None else arguments.max_concurrent,
        max_queue=arguments.max_queue,
        max_models=_count_models(arguments.max_models, len(adapters)),
        max_request_seconds=arguments.max_request_seconds,
        max_write_seconds=arguments.max_write_seconds,
        prefix_bytes=round(arguments.prefix_cache_gb * 1e9),
    )
    device, dtype = read_device(arguments)
    if arguments.weights is not None and (guard.token is None or not arguments.weights.is_dir()):
        missing = "no token" if guard.token is None else f"no such directory: {arguments.weights}"
        raise UserError(
            f"--weights lets a trainer load weights below a directory, and there is {missing}: give a token by "
            f"{_TOKEN_VARIABLE}, and make the directory, RUN/served/weights of the run that trains"
        )
    catalogue = Catalogue(arguments.model, adapters, arguments.weights)
    text_bytes = _count_text_bytes(catalogue, limits.max_models, dtype)
    if arguments.max_concurrent is None and is_host(device):
        limits = replace(limits, max_concurrent=_count_texts(text_bytes, limits.prefix_bytes, available_memory()))
    if arguments.chat_template is not None:
        read_template(arguments.chat_template)  # a mistake in the file ends the command before a client waits

    bases = SharedBases()

    def load(entry: Entry) -> Loaded:
        is_beside = entry.base is not None
        return load_decoder(
            entry.base or entry.path,
            arguments.tokenizer,
            device=device,
            dtype=dtype,
            adapter=entry.path if is_beside else None,
            bases=bases,
            chat_template=arguments.chat_template,
            allows_scores=True,
        )

    def find_use(entry: Entry) -> Use:
        path = entry.base or entry.path
        if read_config(path).num_scores is not None:
            return "scores"
        has_template = arguments.chat_template is not None or has_chat_template(path, arguments.tokenizer)
        return "chat" if has_template else "text"

    with bind(arguments.host, arguments.port) as sock:
        address, port = sock.getsockname()[:2]
        if not is_loopback(address) and guard.token is None and not guard.is_public:
            raise UserError(
                f"{arguments.host} can be reached from other machines: give a token by {_TOKEN_VARIABLE} or --token, "
                "or see --public in --help"
            )
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}/"
        count = len(catalogue.entries())
        line = f"{url} serves {numbered(count, 'models')} of {', '.join(map(str, arguments.model))}"
        line += f"; a model continues up to {numbered(limits.max_concurrent, 'texts')} at a time"
        if text_bytes:
            cache_bytes = text_bytes * limits.max_concurrent + limits.prefix_bytes
            line += f", with caches of up to {cache_bytes / 1e9:,.2f} GB"
        ended_by = serve(
            lambda: Server(catalogue, load, guard, limits, find_use),
            sock,
            lambda: print(f"{line}; Ctrl-C stops", flush=True),
        )
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _read_adapters(values: list[str]) -> dict[str, Path]:
    """Returns the paths of adapters by their names."""
    adapters: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise UserError(f"--adapter is {value!r}: give NAME=PATH, such as --adapter poet=runs/poet")
        if name in adapters:
            raise UserError(f"--adapter has the name {name!r} twice: give another one")
        adapters[name] = Path(path)
    return adapters


def _count_models(given: int | None, num_adapters: int) -> int:
    """Returns the number of models in memory: with adapters by default all of them and their base."""
    return max(Limits.max_models, 1 + num_adapters if num_adapters else 0) if given is None else given


def _count_text_bytes(catalogue: Catalogue, max_models: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the caches of a text in each of the models that are in memory together; 0 without a model.

    A text has the whole context of its model. The checkpoints of a run have one size.

    Raises:
        UserError: A model is of another library.
    """
    configs = [read_config(entry.base or entry.path) for entry in catalogue.newest().values()]
    for config in configs:
        refuse_body(config)
    writers = (config for config in configs if config.num_scores is None)
    sizes = [config.count_cache_bytes(1, config.max_seq_len, dtype.itemsize) for config in writers]
    return max(sizes, default=0) * min(max_models, len(catalogue.entries()))


def _count_texts(text_bytes: int, prefix_bytes: int, available_bytes: int | None) -> int:
    """Returns how many texts a model generates together by default, so that all caches fit the available memory.

    >>> [_count_texts(10**9, 5 * 10**8, available) for available in (10**12, 9 * 10**9, 10**9, None)]
    [16, 4, 1, 16]
    """
    if available_bytes is None or not text_bytes:
        return Limits.max_concurrent
    return max(1, min(Limits.max_concurrent, (int(_CACHE_SHARE * available_bytes) - prefix_bytes) // text_bytes))


def _build_parser() -> Parser:
    parser = Parser(prog="genesis serve", description=_DESCRIPTION)
    add = parser.add_argument
    limits = Limits()
    add(
        "model",
        type=Path,
        nargs="+",
        help="a run, RUN/best, RUN/STEP, or the path of a checkpoint or export; several are served under their names",
    )
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="adapters beside the first model, served as NAME: a run, a checkpoint or a directory in PEFT's format; "
        "the weights of the base are in memory once; may be given several times",
    )
    add(
        "--weights",
        type=Path,
        metavar="DIR",
        help="let clients with the token load weights below this directory by POST /v1/load_weights; for answers in "
        "training (data.prompts.rollouts), RUN/served/weights of the run",
    )
    add("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, which only this machine reaches")
    add("--port", type=int, default=_DEFAULT_PORT, help=f"port; default {_DEFAULT_PORT}; 0 selects any free port")
    add(
        "--token",
        help=f"api_key that clients must send; prefer the variable {_TOKEN_VARIABLE}, which `ps` does not show",
    )
    add(
        "--public",
        action="store_true",
        help="require no token at any address: everybody who reaches the port may list and use the models, under any "
        "host name, and any site may frame the page; for a server behind another access control",
    )
    add_device_options(parser)
    add(
        "--max_concurrent",
        type=int,
        help=f"texts that a model generates together; default {limits.max_concurrent}, or fewer on a CPU if the caches "
        f"of full contexts and --prefix_cache_gb would take more than {_CACHE_SHARE:.0%}% of the available memory",
    )
    add(
        "--max_queue",
        type=int,
        default=limits.max_queue,
        help="texts that wait; further requests are refused with status 429",
    )
    add(
        "--max_models",
        type=int,
        help=f"models in memory at once, each with its own cache; default {limits.max_models}, or the base and "
        "all its adapters",
    )
    add(
        "--prefix_cache_gb",
        type=read_gigabytes,
        default=limits.prefix_bytes / 1e9,
        help="memory in GB, or as 512MB, for computed beginnings of prompts, which prompts with the same beginning "
        f"use; each of --max_models has an equal share; default {limits.prefix_bytes / 1e9:g}; 0 computes all prompts",
    )
    add("--max_request_seconds", type=float, default=limits.max_request_seconds, help="time limit of a request")
    add(
        "--max_write_seconds",
        type=float,
        default=limits.max_write_seconds,
        help="time after which a stream is closed if its client does not read",
    )
    add("--tokenizer", type=Path, help="tokenizer file or directory; default: the checkpoint's own tokenizer")
    add(
        "--chat_template",
        type=Path,
        help="file of a Jinja chat template; default: the one that the model has learned, or the tokenizer's own",
    )
    return parser
