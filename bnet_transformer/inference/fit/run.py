"""`fit`: a net with choices and sentences in, what can be known of its parameters out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks, device_of, ranks
from bnet_transformer._core.hashing import derive_seed, digest_of
from bnet_transformer._core.torch_context import own_random, with_gradients
from bnet_transformer.compiler.plan import MEETING
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.errors import BNetError, BudgetError, ReadingError, one_of, room_for, whole, within_memory
from bnet_transformer.files import checkpoint
from bnet_transformer.inference.factors import OVER_BUDGET
from bnet_transformer.inference.fit.ascent import Ascent, ascend
from bnet_transformer.inference.fit.objective import Objective, learned_of
from bnet_transformer.inference.fit.recipe import Habits, Recipe
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.sampling import sampled
from bnet_transformer.network import Network, network_of
from bnet_transformer.reference import BUDGET
from bnet_transformer.training.result import N

WAYS = {  # what a fit can do about choices that cannot be summed, for what other questions can do
    MEETING: "method='svi', choices='sampled'",
    OVER_BUDGET: "a larger budget=; method='svi', choices='sampled'",
}
LAST = 0.2  # of the rate, when the best restart goes on with all sentences
SHARE, MOST = 0.1, 1000  # of the sentences that are held out to choose among restarts, where none are told


@with_gradients()
def fit(
    net: N,
    data: object,
    *,
    method: str = "map",
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    restarts: int = 1,
    prune: bool = True,
    held_out: object = None,
    anneal: float | None = None,
    inner: int = 10,
    spread: float | None = None,
    learn: Collection[str] | None = None,
    clip: float | None = None,
    weight_decay: float = 0.0,
    precision: str | None = None,
    chains: int = 4,
    draws: int = 500,
    warmup: int = 300,
    choices: str = "exact",
    missing: bool = False,
    budget: int = BUDGET,
    every: int | None = None,
    patience: int | None = None,
    folder: str | Path | None = None,
    resume: bool | str = False,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Fit[N]:
    """The parameters of a net with choices, from sentences and what is observed of them; the net stays as it is.

    `data` is a list of pairs (sentence, observed), or a tuple (x, y) of arrays or lists. All methods climb the exact
    log evidence plus the log prior: Dirichlet on the tables where the net has a `prior`, Normal of a `spread` on the
    weights. `"map"` climbs it by AdamW; `"em"` sets the tables in closed form every `inner` steps, and climbs with the
    weights; `"svi"` and `"nuts"` give samples of the posterior. Of several `restarts`, followed all at once, the worse
    half is let go after a quarter and a half of the steps (`prune`). The best restart and step are given: by the log
    evidence of the `held_out` sentences, and where none are held out by the log posterior density. Of several restarts
    a tenth of `data` is held out where `held_out` is None; the best then goes on with all for a quarter of the steps
    more, and the best of these by the log posterior density is given. `anneal` flattens likelihoods at first. Where
    choices are too many to be summed, `choices="sampled"` draws them, of `"svi"`, which is approximate. `learn` names
    the parameters to learn. Every `every` steps there is a measure, and a checkpoint in `folder`; `resume` goes on from
    it ("changed": with another rate, steps, clip or precision). Ctrl-C gives the best so far. Under torchrun each
    process takes its share of each batch.

    >>> import bnet_transformer as bt
    >>> words = ["the", "cat", "sat"]
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=words, observe=bt.tpm.Categorical(3), prior=1.0)
    >>> found = bt.fit(net, [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")], method="em", steps=4)
    >>> found.pi.shape, found.net
    (torch.Size([2]), <BNet bayesuvius: ...>)
    """
    recipe = Recipe(
        method, steps, batch, rate, restarts, prune, anneal, inner, spread, clip, weight_decay, precision, chains,
        draws, warmup, choices, seed,
    )  # fmt: skip
    recipe.refuse_untaken([k for k, v in (("patience", patience), ("held_out", held_out)) if v is not None])
    habits, network = Habits(every, patience, folder, resume, progress), network_of(net)
    network.one_type()
    one_of("missing", missing, (True, False))
    corpus = read_batch(network, data, missing=missing)
    judge = None if held_out is None else read_batch(network, held_out, "held_out", missing=missing)
    learned = learned_of(network, tuple(network.member(name) for name in corpus.evidence), learn, spread)
    objective = Objective(network, learned, whole("budget", budget))
    _check(objective, recipe, corpus)
    _check_room(objective, recipe)
    try:
        found = _fitted(objective, recipe, habits, corpus, judge, device_of(device, network))
    except (BudgetError, ReadingError) as error:
        if error.allowed not in WAYS:
            raise
        raise type(error)(error.what, expected=error.expected, got=error.got, allowed=WAYS[error.allowed]) from error
    made = found.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(found.net)
    return replace(found, net=made, missing=missing, data=corpus)  # type: ignore[return-value]


def _fitted(
    objective: Objective,
    recipe: Recipe,
    habits: Habits,
    corpus: Batch,
    judge: Batch | None,
    device: torch.device,
) -> Fit[Network]:
    settings = {**recipe.told(), "learn": list(objective.learned.names), "sentences": len(corpus)}
    settings["data"] = corpus.digest() + ("" if judge is None else judge.digest())
    settings["parameters"] = digest_of(objective.network.parameters)
    with (
        within_memory("fit"),
        ranks(device) as here,
        own_random(here.device),
        checkpoint.kept_by(habits.folder, here.first),
    ):
        if here.world > 1 and objective.of_corpus and recipe.method != "nuts":
            wanted = "choices of sentences or words: a share of a corpus with one draw has no evidence of its own"
            raise BNetError("torchrun", expected=wanted, got="per='corpus'", allowed="one process")
        alike = {"net": objective.network, "budget": objective.budget, "habits": habits.together}
        here.assert_same("fit", **settings, **alike, checkpoint=habits.kept)
        objective.to(here.device)
        corpus = corpus.to(here.device)
        if recipe.method in ("svi", "nuts"):
            return sampled(objective, recipe, habits, corpus, settings, here)
        told, all_, split = "held-out sentences", corpus, judge is None
        if judge is None:
            corpus, judge, told = _split(corpus, recipe, objective.of_corpus)
        else:
            judge = judge.to(here.device)
        run = Ascent(objective, recipe, corpus, judge, here, settings)
        finished = ascend(run, habits)
        _, restart, best = run.best
        bounds = run.bounds
        if split and len(corpus) < len(all_) and finished:
            last, finished = _with_all(objective, recipe, habits, all_, best, settings, here)
            best, bounds = last.best[2], [*bounds, *last.bounds]
    network = _with(objective.network, best)
    return Fit(
        network,
        recipe.method,
        len(all_),
        told,
        restart,
        finished,
        None,
        objective.learned.names,
        objective.budget,
        tuple(bounds),
        tuple(run.measured),
        judged_by=run.judged_by,
    )


def _with(network: Network, found: Mapping[str, Tensor]) -> Network:
    """The net with the parameters found, each where the net had it."""
    home = {name: value.to(network.parameters[name].device) for name, value in found.items()}
    return network.with_parameters({**network.parameters, **home})


def _with_all(
    objective: Objective,
    recipe: Recipe,
    habits: Habits,
    corpus: Batch,
    best: Mapping[str, Tensor],
    settings: dict[str, Any],
    here: Ranks,
) -> tuple[Ascent, bool]:
    """The best restart goes on with the sentences that chose it as well, for a quarter of the steps, slowly."""
    again = Objective(_with(objective.network, best), objective.learned, objective.budget).to(here.device)
    slower = replace(
        recipe,
        restarts=1,
        anneal=None,
        steps=max(1, recipe.total // 4),
        rate=recipe.highest * LAST if recipe.highest else None,
    )
    began = {"again": "with all sentences", "parameters": digest_of(again.network.parameters)}
    last = Ascent(again, slower, corpus, corpus, here, {**settings, **began})
    folder = None if habits.folder is None else Path(habits.folder) / "all"
    with checkpoint.kept_by(folder, here.first):
        if folder is not None and habits.resume and here.first:
            _leave_other(checkpoint.path_of(folder), again.network, began)
        here.barrier()
        last.measure()  # where it begins may be better than where its steps lead
        return last, ascend(last, replace(habits, folder=folder))


def _leave_other(path: Path, network: Network, began: Mapping[str, str]) -> None:
    """Take away the checkpoint of a last phase that began where another first phase had ended."""
    if path.exists() and checkpoint.read(path, network).settings.get("parameters") != began["parameters"]:
        path.unlink()


def _split(corpus: Batch, recipe: Recipe, of_corpus: bool) -> tuple[Batch, Batch, str]:
    """Sentences to learn from, and those by which restarts are judged: the same where there is nothing to choose."""
    count = min(MOST, int(SHARE * len(corpus)))
    if recipe.restarts == 1 or of_corpus or not count:
        return corpus, corpus, "the sentences learned from"
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(derive_seed(recipe.seed, "held out")))
    return corpus.take(order[count:]), corpus.take(order[:count]), f"{count} held-out sentences"


def _check_room(objective: Objective, recipe: Recipe) -> None:
    """Refuse more sets of parameters than the memory of the machine can hold."""
    found = objective.network.parameters
    size = sum(found[name].numel() * found[name].element_size() for name in objective.learned.names)
    if recipe.method in ("map", "em"):
        room_for(f"{recipe.restarts} restarts", 3 * recipe.restarts * size, "fewer restarts=")
        return
    chains = recipe.chains if recipe.method == "nuts" else 1
    room_for(f"{chains * recipe.draws} draws", chains * recipe.draws * size, "fewer draws=, chains= or names in learn=")


def _check_zeros(objective: Objective, recipe: Recipe) -> None:
    """Refuse to learn a table with probabilities of 0 where its prior has no density there."""
    for name, concentration in objective.learned.tables.items():
        if recipe.method in ("map", "em") and concentration == 1.0:
            continue
        if bool(objective.network.parameters[name].isneginf().any()):
            got = f"method={recipe.method!r}" + ("" if concentration == 1.0 else f", prior={concentration:g}")
            allowed = f"learn= without {name}"
            wanted = "method='em' or 'map' and no prior for a table with probabilities of 0"
            raise BNetError(name, expected=wanted, got=got, allowed=allowed)


def _check(objective: Objective, recipe: Recipe, corpus: Batch) -> None:
    """Refuse what does not go with the net."""
    learned = objective.learned
    _check_zeros(objective, recipe)
    if not learned.weights and objective.choosing == {*learned.names}:
        recipe.refuse_weightless()
    if objective.of_corpus:
        if recipe.batch is not None and recipe.batch < len(corpus):
            wanted = f"all {len(corpus)} sentences at each step: they share one draw, and a part of them is biased"
            raise BNetError("batch", expected=wanted, got=recipe.batch, allowed="per='sentence'")
        warnings.warn(
            "per='corpus' is model selection, not a mixture: its log odds grow with the data, and one head takes all",
            stacklevel=4,
        )
    inner = [family.name for family in objective.selectors if family.name in corpus.evidence]
    if recipe.choices == "sampled" and inner:
        got = f"'sampled', with {', '.join(inner)} observed"
        raise BNetError("choices", expected="'exact': a choice that is observed is not drawn", got=got)
    sparse = {name: concentration for name, concentration in learned.tables.items() if concentration < 1}
    if sparse and recipe.method in ("map", "em"):
        name, concentration = next(iter(sparse.items()))
        raise BNetError(
            f"the prior of {name}",
            expected="a concentration of at least 1: below it the posterior density has no greatest value",
            got=concentration,
            allowed="svi, nuts",
        )
    real = torch.finfo(objective.network.dtype)
    if recipe.spread is not None and not real.tiny <= recipe.spread * recipe.spread <= real.max:
        square = f"a standard deviation whose square {real.dtype} can hold"
        raise BNetError("spread", expected=square, got=recipe.spread)
    if recipe.method in ("svi", "nuts") and learned.weights and recipe.spread is None:
        got = f"none for {', '.join(learned.weights[:3])}"
        allowed = "spread=1.0, say"
        if learned.tables:
            allowed += f"; learn={[*learned.tables]}, which leaves the weights as they are"
        raise BNetError("spread", expected="a prior on the weights: their standard deviation", got=got, allowed=allowed)
