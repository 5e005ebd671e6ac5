"""What users hold: `BNet`, a net, and `Sentence`, the bnet of one sentence. One call for each method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import asking, export, files, inference, viz
from bnet_transformer.data.batch import Batch, sentences_to_batch
from bnet_transformer.data.encode import encode_sentence, once
from bnet_transformer.equations import Equations, equations
from bnet_transformer.errors import (
    BNetError,
    mapping,
    methods_within_memory,
    number,
    one_of,
    unknown,
    within_memory,
)
from bnet_transformer.graph import Ground
from bnet_transformer.inference import SentenceState
from bnet_transformer.network import Declaration, Network, declare
from bnet_transformer.questions import Questions, tan_of_corpus
from bnet_transformer.structure import NetStructure

if TYPE_CHECKING:
    import networkx as nx
    from pgmpy.models import DiscreteBayesianNetwork

    from bnet_transformer.compiler import Module
    from bnet_transformer.cost import Cost
    from bnet_transformer.pyro_reading import PyroModel
    from bnet_transformer.training import Generated


@methods_within_memory
class BNet(viz.NetFigures, NetStructure):
    """A net: one declaration, its parameters, and every reading of them.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=8, slices=2, heads=4)
    >>> net.sentence("the cat sat")["x_2_1"].shape          # for each state of c
    torch.Size([4, 8])
    """

    def __init__(self, declaration: Declaration | Network, *, seed: int = 0) -> None:
        if not isinstance(declaration, Declaration | Network):
            raise BNetError("BNet", expected="a Declaration", got=declaration)
        with within_memory("BNet"):
            self.network = declaration if isinstance(declaration, Network) else declare(declaration, seed=_seed(seed))

    @property
    def declaration(self) -> Declaration:
        """The declaration that everything else is a reading of."""
        return self.network.declaration

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameter store: a tensor for each name, such as `W_q_0.values` and `c.logits`."""
        return MappingProxyType(dict(self.network.parameters))

    def replace(self, parameters: Mapping[str, Tensor]) -> BNet:
        """The same net with other values for some parameters: copies, which no later change of yours reaches."""
        given = mapping("parameters", parameters).items()
        own = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in given}
        return BNet(self.network.with_parameters(own))

    def to(self, *where: torch.dtype | torch.device | str) -> BNet:
        """The same net in another floating type, on another device (`"cuda"`), or both; it computes there."""
        return BNet(self.network.to(*where))

    def check(self) -> bool:
        """True, or the error that lists every fault of the declaration and the parameters."""
        declare(self.declaration, parameters=self.network.parameters)
        return True

    def graph(self) -> nx.MultiDiGraph:
        """The folded graph: one node for each template and slice, its plates as attributes."""
        return export.folded_to_networkx(self.network)

    def equations(self, form: str = "word") -> Equations:
        """The structural equations and TPMs in LaTeX; `form` is `word`, `row`, `column` or `einstein`."""
        return equations(self.network, form)

    def sentence(
        self,
        sentence: object = None,
        *,
        pair: object = None,
        x: object = None,
        given: Mapping[str, object] | None = None,
    ) -> Sentence:
        """The bnet of a sentence: text, a list of words, ids, or vectors `x=` of shape `[word, dim]`.

        A net with several stacks takes a mapping from stack, a net without words no sentence. `given` fills further
        nodes that a declaration gives. A pretrained net reads text by its tokenizer, and a second sentence `pair`
        behind the first.
        """
        encoded = encode_sentence(self.network, sentence, x, given, pair=pair)
        return Sentence(self, SentenceState(self._evaluated, encoded))

    def batch(self, sentences: Sequence[object], *, pairs: Sequence[object] | None = None) -> Batch:
        """Sentences of any lengths as tensors for `module(batch.x, batch.mask, given=batch.given)`."""
        return sentences_to_batch(self.network, sentences, pairs)

    def module(self) -> Module:
        """The compiled net: an `nn.Module` in batched tensor operations.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=8, heads=4).module()
        >>> module(torch.zeros(2, 5, 8)).shape                  # [states of c, batch, word, dim]
        torch.Size([4, 2, 5, 8])
        """
        from bnet_transformer.compiler import Module

        return Module(self.network)

    def pyro(self, parameters: str = "prior") -> PyroModel:
        """The net as a Pyro model, `model(x, y)`: plates, and `Categorical` sites that can be enumerated.

        A net without words has no `x`: `model(y=...)`, whose sentences are those of `y`.

        With `parameters="prior"` each table that has a prior is drawn from it (a Dirichlet site), as inference of the
        tables needs. With `parameters="own"` all tables are those of the net, as data drawn from this net need.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, observe=bt.tpm.Categorical(3), prior=1.0)
        >>> net.pyro().sites, net.pyro(parameters="own").sites
        (('theta_c', 'c', 'y'), ('c', 'y'))
        """
        from bnet_transformer.pyro_reading import pyro_model

        return pyro_model(self.network, parameters)

    def generate(self, prompt: object = None, **options: Any) -> Generated:
        """New words after each prompt, chosen by `method="greedy"`, `"beam"` or `"sample"`: see `training.generate`."""
        from bnet_transformer.training import generate

        return generate(self.network, prompt, **_known(options, generate))

    def iterate(self, window: object, steps: int, **options: Any) -> Tensor:
        """The next `steps` words after a window of vectors `[..., word, dim]`: see `training.iterate`."""
        from bnet_transformer.training import iterate

        return iterate(self.network, window, steps, **{"module": self._evaluated, **_known(options, iterate)})

    @cached_property
    def _evaluated(self) -> Module:
        """The compiled net that answers for its sentences."""
        return self.module().eval()

    def cost(
        self, words: int | Mapping[str, int] | None = None, *, batch: int = 1, want: Sequence[str] | None = None
    ) -> Cost:
        """What a forward pass of `module()` costs for sentences of so many words: parameters, FLOPs, bytes, paths.

        `words` is one number, or one for each stack, and nothing for a net without words; `want` names families as
        `module()` has it.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=8).cost(words=6).order
        'O(n^2 d |c| + n d^2 |c|)'
        """
        from bnet_transformer.cost import cost

        return cost(self.network, words, batch, want)

    def tan(
        self,
        sentences: Sequence[object],
        classes: object = "c",
        *,
        slice: int = 0,
        head: int | None = None,
        role: str | None = None,
    ) -> inference.CorpusTan:
        """The best tree of words over a corpus, by what each word of a slice reads most, given a discrete class.

        `classes` is a label for each sentence, or a node: its most probable state given what a sentence observes.
        """
        if isinstance(sentences, str) or not isinstance(sentences, Sequence):
            raise BNetError("sentences", expected="a list of sentences", got=sentences)
        asked = [each if isinstance(each, Sentence) else self.sentence(each) for each in sentences]
        return tan_of_corpus(asked, classes, slice, head, role)

    def save(self, path: str | Path) -> None:
        """Write the net to one safetensors file: its parameters, and its declaration as versioned JSON."""
        files.save(self.network, path)

    def __repr__(self) -> str:
        slices = "".join(f"{s.name or 'slices'}={s.slices}, " for s in self.declaration.stacks)
        count = sum(p.numel() for p in self.network.parameters.values())
        families = len(self.network.graph.families)
        return f"<BNet {self.declaration.name}: {slices}{families} families of nodes, {count:,} parameters>"


