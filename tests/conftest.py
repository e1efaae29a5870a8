"""Rules of the whole test run: in CI a skip of the default tier is a failure, and no test changes the next one's
environment: a command run in this process may set RANK and WORLD_SIZE, which ranks started later would inherit."""

import os

import pytest


@pytest.fixture(autouse=True)
def _environment():
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if os.environ.get("CI") != "true" or os.environ.get("TEST_TIER") != "default":
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus):
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and os.environ.get("CI") == "true" and os.environ.get("TEST_TIER") == "default":
        terminalreporter.write_line(f"{len(skipped)} skipped: in CI a skip of the default tier is a failure", red=True)
