import pytest

from tests.distributed.coordinator.job import Job


@pytest.fixture
def job() -> Job:
    return Job()
