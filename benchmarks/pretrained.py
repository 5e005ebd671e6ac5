"""Rows of pretrained models: MiniLM and random models here and in `transformers`, with the same sentences and equal
results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks.harness import (
    Figure,
    differences,
    figure,
    limit_runs,
    measure_peak,
    peak_memory,
    ratios,
    run_in_process,
    time_calls,
)
from benchmarks.limits import Work, limit_figures, measure_limit
from bnet_transformer.pretrained.source import find_package_path

SENTENCES = (Path(__file__).parent.parent / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()


def minilm_forward() -> list[Figure]:
    """The last states of 32 sentences (padded to the longest) in MiniLM, compared with `transformers` with SDPA; no
    gradients."""
    peer, actual = _create_pair("sdpa", ["x_6"])
    return _compare("transformers, sdpa", peer, actual, 1.05)


def minilm_forward_long() -> list[Figure]:
    """The same for 8 texts of 128 tokens without padding."""
    peer, actual = _create_pair("sdpa", ["x_6"], long=True)
    return _compare("transformers, sdpa", peer, actual, 1.05)


def minilm_attentions() -> list[Figure]:
    """The last states and all 72 attention tables of the 32 sentences, compared with `transformers` in eager mode."""
    peer, _ = _create_pair("eager", ["x_6"], attentions=True)
    net = bt.from_pretrained("minilm")
    module, batch = net.module().eval(), net.batch(SENTENCES[:32])

    def run_module() -> object:
        with torch.no_grad():
            return module.attention_weights(batch.x, batch.mask, given=batch.given, want=["x_6"])

    return _compare("transformers, eager", peer, run_module, 1.0)


def minilm_load() -> list[Figure]:
    """The time from the start of loading to the first sentence's last state, and the peak of resident memory, each in a
    fresh process that has imported its library; the file is in the disk cache."""
    return _compare_loads(_load, find_package_path("minilm"))


def minilm_check() -> list[Figure]:
    """The time in which `from_pretrained` compares a net with MiniLM in memory, as a share of the time from the start
    of loading the model in `transformers` to the checked net; the file is in the disk cache."""
    from transformers import AutoModel

    folder = find_package_path("minilm")
    return _measure_check(lambda: AutoModel.from_pretrained(folder))


def smollm2_check() -> list[Figure]:
    """The same for a random model with the shape of SmolLM2 (30 slices of 576, 9 heads in 3 groups), from a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536}
    config = LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return _measure_check(lambda: LlamaForCausalLM.from_pretrained(folder))


def _measure_check(load: Callable[[], Any]) -> list[Figure]:
    """Return the seconds of loading a model, and of a net of it without and with the check of its values."""
    spent: dict[str, list[float]] = {"model": [], "net": [], "check": []}
    for _ in range(limit_runs(9) + 1):  # the first run imports modules
        times = [time.perf_counter()]
        model = load()
        times.append(time.perf_counter())
        for check in (False, True):
            bt.from_pretrained(model, check=check)
            times.append(time.perf_counter())
        for name, start, end in zip(spent, times, times[1:], strict=False):
            spent[name].append(end - start)
    model_times, net_times, checked_times = (times[1:] for times in spent.values())
    totals = [a + b for a, b in zip(model_times, checked_times, strict=True)]
    return [
        figure("transformers' from_pretrained", model_times, "s"),
        figure("net of it, without the check", net_times, "s"),
        figure("net of it, with the check", checked_times, "s"),
        figure("share of the check in loading", ratios(differences(checked_times, net_times), totals), ""),
        figure("net of it, with the check, peak memory", measure_peak(lambda: bt.from_pretrained(model)), "MB"),
    ]


def llama_forward() -> list[Figure]:
    """The last states of 8 texts of 128 tokens in a random net with the shape of Llama (6 slices of 384, 12 heads in 4
    groups), compared with `transformers` with SDPA; no gradients."""
    peer, actual = _create_llama_pair("sdpa")
    return _compare("transformers, sdpa", peer, actual, 1.05)


def llama_forward_padded() -> list[Figure]:
    """The same for texts of 64 to 128 tokens, padded."""
    peer, actual = _create_llama_pair("sdpa", padded=True)
    return _compare("transformers, sdpa", peer, actual, 1.05)


