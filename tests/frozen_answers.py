"""Answers of all cases of `tests/cases.py` by the public interface, which are stored in `tests/frozen`.

    python -m tests.frozen_answers --check                        print the answers that differ from the stored ones
    python -m tests.frozen_answers --check --only sweeps paths    some questions; with `--case sprinkler` some cases
    python -m tests.frozen_answers --write --only plots           store the answers anew, because they had to change

Each question has a file with a float64 vector for each case, and its labels and texts as packed JSON. Of large arrays
it has random projections, of long texts and of files hashes. Errors of the library are answers too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch.distributions import Distribution

import bnet_transformer as bt
from bnet_transformer.attention import damage  # noqa: F401 (questions are expressions)
from bnet_transformer.interventions import Mean, Noise, Shift, Zero  # noqa: F401
from tests.cases import CASES, VOCABULARY, Case
from tests.plot_examples import EXAMPLES, build

FOLDER = Path(__file__).parent / "frozen"
TOLERANCE = 1e-10
MAX_NUMBERS, PROJECTIONS = 24, 8
LABELS = "labels of all numbers, and texts"
MAX_TEXT = 120  # characters

Record = dict[str, str | np.ndarray]


# the cases


@dataclass(frozen=True, eq=False)
class Subject:
    """A case, and the parts of it to which questions refer."""

    case: Case

    @cached_property
    def net(self) -> bt.BNet:
        """The net with random parameters of NumPy: those of torch depend on the vector instructions of the CPU."""
        net, draw = self.case.net, np.random.default_rng(0).standard_normal
        names = sorted(net.network.learnable)
        return net.replace(
            {name: net.parameters[name].round() + 0.3 * draw(net.parameters[name].shape) for name in names}
        )

    @cached_property
    def s(self) -> bt.Sentence:
        return self.net.sentence(self.case.text)

    @property
    def evidence(self) -> Mapping[str, object]:
        return self.case.evidence

    @cached_property
    def observed(self) -> bt.Sentence:
        return self.s.observe(self.evidence)

    @cached_property
    def done(self) -> bt.Sentence:
        return self.s.do({self.middle: 0})

    @property
    def shifted(self) -> bt.Sentence:
        return self.s.do({self.middle: Shift(torch.ones(self.nodes[self.middle]["shape"]).double())})

    @cached_property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """The attributes of all nodes, with parents before children."""
        attributes = self.s.graph(limit=None).nodes
        return {name: attributes[name] for name in self.s.nodes}

    @cached_property
    def random(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node["kind"] == "stochastic"]

    @cached_property
    def discrete(self) -> list[str]:
        return [name for name in self.random if self.nodes[name]["tpm"] != "Normal"]

    @cached_property
    def readouts(self) -> list[str]:
        return [name for name in self.random if not self.s.children(name)]

    @cached_property
    def functions(self) -> list[str]:
        """The nodes that are functions of the words."""
        return [
            name for name, node in self.nodes.items() if node["kind"] == "deterministic" and node["word"] is not None
        ]

    @cached_property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(self.nodes[name]["role"] for name in self.functions))

    @property
    def last(self) -> str:
        """The last random node, if there is one."""
        return (self.discrete or self.random or self.functions)[-1]

    @property
    def ends(self) -> tuple[str, str]:
        """The first and the last node."""
        return self.s.nodes[0], self.s.nodes[-1]

    @property
    def middle(self) -> str:
        """A node on the way from the words to the readouts."""
        names = self.functions or self.random
        return names[len(names) // 2]

    def get_group(self, name: str) -> str:
        """The name of a node without its indices of words and plates."""
        return "_".join(name.split("_")[: -len(self.nodes[name]["index"])]) if self.nodes[name]["index"] else name

    @cached_property
    def texts(self) -> list[Any]:
        return [vary(self.case.text, k) for k in range(3)]

    @cached_property
    def examples(self) -> dict[str, Any]:
        """Two pairs of sentences, and a metric."""
        if self.case.text is None:
            one, two = (self.s.do({self.random[0]: k}) for k in (0, 1))
            return {"clean": [one, two], "corrupt": [two, one], "metric": self.metric}
        one, two, three = map(self.net.sentence, self.texts)
        return {"clean": [one, two], "corrupt": [two, three], "metric": self.metric}

    @property
    def pair(self) -> dict[str, Any]:
        """The first of these pairs."""
        return {**self.examples, "clean": self.examples["clean"][0], "corrupt": self.examples["corrupt"][0]}

    @property
    def metric(self) -> Any:
        """The log odds of two states of a readout, or else an entry of the last node."""
        if readouts := [name for name in self.readouts if name in self.discrete]:
            return {readouts[-1]: (0, 1)}
        return self.get_entry((self.functions or self.random)[-1])

    def get_entry(self, node: str) -> Any:
        """A metric: the first entry of a node."""
        return eval(f"lambda {node}: {node}.flatten(1)[:, 0]")

    @cached_property
    def data(self) -> list[Any]:
        """Six sentences with drawn observations."""
        rows = []
        for k in range(6):
            text = self.texts[k % 3]
            states = self.net.sentence(text).sample(seed=k).states
            row = dict(text) if isinstance(text, Mapping) else {} if text is None else {"": text}
            for group in dict.fromkeys(map(self.get_group, self.readouts)):
                nodes = [name for name in self.random if self.get_group(name) == group]
                if not {*nodes} <= {*self.readouts}:
                    continue
                indices = [self.nodes[name]["index"] for name in nodes]
                shape = [1 + max(axis) for axis in zip(*indices, strict=True)]
                values = torch.cat([states[name] for name in nodes])
                row[group] = values.reshape([*shape, *values.shape[1:]])
            rows.append(row)
        return rows


def vary(text: Any, k: int) -> Any:
    """The text with its words rotated by k and another last word, so that sums over its words differ too."""
    if isinstance(text, Mapping):
        return {stack: vary(part, k) for stack, part in text.items()}
    if isinstance(text, str):
        words = text.split()
        return " ".join(vary(words, k)) if len(words) > 1 else VOCABULARY[(VOCABULARY.index(text) + k) % 3]
    if text is None or k == 0:
        return text
    words = [*text[k % len(text) :], *text[: k % len(text)]]
    return [*words[:-1], words[0]]


# computations of several lines


def map_names(names: Iterable[str], compute: Callable[[str], object]) -> dict[str, object]:
    """An answer for each name."""
    return {name: attempt(partial(compute, name)) for name in names}


def attempt(compute: Callable[[], object]) -> object:
    """The result, or the error: of the library, or an IndexError because the case has no such node."""
    torch.manual_seed(0)
    try:
        return compute()
    except Exception as error:
        return error


def get_fields(result: object, names: str) -> dict[str, object]:
    """Some attributes of a result."""
    return {name: getattr(result, name) for name in names.split()}


def run_module(x: Subject) -> object:
    """The output of the compiled net, and its gradient."""
    module, batch = x.net.module(), x.net.batch([x.case.text, *x.texts[1:]])
    output = module(batch.x, batch.mask, given=batch.given)
    if output.requires_grad:
        output.flatten().cumsum(0).sum().backward()  # weights that differ
    return [output, join({name: p.grad for name, p in module.named_parameters() if p.grad is not None})]


def sweep(examples: Mapping[str, Any], **options: Any) -> object:
    """The outcomes of a sweep."""
    return get_fields(bt.sweep(**{**examples, **options}), "axes labels outcomes clean corrupt")


def search(examples: Mapping[str, Any], **options: Any) -> object:
    """A circuit and its measures; by default its edges are arrows of groups of nodes."""
    circuit = bt.circuit(**{**examples, "threshold": "13%", "over": ("slice", "head"), **options})
    return [circuit, get_fields(circuit, "edges candidates faithfulness distance")]


def measure_curves(examples: Mapping[str, Any], scores: Any, **options: Any) -> object:
    """The curves of a ranking of edges."""
    options |= {"shares": (0.1, 0.5, 1), "resamples": 20}
    curves = bt.faithfulness_curves(**examples, scores=scores, **options)
    return [curves, curves.summary()]


def fit(x: Subject, method: object, **options: Any) -> object:
    """A fit, and its answers about the data."""
    fitted = bt.fit(x.net, x.data, method=method, spread=1.0, progress=False, **options)
    result = get_fields(fitted, "converged notes bounds restart_densities khat log_marginal_likelihood")
    result |= {"parameters": join(fitted.net.parameters), "samples": join(fitted.samples)}
    questions = ("log_likelihood", "predict", "responsibilities")
    return result | map_names(questions, lambda question: getattr(fitted, question)(x.data))


def train(net: bt.BNet, data: object, **options: Any) -> object:
    """The losses and the parameters of a net after three steps."""
    trained = bt.train(net, data, steps=3, batch=2, progress=False, **options)
    return [trained.losses, trained.held_out, join(trained.net.parameters)]


def generate(x: Subject, **options: Any) -> object:
    """Four new words after the text of the case."""
    return get_fields(x.net.generate(x.case.text, length=4, **options), "words scores log_probs states")


def draw(subject: Any, suffix: str, **options: Any) -> bytes:
    """The bytes of a figure; of a page without style and script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"figure.{suffix}"
        bt.draw(subject, path, **options)
        content = path.read_bytes()
    pattern = rb'<script id="bnet-\w+" type="[^"]*">.*?</script>'
    return b"".join(re.findall(pattern, content, re.DOTALL)) if suffix == "html" else content


