"""The harness of the benchmarks: limits, counted bytes, slopes; every row has a limit or the reason for none."""

import gc
import inspect
import itertools
import json
import math
import sys
from types import CodeType

import pytest
import torch

from benchmarks import __main__ as rows, gpu, limits, ratchet, size, walks
from benchmarks.harness import LIMIT, MAX_RUNS, Row, figure, growth_figure, measure_peak, slope, time_calls
from benchmarks.limits import Machine, Work, limit_figures, measure_work
from benchmarks.report import format_cells, to_markdown

MACHINE = Machine(rate=1e9, bandwidth=1e6, where="a slow one")


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch):
    monkeypatch.setattr(limits, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(gpu, "measure_machine", lambda *_: MACHINE)
    gc.freeze()  # so that each collection scans few objects
    yield
    gc.unfreeze()


def test_the_work_of_a_product_is_its_flops_and_both_factors_read_and_the_product_written():
    a, b = torch.ones(20, 30), torch.ones(30, 50)
    assert measure_work(lambda: a @ b) == Work(2 * 20 * 30 * 50, 4 * (20 * 30 + 30 * 50 + 20 * 50))


def test_a_copy_moves_what_it_reads_and_what_it_writes():
    x, y = torch.ones(1000), torch.zeros(1000)
    assert measure_work(lambda: y.copy_(x)) == Work(0, 8000)
    assert measure_work(x.clone) == Work(0, 8000)
    assert measure_work(lambda: y.add_(x)) == Work(0, 12000)
    assert measure_work(lambda: torch.add(x, x, out=y)) == Work(0, 8000)
    assert measure_work(lambda: x.sum()) == Work(0, 4004)


def test_each_number_counts_once_and_intermediate_numbers_do_not():
    x = torch.ones(1000)

    def job():
        first = x * 2 + x
        return (first * first).sum()

    assert measure_work(job) == Work(0, 4004)
    assert measure_work(lambda: (x[:500].sum(), x[500:].sum(), x.view(10, 100).sum())).bytes == 4000 + 12
    assert measure_work(lambda: x.view(10, 100).T).bytes == 0
    assert measure_work(lambda: x[:1].expand(1000).sum()).bytes == 4 + 4
    assert measure_work(lambda: torch.empty_like(x)).bytes == 4000


def test_of_a_table_only_the_rows_that_are_taken_are_read():
    table, ids = torch.ones(1000, 16), torch.tensor([3, 7])
    row_bytes, id_bytes = 2 * 16 * 4, ids.nbytes
    assert measure_work(lambda: torch.nn.functional.embedding(ids, table)).bytes == 2 * row_bytes + id_bytes
    assert measure_work(lambda: table[ids]).bytes == 2 * row_bytes + id_bytes


def test_kept_gradients_and_products_of_the_backward_pass_count():
    W, x = torch.ones(30, 20, requires_grad=True), torch.ones(10, 20)

    def job():
        W.grad = None
        (x @ W.T).square().sum().backward()

    job()
    work = measure_work(job)
    assert work.flops == 2 * (2 * 10 * 20 * 30)
    assert work.bytes == W.nbytes + x.nbytes + W.nbytes


def test_attention_counts_as_its_products():
    q = torch.ones(1, 2, 16, 8)
    job = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)  # noqa: E731
    assert measure_work(job).flops == 2 * (2 * 2 * 16 * 16 * 8)


def test_the_limit_is_the_time_of_the_products_or_of_the_bytes():
    assert Work(2e9, 1e6).seconds(MACHINE) == 2.0 and Work(2e9, 1e6).binds(MACHINE) == "products"
    assert Work(2e9, 5e6).seconds(MACHINE) == 5.0 and Work(2e9, 5e6).binds(MACHINE) == "bytes"
    figures = {figure_.subject: figure_ for figure_ in limit_figures(Work(2e9, 5e6), [10.0, 15.0, 40.0], 3.0)}
    ratio = figures[LIMIT]
    assert (ratio.value, ratio.low, ratio.high, ratio.target, ratio.verdict) == (3.0, 2.0, 8.0, 3.0, "met")
    assert figures["limit (bytes)"].value == 5000.0


def test_the_machine_is_measured_in_products_and_copies(monkeypatch):
    monkeypatch.setattr(limits, "SIZES", (64, 128))
    monkeypatch.setattr(limits, "COPIED", 2**16)
    monkeypatch.setenv(MAX_RUNS, "2")
    limits._measure_machine.cache_clear()
    machine = limits._measure_machine(torch.get_num_threads(), "cpu", torch.float32)
    limits._measure_machine.cache_clear()
    assert 1e7 < machine.rate < 1e14 and 1e7 < machine.bandwidth < 1e14
    assert machine in limits.list_machines() and "1 thread, float32" in str(machine) and "GB/s" in str(machine)


def test_the_slope_of_a_power_law_is_its_power():
    sizes = [3, 5, 10, 40]
    assert slope(sizes, [7 * n**1.5 for n in sizes]) == pytest.approx((1.5, 0.0), abs=1e-12)
    power, error = slope([1, math.e, math.e**2], [1, math.e**2, math.e**2])
    assert power == pytest.approx(1.0) and error == pytest.approx(math.sqrt((1 + 4 + 1) / 9 / 2))
    assert math.isnan(slope([1, 2], [1, 2])[1])
    row = growth_figure("words", sizes, [n**2 for n in sizes], 2.1)
    assert row.verdict == "met" and row.runs == 4 and format_cells(row)[2].startswith("± ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system cannot count a peak anew")
