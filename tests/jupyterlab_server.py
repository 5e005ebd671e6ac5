"""A JupyterLab in a process for tests, which reads and writes only one folder; and its notebook in a browser."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {
    "ServerApp.ip": "127.0.0.1",
    "ServerApp.port": "0",
    "ServerApp.open_browser": "False",
    "ServerApp.allow_root": "True",
    "LabApp.extension_manager": "readonly",  # the default one asks PyPI
    "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    "LabApp.news_url": "None",
}
# The notebook keeps all cells in the document, and the saved file has no state of widgets, which is also the default.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


@contextmanager
def run_jupyterlab(folder: Path) -> Iterator[str]:
    """Run JupyterLab in the block; the value is its address with the token, up to the path of a page."""
    home = folder / "home"
    for name, settings in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    folders = {
        "HOME": "",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    token = secrets.token_hex(16)
    environment = {**os.environ, **{name: str(home / path) for name, path in folders.items()}}
    environment |= {"JUPYTER_TOKEN": token, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    with (folder / "jupyterlab.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={folder}"], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            yield _wait_for_address(process, home / "runtime", folder / "jupyterlab.log") + "{}?token=" + token
        finally:
            process.terminate()  # the server stops its kernels
            try:
                process.wait(30)
            finally:
                process.kill()


def _wait_for_address(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Return the address from the file that the server writes when it listens."""
    for _ in range(600):
        for file in runtime.glob("jpserver-*.json"):
            with_url = file.read_text()
            if with_url.endswith("}"):
                return str(json.loads(with_url)["url"])
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


class Notebook:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Any) -> None:
        self.page, self.count = page, 0

    def cell(self, index: int) -> Any:
        """A cell of code."""
        return self.page.locator(".jp-Notebook-cell.jp-CodeCell").nth(index)

    def run(self, index: int) -> str:
        """Run a cell, wait until it has finished, and return the text of its outputs."""
        self.count += 1
        self.cell(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        prompt = self.cell(index).locator(f'.jp-InputPrompt:text-is("[{self.count}]:")')
        prompt.wait_for()
        return str(self.cell(index).locator(".jp-OutputArea").inner_text())
