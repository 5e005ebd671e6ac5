"""`Sentence`: the bnet of one sentence. Each method validates its arguments and delegates to another module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import drawing, graph, inference
from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_seed
from bnet_transformer._core.process import check_memory, translate_memory_errors, translate_memory_errors_of_methods
from bnet_transformer._core.tokens import distinguish, get_raw
from bnet_transformer.attention import Inclusion, Reads, Tan, TanTree
from bnet_transformer.attention.rollout import plan_reads
from bnet_transformer.attention.tan import classify_slice, tan_tree
from bnet_transformer.bridges.networkx import MAX_ARROWS, sentence_to_networkx
from bnet_transformer.bridges.pgmpy import to_pgmpy
from bnet_transformer.data.batch import find_next_word_readout, infer_task
from bnet_transformer.data.encode import merge_assignments
from bnet_transformer.declare import Network
from bnet_transformer.drawing import PathLike
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.figures import Picture
from bnet_transformer.graph import (
    GroundGraph,
    NodeNames,
    NodeSelection,
    Quotient,
    Separation,
    StructureQueries,
    find_family,
)
from bnet_transformer.graph.queries import Names
from bnet_transformer.inference import GroupPosterior, Plan, RankedStates, Samples, SentenceState
from bnet_transformer.inference.dependence import max_partial_correlation, plan_choice_dependence
from bnet_transformer.inference.plan import explain_call, explained_by, find_slowest, get_planner, planned
from bnet_transformer.inference.posteriors import plan_expected_attention, plan_state_probs
from bnet_transformer.inference.query import find_attention_spec, merge_words, parse_attention_slices
from bnet_transformer.interventions.counterfactual import Counterfactual, plan_counterfactual
from bnet_transformer.residual_stream import Contributions, Lens, PathContributions, ScoreContributions, TunedLens
from bnet_transformer.residual_stream.contributions import compute_contributions
from bnet_transformer.residual_stream.lens import compute_lens

if TYPE_CHECKING:
    import networkx as nx
    from pgmpy.models import DiscreteBayesianNetwork

    from bnet_transformer.page.widget import Widget

R = TypeVar("R")


def explain(task: str, *arguments: Any, **options: Any) -> Plan[Any]:
    """How a fit or a sweep would be computed: the algorithm, the reason, joint states and FLOPs; nothing is computed.

    `Sentence.explain` is the same for the methods of a sentence.

    Args:
        task: The name of the function: `"fit"` or `"sweep"`.
        *arguments: The arguments of that function.
        **options: The keyword arguments of that function.

    Returns:
        The plan; `print` shows it as a sentence. `plan.node` is the node that rules out a faster algorithm, and
        `plan.run()` computes the result of the function.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    >>> plan = bt.explain("fit", net, [("the cat", "cat the"), ("cat the", "the cat")])
    >>> plan.algorithm, plan.states
    ('elimination', 2)
    """
    from bnet_transformer.interventions.sweep import sweep
    from bnet_transformer.learning.fit.methods import fit

    tasks: dict[str, Callable[..., Any]] = {"fit": fit, "sweep": sweep}
    if not isinstance(task, str) or task not in tasks:
        raise unknown_name_error("task", task, tasks)
    return explain_call(task, tasks[task], arguments, options)


def _plan_arrows(state: SentenceState, question: str, *, has_attention: bool, run: Callable[[], R]) -> Plan[R]:
    """The plan of a graph: that of its slowest attention, or of the slowest posterior over which it is averaged."""
    specs = [m for m in state.network.specs if m.has_word_attention and m.tpm.has_attention]
    if not has_attention:
        return Plan(question, "graph", "only the structure of the graph is requested", run)
    plans: list[Plan[Any]] = []
    for query in map(state.evaluator.attention_query, specs):
        choices = next(iter(query.choices.values()), [])
        plans += [plan_state_probs(state.query(choices))] if choices else []
        plans += [plan_expected_attention(state.query(), query)]
    if not plans:
        return Plan(question, "graph", "the net has no attention over words", run)
    return replace(find_slowest(plans), question=question, run=run)


def _plan_graph(sentence: Sentence, *, attention: bool = False, **options: Any) -> Plan[nx.DiGraph]:
    """The plan of `Sentence.graph`."""
    question = "graph with the weights of its arrows" if attention else "graph"
    run = partial(sentence.graph, attention=attention, **options)
    return _plan_arrows(sentence.state, question, has_attention=attention, run=run)


def _plan_figure(sentence: Sentence, path: PathLike, **options: Any) -> Plan[None]:
    """The plan of `Sentence.draw`."""
    has_attention, run = options.get("attention") is not False, partial(sentence.draw, path, **options)
    return _plan_arrows(sentence.state, "figure", has_attention=has_attention, run=run)


@dataclass(frozen=True)
class SentenceTokens:
    """The tokens of a sentence, in a net with several stacks those of all stacks in their order.

    Attributes:
        raw: The words in the spelling of the vocabulary, such as `Ġcat` in a byte-level vocabulary.
        spans: The range of characters of each token in its text; None for special tokens and for words without a text.
        special: For each word, whether it is a special token of a pretrained model, such as `[CLS]`.
        groups: The indices of the tokens of each full word. Full words are those into which the tokenizer first splits
            the text, or the items of a list of words. A punctuation mark counts as a word, and so does a special token.
            Without a tokenizer each token is a word.
    """

    raw: tuple[str, ...]
    spans: tuple[tuple[int, int] | None, ...]
    special: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]


class Net(Protocol):
    """What a sentence knows of its net, a `BNet`, whose module imports this one."""

    network: Network

    def sentence(self, sentence: object = None) -> Sentence:
        """Return the bnet of another sentence."""


@translate_memory_errors_of_methods
class Sentence(StructureQueries):
    """The bnet of one sentence: its ground graph, whose nodes are evaluated when a method requires them.

    `net.sentence(...)` builds it. Each node has a name: `q_0_2` is the query of slice 0 and word 2. `s[name]` returns
    a value, and `s.tpm(name)` returns a distribution. A sentence is immutable: `do` and `observe` return a new one.

    Args:
        net: The net to which the sentence belongs.
        state: The words, interventions and evidence of the sentence.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=8).sentence("the cat sat")
    >>> s.parents("q_0_2"), s.do(c=1)["x_1_0"].shape
    (['W_q_0', 'x_0_2'], torch.Size([8]))
    """

    def __init__(self, net: Net, state: SentenceState) -> None:
        self.net = net
        self.state = state

    # attributes

    @property
    def ground(self) -> GroundGraph:
        """The ground graph after all interventions: node ids, names, counts and arrays of arrows."""
        return self.state.ground

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the sentence; in a net with several stacks, the words of all stacks in their order.

        Tokens of a pretrained model are decoded, without a leading space; `tokens.raw` are those of the vocabulary.
        """
        return tuple(token for tokens in self.state.tokens.values() for token in tokens)

    @property
    def tokens(self) -> SentenceTokens:
        """The tokens of a pretrained model: their spelling, their ranges in the text, special tokens and full words.

        >>> import bnet_transformer as bt
        >>> s = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat"]).sentence("the cat")
        >>> s.tokens.raw, s.tokens.special
        (('the', 'cat'), (False, False))
        """
        encoded = self.state.encoded
        flags, raw = encoded.flag_special_tokens(self.state.network), tuple(map(get_raw, self.words))
        return SentenceTokens(raw, encoded.get_spans(), flags, encoded.group_subwords())

    @cached_property
    def nodes(self) -> NodeNames:
        """The names of all nodes, with parents before children; a sequence that computes names when they are read.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.nodes
        <19 nodes: c, x_0_0, x_0_1, …, x_1_1, x_1_2>
        """
        return NodeNames(self.ground)

    # values, distributions and attention

    @translate_memory_errors("value")
    @planned
    def __getitem__(self, name: str) -> Plan[Tensor]:
        """The value of a node, or the values of all nodes of a name or a pattern.

        Args:
            name: The name of a node that is a deterministic function of its parents, such as `"q_0_2"`; or a node group
                (`"q_0"`), a role (`"q"`) or a pattern (`"q_*_-1"`).

        Returns:
            A tensor `[*states, *shape]`. `shape` is the shape of the node; before it is one dimension for each latent
            choice (a discrete node that is neither observed nor set) on which the node depends, `c` first; choices of a
            single state have none if a tensor would have more than 64 dimensions, the limit of torch. The value of a
            latent choice itself is the list of its states, `[n]`: its distribution is `tpm` or `posterior`. For
            several nodes `[*states, slice, *plates, word, *shape]`, with the dimensions whose index the name leaves
            open; `slice` only if the name has nodes of several slices.

        Raises:
            UnknownNameError: The graph has no such node.
            EvidenceError: The node is random and continuous, and not observed: use `tpm`.
            BNetError: Several nodes differ in their shapes, or in their plates.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=2, heads=3, combine="concat").sentence("the cat sat")
        >>> s["x_1_-1"].shape, s["x_1"].shape, s["q"].shape, s["q_0_*_2"].shape
        (torch.Size([4]), torch.Size([3, 4]), torch.Size([2, 3, 3, 4]), torch.Size([3, 4]))
        """
        evaluator = self.state.evaluator
        return evaluator.plan_stacked_value(find_family(evaluator.model.ground, name))

    @planned
    def tpm(self, name: str) -> Plan[Distribution]:
        """The distribution of a node given the values of its parents.

        Args:
            name: The name of a node.

        Returns:
            A distribution of torch or Pyro. Its batch dimensions are the states of the latent choices on which the
            parents depend.
        """
        return self.state.evaluator.plan_distribution(self.ground.id(name))

    def labels(self, name: str) -> tuple[str, ...]:
        """The labels of the states of a discrete node.

        Args:
            name: A discrete node, such as a readout.

        Returns:
            A label for each state, in the order of `posterior`: the `labels` of its TPM, words of the vocabulary, words
            of the sentence, or numerals where the states have no names.

        Raises:
            BNetError: The node is not discrete.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat")
        >>> s.labels("y_0"), s.labels("c")
        (('the', 'cat', 'sat'), ('0', '1'))
        """
        node = self.ground.id(name)
        kind = self.state.model.spec(node).tpm.kind
        if kind != "discrete":
            raise BNetError(name, expected="a discrete node", actual=f"a node of kind {kind!r}")
        return self.state.labels(node) or tuple(map(str, range(self.state.model.count_states(node))))

    @planned
    def attention(self, slice: int | None = None, *, role: str | None = None, words: str = "tokens") -> Plan[Tensor]:
        """The attention weights `P(j | i)`: row i is the distribution over the words j that i attends to.

        Args:
            slice: The index of the slice (layer), from 0, or from -1 for the last one. None (default) for all slices,
                which must have the same words, plates and latent choices.
            role: The role of the node with attention, such as `"x"`; required if the slice has several.
            words: `"tokens"` for a row and a column for each token, or `"words"` for one for each full word
                (`tokens.groups`). Attention to a word is the sum over its tokens; attention of a word is the mean over
                its tokens.

        Returns:
            A tensor `[*states, *plates, word i, word j]`: one dimension for each latent choice, as for a value, and for
            each plate, such as heads. Entries are zero where word i cannot attend to word j. Without `slice` the slices
            are the first dimension: `[slice, *states, *plates, word i, word j]`.

        Raises:
            BNetError: There is no such slice, or without `slice` the slices differ in their dimensions.

        >>> import bnet_transformer as bt
        >>> s = bt.decoder(dim=8, heads=2, slices=3, vocabulary=["the", "cat", "sat"]).sentence("the cat sat")
        >>> s.attention().shape, s.attention(-1).shape            # [slice, head, i, j], [head, i, j]
        (torch.Size([3, 2, 3, 3]), torch.Size([2, 3, 3]))
        """
        check_choice("words", words, ("tokens", "words"))
        if words == "words" and len(self.state.tokens) > 1:
            raise BNetError("words", expected="'tokens' in a net with several stacks", actual=words)
        slices = parse_attention_slices(self.state.network, "all", role)[1] if slice is None else [slice]
        specs, evaluator = [find_attention_spec(self.state.model, t, role) for t in slices], self.state.evaluator
        plan = evaluator.plan_attention_of_slices(specs) if slice is None else evaluator.plan_attention(specs[0])
        return (
            plan.then(lambda table: merge_words(table, self.state.encoded.group_subwords()))
            if words == "words"
            else plan
        )

    # interventions and evidence

    def do(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are set: their parents no longer affect them, and descendants follow.

        Args:
            nodes: A mapping from a node (`"q_2_0_3"`; `"q_2_0_-1"` is the last word), a node group (`"q_2"`), a role
                (`"q"`), a name without its word (`"q_2_0"`: at all words) or a pattern (`"q_2_*_3"`) to what it is set
                to: a value (of several nodes one for all, or `[slice, *plates, word, *shape]` with the dimensions of
                `s[name]`), a number (the value of every entry of a node with real values; of a discrete node its
                state), a label, another sentence (the value of the node in that sentence), `Zero()`, `Mean(sentences)`,
                `Mean()`, `Noise(sigma)`, `Shift(vector)` or `Attend(weights)`. `Noise`, `Mean()` and `Shift` use the
                node's value after all other interventions of this call, and `Shift` also after the shifts of its
                ancestors.
            **named: The same as keyword arguments, such as `c=1`.

        Returns:
            The new sentence.

        Raises:
            EvidenceError: A node has evidence, or cannot take the value.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s["x_1_0"].shape, s.do(c=1)["x_1_0"].shape
        (torch.Size([2, 4]), torch.Size([4]))
        >>> s.do({"v_0_1": 0})["v_0_1"]                      # a number is the value of every entry
        tensor([0., 0., 0., 0.])
        """
        return Sentence(
            self.net, self.state.with_interventions(merge_assignments("do", check_mapping("do", nodes), named))
        )

    def undo(self, *names: str) -> Sentence:
        """A new sentence without some interventions.

        Args:
            *names: Names of nodes, groups, roles or patterns, as in `do`. Without names, all interventions are removed.

        Returns:
            The new sentence.
        """
        return Sentence(self.net, self.state.without_interventions(names))

    def observe(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence with evidence: some nodes are observed. The arrows of the graph do not change.

        Args:
            nodes: A mapping from the name of a node to its observed value, state or label; or from the name of several
                nodes, as in `do`, to one for all or to one for each.
            **named: The same as keyword arguments, such as `y_2="cat"`.

        Returns:
            The new sentence.

        Raises:
            EvidenceError: A node is set by `do`, has different evidence, or cannot take the value.
        """
        return Sentence(
            self.net, self.state.with_evidence(merge_assignments("observe", check_mapping("observe", nodes), named))
        )

    def observe_words(self) -> Sentence:
        """A new sentence with its words as evidence: word i + 1 is observed at the readout of word i.

        The words of a sentence are inputs, on which latent choices do not depend. As evidence they change the posterior
        of the choices: a selector has that of the heads that predict these words, and the next word is predicted by the
        heads that predicted the earlier ones. The readout of the last word has no evidence.

        Returns:
            The new sentence.

        Raises:
            BNetError: No readout of the net predicts the next word.
            EvidenceError: A readout has other evidence, or is set by `do`.

        >>> import bnet_transformer as bt
        >>> s = bt.from_pretrained("tiny").sentence("a bird sang a bird sang a bird sang")
        >>> s.top("y_8", count=1), s.observe_words().top("y_8", count=1)
        ([('bird', 0.27...)], [('a', 0.90...)])
        """
        task = infer_task(self.net.network)
        readout, stack = find_next_word_readout(task, "observe_words")
        states = self.state.encoded.given[task.encoders[stack].spec.group.name].tolist()
        return self.observe(dict(zip(self.ground.iter_names(readout.group), states[1:], strict=False)))

    def limits(self, *, budget: int | None = None, atol: float | None = None) -> Sentence:
        """A new sentence with other limits of its queries of probabilities.

        Args:
            budget: The maximum number of joint states, by default 65,536. Exact elimination computes the joint states
                of the latent choices on which one node depends. Enumeration, where a node depends on the choices of
                several words, computes those of all choices. None (default) keeps the budget.
            atol: The absolute tolerance of evidence on a node that is a function of its parents, by default 1e-6.
                Evidence matches if no entry differs by more than `atol + r m`, where m is the largest entry, computed
                or observed, of that node in that state, and r is the rounding of the net's floating type (0 in float64,
                2^-12 in float32). None (default) keeps the tolerance.

        Returns:
            The new sentence.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, heads=3, per="word", observe=bt.tpm.Categorical(3))
        >>> net.sentence("the cat sat").limits(budget=10**6).posterior(["c_0_0", "c_0_1", "c_0_2"]).shape
        torch.Size([3, 3, 3])
        """
        return Sentence(self.net, self.state.with_limits(budget, atol))

    # probability

    @planned
    def posterior(self, name: str | Sequence[str], evidence: Mapping[str, object] | None = None) -> Plan[Tensor]:
        """The posterior `P(node | evidence)` of a discrete node, or the joint posterior of several.

        Args:
            name: The name of a discrete node, or a list of names.
            evidence: Evidence in addition to that of the sentence, as for `observe`.

        Returns:
            A tensor `[*states]` of probabilities, with one dimension for each requested node in their order.

        Raises:
            BudgetError: There are more joint states than the budget (`limits`).
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.posterior("c", evidence={"y_2": "cat"}).shape, s.posterior(["c", "y_0"]).shape
        (torch.Size([2]), torch.Size([2, 3]))
        """
        query, dtype = self.state.posterior_query(name, evidence), self.state.network.log_dtype
        return inference.plan_posterior(query, self.state.evaluator).then(lambda probs: probs.to(dtype))

    @planned
    def top(
        self, name: str, count: int = 5, evidence: Mapping[str, object] | None = None
    ) -> Plan[list[tuple[str, float]]]:
        """The most probable states of a discrete node, such as the next words, given the evidence.

        Args:
            name: The name of a discrete node, such as a readout.
            count: The number of states; all states if the node has fewer.
            evidence: Evidence in addition to that of the sentence, as for `observe`.

        Returns:
            Pairs of a label (`labels`) and its posterior probability, most probable first; of equal probabilities the
            first state is first.

        Raises:
            BudgetError: There are more joint states than the budget (`limits`).
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> best = net.sentence("the cat").top("y_1", 2)
        >>> len(best), best[0][0] in ("the", "cat", "sat"), best[0][1] >= best[1][1]
        (2, True, True)
        """
        count = check_int("count", count)
        query, dtype = self.state.posterior_query(name, evidence), self.state.network.log_dtype

        def find_best(probs: Tensor) -> list[tuple[str, float]]:
            if probs.dim() != 1:
                raise BNetError("name", expected="the name of one node", actual=name)
            values, states = probs.to(dtype).sort(descending=True, stable=True)
            labels = self.labels(name)
            shown = distinguish(labels[state] for state in states[:count].tolist())
            return [*zip(shown, values[:count].tolist(), strict=True)]

        return inference.plan_posterior(query, self.state.evaluator).then(find_best)

    @planned
    def posteriors(self, group: str, evidence: Mapping[str, object] | None = None) -> Plan[GroupPosterior]:
        """The posterior `P(node | evidence)` of each node of a discrete node group, such as the choices of all words.

        On a chain of choices along the words, this is the smoothing of a hidden Markov model. One elimination computes
        all posteriors, if elimination applies.

        Args:
            group: The name of a discrete node group, such as `"c_0"`, or the pattern of all its nodes, `"c_0_*"`.
            evidence: Evidence in addition to that of the sentence, as for `observe`.

        Returns:
            The posteriors: `probabilities` is a tensor `[*plates, word, state]`. `bt.plot` draws them over the words.

        Raises:
            BudgetError: There are more joint states than the budget (`limits`).
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, heads=3, per="word", observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.posteriors("c_0", {"y_2": 1}).probabilities.shape
        torch.Size([3, 3])
        """
        query = self.state.with_evidence(evidence).query()
        return inference.plan_group_posterior(self.state, query, group)

    @planned
    def sample(self, n: int = 1, evidence: Mapping[str, object] | None = None, *, seed: int = 0) -> Plan[Samples]:
        """Samples of every random node from the joint posterior, given the evidence.

        Args:
            n: The number of samples.
            evidence: Evidence in addition to that of the sentence, as for `observe`.
            seed: The seed of the random numbers.

        Returns:
            The samples; `samples.states[name]` is a tensor `[n]` of states, or `[n, *shape]` of values.

        Raises:
            BudgetError: Evidence has to be taken into account over more joint states than the budget.
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> samples = s.sample(5, evidence={"y_2": "cat"})
        >>> samples.states["c"].shape, samples.states["y_0"].shape
        (torch.Size([5]), torch.Size([5]))
        """
        query = self.state.with_evidence(evidence).query()
        count, start = check_int("n", n), check_seed(seed)
        check_memory("draws", 8 * count * len(self.ground), "a smaller n=")

        def add_labels(result: Samples) -> Samples:
            labels = {name: self.state.labels(self.ground.id(name)) for name in result.states}
            return replace(result, labels={name: names for name, names in labels.items() if names is not None})

        return inference.plan_sample(query, count, start).then(add_labels)

    @planned
    def most_probable(
        self, evidence: Mapping[str, object] | None = None, *, nodes: str | Sequence[str] | None = None, count: int = 1
    ) -> Plan[RankedStates]:
        """The most probable joint states of latent choices, given the evidence.

        Without `nodes` it is the most probable explanation, on a chain of choices along the words the path of the
        Viterbi algorithm. The explained nodes are the discrete nodes that have children and are neither observed nor
        set, also those on which the evidence does not depend. Discrete nodes without children are readouts: they are
        summed out, unless they are observed.

        With `nodes` it is the marginal MAP: all other nodes are summed out before the maximum. In general these are
        neither the states in the most probable explanation nor those of the separate posteriors. It can also be much
        more expensive, because the sums, which come first, can connect all requested nodes.

        Args:
            evidence: Evidence in addition to that of the sentence, as for `observe`.
            nodes: Discrete nodes: a name, a node group (`"c_0"`), a role (`"c"`) or a pattern (`"c_*_2"`), or a list of
                these. Observed nodes keep their state. None (default) for the most probable explanation.
            count: The number of joint states, in the order of their probability.

        Returns:
            The joint states, at most `count`, with `log P(states, evidence)` in `log_probs` and
            `P(states | evidence)` in `shares`. `bt.plot` draws them over the words.

        Raises:
            BudgetError: More joint states of choices occur together in the elimination than the budget (`limits`).
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, heads=3, per="word", observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> best = s.most_probable({"y_2": 1}, count=5)
        >>> best.nodes, best.states.shape, best.log_probs.shape, best["c_0"].shape
        (('c_0_0', 'c_0_1', 'c_0_2'), torch.Size([5, 3]), torch.Size([5]), torch.Size([5, 3]))
        >>> best = s.most_probable({"y_2": 1}, nodes=["c_0_0", "y_0"], count=9)
        >>> best.states.shape, round(float(best.shares.sum()), 5)
        (torch.Size([9, 2]), 1.0)
        """
        query, method = self.state.ranked_states_query(nodes, evidence), "marginal_map" if nodes else "most_probable"
        return inference.plan_ranked_states(self.state, query, check_int("count", count), method)

    @planned
    def log_prob(self, evidence: Mapping[str, object] | None = None) -> Plan[Tensor]:
        """The log evidence `log P(evidence)`: a log probability, or a log density if an observed node is continuous.

        Args:
            evidence: Evidence in addition to that of the sentence, as for `observe`.

        Returns:
            A tensor with a single number (natural logarithm).

        Raises:
            BudgetError: There are more joint states than the budget (`limits`).
            EvidenceError: The evidence is impossible.

        >>> import torch
        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> both, one = s.log_prob({"y_0": "cat", "y_2": "cat"}), s.log_prob({"y_2": "cat"})
        >>> torch.testing.assert_close((both - one).exp(), s.posterior("y_0", {"y_2": "cat"})[1], check_dtype=False)
        """
        return inference.plan_log_evidence(self.state.with_evidence(evidence).query())

    @planned
    def counterfactual(
        self, name: str, do: Mapping[str, object], evidence: Mapping[str, object] | None = None
    ) -> Plan[Counterfactual]:
        """What a node would have been under other interventions, given the evidence.

        The evidence determines the noise of the random nodes, and the noise is kept under the interventions. The noise
        of a Normal is its observed value minus its mean. The noise of a categorical is Gumbel-max noise, by convention.

        Args:
            name: The name of the node.
            do: The interventions, as for the method `do`. A node may have evidence and be set to something else.
            evidence: Evidence in addition to that of the sentence, as for `observe`.

        Returns:
            The distribution of the node: the probabilities of its states if it is discrete, or else its value in each
            branch (each joint state of the latent choices) with the probability of the branch.

        Raises:
            BudgetError: There are more joint states than the budget (`limits`).
            EvidenceError: The evidence is impossible, or a node cannot take its value.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.counterfactual("y_2", do={"c": 1}, evidence={"y_2": "cat"}).probabilities.shape
        torch.Size([3])
        """
        state = self.state.with_evidence(evidence)
        done = self.state.resolve_interventions(check_mapping("do", do))
        node = self.ground.id(name)
        plan = plan_counterfactual(state.query([node]), done)
        return plan.then(lambda result: replace(result, labels=state.labels(node)))

    # plans and attention over several slices

    def explain(self, question: str, *arguments: Any, **options: Any) -> Plan[Any]:
        """How a method would be computed: its algorithm, the reason, joint states and FLOPs; nothing is computed.

        Args:
            question: The name of the method: `"value"` (for `s[name]`), `"tpm"`, `"attention"`, `"posterior"`,
                `"posteriors"`, `"top"`, `"most_probable"`, `"log_prob"`, `"sample"`, `"counterfactual"`,
                `"reads"`, `"tan_tree"`, `"separated"`, `"graph"` or `"draw"`.
            *arguments: The arguments of that method.
            **options: The keyword arguments of that method.

        Returns:
            The plan; `print` shows it as a sentence. `plan.node` is the node that rules out a faster algorithm, and
            `plan.run()` computes the result of the method.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).sentence("the cat sat")
        >>> plan = s.explain("posterior", "c", evidence={"y_2": 1})
        >>> plan.algorithm, plan.states, plan.is_exact
        ('elimination', 2, True)
        """
        methods = {name: method for name, method in vars(Sentence).items() if hasattr(method, "find_plan")}
        methods["value"] = methods.pop("__getitem__")
        if not isinstance(question, str) or question not in methods:
            raise unknown_name_error("question", question, methods)
        return explain_call(question, methods[question], (self, *arguments), options)

    @planned
    def reads(
        self,
        slices: str | int | Collection[int] = "all",
        evidence: Mapping[str, object] | None = None,
        *,
        residual: float = 0.5,
        head: int | None = None,
        role: str | None = None,
        method: str = "rollout",
        inclusion: Inclusion | None = None,
        special: bool = True,
    ) -> Plan[Reads]:
        """Attention rollout: `P(source word | output word)` in the Markov chain of attention over slices.

        Args:
            slices: `"all"`, the index of a slice, or indices of consecutive slices. Negative indices count from the
                last slice.
            evidence: Evidence in addition to that of the sentence. In a net with a head selector, the rollout is
                averaged over the posterior of the selector.
            residual: The probability, from 0 to 1, that a step stays at its word (the residual connection).
            head: The index of one head; by default the heads of a plate are averaged.
            role: The role of the node with attention, such as `"x"`; required if a slice has several.
            method: `"rollout"` for the product of the attention matrices, or `"flow"` for the maximum flow.
            inclusion: The result of `bt.inclusion`, to average over the heads whose gates are on.
            special: Whether tables have rows and columns of special tokens, such as `[CLS]`. Without them, a column has
                their total share; the other shares do not change, and `result.matrix` still contains all words.

        Returns:
            The chain. `result.matrix` is a tensor `[output word, source word]`.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=2, mask="causal").sentence("the cat sat")
        >>> read = s.reads()
        >>> read.tokens, read.matrix.shape, read.matrix[0, 1:].tolist()   # causal: word 0 attends to itself only
        (('the', 'cat', 'sat'), torch.Size([3, 3]), [0.0, 0.0])
        """
        check_choice("special", special, (True, False))
        state = self.state
        stack, numbers = parse_attention_slices(state.network, slices, role)
        plan = plan_reads(
            state.with_evidence(evidence).query(),
            state.tokens[stack],
            numbers,
            role=role,
            residual=residual,
            head=head,
            method=method,
            inclusion=inclusion,
            evaluator=None if state.evidence else state.evaluator,
        )
        flags, digest = state.encoded.flag_special_words(state.network, stack), state.encoded.digest
        return plan.then(lambda reads: replace(reads, special=flags, has_special=special, digest=digest(state.network)))

    def lens(self, readout: str | None = None, *, tuned: TunedLens | None = None, top: int = 10) -> Lens:
        """The logit lens: the readout applied to every state `x_t` of every word, as if it were the last state `x_T`.

        The lens of slice t is the readout under `do(x_T = x_t)` for all words, so that all nodes between `x_T` and the
        readout are applied, such as a final norm (`lens.norm`). The lens of early slices is biased, because the readout
        was trained for `x_T` only: `tuned` corrects this. If the readout depends on latent choices, each
        distribution is the mean over their posterior given the evidence.

        Args:
            readout: The name of the readout, such as `"y"`; None for the only one.
            tuned: A tuned lens of this net (`bt.fit_lens`), whose affine maps are applied to the states before.
            top: The number of the most probable words that are stored.

        Returns:
            The lens: the most probable words of every state and word, the entropy, and `KL(end || lens)`, each a tensor
            `[slice, word]`. `bt.plot` draws the grid.

        Raises:
            BNetError: The net has no discrete readout of a state, or the readout is set.
            BudgetError: The joint states of the latent choices on which a word depends require more than 256 runs: set
                some by `do`.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(8, heads=2, slices=2, norm="pre", vocabulary=["the", "cat", "sat"])
        >>> lens = net.sentence("the cat sat").lens()
        >>> lens.kl.shape, lens.probability("cat").shape
        (torch.Size([3, 3]), torch.Size([3, 3]))
        """
        return compute_lens(self.state, readout, tuned, top)

    def tan(
        self,
        boxes: str | Mapping[str, str] = "words",
        *,
        slice: int = 0,
        stack: str | None = None,
        class_box: str | None = None,
    ) -> Tan:
        """The kind of graph (TAN, naive Bayes, ...) that a slice becomes if its nodes are merged into boxes.

        TAN is tree-augmented naive Bayes: each feature has the class and at most one other feature as parents.

        Args:
            boxes: `"words"` for a box for each word, `"roles"` for a box for each role, or a mapping from node to box.
            slice: The index of the slice, from 0, or from -1 for the last one.
            stack: The stack of the slice; required if the net has several.
            class_box: The box that is the class; by default the box of the slice's input.

        Returns:
            The kind of the quotient graph. If the class lacks arrows to some boxes, also these boxes (`missing`), and
            the kind with these arrows added (`nearly`).

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.tan("words").kind, s.tan("roles").nearly
        ('no DAG', 'reverse TAN')
        """
        return classify_slice(self.state, boxes, slice, class_box, stack)

    @planned
    def tan_tree(
        self,
        slice: int = 0,
        evidence: Mapping[str, object] | None = None,
        *,
        head: int | None = None,
        role: str | None = None,
    ) -> Plan[TanTree]:
        """The best tree of a slice's attention, with one parent for each word, and the attention on the tree.

        Args:
            slice: The index of the slice, from 0, or from -1 for the last one.
            evidence: Evidence in addition to that of the sentence, as for `observe`.
            head: The index of one head; by default the heads of a plate are averaged.
            role: The role of the node with attention, such as `"x"`; required if the slice has several.

        Returns:
            The tree: the parent of each word, and the fraction of the attention between different words that is on
            the tree (`mass`).

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> tree = s.tan_tree()
        >>> len(tree.parents), 0 <= tree.mass <= 1
        (3, True)
        """
        plan = get_planner(Sentence.reads)(self, slice, evidence, residual=0.0, head=head, role=role)
        return plan.then(lambda read: tan_tree(read.matrix, read.tokens, read.slices[0], read.head))

    def contributions(
        self, node: str, of: object = None, *, paths: int = 1, exact: object = False
    ) -> Contributions | PathContributions | ScoreContributions:
        """What each writer (embedding, head, feed-forward step, bias) adds to a logit or to attention scores.

        The parts sum to the logit. They are an identity at this sentence with the scale of every norm on the way held
        fixed (the result lists these norms). They are not the effects of an intervention. If the node depends on latent
        choices, the parts are those at the most probable joint state of these choices, which the result states.

        Args:
            node: A readout such as `"logits_9"` or `"y_9"`, or another node that is a sum, a linear map or a norm of
                its parents. For the scores of a row of attention its name, such as `"j_1_0_9"` (slice, head, word).
            of: For a readout, a state or its label (its logit), a pair of these (the difference of the first and the
                second logit), or a vector (the product with the value), as a tensor, an array or a list of floats. None
                (default) for scores, and for the most probable state of a readout.
            paths: 1 (default) for single writers, 2 for paths of two: the writers that each head reads through its
                values, with its attention held fixed.
            exact: Whether to compute also the exact effect of each writer: the readout minus the readout of a run in
                which the output of the writer is zero at the words of its row (`writer.words`) and all later nodes
                follow. For scores, `effects` has them, with the output zero at all words. Or what the output becomes
                instead of zero, as in `do`: `Mean(sentences)`, a function of the value, `Project(within)`, ...

        Returns:
            The parts: `Contributions` with `values` `[writer, word]`; with `paths=2` `PathContributions`; for
            scores `ScoreContributions` with a table of pairs of writers.

        Raises:
            UnsupportedError: The parts do not sum to the readout, because a nonlinear node is on every path to it.
            BNetError: `of` is no state of the node, or is missing for a node without states.
            BudgetError: The latent choices have too many joint states.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(dim=8, heads=2, slices=2, norm="pre", vocabulary=["the", "a", "cat", "dog"])
        >>> s = net.sentence("the cat the")
        >>> result = s.contributions("y_2", of=("cat", "dog"))
        >>> bool((result.total - result.value).abs() < 1e-5), result.by_head().shape
        (True, (2, 2))
        >>> s.contributions("j_1_0_2").values.shape          # slice 1, head 0, word 2: [query, key, word]
        torch.Size([5, 5, 3])
        """
        return compute_contributions(self.state, node, of, paths, exact)

    # structure

    @property
    def _graph(self) -> GroundGraph:
        return self.ground

    @property
    def _functional_groups(self) -> frozenset[int]:
        return self.state.network.functional_groups

    @planned
    def separated(
        self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False, verify: bool = False
    ) -> Plan[Separation]:
        """Whether the graph d-separates x from y given other nodes.

        Separation implies independence. The converse can fail if TPMs are deterministic. All roots count as random,
        also words and weights. The evidence of the sentence is not used.

        Args:
            x: The name of a node, or a list of names.
            y: The name of a node, or a list of names.
            given: The names of the nodes on which to condition.
            deterministic: Whether to add to `given` the nodes that it determines (D-separation).
            verify: Whether to compute also how strongly x and y depend on each other with the parameters of this net:
                exactly over the states of the choices of a small net, and to first order in the words.

        Returns:
            The result; `bool(result)` is true if x and y are separated.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> bool(s.separated("q_0_0", "k_0_1")), bool(s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"]))
        (False, True)
        """
        check_choice("verify", verify, (True, False))
        result = super().separated(x, y, given, deterministic=deterministic)
        question, model = f"separation of {', '.join(result.x)} and {', '.join(result.y)}", self.state.model
        if not verify:
            return Plan(question, "graph", "separation is a property of the graph (Bayes ball)", lambda: result)
        x_ids, y_ids, given_ids = (list(map(self.ground.id, part)) for part in (result.x, result.y, result.given))
        return plan_choice_dependence(question, model, x_ids, y_ids, given_ids, self.state.budget).then(
            lambda choices: replace(
                result, over_choices=choices, over_roots=max_partial_correlation(model, x_ids, y_ids, given_ids)
            )
        )

    def shrink(self, boxes: Mapping[str, str] | Callable[[str], str], *, weights: bool = False) -> Quotient:
        """The quotient graph, in which all nodes of a box are merged into one node.

        Args:
            boxes: The box of each node: a mapping from name to box, or a function that returns the box of a name.
            weights: Whether selectors and weights are included.

        Returns:
            The quotient graph: its boxes and the arrows between them.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.shrink(lambda name: name[0]).boxes
        ('x', 'q', 'k', 'v')
        """
        check_choice("weights", weights, (True, False))
        return graph.shrink(self.ground, boxes, NodeSelection(weights=weights))

    # figures and exports

    @explained_by(_plan_graph)
    def graph(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
        attention: bool = False,
        min_weight: float | None = None,
        limit: int | None = MAX_ARROWS,
    ) -> nx.DiGraph:
        """The ground graph as a networkx graph; its nodes have attributes such as role, slice, head, word and kind.

        Args:
            weights: Whether selectors and weights are included.
            slices: The indices of the included slices; None for all.
            words: The indices of the included words, in a net with several stacks a mapping from stack; None for all.
            heads: The indices of the included heads; None for all.
            attention: Whether arrows of attention have the attribute `weight`: `P(j | i)`, averaged over the posterior
                of the latent choices.
            min_weight: The minimum weight, from 0 to 1, of an included arrow of attention; None for all arrows.
            limit: The maximum number of arrows; None for no limit.

        Returns:
            A directed graph whose nodes are the names of the ground nodes.

        Raises:
            BudgetError: There are more arrows than `limit`.
        """
        return sentence_to_networkx(
            self.state,
            weights=weights,
            slices=slices,
            words=words,
            heads=heads,
            attention=attention,
            min_weight=min_weight,
            limit=limit,
        )

    def picture(self, **options: Any) -> Picture:
        """The figure of the sentence: its nodes in a grid, or for a long sentence hidden states and strong attention.

        Args:
            **options: `detail` is "nodes", "words" (the attention grid) or "folded" (the template graph). `weights`,
                `slices`, `words` and `heads` select a part; `min_weight` and `top` select the strongest attention;
                `only` selects some nodes, by names or as a networkx graph. `highlight` marks names, patterns, paths or
                a result (a trail, a separation, a sweep). `boxes` draws frames around the boxes of `tan` and `shrink`.
                `attention=False` omits `P(j | i)`. `theme` is "light", "dark" or "auto". `legend=False` omits the
                legend. `limit` is the maximum number of arrows. `special=False` omits special tokens. `width` is the
                physical width of the file, such as "8.5cm", "column", "text" or "slide"; `font` is a font family;
                `title` is the text above the figure.

        Returns:
            The figure. A notebook displays it; its methods write it to a file.

        Raises:
            BudgetError: There are more arrows than `limit`; the error names filters that suffice.
            BNetError: The figure does not fit `width` at a legible size; the error names a width that suffices.

        >>> import bnet_transformer as bt
        >>> figure = bt.bayesuvius(dim=4).sentence("the cat sat").picture()
        >>> len(figure.boxes), len(figure.arrows)
        (19, 42)
        """
        return drawing.picture(self.state, **options)

    @explained_by(_plan_figure)
    def draw(self, path: PathLike, **options: Any) -> None:
        """Write the figure, the interactive page or the graph of the sentence to a file.

        Args:
            path: The file. Its suffix selects the format: svg, png, pdf, tex, dot, html, json, graphml, gexf or bif. A
                path that ends in `/` is a folder, in which `nodes.parquet` and `arrows.parquet` are written; this
                requires pyarrow (the extra `parquet`).
            **options: The options of `picture`; for json, graphml, gexf and a folder the options of `graph`; for html,
                the interactive page, the options of `widget`; bif, the discrete nodes given the words, has no options.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).sentence("the cat").draw(f"{folder}/cat.dot", weights=False)
        ...     Path(f"{folder}/cat.dot").read_text()[:7]
        'digraph'
        """
        drawing.draw(self.state, path, **options)

    def widget(self, **options: Any) -> Widget:
        """The interactive page as a notebook widget: a click on a node sets it by `do`, and the net runs again.

        Args:
            **options: `detail` is what the page shows initially: `"words"` (hidden states only) or `"nodes"` (the nodes
                of every slice); by default as many nodes as are readable. `posterior` has the names of discrete nodes
                whose posteriors the page shows, in addition to those of the selectors. `inclusion` is the result of
                `bt.inclusion`, or a table `[slice, head]` of inclusion probabilities. `contributions` is a result of
                the method `contributions`, or a list of them, whose largest parts the panel of the node shows. `slices`
                and `heads` are the indices of those whose attention the page contains. `title` is by default the words
                of the sentence. `theme` is "light", "dark" or "auto". `special=False` omits special tokens; a note
                states the share of the attention that goes to them.

        Returns:
            The widget. `sentence` is the sentence after all clicks; it, `selected`, `view` and `state` can be set.

        Raises:
            UnknownNameError: There is no such option.
        """
        return drawing.make_widget(self, options)

    def to_pgmpy(self, *, limit: int = 10_000_000) -> DiscreteBayesianNetwork:
        """The discrete nodes, given the words, as a network of pgmpy; `draw("net.bif")` writes it as a file.

        Args:
            limit: The maximum number of entries of all tables together.

        Returns:
            The network, with a table for each discrete node.

        Raises:
            BudgetError: The tables have more entries than `limit`, or require more runs of the net, one for each joint
                state of the choices, than the budget (`limits`).
        """
        return to_pgmpy(self.state.model, evidence=self.state.evidence, limit=limit, runs=self.state.budget)

    def __repr__(self) -> str:
        text = " | ".join(" ".join(tokens) for tokens in self.state.tokens.values())
        text = text if len(text) <= 60 else text[:59] + "…"
        counts = f"{len(self.ground):,} nodes, {self.ground.count_arrows():,} arrows"
        for label, nodes in (("do", self.state.interventions), ("observed", self.state.evidence)):
            counts += f", {label} {', '.join(map(self.ground.name, nodes))}" if nodes else ""
        return f"<Sentence {text!r}: {counts}>" if self.state.tokens else f"<Sentence: {counts}>"

    @translate_memory_errors("picture")
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> drawing.MimeBundle:
        """What a notebook displays: the widget, or the figure if no widget can run."""
        return drawing.build_mime_bundle(repr(self), self.state, self.widget)


drawing.picture.register(Sentence, Sentence.picture)
drawing.draw.register(Sentence, Sentence.draw)
