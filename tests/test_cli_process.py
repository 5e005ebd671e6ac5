"""The command line as a process: imports, interrupts, closed pipes, exceptions, missing memory."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bnet_transformer.cli import main
from bnet_transformer.cli.group import COMMANDS
from tests.test_cli import assert_line, run

PROGRAM = [sys.executable, "-m", "bnet_transformer.cli"]


def run_process(*arguments, **options):
    return subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


def test_help_of_every_command_imports_nothing_heavy():
    code = f"""
import sys
from bnet_transformer.cli import main
asked = [[], *([name] for name in {COMMANDS!r}), ["ask", "posterior"], ["ask", "reads"]]
for told in asked:
    try: main([*told, "--help"])
    except SystemExit as done: assert not done.code
heavy = {{"torch", "numpy", "pandas", "networkx", "matplotlib", "pyro", "scipy", "safetensors"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (
        all(f"\n  {name} " in result.stdout for name in COMMANDS) and result.stdout.count("Usage:") == len(COMMANDS) + 3
    )


def interrupt_process(arguments, ready, tmp_path):
    """Run a process, interrupt it as soon as it is `ready`, and return its exit status and output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([*PROGRAM, *arguments], **options) as process:
        end = time.monotonic() + 60
        while not ready(process) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err.lstrip("\n")  # click ends the line of the ^C


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc for what a process has mapped")
def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path):
    def has_torch(process):
        with open(f"/proc/{process.pid}/maps") as maps:
            return "libtorch" in maps.read()

    assert interrupt_process(["draw", "the cat", "-o", "c.svg"], has_torch, tmp_path) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupt_of_training_prints_how_to_resume(tmp_path):
    arguments = ["train", "the cat sat", "--dim", "4", "--slices", "1", "--steps", "1000000", "--every", "5"]
    arguments += ["--checkpoint", "kept"]
    folder = tmp_path / "kept"
    result = interrupt_process(arguments, lambda _: folder.is_dir() and any(folder.glob("*.safetensors")), tmp_path)
    assert result == (130, "", "interrupted: use --resume to continue from kept\n")


def test_an_interrupt_of_a_fit_keeps_the_best_so_far(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")

    def interrupt():
        end = time.monotonic() + 60
        while not any(tmp_path.glob("kept/**/*.safetensors")) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    options = ["--dim", "2", "--steps", "1000000", "--every", "5", "--checkpoint", "kept"]
    result = run("fit", "the cat sat", *options, "-o", "net.safetensors")
    sender.join()
    line = "interrupted: this is the best result so far; use --resume to continue from kept\n"
    assert (result.exit_code, result.stderr.lstrip("\n")) == (130, line)
    assert "written: net.safetensors" in result.stdout and (tmp_path / "net.safetensors").stat().st_size > 1000


@pytest.mark.slow
def test_a_pipe_that_is_closed_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    for arguments in (["--help"], ["models"]):
        process = subprocess.run([*PROGRAM, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
        assert process.stderr == "" and process.returncode in (0, 1), arguments
    os.close(writer)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk to write to")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run([*PROGRAM, "models"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "Error: no space left on the device\n")


def test_an_input_that_is_closed_is_one_line():
    code = "import sys; sys.stdin = None; from bnet_transformer.cli import main; main(['ask', 'posterior', 'c', '-'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "Error: standard input: expected a readable file; got a closed stream\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


@pytest.mark.slow
def test_no_output_and_no_unicode_are_no_fault(tmp_path):
    result = run_process("models", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    code = "import sys; sys.stdout = None\nfrom bnet_transformer.cli import main; main(['models'])"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def make_failing(monkeypatch, error):
    """Run a command that raises an error."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("bnet_transformer.cli.io.TextSource.read_texts", fail)
    return run


RAISED = [
    (ZeroDivisionError("of\nmany lines"), "ZeroDivisionError: of many lines (use --debug to show the traceback)", 1),
    (MemoryError(), "out of memory. Use fewer or shorter sentences", 1),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory", 1),
    (ModuleNotFoundError("no", name="tokenizers.models"), 'pip install "bnet-transformer[pretrained]"', 2),
    (ModuleNotFoundError("no", name="h5py"), 'pip install "bnet-transformer[hdf5]"', 2),
    (ModuleNotFoundError("no", name="torch"), "torch is not installed", 1),
    (PermissionError(13, "Permission denied", "a.txt"), "a.txt: Permission denied", 2),
    (UnicodeError("strange"), "UnicodeError: strange", 1),
    (click.BadParameter("wrong"), "wrong", 2),
]


def test_any_exception_is_one_line(monkeypatch):
    for error, line, code in RAISED:
        assert_line(make_failing(monkeypatch, error)("cost", "the cat"), line, code)


def test_an_interrupt_during_an_import_is_reported_as_an_interrupt(monkeypatch):
    error = ImportError("failed")
    error.__cause__ = KeyboardInterrupt()
    for raised in (error, KeyboardInterrupt(), click.Abort()):
        result = make_failing(monkeypatch, raised)("cost", "the cat")
        assert (result.exit_code, result.output.lstrip("\n")) == (130, "interrupted\n")


def test_debug_shows_the_traceback_at_any_position():
    for position in (0, 1, 2, 3, "variable"):
        arguments = ["ask", "posterior", "c", "the zebra"]
        if position != "variable":
            arguments.insert(position, "--debug")
        result = run(*arguments, env={"BNET_DEBUG": "1" if position == "variable" else "0"})
        assert result.exit_code == 2 and result.stderr.startswith("Traceback"), position
        assert "UnknownNameError" in result.stderr, position
        assert result.stderr.splitlines()[-1].startswith("Error: word of the sentence"), position


def test_behind_two_dashes_debug_is_a_word():
    assert_line(run("ask", "posterior", "c", "--", "the --debug"), "--debug")
    assert_line(run("draw", "-o", "c.svg", "--", "--debug"), "--debug")


def test_a_warning_is_one_line(monkeypatch):
    import warnings

    def warn(*_):
        warnings.warn("of\nmany lines", stacklevel=1)
        return ["the cat"]

    monkeypatch.setattr("bnet_transformer.cli.io.TextSource.read_texts", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run("cost", "the cat")
    assert result.exit_code == 0 and result.stderr == "Warning: of many lines\n"


def test_no_arguments_print_help():
    for arguments in ([], ["ask"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0 and result.output.startswith("Usage:")
    result = run("--version")
    assert result.exit_code == 0 and "version" in result.output


# the live page

SERVE = """
import sys, time
import bnet_transformer.cli.io as commands
import bnet_transformer.serve.server as app
from bnet_transformer.cli import main
step, load_model = sys.argv[1], commands.load_model

def run_slowly(*_):
    print("started", flush=True)
    time.sleep(100)

if step == "load":
    commands.load_model = run_slowly
if step == "query":
    app._encode_page = run_slowly
main(["serve", "tiny", "--port", "0", *sys.argv[2:]])
"""


@contextlib.contextmanager
def start_serve(*arguments, **options):
    """Run `serve` in a process, until the end of the block; the values are the process and its address."""
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-c", SERVE, *arguments]
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        try:
            lines = iter(process.stdout.readline, "")
            yield process, next(line.strip() for line in lines if line.startswith("http"))
        finally:
            process.kill()


def request_page(url, extra=0):
    """Request the page of a sentence; `extra` bytes of the body are missing."""
    address, _, token = url.partition("/?token=")
    body = json.dumps({"tab": "tab", "state": {"model": "tiny", "text": "the cat"}}).encode()
    host = address.removeprefix("http://")
    connection = socket.create_connection(host.split(":"), timeout=60)
    head = f"POST /api/page HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body) + extra}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "number"),
    [*((step, signal.SIGINT) for step in ("load", "query", "body", "idle")), ("idle", signal.SIGTERM)],
)
def test_a_signal_stops_the_live_page_without_a_traceback(step, number):
    with start_serve(step, "--no-browser") as (process, url):
        connection = request_page(url, extra=step == "body")
        with connection:
            if step == "idle":
                assert b"200 OK" in connection.recv(20)
            while step in ("load", "query") and process.stdout.readline() != "started\n":
                pass
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "Traceback" not in out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="SIGHUP is a signal of POSIX")
def test_a_live_page_that_is_started_by_nohup_survives_the_end_of_its_terminal():
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731  # as nohup does
    with start_serve("idle", "--no-browser", preexec_fn=ignore) as (process, url):
        process.send_signal(signal.SIGHUP)
        with request_page(url) as connection:
            assert b"200 OK" in connection.recv(20)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


BROWSER = """#!{python}
import os, re, sys, time, urllib.request
path = sys.argv[1].removeprefix("file://")
page = open(path).read()
modes = [oct(os.stat(name).st_mode & 0o777) for name in (path, os.path.dirname(path))]
(url,) = set(re.findall(r'url=([^"]+)', page))
with open(os.environ["REPORT"] + ".part", "w") as file:
    file.write("\\n".join([path, *modes, url, str(urllib.request.urlopen(url).status)]))
os.rename(file.name, os.environ["REPORT"])
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads the arguments of processes in /proc")
def test_no_process_has_the_token_in_its_arguments(tmp_path):
    """The browser is a script that reads the page of its argument; its file is private, and is removed at the end."""
    browser, report = tmp_path / "browser", tmp_path / "report"
    browser.write_text(BROWSER.format(python=sys.executable))
    browser.chmod(0o755)
    environment = {**os.environ, "BROWSER": str(browser), "REPORT": str(report), "TMPDIR": str(tmp_path)}
    previous = os.umask(0)  # the modes do not depend on it
    try:
        with start_serve("idle", env=environment) as (process, url):
            end = time.monotonic() + 60
            while not report.exists() and time.monotonic() < end:
                time.sleep(0.05)
            path, *modes, address, status = report.read_text().split("\n")
            assert (modes, address, status) == (["0o600", "0o700"], url, "200")
            token, arguments = url.partition("=")[2].encode(), {}
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    arguments[int(folder.name)] = (folder / "cmdline").read_bytes()
            assert any(path.encode() in line for line in arguments.values())  # the browser runs
            assert not [line for line in arguments.values() if token in line]
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))
            for number, line in arguments.items():
                if path.encode() in line:
                    os.kill(number, signal.SIGKILL)
    finally:
        os.umask(previous)
