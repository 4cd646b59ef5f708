"""Make or check the lists of packages that ``make setup`` installs, ``locks/*.txt``.

    python setup/locks.py            # check that they fit pyproject.toml; prints what doesn't
    python setup/locks.py --make     # make them again; asks the package index

A lock names every package that its environment needs, directly or not, with one version and the
SHA-256 of each file of that version. pip installs it with ``--require-hashes --no-deps``: it takes
nothing else, and refuses a file that another index has under the same name.

``--make`` keeps the versions that are there where pyproject.toml allows them; delete a pin, or the
file, to have newer ones. uv reads only the packages' metadata, so nothing large is downloaded. As
pip does, it looks for torch's CPU build where the environment variable PIP_FIND_LINKS says.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "locks"
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Lock:
    """What one of the files is made from.

    Attributes:
        extras: of pyproject.toml.
        whole: with what the project itself and its build need, not the extras alone.
        also: what uv does not see, since it reads one file's metadata for all of a release.
        without: what is needed in name only.
        alone: without what its packages need.
        beside: locks of environments that this one is installed into, whose versions it keeps.
        links: whether files that PIP_FIND_LINKS names count, as PyTorch's CPU builds do.
        says: its own words in the file's header.
    """

    name: str
    extras: tuple[str, ...]
    says: str
    whole: bool = True
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    alone: bool = False
    beside: tuple[str, ...] = ()
    links: bool = False

    @property
    def path(self) -> Path:
        return DIRECTORY / self.name


CPU = Lock(
    "cpu.txt",
    ("cpu", "nixl", "kubernetes", "otel", "test"),
    "torch is PyTorch's CPU build, which is not on PyPI (see README.md), and so comes first. Its\n"
    "hashes are in torch-cpu.sha256. setup/cpu_torch.py has torchaudio do without CUDA, and\n"
    "removes torchcodec.",
    # What intel-openmp needs on Linux; its file for Windows, which uv reads, does not say so.
    also=("intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'",),
    # The same library for another CUDA; nothing can load it beside a CPU build.
    without=("nixl-cu13",),
    links=True,
)
CUDA = Lock(
    "cuda.txt",
    ("cuda", "nixl", "kubernetes", "otel", "test"),
    "Installed as a whole on a machine without a GPU, where frontends run from it: see\n"
    "docs/vllm-0.33.md. No engine was run from it.",
)
CPU_033 = Lock(
    "cpu-0.33.txt",
    ("cuda-0.33",),
    "What setup/vllm_vehicle.py makes an environment of that runs tests of this vLLM on a CPU.\n"
    "All else is taken from cpu.txt's environment, though this vLLM asks for a newer torch.",
    whole=False,
    also=("orjson>=3.11.6",),  # what vLLM 0.33 needs and 0.32 did not
    alone=True,
    beside=(CPU.name,),
)
CUDA_033 = Lock(
    "cuda-0.33.txt",
    ("cuda-0.33", "nixl", "kubernetes", "otel", "test"),
    CUDA.says,
)
BENCH = Lock(
    "bench.txt",
    ("bench",),
    "Comes on top of either of the others; versions are theirs.",
    whole=False,
    beside=(CPU.name, CUDA.name),
)
DOCS = Lock(
    "docs.txt",
    ("docs",),
    "Comes on top of either of the others; versions are theirs.",
    whole=False,
    beside=(CPU.name, CUDA.name),
)
CLIENTS = Lock(
    "clients.txt",
    ("clients",),
    "For .venv-clients, an environment beside the others.",
    whole=False,
    # LiteLLM's proxy starts and serves without them: other servers, clouds, data bases, and what
    # belongs to paid features.
    without=(
        "azure-identity",
        "azure-storage-blob",
        "boto3",
        "granian",
        "gunicorn",
        "hf-xet",
        "hiredis",
        "inquirerpy",
        "litellm-enterprise",
        "litellm-proxy-extras",
        "polars",
        "pynacl",
        "pyroscope-io",
        "restrictedpython",
        "rq",
        "tomlkit",
    ),
)
LOCKS = (CPU, CUDA, CPU_033, CUDA_033, BENCH, DOCS, CLIENTS)

ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    r"(?P<via>    # via .*\n)?"
)


@dataclass(frozen=True)
class Pin:
    """One package of a lock.

    Attributes:
        marker: of the environments that need it; empty for all.
        via: the comment that says what needs it.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    via: str

    def wanted(self, environment: dict[str, str]) -> bool:
        return not self.marker or Marker(self.marker).evaluate(environment)

    def __str__(self) -> str:
        head = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n".join((head, *(f"    --hash=sha256:{each}" for each in self.hashes))) + (
            f"\n{self.via}"
        )


class LockError(ValueError):
    """A lock that has something else in it than pins with hashes, or lacks what it needs."""


