"""`bnet-transformer fit` and `train`: sentences, with what is observed of them behind a tab, to a net that learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.group import Interrupted
from bnet_transformer.cli.outputs import PICTURES, TABLES, Output, Result, plotted, rows_of
from bnet_transformer.cli.shared import Source
from bnet_transformer.cli.signatures import Derived, Options, is_whole
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.declare import Network
    from bnet_transformer.learning.checkpoint import Checkpoints
    from bnet_transformer.learning.fit import Fit

UNSEEN = "_"
DECLARED = ("dim", "heads", "slices", "per", "atoms", "key_dim", "value_dim", "residual", "prior")
OBSERVED = {"next": "the next words", "words": "a word for each word", "label": "a label for each sentence"}
SMALL = {"dim": 32, "heads": 2, "slices": 2, "dropout": 0.0}
STEPS = 300
HANDED_ON = ("epochs", "batch", "smoothing", "start", "stop", "every", "seed", "device")


@dataclass(frozen=True)
class Lines:
    """Sentences, and (`told`) what stands behind the tab of each, where there is one."""

    texts: tuple[str, ...]
    told: tuple[str, ...] | None

    def observed(self, wanted: str | None) -> str:
        """What is observed of a sentence: its next words; behind a tab a word for each of its words, or a label."""
        if self.told is None:
            if wanted not in (None, "next"):
                raise BNetError("--observe", expected="lines with a tab, and what is observed behind it", actual="none")
            return "next"
        if wanted == "next":
            raise BNetError("--observe next", expected="lines without a tab", actual="what is observed behind one")
        each = [len(a.split()) == len(b.split()) for a, b in zip(self.texts, self.told, strict=True)]
        if wanted == "words" and not all(each):
            k = each.index(False)
            wanted_ = "as many words behind the tab as before it (_ for one that is not observed)"
            raise BNetError(f"sentence {k}", expected=wanted_, actual=f"{self.texts[k]} | {self.told[k]}")
        return wanted or ("words" if all(each) and any(" " in text for text in self.texts) else "label")

    def pairs(self, observed: str, network: Network) -> list[tuple[Any, Any]]:
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

        def state(part: str) -> object:
            return part if part in known else -1 if part == UNSEEN else int(part) if is_whole(part) else part

        states = [list(map(state, t.split())) if observed == "words" else state(t) for t in self.told or ()]
        return list(zip(self.texts, states, strict=True))


def lines_of(source: Source) -> Lines:
    """The sentences of the command line or of a file, parted at the tab."""
    parted = source.parted()
    if all(len(parts) == 1 for parts in parted):
        return Lines(tuple(text for (text,) in parted), None)
    for k, parts in enumerate(parted):
        if len(parts) != 2 or not all(parts):
            got = f"{len(parts)} parts in sentence {k}"
            raise BNetError("SENTENCES", expected="one tab in each, or in none", actual=got)
    return Lines(tuple(parts[0] for parts in parted), tuple(parts[1] for parts in parted))


@dataclass(frozen=True)
class Kept:
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

    def checkpoints(self) -> Checkpoints | None:
        """The config of the checkpoints; None without a folder."""
        from bnet_transformer.learning.checkpoint import Checkpoints

        if self.checkpoint is not None:
            return Checkpoints(self.checkpoint, "changed" if self.changed else self.resume)
        if self.resume or self.changed:
            raise BNetError("--resume", expected="--checkpoint with a folder", actual="none")
        return None

    def interrupted(self, *said: str) -> Interrupted:
        """The interrupt of a run: what is kept, and how it goes on."""
        said += () if self.checkpoint is None else (f"--resume goes on from {self.checkpoint}",)
        return Interrupted(": ".join(filter(None, ["interrupted", "; ".join(said)])))


def _saved(model: str, declared: Mapping[str, Any]) -> BNet:
    """The net of a model, which is declared already."""
    if declared:
        got = ", ".join(f"--{name.replace('_', '-')}" for name in declared)
        raise BNetError("--model", expected="no option of a new net beside it", actual=got)
    return shared.net_of(model)


@click.command(
    "fit",
    cls=Derived,
    short_help="Fit the heads of a net to text.",
    formats=(".fit", ".json", *PICTURES, ".safetensors"),
    declared=[Options("models/bayesuvius.py", ("bayesuvius",), DECLARED, "A new net: ", {"dim": 16})],
    options=[
        Options("learning/fit/run.py", ("fit",), ("batch", "spread", "learn", "budget", "every", "seed")),
        Options("learning/fit/problem.py", ("MAP", "EM", "SVI", "NUTS")),
    ],
)
def fit(
    source: Source,
    to: Output,
    declared: dict[str, Any],
    options: dict[str, Any],
    kept: Kept,
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
    data = lines_of(source)
    to.check()
    checkpoints = kept.checkpoints()
    observed = data.observed(observe)
    judges = None if kept.held_out is None else lines_of(Source((), kept.held_out))
    if model is None:
        net = _new_net(data, observed, declared, options.get("seed", 0))
    else:
        net = _saved(model, declared)
        _check_splits(net, observed)
    from bnet_transformer.learning.fit import run

    how = shared.config_of(type(run.resolve_method(method)), options, tuple(run.METHODS), f"--method {method}")
    if judges is not None:
        options["held_out"] = judges.pairs(judges.observed(observed), net.network)
    found = run.fit(net, data.pairs(observed, net.network), method=how, checkpoints=checkpoints, **options)
    to.tell("fit", _result(found, observed), model=model, observed=observed)
    if not found.finished:
        raise kept.interrupted("this is the best so far")


def _new_net(data: Lines, observed: str, declared: dict[str, Any], seed: int) -> BNet:
    """The chapter's net of a text: its words, and a readout of what is observed."""
    from bnet_transformer.models.bayesuvius import bayesuvius
    from bnet_transformer.tpm import Categorical

    words = _words(data.texts)
    mask = "causal" if observed == "next" else None
    if observed == "next":
        readout = Categorical(len(words))
    else:
        told = _words(data.told or ()) if observed == "words" else data.told or ()
        labels = tuple(sorted({*told} - {UNSEEN}))
        if not labels:
            raise BNetError("sentences", expected="something that is observed", actual="_ alone")
        readout = Categorical(len(labels), labels=labels, pool="mean" if observed == "label" else None)
    return bayesuvius(**{"dim": 16, **declared}, mask=mask, vocabulary=words, observe=readout, seed=seed)


