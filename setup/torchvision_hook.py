"""Declares the operators that torchvision's fake kernels expect, where its library cannot load.

Copied into site-packages by ``cpu_torch.py`` and imported by a ``.pth`` in every interpreter of the
environment, so it costs nothing until torchvision is imported: torch is not loaded before that.
Calling one of the operators still fails, as it should: there is no kernel.
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# The declarations last as long as the Library objects do.
_libraries = []


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; acts on the first import of torchvision and lets the next finder find it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            _declare()


def _declare():
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    _libraries.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
