"""Names of keys, the same in all processes."""

import subprocess
import sys

from common.transfer.shared_arena import key_name


def test_a_key_has_one_name_in_all_processes() -> None:
    key = ("image", b"digest", (("dict", frozenset({("a", 1), ("b", 2.5), ("c", None)})),), True)
    script = f"from common.transfer.shared_arena import key_name\nprint(key_name({key!r}).hex())"
    names = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[-1]
        for seed in ("1", "2")
    }
    name = key_name(key)
    assert name is not None and names == {name.hex()}


def test_unlike_keys_have_unlike_names() -> None:
    keys = [1, 1.0, "1", b"1", True, ("1",), frozenset({"1"}), None, (1, ()), "'1'", ("1", "2")]
    assert len({key_name(key) for key in keys}) == len(keys)
    assert key_name(object()) is None
