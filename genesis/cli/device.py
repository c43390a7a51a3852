"""The options of commands that run a model: where, and in what type."""

import argparse
from typing import NamedTuple

import torch

from genesis.errors import UserError


class Device(NamedTuple):
    """Where a model runs, and the type of its weights."""

    name: str
    dtype: torch.dtype


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--device` and `--dtype`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is some")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and cache; default: bfloat16 on cuda, else float32",
    )


def read_device(arguments: argparse.Namespace) -> Device:
    """Returns what the options say, or what suits the machine.

    Raises:
        UserError: CUDA is asked for, and there is none.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is there; leave --device away, or give --device cpu")
    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Device(name, getattr(torch, arguments.dtype or ("bfloat16" if name == "cuda" else "float32")))
