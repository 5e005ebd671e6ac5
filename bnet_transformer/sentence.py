"""`Sentence`: the bnet of one sentence. Each method validates its arguments and delegates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import drawing, graph, inference, reference
from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_seed
from bnet_transformer._core.memory import check_memory, translate_memory_errors, translate_memory_errors_of_methods
from bnet_transformer.attention import Inclusion, Reads, Tan, TanTree
from bnet_transformer.attention.rollout import compute_reads
from bnet_transformer.attention.tan import classify_slice, tan_tree
from bnet_transformer.bridges.networkx import MAX_ARROWS, sentence_to_networkx
from bnet_transformer.bridges.pgmpy import to_bif, to_pgmpy
from bnet_transformer.data.encode import merge_assignments
from bnet_transformer.drawing import PathLike
from bnet_transformer.errors import BNetError
from bnet_transformer.explanation import explain_query
from bnet_transformer.figures import Picture
from bnet_transformer.graph import GroundGraph, NodeSelection, Quotient, Separation, StructureQueries, topological_order
from bnet_transformer.graph.queries import Names
from bnet_transformer.inference import Route, Samples, SentenceState
from bnet_transformer.inference.dependence import max_choice_dependence, max_partial_correlation
from bnet_transformer.inference.selection import merge_words, parse_attention_slices
from bnet_transformer.interventions.counterfactual import Counterfactual, counterfactual

if TYPE_CHECKING:
    import graphviz
    import networkx as nx
    from pgmpy.models import DiscreteBayesianNetwork

    from bnet_transformer.bnet import BNet
    from bnet_transformer.page.widget import Widget


@translate_memory_errors_of_methods
class Sentence(StructureQueries):
    """The bnet of one sentence: a lazy ground graph, evaluated on demand.

    Nodes have names (`q_0_2`: slice 0, word 2); `s[name]` is a value, `s.tpm(name)` a distribution. A sentence is
    immutable: `do` and `observe` return a new one.

    Args:
        net: The net.
        state: The tensors, interventions and evidence of the sentence.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=8).sentence("the cat sat")
    >>> s.parents("q_0_2"), s.do(c=1)["x_1_0"].shape
    (['W_q_0', 'x_0_2'], torch.Size([8]))
    """

    def __init__(self, net: BNet, state: SentenceState) -> None:
        self.net = net
        self.state = state

    # contents

    @property
    def ground(self) -> GroundGraph:
        """The ground graph on integers, after surgery: counts, arrow arrays, names."""
        return self.state.ground

    @property
    def words(self) -> tuple[str, ...]:
        """The words; with several stacks, those of all stacks in order."""
        return tuple(token for tokens in self.state.tokens.values() for token in tokens)

    @property
    def special(self) -> tuple[bool, ...]:
        """Which words are special tokens of a pretrained model, such as `[CLS]`."""
        return self.state.encoded.flag_special_tokens(self.state.network)

    @property
    def spans(self) -> tuple[tuple[int, int] | None, ...]:
        """The range of each token in its text; None for special tokens, and for words that do not come from text."""
        return self.state.encoded.get_spans()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each full word, by the tokenizer's first split (or by a list of words).

        A punctuation mark is a word, and so is a special token; without a tokenizer each token is one.
        """
        return self.state.encoded.group_subwords()

    # values and distributions

    @translate_memory_errors("value")
    def __getitem__(self, name: str) -> Tensor:
        """The value of a node.

        Args:
            name: A node that is a function of its parents, such as `"q_0_2"`.

        Returns:
            `[*states, *shape]`, with a dim for each open choice that the node depends on (`c` first).
        """
        return self.state.evaluator.value(self.ground.id(name))

    def tpm(self, name: str) -> Distribution:
        """The distribution of a node given its parents' values.

        Args:
            name: A node.

        Returns:
            A distribution of torch or Pyro, batched over the states of the open choices that the parents depend on.
        """
        return self.state.evaluator.distribution(self.ground.id(name))

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
            raise BNetError(name, expected="a discrete node", actual=f"a {kind} one")
        return self.state.labels(node) or tuple(map(str, range(self.state.model.count_states(node))))

    def attention(self, slice: int, *, role: str | None = None, words: str = "tokens") -> Tensor:
        """The attention TPMs of a slice, `P(j | i)`.

        Args:
            slice: The index of the slice.
            role: The node with attention, if a slice has several.
            words: `"tokens"`, or `"words"`, which groups sub-words (`groups`): attention to a word is the sum over its
                tokens, attention of a word the mean over its tokens.

        Returns:
            `[*states, *plates, word, word]`, zero where word i cannot attend to word j.
        """
        check_choice("words", words, ("tokens", "words"))
        if words == "words" and len(self.state.tokens) > 1:
            raise BNetError("words", expected="'tokens', in a net with several stacks", actual=words)
        table = self.state.evaluator.attention(slice, role)
        return merge_words(table, self.groups) if words == "words" else table

    # modified copies

    def do(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence in which nodes are set: arrows from their parents are cut, and descendants are computed again.

        Args:
            nodes: For each node, group (`q_2`), role (`q`) or pattern (`"q_2_*_3"`) a value, a state, a label, another
                sentence (the value there), `Zero()`, `Mean(sentences)`, `Mean()`, `Noise(sigma)` or `Attend(row)`.
                `Noise` and `Mean()` use the node's value after all other interventions of this call.
            **named: The same by keywords.

        Raises:
            EvidenceError: A node has evidence, or cannot take the value.
        """
        return Sentence(
            self.net, self.state.with_interventions(merge_assignments("do", check_mapping("do", nodes), named))
        )

    def undo(self, *names: str) -> Sentence:
        """A new sentence without some interventions.

        Args:
            *names: The nodes (names, groups, roles, patterns); by default all.
        """
        return Sentence(self.net, self.state.without_interventions(names))

    def observe(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Sentence:
        """A new sentence with evidence, which changes no arrow.

        Args:
            nodes: For each node the observed value, state or label.
            **named: The same by keywords.

        Raises:
            EvidenceError: A node is set, has other evidence, or cannot take the value.
        """
        return Sentence(
            self.net, self.state.with_evidence(merge_assignments("observe", check_mapping("observe", nodes), named))
        )

    # probability

    def posterior(
        self,
        name: str | Sequence[str],
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`P(node | evidence)` for a discrete node; for several nodes their joint posterior.

        Args:
            name: A discrete node, or several.
            evidence: Evidence in addition to that of the sentence.
            budget: How many joint states may be computed: of the choices that one node depends on, which are
                eliminated, or of all, where choices of words meet.
            atol: The tolerance of evidence on a node that is a function of its parents: no entry may differ by more
                than `atol + r m`, where m is the largest entry, computed or observed, of that node in that state, and r
                the rounding of the net's floating type (0 in float64, 2^-12 in float32).

        Returns:
            `[*states]`, a dim for each node in their order.

        Raises:
            BudgetError: There are more joint states.
            EvidenceError: The evidence is impossible.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.posterior("c", evidence={"y_2": "cat"}).shape, s.posterior(["c", "y_0"]).shape
        (torch.Size([2]), torch.Size([2, 3]))
        """
        query = self.state.posterior_query(name, evidence, budget, atol)
        return inference.joint_posterior(query, self.state.evaluator).to(self.state.network.log_dtype)

    def sample(
        self,
        n: int = 1,
        evidence: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Samples:
        """Samples of every random node, given the evidence.

        Args:
            n: The number of samples.
            evidence: Evidence in addition to that of the sentence.
            seed: The seed of the samples.
            budget: The maximum number of joint states, as in `posterior`.
            atol: The tolerance of evidence, as in `posterior`.

        Returns:
            For each random node its samples, `[n]` or `[n, *shape]`.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> samples = s.sample(5, evidence={"y_2": "cat"})
        >>> samples.states["c"].shape, samples.states["y_0"].shape
        (torch.Size([5]), torch.Size([5]))
        """
        query = self.state.with_evidence(evidence).query((), budget, atol)
        count, start = check_int("n", n), check_seed(seed)
        check_memory("draws", 8 * count * len(self.ground), "a smaller n=")
        result = inference.sample(query, count, start)
        labels = {name: self.state.labels(self.ground.id(name)) for name in result.states}
        return replace(result, labels={name: names for name, names in labels.items() if names is not None})

    def log_prob(
        self,
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`log P(evidence)`; a log density if a node is continuous.

        Args:
            evidence: Evidence in addition to that of the sentence.
            budget: The maximum number of joint states, as in `posterior`.
            atol: The tolerance of evidence, as in `posterior`.

        Returns:
            A scalar tensor.

        >>> import torch
        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> both, one = s.log_prob({"y_0": "cat", "y_2": "cat"}), s.log_prob({"y_2": "cat"})
        >>> torch.testing.assert_close((both - one).exp(), s.posterior("y_0", {"y_2": "cat"})[1], check_dtype=False)
        """
        query = self.state.with_evidence(evidence).query((), budget, atol)
        return inference.joint_log_evidence(query)

    def counterfactual(
        self,
        name: str,
        do: Mapping[str, object],
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Counterfactual:
        """What a node would have been under `do`, given the evidence.

        The noise of a Normal is its observed value minus its mean; that of a categorical is Gumbel-max, by convention.

        Args:
            name: A node.
            do: Interventions, as for `do`. A node may have evidence and be set to something else.
            evidence: Evidence in addition to that of the sentence.
            budget: The maximum number of joint states, as in `posterior`.
            atol: The tolerance of evidence, as in `posterior`.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.counterfactual("y_2", do={"c": 1}, evidence={"y_2": "cat"}).probabilities.shape
        torch.Size([3])
        """
        state = self.state.with_evidence(evidence)
        done = self.state.resolve_interventions(check_mapping("do", do))
        node = self.ground.id(name)
        result = counterfactual(state.query([node], budget, atol), done)
        return replace(result, labels=state.labels(node))

    # routing and attention

    def explain(self, question: str, *arguments: Any, **options: Any) -> Route:
        """How a question would be answered: the algorithm, the reason, joint states and FLOPs; nothing is computed.

        Args:
            question: The name of the method: `"value"` (for `s[name]`), `"tpm"`, `"attention"`, `"posterior"`,
                `"log_prob"`, `"sample"`, `"counterfactual"`, `"reads"`, `"tan_tree"`, `"separated"`, `"graph"` or
                `"draw"`.
            *arguments: The arguments of that method.
            **options: The keyword arguments of that method.

        Returns:
            The route; `print` it. `route.node` names what rules out a faster algorithm.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, observe=bt.tpm.Categorical(3)).sentence("the cat sat")
        >>> route = s.explain("posterior", "c", evidence={"y_2": 1})
        >>> route.algorithm, route.states, route.is_exact
        ('elimination', 2, True)
        """
        return explain_query(self.state, vars(Sentence), question, arguments, options)

    def reads(
        self,
        slices: str | int | Collection[int] = "all",
        evidence: Mapping[str, object] | None = None,
        *,
        residual: float = 0.5,
        head: int | None = None,
        role: str | None = None,
        method: str = "rollout",
        budget: int = reference.BUDGET,
        inclusion: Inclusion | None = None,
    ) -> Reads:
        """`P(source word | output word)` in the Markov chain of attention TPMs over slices (attention rollout).

        Args:
            slices: `"all"`, or slices that follow one another.
            evidence: Evidence in addition to that of the sentence. Under a selector the products are averaged over its
                posterior.
            residual: The share of a step that stays at its word.
            head: One head; heads of a plate are averaged by default.
            role: The node that reads, where a slice has several.
            method: `"rollout"`, or `"flow"`, the greatest flow.
            budget: How many joint states may be computed, as in `posterior`.
            inclusion: The result of `bt.inclusion`, to average over the heads whose gates are on.

        Returns:
            The chain; its `matrix` is `[word, word]`, with a row for each output word.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=2, mask="causal").sentence("the cat sat")
        >>> read = s.reads()
        >>> read.tokens, read.matrix.shape, read.matrix[0, 1:].tolist()   # the first word read nothing behind it
        (('the', 'cat', 'sat'), torch.Size([3, 3]), [0.0, 0.0])
        """
        stack, numbers = parse_attention_slices(self.state.network, slices, role)
        query = self.state.with_evidence(evidence).query((), budget)
        return compute_reads(
            query,
            self.state.tokens[stack],
            numbers,
            role=role,
            residual=residual,
            head=head,
            method=method,
            inclusion=inclusion,
            evaluator=None if self.state.evidence else self.state.evaluator,
        )

    def tan(
        self,
        boxes: str | Mapping[str, str] = "words",
        *,
        slice: int = 0,
        stack: str | None = None,
        class_box: str | None = None,
    ) -> Tan:
        """The class of a slice that is shrunk to boxes, such as TAN or naive Bayes.

        Args:
            boxes: `"words"`, `"roles"`, or a mapping from nodes to boxes.
            slice: The slice.
            stack: The stack of the slice, if there are several.
            class_box: The box of the class; by default the state that enters.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.tan("words").kind, s.tan("roles").nearly
        ('no DAG', 'reverse TAN')
        """
        return classify_slice(self.state, boxes, slice, class_box, stack)

    def tan_tree(
        self,
        slice: int = 0,
        evidence: Mapping[str, object] | None = None,
        *,
        head: int | None = None,
        role: str | None = None,
        budget: int = reference.BUDGET,
    ) -> TanTree:
        """The best parent of each word in a slice's attention, and the fraction of the attention on that tree.

        Args:
            slice: The slice.
            evidence: Evidence in addition to that of the sentence.
            head: One head; by default the heads of a plate are averaged.
            role: The node with attention, if a slice has several.
            budget: The maximum number of joint states, as in `posterior`.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> tree = s.tan_tree()
        >>> len(tree.parents), 0 <= tree.mass <= 1
        (3, True)
        """
        read = self.reads(slice, evidence, residual=0.0, head=head, role=role, budget=budget)
        return tan_tree(read.matrix, read.tokens, read.slices[0], read.head)

    # structure

    @property
    def _graph(self) -> GroundGraph:
        return self.ground

    @property
    def _functional_groups(self) -> frozenset[int]:
        return self.state.network.functional_groups

    def topological_order(self) -> list[str]:
        """All nodes, parents before children.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> order = s.topological_order()
        >>> order[0], order[-1], len(order)
        ('c', 'x_1_2', 19)
        """
        return [self.ground.name(node) for node in topological_order(self.ground).tolist()]

    def separated(
        self,
        x: Names,
        y: Names,
        given: Names = (),
        *,
        deterministic: bool = False,
        verify: bool = False,
        budget: int = reference.BUDGET,
    ) -> Separation:
        """Whether the graph separates x from y given other nodes.

        Sound, but not complete for deterministic TPMs. Roots count as random, words and weights among them. Evidence
        of the sentence is not used.

        Args:
            x: A node, or several.
            y: A node, or several.
            given: A node, or several.
            deterministic: Add to `given` the nodes that it determines (D-separation).
            verify: Compute how dependent x and y are in this sentence's numbers: over the states of the choices of a
                small net, and to first order in the words.
            budget: The maximum number of joint states of `verify`.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> bool(s.separated("q_0_0", "k_0_1")), bool(s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"]))
        (False, True)
        """
        check_choice("verify", verify, (True, False))
        check_int("budget", budget)
        result = super().separated(x, y, given, deterministic=deterministic)
        if not verify:
            return result
        left, right, known = ([self.ground.id(name) for name in part] for part in (result.x, result.y, result.given))
        choices = max_choice_dependence(self.state.model, left, right, known, budget)
        return replace(
            result, over_choices=choices, over_roots=max_partial_correlation(self.state.model, left, right, known)
        )

    def shrink(self, boxes: Mapping[str, str] | Callable[[str], str], *, weights: bool = False) -> Quotient:
        """The quotient graph, with each box of nodes shrunk to one.

        Args:
            boxes: The box of each node, as a mapping or a function of its name.
            weights: Whether selectors and weights are included.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.shrink(lambda name: name[0]).boxes
        ('x', 'q', 'k', 'v')
        """
        check_choice("weights", weights, (True, False))
        return graph.shrink(self.ground, boxes, NodeSelection(weights=weights))

    # figures and exports

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
        """The ground graph: one node for each word, with role, slice, head, word, kind, ... as attributes.

        Args:
            weights: Whether selectors and weights are included.
            slices: The included slices; None for all.
            words: The included words; None for all.
            heads: The included heads; None for all.
            attention: Whether arrows carry `weight`, `P(j | i)` averaged over the posterior of the open choices.
            min_weight: The minimum weight of an arrow with attention.
            limit: The maximum number of arrows; None for any.

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
        """The figure of the sentence: its nodes in a grid; for a long sentence, states and the strongest attention.

        Args:
            **options: `detail` is "nodes", "words" (the attention grid) or "folded"; `weights`, `slices`, `words`,
                `heads` select a part, `min_weight` and `top` the strongest attention, `only` some nodes or a networkx
                graph of them; `highlight` marks names, patterns, paths or a result (a trail, a separation, a sweep);
                `boxes` frames the boxes of `tan` and `shrink`; `attention=False` omits `P(j | i)`; `theme` is light,
                dark or auto; `legend=False` omits the legend; `limit` is the maximum number of arrows.

        Raises:
            BudgetError: There are more arrows; the error names filters that suffice.

        >>> import bnet_transformer as bt
        >>> figure = bt.bayesuvius(dim=4).sentence("the cat sat").picture()
        >>> len(figure.boxes), len(figure.arrows)
        (19, 42)
        """
        layout: Picture = drawing.make_picture(self.state, **options)
        return layout

    def to_graphviz(self, **options: Any) -> graphviz.Source:
        """The figure as DOT for editing: structure, labels and colours, boxes as clusters, without a layout.

        Args:
            **options: Those of `picture`.

        Returns:
            A `graphviz.Source`. `.source` is the DOT; `.render(...)` and `.pipe(...)` draw it with the program `dot`. A
            notebook shows the drawing of `dot`, or the figure of `picture` if `dot` is not installed.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=4).sentence("the cat").to_graphviz().source.splitlines()[0]
        'digraph bnet {'
        """
        return drawing.make_picture(self.state, **options).to_graphviz()

    def draw(self, path: PathLike, **options: Any) -> None:
        """Write the figure, the page or the graph of the sentence.

        Args:
            path: The file. Its suffix is svg, png, pdf, tex, dot, html, json, graphml or bif.
            **options: Those of `picture`; for json and graphml those of `graph`; for html those of `explore`; bif has
                none.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).sentence("the cat").draw(f"{folder}/cat.dot", weights=False)
        ...     Path(f"{folder}/cat.dot").read_text()[:7]
        'digraph'
        """
        drawing.write_picture(self.state, path, **options)

    def explore(
        self,
        path: PathLike,
        *,
        detail: str | None = None,
        posterior: str | Sequence[str] | None = None,
        inclusion: object = None,
        slices: int | Collection[int] | None = None,
        heads: int | Collection[int] | None = None,
        title: str | None = None,
        theme: str = "auto",
    ) -> PathLike:
        """Write the interactive page of the sentence, one HTML file that opens from disk, and return its path.

        Args:
            path: The file.
            detail: What is unfolded at first: `"words"` (states alone), `"nodes"` (every slice); by default what can
                be read.
            posterior: Discrete nodes whose posterior is shown besides the selectors'.
            inclusion: The result of `bt.inclusion`, or a table of the inclusion probability of each head, `[slice,
                head]`.
            slices: The slices whose reads are kept.
            heads: The heads whose reads are kept.
            title: The title; by default the sentence.
            theme: light, dark or auto.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = bt.bayesuvius(dim=4).sentence("the cat").explore(f"{folder}/cat.html", theme="dark")
        ...     page.endswith("cat.html")
        True
        """
        options = {"posterior": posterior, "inclusion": inclusion, "slices": slices, "heads": heads}
        drawing.write_page(self.state, path, detail=detail, title=title, theme=theme, **options)
        return path

    def widget(self, **options: Any) -> Widget:
        """The same page as a notebook widget, in which `do` is live: a click sets a node and runs the net again.

        Args:
            **options: Those of `explore`.

        Returns:
            The widget; its `sentence` is the sentence after all clicks.
        """
        return drawing.make_widget(self, options)

    def to_pgmpy(self, *, limit: int = 10_000_000, runs: int = reference.BUDGET) -> DiscreteBayesianNetwork:
        """The discrete part, given the words, as a pgmpy network.

        Args:
            limit: The maximum number of table entries.
            runs: The maximum number of runs of the net.
        """
        return to_pgmpy(self.state.model, evidence=self.state.evidence, limit=limit, runs=runs)

    def to_bif(self, *, limit: int = 10_000_000, runs: int = reference.BUDGET) -> str:
        """The discrete part, given the words, in the BIF format.

        Args:
            limit: The maximum number of table entries.
            runs: The maximum number of runs of the net.
        """
        return to_bif(self.state.model, evidence=self.state.evidence, limit=limit, runs=runs)

    def __repr__(self) -> str:
        text = " | ".join(" ".join(tokens) for tokens in self.state.tokens.values())
        text = text if len(text) <= 60 else text[:59] + "…"
        counts = f"{len(self.ground):,} nodes, {self.ground.count_arrows():,} arrows"
        for label, nodes in (("do", self.state.interventions), ("seen", self.state.evidence)):
            counts += f", {label} {', '.join(map(self.ground.name, nodes))}" if nodes else ""
        return f"<Sentence {text!r}: {counts}>" if self.state.tokens else f"<Sentence: {counts}>"

    @translate_memory_errors("picture")
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> drawing.MimeBundle:
        """The notebook representation: the widget, or the figure if no widget can run."""
        return drawing.build_mime_bundle(repr(self), self.state, self.widget)
