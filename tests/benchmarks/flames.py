"""Flame graphs of processes: what py-spy samples, drawn as SVG without scripts.

Only threads that hold the interpreter count: in containers, py-spy takes idle ones for busy.

py-spy is no dependency of the project: `pip install py-spy`. It needs the right to trace processes.
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 1200
ROW = 17
CHARACTER = 6.6  # of the font, in pixels
# Narrower boxes are left out: nobody can read them, and a graph has thousands.
LEAST_SHARE = 0.004
# A frame at the bottom that has nearly all samples says nothing.
TRUNK_SHARE = 0.97
COLOURS = (
    (("frontend/", "backend_worker/", "common/"), "#e8743b"),
    (("vllm/",), "#f2b84b"),
    (("",), "#c9ced6"),
)


@dataclass
class Frame:
    """A function on the stack.

    Attributes:
        name: as py-spy says it: function, then file.
        samples: in it and in what it called.
        calls: frames above it, by name.
    """

    name: str
    samples: int = 0
    calls: dict[str, "Frame"] = field(default_factory=dict)

    def add(self, stack: Iterable[str], samples: int) -> None:
        """Count the samples of a stack, its bottom first."""
        self.samples += samples
        at = self
        for name in stack:
            at = at.calls.setdefault(name, Frame(name))
            at.samples += samples


def read_stacks(text: str) -> Frame:
    """The tree of "bottom;...;top samples" lines.

    Raises:
        ValueError: a line is none.
    """
    root = Frame("all")
    for line in text.splitlines():
        stack, _, samples = line.rpartition(" ")
        root.add(stack.split(";"), int(samples))
    return root


def without_trunk(root: Frame) -> Frame:
    """The lowest frame from which the stacks part."""
    while True:
        trunk = [each for each in root.calls.values() if each.samples >= TRUNK_SHARE * root.samples]
        if not trunk:
            return root
        root = trunk[0]


def draw(root: Frame, title: str) -> str:
    """An SVG. Widths are shares of samples; a box says its name and share when pointed at."""
    boxes = list(_boxes(root, root.samples, 0.0, 0))
    height = (2 + max(level for _, _, level, _ in boxes)) * ROW + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="13">{escape(title)}</text>',
    ]
    for frame, left, level, width in boxes:
        lines += _box(frame, left, height - (level + 1) * ROW, width, frame.samples / root.samples)
    return "\n".join([*lines, "</svg>\n"])


def _boxes(
    frame: Frame, total: int, left: float, level: int
) -> Iterator[tuple[Frame, float, int, float]]:
    yield frame, left, level, frame.samples / total * WIDTH
    for each in sorted(frame.calls.values(), key=lambda call: call.name):
        if each.samples >= LEAST_SHARE * total:
            yield from _boxes(each, total, left, level + 1)
        left += each.samples / total * WIDTH


def _box(frame: Frame, left: float, top: float, width: float, share: float) -> list[str]:
    fill = next(fill for parts, fill in COLOURS if any(part in frame.name for part in parts))
    lines = [
        f'<g><title>{escape(frame.name)}: {share:.1%}</title><rect x="{left:.1f}" y="{top:.0f}"'
        f' width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 1}" fill="{fill}"/>'
    ]
    room = int(width / CHARACTER) - 1
    if room >= 4:
        name = frame.name if len(frame.name) <= room else frame.name[: room - 1] + "…"
        lines.append(f'<text x="{left + 3:.1f}" y="{top + 12:.0f}">{escape(name)}</text>')
    return [*lines, "</g>"]


class NoProfilerError(Exception):
    """py-spy is not there, or may not trace."""


def find_profiler() -> str:
    """Where py-spy is.

    Raises:
        NoProfilerError: nowhere on PATH.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise NoProfilerError("py-spy is not on PATH: pip install py-spy")
    return program


def record(pids: Mapping[str, int], seconds: int, folder: Path) -> list[Path]:
    """Sample processes at the same time, and draw a graph of each.

    Args:
        pids: by the graph's name.
        seconds: of sampling.
        folder: gets NAME.svg; made where it is not there.

    Returns:
        The graphs.

    Raises:
        NoProfilerError: py-spy is not there, or gave no samples.
    """
    program = find_profiler()
    folder.mkdir(parents=True, exist_ok=True)
    command = [program, "record", "--format=raw", "--function", "--gil", "--rate=100"]
    running = {
        name: subprocess.Popen(
            [*command, f"--duration={seconds}", f"--pid={pid}", f"--output={folder / name}.raw"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, pid in pids.items()
    }
    graphs = []
    for name, process in running.items():
        _, said = process.communicate(timeout=seconds + 60)
        raw = folder / f"{name}.raw"
        if process.returncode or not raw.exists():
            raise NoProfilerError(f"py-spy gave no samples of {name}: {said.strip()}")
        graph = raw.with_suffix(".svg")
        root = read_stacks(raw.read_text())
        graph.write_text(draw(without_trunk(root), f"{name}: {root.samples} samples"))
        raw.unlink()
        graphs.append(graph)
    return graphs