def llama_attentions() -> list[Figure]:
    """The same without padding, and all 72 attention tables, compared with `transformers` in eager mode."""
    peer, actual = _create_llama_pair("eager")
    return _compare("transformers, eager", peer, actual, 1.0)


def llama_load() -> list[Figure]:
    """The time from the start of loading to the first sentence's last state, and the peak of resident memory, each in a
    fresh process that has imported its library; the file is in the disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        _create_llama("sdpa").save_pretrained(folder)
        return _compare_loads(_load_llama, Path(folder))


def smollm2_forward_32() -> list[Figure]:
    """The logits of one text of 32 tokens in SmolLM2, compared with `transformers` reading the same GGUF file, with
    SDPA; no gradients."""
    return _compare("transformers, sdpa", *_create_smollm2_pair(32), 1.0)


def smollm2_forward_128() -> list[Figure]:
    """The same for 128 tokens."""
    return _compare("transformers, sdpa", *_create_smollm2_pair(128), 1.0)


def smollm2_load() -> list[Figure]:
    """The time from the start of loading the GGUF file to the logits of the first sentence, and the peak of resident
    memory, each in a fresh process that has imported its library; the file is in the disk cache."""
    return _compare_loads(_load_smollm2, find_package_path("smollm2"), runs=5, targets=(0.7, 0.8))


def t5_forward() -> list[Figure]:
    """The last states of the decoder for 8 texts of 128 tokens and outputs of 64 in a random net with the shape of T5
    (4 and 4 slices of 384, 12 heads), compared with `transformers` with SDPA; no gradients."""
    peer, actual = _create_t5_pair("sdpa")
    return _compare("transformers, sdpa", peer, actual, 1.05)


def t5_forward_padded() -> list[Figure]:
    """The same for texts of 64 to 128 tokens and outputs of 32 to 64, padded."""
    peer, actual = _create_t5_pair("sdpa", padded=True)
    return _compare("transformers, sdpa", peer, actual, 1.05)


def t5_attentions() -> list[Figure]:
    """The same without padding, and all 144 attention tables, compared with `transformers` in eager mode."""
    peer, actual = _create_t5_pair("eager")
    return _compare("transformers, eager", peer, actual, 1.0)


def t5_load() -> list[Figure]:
    """The time from the start of loading to the first sentence's last state, and the peak of resident memory, each in a
    fresh process that has imported its library; the file is in the disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        _create_t5("sdpa").save_pretrained(folder)
        return _compare_loads(_load_t5, Path(folder))


def _compare_loads(
    load: Callable[[str, Path], tuple[float, float]],
    folder: Path,
    runs: int = 9,
    targets: tuple[float, float] = (1.1, 1.1),
) -> list[Figure]:
    """Return seconds and peak memory of loads, ours and theirs in turn. The limit is that of a copy of the file."""
    samples: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for _ in range(limit_runs(runs)):
        for owner, results in samples.items():
            results.append(run_in_process(load, owner, folder))
    seconds = {name: [run[0] for run in runs] for name, runs in samples.items()}
    memory = {name: [run[1] for run in runs] for name, runs in samples.items()}
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    return [
        figure("ours", seconds["ours"], "s"),
        figure("transformers' from_pretrained", seconds["theirs"], "s"),
        figure("ratio of times", ratios(seconds["ours"], seconds["theirs"]), "", target=targets[0]),
        figure("ours, peak memory", memory["ours"], "MB"),
        figure("transformers, peak memory", memory["theirs"], "MB"),
        figure("ratio of peaks", ratios(memory["ours"], memory["theirs"]), "", target=targets[1]),
        *limit_figures(Work(0, 2 * size), seconds["ours"]),
    ]


