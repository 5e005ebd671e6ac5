"""Benchmarks of one GPU: `python -m benchmarks.gpu [row ...] [--device cuda] [--small] [--json FILE] [--markdown
FILE]`.

Every row first compares its results with those of the CPU, at small sizes in float32 without TF32. Then it measures at
the sizes of its target; a clock is read after the work of the device is done. `--device cpu --small` runs everything
without a GPU, to check the script: its figures have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bnet_transformer as bt
from benchmarks import fits, report, sweeps
from benchmarks.compiled import convert_encoder
from benchmarks.harness import LIMIT, ROOT, Figure, Row, figure, peak_memory, ratios, reset_peak, time_calls
from benchmarks.limits import get_clock, measure_machine, measure_work
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.pretrained.source import find_package_path
from bnet_transformer.tpm import Normal

SENTENCES = (ROOT / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()
RELATIONS = ("same", "previous", "next", "first", "last")  # relations between a word and the word to which it attends
STEPS = 500_000  # training steps of the geometric nets


@dataclass(frozen=True)
class DeviceSetup:
    """The device, and whether sizes are those of the target or of a quick check."""

    device: str
    is_small: bool

    def pick(self, full: int, small: int) -> int:
        """Return one of two sizes."""
        return small if self.is_small else full

    def time_calls(self, calls: dict[str, Callable[[], object]], runs: int, warm: int = 3) -> dict[str, list[float]]:
        """Time interleaved runs by the device's clock."""
        return time_calls(calls, 1 if self.is_small else runs, 1 if self.is_small else warm, get_clock(self.device))

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def measure_peak(self) -> float:
        """Return the maximum memory in MB: of the GPU since the last reset, of the process on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.is_cuda else peak_memory()

    def reset_peak(self) -> None:
        """Reset the peaks."""
        reset_peak()
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def autocast(self) -> Any:
        """Return bf16 autocast."""
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16)


def concat_training(setup: DeviceSetup) -> list[Figure]:
    """Training steps (bf16 autocast, AdamW) of a 6-slice, 512-wide, 8-head concat net with feed-forward, 32 sentences
    of 512 words, compiled, compared with `nn.TransformerEncoder` of the same weights, compiled, with flash attention.
    Target: at least 0.95 of its throughput, i.e. at most 1/0.95 of its time."""
    dim, slices = setup.pick(512, 32), setup.pick(6, 2)
    torch.manual_seed(0)
    slice_ = nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, batch_first=True)
    peer: nn.Module = nn.TransformerEncoder(slice_, slices, enable_nested_tensor=False).train()
    net, x = convert_encoder(peer), torch.randn(2, 16, dim)
    expected = _compute_gradients(net.module(), x)
    _check_close(_compute_gradients(peer, x), expected, "ours and theirs on the CPU")
    module, peer = net.to(setup.device).module().train(), peer.to(setup.device)
    _check_close(_compute_gradients(module, x.to(setup.device)), expected, "the device and the CPU")
    x = torch.randn(setup.pick(32, 2), setup.pick(512, 16), dim, device=setup.device)
    flash = functools.partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION]) if setup.is_cuda else contextlib.nullcontext
    calls: dict[str, Callable[[], object]] = {
        "ours": _create_training_step(module, x, setup, contextlib.nullcontext),
        "theirs": _create_training_step(peer, x, setup, flash),
    }
    spent = setup.time_calls(calls, runs=15, warm=5)
    setup.reset_peak()
    calls["ours"]()
    peak, words = setup.measure_peak(), x.shape[0] * x.shape[1]
    work, best = (
        measure_work(lambda: _compute_loss(module, x, setup).backward()),
        measure_machine(setup.device, torch.bfloat16),
    )
    limit = work.seconds(best)
    return [
        figure("ours", [words / item for item in spent["ours"]], "words/s"),
        figure("nn.TransformerEncoder", [words / item for item in spent["theirs"]], "words/s"),
        figure("throughput over theirs", ratios(spent["theirs"], spent["ours"]), ""),
        figure("time over theirs", ratios(spent["ours"], spent["theirs"]), "", target=1 / 0.95),
        figure(LIMIT, [item / limit for item in spent["ours"]], ""),
        figure("peak memory", peak, "MB"),
    ]


def mixture_step(setup: DeviceSetup) -> list[Figure]:
    """A training step of the sentence mixture (8 heads, 256 sentences of 128 words, d=512, Normal readout, float32 with
    TF32 products): the exact marginal by elimination, forward and backward. Target: at most 1/0.7 of the time of the
    matrix products of eight heads at the device's measured rate for the same type."""
    with _allow_tf32(False):
        _check_close(
            _create_mixture_step(setup.device, 4, 8, 16)(),
            _create_mixture_step("cpu", 4, 8, 16)(),
            "the device and the CPU",
        )
    with _allow_tf32(True):
        step = _create_mixture_step(setup.device, setup.pick(256, 4), setup.pick(128, 8), setup.pick(512, 16))
        spent = setup.time_calls({"": step}, runs=15)[""]
        setup.reset_peak()
        step()
        peak, work, best = setup.measure_peak(), measure_work(step), measure_machine(setup.device)
    return [
        figure("a step", spent, "s"),
        figure("matrix products of eight heads", work.flops / 1e12, "TFLOP"),
        figure("time over that of the products", [item * best.rate / work.flops for item in spent], "", target=1 / 0.7),
        figure(LIMIT, [item / work.seconds(best) for item in spent], ""),
        figure("peak memory", peak, "MB"),
    ]


