"""The pins are those of what is installed, all of it; the table of licences is that of the pins."""

import importlib.util
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytest.importorskip("packaging")
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("licences", ROOT / "docs" / "scripts" / "licences.py")
licences = sys.modules["licences"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(licences)

PINS = {canonicalize_name(name): version for name, version in licences.pins().items()}
INSTALLED = {canonicalize_name(each.metadata["Name"]): each.version.partition("+")[0] for each in distributions()}
UNPINNED = {"hatchling"}  # of the build, which constraints do not reach; the developers' own is pinned


def test_everything_that_is_installed_for_an_extra_is_pinned_to_its_version():
    known = licences.installed()
    wanted = {name for group in licences.asked().values() for name in licences.needed(known, group)}
    here = {name: INSTALLED[name] for name in wanted if name in INSTALLED}
    assert here and {name: PINS.get(name) for name in here} == here


def test_every_requirement_of_every_extra_is_pinned_within_its_bounds():
    for group, wanted in licences.asked().items():
        for each in wanted:
            name = canonicalize_name(each.name)
            assert name in PINS, (group, name)
            assert each.specifier.contains(PINS[name], prereleases=True), (group, str(each), PINS[name])


def test_pins_stand_in_order_and_once():
    names = list(licences.pins())
    assert len({canonicalize_name(name) for name in names}) == len(names)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+|#.*", line) for line in lines)


def test_the_table_of_licences_is_that_of_the_pins():
    told = licences.told()
    assert {name: version for name, (version, *_) in told.items()} == licences.pins()
    known = licences.installed()
    for name, (_, licence, by, groups) in told.items():
        key = canonicalize_name(name)
        assert licence and licence != "see its files" and by and groups, name
        assert key not in known or known[key].licence == licence, name


def test_what_needs_what():
    from packaging.requirements import Requirement

    made = {
        "a": licences.Package("a", "MIT", (Requirement("b[fast]"), Requirement("c; extra == 'more'"))),
        "b": licences.Package("b", "MIT", (Requirement("d; extra == 'fast'"), Requirement("a"))),
        "d": licences.Package("d", "MIT", ()),
    }
    assert licences.needed(made, [Requirement("a")]) == {"a": {"", "b"}, "b": {"a"}, "d": {"b"}}
    assert licences.needed(made, [Requirement("a[more]")])["c"] == {"a"}


def test_licences_in_few_words():
    of = licences.licence_of
    assert of("MIT AND PSF-2.0", [], None) == "MIT AND PSF-2.0"
    assert of(None, ["License :: OSI Approved :: MIT License"], "whatever") == "MIT"
    assert of(None, [], "Apache 2.0") == "Apache-2.0" and of(None, [], None) == "see its files"


def test_the_tools_outside_of_python_are_pinned_or_named():
    makefile, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", ".ci/run"))
    (typescript,) = set(re.findall(r"typescript@([\d.]+)", makefile))
    page = (ROOT / "docs" / "supply.md").read_text(encoding="utf-8")
    assert f"typescript@{typescript}" in page
    fetched = set(re.findall(r"apt-get install [^|}]*?([a-z]+)(?:;| *\|\|)", ci.replace("\\\n", " ")))
    assert fetched == {"chromium"} and "`chromium`" in page
    assert "playwright" in PINS
