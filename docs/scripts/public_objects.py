"""The public objects of the package, and what their docstrings leave undocumented.

Public is what `bnet_transformer`, its `tpm`, `models`, `programs` and `interventions` export, the classes that these
return, and the public methods and properties of all these classes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import bnet_transformer as bt

_MODULES = {
    **{"bt": "", "bt.tpm": ".tpm", "bt.models": ".models", "bt.programs": ".programs"},
    "bt.interventions": ".interventions",
}
_REFERENCE = Path(__file__).resolve().parents[1] / "api" / "index.md"
_REFERENCE_ENTRY = re.compile(r"^   ((?:\w+\.)*\w+)$", re.MULTILINE)
_SPECIAL_METHODS = ("__call__", "__getitem__")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
_ARGUMENT = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):")


def collect_classes() -> dict[str, type]:
    """All classes that the package defines, by name; the names are unique."""
    classes = {}
    for info in pkgutil.walk_packages(bt.__path__, "bnet_transformer."):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            classes |= {
                name: obj for name, obj in vars(module).items() if inspect.isclass(obj) and obj.__module__ == info.name
            }
    return classes


def unwrap(obj: Any) -> Any:
    """The function of a property, a cached property, a class method or a static method."""
    for attribute in ("fget", "func", "__func__"):
        obj = getattr(obj, attribute, obj)
    return inspect.unwrap(obj) if callable(obj) else obj


def collect_exports() -> dict[str, Any]:
    """What the public packages export, by name (`bt.tpm.Linear`): functions, classes and modules."""
    packages = {prefix: importlib.import_module(f"bnet_transformer{path}") for prefix, path in _MODULES.items()}
    return {f"{prefix}.{name}": getattr(module, name) for prefix, module in packages.items() for name in module.__all__}


def iter_members(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, and their functions.

    Members that an exported base class has are left out, because they are documented there; those of other base classes
    are members of this class for its users.
    """
    exported = [base for base in collect_exports().values() if inspect.isclass(base)]
    bases = [base for base in owner.__mro__[1:] if base in exported]
    for name in dir(owner):
        if name.startswith("_") and name not in _SPECIAL_METHODS:
            continue
        function = unwrap(inspect.getattr_static(owner, name))
        if not inspect.isfunction(function) or not function.__module__.startswith("bnet_transformer"):
            continue
        if not any(name in dir(base) for base in bases):
            yield name, function


@cache
def list_reference() -> tuple[str, ...]:
    """The full paths of the entries of docs/api/index.md, in their order."""
    return tuple(f"bnet_transformer.{name}" for name in _REFERENCE_ENTRY.findall(_REFERENCE.read_text("utf-8")))


def import_entry(path: str) -> Any:
    """The object at a full path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def iter_public_objects() -> Iterator[tuple[str, Any]]:
    """Each public function, class, method and property once: its name and the class or function."""
    objects: dict[str, Any] = {}

    def add(name: str, obj: Any) -> None:
        if any(obj is known for known in objects.values()):
            return
        objects[name] = obj
        for key, member in iter_members(obj) if inspect.isclass(obj) else ():
            add(f"{name}.{key}", member)

    for name, obj in collect_exports().items():
        if inspect.isclass(obj) or inspect.isfunction(obj):
            add(name, obj)
    classes = collect_classes()
    for name in [name for obj in objects.values() for name in _find_returned(obj)]:
        if name in classes:
            add(name, classes[name])
    yield from objects.items()


def _find_returned(obj: Any) -> list[str]:
    """The identifiers in the annotation of what a function returns."""
    annotations = {} if inspect.isclass(obj) else getattr(obj, "__annotations__", {})
    return re.findall(r"\w+", str(annotations.get("return", "")))


def list_arguments(obj: Any) -> list[str]:
    """The arguments that a user passes, in their order, with the stars of `*arguments` and `**options`."""
    if inspect.isclass(obj) and issubclass(obj, BaseException):
        return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(obj).parameters.values()
    return [stars.get(p.kind, "") + p.name for p in parameters if p.name not in ("self", "cls")]


def list_documented(obj: Any) -> list[str]:
    """The names in the sections `Args:` and `Attributes:` of a docstring."""
    names, section = [], ""
    for line in (inspect.getdoc(obj) or "").splitlines():
        if line and not line.startswith(" "):
            section = match[1] if (match := _SECTION.fullmatch(line)) else ""
        elif section in ("Args", "Attributes") and (match := _ARGUMENT.match(line)):
            names += match[1].split(", ")
    return names


def find_undocumented(obj: Any) -> list[str]:
    """What a docstring lacks: its summary, arguments, or the section `Returns:`; and entries that name no argument.

    The fields of a class are its arguments. A property needs no `Returns:`, because its summary describes it.
    """
    docstring = inspect.getdoc(obj) or ""
    if not docstring:
        return ["docstring"]
    arguments, documented = list_arguments(obj), list_documented(obj)
    missing = [name for name in arguments if name not in documented]
    if inspect.isclass(obj):
        known = {*arguments, *dir(obj), *getattr(obj, "__annotations__", {})}
    else:
        known = {*arguments}
        returned = str(obj.__annotations__.get("return", "None"))
        sections = set(_SECTION.findall(docstring))
        if arguments and returned != "None" and not sections & {"Returns", "Yields"}:
            missing.append("Returns")
    return missing + [f"{name}, which is no argument" for name in documented if name not in known]


def main() -> None:
    """Print how many of the public arguments are documented, and what docstrings lack."""
    objects = dict(iter_public_objects())
    arguments = [(obj, name) for obj in objects.values() for name in list_arguments(obj)]
    documented = sum(name in list_documented(obj) for obj, name in arguments)
    print(f"{len(objects)} public objects; {documented} of their {len(arguments)} arguments are documented")
    for name, obj in objects.items():
        if missing := find_undocumented(obj):
            print(f"{name}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