def save_and_load(net: bt.BNet) -> object:
    """The parameters of a net from a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # errors name the path
        net.save("net.safetensors")
        return join(bt.load("net.safetensors").parameters)


def plot(name: str) -> object:
    """The bytes of a plot, and what a notebook and a table show of its result."""
    result: Any = build(name)
    stream = io.BytesIO()
    bt.plot(result, **EXAMPLES[name].options).savefig(stream, format="svg")
    shown = result._repr_html_() if hasattr(result, "_repr_html_") else repr(result)
    shown = re.sub(r"\bin [\d.,]+ seconds?\b", "in some seconds", shown)  # the time of a calibration
    return [stream.getvalue(), shown.encode(), {"frame": result if hasattr(result, "to_dataframe") else None}]


def join(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All values in one vector."""
    return torch.cat([torch.zeros(0), *(values[name].flatten() for name in sorted(values))])


# the questions


FIRST_ORDER = bt.Gradient()
NOISE = {"method": FIRST_ORDER, "direction": "noise"}
ALL_HEADS = {"draws": 50, "progress": False}
WINDOW = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "values": (
        "map_names(x.nodes, x.s.__getitem__)",
        "map_names(x.roles, x.s.__getitem__)",
        "map_names([*x.functions, *x.random][-6:], x.done.__getitem__)",
        "map_names([*x.functions, *x.random][-3:], x.shifted.__getitem__)",
        "map_names(x.functions[-3:], x.observed.__getitem__)",
        "map_names(x.random, x.s.tpm)",
        "map_names(x.readouts, x.done.tpm)",
        "map_names(x.random, x.s.labels)",
    ),
    "compiled": ("run_module(x)",),
    "posteriors": (
        "map_names(x.random, x.s.posterior)",
        "map_names(x.random, x.observed.posterior)",
        "map_names(map(x.get_group, x.discrete), lambda group: x.observed.posteriors(group).probabilities)",
        "x.done.posterior(x.discrete[0])",
        "x.observed.posterior(x.discrete[:3])",
        "x.observed.posterior(x.discrete[-2:])",
        "x.s.log_prob(x.evidence)",
        "x.s.log_prob(x.evidence, budget=1)",
        "x.s.log_prob({x.functions[-1]: x.s[x.functions[-1]].reshape(-1, 4)[0]})",
        "dict(x.s.top(x.discrete[-1], 2, x.evidence))",
    ),
    "explanations": (
        "get_fields(x.s.most_probable(x.evidence, count=4), 'nodes states log_probs shares')",
        "get_fields(x.s.marginal_map(x.discrete[:2], x.evidence, count=4), 'nodes states log_probs shares')",
        "x.s.counterfactual(x.readouts[-1], {x.middle: 0}, x.evidence)",
        "x.s.counterfactual(x.readouts[0], {x.discrete[0]: 1}, x.evidence)",
        "x.s.counterfactual(x.functions[-1], {x.discrete[0]: 1}, x.evidence)",
        "x.s.counterfactual(x.functions[-1], {x.discrete[0]: 1}, x.evidence).values",
        "x.s.sample(5, x.evidence, seed=3).states",
        "x.s.sample(3, seed=1).states",
        "x.net.sample(3, words=2, start='the', seed=1).states",
    ),
    "algorithms": (
        "map_names(SINGLE, lambda name: x.s.explain(name, x.last).algorithm)",
        "map_names(SINGLE, lambda name: x.observed.explain(name, x.last).algorithm)",
        "map_names(SINGLE, lambda name: x.done.explain(name, x.last).algorithm)",
        "map_names(QUERIES, lambda name: x.s.explain(name).algorithm)",
        "map_names(QUERIES, lambda name: x.observed.explain(name).algorithm)",
        "x.observed.explain('posteriors', x.get_group(x.last)).algorithm",
        "x.observed.explain('marginal_map', [x.last]).algorithm",
        "x.observed.explain('counterfactual', x.last, {}).algorithm",
        "bt.explain('fit', x.net, x.data).algorithm",
        "map_names(['arrows', 'edges', *x.roles[-1:]], lambda at: bt.explain('sweep', **x.pair, at=at).algorithm)",
    ),
    "attention": (
        "x.s.attention()",
        "x.s.attention(-1)",
        "x.observed.attention(0)",
        "x.done.attention(-1)",
        "x.s.reads().matrix",
        "x.s.reads(evidence=x.evidence, residual=0.3)",
        "x.s.reads(method='flow').matrix",
        "x.s.reads(0, head=0).matrix",
        "get_fields(x.s.tan('words'), 'kind nearly class_box missing')",
        "get_fields(x.s.tan('roles'), 'kind nearly class_box missing')",
        "get_fields(x.s.tan_tree(0, x.evidence), 'parents mass')",
        "x.net.tan(x.texts, [0, 1, 1])",
    ),
    "structure": (
        "list(x.nodes)",
        "list(x.net.graph().edges)",
        "list(x.s.graph(limit=None).edges)",
        "repr(list(x.nodes.values()))",
        "[weight or 0.0 for *_, weight in x.s.graph(attention=True, limit=None).edges(data='weight')]",
        "map_names(x.nodes, lambda name: len(x.s.blanket(name)))",
        "x.s.ancestors(x.ends[1])",
        "str(x.s.active_trail(*x.ends))",
        "x.s.minimal_separator(*x.ends)",
        "x.s.minimal_cut(*x.ends)",
        "get_fields(x.s.separated(*x.ends, verify=True), 'dependence over_choices over_roots')",
        "get_fields(x.s.separated(*x.ends, x.middle, deterministic=True), 'x y given')",
        "x.s.shrink(lambda name: name[0]).boxes",
        "x.net.cost(3 if x.case.text else None)",
        "map_names(['word', 'row', 'column', 'einstein'], lambda form: x.net.equations(form).latex)",
        "x.net.edges()",
    ),
    "sweeps": (
        "sweep(x.pair, at=x.roles)",
        "sweep(x.examples, at=x.roles[-4:], direction='noise')",
        "sweep(x.examples, at=x.roles[-1], over='word')",
        "sweep(x.pair, at=x.functions[::5])",
        "sweep(x.pair, at={'both': x.functions[-3:], 'one': [x.middle]})",
        "sweep(x.pair, at='j')",
        "sweep(x.pair, at=x.roles[-4:], words={0: 1})",
        "sweep(x.examples, at=x.roles[-4:], clean=Zero())",
        "sweep(x.examples, at=x.roles[-4:], clean=Mean(x.examples['clean']))",
        "sweep(x.pair, at=x.roles[-4:], clean=Noise(0.5))",
        "sweep(x.examples, at=x.roles, method=FIRST_ORDER)",
        "sweep(x.pair, at=x.roles[-4:], method=bt.Gradient(steps=3))",
        "sweep(x.pair, at=x.roles[-4:], **NOISE)",
        "sweep(x.pair, at=x.roles[-4:], metric=x.get_entry(x.middle))",
        "bt.mediation(**x.examples, through=x.roles[-1])",
        "bt.sweep(**x.pair, at=x.roles[-1]).compare(bt.sweep(**x.pair, at=x.roles[-1], method=FIRST_ORDER))",
    ),
    "paths": (
        "sweep(x.pair, at='arrows')",
        "sweep(x.pair, at='arrows', direction='noise')",
        "sweep(x.pair, at='arrows', method=FIRST_ORDER)",
        "sweep(x.pair, at='v -> a')",
        "sweep(x.pair, at='v -> a -> x')",
        "sweep(x.pair, at=[f'{x.middle} -> {x.s.children(x.middle)[0]}'])",
        "sweep(x.pair, at='edges')",
        "sweep(x.examples, at='edges', direction='noise')",
        "sweep(x.pair, at='edges', clean=Zero())",
        "sweep(x.pair, at='edges', method=FIRST_ORDER)",
        "sweep(x.pair, at='edges', **NOISE)",
        "sweep(x.pair, at='edges', direction='noise', method=bt.Gradient(steps=3, rule='left'))",
        "sweep(x.pair, at='edges', direction='noise', method=bt.Gradient(steps=3, rule='activations'))",
    ),
    "circuits": (
        "search(x.examples)",
        "search(x.examples, direction='denoise')",
        "search(x.pair, over=None, candidates='v -> a')",
        "search(x.examples, at='edges', over=None)",
        "search(x.pair, at='edges', over=None, direction='both')",
        "search(x.examples, threshold=None, edges=['* -> a_*'])",
        "measure_curves(x.pair, bt.sweep(**x.pair, at='arrows', over=('slice',)), over=('slice',))",
        "measure_curves(x.pair, bt.sweep(**x.pair, at='edges'), at='edges')",
        "bt.circuit(**x.pair, threshold='50%', over=('slice', 'head')).test(draws=5).to_dataframe().drop(columns='p')",
    ),
    "residual_stream": (
        "x.s.lens(top=2)",
        "get_fields(x.observed.lens(top=2), 'kl entropy')",
        "bt.fit_lens(x.net, x.texts, steps=2)",
        "x.s.lens(tuned=bt.fit_lens(x.net, x.texts, steps=2)).kl",
        "x.s.contributions(x.ends[1])",
        "x.s.contributions(x.ends[1], (0, 1), exact=True)",
        "x.s.contributions(x.ends[1], 0, paths=2)",
        "x.s.contributions([name for name in x.nodes if name.startswith('j')][-1])",
        "x.s.contributions(x.functions[-1], torch.ones(x.nodes[x.functions[-1]]['shape']))",
    ),
    "heads": (
        "bt.inclusion(x.net, x.texts, **ALL_HEADS)",
        "bt.inclusion(x.net, x.data, **ALL_HEADS)",
        "bt.inclusion(x.net, x.texts, method='gibbs', rounds=8, **ALL_HEADS)",
        "bt.inclusion(x.net, x.texts, method='svi', rounds=3, **ALL_HEADS)",
        "damage(bt.inclusion(x.net, x.texts, **ALL_HEADS), progress=False)",
        "x.s.reads(inclusion=bt.inclusion(x.net, x.texts, **ALL_HEADS)).matrix",
        "bt.roles(x.net, x.texts, draws=50)",
    ),
    "fits": (
        "fit(x, bt.EM(restarts=2, steps=3))",
        "fit(x, bt.EM(restarts=2, steps=3, optimizer='first-order'))",
        "fit(x, bt.MAP(restarts=2, steps=3))",
        "fit(x, bt.MAP(restarts=3, steps=4, optimizer='first-order'), held_out=x.data[:2])",
        "fit(x, bt.SVI(steps=3, draws=4))",
    ),
    "samplers": (
        "fit(x, bt.Laplace(restarts=1, draws=20))",
        "fit(x, bt.SVI(steps=3, draws=4, choices='sampled'))",
        "fit(x, bt.NUTS(chains=1, draws=3, warmup=3))",
        "bt.fit(x.net, x.data, method=bt.MAP(steps=3, restarts=2), progress=False).heads",
        "bt.calibrate(x.net, bt.SVI(steps=1, draws=9), x=x.texts, replications=20, spread=1.0)",
    ),
    "training": (
        "train(x.net, x.texts, held_out=x.texts)",
        "train(x.net, x.data, smoothing=0.1, optimizer=bt.AdamW(rate=0.01))",
    ),
    "generation": (
        "generate(x)",
        "generate(x, method='beam', beams=3)",
        "generate(x, method='sample', seed=1, temperature=0.8, top_k=2)",
        "generate(x, method='sample', seed=2, top_p=0.9)",
        "generate(x, method='sample', seed=2, choices='draw')",
        "generate(x, do={x.get_group(x.middle): Zero()})",
        "generate(x, do={x.get_group(x.functions[-1]): Shift(torch.ones(1))}, do_from='new')",
        "x.net.iterate(WINDOW, 3)",
        "x.net.iterate(WINDOW[:, :2], 3)",
    ),
    "figures": (
        "map_names(['nodes', 'words', 'folded'], lambda detail: draw(x.s, 'svg', detail=detail))",
        "draw(x.s, 'svg', theme='dark', highlight=[x.middle])",
        "draw(x.s, 'svg', width='column')",
        "draw(x.s, 'svg', weights=False, slices=0, legend=False)",
        "draw(x.s, 'svg', detail='words', min_weight=0.3)",
        "map_names(['tex', 'dot', 'json', 'html'], lambda suffix: draw(x.observed, suffix))",
        "[float(number) for number in re.findall(r'-?[0-9]+[.][0-9e-]+', x.observed.to_bif())]",
        "map_names(['svg', 'tex', 'dot', 'json'], lambda suffix: draw(x.net, suffix))",
        "draw(x.s.tan_tree(), 'svg')",
        "draw(x.s.tan('roles'), 'svg')",
        "draw(x.observed.reads(), 'svg')",
        "save_and_load(x.net)",
    ),
    "plots": ("plot(x)",),
}
RENAMED = {  # the expressions of today for stored labels
    "x.s.log_prob(x.evidence, budget=1)": "x.s.limits(budget=1).log_prob(x.evidence)",
    "get_fields(x.s.marginal_map(x.discrete[:2], x.evidence, count=4), 'nodes states log_probs shares')": (
        "get_fields(x.s.most_probable(x.evidence, nodes=x.discrete[:2], count=4), 'nodes states log_probs shares')"
    ),
    "x.observed.explain('marginal_map', [x.last]).algorithm": (
        "x.observed.explain('most_probable', nodes=[x.last]).algorithm"
    ),
    "[float(number) for number in re.findall(r'-?[0-9]+[.][0-9e-]+', x.observed.to_bif())]": (
        "[float(number) for number in re.findall(r'-?[0-9]+[.][0-9e-]+', draw(x.observed, 'bif').decode())]"
    ),
}
SINGLE = ("value", "tpm", "posterior", "top")
QUERIES = ("attention", "most_probable", "log_prob", "sample", "reads")
SAMPLED = ("chapter, two slices", "one word", "sprinkler", "sites", "hidden Markov")  # the others take long
OF_ONE_CPU = ("fits", "samplers", "plots")  # steps enlarge rounding errors, and float32 draws depend on the CPU
TOLERANCES = {"fits": 1e-6, "samplers": 1e-6, "training": 1e-8}


