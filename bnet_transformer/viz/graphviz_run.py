"""DOT to PNG and PDF by Graphviz: the program `dot` where it is on the PATH, else the one inside pygraphviz.

Graphviz runs as a process of its own, which finds the fonts of matplotlib beside those of the system.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from bnet_transformer.errors import FileError

SECONDS = 120
DATE = re.compile(rb"(?<=/CreationDate \(D:)\d{14}")
INSIDE = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="nop2"))
"""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<include ignore_missing="yes">/etc/fonts/fonts.conf</include>
<dir>{fonts}</dir>
<cachedir prefix="xdg">fontconfig</cachedir>
<cachedir>{cache}</cachedir>
</fontconfig>
"""


def rendered(dot: str, kind: str) -> bytes:
    """A picture in DOT as `png` or `pdf`, the same bytes on every day."""
    program = shutil.which("dot")
    command = [program, "-Knop2", f"-T{kind}"] if program else [sys.executable, "-P", "-c", INSIDE, kind]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **_fonts(Path(folder))}
        try:
            done = subprocess.run(command, input=dot.encode(), capture_output=True, timeout=SECONDS, env=environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _unmade(kind, str(error)) from error
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise _unmade(kind, said[0])
    return DATE.sub(b"19700101000000", done.stdout) if kind == "pdf" else done.stdout


def _unmade(kind: str, got: str) -> FileError:
    """The error of a picture that Graphviz did not make; it writes files of its own, for which there may be no room."""
    return FileError(f"{kind} by Graphviz", expected="a picture", got=got, allowed=".svg, .dot, .tex")


def _fonts(folder: Path) -> dict[str, str]:
    """Settings under which fontconfig finds matplotlib's fonts too; those of the user stand."""
    found = importlib.util.find_spec("matplotlib")
    if "FONTCONFIG_FILE" in os.environ or found is None or found.origin is None:
        return {}
    fonts = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
    settings = folder / "fonts.conf"
    settings.write_text(FONTS.format(fonts=escape(str(fonts)), cache=escape(str(folder / "cache"))), encoding="utf-8")
    return {"FONTCONFIG_FILE": str(settings)}
