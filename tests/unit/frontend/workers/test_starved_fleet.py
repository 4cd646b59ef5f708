from tests.e2e.processes import run_python


def test_a_process_without_file_handles_connects_once_it_has_some() -> None:
    """In a process of its own, whose limit is really lowered."""
    ended = run_python("-m", "tests.unit.frontend.workers.starved_fleet", timeout_s=110)
    assert ended.returncode == 0, ended.stdout
    assert "Too many open files" in ended.stdout and "Traceback" in ended.stdout