def sweep(setup: DeviceSetup) -> list[Figure]:
    """`bt.sweep` over every (slice, word) of a GPT-2-shaped net (12 slices, 768 wide, 12 heads, 64 words, vocabulary
    50,257, float32), compared with `get_act_patch_resid_pre` of TransformerLens on the same weights and device. Target:
    at most 1/30 of its time. Then one cell at a time."""
    small: dict[str, Any] = {"words": 8, "slices": 2, "dim": 48, "vocabulary": 1000, "has_lens": False}
    actual = sweeps.create_pair(**small, device=setup.device).create_sweep("x")().outcomes
    _check_close([actual], [sweeps.create_pair(**small).create_sweep("x")().outcomes], "the device and the CPU")
    has_lens = not sweeps.is_lens_missing()
    sizes = small | {"has_lens": has_lens}
    if not setup.is_small:
        sizes |= {"words": 64, "slices": 12, "dim": 768, "vocabulary": sweeps.VOCABULARY}
    pair = sweeps.create_pair(**sizes, device=setup.device)
    calls: dict[str, Callable[[], Any]] = {
        "ours": pair.create_sweep("x"),
        "a cell at a time": pair.create_sweep("x", memory=1),
    }
    if has_lens:
        calls["theirs"] = pair.create_patching("get_act_patch_resid_pre")
        sweeps.check_close(calls["ours"]().outcomes[: sizes["slices"], :, 0].cpu(), calls["theirs"]().cpu())
    spent = setup.time_calls(calls, runs=3, warm=1)
    setup.reset_peak()
    calls["ours"]()
    rows = [
        figure("ours", spent["ours"], "s"),
        figure("a cell at a time", spent["a cell at a time"], "s"),
        figure("all at once over a cell at a time", ratios(spent["ours"], spent["a cell at a time"]), ""),
        figure("peak memory", setup.measure_peak(), "MB"),
    ]
    if has_lens:
        rows.append(figure("TransformerLens", spent["theirs"], "s"))
        rows.append(figure("time over theirs", ratios(spent["ours"], spent["theirs"]), "", target=1 / 30))
    return rows


def responsibilities(setup: DeviceSetup) -> list[Figure]:
    """The responsibilities of heads for the word relations in MiniLM (6 slices of 12 heads), for a million sentences of
    up to 32 words in one run: `P(head | relation, sentence)` with a uniform prior over heads, that is, each head's
    share of the attention between words in a relation (same, previous, next, first, last), and its mean over the
    sentences. MiniLM samples no head, so no other posterior of heads exists. Words are drawn from those of real
    sentences, on the device, part by part. Memory after a tenth of the sentences should equal memory at the end."""
    net = bt.from_pretrained("minilm")
    with torch.no_grad():
        (result, _), (cpu, _) = (
            _compute_responsibilities(net.to(d), 8, 4, DeviceSetup(d, True)) for d in (setup.device, "cpu")
        )
    _check_close([result], [cpu], "the device and the CPU")
    total, part = setup.pick(1_000_000, 200), setup.pick(2048, 20)
    setup.reset_peak()
    start = get_clock(setup.device)()
    with torch.no_grad():
        result, peaks = _compute_responsibilities(net.to(setup.device), total, part, setup)
    spent = get_clock(setup.device)() - start
    torch.testing.assert_close(result.sum(-1), torch.ones_like(result[..., 0]), rtol=1e-3, atol=1e-3)
    (tenth, host), (end, host_end) = peaks
    return [
        figure("sentences", total, ""),
        figure("time", spent, "s"),
        figure("sentences per second", total / spent, "/s"),
        figure("peak memory after a tenth", tenth, "MB"),
        figure("peak memory at the end", end, "MB"),
        figure("the end over a tenth", end / tenth, "", target=1.05),
        figure("peak memory of the process, the end over a tenth", host_end / host, "", target=1.05),
    ]


