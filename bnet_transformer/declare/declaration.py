"""A declaration: nodes with a TPM, arrows, plates and stacks; and the template graph that follows from it.

A declaration is plain data. All other parts of the package work from it, and none depends on a particular architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_sequence, set_frozen
from bnet_transformer._core.naming import SLICE, WORD, Reach, as_reach, find_role_fault, join_name, join_stem
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.errors import BNetError, DeclarationFault, unknown_name_error
from bnet_transformer.graph.template_graph import EdgeTemplate, NodeGroup, TemplateGraph
from bnet_transformer.tpm.base import TPM, Shape, check_shape

SLICE_RULES = ("same", "next", "first", "last")
TPM_HINT = "Use a TPM of bt.tpm, such as bt.tpm.Linear(8), or your own subclass of bt.tpm.TPM"


@dataclass(frozen=True)
class Plate:
    """A repeated index of known size, such as the heads of a slice. The plates of words and slices are implicit.

    Args:
        name: The name, an identifier such as `"head"`.
        size: The number of indices.

    >>> import bnet_transformer as bt
    >>> bt.Plate("head", 4)
    Plate(name='head', size=4)
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BNetError("plate name", expected="a string", actual=self.name)
        set_frozen(self, size=check_int(f"plate {self.name}", self.size))


@dataclass(frozen=True)
class Arrow:
    """An arrow into a node from a parent.

    Args:
        role: The role of the parent: a role of the same stack or outside the stacks, or `"stack.role"`.
        reach: The words of the parent on which each word depends: `"same"` (default), `"every"`, `"causal"`,
            `"earlier"`, `"before"`, `"after"`, `"rest"`, `"first"`, `"last"`, a `Reach`, a table of booleans
            `[word, word of the parent]`, or None for every word.
        slice: The slice of the parent: `"same"`, `"next"` (the state that this slice computes), `"first"`, `"last"` or
            a number. None (default) is `"same"` within a stack and `"last"` otherwise.
        pick: For each plate of the parent that a discrete node indexes, the role of that node. With
            `pick={"head": "c"}` the node receives head c of the parent, and `c` becomes a parent too. Default: none.

    >>> import bnet_transformer as bt
    >>> bt.Arrow("k", "causal"), bt.Arrow("x", slice="last", pick={"head": "c"})
    (...)
    """

    role: str
    reach: Reach | str | Sequence[Sequence[bool]] | None = field(default_factory=Reach)
    slice: str | int | None = None
    pick: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise BNetError("role of an arrow", expected="a string", actual=self.role)
        set_frozen(self, reach=as_reach(self.reach), pick=dict(check_mapping("pick", self.pick)))
        if isinstance(self.slice, str):
            check_choice("arrow slice", self.slice, SLICE_RULES)
        elif self.slice is not None:
            set_frozen(self, slice=check_int("arrow slice", self.slice, minimum=0))
        for plate, role in self.pick.items():
            if not isinstance(role, str):
                raise BNetError(f"pick of {plate}", expected="the role of a discrete node", actual=role)


