"""What ``kubectl kustomize`` makes of the project's manifests, as far as these use it.

A clean clone has no kubectl; where there is one, a test holds this against it.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

_CLUSTER_WIDE = ("Namespace",)


def render(folder: Path) -> list[Object]:
    """All objects of a base or an overlay.

    Raises:
        ValueError: a kustomization has something that this doesn't know.
    """
    return list(_build(folder, []))


def _build(folder: Path, found: list[Object]) -> list[Object]:
    """What a folder makes of the objects so far, with its own."""
    said = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "components", "images", "patches"}
    if unknown := said.keys() - known:
        raise ValueError(f"{folder}: {sorted(unknown)} are not known here")
    for name in said.get("resources", []):
        found = [*found, *_resource(folder / name)]
    for name in said.get("components", []):
        found = _build(folder / name, found)
    for patch in said.get("patches", []):
        found = list(_patched(found, patch))
    for each in found:
        if "namespace" in said and each["kind"] not in _CLUSTER_WIDE:
            _into(each, said["namespace"])
        for container in _containers(each):
            _rename(container, said.get("images", []))
    return found


def _resource(path: Path) -> list[Object]:
    if path.is_dir():
        return render(path)
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def _into(each: Object, namespace: str) -> None:
    each["metadata"]["namespace"] = namespace
    for subject in each.get("subjects", []):
        subject["namespace"] = namespace


def _containers(each: Object) -> list[Object]:
    template = each.get("spec", {}).get("template", {})
    return list(template.get("spec", {}).get("containers", []))


def _rename(container: Object, images: list[dict[str, str]]) -> None:
    for image in images:
        if container["image"] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
            return


def _patched(found: list[Object], patch: Object) -> Iterator[Object]:
    steps = yaml.safe_load(patch["patch"])
    hit = False
    for each in found:
        if not _is_meant(each, patch["target"]):
            yield each
            continue
        hit = True
        if isinstance(steps, list):
            changed = deepcopy(each)
            for step in steps:
                _apply(changed, step)
            yield changed
        elif steps.get("$patch") != "delete":
            raise ValueError(f"this patch is not known here: {patch}")
    if not hit:
        raise ValueError(f"nothing is patched by {patch}")


def _is_meant(each: Object, target: dict[str, str]) -> bool:
    there = {"kind": each["kind"], "name": each["metadata"]["name"]}
    return all(re.fullmatch(pattern, there[field]) for field, pattern in target.items())


def _apply(changed: Object, step: Object) -> None:
    """One operation of RFC 6902."""
    *way, last = (
        part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]
    )
    place: Any = changed
    for part in way:
        place = place[int(part) if isinstance(place, list) else part]
    match step["op"], place:
        case "add", list() if last == "-":
            place.append(deepcopy(step["value"]))
        case "replace", list():
            place[int(last)] = deepcopy(step["value"])
        case "replace", dict() if last in place:
            place[last] = deepcopy(step["value"])
        case "add", dict():
            place[last] = deepcopy(step["value"])
        case "remove", dict():
            del place[last]
        case _:
            raise ValueError(f"this step is not known here, or leads nowhere: {step}")
