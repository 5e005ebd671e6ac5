"""A question about the probabilities of nodes of a sentence, and its translation from nodes to families of nodes.

Inference computes with whole families of nodes in batches; a person asks about single nodes. `group_evidence`,
`group_interventions` and `build_request_arguments` turn the one into the other; `classify_evidence` and `find_set_groups` do so for the
structure alone, without tensors, so that the router can decide before anything is computed. `enumerate_joint_states`, `iter_chunks`
and `with_sentence_scope` make a batch of the joint states of choices.

Then which algorithm answers it, why, how exact it is and what it costs (`Route`). A question has a short table of
rules, fastest algorithm first. Each rule names its algorithm and finds the fault in the structure of the net, the
evidence and the interventions for which the algorithm cannot answer; the first rule without a fault applies. Nothing is
computed, and no exception decides.

Algorithms:

- `graph`: the structure of the graph; no number is computed.
- `compiled`: one batched pass of the compiled net.
- `elimination`: the choices are eliminated from the factors of the compiled net.
- `conditioning`: the states of the nodes that are asked for are a batch; the other choices are eliminated.
- `enumeration`: all joint states of the choices are a batch of the compiled net.
- `sampling`: draws, which are approximate.
- `sequential`: one run for each cell of a sweep, slow.
- `reference`: node by node in Python, slow.

Of probabilities elimination is the algorithm of choice: it sums the choices out of the factors of whole families. It
cannot where the choices of different words meet in one value. Then the joint states of the nodes that are asked for are
the batch of one pass, and the rest is eliminated; then all joint states of all choices above are the batch. What the
compiled net cannot compute at all is left to the reference, which loops over joint states and nodes.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.cost.net_cost import count_plan_flops
from bnet_transformer.data import Evidence
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference.factors import EliminationProblem, build_elimination_problem, check_elimination_budget
from bnet_transformer.reference import ATOL, BUDGET, GroundModel, find_open_choices, is_close, locate_node

MAX_CHUNK_ELEMENTS = 2**21  # of one value of all words and states of a piece of the batch


@dataclass(frozen=True)
class Query:
    """Which nodes of a sentence are asked for, given what evidence, within what limits.

    Args:
        module: The compiled net.
        model: The sentence after its interventions: network, ground graph, inputs, nodes that are set.
        evidence: Node -> observed state (a whole number) or value, `[*shape]`.
        nodes: The nodes that are asked for, by their ground ids.
        budget: The most joint states of choices that are computed.
        atol: The tolerance of evidence on nodes that are functions of their parents.
    """

    module: CompiledModule
    model: GroundModel
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    budget: int = BUDGET
    atol: float = ATOL

    def format_nodes(self) -> str:
        """The names of the nodes that are asked for."""
        return ", ".join(map(self.model.ground.name, self.nodes))

    @cached_property
    def fixed(self) -> dict[int, Tensor]:
        """The evidence that says outright which state or value a random node has."""
        return reference.get_fixed(self.model, self.evidence)

    @cached_property
    def choices(self) -> list[int]:
        """The open choices above the nodes and the evidence, and those that decide their distributions in turn."""
        return reference.find_open_choices(
            self.model, [*self.nodes, *self.evidence], self.fixed, include_ancestors=True
        )

    def without_target_evidence(self) -> Query:
        """The same query without evidence on the nodes that it asks for."""
        rest = {node: value for node, value in self.evidence.items() if node not in self.nodes}
        return self if len(rest) == len(self.evidence) else replace(self, evidence=rest)

    def without_input_evidence(self) -> Query:
        """The same query without evidence on inputs, which either repeats the input or is impossible.

        Raises:
            EvidenceError: Where evidence differs from the input.
        """
        rest = dict(self.evidence)
        for k, (node, observed) in enumerate(self.evidence.items()):
            member, index = locate_node(self.model, node)
            if member.tpm.kind == "input":
                value = self.model.inputs[member.group.name][index]
                if not bool(is_close(value, observed, self.atol, value.dim())):
                    raise reference.impossible_evidence_error(self.model, self.evidence, k)
                del rest[node]
        return self if len(rest) == len(self.evidence) else replace(self, evidence=rest)


def build_length_inputs(model: GroundModel) -> dict[str, Tensor]:
    """What says how many words a stack has, `[1, word]`, for the stacks whose words no input fills."""
    filled = {model.network.get_spec(name).group.word_stack for name in model.inputs}
    device, words = model.network.device, model.ground.word_counts
    return {stack: torch.zeros(1, count, device=device) for stack, count in words.items() if stack not in filled}


def build_request_arguments(model: GroundModel) -> dict[str, Any]:
    """A sentence after its interventions as the arguments `x`, `do`, `patched`, `rows`, `given` of a batch of one."""
    given = {name: value[None] for name, value in model.inputs.items()}
    return {"x": build_length_inputs(model), "given": given, **group_interventions(model)}


def group_evidence(
    model: GroundModel, evidence: Mapping[int, Tensor], states: Mapping[int, Tensor] | None = None
) -> dict[str, Evidence]:
    """Evidence on nodes as evidence on families.

    Args:
        model: The sentence.
        evidence: Node -> observed state or value, the same in each row of a batch.
        states: Node -> its state in each row, `[row]`; a batch of one row without.
    """
    states = {node: state.to(model.network.device) for node, state in (states or {}).items()}
    families = group_values(model, evidence, states=states)
    return {name: Evidence(value, None if bool(which.all()) else which) for name, (value, which) in families.items()}


def group_interventions(model: GroundModel, relevant: Collection[int] | None = None) -> dict[str, Any]:
    """The nodes that are set, as `do`, `patched` and `rows`: whole families, some nodes of a family, attention rows.

    Args:
        model: The sentence.
        relevant: The families that matter; all by default.
    """
    whole: dict[str, Tensor] = {}
    patched: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (value, which) in group_values(model, model.do, relevant).items():
        if bool(which.all()) and model.network.get_spec(name).tpm.kind != "input":
            whole[name] = value
        else:
            patched[name] = value, which
    return {"do": whole, "patched": patched, "attention_rows": group_values(model, model.attention_rows, relevant)}


def group_values(
    model: GroundModel,
    values: Mapping[int, Tensor],
    relevant: Collection[int] | None = None,
    states: Mapping[int, Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of nodes as tensors of their families, which the compiled net computes with.

    Args:
        model: The sentence.
        values: Node -> its value, `[*shape]`, the same in each row of a batch.
        relevant: The families that matter; all by default.
        states: Node -> its value in each row, `[row, *shape]`; it counts where `values` has one too.

    Returns:
        Family -> values `[row, *plates, word, *shape]`, zero for nodes without one (one row where no node has
        `states`), and which nodes have one, `[1, *plates, word]`.
    """
    columns = {**{node: value[None] for node, value in values.items()}, **(states or {})}
    families = {}
    for index, nodes in group_nodes(model, columns, relevant).items():
        shape, places = model.ground.shapes[index], [node - int(model.ground.offsets[index]) for node in nodes]
        first = next((columns[node] for node in nodes if node in (states or {})), columns[nodes[0]])
        flat = first.new_zeros(len(first), math.prod(shape), *first.shape[1:])
        which = torch.zeros(math.prod(shape), dtype=torch.bool, device=first.device)
        flat[:, places] = torch.stack([columns[node].expand_as(first) for node in nodes], 1)
        which[places] = True
        name = model.network.specs[index].group.name
        families[name] = flat.reshape(-1, *shape, *first.shape[1:]), which.reshape(1, *shape)
    return families


