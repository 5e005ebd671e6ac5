"""The commands `fit` and `train`, which learn a net from sentences, or from sentences with targets after a tab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer._core.checks import is_integer
from bnet_transformer.cli.group import ApiOptions, Interrupted, SignatureCommand
from bnet_transformer.cli.io import (
    IMAGES,
    TABLES,
    Answer,
    Output,
    TextSource,
    format_table,
    load_model,
    make_config,
    split_stacks,
)
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.declare import Network
    from bnet_transformer.learning.fit import Fit
    from bnet_transformer.learning.loop import Checkpoints

UNOBSERVED = "_"
BUILDERS = "models/builders.py"
DECLARED_OPTIONS = ("dim", "heads", "slices", "per", "atoms", "key_dim", "value_dim", "residual", "prior")
OBSERVATIONS = {"next": "the next words", "words": "a word for each word", "label": "a label for each sentence"}
DECODER = {"dim": 32, "heads": 2, "slices": 2, "dropout": 0.0}  # the default options of a new decoder
DEFAULT_STEPS = 300
FIT_FIELDS = (
    *("method", "sentences", "restart", "finished", "converged", "approximate", "notes", "learned", "divergent"),
    *("bounds", "measured"),
)
TRAIN_OPTIONS = ("epochs", "batch", "smoothing", "start", "stop", "every", "seed", "device")


@dataclass(frozen=True)
class TextExamples:
    """Sentences and their `targets`: the text after the tab of each sentence, or None without tabs."""

    texts: tuple[str, ...]
    targets: tuple[str, ...] | None

    def infer_observed(self, requested: str | None) -> str:
        """Return the kind of the observations: "next" without targets, else "words" (one per word) or "label".

        Args:
            requested: The kind that `--observe` names; None to infer it.

        Raises:
            BNetError: The sentences do not have such targets.
        """
        if self.targets is None:
            if requested not in (None, "next"):
                hint = "Write the observations after a tab in each line"
                raise BNetError(f"--observe {requested} requires observations", hint=hint)
            return "next"
        if requested == "next":
            hint = "Remove the text after each tab, or use --observe words or label"
            actual = "observations after a tab"
            raise BNetError("--observe next", expected="lines without a tab", actual=actual, hint=hint)
        fits = [len(a.split()) == len(b.split()) for a, b in zip(self.texts, self.targets, strict=True)]
        if requested == "words" and not all(fits):
            k = fits.index(False)
            expected = "as many words after the tab as before it (_ for a word that is not observed)"
            raise BNetError(f"sentence {k}", expected=expected, actual=f"{self.texts[k]} | {self.targets[k]}")
        return requested or ("words" if all(fits) and any(" " in text for text in self.texts) else "label")

    def build_pairs(self, observed: str, network: Network) -> list[tuple[Any, Any]]:
        """Return pairs of a sentence and its observations; a number that is not a label or a word is an index.

        Args:
            observed: "next", "words" or "label".
            network: The net, which has words and labels.
        """
        if observed == "next":
            sentences = [text.split() for text in self.texts]
            for words in sentences:
                if len(words) < 2:
                    expected = "at least 2 words, because the next words are observed"
                    raise BNetError("sentence", expected=expected, actual=" ".join(words))
            return [(words[:-1], words[1:]) for words in sentences]
        known = {word for words in network.vocabularies.values() for word in words or ()}
        known.update(label for spec in network.specs for label in getattr(spec.tpm, "labels", None) or ())

        def parse_state(part: str) -> object:
            return part if part in known else -1 if part == UNOBSERVED else int(part) if is_integer(part) else part

        targets: Sequence[Any] = self.targets or ()
        states = [[*map(parse_state, t.split())] if observed == "words" else parse_state(t) for t in targets]
        return list(zip(self.texts, states, strict=True))


def read_examples(source: TextSource) -> TextExamples:
    """Return the sentences of the command line or of a file, split at the tab."""
    rows = source.read_columns()
    if all(len(row) == 1 for row in rows):
        return TextExamples(tuple(text for (text,) in rows), None)
    for k, row in enumerate(rows):
        if len(row) != 2 or not all(row):
            actual = f"{len(row)} parts in sentence {k}"
            raise BNetError("SENTENCES", expected="one tab in each sentence, or no tabs", actual=actual)
    return TextExamples(tuple(row[0] for row in rows), tuple(row[1] for row in rows))


@dataclass(frozen=True)
class RunOptions:
    """The options of checkpoints and of held-out sentences.

    Args:
        held_out: A file of held-out sentences, on which the run is evaluated.
        checkpoint: A folder for checkpoints.
        resume: Continue from the checkpoint with the same options.
        changed: Continue from the checkpoint; the rate and the number of steps may differ.
    """

    held_out: str | None = None
    checkpoint: str | None = None
    resume: bool = False
    changed: bool = False

    def make_checkpoints(self) -> Checkpoints | None:
        """The config of the checkpoints; None without a folder."""
        from bnet_transformer.learning.loop import Checkpoints

        if self.checkpoint is not None:
            return Checkpoints(self.checkpoint, "changed" if self.changed else self.resume)
        if self.resume or self.changed:
            option = "--resume" if self.resume else "--changed"
            raise BNetError(f"{option} requires --checkpoint", hint="Give the folder with --checkpoint")
        return None

    def make_interrupt(self, *messages: str) -> Interrupted:
        """The interrupt of a run; its message contains how to resume it."""
        messages += () if self.checkpoint is None else (f"use --resume to continue from {self.checkpoint}",)
        return Interrupted(": ".join(filter(None, ["interrupted", "; ".join(messages)])))


def _load_saved_net(model: str, declared: Mapping[str, Any]) -> BNet:
    """Load the net of `--model`; raise an error for options that declare a new net."""
    if declared:
        actual = ", ".join(f"--{name.replace('_', '-')}" for name in declared)
        raise BNetError(f"{actual} cannot be combined with --model", hint="These options declare a new net")
    return load_model(model)


@click.command(
    "fit",
    cls=SignatureCommand,
    short_help="Fit the heads of a net to text.",
    formats=(".fit", ".json", *IMAGES, ".safetensors"),
    declared=[ApiOptions("models/bayesuvius.py", ("BayesuviusOptions",), DECLARED_OPTIONS, "A new net: ", {"dim": 16})],
    options=[
        ApiOptions("learning/fit/methods.py", ("fit",), ("batch", "spread", "learn", "budget", "every", "seed")),
        ApiOptions("learning/fit/em.py", ("MAP", "EM")),
        ApiOptions("learning/fit/laplace.py", ("Laplace",)),
        ApiOptions("learning/fit/adam.py", ("IterativeMethod",)),
        ApiOptions("learning/fit/svi.py", ("SVI",)),
        ApiOptions("learning/fit/nuts.py", ("NUTS",)),
    ],
)
def fit(
    source: TextSource,
    output: Output,
    declared: dict[str, Any],
    options: dict[str, Any],
    run_options: RunOptions,
    model: str | None = None,
    observe: Literal["next", "words", "label"] | None = None,
    method: Literal["map", "em", "laplace", "svi", "nuts"] = "map",
) -> None:
    """Fit the heads of a new chapter net, or of a --model, to SENTENCES or to the lines of a --file.

    \b
    bnet-transformer fit -f sentences.txt --heads 3 -o net.safetensors
    bnet-transformer fit -f labelled.txt --observe label --method em -o net.safetensors -o heads.svg

    Args:
        model: A net to fit, instead of a new one.
        observe: The observations: the next words, or after a tab in each line a word for each word, or a label.
        method: Maximum a posteriori, expectation maximisation, the Laplace approximation, stochastic variational
            inference, or NUTS sampling.
    """
    data = read_examples(source)
    output.check()
    checkpoints = run_options.make_checkpoints()
    observed = data.infer_observed(observe)
    held_out = None if run_options.held_out is None else read_examples(TextSource((), run_options.held_out))
    if model is None:
        net = _build_net(data, observed, declared, options.get("seed", 0))
    else:
        net = _load_saved_net(model, declared)
        _check_splits_text(net, observed)
    from bnet_transformer.learning.fit import methods

    kind = type(methods.resolve_method(method))
    config = make_config(kind, options, tuple(methods.METHODS), f"--method {method}")
    if held_out is not None:
        options["held_out"] = held_out.build_pairs(held_out.infer_observed(observed), net.network)
    pairs = data.build_pairs(observed, net.network)
    fitted = methods.fit(net, pairs, method=config, checkpoints=checkpoints, **options)
    output.write("fit", [_make_answer(fitted, observed)], model=model, observed=observed)
    if not fitted.finished:
        raise run_options.make_interrupt("this is the best result so far")


def _build_net(data: TextExamples, observed: str, declared: dict[str, Any], seed: int) -> BNet:
    """Create a net of the chapter of Bayesuvius, with the words of the text and a readout for the observations."""
    from bnet_transformer.models.bayesuvius import bayesuvius
    from bnet_transformer.tpm import Categorical

    words = _list_words(data.texts)
    mask = "causal" if observed == "next" else None
    if observed == "next":
        readout = Categorical(len(words))
    else:
        targets = data.targets or ()
        labels = tuple(sorted({*(_list_words(targets) if observed == "words" else targets)} - {UNOBSERVED}))
        if not labels:
            raise BNetError("sentences", expected="at least one observation", actual="only _")
        readout = Categorical(len(labels), labels=labels, pool="mean" if observed == "label" else None)
    return bayesuvius(**{"dim": 16, **declared}, mask=mask, vocabulary=words, observe=readout, seed=seed)


def _list_words(texts: Sequence[str]) -> list[str]:
    """Return the distinct words of texts, in the order of their first occurrence."""
    return list(dict.fromkeys(word for text in texts for word in text.split()))


def _check_splits_text(net: BNet, observed: str) -> None:
    """Raise an error for a net without words, and for next words if the net does not split one text at spaces."""
    from bnet_transformer.data.batch import check_has_words

    check_has_words(net.network, "--model", "bt.fit")
    has_tokenizer = net.network.tokenizer is not None
    if observed == "next" and (has_tokenizer or len(net.network.graph.word_stacks) > 1):
        expected = "a net with one stack that splits text at spaces"
        actual = "a net with a tokenizer" if has_tokenizer else "a net with several stacks"
        raise BNetError("--model", expected=expected, actual=actual, hint="Use bt.fit in Python")


def _make_answer(fitted: Fit[BNet], observed: str) -> Answer:
    """The answer of a fit; it saves the fit to a `.fit` file, and the fitted net to any other file."""
    heads = {name: fitted.heads_of(name) for name in fitted.selectors}
    tables = {name: table.to_dataframe().reset_index() for name, table in heads.items()}
    more: dict[str, Any] = {"heads": tables, "effective": {name: table.effective for name, table in heads.items()}}
    more |= {"judged_on": fitted.evaluated_on, "judged_by": fitted.criterion}
    evaluated = f"evaluated on {fitted.evaluated_on} by the {fitted.criterion}"
    lines = [f"{fitted.sentences} sentences, {OBSERVATIONS[observed]}, by {fitted.method}; {evaluated}"]
    if fitted.bounds:
        lines.append(f"bound per sentence: {fitted.bounds[0]:.3f} at the start, {fitted.bounds[-1]:.3f} at the end")
    for name, table in heads.items():
        counts = f"{table.live} of {len(table.usage)} heads live, effective number {table.effective:.2f}"
        lines.append(f"{name}: {counts}")
        lines += format_table(tables[name])
    lines += [f"approximate: {fitted.approximate}"] if fitted.approximate else []
    lines += [f"note: {note}" for note in fitted.notes]
    save = lambda out: (fitted if out.lower().endswith(".fit") else fitted.net).save(out)  # noqa: E731
    return Answer(fitted, FIT_FIELDS, more, lines, save=save)


@click.command(
    "train",
    cls=SignatureCommand,
    short_help="Train a decoder, or a saved net.",
    formats=(*TABLES, *IMAGES, ".safetensors"),
    declared=[ApiOptions(BUILDERS, ("TransformerOptions",), (*DECODER, "hidden"), "A new decoder: ", DECODER)],
    options=[
        ApiOptions("learning/training.py", ("train",), TRAIN_OPTIONS),
        ApiOptions("learning/training.py", ("AdamW",), ("rate", "schedule", "warmup", "weight_decay", "clip")),
        ApiOptions("learning/training.py", ("EarlyStopping",), ("patience",)),
    ],
)
def train(
    source: TextSource,
    output: Output,
    declared: dict[str, Any],
    options: dict[str, Any],
    run_options: RunOptions,
    model: str | None = None,
    steps: int | None = None,
) -> None:
    """Train a new decoder, which predicts the next word, or a --model on SENTENCES or on the lines of a --file.

    A --model that does not predict the next word requires lines with the observations after a tab.

    \b
    bnet-transformer train -f sentences.txt --steps 500 -o net.safetensors

    Args:
        model: A net to train, instead of a new decoder.
        steps: The number of steps, by default 300 if --epochs is not given.
    """
    data = read_examples(source)
    held_out = None if run_options.held_out is None else read_examples(TextSource((), run_options.held_out))
    output.check()
    net = _build_decoder(data, declared, options) if model is None else _load_saved_net(model, declared)
    options["checkpoints"] = run_options.make_checkpoints()
    from bnet_transformer.learning import training

    options["optimizer"] = make_config(training.AdamW, options)
    options["early_stopping"] = make_config(training.EarlyStopping, options)
    options["steps"] = DEFAULT_STEPS if steps is None and "epochs" not in options else steps
    if held_out is not None:
        options["held_out"] = _make_examples(net, held_out)
    try:
        trained = training.train(net, _make_examples(net, data), **options)
    except KeyboardInterrupt as error:
        raise run_options.make_interrupt() from error
    count, losses = len(data.texts), trained.losses
    held_out_loss = f", held-out loss {trained.held_out[-1][1]:.3f}" if trained.held_out else ""
    loss = f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end{held_out_loss}"
    lines = [f"{trained.steps} steps on {count} sentences: {loss}"]
    fields = ("steps", "losses", "held_out")
    output.write("train", [Answer(trained, fields, {"sentences": count}, lines, save=trained.net.save)], model=model)


def _build_decoder(data: TextExamples, declared: dict[str, Any], options: dict[str, Any]) -> BNet:
    """Create a decoder with the words of the text and the start and stop words of `--start` and `--stop`."""
    if data.targets is not None:
        expected = "lines without tabs, because a new decoder predicts the next words"
        raise BNetError("SENTENCES", expected=expected, actual="lines with tabs")
    from bnet_transformer.models.transformer import decoder

    ends = [options[name] for name in ("start", "stop") if name in options]
    words = list(dict.fromkeys([*_list_words(data.texts), *ends]))
    return decoder(**DECODER | declared, vocabulary=words, seed=options.get("seed", 0))


def _make_examples(net: BNet, data: TextExamples) -> list[object]:
    """Return the sentences as arguments of `net.sentence`, or pairs of a sentence and its targets."""
    if data.targets is None:
        return [split_stacks(net, text) for text in data.texts]
    return list(data.build_pairs(data.infer_observed(None), net.network))