def _words(texts: Sequence[str]) -> list[str]:
    """The words of texts, in the order in which they are met."""
    return list(dict.fromkeys(word for text in texts for word in text.split()))


def _check_splits(net: BNet, observed: str) -> None:
    """Refuse a net without words; next words are those of text that is split on spaces."""
    from bnet_transformer.data.task import check_has_words

    check_has_words(net.network, "--model", "bt.fit")
    has_tokenizer = net.network.tokenizer is not None
    if observed == "next" and (has_tokenizer or len(net.network.graph.word_stacks) > 1):
        got = "a tokenizer" if has_tokenizer else "several stacks"
        raise BNetError(
            "--model", expected="a net of one stack that splits text on spaces", actual=got, allowed="bt.fit"
        )


def _result(found: Fit[BNet], observed: str) -> Result:
    """What is told of a fit; the fitted net or the whole fit, by suffix."""
    heads = {name: found.heads_of(name) for name in found.selectors}
    names = ("method", "sentences", "judged_on", "judged_by", "restart", "finished", "approximate", "learned")
    told = {name: getattr(found, name) for name in (*names, "divergent", "bounds", "measured")}
    told["heads"] = {name: each.to_dataframe().reset_index() for name, each in heads.items()}
    told["effective"] = {name: each.effective for name, each in heads.items()}
    judged = f"judged on {found.judged_on} by the {found.judged_by}"
    said = [f"{found.sentences} sentences, {OBSERVED[observed]}, by {found.method}; {judged}"]
    if found.bounds:
        said.append(f"bound of a sentence: {found.bounds[0]:.3f} at first, {found.bounds[-1]:.3f} at last")
    for name, each in heads.items():
        said.append(f"{name}: {each.live} live heads of {len(each.usage)}, {each.effective:.2f} in effect")
        said += rows_of(each.to_dataframe().reset_index())
    said += [f"approximate: {found.approximate}"] if found.approximate else []
    save = lambda out: (found if out.lower().endswith(".fit") else found.net).save(out)  # noqa: E731
    return Result(told, said, None, plotted(found), save)


@click.command(
    "train",
    cls=Derived,
    short_help="Train a decoder, or a saved net.",
    formats=(*TABLES, *PICTURES, ".safetensors"),
    declared=[Options("models/decoder.py", ("decoder",), (*SMALL, "hidden"), "A new decoder: ", SMALL)],
    options=[
        Options("learning/training/loop.py", ("train",), HANDED_ON),
        Options("learning/training/configs.py", ("AdamW",), ("rate", "schedule", "warmup", "weight_decay", "clip")),
        Options("learning/training/configs.py", ("EarlyStopping",), ("patience",)),
    ],
)
def train(
    source: Source,
    to: Output,
    declared: dict[str, Any],
    options: dict[str, Any],
    kept: Kept,
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
    data = lines_of(source)
    judges = None if kept.held_out is None else lines_of(Source((), kept.held_out))
    to.check()
    net = _new_decoder(data, declared, options) if model is None else _saved(model, declared)
    options["checkpoints"] = kept.checkpoints()
    from bnet_transformer.learning.training import configs, loop

    options["optimizer"] = shared.config_of(configs.AdamW, options)
    options["early_stopping"] = shared.config_of(configs.EarlyStopping, options)
    options["steps"] = STEPS if steps is None and "epochs" not in options else steps
    if judges is not None:
        options["held_out"] = _examples(net, judges)
    try:
        found = loop.train(net, _examples(net, data), **options)
    except KeyboardInterrupt as error:
        raise kept.interrupted() from error
    names = ("steps", "losses", "held_out")
    told = {"sentences": len(data.texts), **{name: getattr(found, name) for name in names}}
    measured = f", held out {found.held_out[-1][1]:.3f}" if found.held_out else ""
    loss = f"loss {found.losses[0]:.3f} at first, {found.losses[-1]:.3f} at last{measured}"
    said = [f"{found.steps} steps on {len(data.texts)} sentences: {loss}"]
    to.tell(
        "train",
        Result(told, said, lambda: found.to_dataframe().reset_index(), plotted(found), found.net.save),
        model=model,
    )


def _new_decoder(data: Lines, declared: dict[str, Any], options: dict[str, Any]) -> BNet:
    """A decoder of a text: its words, and those at the ends of sentences."""
    if data.told is not None:
        raise BNetError("SENTENCES", expected="lines without a tab, for a decoder tells next words", actual="tabs")
    from bnet_transformer.models.decoder import decoder

    ends = [options[name] for name in ("start", "stop") if name in options]
    words = list(dict.fromkeys([*_words(data.texts), *ends]))
    return decoder(**SMALL | declared, vocabulary=words, seed=options.get("seed", 0))


def _examples(net: BNet, data: Lines) -> list[object]:
    """The sentences, with what is observed of them where that is told."""
    if data.told is None:
        return [shared.words_of(net, text) for text in data.texts]
    return list(data.pairs(data.observed(None), net.network))