def _create_llama(attention: str) -> Any:
    """Return a random net with the shape of Llama."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 4000, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024}
    options: Any = {**sizes, "num_attention_heads": 12, "num_key_value_heads": 4, "attn_implementation": attention}
    model: Any = LlamaModel(LlamaConfig(**options))
    return model.eval()


def _create_llama_pair(attention: str, *, padded: bool = False) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of the random Llama, theirs and ours."""
    model = _create_llama(attention)
    module = bt.from_pretrained(model).module().eval()
    x, lengths = torch.randint(4000, (8, 128)), torch.linspace(64, 128, 8)
    present = torch.arange(128) < (lengths[:, None] if padded else 128)
    mask, options = (present, {"attention_mask": present.long()}) if padded else (None, {})

    def run_peer() -> Any:
        with torch.no_grad():
            return model(x, use_cache=False, output_attentions=attention == "eager", **options)

    def run_module() -> Any:
        with torch.no_grad():
            if attention == "eager":
                return module.attention_weights(x, mask, want=["norm"])[1]
            return module(x, mask, want=["norm"])

    present = present.expand(x.shape)
    torch.testing.assert_close(run_module()["norm"][present], run_peer()[0][present], rtol=1e-4, atol=1e-4)
    return run_peer, run_module


def _load_llama(owner: str, folder: Path) -> tuple[float, float]:
    """Load the random Llama from a folder, and run a sentence."""
    torch.set_num_threads(1)
    ids = torch.tensor([[101, 1996, 937, 2938, 102]])
    if owner == "ours":
        import networkx

        from bnet_transformer.pretrained import from_pretrained

        assert networkx is not None  # imported before the clock starts, as for theirs
        start = time.perf_counter()
        with torch.no_grad():
            from_pretrained(folder).module().eval()(ids, want=["norm"])
        return time.perf_counter() - start, peak_memory()
    from transformers.models.llama import modeling_llama

    start = time.perf_counter()
    with torch.no_grad():
        modeling_llama.LlamaModel.from_pretrained(folder).eval()(ids)
    return time.perf_counter() - start, peak_memory()