def pythons() -> list[str]:
    """The versions that pyproject.toml allows, oldest first."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    allowed = SpecifierSet(described["project"]["requires-python"])
    return [python for minor in range(50) if allowed.contains(python := f"3.{minor}")]


def environments() -> Iterator[dict[str, str]]:
    """The markers of each platform that the locks are for: CPython on Linux."""
    for python in pythons():
        for machine in MACHINES:
            yield {
                "extra": "",
                "implementation_name": "cpython",
                "os_name": "posix",
                "platform_machine": machine,
                "platform_python_implementation": "CPython",
                "platform_system": "Linux",
                "python_full_version": f"{python}.0",
                "python_version": python,
                "sys_platform": "linux",
            }


def requirements(lock: Lock) -> list[Requirement]:
    """What a lock has to satisfy, from pyproject.toml."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines: list[str] = list(lock.also)
    if lock.whole:
        lines += described["project"]["dependencies"] + described["build-system"]["requires"]
    for extra in lock.extras:
        lines += described["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def read(text: str) -> list[Pin]:
    """The pins of a lock. Raises LockError for a line that is none, such as an option of pip."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    pins, at = [], 0
    while at < len(text):
        found = ENTRY.match(text, at)
        if found is None:
            raise LockError(f"not a version with hashes: {text[at:].partition(chr(10))[0]!r}")
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", found["hashes"]))
        pins.append(
            Pin(found["name"], found["version"], found["marker"] or "", hashes, found["via"] or "")
        )
        at = found.end()
    return pins


def for_environment(pins: Sequence[Pin], environment: dict[str, str]) -> dict[str, Pin]:
    """The pins that an environment needs, by normalized name. Raises LockError for two of one."""
    found: dict[str, Pin] = {}
    for pin in pins:
        if pin.wanted(environment):
            name = canonicalize_name(pin.name)
            if name in found:
                raise LockError(f"{pin.name} has two versions for {_name(environment)}")
            found[name] = pin
    return found


def disagreements(lock: Lock, text: str) -> list[str]:
    """What pyproject.toml asks for and a lock does not give, or what no lock may hold."""
    found = []
    try:
        pins = read(text)
        for environment in environments():
            here = for_environment(pins, environment)
            for wanted in requirements(lock):
                if wanted.marker is not None and not wanted.marker.evaluate(environment):
                    continue
                pin = here.get(canonicalize_name(wanted.name))
                if pin is None:
                    found.append(f"{wanted} is not there for {_name(environment)}")
                elif not wanted.specifier.contains(pin.version, prereleases=True):
                    found.append(f"{wanted} is there as {pin.version}")
    except LockError as error:
        found.append(str(error))
    return [f"locks/{lock.name}: {each}" for each in dict.fromkeys(found)]


def clashes() -> list[str]:
    """Packages that one lock would replace in the environment of another."""
    found = []
    for lock in LOCKS:
        for environment in environments():
            here = for_environment(read(lock.path.read_text()), environment)
            for name in lock.beside:
                there = for_environment(read((DIRECTORY / name).read_text()), environment)
                found += [
                    f"locks/{lock.name}: {each} is {here[each].version}, "
                    f"in locks/{name} it is {there[each].version}"
                    for each in sorted(here.keys() & there.keys())
                    if here[each].version != there[each].version
                ]
    return list(dict.fromkeys(found))


def make(lock: Lock) -> str:
    """The text of a lock, resolved by uv for all platforms at once and cut down to ours."""
    with tempfile.TemporaryDirectory() as temporary:
        wanted = Path(temporary, "wanted.txt")
        wanted.write_text("".join(f"{each}\n" for each in requirements(lock)))
        overrides = Path(temporary, "overrides.txt")
        gone = (f"{each}; sys_platform == 'no'" for each in lock.without)
        overrides.write_text("".join(f"{each}\n" for each in gone))
        made = Path(temporary, lock.name)
        made.write_text(lock.path.read_text() if lock.path.exists() else "")
        command: list[str | Path] = [sys.executable, "-m", "uv", "pip", "compile", wanted]
        command += ["--output-file", made, "--override", overrides]
        command += ["--quiet", "--no-config", "--no-header", "--annotation-style", "line"]
        command += ["--universal", "--python-version", pythons()[0], "--generate-hashes"]
        if lock.alone:
            command += ["--no-deps"]
        for name in lock.beside:
            command += ["--constraint", DIRECTORY / name]
        if lock.links:
            for place in os.environ.get("PIP_FIND_LINKS", "").split():
                command += ["--find-links", place]
        subprocess.run(command, check=True)
        pins = read(made.read_text())
    every = list(environments())
    kept = []
    # pip takes packages in this order. A machine that does not know PyTorch's index is told so
    # before it fetches gigabytes.
    for pin in sorted(pins, key=lambda pin: not (lock.links and pin.name == "torch")):
        needed = [pin.wanted(environment) for environment in every]
        if any(needed):
            via = pin.via.replace(f"-r {wanted}", "pyproject.toml")
            marker = "" if all(needed) else pin.marker
            kept.append(Pin(pin.name, pin.version, marker, _hashes(pin), via))
    head = f"Made by `make locks` from pyproject.toml: {', '.join(lock.extras)}.\n{lock.says}\n"
    head += "Install it with pip install --require-hashes --no-deps -r."
    return "".join(f"# {line}\n" for line in head.splitlines()) + "".join(map(str, kept))


def _hashes(pin: Pin) -> tuple[str, ...]:
    """Those of the index, and for torch those of files that no index here has."""
    known = set(pin.hashes)
    if pin.name == "torch":
        for line in (DIRECTORY / "torch-cpu.sha256").read_text().splitlines():
            digest, _, file = line.partition("  ")
            if file.startswith(f"torch-{pin.version}-"):
                known.add(digest)
    return tuple(sorted(known))


def _name(environment: dict[str, str]) -> str:
    return f"Python {environment['python_version']} on {environment['platform_machine']}"


def main() -> None:
    if sys.argv[1:] == ["--make"]:
        for lock in LOCKS:
            lock.path.write_text(make(lock))
            print(f"{lock.path}: {len(read(lock.path.read_text()))} packages")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    wrong = [each for lock in LOCKS for each in disagreements(lock, lock.path.read_text())]
    wrong = wrong or clashes()
    for each in wrong:
        print(each, file=sys.stderr)
    if wrong:
        raise SystemExit("`make locks` makes them again")


if __name__ == "__main__":
    main()