# records of answers


def list_subjects(question: str) -> dict[str, Any]:
    """The subjects of a question by name: the cases, or the examples of plots."""
    if question == "plots":
        return {name: name for name in EXAMPLES}
    return {case.name: Subject(case) for case in CASES if question != "samplers" or case.name in SAMPLED}


def answer_question(question: str, subject: Any) -> Record:
    """The answers to a question about a subject."""
    record: Record = {}
    names = {**globals(), "x": subject}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expression in QUESTIONS[question]:
            record |= flatten(attempt(partial(eval, RENAMED.get(expression, expression), names)), expression)
    return record


def flatten(answer: Any, label: str) -> Iterator[tuple[str, str | np.ndarray]]:
    """The texts and float64 arrays of an answer, with their labels."""
    if isinstance(answer, Exception):
        answer = f"{type(answer).__name__}: {answer}"
    if isinstance(answer, Distribution):
        answer = {name: getattr(answer, name) for name in ("probs", "mean", "stddev") if hasattr(answer, name)}
    if hasattr(answer, "to_dataframe"):
        answer = answer.to_dataframe()
    if isinstance(answer, pd.DataFrame):
        answer = {"rows": list(answer.index), **{str(name): list(column) for name, column in answer.items()}}
    if isinstance(answer, torch.Tensor):
        answer = answer.detach().numpy()
    if isinstance(answer, np.ndarray | list | tuple) and is_numeric(answer):
        yield label, shrink(np.array(answer, dtype=np.float64))
    elif isinstance(answer, Mapping):
        for name, part in answer.items():
            yield from flatten(part, f"{label}, {name}")
    elif isinstance(answer, list | tuple) and any(
        isinstance(part, PARTS) or hasattr(part, "to_dataframe") for part in answer
    ):
        for k, part in enumerate(answer):
            yield from flatten(part, f"{label}, {k}")
    elif isinstance(answer, bool | int | float):
        yield label, shrink(np.array(answer, dtype=np.float64))
    else:
        yield label, shorten(answer if isinstance(answer, str | bytes) else repr(answer))