def _create_smollm2_pair(words: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of SmolLM2, theirs and ours."""
    from transformers import AutoModelForCausalLM

    path = find_package_path("smollm2")
    options: Any = {"gguf_file": path.name, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    module = bt.from_pretrained("smollm2").module().eval()
    torch.manual_seed(0)
    x = torch.randint(1000, 40000, (1, words))

    def run_peer() -> Any:
        with torch.no_grad():
            return model(x, use_cache=False).logits

    def run_module() -> Any:
        with torch.no_grad():
            return module(x, want=["logits"])["logits"]

    torch.testing.assert_close(run_module(), run_peer(), rtol=1e-4, atol=1e-4)
    return run_peer, run_module


def _load_smollm2(owner: str, path: Path) -> tuple[float, float]:
    """Load SmolLM2 from its GGUF file, and run a sentence."""
    torch.set_num_threads(1)
    ids = torch.tensor([[504, 2644, 3943, 335]])
    if owner == "ours":
        import gguf
        import networkx
        import tokenizers

        from bnet_transformer.pretrained import from_pretrained

        assert gguf and networkx and tokenizers  # imported before the clock starts, as for theirs
        start = time.perf_counter()
        with torch.no_grad():
            from_pretrained(path).module().eval()(ids, want=["logits"])
        return time.perf_counter() - start, peak_memory()
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama import modeling_llama

    assert gguf and modeling_llama
    AutoModelForCausalLM, AutoTokenizer  # noqa: B018  (their modules are imported on first access)
    start = time.perf_counter()
    options: Any = {"gguf_file": path.name}
    AutoTokenizer.from_pretrained(path.parent, **options)
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()(ids)
    return time.perf_counter() - start, peak_memory()


def _create_t5(attention: str) -> Any:
    """Return a random net with the shape of T5."""
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    sizes = {"vocab_size": 4000, "d_model": 384, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 12}
    return T5Model(T5Config(**sizes, attn_implementation=attention)).eval()


def _create_t5_pair(attention: str, *, padded: bool = False) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of the random T5, theirs and ours."""
    model = _create_t5(attention)
    module = bt.from_pretrained(model).module().eval()
    words = {"enc": 128, "dec": 64}
    x = {stack: torch.randint(4000, (8, n)) for stack, n in words.items()}
    present = {k: torch.arange(n) < torch.linspace(n // 2 if padded else n, n, 8)[:, None] for k, n in words.items()}
    mask = present if padded else None
    given = {"attention_mask": present["enc"].long(), "decoder_attention_mask": present["dec"].long()} if padded else {}

    def run_peer() -> Any:
        with torch.no_grad():
            options = {"use_cache": False, "output_attentions": attention == "eager", **given}
            return model(input_ids=x["enc"], decoder_input_ids=x["dec"], **options)

    def run_module() -> Any:
        with torch.no_grad():
            if attention == "eager":
                return module.attention_weights(x, mask, want=["dec_norm"])[1]
            return module(x, mask, want=["dec_norm"])

    rows = present["dec"]
    torch.testing.assert_close(run_module()["dec_norm"][rows], run_peer()[0][rows], rtol=1e-4, atol=1e-4)
    return run_peer, run_module


def _load_t5(owner: str, folder: Path) -> tuple[float, float]:
    """Load the random T5 from a folder, and run a sentence."""
    torch.set_num_threads(1)
    ids = {"enc": torch.tensor([[101, 1996, 937, 2938, 102]]), "dec": torch.tensor([[0, 7]])}
    if owner == "ours":
        import networkx

        from bnet_transformer.pretrained import from_pretrained

        assert networkx is not None  # imported before the clock starts, as for theirs
        start = time.perf_counter()
        with torch.no_grad():
            from_pretrained(folder).module().eval()(ids, want=["dec_norm"])
        return time.perf_counter() - start, peak_memory()
    from transformers.models.t5 import modeling_t5

    start = time.perf_counter()
    with torch.no_grad():
        model = modeling_t5.T5Model.from_pretrained(folder).eval()
        model(input_ids=ids["enc"], decoder_input_ids=ids["dec"])
    return time.perf_counter() - start, peak_memory()


def _load(owner: str, folder: Path) -> tuple[float, float]:
    """Load MiniLM from a folder, and run a sentence."""
    torch.set_num_threads(1)
    ids = torch.tensor([[101, 1996, 4937, 2938, 102]])
    if owner == "ours":
        import networkx
        import tokenizers

        from bnet_transformer.pretrained import from_pretrained

        assert networkx is not None and tokenizers is not None  # imported before the clock starts, as for theirs
        start = time.perf_counter()
        with torch.no_grad():
            from_pretrained(folder).module().eval()(ids)
        return time.perf_counter() - start, peak_memory()
    from transformers import AutoModel, AutoTokenizer

    AutoModel, AutoTokenizer  # noqa: B018  (their modules are imported on first access)
    from transformers.models.bert import modeling_bert

    assert modeling_bert is not None
    start = time.perf_counter()
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        AutoModel.from_pretrained(folder).eval()(ids)
    return time.perf_counter() - start, peak_memory()


def _create_pair(
    attention: str, outputs: list[str], *, long: bool = False, attentions: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return calls of MiniLM in `transformers` and here, on the same sentences."""
    from transformers import AutoModel

    net = bt.from_pretrained("minilm")
    model = AutoModel.from_pretrained(find_package_path("minilm"), attn_implementation=attention).eval()
    module = net.module().eval()
    x: Any
    mask: Any
    if long:
        torch.manual_seed(0)
        x, mask, given = torch.randint(1000, 30000, (8, 128)), None, None
    else:
        batch = net.batch(SENTENCES[:32])
        x, mask, given = batch.x[""], (batch.mask or {})[""], batch.given
    options = {} if mask is None else {"attention_mask": mask.long()}

    def run_peer() -> object:
        with torch.no_grad():
            return model(x, output_attentions=attentions, **options)

    def run_module() -> object:
        with torch.no_grad():
            return module(x, mask, given=given, want=outputs)

    present = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(run_module()["x_6"][present], run_peer()[0][present], rtol=1e-4, atol=1e-4)  # type: ignore[index]
    return run_peer, run_module


def _compare(name: str, peer: Callable[[], object], actual: Callable[[], object], target: float) -> list[Figure]:
    """Return the figures of our times, theirs, their ratio and the limit."""
    spent = time_calls({"ours": actual, "theirs": peer}, runs=41, warm=5)
    return [
        figure("compiled net", spent["ours"], "s"),
        figure(name, spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=target),
        *measure_limit(actual, spent["ours"]),
    ]
