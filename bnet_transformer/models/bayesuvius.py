"""The transformer of R. R. Tucci, "Bayesuvius", chapter Transformer Networks.

    v_i = W_v x_i     q_i = W_q x_i     k_i = W_k x_i     x'_i = sum_j v_j softmax_j(scale q_i . k_j)   (+ x_i)

The weights are nodes, and their parent is a head selector `c`, a latent choice. With the TPM `Select` each head has its
own matrices; with `Codebook` ("fully Bayesian") each head has a distribution over shared matrices, the atoms. `per` is
the scope of the selector. With `combine="concat"` there is no selector: head is a plate, and `W_o` sums the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Plate, Stack
from bnet_transformer.declare.declaration import check_vocabulary
from bnet_transformer.errors import BNetError
from bnet_transformer.models.builders import build_observation, parse_mask, takes_options
from bnet_transformer.tpm import (
    TPM,
    Add,
    Attention,
    Categorical,
    Codebook,
    Concat,
    Dot,
    Embed,
    Given,
    Linear,
    Read,
    Select,
    Weight,
)


@dataclass(frozen=True)
class BayesuviusOptions:
    """The options of the net of the chapter.

    Args:
        dim: The width of the hidden state of a word.
        slices: The number of slices (layers). Default 1.
        heads: The number of heads from which the selector chooses; with `combine="concat"`, the number of heads that
            are summed. Default 2.
        atoms: The number of atoms of the codebooks of W_q, W_k and W_v, or three numbers. None (default): each head has
            its own matrices.
        combine: `"select"` (default): a selector `c` chooses a head. `"concat"`: all heads are summed.
        per: The scope of the selector: one draw for the `"corpus"`, each `"sentence"` (default), each `"slice"`, or
            each `"word"`.
        residual: Whether the state x is added to the output of attention. Default False.
        mask: The words to which each word attends: None (default) for every word, `"causal"`, a `Reach`, or a table of
            booleans `[word, word]`.
        scale: The factor of the scores `q_i . k_j`. Default 1; None for `1/sqrt(key_dim)`.
        key_dim: The width of queries and keys. None (default) for `dim`.
        value_dim: The width of values. None (default) for `dim`.
        vocabulary: The words as a list. None (default) for words that are vectors.
        observe: A readout `y` of each word, `Categorical(n)` or `Normal(sigma)`; with its option `pool`, of the
            sentence. None (default) for no readout.
        attention: `"soft"` (default), or `"marginal"`: the word that the last slice reads is a random variable `j`. The
            states x remain soft, and `p(y_i) = sum_j P(j | i) p(y_i | v_j)`.
        prior: The concentration of the Dirichlet prior on the probabilities of selector and atoms: a number, or for a
            selector without atoms a number for each head. None (default) for no prior.
        seed: The seed of the initial parameters. Default 0.
    """

    dim: int
    _: KW_ONLY
    slices: int = 1
    heads: int = 2
    atoms: int | tuple[int, int, int] | None = None
    combine: str = "select"
    per: str = "sentence"
    residual: bool = False
    mask: object = None
    scale: float | None = 1.0
    key_dim: int | None = None
    value_dim: int | None = None
    vocabulary: Sequence[str] | None = None
    observe: TPM | None = None
    attention: str = "soft"
    prior: float | Sequence[float] | None = None
    seed: int = 0


@takes_options(BayesuviusOptions)
def bayesuvius(options: BayesuviusOptions) -> BNet:
    """The net of the chapter: attention in which a selector chooses a head.

    Args:
        {options}

    Returns:
        The net.

    Raises:
        BNetError: If an option is invalid, or two options exclude each other.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=8, slices=2, heads=4).sentence("the cat sat")
    >>> s["q_0_2"].shape, s["x_2_1"].shape, s["W_q_0"].shape    # for each state of c
    (torch.Size([4, 8]), torch.Size([4, 8]), torch.Size([4, 8, 8]))
    """
    dim, heads = check_int("dim", options.dim), check_int("heads", options.heads)
    combine, per, atoms = options.combine, options.per, options.atoms
    check_choice("combine", combine, ("select", "concat"))
    check_choice("per", per, ("corpus", "sentence", "slice", "word"))
    check_choice("attention", options.attention, ("soft", "marginal"))
    if combine == "concat" and (atoms is not None or per != "sentence"):
        option, actual = ("per", per) if atoms is None else ("atoms", atoms)
        raise BNetError(option, expected="the default, because combine='concat' has no selector", actual=actual)
    key = dim if options.key_dim is None else check_int("key_dim", options.key_dim)
    value = dim if options.value_dim is None else check_int("value_dim", options.value_dim)
    widths, score = {"q": key, "k": key, "v": value}, Dot(options.scale)
    slice_ = _SliceBuilder(dim, widths, parse_mask(options.mask), score, options.residual, options.prior)
    sizes = None if atoms is None else _parse_atom_counts(atoms)
    selector = Node("c", Categorical(heads, prior=options.prior), scope="corpus" if per == "corpus" else "sentence")
    outside: list[Node] = []
    plates = [Plate("head", heads)]
    if combine == "concat":
        nodes = slice_.build_concat()
    elif per == "word":
        nodes = slice_.build_head_per_word(heads, sizes)
        plates = [Plate(f"atom_{role}", size) for role, size in sizes.items()] if sizes else plates
    else:
        nodes = slice_.build_single_head(sizes)
        plates, outside = [], [selector]
        if per == "slice":
            nodes, outside = [selector, *nodes], []
    readout = build_observation(options.observe)
    if options.attention == "marginal":
        if combine == "concat" or options.observe is None:
            actual = "combine='concat'" if combine == "concat" else "observe=None"
            raise BNetError("attention='marginal'", expected="combine='select' and a readout observe=", actual=actual)
        picks = slice_.get_picks(sizes) if per == "word" else {}
        readout = slice_.build_marginal_attention(picks, options.slices) + build_observation(options.observe, "z")
    stack = Stack(
        nodes, _build_embedding(dim, options.vocabulary), readout, slices=options.slices, vocabulary=options.vocabulary
    )
    return BNet(Declaration([stack], outside, plates, name="bayesuvius"), seed=options.seed)


@dataclass(frozen=True)
class _SliceBuilder:
    """The builder of one slice of the net, in each of its variants."""

    dim: int
    widths: dict[str, int]
    reach: Reach
    score: Dot
    residual: bool
    prior: float | Sequence[float] | None

    def build_single_head(self, num_atoms: dict[str, int] | None) -> list[Node]:
        """The nodes if all words have the same head: c -> W_q, W_k, W_v -> q, k, v -> x."""
        nodes = []
        for role, width in self.widths.items():
            shape = (width, self.dim)
            tpm = Codebook(num_atoms[role], shape, prior=self.prior) if num_atoms else Select(shape)
            nodes.append(Node(f"W_{role}", tpm, ["c"]))
        nodes += [Node(role, Linear(), [f"W_{role}", "x"], ["word"]) for role in self.widths]
        return [*nodes, self._build_attention("x", {}, ["word"], self.residual)]

    def build_concat(self) -> list[Node]:
        """The nodes with a plate of heads that W_o sums, without a selector."""
        return [
            *self._build_projections(dict.fromkeys(self.widths, "head")),
            self._build_attention("a", {}, ["head", "word"], False),
            Node("W_o", Weight((self.dim, self.widths["v"])), plates=["head"]),
            Node("x", Concat(residual=self.residual), ["W_o", "a", *(["x"] if self.residual else [])], ["word"]),
        ]

    def build_head_per_word(self, heads: int, num_atoms: dict[str, int] | None) -> list[Node]:
        """A choice of the head for each word; with codebooks, the head determines the distribution of the atoms.

        c has no arrow to W, only to x' or to the choices of atoms.
        """
        atoms = (num_atoms or {}).items()
        return [
            *self._build_projections({role: f"atom_{role}" if num_atoms else "head" for role in self.widths}),
            Node("c", Categorical(heads, prior=self.prior), plates=["word"]),
            *(Node(f"m_{role}", Categorical(m, prior=self.prior), ["c"], ["word"]) for role, m in atoms),
            self._build_attention("x", self.get_picks(num_atoms), ["word"], self.residual),
        ]

    def get_picks(self, num_atoms: dict[str, int] | None) -> dict[str, dict[str, str]]:
        """The selector of each weight's plate if each word has a selector: the atom of its codebook, or the head."""
        return {role: {f"atom_{role}": f"m_{role}"} if num_atoms else {"head": "c"} for role in self.widths}

    def build_marginal_attention(self, picks: dict[str, dict[str, str]], slices: int) -> list[Node]:
        """The nodes of marginal attention: the word `j` that the last slice reads, and its value `z`."""
        q, k = (Arrow(r, reach, pick=picks.get(r, {})) for r, reach in (("q", Reach("same")), ("k", self.reach)))
        v = Arrow("v", self.reach, pick={"word": "j", **picks.get("v", {})})
        residual = [Arrow("x", slice=slices - 1)] if self.residual else []
        return [Node("j", Read(self.score), [q, k], ["word"]), Node("z", Add(), [v, *residual], ["word"])]

    def _build_projections(self, plates: dict[str, str]) -> list[Node]:
        """The weights, queries, keys and values, each with a plate of heads or atoms."""
        weights = [Node(f"W_{r}", Weight((w, self.dim)), plates=[plates[r]]) for r, w in self.widths.items()]
        return weights + [Node(r, Linear(), [f"W_{r}", "x"], [plates[r], "word"]) for r in self.widths]

    def _build_attention(self, role: str, picks: dict[str, dict[str, str]], plates: list[str], residual: bool) -> Node:
        """The attention node `sum_j v_j P(j | i)`, with the selectors of `picks`."""
        reaches = {"q": Reach("same"), "k": self.reach, "v": self.reach}
        arrows = [Arrow(r, reaches[r], pick=picks.get(r, {})) for r in self.widths]
        return Node(role, Attention(self.score, residual=residual), [*arrows, *(["x"] if residual else [])], plates)


def _build_embedding(dim: int, vocabulary: Sequence[str] | None) -> list[Node]:
    """The nodes of the words: input vectors, or the embedding of a vocabulary."""
    if vocabulary is None:
        return [Node("x", Given(dim), plates=["word"])]
    token = Node("token", Given(states=len(check_vocabulary(vocabulary))), plates=["word"])
    return [token, Node("x", Embed(dim), ["token"], plates=["word"])]


def _parse_atom_counts(atoms: object) -> dict[str, int]:
    """The numbers of atoms of W_q, W_k and W_v."""
    counts = atoms if isinstance(atoms, tuple | list) and len(atoms) == 3 else (atoms, atoms, atoms)
    return {role: check_int("atoms", count) for role, count in zip("qkv", counts, strict=True)}