def geometric_steps(setup: DeviceSetup) -> list[Figure]:
    """Steps of `bt.train` on a geometric net (3 wide, 3 slices, 2 blocks; windows of 3 words, batches of 512), and the
    minutes of 500,000 steps. Target: minutes."""
    small: dict[str, Any] = {"steps": 20, "optimizer": bt.AdamW(rate=0.01), "batch": 64, "progress": False}
    data = _create_rotated(1024)
    expected = bt.train(_create_geometric(), data, device="cpu", **small).losses
    actual = bt.train(_create_geometric(), data, **small, device=setup.device).losses
    _check_close([torch.tensor(actual)], [torch.tensor(expected)], "the losses on the device and on the CPU")
    run = functools.partial(
        bt.train, _create_geometric(), _create_rotated(4096), optimizer=bt.AdamW(rate=0.01), batch=512, progress=False,
        device=setup.device,
    )  # fmt: skip
    rate = _measure_step_rate(run, setup.pick(500, 10), setup.pick(2500, 30), setup)
    return [
        figure("steps per second", rate, "/s"),
        figure(f"minutes of {STEPS:,} steps", [STEPS / item / 60 for item in rate], "min"),
    ]


def batched_restarts(setup: DeviceSetup) -> list[Figure]:
    """A gradient of the exact marginal of 64 restarts of a mixture (8 heads, 16 words, d=32, d_k=4, 256 sentences) as
    one batched dimension, compared with a loop over them."""
    small = {"heads": 2, "words": 4, "dim": 4, "sentences": 8}
    sizes = small if setup.is_small else {"heads": 8, "words": 16, "dim": 32, "sentences": 256}
    _check_close(
        fits.create_restarts(3, device=setup.device, **small)[0](),
        fits.create_restarts(3, **small)[1](),
        "the device and the CPU",
    )
    batched, looped = fits.create_restarts(setup.pick(64, 3), device=setup.device, **sizes)
    spent = setup.time_calls({"at once": batched, "one by one": looped}, runs=9)
    setup.reset_peak()
    batched()
    return [
        figure("at once", spent["at once"], "s"),
        figure("one by one", spent["one by one"], "s"),
        figure("at once over one by one", ratios(spent["at once"], spent["one by one"]), "", target=1 / 1.5),
        figure("peak memory", setup.measure_peak(), "MB"),
    ]


