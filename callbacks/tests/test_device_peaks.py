"""Peaks of devices: known by their whole names, dense, and never guessed."""

import re

import pytest

from genesis_callbacks import device_peaks
from genesis_callbacks.device_peaks import compute_mfu, read_peak_flops

KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA A10": 125e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12,
}
OTHERS = (
    *("cpu", "", "a simulated device", "NVIDIA GB10", "NVIDIA A10G", "NVIDIA H100", "NVIDIA GeForce RTX 3090 Ti"),
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_device_has_its_published_peak(name):
    assert read_peak_flops(name, "bfloat16") == pytest.approx(KNOWN[name])


@pytest.mark.parametrize("name", OTHERS)
def test_another_device_has_no_peak(name):
    assert read_peak_flops(name, "bfloat16") is None


def test_a_device_without_bfloat16_has_no_peak_of_it():
    assert read_peak_flops("Tesla T4", "bfloat16") is None
    assert read_peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12


def test_no_name_belongs_to_two_devices():
    for name in KNOWN:
        assert sum(re.fullmatch(peaks.names, name) is not None for peaks in device_peaks._DEVICES) == 1


def test_peaks_are_ordered_as_their_types_are():
    for peaks in device_peaks._DEVICES:
        half, single = peaks.float16, peaks.float32
        assert peaks.bfloat16 in (None, half)
        assert half > single
        assert peaks.tfloat32 is None or half > peaks.tfloat32 >= single


def test_mfu_is_the_share_of_all_devices():
    assert compute_mfu(25_000, 6e9, 300e12) == pytest.approx(0.5)
    assert compute_mfu(25_000, 6e9, 300e12, num_devices=2) == pytest.approx(0.25)