def test_the_peak_of_a_job_is_what_it_holds_at_most():
    def job():
        buffer = torch.ones(20_000_000)
        del buffer
        return torch.ones(5_000_000)

    assert 75 < measure_peak(job) < 100
    assert 15 < measure_peak(lambda: torch.ones(5_000_000)) < 40


def find_reached(function):
    """Return the functions of `benchmarks` that a function refers to, recursively."""
    functions, pending = set(), [inspect.unwrap(function)]
    while pending:
        function_ = pending.pop()
        if function_ in functions or not getattr(function_, "__module__", "").startswith("benchmarks"):
            continue
        functions.add(function_)
        names = {name for code in list_codes(function_.__code__) for name in code.co_names}
        pending += [x for x in map(function_.__globals__.get, names) if inspect.isfunction(x)]
    return {function_.__name__ for function_ in functions}


def list_codes(code):
    """Return a code object and the code objects inside it."""
    return [code, *itertools.chain(*(list_codes(c) for c in code.co_consts if isinstance(c, CodeType)))]


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_every_row_has_memory_and_a_limit_or_the_reason_for_none(row):
    names = find_reached(row.measure)
    assert bool(row.unlimited) != ("limit_figures" in names or "measure_limit" in names)
    assert row.page == "circuits" or names & {"measure_peak", "peak_memory", "measure_python_peak", "_first_paint"}
    assert row.title.strip() != row.name


def test_a_row_that_claims_a_limit_must_report_it():
    assert Row("one", "page", lambda: limit_figures(Work(1.0, 1.0), [1.0])).measure_figures()
    for row in (
        Row("two", "page", lambda: [figure("time", 1.0, "s")]),
        Row("three", "page", lambda: limit_figures(Work(1.0, 1.0), [1.0]), "string work"),
    ):
        with pytest.raises(AssertionError, match=row.name):
            row.measure_figures()
    assert Row("four", "page", list).measure_figures() == []
    page = to_markdown("t", "c", {Row("five", "page", list, "string work"): [figure("time", 1.0, "s")]}, {})
    assert "No limit: string work." in page and "| five | time | 1 s |" in page


def test_the_table_runs_the_rows_that_are_named(monkeypatch, tmp_path, capsys):
    row = Row("a-product", "page", lambda: limit_figures(Work(2e9, 1e3), time_calls({"": int}, 9)[""]))
    monkeypatch.setattr(rows, "ROWS", (row,))
    monkeypatch.setenv(MAX_RUNS, "9")
    assert rows.main(["a-product", "--runs", "2", "--json", str(tmp_path / "found.json")]) == 0
    written = json.loads((tmp_path / "found.json").read_text())["rows"]["a-product"]
    assert written["unlimited"] is None and [figure_["runs"] for figure_ in written["figures"]] == [1, 1, 1, 2]
    assert LIMIT in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rows.main(["a-product", "--runs", "0"])


@pytest.mark.parametrize("name", ["concat-training", "mixture-step", "restarts"])
def test_rows_of_the_gpu_script_run_small_on_the_cpu(name, capsys, tmp_path):
    assert gpu.main([name, "--device", "cpu", "--small", "--markdown", str(tmp_path / "gpu.md")]) == 0
    assert f"- **{name}**: " in (tmp_path / "gpu.md").read_text()


def test_the_gpu_script_reports_differences_and_a_missing_gpu(capsys):
    with pytest.raises(AssertionError, match="the device and the CPU differ by 1"):
        gpu._check_close([torch.ones(3)], [torch.zeros(3)], "the device and the CPU")
    with pytest.raises(AssertionError):
        gpu._check_close([torch.full((3,), math.nan)], [torch.ones(3)], "NaN")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu.main(["sweep"])
        assert "torch sees no GPU here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["zebra", "--device", "cpu"])
    assert set(inspect.signature(gpu.DeviceSetup).parameters) == {"device", "is_small"}


def test_a_walk_counts_only_calls_of_the_package():
    from bnet_transformer._core.checks import check_choice

    def generator():
        yield from (len(word) for word in ["a", "b"])

    counts, names = walks.trace_call(lambda: [check_choice("x", 1, (1, 2)), *generator(), math.sqrt(4)])
    assert counts == {"calls": 1, "functions": 1, "files": 1, "switches": 1}
    assert dict(names) == {"_core/checks.py check_choice": 1}


def test_lines_count_without_docstrings_and_comments():
    source = '"""A module."""\n\nx = """not a\ndocstring"""  # counts\n# does not\ndef f():\n    "One."\n    return 1\n'
    assert size.count_code_lines(source) == 5


def test_limits_fall_and_never_rise(monkeypatch, tmp_path):
    path = tmp_path / "ratchet.json"
    monkeypatch.setattr(ratchet, "LIMITS", path)
    path.write_text('{"size": {"files": 5, "lines": 10, "gone": 1}}')
    assert ratchet.check_figures("size", {"files": 5, "lines": 9}, lower=False) == 0
    assert ratchet.check_figures("size", {"files": 6, "lines": 9}, lower=True) == 1
    assert json.loads(path.read_text()) == {"size": {"files": 5, "lines": 9}}
