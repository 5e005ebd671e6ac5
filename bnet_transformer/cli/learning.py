"""`bnet-transformer fit` and `train`: sentences, with what is observed of them behind a tab, to a net that learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.group import Interrupted
from bnet_transformer.cli.outputs import (
    PICTURE_SUFFIXES,
    TABLE_SUFFIXES,
    CommandResult,
    Output,
    format_table,
    make_plotter,
)
from bnet_transformer.cli.shared import TextSource
from bnet_transformer.cli.signatures import ForwardedOptions, SignatureCommand, is_integer
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.declare import Network
    from bnet_transformer.learning.checkpoint import Checkpoints
    from bnet_transformer.learning.fit import Fit

UNOBSERVED = "_"
DECLARED_OPTIONS = ("dim", "heads", "slices", "per", "atoms", "key_dim", "value_dim", "residual", "prior")
OBSERVED_DESCRIPTIONS = {
    "next": "the next words",
    "words": "a word for each word",
    "label": "a label for each sentence",
}
SMALL_DECODER = {"dim": 32, "heads": 2, "slices": 2, "dropout": 0.0}
DEFAULT_STEPS = 300
TRAIN_OPTIONS = ("epochs", "batch", "smoothing", "start", "stop", "every", "seed", "device")


@dataclass(frozen=True)
class TextExamples:
    """Sentences, and (`targets`) what stands behind the tab of each, where there is one."""

    texts: tuple[str, ...]
    targets: tuple[str, ...] | None

    def infer_observed(self, requested: str | None) -> str:
        """What is observed of a sentence: its next words; behind a tab a word for each of its words, or a label."""
        if self.targets is None:
            if requested not in (None, "next"):
                raise BNetError("--observe", expected="lines with a tab, and what is observed behind it", actual="none")
            return "next"
        if requested == "next":
            raise BNetError("--observe next", expected="lines without a tab", actual="what is observed behind one")
        each = [len(a.split()) == len(b.split()) for a, b in zip(self.texts, self.targets, strict=True)]
        if requested == "words" and not all(each):
            k = each.index(False)
            wanted_ = "as many words behind the tab as before it (_ for one that is not observed)"
            raise BNetError(f"sentence {k}", expected=wanted_, actual=f"{self.texts[k]} | {self.targets[k]}")
        return requested or ("words" if all(each) and any(" " in text for text in self.texts) else "label")

    def build_pairs(self, observed: str, network: Network) -> list[tuple[Any, Any]]:
        """Sentences with what is observed of each; a number that is a label or a word of the net is a name."""
        if observed == "next":
            parted = [text.split() for text in self.texts]
            for words in parted:
                if len(words) < 2:
                    raise BNetError(
                        "sentence", expected="at least 2 words, the second to be told", actual=" ".join(words)
                    )
            return [(words[:-1], words[1:]) for words in parted]
        known = {word for words in network.vocabularies.values() for word in words or ()}
        known.update(label for m in network.specs for label in getattr(m.tpm, "labels", None) or ())

        def parse_state(part: str) -> object:
            return part if part in known else -1 if part == UNOBSERVED else int(part) if is_integer(part) else part

        states = [
            list(map(parse_state, t.split())) if observed == "words" else parse_state(t) for t in self.targets or ()
        ]
        return list(zip(self.texts, states, strict=True))


def read_examples(source: TextSource) -> TextExamples:
    """The sentences of the command line or of a file, parted at the tab."""
    parted = source.read_columns()
    if all(len(parts) == 1 for parts in parted):
        return TextExamples(tuple(text for (text,) in parted), None)
    for k, parts in enumerate(parted):
        if len(parts) != 2 or not all(parts):
            got = f"{len(parts)} parts in sentence {k}"
            raise BNetError("SENTENCES", expected="one tab in each, or in none", actual=got)
    return TextExamples(tuple(parts[0] for parts in parted), tuple(parts[1] for parts in parted))


@dataclass(frozen=True)
class RunOptions:
    """Where a run is kept, and how it goes on.

    Args:
        held_out: A file of sentences by which the run is judged.
        checkpoint: A folder for checkpoints.
        resume: Go on from the checkpoint, as it began.
        changed: Go on with another rate, or number of steps, too.
    """

    held_out: str | None = None
    checkpoint: str | None = None
    resume: bool = False
    changed: bool = False

    def make_checkpoints(self) -> Checkpoints | None:
        """The config of the checkpoints; None without a folder."""
        from bnet_transformer.learning.checkpoint import Checkpoints

        if self.checkpoint is not None:
            return Checkpoints(self.checkpoint, "changed" if self.changed else self.resume)
        if self.resume or self.changed:
            raise BNetError("--resume", expected="--checkpoint with a folder", actual="none")
        return None

    def make_interrupt(self, *messages: str) -> Interrupted:
        """The interrupt of a run: what is kept, and how it goes on."""
        messages += () if self.checkpoint is None else (f"--resume goes on from {self.checkpoint}",)
        return Interrupted(": ".join(filter(None, ["interrupted", "; ".join(messages)])))


def _load_saved_net(model: str, declared: Mapping[str, Any]) -> BNet:
    """The net of a model, which is declared already."""
    if declared:
        got = ", ".join(f"--{name.replace('_', '-')}" for name in declared)
        raise BNetError("--model", expected="no option of a new net beside it", actual=got)
    return shared.load_model(model)


@click.command(
    "fit",
    cls=SignatureCommand,
    short_help="Fit the heads of a net to text.",
    formats=(".fit", ".json", *PICTURE_SUFFIXES, ".safetensors"),
    declared=[ForwardedOptions("models/bayesuvius.py", ("bayesuvius",), DECLARED_OPTIONS, "A new net: ", {"dim": 16})],
    options=[
        ForwardedOptions("learning/fit/methods.py", ("fit",), ("batch", "spread", "learn", "budget", "every", "seed")),
        ForwardedOptions("learning/fit/problem.py", ("MAP", "EM", "SVI", "NUTS")),
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
    method: Literal["map", "em", "svi", "nuts"] = "map",
) -> None:
    """Fit heads to SENTENCES, or to those of a --file: a new net of the chapter, or a --model.

    \b
    bnet-transformer fit -f sentences.txt --heads 3 -o net.safetensors
    bnet-transformer fit -f labelled.txt --observe label --method em -o net.safetensors -o heads.svg

    Args:
        model: A net to fit, in place of a new one.
        observe: The next words; or, behind a tab in each line, a word for each word, or a label.
        method: The greatest posterior density, expectation maximisation, variational inference, or samples.
    """
    data = read_examples(source)
    output.check()
    checkpoints = run_options.make_checkpoints()
    observed = data.infer_observed(observe)
    judges = None if run_options.held_out is None else read_examples(TextSource((), run_options.held_out))
    if model is None:
        net = _build_net(data, observed, declared, options.get("seed", 0))
    else:
        net = _load_saved_net(model, declared)
        _check_splits_text(net, observed)
    from bnet_transformer.learning.fit import methods as run

    how = shared.make_config(type(run.resolve_method(method)), options, tuple(run.METHODS), f"--method {method}")
    if judges is not None:
        options["held_out"] = judges.build_pairs(judges.infer_observed(observed), net.network)
    found = run.fit(net, data.build_pairs(observed, net.network), method=how, checkpoints=checkpoints, **options)
    output.write_result("fit", _make_result(found, observed), model=model, observed=observed)
    if not found.finished:
        raise run_options.make_interrupt("this is the best so far")


def _build_net(data: TextExamples, observed: str, declared: dict[str, Any], seed: int) -> BNet:
    """The chapter's net of a text: its words, and a readout of what is observed."""
    from bnet_transformer.models.bayesuvius import bayesuvius
    from bnet_transformer.tpm import Categorical

    words = _list_words(data.texts)
    mask = "causal" if observed == "next" else None
    if observed == "next":
        readout = Categorical(len(words))
    else:
        told = _list_words(data.targets or ()) if observed == "words" else data.targets or ()
        labels = tuple(sorted({*told} - {UNOBSERVED}))
        if not labels:
            raise BNetError("sentences", expected="something that is observed", actual="_ alone")
        readout = Categorical(len(labels), labels=labels, pool="mean" if observed == "label" else None)
    return bayesuvius(**{"dim": 16, **declared}, mask=mask, vocabulary=words, observe=readout, seed=seed)