@dataclass(frozen=True)
class Node:
    """A node template: all nodes of one role.

    Args:
        role: The name, an identifier such as `"q"`. Indices of slice, plates and word follow it in the name of a node.
        tpm: The conditional distribution of the node given its parents.
        parents: Roles or `Arrow`s, in the order of the TPM's slots. Default: none, for a root.
        plates: The plates over which the node is repeated: `"word"`, and plates of the declaration. Default: none.
        shared: Whether all slices have the same parameters. Default False.
        scope: `"sentence"` (default), or `"corpus"` for a root that is drawn once for all sentences.
        shape: The shape of the value. Only a recurrent node that is not discrete needs it; None (default) infers it
            from the TPM.

    >>> import bnet_transformer as bt
    >>> bt.Node("q", bt.tpm.Linear(), ["W_q", "x"], plates=["word"]).parents
    (Arrow(role='W_q', ...), Arrow(role='x', ...))
    """

    role: str
    tpm: TPM
    parents: Sequence[str | Arrow] = ()
    plates: Sequence[str] = ()
    shared: bool = False
    scope: str = "sentence"
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise BNetError("role of a node", expected="a string", actual=self.role)
        if not isinstance(self.tpm, TPM):
            raise BNetError(f"tpm of node {self.role}", expected="a TPM", actual=self.tpm, hint=TPM_HINT)
        set_frozen(self, parents=check_sequence(f"parents of node {self.role}", self.parents, Arrow, as_arrow))
        set_frozen(self, plates=check_sequence(f"plates of node {self.role}", self.plates, str))
        check_choice("shared", self.shared, (True, False))
        check_choice("scope", self.scope, ("sentence", "corpus"))
        if self.shape is not None:
            set_frozen(self, shape=check_shape("shape", self.shape))

    @property
    def arrows(self) -> tuple[Arrow, ...]:
        """The arrows into the node."""
        return tuple(as_arrow(parent) for parent in self.parents)


@dataclass(frozen=True)
class Stack:
    """A chain of slices over the words of one sentence, after a prologue and before an epilogue.

    A role in both the prologue and `slice` is a *state*, such as `x`. An arrow in slice t reads its value `x_t` before
    the slice, and the node in slice t computes its value `x_(t+1)` after it.

    Args:
        slice: The nodes of one slice (a layer). Default: none; such a stack has no slices.
        prologue: The nodes before the first slice, such as embeddings. Default: none.
        epilogue: The nodes after the last slice, such as readouts. Default: none.
        slices: The number of slices. Default 1.
        name: The name, which is a prefix of the names of its nodes. Default `""`; each of several stacks needs a name.
        vocabulary: The words of text, which must be different. None (default) for sentences of ids or vectors.

    >>> import bnet_transformer as bt
    >>> x, W = bt.Node("x", bt.tpm.Given(4), plates=["word"]), bt.Node("W", bt.tpm.Weight((4, 4)))
    >>> step = bt.Node("x", bt.tpm.Linear(), ["W", "x"], plates=["word"])
    >>> bt.Stack([W, step], prologue=[x], slices=2).slices
    2
    """

    slice: Sequence[Node] = ()
    prologue: Sequence[Node] = ()
    epilogue: Sequence[Node] = ()
    slices: int = 1
    name: str = ""
    vocabulary: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for block in ("slice", "prologue", "epilogue"):
            set_frozen(self, **{block: check_sequence(f"stack {block}", getattr(self, block), Node)})
        if not isinstance(self.name, str):
            raise BNetError("stack name", expected="a string", actual=self.name)
        count = check_int("slices", self.slices, minimum=1 if self.slice else 0)
        set_frozen(self, slices=count if self.slice else 0)
        if self.vocabulary is not None:
            set_frozen(self, vocabulary=check_vocabulary(self.vocabulary))

    @property
    def states(self) -> frozenset[str]:
        """The roles that are passed from slice to slice."""
        return frozenset(n.role for n in self.prologue) & frozenset(n.role for n in self.slice)


