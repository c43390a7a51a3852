"""The fake device's process, which all tests of this directory share."""

from collections.abc import Iterator

import pytest

from tests.fakecuda.client import FakeDevice


@pytest.fixture(scope="session")
def fake_device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    device.close()