def _list_words(texts: Sequence[str]) -> list[str]:
    """The words of texts, in the order in which they are met."""
    return list(dict.fromkeys(word for text in texts for word in text.split()))


def _check_splits_text(net: BNet, observed: str) -> None:
    """Refuse a net without words; next words are those of text that is split on spaces."""
    from bnet_transformer.data.task import check_has_words

    check_has_words(net.network, "--model", "bt.fit")
    has_tokenizer = net.network.tokenizer is not None
    if observed == "next" and (has_tokenizer or len(net.network.graph.word_stacks) > 1):
        got = "a tokenizer" if has_tokenizer else "several stacks"
        raise BNetError(
            "--model", expected="a net of one stack that splits text on spaces", actual=got, allowed="bt.fit"
        )


def _make_result(fitted: Fit[BNet], observed: str) -> CommandResult:
    """What is told of a fit; the fitted net or the whole fit, by suffix."""
    from bnet_transformer.learning.fit.result import FILE_KEYS

    heads = {name: fitted.heads_of(name) for name in fitted.selectors}
    names = ("method", "sentences", "evaluated_on", "criterion", "restart", "finished", "approximate", "learned")
    told = {FILE_KEYS.get(name, name): getattr(fitted, name) for name in (*names, "divergent", "bounds", "measured")}
    told["heads"] = {name: each.to_dataframe().reset_index() for name, each in heads.items()}
    told["effective"] = {name: each.effective for name, each in heads.items()}
    judged = f"judged on {fitted.evaluated_on} by the {fitted.criterion}"
    said = [f"{fitted.sentences} sentences, {OBSERVED_DESCRIPTIONS[observed]}, by {fitted.method}; {judged}"]
    if fitted.bounds:
        said.append(f"bound of a sentence: {fitted.bounds[0]:.3f} at first, {fitted.bounds[-1]:.3f} at last")
    for name, each in heads.items():
        said.append(f"{name}: {each.live} live heads of {len(each.usage)}, {each.effective:.2f} in effect")
        said += format_table(each.to_dataframe().reset_index())
    said += [f"approximate: {fitted.approximate}"] if fitted.approximate else []
    save = lambda out: (fitted if out.lower().endswith(".fit") else fitted.net).save(out)  # noqa: E731
    return CommandResult(told, said, None, make_plotter(fitted), save)


