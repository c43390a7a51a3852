"""The options `--device` and `--dtype` of commands that run a model."""

import argparse
from typing import NamedTuple

import torch

from genesis.base.device import check_available, is_available


class Device(NamedTuple):
    """The device that a model runs on, and the type of its weights."""

    name: str
    dtype: torch.dtype


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--device` and `--dtype`."""
    parser.add_argument(
        "--device", help="device: cpu, cuda, or another that torch finds, as xpu; default: cuda if available, else cpu"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of weights and cache; default: bfloat16 on cuda, else float32",
    )


def read_device(arguments: argparse.Namespace) -> Device:
    """Returns the device and type that the options give, or the defaults for this machine.

    Raises:
        UserError: The options ask for a kind of device that this process cannot use.
    """
    if arguments.device is not None:
        check_available(arguments.device)
    name = arguments.device or ("cuda" if is_available("cuda") else "cpu")
    return Device(name, getattr(torch, arguments.dtype or ("bfloat16" if name == "cuda" else "float32")))
