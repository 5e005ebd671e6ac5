"""The state of one sentence: its tensors, its interventions, its evidence, and the model and values that follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bnet_transformer._core.arrays import copy_to_tensor
from bnet_transformer._core.checks import check_float, check_int, check_mapping, check_seed, set_frozen
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.encode import EncodedSentence, Tokens, encode_value
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, EvidenceError, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeSelection
from bnet_transformer.graph.queries import parse_names
from bnet_transformer.inference.intervention_values import (
    RelativeValues,
    expand_patterns,
    is_relative,
    match_nodes,
    resolve_value,
)
from bnet_transformer.inference.node_evaluator import NodeEvaluator
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.selection import parse_indices, parse_slices, parse_words
from bnet_transformer.reference import ATOL, BUDGET, AttentionRow, GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node
from bnet_transformer.tpm import Attention


@dataclass(frozen=True)
class Zero:
    """The value 0 for every number of a node.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Zero
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(v_0_1=Zero())["v_0_1"]
    tensor([0., 0., 0., 0.])
    """


@dataclass(frozen=True)
class Mean:
    """The mean of a node's values in other sentences; without any, of its family's values over this one's words.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Mean
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Mean())["x_0_1"].isclose((s["x_0_0"] + s["x_0_1"] + s["x_0_2"]) / 3).all().item()
    True
    """

    sentences: tuple[Any, ...] = ()

    def __init__(self, sentences: Sequence[Any] | None = None) -> None:
        several = isinstance(sentences, Sequence) and bool(sentences) and all(map(_has_node_values, sentences))
        if sentences is not None and not several:
            allowed = "Mean(), over the words of this sentence"
            raise BNetError("Mean", expected="a list of sentences", actual=sentences, allowed=allowed)
        object.__setattr__(self, "sentences", tuple(sentences or ()))


@dataclass(frozen=True)
class Noise:
    """A node's own value plus normal noise; each node's noise is fixed by the seed and its name.

    The value is that of the sentence with all else done that the same `do` says, but for noise and `Mean()`.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Noise
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(x_0_1=Noise(0.1))["x_0_1"].shape
    torch.Size([4])
    """

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        set_frozen(self, sigma=check_float("sigma", self.sigma, above=0), seed=check_seed(self.seed))


@dataclass(frozen=True)
class Attend:
    """A row of attention in place of `P(j | i)`: a probability for each word that the node may read, or for all words.

    The node still reads its values v (and its residual), as they come to be; its q and k are not read any more.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Attend
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat").do(x_1_0=Attend([0, 0, 1]))
    >>> s["x_1_0"].isclose(s["v_0_2"]).all().item(), s.parents("x_1_0")
    (True, ['v_0_0', 'v_0_1', 'v_0_2'])
    """

    weights: Tensor

    def __init__(self, weights: object) -> None:
        try:
            row = copy_to_tensor(weights)
            if row.is_complex():
                raise TypeError("complex")
            row = row.to(torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BNetError("Attend", expected="a probability for each word", actual=weights) from error
        if row.dim() != 1 or not bool((row >= 0).all()) or abs(float(row.sum()) - 1) > 1e-6:
            raise BNetError("Attend", expected="probabilities of words, summing to 1", actual=weights)
        object.__setattr__(self, "weights", row)


def match_nodes(ground: GroundGraph, pattern: object) -> list[int]:
    """The nodes that a name, a family (`q_2`), a role (`q`) or a pattern (`q_2_*_3`) stands for.

    A star stands for one index, so `q_*_3` has slice and word and no head. A name comes before a family, a family
    before a role.
    """
    folded = ground.template
    if not isinstance(pattern, str) or "*" not in pattern:
        if isinstance(pattern, str) and folded.parse_name(pattern, ground.word_counts) is None:
            families = [folded.by_name[pattern]] if pattern in folded.by_name else folded.by_stem.get(pattern, ())
            found = [node for family in families for node in ground.select_nodes(family).tolist()]
            if found:
                return found
        return [ground.id(pattern)]
    count = pattern.count("_")
    found = []
    for family in folded.groups:
        if family.name.count("_") + len(ground.shapes[family.index]) == count:
            base = int(ground.offsets[family.index])
            names = ground.iter_names(family)
            found += [base + k for k, name in enumerate(names) if fnmatchcase(name, pattern)]
    if not found:
        shown = [next(ground.iter_names(family)) for family in folded.groups]
        raise unknown_name_error("pattern of nodes", pattern, shown)
    return found


def expand_patterns(ground: GroundGraph, values: Mapping[str, object]) -> dict[int, object]:
    """For each node that names, families, roles and patterns stand for, what is wanted of it: one thing."""
    found: dict[int, object] = {}
    for pattern, value in values.items():
        for node in match_nodes(ground, pattern):
            if node in found:
                got = f"two, one of them by {pattern!r}"
                raise EvidenceError(f"do of {ground.name(node)}", expected="one value", actual=got)
            found[node] = value
    return found


def is_relative(value: object) -> bool:
    """True of what hangs on the values of the sentence itself: noise, and the mean over its words."""
    return isinstance(value, Noise) or (isinstance(value, Mean) and not value.sentences)


def resolve_value(model: GroundModel, node: int, value: object) -> Tensor | AttentionRow:
    """What a node is set to: by zeros, means, a row, another sentence, or a value as it is."""
    name, member = model.ground.name(node), model.spec(node)
    match value:
        case Zero():
            if member.tpm.is_index_valued:
                raise EvidenceError(name, expected="a node whose value is real numbers", actual="one that has states")
            return torch.zeros(member.shape, dtype=model.network.dtype, device=model.network.device)
        case Mean(sentences=others):
            return torch.stack([_check_single_value(model, node, other[name]) for other in others]).mean(0)
        case Attend(weights=weights):
            return _build_attention_row(model, node, weights)
    return encode_value(model, node, value[name] if _has_node_values(value) else value, evidence=False)  # type: ignore[index]


@dataclass
class RelativeValues:
    """What `Noise` and `Mean()` set nodes of a sentence to (`is_relative`); the mean of each family is computed once."""

    model: GroundModel
    get_value: Callable[[int], Tensor]
    _means: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, node: int, value: object) -> Tensor:
        if isinstance(value, Noise):
            own = self._get_current_value(node)
            return own + sample_noise(self.model.ground.name(node), value, own)
        family, index = self.model.ground.unravel_index(node)
        check_has_words(family, self.model.ground.name(node))
        first = node - index[-1]
        if first not in self._means:
            words = range(self.model.ground.word_counts[family.word_stack or ""])
            self._means[first] = torch.stack([self._get_current_value(first + i) for i in words]).mean(0)
        return self._means[first]

    def _get_current_value(self, node: int) -> Tensor:
        """The value that a node has."""
        name, tpm = self.model.ground.name(node), self.model.spec(node).tpm
        if tpm.is_random and node not in self.model.do:
            expected = "a node with a value: a function of its parents"
            raise EvidenceError(name, expected=expected, actual=f"a {tpm.kind} one")
        return _check_single_value(self.model, node, self.get_value(node))


def sample_noise(name: str, noise: Noise, value: Tensor) -> Tensor:
    """The noise of a node, which its name and the seed fix."""
    digest = hashlib.sha256(f"{noise.seed}/noise/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return noise.sigma * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def check_has_words(group: NodeGroup, name: str) -> None:
    """Refuse the mean over words of a node that is over none."""
    if group.word_stack is None:
        raise EvidenceError(name, expected="a node over words, or Mean(sentences)", actual="Mean() of another")


def _has_node_values(value: object) -> bool:
    """True of a sentence, or of what else has values by name without being a mapping, a list or a tensor."""
    plain = isinstance(value, Tensor | Mapping | Sequence | str)
    return not plain and hasattr(value, "ground") and hasattr(value, "__getitem__")


def _check_single_value(model: GroundModel, node: int, value: Tensor) -> Tensor:
    """A value that is real numbers, and the same for each state of the choices."""
    name, shape = model.ground.name(node), model.spec(node).shape
    if not value.is_floating_point():
        raise EvidenceError(name, expected="a node whose value is real numbers", actual="one that has states")
    if tuple(value.shape) != shape:
        hint = suggest_do(model.network, value, shape)
        got = f"one of shape {tuple(value.shape)}"
        raise EvidenceError(name, expected=f"one value of shape {shape}", actual=got, allowed=hint)
    return value


def _build_attention_row(model: GroundModel, node: int, weights: Tensor) -> AttentionRow:
    """A row of attention, a weight for each word that there is."""
    (member, index), name = locate_node(model, node), model.ground.name(node)
    values = next((given for given in member.parents if given.slot == "v."), None)
    plain = isinstance(member.tpm, Attention) and not any(given.pick for given in member.parents)
    if not plain or values is None or values.over != (WORD,):
        wanted = "a node that is the mix of an Attention over words, without picks"
        raise EvidenceError(name, expected=wanted, actual=type(member.tpm).__name__)
    words = find_slot_parents(model, member, index, values, {})[2]
    row = torch.zeros(model.ground.word_counts[model.network.specs[values.index].group.word_stack or ""])
    if len(weights) not in (len(row), len(words)):
        raise EvidenceError(name, expected=f"{len(row)} probabilities, one for each word", actual=f"{len(weights)}")
    if len(weights) == len(row) and float(weights[words].sum()) < 1 - 1e-6:
        got = f"{weights.tolist()}"
        raise EvidenceError(name, expected=f"probabilities of the words that it reads, {words}", actual=got)
    row = row.to(model.network.device, model.network.dtype)
    row[words] = (weights[words] if len(weights) == len(row) else weights).to(row)
    return AttentionRow(row)


@dataclass(frozen=True, eq=False, repr=False)
class SentenceState:
    """The state of a `Sentence`, which every function that answers a query about it receives.

    Frozen: `with_interventions` and `with_evidence` return a new state. `model` and `evaluator`, which follow from the
    fields, are computed on first use.

    Args:
        module: The compiled net, in evaluation mode.
        encoded: The sentence as tensors.
        interventions: The value, or the attention row, that `do` sets each node to, by ground id.
        evidence: The observed value of each node, by ground id.
        previous: The evaluator before the last `do`; values that this `do` does not change come from it.

    >>> import bnet_transformer as bt
    >>> state = bt.bayesuvius(dim=4).sentence("the cat sat").do(c=1).state
    >>> len(state.ground), state.interventions, state.tokens
    (19, {0: tensor(1)}, {'': ('the', 'cat', 'sat')})
    """

    module: CompiledModule
    encoded: EncodedSentence
    interventions: Mapping[int, Tensor | AttentionRow] = field(default_factory=dict)
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    previous: NodeEvaluator | None = None

    @property
    def network(self) -> Network:
        """The declaration with its parameters."""
        return self.module.network

    @property
    def tokens(self) -> Tokens:
        """The tokens of each stack."""
        return self.encoded.tokens

    @property
    def ground(self) -> GroundGraph:
        """The ground graph after surgery."""
        return self.model.ground

    @cached_property
    def model(self) -> GroundModel:
        """The ground model after surgery: ground graph, inputs, interventions."""
        ground = GroundGraph(self.network.graph, self.encoded.word_counts)
        return GroundModel(self.network, ground, self.encoded.given).surgery(self.interventions)

    @cached_property
    def evaluator(self) -> NodeEvaluator:
        """The evaluator of nodes; it computes each group once."""
        values = self.network.parameters.values()
        if values and all(value.is_meta for value in values):
            raise BNetError("net", expected="parameters with values", actual="a net on the device meta, which has none")
        return NodeEvaluator(self.module, self.model, self.evidence, self.previous)

    def resolve_interventions(self, nodes: Mapping[str, object]) -> dict[int, Tensor | AttentionRow]:
        """The values that nodes are set to, by ground id.

        Args:
            nodes: Name, group, role or pattern -> a value that `Sentence.do` accepts.

        Returns:
            A value or an attention row for each node.
        """
        requested = expand_patterns(self.ground, nodes)
        relative = {node: value for node, value in requested.items() if is_relative(value)}
        result = {n: resolve_value(self.model, n, value) for n, value in requested.items() if n not in relative}
        if relative:
            # Noise and Mean() use a node's value after all other interventions of the same call.
            evidence = {node: value for node, value in self.evidence.items() if node not in result}
            state = replace(
                self, interventions={**self.interventions, **result}, evidence=evidence, previous=self.evaluator
            )
            resolve_relative = RelativeValues(state.model, state.evaluator.value)
            result |= {node: resolve_relative(node, value) for node, value in relative.items()}
        return result

    def with_interventions(self, nodes: Mapping[str, object]) -> SentenceState:
        """The state after `do`.

        Args:
            nodes: Name, group, role or pattern -> a value that `Sentence.do` accepts.

        Returns:
            A state with these interventions and those of this state; on the same node the new one counts.

        Raises:
            EvidenceError: A node has evidence.
        """
        interventions = self.resolve_interventions(nodes)
        self._check_disjoint(interventions, self.evidence)
        return replace(self, interventions={**self.interventions, **interventions}, previous=self.evaluator)

    def without_interventions(self, names: Collection[str] = ()) -> SentenceState:
        """The state without some interventions.

        Args:
            names: Names, groups, roles or patterns of the nodes whose interventions are removed; all if empty.

        Raises:
            BNetError: No intervention is on these nodes.
        """
        nodes = {node for name in names for node in match_nodes(self.ground, name)} or set(self.interventions)
        if not nodes & self.interventions.keys():
            raise BNetError("undo", expected="a node that do set", actual=", ".join(names) or "none is set")
        interventions = {node: value for node, value in self.interventions.items() if node not in nodes}
        return replace(self, interventions=interventions, previous=None)

    def with_evidence(self, nodes: Mapping[str, object] | None) -> SentenceState:
        """The state with more evidence.

        Args:
            nodes: For each node a value, a state or a label; None for no more.

        Returns:
            A state with this evidence and that of this state.

        Raises:
            EvidenceError: An intervention, or another value, is on the same node.
        """
        ids = {self.ground.id(name): value for name, value in check_mapping("evidence", nodes).items()}
        self._check_disjoint(self.interventions, ids)
        evidence = {node: encode_value(self.model, node, value, evidence=True) for node, value in ids.items()}
        for node, value in evidence.items():
            if node in self.evidence and not torch.equal(value, self.evidence[node]):
                actual = f"{value.tolist()} beside {self.evidence[node].tolist()}"
                raise EvidenceError(self.ground.name(node), expected="one piece of evidence for a node", actual=actual)
        state = replace(self, evidence={**self.evidence, **evidence}, previous=None)
        vars(state)["model"] = self.model  # evidence changes no arrow: the cached property holds for both
        return state

    def _check_disjoint(self, interventions: Collection[int], evidence: Collection[int]) -> None:
        """Refuse an intervention and evidence on the same node."""
        for node in set(interventions) & set(evidence):
            raise EvidenceError(self.ground.name(node), expected="do or evidence on a node, not both", actual="both")

    def query(self, nodes: Collection[int] = (), budget: int = BUDGET, atol: float = ATOL) -> Query:
        """A query about probabilities, given the evidence of this state.

        Args:
            nodes: The requested nodes, by ground id.
            budget: The maximum number of joint states of choices.
            atol: The tolerance of evidence on nodes that are functions of their parents.
        """
        limits = check_int("budget", budget), check_float("atol", atol, minimum=0)
        return Query(self.module, self.model, self.evidence, tuple(nodes), *limits)

    def posterior_query(self, name: object, evidence: Mapping[str, object] | None, budget: int, atol: float) -> Query:
        """The query of a posterior.

        Args:
            name: A discrete node, or several.
            evidence: Evidence in addition to that of this state.
            budget: The maximum number of joint states of choices.
            atol: The tolerance of evidence on nodes that are functions of their parents.
        """
        nodes = [self.ground.id(item) for item in parse_names("name", name)]
        if not nodes:
            raise BNetError("name", expected="a node, or several", actual="none")
        query = self.with_evidence(evidence).query(nodes, budget, atol)
        for node in nodes:
            check_discrete_node(self.model, node)
        return query

    def selection(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
    ) -> NodeSelection:
        """A part of the ground graph.

        Args:
            weights: Whether selectors and weights are included.
            slices: The included slices; None for all.
            words: The included words, by index or as words, or a mapping from stacks to them; None for all.
            heads: The included heads; None for all.
        """
        chosen = None if slices is None else parse_slices(slices, self.network)
        sizes, plates, selected_words = self.network.graph.plate_sizes, {}, {}
        if heads is not None:
            if "head" not in sizes:
                raise BNetError("heads", expected="a net with a plate of heads", actual="a net without one")
            plates["head"] = parse_indices("heads", heads, sizes["head"])
        by_stack = words if isinstance(words, Mapping) else dict.fromkeys(self.tokens, words)
        for stack, selected in by_stack.items():
            if stack not in self.tokens:
                raise unknown_name_error("stack", stack, self.tokens)
            if selected is not None:
                selected_words[stack] = parse_words(self.tokens[stack], selected)
        return NodeSelection(chosen, selected_words, plates, weights)

    def labels(self, node: int) -> tuple[str, ...] | None:
        """The labels of a node's states (labels, words of the sentence or words of the vocabulary), or None.

        Args:
            node: A ground id.
        """
        network, spec = self.network, self.model.spec(node)
        if spec.tpm.kind != "discrete":
            return None
        if spec.tpm.states is None:
            return tuple(self.tokens[network.get_source_stack(spec)])
        labels = getattr(spec.tpm, "labels", None)
        if labels is None and not network.graph.out_edges[spec.group.index]:
            labels = network.vocabularies.get(spec.group.stack)
        return None if labels is None or len(labels) != spec.tpm.states else tuple(labels)