@dataclass(frozen=True)
class Declaration:
    """An architecture; `bt.BNet(declaration)` makes a net of it.

    Args:
        stacks: The stacks. Default: none; the net then is a Bayesian network without words.
        nodes: The nodes outside the stacks, such as selectors, shared weights and readouts of a sentence. Default:
            none.
        plates: The plates of known size. Default: none.
        name: The name of the architecture. Default `"net"`.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> x, W = bt.Node("x", bt.tpm.Given(4), plates=["word"]), bt.Node("W", bt.tpm.Weight((4, 4)))
    >>> step = bt.Node("x", bt.tpm.Linear(), ["W", "x"], plates=["word"])
    >>> net = bt.BNet(bt.Declaration([bt.Stack([W, step], prologue=[x], slices=2)]))
    >>> net.sentence(x=torch.zeros(3, 4)).parents("x_2_1")
    ['W_1', 'x_1_1']
    >>> rain = bt.Node("rain", bt.tpm.Categorical(2, (0.8, 0.2)))
    >>> net = bt.BNet(bt.Declaration(nodes=[rain, bt.Node("wet", bt.tpm.Categorical(2), ["rain"])]))
    >>> net.sentence().posterior("rain", {"wet": 1}).shape
    torch.Size([2])
    """

    stacks: Sequence[Stack] = ()
    nodes: Sequence[Node] = ()
    plates: Sequence[Plate] = ()
    name: str = "net"

    def __post_init__(self) -> None:
        for name, kind in (("stacks", Stack), ("nodes", Node), ("plates", Plate)):
            set_frozen(self, **{name: check_sequence(name, getattr(self, name), kind)})
        if not isinstance(self.name, str):
            raise BNetError("declaration name", expected="a string", actual=self.name)


def as_arrow(parent: object) -> Arrow:
    """An `Arrow` from a role or an `Arrow`."""
    if isinstance(parent, Arrow):
        return parent
    if isinstance(parent, str):
        return Arrow(parent)
    raise BNetError("parent", expected="a role or an Arrow", actual=parent)


def check_vocabulary(words: object) -> tuple[str, ...]:
    """A vocabulary as a tuple of different words, none of them empty."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise BNetError("vocabulary", expected="a list of different words", actual=words)
    vocabulary = tuple(map(get_raw, check_sequence("vocabulary", words, str)))
    if not vocabulary or not all(vocabulary):
        expected = "words that are not empty" if vocabulary else "at least one word"
        raise BNetError("vocabulary", expected=expected, actual=words)
    if len(set(vocabulary)) != len(vocabulary):
        duplicate = next(word for word, count in Counter(vocabulary).items() if count > 1)
        raise BNetError("vocabulary", expected="different words", actual=f"{duplicate!r} twice")
    return vocabulary


# --------------------------------------------------------------------------------------------------------------------
# From a declaration to the template graph: unroll slices, resolve names, sort topologically, report cycles.


@dataclass(frozen=True)
class TemplateParent:
    """A resolved arrow: the parent's template, the reach, and for each picked plate the template of its selector."""

    template: NodeTemplate
    reach: Reach
    pick: tuple[tuple[str, NodeTemplate], ...] = ()


