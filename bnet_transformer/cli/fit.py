"""`bnet-transformer fit`: the parameters of a net with choices, from a file of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import lines, outputs, shared
from bnet_transformer.cli.telling import Interrupted
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.inference.fit import Fit
    from bnet_transformer.inference.fit.methods import Method

FORMATS = (".fit", ".json", *outputs.PICTURES, ".safetensors")
DECLARED = ("dim", "heads", "slices", "per", "atoms", "key_dim", "value_dim", "residual", "prior")


@click.command("fit", short_help="Fit the heads of a net to text.")
@shared.sentences_option()
@shared.model_option(None, "A net to fit, in place of the declaration below")
@click.option("--observe", type=click.Choice(lines.OBSERVED),
              help="The next words; or, behind a tab in each line, a word for each word, or a label.")  # fmt: skip
@click.option("--dim", type=int, help="A new net: the width of a word's state, 16 unless told.")
@click.option("--heads", type=int, help="A new net: heads to select from, 2 unless told.")
@click.option("--slices", type=int, help="A new net: slices, 1 unless told.")
@click.option("--per", type=click.Choice(["corpus", "sentence", "slice", "word"]), help="A new net: who draws a head.")
@click.option("--atoms", type=int, help="A new net: atoms of each codebook; without, each head has its own matrices.")
@click.option("--key-dim", type=int, help="A new net: the width of q and k.")
@click.option("--value-dim", type=int, help="A new net: the width of v.")
@click.option("--residual", is_flag=True, default=None, help="A new net: x is added to what is read.")
@click.option("--prior", type=float, help="A new net: the concentration of the Dirichlet on shares of heads.")
@click.option("--method", type=click.Choice(["map", "em", "svi", "nuts"]), default="map", show_default=True)
@click.option("--steps", type=int, help="How many steps (map, em, svi).")
@click.option("--restarts", type=int, help="Sets of parameters followed at once (map, em).")
@click.option("--batch", type=int, help="Sentences in a step; by default all.")
@click.option("--rate", type=float, help="The rate of AdamW.")
@click.option("--spread", type=float, help="The standard deviation of the prior on weights; svi and nuts need one.")
@click.option("--anneal", type=float, help="The power from which likelihoods rise to 1.")
@click.option("--learn", multiple=True, help="A parameter to learn, such as c.logits; by default all. May be repeated.")
@click.option("--chains", type=int, help="Chains (nuts).")
@click.option("--draws", type=int, help="Draws (svi, nuts).")
@click.option("--warmup", type=int, help="Steps before the draws (nuts).")
@click.option("--choices", type=click.Choice(["exact", "sampled"]), help="Sum choices, or draw them (svi).")
@click.option("--held-out", "held_out", help="A file of sentences by which restarts are judged.")
@lines.checkpoint_options()
@click.option("--budget", type=click.IntRange(min=1), help="The most joint states of a sentence.")
@click.option("--seed", type=int, default=0, show_default=True)
@shared.out_option(FORMATS)
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    model: str | None,
    observe: str | None,
    method: str,
    held_out: str | None,
    folder: str | None,
    resume: bool,
    changed: bool,
    outs: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Fit heads to SENTENCES, or to those of a --file: a new net of the chapter, or a --model.

    \b
    bnet-transformer fit -f sentences.txt --heads 3 -o net.safetensors
    bnet-transformer fit -f labelled.txt --observe label --method em -o net.safetensors -o heads.svg
    """
    data = lines.lines_of(sentences, source)
    outputs.check_outs(outs, FORMATS)
    declared = shared.known(**{name: asked.pop(name) for name in DECLARED})
    checkpoints = lines.checkpoints_of(folder, resume=resume, changed=changed)
    observed = data.observed(observe)
    judges = None if held_out is None else lines.lines_of((), held_out)
    net = _new(data, observed, declared, asked["seed"]) if model is None else _told(model, declared, observed)
    labels = [label for member in net.network.members for label in getattr(member.tpm, "labels", None) or ()]
    names = [*labels, *(word for known in net.network.vocabularies.values() for word in known or ())]
    from bnet_transformer.inference.fit import fit

    options = shared.known(**asked)
    options |= {"method": _method(method, options), "checkpoints": checkpoints}
    if judges is not None:
        options["held_out"] = judges.pairs(judges.observed(observed), names)
    found = fit(net, data.pairs(observed, names), **options)
    told = {**_found(found), "command": "fit", "model": model, "observed": observed, "files": outs}
    _write(found, outs, told)
    if as_json:
        click.echo(outputs.json_of(told))
    else:
        outputs.say([*_summary(found, observed), *(f"written: {out}" for out in outs)])
    if not found.finished:
        raise Interrupted("interrupted: this is the best so far" + _kept(folder))


