"""Indirect objects in SmolLM2: does it solve the task, which heads write the answer, and does a circuit suffice?

A prompt such as "When Mary and John went to the store, John gave a drink to" is completed by the indirect object, Mary,
and not by the repeated subject, John (Wang et al. 2023). Heads are chosen on prompts of eight templates and one half of
the names. All claims are evaluated on 208 prompts of eight other templates with the other names, half of them with the
indirect object first. In the corrupt prompt a third name replaces the repeated subject, so neither name is repeated.

A GPU is used if there is one.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.interventions import Mean
from bnet_transformer.interventions.sweep_results import Sweep
from experiments.result import Result

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL, LAST = "smollm2", 13  # every prompt has 14 words
TEMPLATES = {
    "chosen": (
        "When {A} and {B} went to the store, {S} gave a drink to",
        "After {A} and {B} got to the park, {S} handed a ball to",
        "While {A} and {B} were having their lunch, {S} passed the salt to",
        "At the party {A} and {B} talked, and {S} offered a cake to",
        "Last week {A} and {B} visited the museum. {S} showed a picture to",
        "In the morning {A} and {B} had breakfast, {S} passed the milk to",
        "Then {A} and {B} had a very long argument, and {S} apologized to",
        "Today {A} and {B} met at the station. {S} gave a ticket to",
    ),
    "held-out": (
        "Once {A} and {B} arrived at the beach, {S} threw a towel to",
        "Because {A} and {B} were very good friends, {S} sent a present to",
        "On Sunday {A} and {B} cooked some dinner. {S} brought some water to",
        "Before {A} and {B} left the small hotel, {S} returned the key to",
        "As {A} and {B} sat in the garden, {S} read a poem to",
        "During the meeting {A} and {B} disagreed, and {S} sent a note to",
        "In the library {A} and {B} studied math. {S} lent a pen to",
        "At the hospital {A} and {B} waited, and {S} told a story to",
    ),
}
NAMES_TEXT = {
    "chosen": (
        "Mary John Tom James Sarah Anna Peter Paul Emma Jack Alice David Lisa Kevin Laura Mark Simon Rachel Helen "
        "Martin Julia Robert Kate Alex Grace Henry Lucy Oliver Sophie Daniel Jane Adam"
    ),
    "held-out": (
        "Ben Chris Emily Eric Frank George Ian Jason Karen Linda Michael Nancy Rose Ryan Sam Scott Steven Susan Tim "
        "Tony William Amy Andrew Brian Carl Claire Dan Diana Edward Ellen Fred Hannah"
    ),
}
NAMES = {part: text.split() for part, text in NAMES_TEXT.items()}
PAIRS = 13  # pairs of names for each template, each in both orders: 208 prompts
SIZES = (0, 5, 10, 20, 40, 80, 160)  # numbers of heads of a circuit
RANDOM_CIRCUITS = 3
SHOWN = 12  # heads on the page
STRONGEST = 10  # heads whose attention is measured
ATTENDED = ("last to object", "last to first subject", "last to second subject", "second subject to word after first")


@dataclass(frozen=True)
class Prompts:
    """Prompts with their corrupt partners.

    Attributes:
        clean: The prompts.
        corrupt: The same prompts with a third name instead of the repeated subject.
        answers: The indirect object of each prompt.
        subjects: The subject of each prompt.
        is_first: Whether the indirect object precedes the subject.
    """

    clean: tuple[bt.Sentence, ...]
    corrupt: tuple[bt.Sentence, ...]
    answers: tuple[str, ...]
    subjects: tuple[str, ...]
    is_first: tuple[bool, ...]

    @property
    def metric(self) -> dict[str, tuple[list[int], ...]]:
        """The metric of sweeps: log P(indirect object) - log P(subject) of the next word."""
        return {f"y_{LAST}": tuple([get_state(name) for name in names] for names in (self.answers, self.subjects))}

    def take(self, selection: slice) -> Prompts:
        """Return some of the prompts."""
        return Prompts(*(getattr(self, name)[selection] for name in self.__dataclass_fields__))


@functools.cache
def load_net() -> bt.BNet:
    """Return the model, loaded once."""
    net: bt.BNet = bt.from_pretrained(MODEL)
    return net.to(DEVICE)


@functools.cache
def get_state(name: str) -> int:
    """Return the state of the next word that is a name after a space."""
    state = load_net().network.vocabularies[""].find(f" {name}")
    assert state is not None, name
    return state


@functools.cache
def create_prompts(part: str) -> Prompts:
    """Return the prompts of the chosen or of the held-out templates and names, with a fixed seed."""
    generator, net, columns = random.Random(part), load_net(), []
    for template, _ in itertools.product(TEMPLATES[part], range(PAIRS)):
        a, s, third = generator.sample(NAMES[part], 3)
        for first, second in ((a, s), (s, a)):
            clean, corrupt = (net.sentence(template.format(A=first, B=second, S=name)) for name in (s, third))
            assert len(clean.words) == len(corrupt.words) == LAST + 1, clean.words
            columns.append((clean, corrupt, a, s, first == a))
    return Prompts(*(tuple(column) for column in zip(*columns, strict=True)))


def get_log_odds(sentences: Sequence[bt.Sentence], prompts: Prompts) -> tuple[Tensor, list[bool]]:
    """Return log P(indirect object) - log P(subject) of each sentence, and whether the indirect object is likeliest."""
    values, is_top = [], []
    for sentence, answer, subject in zip(sentences, *prompts.metric[f"y_{LAST}"], strict=True):
        log_probs = sentence.tpm(f"y_{LAST}").logits.log_softmax(-1)
        values.append(log_probs[answer] - log_probs[subject])
        is_top.append(int(log_probs.argmax()) == answer)
    return torch.stack(values).detach().cpu(), is_top


def format_share(hits: Sequence[bool]) -> str:
    """Return a share with its exact 95% interval (Clopper and Pearson 1934)."""
    interval = binomtest(sum(hits), len(hits)).proportion_ci(method="exact")
    return f"{sum(hits) / len(hits):.1%} ({interval.low:.1%} to {interval.high:.1%})"


def accuracy() -> Result:
    """Evaluate the task on all prompts, by templates and by order."""
    rows = []
    for part in TEMPLATES:
        prompts = create_prompts(part)
        values, is_top = get_log_odds(prompts.clean, prompts)
        corrupt, _ = get_log_odds(prompts.corrupt, prompts)
        orders = {"both": [True] * len(values), "indirect object first": prompts.is_first}
        orders["subject first"] = [not first for first in prompts.is_first]
        for order, selected in orders.items():
            chosen = [k for k, is_selected in enumerate(selected) if is_selected]
            shares = [format_share([hits[k] for k in chosen]) for hits in ((values > 0).tolist(), is_top)]
            means = [f"{numbers[chosen].mean():.2f}" for numbers in (values, corrupt)]
            rows.append((part, order, str(len(chosen)), *shares, *means))
    head = ("templates and names", "order", "prompts", "P(object) > P(subject)", "object is likeliest")
    summary = (
        "How often SmolLM2-135M-Instruct completes a prompt with the indirect object, with exact 95% intervals, and "
        "the mean log odds of indirect object and subject, in nats, in the prompts and in the corrupt prompts."
    )
    return Result("smollm2 accuracy", summary, (*head, "log odds", "log odds, corrupt"), tuple(rows))


@functools.cache
def sweep_heads() -> Sweep:
    """Return the effect of the corrupt values of each head in the chosen prompts, exact."""
    prompts = create_prompts("chosen")
    over = ("slice", "group", "head")
    return bt.sweep(list(prompts.corrupt), list(prompts.clean), at="a", over=over, metric=prompts.metric)


def rank_heads() -> list[str]:
    """Return the patterns of all heads, in descending order of the absolute effect."""
    return [name for name, _ in sweep_heads().top(10_000)]


def heads() -> Result:
    """Rank the heads by three measures on the chosen prompts: exact effect, slope, contribution."""
    prompts, exact = create_prompts("chosen"), sweep_heads()
    over = ("slice", "group", "head")
    slopes = bt.sweep(
        list(prompts.corrupt), list(prompts.clean), at="a", over=over, metric=prompts.metric, method=bt.Gradient()
    )
    contributions = compute_contributions(prompts)
    rows = []
    for name in rank_heads():
        index = exact.index_of(name)
        effect = f"{exact.values[index]:+.3f} ± {exact.error[index]:.3f}"
        rows.append((name, effect, f"{slopes.values[index]:+.3f}", f"{contributions[name]:+.3f}"))
    total = float(exact.total.mean())
    summary = (
        f"What the log odds lose (negative) or gain if one head has its value of the corrupt prompt, on the 208 chosen "
        f"prompts: the exact effect with its standard error, and its estimate to first order. The log odds of the "
        f"corrupt prompts are lower by {-total:.2f}. Contribution: what the head adds to the difference of the two "
        f"logits directly, with the scale of the final norm held (`s.contributions`), a mean over the same prompts."
    )
    head = ("head", "effect", "to first order", "contribution")
    return Result("smollm2 heads", summary, head, tuple(rows), {}, tuple(range(SHOWN)))


def compute_contributions(prompts: Prompts) -> dict[str, float]:
    """Return the mean contribution of each head to the difference of the two logits, by the pattern of the head."""
    totals: dict[str, float] = {}
    for sentence, answer, subject in zip(prompts.clean, prompts.answers, prompts.subjects, strict=True):
        of = (get_state(answer), get_state(subject))
        result = sentence.contributions(f"logits_{LAST}", of=of)
        for writer, part in zip(result.writers, result.parts.tolist(), strict=True):
            if writer.kind == "attention":
                name = f"{writer.name}_*"
                totals[name] = totals.get(name, 0.0) + part / len(prompts.clean)
    return totals


def lens() -> Result:
    """Apply the logit lens to the last word of the held-out prompts."""
    prompts = create_prompts("held-out")
    columns: dict[str, list[Tensor]] = {"object": [], "subject": [], "rank": [], "kl": []}
    for sentence, answer, subject in zip(prompts.clean, prompts.answers, prompts.subjects, strict=True):
        result = sentence.lens()
        columns["object"].append(result.probability(get_state(answer))[:, LAST])
        columns["subject"].append(result.probability(get_state(subject))[:, LAST])
        columns["rank"].append(result.rank(get_state(answer))[:, LAST])
        columns["kl"].append(result.kl[:, LAST])
    tables = {name: torch.stack(rows).double() for name, rows in columns.items()}  # [prompt, slice]
    exceeds = tables["object"] > tables["subject"]
    rows = tuple(
        (
            state,
            f"{tables['object'][:, t].mean():.3f}",
            f"{tables['subject'][:, t].mean():.3f}",
            f"{exceeds[:, t].double().mean():.3f}",
            f"{tables['rank'][:, t].median():.0f}",
            f"{tables['kl'][:, t].mean():.2f}",
        )
        for t, state in enumerate(result.states)
    )
    summary = (
        "The logit lens at the last word of the held-out prompts, by state: the mean probabilities of the indirect "
        "object and of the subject, the share of prompts in which the object is more probable, the median rank of the "
        "object, and the mean KL divergence from the end in nats. " + " ".join(result.notes)
    )
    head = ("state", "P(object)", "P(subject)", "object more probable", "median rank", "KL from the end")
    return Result("smollm2 lens", summary, head, rows)


def roles() -> Result:
    """Measure what the strongest heads attend to and write, on the held-out prompts."""
    prompts, ranked = create_prompts("held-out"), rank_heads()[:STRONGEST]
    totals = {name: torch.zeros(len(ATTENDED) + 2, dtype=torch.float64) for name in ranked}
    for sentence, answer, subject in zip(prompts.clean, prompts.answers, prompts.subjects, strict=True):
        words = list(sentence.words)
        first = words.index(subject)
        second = words.index(subject, first + 1)
        pairs = [(LAST, words.index(answer)), (LAST, first), (LAST, second), (second, first + 1)]
        parts = [sentence.contributions(f"logits_{LAST}", of=get_state(name)) for name in (answer, subject)]
        for name in ranked:
            slice_, group, head = map(int, name.split("_")[1:4])
            attention = sentence.attention(slice_)[group, head]
            numbers = [float(attention[i, j]) for i, j in pairs]
            numbers += [float(part[name.removesuffix("_*")]) for part in parts]
            totals[name] += torch.tensor(numbers, dtype=torch.float64) / len(prompts.clean)
    rows = tuple((name, *(f"{value:+.2f}" for value in total.tolist())) for name, total in totals.items())
    summary = (
        f"The {STRONGEST} heads with the largest effects on the chosen prompts, measured on the 208 held-out prompts: "
        f"the mean attention of the last word to the indirect object, to the first and to the second occurrence of the "
        f"subject, the mean attention of the second occurrence to the word after the first one, and the mean "
        f"contribution of the head to the logits of the two names."
    )
    return Result("smollm2 roles", summary, ("head", *ATTENDED, "logit of object", "logit of subject"), rows)


def circuits() -> Result:
    """Ablate all heads outside a circuit on the held-out prompts, by values of the corrupt prompt and by means."""
    ranked = rank_heads()
    cells = {f"first {size}": ranked[size:] for size in SIZES}
    for draw in range(RANDOM_CIRCUITS):
        for size in (20, 40):
            order = random.Random(draw).sample(ranked, len(ranked))
            cells[f"random {size}, draw {draw + 1}"] = order[size:]
    cells |= {f"without the first {size}": ranked[:size] for size in (5, 10, 20)}
    outcomes = {
        kind: _ablate(cells, kind) for kind in ("values of the corrupt prompt", "means over the corrupt prompts")
    }
    full = get_log_odds(create_prompts("held-out").clean, create_prompts("held-out"))[0].mean()
    rows = []
    for k, name in enumerate(cells):
        columns = []
        for table in outcomes.values():
            empty = table[0].mean()
            faithfulness = float((table[k].mean() - empty) / (full - empty))
            columns += [f"{table[k].mean():+.2f}", f"{faithfulness:.2f}", format_share((table[k] > 0).tolist())]
        rows.append((name, *columns))
    summary = (
        f"The log odds of indirect object and subject on the 208 held-out prompts if all heads outside a circuit are "
        f"ablated at every word: by their values in the corrupt prompt (resample ablation), or by their means over the "
        f"corrupt prompts of the same template (mean ablation). Embeddings and feed-forward steps are not ablated. "
        f"`first k`: the k heads with the largest effects on the chosen prompts. Without an ablation the log odds are "
        f"{full:+.2f}. Faithfulness is (log odds - log odds with no head) / (log odds without an ablation - log odds "
        f"with no head), as means over the prompts; the share is that of log odds above 0."
    )
    head = ["circuit"]
    for kind in ("resample", "mean"):
        head += [f"log odds, {kind}", f"faithfulness, {kind}", f"P(object) > P(subject), {kind}"]
    return Result("smollm2 circuits", summary, tuple(head), tuple(rows))


def _ablate(cells: dict[str, list[str]], kind: str) -> Tensor:
    """Return the log odds of the held-out prompts with the heads of each cell ablated, `[cell, prompt]`."""
    prompts, size, parts = create_prompts("held-out"), 2 * PAIRS, []
    for start in range(0, len(prompts.clean), size):  # the prompts of one template
        part = prompts.take(slice(start, start + size))
        source = list(part.corrupt) if kind.startswith("values") else Mean(list(part.corrupt))
        result = bt.sweep(source, list(part.clean), at=cells, metric=part.metric, progress=False)
        parts.append(result.outcomes.cpu())
    return torch.cat(parts, 1)


EXPERIMENTS: dict[str, Callable[[], Result]] = {
    "smollm2-accuracy": accuracy,
    "smollm2-lens": lens,
    "smollm2-heads": heads,
    "smollm2-roles": roles,
    "smollm2-circuits": circuits,
}