@click.command(
    "train",
    cls=SignatureCommand,
    short_help="Train a decoder, or a saved net.",
    formats=(*TABLE_SUFFIXES, *PICTURE_SUFFIXES, ".safetensors"),
    declared=[
        ForwardedOptions(
            "models/decoder.py", ("decoder",), (*SMALL_DECODER, "hidden"), "A new decoder: ", SMALL_DECODER
        )
    ],
    options=[
        ForwardedOptions("learning/training/loop.py", ("train",), TRAIN_OPTIONS),
        ForwardedOptions(
            "learning/training/configs.py", ("AdamW",), ("rate", "schedule", "warmup", "weight_decay", "clip")
        ),
        ForwardedOptions("learning/training/configs.py", ("EarlyStopping",), ("patience",)),
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
    """Train on SENTENCES, or on those of a --file: a new decoder, which tells the next word, or a --model.

    A net that tells no next word is trained on lines with what is observed behind a tab.

    \b
    bnet-transformer train -f sentences.txt --steps 500 -o net.safetensors

    Args:
        model: A net to train, in place of a new decoder.
        steps: How many steps, 300 unless --epochs tells it.
    """
    data = read_examples(source)
    judges = None if run_options.held_out is None else read_examples(TextSource((), run_options.held_out))
    output.check()
    net = _build_decoder(data, declared, options) if model is None else _load_saved_net(model, declared)
    options["checkpoints"] = run_options.make_checkpoints()
    from bnet_transformer.learning.training import configs, loop

    options["optimizer"] = shared.make_config(configs.AdamW, options)
    options["early_stopping"] = shared.make_config(configs.EarlyStopping, options)
    options["steps"] = DEFAULT_STEPS if steps is None and "epochs" not in options else steps
    if judges is not None:
        options["held_out"] = _make_examples(net, judges)
    try:
        found = loop.train(net, _make_examples(net, data), **options)
    except KeyboardInterrupt as error:
        raise run_options.make_interrupt() from error
    names = ("steps", "losses", "held_out")
    told = {"sentences": len(data.texts), **{name: getattr(found, name) for name in names}}
    measured = f", held out {found.held_out[-1][1]:.3f}" if found.held_out else ""
    loss = f"loss {found.losses[0]:.3f} at first, {found.losses[-1]:.3f} at last{measured}"
    said = [f"{found.steps} steps on {len(data.texts)} sentences: {loss}"]
    output.write_result(
        "train",
        CommandResult(told, said, lambda: found.to_dataframe().reset_index(), make_plotter(found), found.net.save),
        model=model,
    )


def _build_decoder(data: TextExamples, declared: dict[str, Any], options: dict[str, Any]) -> BNet:
    """A decoder of a text: its words, and those at the ends of sentences."""
    if data.targets is not None:
        raise BNetError("SENTENCES", expected="lines without a tab, for a decoder tells next words", actual="tabs")
    from bnet_transformer.models.decoder import decoder

    ends = [options[name] for name in ("start", "stop") if name in options]
    words = list(dict.fromkeys([*_list_words(data.texts), *ends]))
    return decoder(**SMALL_DECODER | declared, vocabulary=words, seed=options.get("seed", 0))


def _make_examples(net: BNet, data: TextExamples) -> list[object]:
    """The sentences, with what is observed of them where that is told."""
    if data.targets is None:
        return [shared.split_stacks(net, text) for text in data.texts]
    return list(data.build_pairs(data.infer_observed(None), net.network))