@methods_within_memory
class Sentence(Questions, viz.SentenceFigures):
    """The bnet of one sentence: ground, lazy, evaluated on demand.

    Nodes have names (`q_0_2`: slice 0, word 2); `s[name]` is a value, `s.tpm(name)` a distribution. `do` and `observe`
    give a new sentence.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=8).sentence("the cat sat")
    >>> s.parents("q_0_2"), s.do(c=1)["x_1_0"].shape
    (['W_q_0', 'x_0_2'], torch.Size([8]))
    """

    def __init__(self, net: BNet, state: SentenceState) -> None:
        self.net = net
        self.state = state

    @property
    def ground(self) -> Ground:
        """The ground graph on integers, after surgery: counts, arrow arrays, names."""
        return self.state.ground

    @property
    def words(self) -> tuple[str, ...]:
        """The words; with several stacks, those of all stacks in order."""
        return tuple(token for tokens in self.state.tokens.values() for token in tokens)

    @property
    def special(self) -> tuple[bool, ...]:
        """Which words are special tokens of a pretrained model, such as `[CLS]`."""
        return self.state.encoded.special(self.net.network)

    @property
    def spans(self) -> tuple[tuple[int, int] | None, ...]:
        """Where each token stands in its text, from and up to; None for special tokens, and for words not from text."""
        return self.state.encoded.spans()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each whole word: those that the tokenizer's first split (or a list of words) holds together.

        A punctuation mark is a word, and so is a special token; without a tokenizer each token is one.
        """
        return self.state.encoded.groups()

    # values and distributions

    def __getitem__(self, name: str) -> Tensor:
        """The value of a node: `[*states, *shape]`, with a dim for each open choice that decides it (`c` first)."""
        return self.state.answers.value(self.ground.id(name))

    def tpm(self, name: str) -> Distribution:
        """The distribution of a node given its parents' values, for each state of the open choices that decide them."""
        return self.state.answers.distribution(self.ground.id(name))

    def attention(self, slice: int, *, role: str | None = None, words: str = "tokens") -> Tensor:
        """The attention TPMs of a slice, `P(j | i)`: `[*states, *plates, word, word]`, zero where i cannot read j.

        `role` names the node that reads, where a slice has several. `words="words"` groups sub-words (`groups`): a word
        is read as much as its tokens are in all, and reads as its tokens do on average.
        """
        one_of("words", words, ("tokens", "words"))
        if words == "words":
            if len(self.state.tokens) > 1:
                raise BNetError("words", expected="'tokens', in a net with several stacks", got=words)
            return asking.grouped(self.attention(slice, role=role), self.groups)
        return self.state.answers.attention(slice, role)

    # a sentence like this one

    def do(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are set: their arrows from parents go, what descends is computed again.

        A node is named, or a family (`q_2`), a role (`q`) or a pattern (`"q_2_*_3"`); it is set to a value, a state, a
        label, to what it is in another sentence, or to what `Zero()`, `Mean(sentences)`, `Mean()`, `Noise(sigma)` or
        `Attend(row)` say. Noise and the mean over words are of the sentence in which all else of this call is done.
        """
        return Sentence(self.net, self.state.with_interventions(once("do", mapping("do", nodes), named)))

    def undo(self, *names: str) -> Sentence:
        """A new sentence without what `do` set: these nodes (names, families, roles, patterns), or all of them."""
        return Sentence(self.net, self.state.without_interventions(names))

    def observe(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are seen to have a value: evidence, which changes no arrow."""
        return Sentence(self.net, self.state.with_evidence(once("observe", mapping("observe", nodes), named)))

    # structure

    def graph(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
        attention: bool = False,
        min_weight: float | None = None,
        limit: int | None = export.LIMIT,
    ) -> nx.DiGraph:
        """The ground graph: one node for each word, named by the naming law, with role, slice, head, word, kind, ...

        `weights=False` leaves out selectors and weights; `slices`, `words` and `heads` keep a part. With `attention`
        the arrows that are read carry `weight`, `P(j | i)` (averaged over the posterior of what is open);
        `min_weight` drops the weaker ones. If more than `limit` arrows remain it refuses with the count (None: never).
        """
        one_of("weights", weights, (True, False))
        one_of("attention", attention, (True, False))
        selection = self.state.selection(weights=weights, slices=slices, words=words, heads=heads)
        weighed = None
        if min_weight is None:
            export.check_size(self.ground, selection, limit)
        else:
            if not 0.0 <= number("min_weight", min_weight) <= 1.0:
                raise BNetError("min_weight", expected="a probability from 0 to 1", got=min_weight)
            export.check_weighed(self.ground, selection, limit)
        if attention or min_weight is not None:
            weighed = inference.arrow_weights(self.state.query(), self.state.answers, selection)
        return export.ground_to_networkx(
            self.net.network,
            self.ground,
            selection=selection,
            tokens=self.state.tokens,
            observed=set(self.state.evidence),
            weights=weighed,
            min_weight=min_weight,
            limit=limit,
        )

    def to_pgmpy(self, *, limit: int = 10_000_000, runs: int = 2**16) -> DiscreteBayesianNetwork:
        """The discrete part, given the words, as a pgmpy network, of at most `limit` table entries."""
        return export.to_pgmpy(self.state.world, evidence=self.state.evidence, limit=limit, runs=runs)

    def to_bif(self, *, limit: int = 10_000_000, runs: int = 2**16) -> str:
        """The discrete part, given the words, in the BIF format."""
        return export.to_bif(self.state.world, evidence=self.state.evidence, limit=limit, runs=runs)

    def __repr__(self) -> str:
        said = " | ".join(" ".join(tokens) for tokens in self.state.tokens.values())
        said = said if len(said) <= 60 else said[:59] + "…"
        counts = f"{len(self.ground):,} nodes, {self.ground.count_arrows():,} arrows"
        extra = "".join(
            f", {what} {', '.join(self._named(list(nodes)))}"
            for what, nodes in (("do", self.state.interventions), ("seen", self.state.evidence))
            if nodes
        )
        return f"<Sentence {said!r}: {counts}{extra}>" if self.state.tokens else f"<Sentence: {counts}{extra}>"


def load(path: str | Path, *, trust: Collection[str] | bool = ()) -> Any:
    """Read what `save` wrote: a net (`BNet`), or a fit (`Fit`).

    A TPM class of somebody else's is imported only if `trust` names it.
    """
    from bnet_transformer.inference.fit import saved

    if not saved.is_fit(path):
        return BNet(files.load(path, trust=trust))
    found: Any = saved.load(path, trust=trust)
    return replace(found, net=BNet(found.network))


def load_net(path: str | Path, *, trust: Collection[str] | bool = ()) -> BNet:
    """The net of a file that `save` wrote: of a fit, the fitted net."""
    found = load(path, trust=trust)
    return found if isinstance(found, BNet) else BNet(found.network)


def _known(told: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """Options, all of which a function has; others are refused with the near ones."""
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in told:
        if name not in names:
            raise unknown(f"option of {function.__name__}", name, names)
    return told


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed).bit_length() > 1024:
        raise BNetError("seed", expected="a whole number", got=seed)
    return int(seed)