@dataclass(eq=False)
class NodeTemplate:
    """A node at one slice with its resolved arrows; None for an arrow that could not be resolved."""

    stack: str
    slice: int | None
    step: int | None
    node: Node
    plates: tuple[str, ...]
    word_stack: str | None
    parents: tuple[TemplateParent | None, ...] = ()

    @property
    def name(self) -> str:
        """The name of the node group."""
        return join_name(join_stem(self.stack, self.node.role), () if self.slice is None else (self.slice,))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots, one for each parent; a last slot `*x` is repeated."""
        names = self.node.tpm.get_slots()
        if names and names[-1].startswith("*"):
            num_repeats = max(len(self.parents) - len(names) + 1, 0)
            return (*names[:-1], *([names[-1][1:]] * num_repeats))
        return names

    def iter_slots(self) -> Iterator[tuple[str, TemplateParent]]:
        """Each slot with its parent, for the arrows that could be resolved."""
        for slot, parent in zip(self.slots, self.parents, strict=False):
            if parent is not None:
                yield slot, parent


@dataclass
class SymbolTable:
    """The declared roles and templates, by which names are resolved, and the faults found so far."""

    declaration: Declaration
    faults: list[DeclarationFault] = field(default_factory=list)
    templates: dict[tuple[str, str, int | None], NodeTemplate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stacks = {stack.name: stack for stack in self.declaration.stacks}
        self.outside_nodes = {node.role: node for node in self.declaration.nodes}

    def add_fault(self, node: str, expected: str, actual: str = "") -> None:
        """Record a fault of the declaration."""
        self.faults.append(DeclarationFault(node, expected, actual))


def declaration_to_graph(
    declaration: Declaration,
) -> tuple[TemplateGraph | None, tuple[NodeTemplate, ...], list[DeclarationFault]]:
    """The template graph, the template of each group in its order, and all faults; no graph if there is a cycle."""
    symbols, templates = SymbolTable(declaration), []
    _check_names(symbols)
    for stack, slice_, step, node in _unroll_slices(declaration):
        plates, words = _resolve_plates(symbols, stack, slice_, node), _resolve_word_stack(symbols, stack, step, node)
        templates.append(NodeTemplate(stack, slice_, step, node, plates, words))
    symbols.templates |= {(template.stack, template.node.role, template.slice): template for template in templates}
    for template in templates:
        template.parents = tuple(_resolve_arrow(symbols, template, arrow) for arrow in template.node.arrows)
    if not templates and not symbols.faults:
        raise BNetError("declaration", expected="at least one node")
    faults = symbols.faults + check_slots(templates)
    components, cycles = _sort_into_components(templates)
    if cycles:
        return None, (), [*faults, *cycles]
    ordered = tuple(template for component in components for template in component)
    return _build_graph(declaration, components), ordered, faults


def _unroll_slices(declaration: Declaration) -> Iterator[tuple[str, int | None, int | None, Node]]:
    """Each node with its stack, its slice (None outside the slices) and its step, as in `NodeGroup`."""
    for node in declaration.nodes:
        yield "", None, None, node
    for stack in declaration.stacks:
        for node in stack.prologue:
            yield stack.name, 0 if node.role in stack.states else None, -1, node
        for t in range(stack.slices):
            for node in stack.slice:
                yield stack.name, t + 1 if node.role in stack.states else t, t, node
        for node in stack.epilogue:
            yield stack.name, None, stack.slices, node


def _check_names(symbols: SymbolTable) -> None:
    """Record the faults of the names of stacks, plates and roles, and of scopes and shared parameters."""
    declaration = symbols.declaration
    names = [stack.name for stack in declaration.stacks]
    for name in names:
        fault = find_role_fault(name) if name else None
        if fault:
            symbols.add_fault(f"stack {name!r}", "an identifier as name", fault.replace("role", "name"))
        if names.count(name) > 1:
            symbols.add_fault(f"stack {name!r}", "stacks with different names", f"{names.count(name)} of this name")
    _check_plates(symbols)
    stems: dict[str, str] = {}
    for stack, nodes in _iter_blocks(declaration):
        for block, node in nodes:
            fault = find_role_fault(node.role, [name for name in names if name])
            if fault:
                symbols.add_fault(str(node.role), "an identifier as role", fault)
                continue
            location = f"{block} of stack {stack!r}" if stack else block
            stem = join_stem(stack, node.role)
            first = stems.setdefault(stem, location)
            is_state = {first, location} == {location.replace(block, "prologue"), location.replace(block, "slice")}
            if first != location and not is_state:
                symbols.add_fault(stem, "one node of this name", f"nodes in the {first} and in the {location}")
    for stack, nodes in _iter_blocks(declaration):
        declared = [(block, node.role) for block, node in nodes]
        for block, node in nodes:
            if node.scope == "corpus" and (node.arrows or WORD in node.plates):
                actual = "a node with parents" if node.arrows else "a node with plate 'word'"
                expected = "a root without plate 'word', because scope='corpus'"
                symbols.add_fault(join_stem(stack, node.role), expected, actual)
            if node.shared and block != "slice":
                expected = "shared=True only for a node of a slice"
                symbols.add_fault(join_stem(stack, node.role), expected, f"a node of the {block}")
        for block, role in dict.fromkeys(pair for pair in declared if declared.count(pair) > 1):
            count = declared.count((block, role))
            symbols.add_fault(join_stem(stack, role), f"one node of this role in the {block}", f"{count}")


def _resolve_word_stack(symbols: SymbolTable, stack: str, step: int | None, node: Node) -> str | None:
    """The stack of the words of a node: its own (`word`), another one (`enc.word`), or None."""
    for plate in node.plates:
        other, dot, name = plate.rpartition(".")
        if name == WORD and dot and other in symbols.stacks:
            return other
    return stack if WORD in node.plates and step is not None else None


def _iter_blocks(declaration: Declaration) -> Iterator[tuple[str, list[tuple[str, Node]]]]:
    """The nodes of each stack, and those outside the stacks, each with the name of its block."""
    yield "", [("nodes outside the stacks", node) for node in declaration.nodes]
    for stack in declaration.stacks:
        blocks = (("prologue", stack.prologue), ("slice", stack.slice), ("epilogue", stack.epilogue))
        yield stack.name, [(block, node) for block, nodes in blocks for node in nodes]


def _check_plates(symbols: SymbolTable) -> None:
    """Record the faults of the names of plates."""
    names = [plate.name for plate in symbols.declaration.plates]
    count = Counter(names)
    for name in count:
        fault = find_role_fault(name)
        if fault or name in (WORD, SLICE):
            actual = (fault or f"the name {name!r}, which is reserved").replace("role", "name")
            symbols.add_fault(f"plate {name!r}", "an identifier as name", actual)
        if count[name] > 1:
            symbols.add_fault(f"plate {name!r}", "plates with different names", f"{count[name]} of this name")


def _resolve_plates(symbols: SymbolTable, stack: str, slice_: int | None, node: Node) -> tuple[str, ...]:
    """The plates of a node without that of words, in the order of the declaration."""
    order = [plate.name for plate in symbols.declaration.plates]
    name = join_name(join_stem(stack, node.role), () if slice_ is None else (slice_,))
    outside = any(node is other for other in symbols.declaration.nodes)
    word_plates = [f"{other}.{WORD}" for other in symbols.stacks if other]
    if sum(plate == WORD or plate in word_plates for plate in node.plates) > 1:
        symbols.add_fault(name, "at most one plate of words", f"plates {', '.join(node.plates)}")
    for plate in dict.fromkeys(node.plates):
        if node.plates.count(plate) > 1:
            symbols.add_fault(name, "each plate once", f"{plate!r} {node.plates.count(plate)} times")
        if plate == WORD and outside:
            symbols.add_fault(name, "no plate 'word', because the node is outside the stacks")
        elif plate == SLICE:
            symbols.add_fault(name, "no plate 'slice', because it follows from the position of the node in its stack")
        elif plate != WORD and plate not in order and plate not in word_plates:
            known = ", ".join([*order, WORD, *word_plates])
            symbols.add_fault(name, f"a declared plate ({known})", f"the plate {plate!r}")
    return tuple(plate for plate in order if plate in node.plates)


def _resolve_arrow(symbols: SymbolTable, child: NodeTemplate, arrow: Arrow) -> TemplateParent | None:
    """The parent of an arrow; None after a fault."""
    parent = _resolve_role(symbols, child, arrow.role, arrow.slice)
    if parent is None:
        return None
    picks = []
    for plate, role in arrow.pick.items():
        selector = _resolve_role(symbols, child, role, None)
        if selector is None or not _check_pick(symbols, child, parent, plate, selector):
            return None
        picks.append((plate, selector))
    return TemplateParent(parent, as_reach(arrow.reach), tuple(picks))


def _check_pick(
    symbols: SymbolTable, child: NodeTemplate, parent: NodeTemplate, plate: str, selector: NodeTemplate
) -> bool:
    """Whether a selector can pick along a plate of the parent; records the faults if not."""
    before = len(symbols.faults)
    axes = [*parent.plates, *([WORD] if parent.word_stack is not None else [])]
    if plate not in axes:
        symbols.add_fault(
            child.name, f"pick= along a plate of {parent.name} ({', '.join(axes) or 'it has no plate'})", repr(plate)
        )
    if plate in child.plates:
        expected = f"no pick= along {plate!r}, because the node itself has this plate"
        symbols.add_fault(child.name, expected, f"pick by {selector.name}")
    tpm = selector.node.tpm
    if not tpm.is_index_valued:
        symbols.add_fault(child.name, "pick= by a discrete node", f"{selector.name}, which is {tpm.kind}")
    sizes = {p.name: p.size for p in symbols.declaration.plates}
    if plate in sizes and tpm.states != sizes[plate]:
        symbols.add_fault(
            child.name,
            f"a selector of {sizes[plate]} states, one for each {plate}",
            f"{selector.name} with {tpm.states} states" if tpm.is_index_valued else selector.name,
        )
    is_within_plates = set(selector.plates) <= set(child.plates) and selector.word_stack in (None, child.word_stack)
    if not is_within_plates:
        symbols.add_fault(child.name, "a selector with only plates that the node has too", f"{selector.name}")
    return len(symbols.faults) == before


def _resolve_role(
    symbols: SymbolTable, child: NodeTemplate, reference: str, slice_: str | int | None
) -> NodeTemplate | None:
    """The template with the name `role` or `stack.role`, seen from a child; None after a fault."""
    stack_name, dot, role = reference.rpartition(".")
    if dot and stack_name not in symbols.stacks:
        names = ", ".join(repr(name) for name in symbols.stacks if name)
        expected = f"a declared stack ({names})" if names else "a role without a stack, because no stack has a name"
        symbols.add_fault(child.name, expected, f"an arrow from {reference!r}")
        return None
    child_stack = child.stack if child.step is not None else None
    target_stack = stack_name if dot else child_stack
    if target_stack is None and not dot and role not in symbols.outside_nodes and len(symbols.stacks) == 1:
        target_stack = next(iter(symbols.stacks))
    stack = symbols.stacks.get(target_stack) if target_stack is not None else None
    roles = {n.role for n in (*stack.prologue, *stack.slice, *stack.epilogue)} if stack else set()
    if role not in roles:
        if not dot and role in symbols.outside_nodes:
            return symbols.templates["", role, None]
        of_stacks = [f"{s.name}.{n.role}" for s in symbols.stacks.values() if s.name for n in s.slice]
        hint = unknown_name_error("role", role, [*sorted(roles), *symbols.outside_nodes, *of_stacks]).allowed or ""
        symbols.add_fault(child.name, f"an arrow from a declared role ({hint})", repr(reference))
        return None
    assert stack is not None
    slice_index = _resolve_slice(symbols, child, stack, role, slice_, same_stack=stack.name == child_stack)
    return symbols.templates.get((stack.name, role, slice_index)) if slice_index != -1 else None


def _resolve_slice(
    symbols: SymbolTable, child: NodeTemplate, stack: Stack, role: str, rule: str | int | None, *, same_stack: bool
) -> int | None:
    """The slice of an arrow's parent; None if the role has no slices, -1 after a fault."""
    if all(node.role != role for node in stack.slice):
        if rule is not None:
            symbols.add_fault(child.name, f"no slice= for {role!r}, which is outside the slices", f"slice={rule!r}")
            return -1
        return None
    last = stack.slices if role in stack.states else stack.slices - 1
    step = -1 if child.step is None else child.step
    in_slice = 0 <= step < symbols.stacks[child.stack].slices  # a node outside the stacks has no step
    in_prologue = same_stack and child.step == -1
    if rule is None:
        rule = "first" if in_prologue else "same" if same_stack and in_slice else "last"
    slice_of_rule = {"first": 0, "last": last} | ({"same": step, "next": step + 1} if in_slice else {})
    index = slice_of_rule.get(rule) if isinstance(rule, str) else rule
    if index is None:
        expected = "slice='first', 'last' or a number, because the node is in no slice"
        symbols.add_fault(child.name, expected, f"slice={rule!r}")
        return -1
    if index > last:
        symbols.add_fault(child.name, f"a slice of {role!r} from 0 to {last}", f"slice={index}")
        return -1
    return index