PARTS = torch.Tensor, np.ndarray, Mapping, pd.DataFrame, list, bytes


def is_numeric(values: Any) -> bool:
    """Whether values are numbers in an array of any dimensions."""
    try:
        return np.asarray(values).dtype.kind in "biuf"
    except (ValueError, TypeError, RuntimeError):
        return False


def shorten(text: str | bytes) -> str:
    """The text, or the hash of a long one."""
    if isinstance(text, str) and len(text) <= MAX_TEXT:
        return text
    start = text.partition(":")[0] + ": " if isinstance(text, str) and "Error: " in text[:40] else ""
    return f"{start}sha256 {hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]}"


def shrink(values: np.ndarray) -> np.ndarray:
    """The values, or random projections of many values, after their shape."""
    numbers = np.nan_to_num(values, nan=1e3, posinf=2e3, neginf=-2e3).ravel()
    if values.size > MAX_NUMBERS:
        numbers = project(values.size) @ numbers / values.size**0.5
    return np.concatenate([values.shape, numbers])


@cache
def project(size: int) -> np.ndarray:
    """A fixed matrix of normal random numbers."""
    return np.random.default_rng(size).standard_normal((PROJECTIONS, size))


# files


CPU = torch.backends.cpu.get_cpu_capability()  # such as AVX2


