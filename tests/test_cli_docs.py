"""docs/cli.md: each command of the page, run from top to bottom, prints what the page shows."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bnet_transformer.cli import main
from bnet_transformer.cli.group import COMMANDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
BLOCK = re.compile(r"^```bash\n(?P<said>.*?)^```$(?:\n\n```text\n(?P<shown>.*?)^```$)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+")


def run_line(line):
    """Return the output of a line of the page."""
    before, bar, after = line.rpartition(" | ")
    stdin = subprocess.run(["sh", "-c", before], capture_output=True, check=True).stdout if bar else None
    if not after.startswith("bnet-transformer "):
        return subprocess.run(["sh", "-c", line], capture_output=True, check=True, text=True).stdout
    result = CliRunner().invoke(main, shlex.split(after)[1:], input=stdin, prog_name="bnet-transformer")
    assert result.exit_code == 0, f"{line}\n{result.output}"
    return result.stdout


def split_numbers(text):
    """Return the text without its numbers and the spaces between columns, and the numbers."""
    masked = NUMBER.sub("#", text)
    return [line.split() for line in masked.strip().splitlines()], [float(n) for n in NUMBER.findall(text)]


@pytest.mark.slow
def test_the_page_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    commands = "".join(block["said"] for block in blocks)
    subprocess.run(["sh", "-n"], input=commands, text=True, check=True)  # parsed as in a shell
    used = set()
    for block in blocks:
        lines = block["said"].splitlines()
        printed = "".join(run_line(line) for line in lines)
        used |= {line.partition("bnet-transformer ")[2].split()[0] for line in lines if "bnet-transformer " in line}
        assert (block["shown"] is None) == (not printed), block["said"]
        (words, numbers), (expected, shown) = split_numbers(printed), split_numbers(block["shown"] or "")
        if "models" not in block["said"]:  # the list of local nets depends on the machine
            assert words == expected
            assert numbers == pytest.approx(shown, rel=2e-3, abs=2e-3)
    assert used == set(COMMANDS) - {"bench", "serve"}  # they take minutes, or do not end
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"text-0.svg", "text-2.svg", "net.safetensors", "labelled.fit", "loss.png", "map.csv"}