# templates to the template graph


def _sort_into_components(templates: Sequence[NodeTemplate]) -> tuple[list[list[NodeTemplate]], list[DeclarationFault]]:
    """The strongly connected components in topological order, and the faults of invalid cycles."""
    import networkx as nx

    position = {template: k for k, template in enumerate(templates)}
    graph = nx.DiGraph()
    graph.add_nodes_from(templates)
    graph.add_edges_from((parent, child) for child in templates for parent, _, _ in _iter_parents(child))
    condensed = nx.condensation(graph)
    members_of = {k: sorted(attrs["members"], key=lambda t: position[t]) for k, attrs in condensed.nodes(data=True)}
    faults: list[DeclarationFault] = []
    components: list[list[NodeTemplate]] = []
    for k in nx.lexicographical_topological_sort(condensed, key=lambda k: position[members_of[k][0]]):
        component = members_of[k]
        if len(component) > 1 or graph.has_edge(component[0], component[0]):
            ordered = _sort_component(component)
            if ordered is None:
                names = [template.name for template in component]
                shown = " -> ".join([*names[:6], "…"] if len(names) > 6 else [*names, names[0]])
                expected = "no cycle, except one that goes to an earlier (or to a later) word of the stack in each turn"
                faults.append(DeclarationFault(names[0], expected, f"the cycle {shown}"))
            component = ordered or component
        components.append(component)
    return components, faults