def _method(name: str, options: dict[str, Any]) -> Method:
    """The config of a method, with those of the options that are its own, which are taken out of them."""
    from bnet_transformer.inference.fit.run import METHODS, method_of

    return shared.config_of(type(method_of(name)), options, tuple(METHODS), f"--method {name}")


def _kept(folder: str | None) -> str:
    return "" if folder is None else f"; --resume goes on from {folder}"


def _new(data: lines.Lines, observed: str, declared: dict[str, Any], seed: int) -> BNet:
    """The chapter's net of a text: its words, and a readout of what is observed."""
    from bnet_transformer.models.bayesuvius import bayesuvius
    from bnet_transformer.tpm import Categorical

    words = data.vocabulary
    if observed == "next":
        readout = Categorical(len(words))
    else:
        labels = data.labels(observed)
        if not labels:
            raise BNetError("sentences", expected="something that is observed", got="_ alone")
        readout = Categorical(len(labels), labels=tuple(labels), pool="mean" if observed == "label" else None)
    mask = "causal" if observed == "next" else None
    declared = {"dim": 16, **declared}
    return bayesuvius(**declared, mask=mask, vocabulary=words, observe=readout, seed=seed)


def _told(model: str, declared: dict[str, Any], observed: str) -> BNet:
    """The net of a model, which is declared already."""
    from bnet_transformer.data.task import check_has_words

    if declared:
        got = ", ".join(f"--{name.replace('_', '-')}" for name in declared)
        raise BNetError("--model", expected="no option of a new net beside it", got=got)
    net = shared.net_of(model)
    check_has_words(net.network, "--model", "bt.fit")
    if observed == "next":
        lines.check_words(net)
    return net


def _write(found: Fit[BNet], outs: tuple[str, ...], told: dict[str, Any]) -> None:
    """The fitted net, the whole fit, JSON or a picture, by suffix."""
    for out in outs:
        if out.lower().endswith(".safetensors"):
            found.net.save(out)
        elif out.lower().endswith(".fit"):
            found.save(out)
        else:
            outputs.write([out], told, lambda: found.heads.to_dataframe(), lambda: _picture(found))


def _picture(found: Fit[BNet]) -> Any:
    from bnet_transformer.viz.plots import plot

    return plot(found)


def _found(found: Fit[BNet]) -> dict[str, Any]:
    """A fit as JSON has it."""
    heads = {name: found.heads_of(name) for name in found.selectors}
    how = ("method", "sentences", "judged_on", "judged_by", "restart", "finished", "approximate")
    names = (*how, "learned", "divergent")
    return {
        **{name: getattr(found, name) for name in names},
        "bounds": found.bounds,
        "measured": found.measured,
        "heads": {name: each.to_dataframe().reset_index() for name, each in heads.items()},
        "effective": {name: each.effective for name, each in heads.items()},
    }


def _summary(found: Fit[BNet], observed: str) -> list[str]:
    """A fit as lines."""
    what = {"next": "the next words", "words": "a word for each word", "label": "a label for each sentence"}[observed]
    judged = f"judged on {found.judged_on} by the {found.judged_by}"
    said = [f"{found.sentences} sentences, {what}, by {found.method}; {judged}"]
    if found.bounds:
        said.append(f"bound of a sentence: {found.bounds[0]:.3f} at first, {found.bounds[-1]:.3f} at last")
    for name in found.selectors:
        heads = found.heads_of(name)
        said.append(f"{name}: {heads.live} live heads of {len(heads.usage)}, {heads.effective:.2f} in effect")
        said += outputs.rows_of(heads.to_dataframe().reset_index())
    return [*said, *([f"approximate: {found.approximate}"] if found.approximate else [])]
