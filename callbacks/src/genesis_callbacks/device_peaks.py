"""The peak rates of accelerators, as their makers publish them, and the share of a peak that a training reaches (MFU).

All rates are dense: sheets that list rates with sparsity are halved. Products of 16-bit matrices are those that add in
float32, as torch's do. A device is found by its whole name, because a laptop's, a cut-down or a partitioned device has
another peak under a similar name. Without a known peak there is no MFU.
"""

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["DevicePeaks", "PeakType", "choose_peak_type", "compute_mfu", "read_peak_flops"]

PeakType = Literal["bfloat16", "float16", "tfloat32", "float32"]
"""What is multiplied; `tfloat32` is float32 of which the device reads 19 bits."""


@dataclass(frozen=True)
class DevicePeaks:
    """Dense peaks of a device in 10^12 floating-point operations per second; None where it has no such unit.

    Args:
        names: A regular expression for whole names of the driver.
        bfloat16: Products of bfloat16 matrices.
        float16: Products of float16 matrices.
        tfloat32: Products of float32 matrices whose elements are read as TF32.
        float32: Products of float32 matrices.
    """

    names: str
    bfloat16: float | None
    float16: float
    tfloat32: float | None
    float32: float


_DEVICES = (
    # NVIDIA A100 Tensor Core GPU datasheet, 2021.
    DevicePeaks(r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 312, 312, 156, 19.5),
    # NVIDIA H100 Tensor Core GPU datasheet, 2024; its figures for the PCIe form are those of the Hopper whitepaper.
    DevicePeaks(r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM\d?", 989.4, 989.4, 494.7, 66.9),
    DevicePeaks(r"NVIDIA H100 PCIe", 756, 756, 378, 51.2),
    DevicePeaks(r"NVIDIA H100 NVL", 835.5, 835.5, 417.5, 60),
    # NVIDIA H200 Tensor Core GPU datasheet, 2024.
    DevicePeaks(r"NVIDIA H200", 989.5, 989.5, 494.5, 67),
    DevicePeaks(r"NVIDIA H200 NVL", 835.5, 835.5, 417.5, 60),
    # NVIDIA HGX platform datasheet, 2025: an eighth of the figures for HGX B200.
    DevicePeaks(r"NVIDIA B200", 2250, 2250, 1125, 75),
    # NVIDIA L40S datasheet, 2023.
    DevicePeaks(r"NVIDIA L40S", 362.05, 362.05, 183, 91.6),
    # NVIDIA A10 datasheet, 2021.
    DevicePeaks(r"NVIDIA A10", 125, 125, 62.5, 31.2),
    # NVIDIA T4 datasheet, 2019.
    DevicePeaks(r"Tesla T4", None, 65, None, 8.1),
    # NVIDIA V100 datasheet, 2020.
    DevicePeaks(r"Tesla V100-SXM[23]-\d+GB(-LS)?", None, 125, None, 15.7),
    DevicePeaks(r"Tesla V100-PCIE-\d+GB", None, 112, None, 14),
    DevicePeaks(r"Tesla V100S-PCIE-\d+GB", None, 130, None, 16.4),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper, 2021, appendix A.
    DevicePeaks(r"NVIDIA GeForce RTX 3090", 71, 71, 35.6, 35.6),
    # NVIDIA Ada GPU Architecture whitepaper, 2022, appendix A.
    DevicePeaks(r"NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6),
    # NVIDIA Ada GPU Architecture whitepaper for professional GPUs, 2023.
    DevicePeaks(r"NVIDIA RTX 6000 Ada Generation", 364.2, 364.2, 182.1, 91.1),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, 2025, appendix A.
    DevicePeaks(r"NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.8, 104.8),
    # NVIDIA RTX Blackwell PRO GPU Architecture whitepaper, 2025.
    DevicePeaks(r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 503.8, 251.9, 126),
    # AMD Instinct MI250X datasheet, 2021: half of its figures, because torch sees each of its two dies as a device.
    DevicePeaks(r"AMD Instinct MI250X", 191.5, 191.5, None, 47.85),
    # AMD Instinct MI300X datasheet, 2023.
    DevicePeaks(r"AMD Instinct MI300X", 1307.4, 1307.4, 653.7, 163.4),
    # For GB10 NVIDIA publishes a rate of sparse FP4 alone, so that it has no line.
)


def read_peak_flops(device_name: str, dtype: PeakType) -> float | None:
    """Returns the dense peak of a device in floating-point operations per second, or None if it is not known.

    Args:
        device_name: As the driver gives it.
        dtype: What is multiplied.

    Example:
        >>> read_peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
        989400000000000.0
        >>> read_peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16") is None
        True
    """
    for peaks in _DEVICES:
        if re.fullmatch(peaks.names, device_name):
            rate: float | None = getattr(peaks, dtype)
            return None if rate is None else rate * 1e12
    return None


def choose_peak_type(precision: str | None, float32_precision: str) -> PeakType:
    """Returns the type of the peak for a Trainer's precision.

    Args:
        precision: The Trainer's.
        float32_precision: `torch.get_float32_matmul_precision()`.

    Example:
        >>> choose_peak_type("bf16-mixed", "highest"), choose_peak_type("32-true", "high")
        ('bfloat16', 'tfloat32')
    """
    if precision in ("bf16-mixed", "bf16-true"):
        return "bfloat16"
    if precision in ("16-mixed", "16-true"):
        return "float16"
    return "float32" if float32_precision == "highest" else "tfloat32"


def compute_mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float, num_devices: int = 1) -> float:
    """Returns the share of the devices' peak that the model's own arithmetic takes, between 0 and 1.

    Args:
        tokens_per_second: On all devices together.
        flops_per_token: Of forward and backward, without what is computed twice.
        peak_flops: Of one device, as `read_peak_flops` has it.
        num_devices: How many devices train.

    Example:
        >>> compute_mfu(50_000, 8e9, 1e15, num_devices=2)
        0.2

    References:
        Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    return tokens_per_second * flops_per_token / (peak_flops * num_devices)