def _iter_parents(child: NodeTemplate) -> Iterator[tuple[NodeTemplate, Reach, str]]:
    """The parents of a template with their reaches and slots: those in its slots, and the selectors."""
    for slot, parent in child.iter_slots():
        yield parent.template, parent.reach, slot
        for _, selector in parent.pick:
            yield selector, Reach("same"), "pick"


def _sort_component(component: list[NodeTemplate]) -> list[NodeTemplate] | None:
    """The order of the nodes of a recurrent component within one word; None if a word would depend on itself."""
    import networkx as nx

    # Words are computed one after another: from the first to the last, or, if arrows read the word after, from the last
    # to the first. Arrows that read only words that are already computed need no order, so only the other arrows
    # determine the order of the nodes of one word.
    graph = nx.DiGraph()
    graph.add_nodes_from(component)
    inner = [(p, child, reach) for child in component for p, reach, _ in _iter_parents(child) if p in graph]
    is_backward = any(reach.kind == "after" for _, _, reach in inner)
    for parent, child, reach in inner:
        if child.word_stack is None or child.word_stack != parent.word_stack:
            return None
        if not (reach.kind in ("after", "same", "rest") if is_backward else reach.is_causal):
            return None
        if not (reach.kind == "after" or reach.is_strictly_causal):
            graph.add_edge(parent, child)
    if not nx.is_directed_acyclic_graph(graph):
        return None
    return list(nx.lexicographical_topological_sort(graph, key=component.index))