def smollm2(setup: DeviceSetup) -> list[Figure]:
    """The logits of 64 sentences of 128 words, and of one of 32, in SmolLM2-135M (GGUF, float32), compared with
    `transformers` with SDPA on the same device; target: at most 1.0 of its time. Then the contributions of all writers
    to one logit and the lens of all states, for one sentence."""
    from transformers import AutoModelForCausalLM

    path = find_package_path("smollm2")
    options: dict[str, Any] = {"gguf_file": path.name, "attn_implementation": "sdpa"}
    model, net = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval(), bt.from_pretrained("smollm2")
    generator = torch.Generator().manual_seed(0)
    sizes = {"64 sentences": (setup.pick(64, 2), setup.pick(128, 8)), "one sentence": (1, setup.pick(32, 8))}
    ids = {name: torch.randint(1000, 40000, size, generator=generator) for name, size in sizes.items()}
    with torch.inference_mode():
        cpu = net.module().eval()(ids["one sentence"], want=["logits"])["logits"]
    model, net = model.to(setup.device), net.to(setup.device)
    module, rows = net.module().eval(), []
    for name, x in ids.items():
        x = x.to(setup.device)

        def run(x: Tensor = x) -> Tensor:
            with torch.inference_mode():
                return module(x, want=["logits"])["logits"]

        def run_peer(x: Tensor = x) -> Tensor:
            with torch.inference_mode():
                logits: Tensor = model(x, use_cache=False).logits
                return logits

        _check_close([run()], [run_peer()], "ours and theirs")
        spent = setup.time_calls({"ours": run, "theirs": run_peer}, runs=15)
        rows += [figure(f"{name}: {key}", values, "s") for key, values in spent.items()]
        rows.append(figure(f"{name}: time over theirs", ratios(spent["ours"], spent["theirs"]), "", target=1.0))
    _check_close([run()], [cpu], "the device and the CPU")
    words = ids["one sentence"][0].tolist()
    calls = {
        "contributions": lambda: net.sentence(words).contributions(f"logits_{len(words) - 1}", of=(5, 9)),
        "lens": lambda: net.sentence(words).lens(),
    }
    return rows + [figure(name, values, "s") for name, values in setup.time_calls(calls, runs=5).items()]