def find_set_groups(
    model: GroundModel, relevant: Collection[int] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The families of which all nodes are set, and those of which some nodes or rows are: names, without values."""
    whole, some = list[str](), list[str]()
    for index, nodes in group_nodes(model, model.do, relevant).items():
        family = model.network.specs[index].group
        is_whole = len(nodes) == math.prod(model.ground.shapes[index])
        (whole if is_whole and model.network.specs[index].tpm.kind != "input" else some).append(family.name)
    rows = (model.network.specs[index].group.name for index in group_nodes(model, model.attention_rows, relevant))
    return tuple(whole), tuple(dict.fromkeys([*some, *rows]))


def classify_evidence(
    model: GroundModel, evidence: Mapping[int, Tensor], states: Iterable[int] = ()
) -> dict[str, tuple[bool, bool]]:
    """Family -> whether evidence and set nodes are all its nodes, and whether the evidence is in real numbers.

    Args:
        model: The sentence.
        evidence: Node -> observed state or value.
        states: Further nodes, of which a state will be observed.
    """
    is_real = {node: value.is_floating_point() for node, value in evidence.items()} | dict.fromkeys(states, False)
    forms = {}
    for index, nodes in group_nodes(model, is_real).items():
        base, real = int(model.ground.offsets[index]), is_real[nodes[0]]
        others = [node for node in range(base, base + math.prod(model.ground.shapes[index])) if node not in is_real]
        alike = all(node in model.do and model.do[node].is_floating_point() == real for node in others)
        forms[model.network.specs[index].group.name] = alike, real
    return forms


def group_nodes(
    model: GroundModel, nodes: Iterable[int], relevant: Collection[int] | None = None
) -> dict[int, list[int]]:
    """Nodes by their family."""
    families: dict[int, list[int]] = {}
    for node in nodes:
        index = model.ground.group_of(node).index
        if relevant is None or index in relevant:
            families.setdefault(index, []).append(node)
    return families


def enumerate_joint_states(supports: Sequence[Sequence[int]]) -> Tensor:
    """All joint states, the last choice fastest: `[S, choice]`."""
    if not supports:
        return torch.zeros(1, 0, dtype=torch.long)
    grids = torch.meshgrid(*(torch.tensor(list(each), dtype=torch.long) for each in supports), indexing="ij")
    return torch.stack([grid.reshape(-1) for grid in grids], -1)


def iter_chunks(model: GroundModel, count: int, groups: Iterable[int]) -> Iterator[slice]:
    """Parts of a batch of so many states, each small enough to be computed at once.

    `groups` are the families whose values or distributions are computed; those above them count as well.
    """
    families = set(groups)
    largest = max(_count_elements(model, index) for index in model.network.graph.ancestral_set(families))
    size = max(1, MAX_CHUNK_ELEMENTS // largest)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _count_elements(model: GroundModel, index: int) -> int:
    """How many numbers a family holds for one state: its values, the logits of its states, the words that it reads."""
    member, words = model.network.specs[index], max(model.ground.word_counts.values(), default=1)
    states = model.network.count_states(index, model.ground.word_counts) if member.tpm.kind == "discrete" else 0
    return math.prod(model.ground.shapes[index]) * (max(math.prod(member.shape), states) + words)


def with_sentence_scope(module: CompiledModule) -> CompiledModule:
    """The module whose batch are states of one sentence: what is drawn for a whole corpus is drawn for it alone."""
    network = module.network
    if all(member.scope == "sentence" for member in network.specs):
        return module
    members = tuple(replace(member, scope="sentence") for member in network.specs)
    return CompiledModule(replace(network, specs=members)).eval()


S = TypeVar("S")
WARN_EVALUATIONS = 2**16  # node evaluations one by one, some 10 s, from which a slow route warns before it starts
FAST_ALGORITHMS = ("graph", "compiled", "elimination")  # what is not one of these has a node that is the reason


class PerformanceWarning(UserWarning):
    """A question takes a slow algorithm; the message names the node that is the reason, and the cost."""


@dataclass(frozen=True)
class Route:
    """How a question is answered. `print` it, or read the fields.

    Args:
        question: The question, such as `"posterior of c"`.
        algorithm: Its name, as above.
        reason: The rule that applied, in words.
        node: The node or family that rules out a faster algorithm; None where the fastest one applies.
        states: Joint states of the choices that are computed.
        flops: Floating-point operations of the compiled passes; None where no compiled pass answers.
        evaluations: Nodes that are evaluated one by one in Python.
        is_exact: False for draws and for first-order effects.
        parts: The routes of parts of the question, where they are answered in different ways.
        choices: The ground ids of the choices whose joint states are computed.
    """

    question: str
    algorithm: str
    reason: str
    node: str | None = None
    states: int = 1
    flops: int | None = None
    evaluations: int = 0
    is_exact: bool = True
    parts: tuple[Route, ...] = ()
    choices: tuple[int, ...] = field(default=(), repr=False)

    def warn_if_slow(self) -> None:
        """Warn, before it starts, of nodes that are evaluated one by one, often enough to notice."""
        if self.evaluations > WARN_EVALUATIONS:
            warnings.warn(str(self), PerformanceWarning, stacklevel=3)

    def __str__(self) -> str:
        cost = [f"{self.states:,} joint states"] if self.states > 1 else []
        cost += [f"{self.flops:,} FLOPs"] if self.flops is not None else []
        cost += [f"{self.evaluations:,} node evaluations in Python"] if self.evaluations else []
        exact = "exact" if self.is_exact else "approximate"
        told = f"{self.question}: {self.algorithm} ({exact}; {', '.join(cost) or 'one state'}), because {self.reason}"
        return "\n  ".join([told, *map(str, self.parts)])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


@dataclass(frozen=True)
class Obstacle:
    """Why an algorithm cannot answer, where it is no error to ask it: the next rule applies."""

    subject: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject} is {self.reason}"


Fault = Obstacle | UnsupportedError  # a UnsupportedError is what the algorithm raises to whoever asks it directly


@dataclass(frozen=True)
class Rule(Generic[S]):
    """One line of a table of rules.

    Args:
        algorithm: Its name, as above.
        reason: Why the algorithm is the one to take where no fault is found, in words.
        find_fault: What finds, in the structure of a question, why the algorithm cannot answer it; None where it can.
    """

    algorithm: str
    reason: str
    find_fault: Callable[[S], Fault | None] = lambda _: None


def choose_route(question: str, rules: Sequence[Rule[S]], subject: S) -> Route:
    """The route by the first rule without a fault; the fault of the rule before it is its reason.

    The last rule has to apply to everything.
    """
    before: Fault | None = None
    for rule in rules:
        fault = rule.find_fault(subject)
        if fault is None:
            if before is None or rule.algorithm in FAST_ALGORITHMS:
                return Route(question, rule.algorithm, rule.reason)
            return Route(
                question, rule.algorithm, f"{rule.reason}; not faster, for {format_fault(before)}", before.subject
            )
        before = fault
    raise AssertionError(f"no rule for {question}")


def format_fault(fault: Fault) -> str:
    """A fault in words, for the reason of a route."""
    if isinstance(fault, Obstacle):
        return str(fault)
    return f"{fault.subject} would need {fault.expected}, and there is {fault.actual}"


def find_tpm_fault(query: Query) -> Fault | None:
    """Why the posterior of a node is not its TPM at the values of its parents."""
    node, *others = query.nodes
    name = query.model.ground.name(node)
    if others or query.evidence:
        return Obstacle(name, "asked for together with others" if others else "asked for given evidence")
    if locate_node(query.model, node)[0].tpm.states is None:
        return Obstacle(name, "a choice of a word of the sentence")
    above = find_open_choices(query.model, reference.parents(query.model, node), {})
    if above:
        return Obstacle(query.model.ground.name(above[0]), f"an open choice above {name}")
    return None


def find_single_target_fault(query: Query) -> Fault | None:
    """Why the choices cannot be eliminated, family by family, for one node (or none) that is asked for."""
    node, *others = query.nodes or (None,)
    if others:
        return Obstacle(query.format_nodes(), "more than one node")
    return find_elimination_fault(query, node)


def find_enumeration_fault(query: Query) -> Fault | None:
    """Why not even all choices above, each in a state, can be the batch of a pass of the compiled net."""
    world = prune_barren_choices(query.model, {*query.choices, *query.nodes, *query.evidence})
    states = dict.fromkeys([*query.nodes, *query.choices])
    return find_elimination_fault(replace(query.without_target_evidence(), model=world), None, [*states])


JOINT_RULES: Sequence[Rule[Query]] = (
    Rule(
        "conditioning",
        "each of its joint states is evidence on one sentence of a batch",
        lambda query: find_elimination_fault(query.without_target_evidence(), None, query.nodes),
    ),
    Rule("enumeration", "the choices of several words meet in one value", find_enumeration_fault),
    Rule("reference", "the compiled net cannot compute it"),
)
POSTERIOR_RULES: Sequence[Rule[Query]] = (
    Rule("compiled", "nothing is observed and no choice above it is open: it is the node's TPM", find_tpm_fault),
    Rule("elimination", "no value depends on the choices of several words", find_single_target_fault),
    *JOINT_RULES,
)
LOG_EVIDENCE_RULES: Sequence[Rule[Query]] = (
    Rule("elimination", "no value depends on the choices of several words", find_single_target_fault),
    *JOINT_RULES[1:],
)


def route_posterior(query: Query) -> Route:
    """How `P(nodes | evidence)` is computed."""
    return _route_query(query, f"posterior of {query.format_nodes()}", POSTERIOR_RULES)


def route_joint(query: Query) -> Route:
    """How `log P(nodes, evidence)` is computed for each joint state of the nodes."""
    return _route_query(query, f"joint probability of {query.format_nodes()}", JOINT_RULES)


def route_log_evidence(query: Query) -> Route:
    """How `log P(evidence)` is computed."""
    return _route_query(query, "log probability of the evidence", LOG_EVIDENCE_RULES)


def _route_query(query: Query, question: str, rules: Sequence[Rule[Query]]) -> Route:
    """The route by the first rule that applies, with its joint states and the evaluations of the reference."""
    world, route = query.model, choose_route(question, rules, query)
    if route.algorithm not in ("conditioning", "enumeration", "reference"):
        return route
    asked = query.nodes if route.algorithm == "conditioning" else tuple(query.choices)
    states = math.prod(world.count_states(node) for node in dict.fromkeys([*query.nodes, *asked]))
    evaluations = states * len(world.ground) if route.algorithm == "reference" else 0
    return replace(route, states=states, evaluations=evaluations, choices=asked)


def find_elimination_problem(
    query: Query, node: int | None, states: Collection[int] = ()
) -> EliminationProblem | Fault:
    """What elimination needs, or the fault of nodes that no tensor of a family holds.

    Args:
        query: The query; of its evidence the structure alone counts.
        node: The node that is asked for, if any.
        states: Nodes of which a state is observed in each sentence of a batch.
    """
    world = prune_interventions(query.model, [*states, *query.evidence]) if states else query.model
    fault = find_mixed_type_fault(world, query.evidence, states) or find_mixed_type_fault(world, world.do)
    if fault is not None:
        return fault
    module = with_sentence_scope(query.module) if states else query.module
    family = None if node is None else world.ground.group_of(node).name
    do, some = find_set_groups(world)
    return build_elimination_problem(module, classify_evidence(world, query.evidence, states), family, do, some)


def find_elimination_fault(query: Query, node: int | None, states: Collection[int] = ()) -> Fault | None:
    """Why elimination cannot answer what `find_elimination_problem` finds for the same arguments; None where it can."""
    problem = find_elimination_problem(query, node, states)
    return problem.fault if isinstance(problem, EliminationProblem) else problem


def find_mixed_type_fault(
    model: GroundModel,
    values: Mapping[int, Tensor],
    states: Iterable[int] = (),
    relevant: Collection[int] | None = None,
) -> Obstacle | None:
    """The fault of a family of which some nodes have states and others tensors: no tensor holds both."""
    is_real = {node: value.is_floating_point() for node, value in values.items()} | dict.fromkeys(states, False)
    for index, nodes in group_nodes(model, is_real, relevant).items():
        if len({is_real[node] for node in nodes}) > 1:
            name = model.network.specs[index].group.name
            return Obstacle(name, "in a state at some nodes and a tensor at others")
    return None


def prune_interventions(model: GroundModel, nodes: Collection[int]) -> GroundModel:
    """The sentence with only the interventions above some nodes."""
    families = {model.ground.group_of(node).index for node in nodes}
    above = model.network.graph.ancestral_set(families)
    do, rows = (
        {node: value for node, value in values.items() if model.ground.group_of(node).index in above}
        for values in (model.do, model.attention_rows)
    )
    return replace(model, do=do, attention_rows=rows)


def prune_barren_choices(model: GroundModel, relevant: Collection[int]) -> GroundModel:
    """The sentence with state 0 for each choice that is above nothing relevant: its state changes no probability."""
    families = {model.ground.group_of(node).index for node in relevant}
    above = model.network.graph.ancestral_set(families)
    choices = [m.group for m in model.network.specs if m.tpm.kind == "discrete" and m.group.index in above]
    nodes = [node for family in choices for node in model.ground.select_nodes(family).tolist()]
    zero = torch.zeros((), dtype=torch.long, device=model.network.device)
    return replace(model, do={**{node: zero for node in nodes if node not in relevant}, **model.do})


def route_reference(question: str, model: GroundModel, choices: Collection[int]) -> Route:
    """The route of a question that has no compiled algorithm: a run of the net for each joint state of the choices."""
    states = math.prod(model.count_states(choice) for choice in choices)
    reason = "the compiled net has no algorithm for it"
    return Route(question, "reference", reason, states=states, evaluations=states * len(model.ground))


def with_cost(query: Query, route: Route) -> Route:
    """The route of a query with the joint states and the FLOPs of its compiled passes; the sums are not counted."""
    if route.algorithm in ("compiled", "reference"):
        return route
    if route.algorithm == "enumeration":
        reference.check_joint_states(query.model, route.choices, query.budget)
    batch, node, states, world = 1, next(iter(query.nodes), None), tuple[int, ...](), query.model
    if route.algorithm in ("conditioning", "enumeration"):
        batch, node, states = route.states, None, tuple(dict.fromkeys([*query.nodes, *route.choices]))
    if route.algorithm == "enumeration":
        world = prune_barren_choices(world, {*states, *query.evidence})
    question = find_elimination_problem(replace(query, model=world), node, states)
    assert isinstance(question, EliminationProblem)
    members, words = world.network.specs, world.ground.word_counts
    if route.algorithm == "elimination":
        for index, above in question.ancestor_choices.items():
            check_elimination_budget(world.network, index, above, words, query.budget)
        counts = [
            math.prod(world.network.count_states(i, words) for i in above)
            for above in question.ancestor_choices.values()
        ]
        route = replace(route, states=max(counts, default=1))
    want = tuple(dict.fromkeys([*question.outputs, *(members[index].group.name for index in question.factor_groups)]))
    closed = {*find_set_groups(world)[0], *question.fixed}
    known = frozenset(world.network.graph.get_group(name).index for name in closed)
    plan = query.module.plan(want, known, question.enumerated)
    return replace(route, flops=count_plan_flops(world.network, plan, words, known, batch))