def _build_graph(declaration: Declaration, components: Sequence[Sequence[NodeTemplate]]) -> TemplateGraph:
    """The template graph of the sorted templates."""
    index = {template: k for k, template in enumerate(template for component in components for template in component)}
    arrows: dict[tuple[int, int], list[tuple[Reach, str]]] = {}
    for child in index:
        for parent, reach, slot in _iter_parents(child):
            arrows.setdefault((index[parent], index[child]), []).append((reach, slot))
    edges = []
    for (parent_index, child_index), joined in arrows.items():
        reaches, slots = (tuple(dict.fromkeys(values)) for values in zip(*joined, strict=True))
        edges.append(EdgeTemplate(parent_index, child_index, reaches, slots))
    return TemplateGraph(
        tuple(NodeGroup(k, t.stack, t.node.role, t.slice, t.plates, t.word_stack, t.step) for t, k in index.items()),
        tuple(edges),
        {plate.name: plate.size for plate in declaration.plates},
        {stack.name: stack.slices for stack in declaration.stacks},
        tuple(tuple(index[template] for template in component) for component in components),
    )


def check_slots(templates: Sequence[NodeTemplate]) -> list[DeclarationFault]:
    """The faults of the arrows into the slots of TPMs: their number, collections, reaches and picks."""
    faults: list[DeclarationFault] = []
    for child in templates:
        slots = child.node.tpm.get_slots()
        open_ended = bool(slots) and slots[-1].startswith("*")
        has_wrong_arity = len(child.parents) < len(slots) - 1 if open_ended else len(child.parents) != len(slots)
        kind = type(child.node.tpm).__name__
        if has_wrong_arity:
            count = "no parent" if not slots else "1 parent" if len(slots) == 1 else f"{len(slots)} parents"
            expected = f"{count} for {kind}" + (f", with the slots {', '.join(slots)}" if slots else "")
            actual = ", ".join([str(len(child.parents)), *(arrow.role for arrow in child.node.arrows)])
            faults.append(DeclarationFault(child.name, expected, actual.replace(", ", ": ", 1)))
            continue
        for slot, parent in child.iter_slots():
            faults += [*_find_slot_faults(child, kind, slot, parent)]
            faults += _find_pick_faults(child, parent)
    return faults


