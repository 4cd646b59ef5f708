import subprocess
import sys


def test_a_process_without_file_handles_connects_once_it_has_some() -> None:
    """In a process of its own, whose limit is really lowered."""
    command = [sys.executable, "-m", "tests.unit.frontend.workers.starved_fleet"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Too many open files" in ended.stderr and "Traceback" in ended.stderr
