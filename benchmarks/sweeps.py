"""Rows of sweeps: every node of a GPT-2-shaped net patched, compared with TransformerLens on the same weights."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, figure, peak_memory, ratios, reset_peak, run_in_process, time_calls
from benchmarks.limits import measure_limit

WORDS, SLICES, VOCABULARY, RUNS = 32, 6, 50257, 3
FIRST, SECOND = 17, 703  # the words whose logits the metric compares at the last word


@dataclass(frozen=True)
class Pair:
    """A random GPT-2 (fixed seed) here and in TransformerLens, and a clean and a corrupt prompt."""

    net: Any
    bridge: Any
    clean: Any
    corrupt: Any

    @property
    def metric(self) -> Mapping[str, tuple[int, int]]:
        """log P(first) - log P(second) at the last word, which is the difference of their logits."""
        return {f"y_{self.clean.shape[1] - 1}": (FIRST, SECOND)}

    def create_sweep(
        self, at: str, over: tuple[str, ...] | None = None, memory: int | None = None
    ) -> Callable[[], Any]:
        """Return the sweep, from new sentences; it includes both base runs."""
        import bnet_transformer as bt

        more: dict[str, Any] = {} if memory is None else {"memory": memory}

        def call() -> Any:
            clean, corrupt = (self.net.sentence(ids[0].tolist()) for ids in (self.clean, self.corrupt))
            return bt.sweep(clean, corrupt, at=at, over=over, metric=self.metric, **more)

        return call

    def create_patching(self, name: str) -> Callable[[], Any]:
        """Return the patching function of TransformerLens; its clean run is cached before."""
        import torch
        from transformer_lens import patching

        patching.tqdm = lambda cells: cells  # hides its progress bars
        with torch.no_grad():
            cache = self.bridge.run_with_cache(self.clean)[1]

        def call() -> Any:
            with torch.no_grad():
                return getattr(patching, name)(self.bridge, self.corrupt, cache, logit_difference)

        return call


def logit_difference(logits: Any) -> Any:
    """Return the metric in the form of TransformerLens."""
    return (logits[:, -1, FIRST] - logits[:, -1, SECOND]).mean()


def sweep_of_slices_and_words() -> list[Figure]:
    """`bt.sweep` over every (slice, word) of a GPT-2-shaped net with random weights (6 slices, 384 wide, 12 heads, 32
    words, vocabulary 50,257, float32). The outcome is a difference of two logits at the last word. Compared with
    `get_act_patch_resid_pre` of TransformerLens on the same weights. Ours includes one slice more (the last state),
    both base runs and the creation of the sentences; theirs has its clean run before the clock starts. Results agree to
    1e-4. The prompts differ in every word, so no word is the same in both runs; then only in their eighth word. The
    target is at least 8 times as fast: a ratio of at most 1/8 (the aim is 1/12)."""
    return _slices_and_words(VOCABULARY)


def sweep_of_slices_and_words_small() -> list[Figure]:
    """The same with a vocabulary of 1,000, where the readout costs almost nothing."""
    return _slices_and_words(1000)


def _slices_and_words(vocabulary: int) -> list[Figure]:
    """Return the figures of a sweep over slices and words."""
    if is_lens_missing():
        return []
    calls: dict[str, Callable[[], Any]] = {}
    rows: list[Figure] = []
    for subject, has_one_difference in (("every word differs", False), ("one word differs", True)):
        pair = create_pair(vocabulary=vocabulary, has_one_difference=has_one_difference)
        actual, peer = pair.create_sweep("x"), pair.create_patching("get_act_patch_resid_pre")
        check_close(actual().outcomes[:SLICES, :, 0], peer())
        calls |= {f"ours, {subject}": actual, f"TransformerLens, {subject}": peer}
    spent = time_calls(calls, runs=RUNS, warm=0)
    for subject in ("every word differs", "one word differs"):
        one, other = spent[f"ours, {subject}"], spent[f"TransformerLens, {subject}"]
        rows += _compare(subject, calls[f"ours, {subject}"], one, other, 1 / 8)
    return rows


def sweep_of_slices_and_heads() -> list[Figure]:
    """`bt.sweep` over every (slice, head) of the same net, with the outputs of a head at all words set together,
    compared with `get_act_patch_attn_head_out_all_pos`. The target is at least 6 times as fast: a ratio of at most 1/6.
    """
    if is_lens_missing():
        return []
    rows = []
    for vocabulary in (VOCABULARY, 1000):
        pair = create_pair(vocabulary=vocabulary)
        actual, peer = (
            pair.create_sweep("a", ("slice", "head")),
            pair.create_patching("get_act_patch_attn_head_out_all_pos"),
        )
        check_close(actual().outcomes[..., 0], peer())
        spent = time_calls({"ours": actual, "theirs": peer}, runs=2 * RUNS + 1, warm=0)
        rows += _compare(f"vocabulary {vocabulary:,}", actual, spent["ours"], spent["theirs"], 1 / 6)
    return rows


def ablations() -> list[Figure]:
    """`bt.sweep` over every (slice, head) of the same net with a vocabulary of 1,000, 16 examples: the outputs of a
    head at all words set to their `Mean` over 16 other sentences, to `Mean()` over the words, with `Noise` added, each
    compared with `Zero()`; all from new sentences. The target is at most 3 times the cost of zeros."""
    import bnet_transformer as bt
    from bnet_transformer.interventions import Mean, Noise, Zero

    net = create_pair(vocabulary=1000, has_lens=False).net
    reference, examples = create_prompts(WORDS, 1000, 16)
    sentences = [[net.sentence(row.tolist()) for row in ids] for ids in (reference, examples)]
    metric = {f"y_{WORDS - 1}": (FIRST, SECOND)}

    def fresh_sentences(ids: Any) -> list[Any]:
        return [net.sentence(row.tolist()) for row in ids]

    def job(ablation: Callable[[], Any]) -> Callable[[], Any]:
        options: dict[str, Any] = {"at": "a", "over": ("slice", "head"), "metric": metric}
        return lambda: bt.sweep(ablation(), fresh_sentences(examples), **options)

    jobs = {
        "Zero()": job(Zero),
        "Mean(sentences)": job(lambda: Mean(fresh_sentences(reference))),
        "Mean()": job(Mean),
        "Noise(0.1)": job(lambda: Noise(0.1)),
    }
    patched = sentences[1][3].do({"a_2_5_*": Mean(sentences[0])})
    result = jobs["Mean(sentences)"]()
    check_close(result.outcomes[2, 5, 3], patched.tpm(f"y_{WORDS - 1}").logits[[FIRST, SECOND]].diff(dim=0)[0].neg())
    spent = time_calls(jobs, runs=RUNS, warm=1)
    rows = []
    for name, times in spent.items():
        rows.append(figure(f"16 examples, {name}", times, "s"))
        if name != "Zero()":
            rows.append(figure(f"16 examples, {name}: ratio to Zero()", ratios(times, spent["Zero()"]), "", target=3))
        rows += measure_limit(jobs[name], times, name=name)
    return rows


def attribution() -> list[Figure]:
    """All nodes to first order: `bt.sweep(..., method=bt.Gradient())` over the states, the heads and the outputs of the
    feed-forward steps (three calls), compared with `attribution_patch` of TransformerLens, which scores embeddings,
    heads and these in one call, prompt by prompt; both include both base runs. Results agree to 1e-4. One prompt, and
    eight."""
    if is_lens_missing():
        return []
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch

    import bnet_transformer as bt

    rows = []
    pair = create_pair()
    pair.bridge.eval().requires_grad_()  # it computes gradients at the embeddings
    for subject, count in (("one prompt", 1), ("eight prompts", 8)):
        clean, corrupt = create_prompts(WORDS, VOCABULARY, count)

        def estimate(clean: Any = clean, corrupt: Any = corrupt) -> dict[str, Any]:
            sentences = [[pair.net.sentence(row.tolist()) for row in ids] for ids in (clean, corrupt)]
            options: dict[str, Any] = {"metric": pair.metric, "method": bt.Gradient()}
            return {at: bt.sweep(*sentences, at=at, **options).values for at in ("x", "a", "ffn")}

        def estimate_peer(clean: Any = clean, corrupt: Any = corrupt) -> Any:
            return attribution_patch(pair.bridge, clean, corrupt, logit_difference).node_scores

        result, scores = estimate(), estimate_peer()
        heads = {(n.layer, n.head, n.position): s for n, s in scores.items() if n.kind == "attn_head_out"}
        assert max(abs(float(result["a"][index]) - score) for index, score in heads.items()) < 1e-4
        spent = time_calls({"ours": estimate, "theirs": estimate_peer}, runs=2 * RUNS + 1, warm=0)
        rows += _compare(subject, estimate, spent["ours"], spent["theirs"], 1)
    return rows


def sweep_of_all_arrows() -> list[Figure]:
    """`bt.sweep(at="arrows")` over every arrow of roles of a decoder with 6 slices of 2 heads (32 wide, 10 words, 16
    pairs), joined over words: 193 cells in one call, compared with a call for each cell; and to first order. Results
    agree to 1e-5. The target is at most a fifth of the time of the separate calls."""
    import random

    import bnet_transformer as bt

    vocabulary = [f"w{k}" for k in range(40)]
    net, pick = bt.decoder(dim=32, heads=2, slices=6, vocabulary=vocabulary, seed=0), random.Random(0)
    texts = [[" ".join(pick.choices(vocabulary, k=10)) for _ in range(16)] for _ in "ab"]
    options: dict[str, Any] = {"metric": {"y_9": ("w0", "w1")}, "progress": False}

    def sweep(**more: Any) -> Any:
        clean, corrupt = ([net.sentence(text) for text in side] for side in texts)
        return bt.sweep(clean, corrupt, **options, **more)

    def sweep_in_one_call() -> Any:
        return sweep(at="arrows", over=("slice", "head"))

    result = sweep_in_one_call()
    names = list(result.names.values())

    def sweep_separately() -> Any:
        return [sweep(at=[name]).outcomes[0] for name in names]

    for name, outcomes in zip(names, sweep_separately(), strict=True):
        assert float((outcomes - result.outcomes[result.index_of(name)]).abs().max()) < 1e-5
    jobs = {
        "one call": sweep_in_one_call,
        f"{len(names)} calls": sweep_separately,
        "one call, to first order": lambda: sweep(at="arrows", over=("slice", "head"), method=bt.Gradient()),
    }
    spent = time_calls(jobs, runs=RUNS, warm=0)
    rows = [figure(f"{len(names)} cells: {name}", times, "s") for name, times in spent.items()]
    ratio = ratios(spent["one call"], spent[f"{len(names)} calls"])
    rows.append(figure(f"{len(names)} cells: ratio of one call", ratio, "", target=0.2))
    return [*rows, *measure_limit(sweep_in_one_call, spent["one call"])]


def sweep_of_neurons() -> list[Figure]:
    """`bt.sweep(at="neuron", over=("slice", "entry"))` of the GPT-2-shaped net with neurons as nodes: all 9,216 to
    first order, compared with a first-order sweep of the nodes, which is their sum; and 16 neurons exactly, compared
    with 16 sweeps of one cell. Results agree to 1e-4."""
    import bnet_transformer as bt

    pair = create_pair(has_lens=False)
    net, count = pair.net.expose_neurons(), 16

    def sweep(at: Any = "neuron", **more: Any) -> Any:
        clean, corrupt = (net.sentence(ids[0].tolist()) for ids in (pair.clean, pair.corrupt))
        return bt.sweep(clean, corrupt, at=at, metric=pair.metric, **more)

    def estimate(*axes: str) -> Any:
        return sweep(over=("slice", *axes), method=bt.Gradient())

    result = estimate("entry")
    check_close(result.values.sum(1), estimate().values)
    names = [name for name, _ in result.top(count)]

    def sweep_separately() -> Any:
        return [sweep([name]).values for name in names]

    check_close([*sweep(names).values.split(1)], sweep_separately())
    jobs = {
        "nodes to first order": estimate,
        "entries to first order": lambda: estimate("entry"),
        f"{count} neurons in one call": lambda: sweep(names),
        f"{count} neurons in {count} calls": sweep_separately,
    }
    spent = time_calls(jobs, runs=RUNS, warm=0)
    rows = [figure(name, times, "s") for name, times in spent.items()]
    return [*rows, *measure_limit(jobs["entries to first order"], spent["entries to first order"])]


def trace_of_all_nodes() -> list[Figure]:
    """The values of all nodes of a sentence in the same net (states, steps, queries, keys, values, attentions, logits;
    `module.attention_weights`), compared with `run_with_cache` of TransformerLens; no gradients. One prompt; the same
    with a vocabulary of 1,000, where the readout costs almost nothing; eight prompts in a batch."""
    if is_lens_missing():
        return []
    import torch

    rows = []
    for subject, vocabulary, count, target in (
        ("one prompt", VOCABULARY, 1, 0.8),
        ("vocabulary 1,000", 1000, 1, 0.8),
        ("eight prompts", VOCABULARY, 8, None),
    ):
        pair = create_pair(vocabulary=vocabulary)
        module, outputs = pair.net.module().eval(), _list_nodes(pair.net)
        ids = create_prompts(WORDS, vocabulary, count)[0]

        def trace(module: Any = module, ids: Any = ids, outputs: Any = outputs) -> Any:
            with torch.no_grad():
                return module.attention_weights(ids, want=outputs)

        def trace_peer(bridge: Any = pair.bridge, ids: Any = ids) -> Any:
            with torch.no_grad():
                return bridge.run_with_cache(ids)

        (attention, values), (logits, cache) = trace(), trace_peer()
        check_close(values["logits"], logits)
        check_close(values["x_3"], cache["blocks.3.hook_resid_pre"])
        check_close(values["q_5"].transpose(1, 2), cache["blocks.5.attn.hook_q"])
        check_close(attention["a_4"], cache["blocks.4.attn.hook_pattern"])
        spent = time_calls({"ours": trace, "theirs": trace_peer}, runs=21, warm=3)
        rows += _compare(subject, trace, spent["ours"], spent["theirs"], target, name="run_with_cache")
    return rows


def memory_of_a_sweep() -> list[Figure]:
    """The peak of resident memory (VmHWM) of the same sweeps, and of the trace, each in a fresh process: after the
    model is created (the peak is then reset, where the system can), and after the call."""
    if is_lens_missing():
        return []
    rows = []
    for subject in ("every (slice, word)", "every (slice, head)", "all nodes"):
        for owner in ("ours", "TransformerLens"):
            before, after = run_in_process(_measure_peak, owner, subject)
            rows.append(figure(f"{subject}, {owner}: before", before, "MB"))
            rows.append(figure(f"{subject}, {owner}: after", after, "MB"))
    return rows


def _measure_peak(owner: str, subject: str) -> tuple[float, float]:
    """Return the peak memory before and after a call."""
    import torch

    is_bnet = owner == "ours"
    pair = create_pair(has_lens=not is_bnet, has_net=is_bnet)
    at, over, peer = {
        "every (slice, word)": ("x", None, "get_act_patch_resid_pre"),
        "every (slice, head)": ("a", ("slice", "head"), "get_act_patch_attn_head_out_all_pos"),
    }.get(subject, ("", None, ""))
    reset_peak()
    before = peak_memory()
    with torch.no_grad():
        if at:
            (pair.create_sweep(at, over) if is_bnet else pair.create_patching(peer))()
        elif is_bnet:
            pair.net.module().eval().attention_weights(pair.clean, want=_list_nodes(pair.net))
        else:
            pair.bridge.run_with_cache(pair.clean)
    return before, peak_memory()


def _list_nodes(net: Any) -> list[str]:
    """Return the groups of deterministic nodes over words, except the tokens and the readout."""
    specs = [spec for spec in net.network.specs if spec.tpm.kind == "deterministic"]
    return [spec.group.name for spec in specs if spec.group.word_stack is not None and spec.group.role != "token"]


def _compare(
    subject: str,
    job: Callable[[], object],
    seconds: list[float],
    peer_seconds: list[float],
    target: float | None,
    name: str = "TransformerLens",
) -> list[Figure]:
    """Return the figures of our times, theirs, their ratio and the limit."""
    return [
        figure(f"{subject}: ours", seconds, "s"),
        figure(f"{subject}: {name}", peer_seconds, "s"),
        figure(f"{subject}: ratio", ratios(seconds, peer_seconds), "", target=target),
        figure(f"{subject}: times as fast", ratios(peer_seconds, seconds), ""),
        *measure_limit(job, seconds, name=subject),
    ]


def check_close(actual: Any, expected: Any) -> None:
    """Raise an error if results differ."""
    import torch

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def is_lens_missing() -> bool:
    """Return True, and print a line on stderr, if TransformerLens is not installed."""
    if importlib.util.find_spec("transformer_lens") is None:
        print("skipped: TransformerLens is missing (make test-all installs it)", file=sys.stderr, flush=True)
        return True
    return False


def create_prompts(words: int, vocabulary: int, count: int = 1, *, has_one_difference: bool = False) -> tuple[Any, Any]:
    """Return a clean and a corrupt prompt that differ in every word, or (`has_one_difference`) only in the eighth."""
    import torch

    pick = torch.Generator().manual_seed(1)
    clean = torch.randint(vocabulary, (count, words), generator=pick)
    different = (clean + torch.randint(1, vocabulary, (count, words), generator=pick)) % vocabulary
    eighth = torch.arange(words) == 7
    return clean, torch.where(eighth, different, clean) if has_one_difference else different


def create_pair(
    *,
    words: int = WORDS,
    slices: int = SLICES,
    vocabulary: int = VOCABULARY,
    has_one_difference: bool = False,
    dim: int = 384,
    has_lens: bool = True,
    has_net: bool = True,
    device: str = "cpu",
) -> Pair:
    """Return a random GPT-2 of these sizes, ours or TransformerLens' or both, and two prompts."""
    import torch

    import bnet_transformer as bt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.manual_seed(0)
        sizes = {"n_embd": dim, "n_layer": slices, "n_head": 12, "n_positions": 64, "vocab_size": vocabulary}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)  # large enough that every word has an effect
        net = bt.from_pretrained(model).to(device) if has_net else None
        bridge = create_bridge(model.to(device), vocabulary, device) if has_lens else None
    clean, corrupt = create_prompts(words, vocabulary, has_one_difference=has_one_difference)
    return Pair(net, bridge, clean.to(device), corrupt.to(device))


def create_bridge(model: Any, vocabulary: int, device: str) -> Any:
    """Return the model in TransformerLens, with the tokenizer that its constructor requires."""
    import torch
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(vocabulary)}, unk_token="w0"))
        special = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), "w0")
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return TransformerBridge.boot_transformers(
            folder, hf_model=model, tokenizer=tokenizer, device=device, dtype=torch.float32
        )