ROWS: dict[str, Callable[[DeviceSetup], list[Figure]]] = {
    "concat-training": concat_training,
    "mixture-step": mixture_step,
    "sweep": sweep,
    "responsibilities": responsibilities,
    "geometric-steps": geometric_steps,
    "restarts": batched_restarts,
    "smollm2": smollm2,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the named rows, or all rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda by default, or one of them: cuda:1; cpu with --small")
    parser.add_argument("--small", action="store_true", help="small sizes and one run, to check the script")
    args = report.parse_arguments(parser, ROWS, f"of {', '.join(ROWS)}; all by default", argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --small tries the script")
    setup, figures = DeviceSetup(args.device, args.small), {}
    for name in args.rows or ROWS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        measure = functools.update_wrapper(functools.partial(ROWS[name], setup), ROWS[name])
        figures[Row(name, "gpu", measure)] = measure()
    conditions = report.describe_conditions() | (
        {"device": torch.cuda.get_device_name(setup.device)} if setup.is_cuda else {}
    )
    command = "python -m benchmarks.gpu " + shlex.join(sys.argv[1:] if argv is None else argv)
    report.write_report(args, "Benchmarks: gpu", command, figures, conditions)
    return 0


@contextlib.contextmanager
def _allow_tf32(is_allowed: bool) -> Iterator[None]:
    """Allow TF32 for float32 products if the device supports it, or forbid it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check_close(actual: Sequence[Tensor], expected: Sequence[Tensor], subject: str) -> None:
    """Raise an error if results differ by more than a thousandth of the greatest number."""
    for one, other in zip(actual, expected, strict=True):
        difference = float((one.detach().cpu() - other.detach().cpu()).abs().max())
        maximum = float(other.detach().abs().max())
        if not difference <= 1e-3 * max(maximum, 1e-3):
            raise AssertionError(f"{subject} differ by {difference:.3g}, where the greatest number is {maximum:.3g}")


def _compute_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradient of the words, of a loss that depends on every number."""
    x = x.clone().requires_grad_()
    y = module(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum(), [x])
    return [y, grad]


def _compute_loss(module: nn.Module, x: Tensor, setup: DeviceSetup) -> Tensor:
    """Return a loss of the output of a module."""
    with setup.autocast:
        loss: Tensor = (module(x).float() - x).square().mean()
    return loss


def _create_training_step(
    module: nn.Module, x: Tensor, setup: DeviceSetup, create_context: Callable[[], Any]
) -> Callable[[], None]:
    """Return a training step: the loss in bf16, gradients, AdamW; on a GPU the module is compiled."""
    run = torch.compile(module) if setup.is_cuda else module
    adam = torch.optim.AdamW(module.parameters(), 1e-4, fused=setup.is_cuda)

    def step() -> None:
        with create_context():
            _compute_loss(run, x, setup).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def _create_mixture_step(device: str, sentences: int, words: int, dim: int) -> Callable[[], list[Tensor]]:
    """Return a step that computes the log evidences; their gradient is added to the parameters, and also returned."""
    torch.manual_seed(0)
    net = bt.bayesuvius(dim, heads=8, observe=Normal(1.0))
    x, y = torch.randn(sentences, words, dim), torch.randn(sentences, words, dim)
    module, x, y = net.to(device).module(), x.to(device), y.to(device)
    parameters = [value for value in module.parameters() if value.requires_grad]

    def step() -> list[Tensor]:
        for value in parameters:
            value.grad = None
        log_evidences = log_evidence(module, {"y": Evidence(y)}, x)
        (-log_evidences.sum()).backward()
        return [log_evidences.detach(), *(value.grad for value in parameters if value.grad is not None)]

    return step


def _compute_responsibilities(
    net: bt.BNet, total: int, part: int, setup: DeviceSetup
) -> tuple[Tensor, list[tuple[float, float]]]:
    """Return the mean of `P(head | relation)` over `total` sentences, `[slice, relation, head]`, and the memory peaks
    (of the device, of the process) after a tenth and at the end. Only one part of the sentences is in memory at a time.
    """
    module, pool = net.module().eval(), net.batch(SENTENCES)
    ids, present = pool.x[""], (pool.mask or {})[""]
    known, ends = ids[present].cpu(), [int(ids[0][present[0]][k]) for k in (0, -1)]
    words, device = setup.pick(32, 8), setup.device
    generator = torch.Generator().manual_seed(0)
    sums, count, peaks = torch.zeros((), device=device), 0, []
    while count < total:
        size = min(part, total - count)
        lengths = torch.randint(words // 2, words + 1, (size, 1), generator=generator)
        ids = known[torch.randint(len(known), (size, words), generator=generator)]
        position = torch.arange(words)
        ids[:, 0] = ends[0]
        ids = torch.where(position == lengths - 1, ends[1], ids)
        present = (position < lengths).to(device)
        given = {"segment": torch.zeros_like(ids, device=device)}
        attention, _ = module.attention_weights(ids.to(device), present, given=given)
        tables = _create_relation_tables(words, lengths.to(device), present)
        weights = torch.stack([torch.einsum("shij,srij->srh", item, tables) for item in attention.values()])
        responsibilities = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
        sums = sums + responsibilities.double().sum(1)
        before, count = count, count + size
        if before < total // 10 <= count or count == total:
            get_clock(device)()
            peaks.append((setup.measure_peak(), peak_memory()))
    return (sums / total).float(), [peaks[0], peaks[-1]]


def _create_relation_tables(words: int, lengths: Tensor, present: Tensor) -> Tensor:
    """Return whether a word is in a relation to its reader, without padding: `[sentence, relation, word, read]`."""
    idx = torch.arange(words, device=present.device)
    i, j = idx[:, None], idx[None, :]
    last = (j == lengths[:, :, None] - 1).expand(-1, words, -1)
    offsets = [item.expand(len(lengths), words, words) for item in (i == j, i - 1 == j, i + 1 == j)]
    tables = torch.stack([*offsets, (j == 0).expand(len(lengths), words, words), last], 1)
    return (tables & present[:, None, :, None] & present[:, None, None, :]).float()


def _create_geometric() -> bt.BNet:
    """Return a geometric net."""
    return bt.geometric(3, slices=3, blocks=2, heads=1, observe=Normal(0.01))


def _create_rotated(count: int) -> tuple[Tensor, Tensor]:
    """Return windows of three points, and the same windows rotated."""
    x = torch.randn(count, 3, 3, generator=torch.Generator().manual_seed(0))
    angle = torch.tensor(0.3)
    rotation = torch.eye(3)
    rotation[0, 0] = rotation[1, 1] = angle.cos()
    rotation[0, 1], rotation[1, 0] = -angle.sin(), angle.sin()
    return x, x @ rotation.mT


def _measure_step_rate(run: Callable[..., object], num_short: int, num_long: int, setup: DeviceSetup) -> list[float]:
    """Return steps per second from the difference of two runs of unequal length: the cost of starting a run cancels."""
    rates = []
    for _ in range(1 if setup.is_small else 3):
        times = [time.perf_counter()]
        for steps in (num_short, num_long):
            run(steps=steps)
            times.append(get_clock(setup.device)())
        short, long = (b - a for a, b in itertools.pairwise(times))
        rates.append((num_long - num_short) / max(long - short, 1e-9))
    return rates


if __name__ == "__main__":
    sys.exit(main())