def _find_pick_faults(child: NodeTemplate, parent: TemplateParent) -> Iterator[DeclarationFault]:
    """The faults of picked words: the selector must read the same words as the arrow, by the same reach."""
    template = parent.template
    for plate, selector in parent.pick:
        reads = {(s.template.word_stack, s.reach) for s in selector.parents if s is not None and not s.reach.is_single}
        if plate == WORD and (selector.node.tpm.states is not None or (template.word_stack, parent.reach) not in reads):
            expected = f"pick= of a word by a Read node with reach {parent.reach} to the words of {template.name}"
            yield DeclarationFault(child.name, expected, f"pick by {selector.name}")


def _find_slot_faults(child: NodeTemplate, kind: str, slot: str, parent: TemplateParent) -> Iterator[DeclarationFault]:
    """The faults of one slot: a single parent or a collection in the wrong place, and an invalid reach."""
    template, over = parent.template, collection_axes(child, parent)
    if slot.endswith(".") and not over:
        expected = f"a collection in the slot {slot} of {kind}, such as an arrow from every word or from a plate"
        yield DeclarationFault(child.name, expected, f"one {template.name}")
    if not slot.endswith(".") and over:
        actual = f"{template.name} over every {' and '.join(over)} (reach {parent.reach})"
        yield DeclarationFault(child.name, f"a single parent in the slot {slot} of {kind}", actual)
    if (
        template.word_stack is not None
        and child.word_stack is None
        and parent.reach.kind not in ("every", "first", "last", "mask")
    ):
        expected = "reach 'every', 'first' or 'last', because the node has no plate 'word'"
        yield DeclarationFault(child.name, expected, f"reach {parent.reach} to {template.name}")
    if template.word_stack is None and parent.reach.kind not in ("same", "every"):
        expected = f"no reach to {template.name}, which has no plate 'word'"
        yield DeclarationFault(child.name, expected, f"reach {parent.reach}")


def collection_axes(child: NodeTemplate, parent: TemplateParent) -> tuple[str, ...]:
    """The axes of the collection in a slot: the plates of the parent that the child does not have, then words."""
    template, picked = parent.template, {plate for plate, _ in parent.pick}
    plates = tuple(plate for plate in template.plates if plate not in child.plates and plate not in picked)
    words = template.word_stack is not None and not parent.reach.is_single and WORD not in picked
    return (*plates, *((WORD,) if words else ()))