def get_path(question: str) -> Path:
    """The file of a question."""
    return FOLDER / f"{question}.safetensors"


def is_of_other_cpu(question: str) -> bool:
    """Whether the stored answers depend on the CPU and were written on one of another kind."""
    with safe_open(get_path(question), "np") as file:
        return question in OF_ONE_CPU and file.metadata()["cpu"] != CPU


def write(question: str, records: Mapping[str, Record]) -> None:
    """Store the records of all subjects."""
    numbers, labels = {}, {}
    for name, record in records.items():
        arrays = [item for item in record.values() if not isinstance(item, str)]
        numbers[name] = np.concatenate([np.zeros(0), *arrays])
        labels[name] = {label: item if isinstance(item, str) else len(item) for label, item in record.items()}
    packed = zlib.compress(json.dumps(labels).encode(), 9)
    save_file({**numbers, LABELS: np.frombuffer(packed, np.uint8)}, get_path(question), {"cpu": CPU})


@cache
def read(question: str) -> dict[str, Record]:
    """The stored records of all subjects."""
    numbers = load_file(get_path(question))
    labels = json.loads(zlib.decompress(numbers[LABELS].tobytes()))
    records: dict[str, Record] = {}
    for name, items in labels.items():
        ends = np.cumsum([0 if isinstance(item, str) else item for item in items.values()])
        parts = np.split(numbers[name], ends[:-1])
        records[name] = {
            label: item if isinstance(item, str) else part
            for (label, item), part in zip(items.items(), parts, strict=True)
        }
    return records


