"""A pytest plugin: a worker of pytest-xdist that crashes fails one test, and its other tests run on other workers.

pytest-xdist 3.8.0, the newest release, distributes groups in a way that may never end after a crash: a new worker waits
for a second test before it starts the first, and completed groups are given out again. It also runs the test of a crash
again, until no worker is left. Its issues 1189, 1327 and 1378 and its pull request 1371 describe the faults; a release
that has corrected all of them makes this file unnecessary.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class CrashSafeScheduling(LoadGroupScheduling):
    """Distributes groups of tests, also after crashes."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that the worker was running, if any, and lets the others run what it had yet to run."""
        groups = {name: group for name, group in self.assigned_work.pop(node).items() if not all(group.values())}
        crashed = next((test for group in groups.values() for test, is_done in group.items() if not is_done), None)
        for name, group in groups.items():
            if crashed in group:
                group[crashed] = True
            if not all(group.values()):
                self.workqueue[name] = group
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        # A new worker may still be collecting. It asks again afterwards.
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        # A worker starts its last test once it knows that none follows. One test alone is never started.
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> CrashSafeScheduling | None:
    """Returns the scheduler of `--dist loadgroup`."""
    return CrashSafeScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