def compare(question: str, expected: Record, actual: Record) -> Iterator[tuple[str, str]]:
    """Each label whose answer differs, and how."""
    tolerance = TOLERANCES.get(question, TOLERANCE)
    for label in dict.fromkeys([*expected, *actual]):
        old, new = expected.get(label, "no answer"), actual.get(label, "no answer")
        if isinstance(old, str) or isinstance(new, str) or old.shape != new.shape:
            if not np.array_equal(old, new):
                yield label, f"{old} -> {new}"
        elif not np.allclose(new, old, rtol=tolerance, atol=tolerance):
            yield label, f"differs by up to {np.abs(new - old).max():.1e}"


def main() -> int:
    """Check or write the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--check", action="store_true")
    modes.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="QUESTION", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--case", nargs="+", metavar="CASE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = 0
    for question in options.only:
        if options.check and is_of_other_cpu(question):
            print(f"{question:16} was written on another kind of CPU; write it from a commit before the change")
            continue
        start = time.perf_counter()
        subjects = {name: x for name, x in list_subjects(question).items() if name in (options.case or [name])}
        records = {name: answer_question(question, subject) for name, subject in subjects.items()}
        if options.write:
            write(question, records)
        else:
            for name, record in records.items():
                for label, difference in compare(question, read(question)[name], record):
                    print(f"{question:16} {name:28} {label:28} {difference}")
                    count += 1
        print(
            f"{question:16} {sum(map(len, records.values())):6} answers {time.perf_counter() - start:6.1f} s",
            flush=True,
        )
    print(f"{count} answers differ" if options.check else f"written to {FOLDER}")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
