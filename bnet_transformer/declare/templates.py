"""The passes over names and arrows: declaration to templates, templates to the folded graph.

First every node is unrolled over its slices and every arrow resolved to what it names; then the templates are brought
into a topological order with recurrent groups, and cycles are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bnet_transformer._core.naming import SLICE, WORD, Reach, as_reach, join, role_fault, stem_of
from bnet_transformer.declare.declaration import Arrow, Declaration, Node, Stack
from bnet_transformer.errors import BNetError, Fault, unknown
from bnet_transformer.graph.folded import Bundle, Family, FoldedGraph


@dataclass(frozen=True)
class Source:
    """One arrow, resolved: the template it comes from, its reach, and the discrete templates that pick."""

    parent: Template
    reach: Reach
    pick: tuple[tuple[str, Template], ...] = ()


@dataclass(eq=False)
class Template:
    """A node at one slice, with its arrows resolved; `None` stands for an arrow that could not be."""

    stack: str
    slice: int | None
    step: int | None
    node: Node
    plates: tuple[str, ...]
    words: str | None
    sources: tuple[Source | None, ...] = ()

    @property
    def name(self) -> str:
        return join(stem_of(self.stack, self.node.role), () if self.slice is None else (self.slice,))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its slots, one for each parent; a last `*x` is repeated."""
        names = self.node.tpm.takes()
        if names and names[-1].startswith("*"):
            rest = max(len(self.sources) - len(names) + 1, 0)
            return (*names[:-1], *([names[-1][1:]] * rest))
        return names

    def inputs(self) -> Iterator[tuple[str, Source]]:
        """What fills each slot, of the arrows that could be resolved."""
        for slot, source in zip(self.slots, self.sources, strict=False):
            if source is not None:
                yield slot, source


@dataclass
class Book:
    """The declared roles: who stands where, for resolving names."""

    declaration: Declaration
    faults: list[Fault] = field(default_factory=list)
    templates: dict[tuple[str, str, int | None], Template] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stacks = {stack.name: stack for stack in self.declaration.stacks}
        self.outside = {node.role: node for node in self.declaration.nodes}

    def blame(self, node: str, expected: str, got: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(node, expected, got))


def declaration_to_graph(declaration: Declaration) -> tuple[FoldedGraph | None, tuple[Template, ...], list[Fault]]:
    """The folded graph with, for each family in its order, the template that it stands for, and all faults; no graph
    where there is a cycle."""
    book, templates = Book(declaration), []
    _check_names(book)
    for stack, slice_, step, node in _placed(declaration):
        plates, words = _plates(book, stack, slice_, node), _words(book, stack, step, node)
        templates.append(Template(stack, slice_, step, node, plates, words))
    book.templates |= {(each.stack, each.node.role, each.slice): each for each in templates}
    for template in templates:
        template.sources = tuple(_source(book, template, arrow) for arrow in template.node.arrows)
    if not templates and not book.faults:
        raise BNetError("declaration", expected="at least one node, in a stack or outside", got="none")
    faults = book.faults + check_reaches(templates)
    groups, cycles = _groups(templates)
    if cycles:
        return None, (), [*faults, *cycles]
    return _graph(declaration, groups), tuple(template for group in groups for template in group), faults


def _placed(declaration: Declaration) -> Iterator[tuple[str, int | None, int | None, Node]]:
    """Each node with its stack, its slice (None outside the slices) and its step."""
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


def _check_names(book: Book) -> None:
    declaration = book.declaration
    names = [stack.name for stack in declaration.stacks]
    for name in names:
        fault = role_fault(name) if name else None
        if fault:
            book.blame(f"stack {name!r}", "a name that can prefix a node", fault.replace("role", "name"))
        if names.count(name) > 1:
            book.blame(f"stack {name!r}", "stacks with different names", "the name twice")
    _check_plates(book)
    stems: dict[str, str] = {}
    for stack, nodes in _blocks(declaration):
        for block, node in nodes:
            fault = role_fault(node.role, [name for name in names if name])
            if fault:
                book.blame(str(node.role), "a role that makes plain names", fault)
                continue
            place = f"{block} of stack {stack!r}" if stack else block
            stem = stem_of(stack, node.role)
            first = stems.setdefault(stem, place)
            state = {first, place} == {place.replace(block, "prologue"), place.replace(block, "slice")}
            if first != place and not state:
                book.blame(stem, "a name that one node has", f"it in the {first} and in the {place}")
    for stack, nodes in _blocks(declaration):
        seen = [(block, node.role) for block, node in nodes]
        for block, node in nodes:
            if node.scope == "corpus" and (node.arrows or WORD in node.plates):
                got = "parents" if node.arrows else "a word plate"
                book.blame(stem_of(stack, node.role), "scope='corpus' for a root without words alone", got)
            if node.shared and block != "slice":
                book.blame(stem_of(stack, node.role), "shared=True within a slice alone", f"it in the {block}")
        for block, role in dict.fromkeys(pair for pair in seen if seen.count(pair) > 1):
            book.blame(stem_of(stack, role), f"one declaration in the {block}", f"{seen.count((block, role))}")


def _words(book: Book, stack: str, step: int | None, node: Node) -> str | None:
    """The stack whose words a node is over: its own (`word`), another's (`enc.word`), or none."""
    for plate in node.plates:
        other, dot, name = plate.rpartition(".")
        if name == WORD and dot and other in book.stacks:
            return other
    return stack if WORD in node.plates and step is not None else None


def _blocks(declaration: Declaration) -> Iterator[tuple[str, list[tuple[str, Node]]]]:
    yield "", [("nodes outside the stacks", node) for node in declaration.nodes]
    for stack in declaration.stacks:
        blocks = (("prologue", stack.prologue), ("slice", stack.slice), ("epilogue", stack.epilogue))
        yield stack.name, [(block, node) for block, nodes in blocks for node in nodes]


def _check_plates(book: Book) -> None:
    names = [plate.name for plate in book.declaration.plates]
    count = Counter(names)
    for name in count:
        fault = role_fault(name)
        if fault or name in (WORD, SLICE):
            got = (fault or f"{name!r}, which every net has").replace("role", "name")
            book.blame(f"plate {name!r}", "a plain name of its own", got)
        if count[name] > 1:
            book.blame(f"plate {name!r}", "one declaration", f"{count[name]}")


def _plates(book: Book, stack: str, slice_: int | None, node: Node) -> tuple[str, ...]:
    """A node's plates but the word, in the declaration's order."""
    order = [plate.name for plate in book.declaration.plates]
    name = join(stem_of(stack, node.role), () if slice_ is None else (slice_,))
    outside = any(node is other for other in book.declaration.nodes)
    others = [f"{other}.{WORD}" for other in book.stacks if other]
    if sum(plate == WORD or plate in others for plate in node.plates) > 1:
        book.blame(name, "the words of one stack", f"plates {', '.join(node.plates)}")
    for plate in dict.fromkeys(node.plates):
        if node.plates.count(plate) > 1:
            book.blame(name, "each plate once", f"{plate!r} {node.plates.count(plate)} times")
        if plate == WORD and outside:
            book.blame(name, "no word plate: it stands outside the stacks", "plates with 'word'")
        elif plate == SLICE:
            book.blame(name, "plates without 'slice': the block where a node stands gives it", "'slice'")
        elif plate != WORD and plate not in order and plate not in others:
            known = ", ".join([*order, WORD, *others])
            book.blame(name, f"a declared plate ({known})", f"the plate {plate!r}")
    return tuple(plate for plate in order if plate in node.plates)


def _source(book: Book, child: Template, arrow: Arrow) -> Source | None:
    parent = _resolve(book, child, arrow.role, arrow.slice)
    if parent is None:
        return None
    picks = []
    for plate, role in arrow.pick.items():
        selector = _resolve(book, child, role, None)
        if selector is None or not _can_pick(book, child, parent, plate, selector):
            return None
        picks.append((plate, selector))
    return Source(parent, as_reach(arrow.reach), tuple(picks))


def _can_pick(book: Book, child: Template, parent: Template, plate: str, selector: Template) -> bool:
    before = len(book.faults)
    has = [*parent.plates, *([WORD] if parent.words is not None else [])]
    if plate not in has:
        book.blame(child.name, f"a pick along a plate of {parent.name} ({', '.join(has) or 'none'})", repr(plate))
    if plate in child.plates:
        book.blame(child.name, f"no pick along {plate!r}, a plate of its own", f"pick by {selector.name}")
    tpm = selector.node.tpm
    if not tpm.reads_by_index:
        book.blame(child.name, "a pick by a discrete node", f"{selector.name}, which is {tpm.kind}")
    sizes = {p.name: p.size for p in book.declaration.plates}
    if plate in sizes and tpm.states != sizes[plate]:
        book.blame(
            child.name,
            f"a selector of {sizes[plate]} states, one for each {plate}",
            f"{selector.name} with {tpm.states}",
        )
    inside = set(selector.plates) <= set(child.plates) and selector.words in (None, child.words)
    if not inside:
        book.blame(child.name, "a selector with no plate that it lacks itself", f"{selector.name}")
    return len(book.faults) == before


def _resolve(book: Book, child: Template, reference: str, slice_: str | int | None) -> Template | None:
    """The template that `role` or `stack.role` names, seen from a child."""
    stack_name, dot, role = reference.rpartition(".")
    if dot and stack_name not in book.stacks:
        names = ", ".join(repr(name) for name in book.stacks)
        book.blame(child.name, f"a stack among {names or 'none'}", f"an arrow from {reference!r}")
        return None
    own = child.stack if child.step is not None else None
    home = stack_name if dot else own
    if home is None and not dot and role not in book.outside and len(book.stacks) == 1:
        home = next(iter(book.stacks))
    stack = book.stacks.get(home) if home is not None else None
    roles = {n.role for n in (*stack.prologue, *stack.slice, *stack.epilogue)} if stack else set()
    if role not in roles:
        if not dot and role in book.outside:
            return book.templates["", role, None]
        of_stacks = [f"{s.name}.{n.role}" for s in book.stacks.values() if s.name for n in s.slice]
        near = unknown("role", role, [*sorted(roles), *book.outside, *of_stacks]).allowed or ""
        book.blame(child.name, f"an arrow from a declared role ({near})", repr(reference))
        return None
    assert stack is not None
    at = _slice_of(book, child, stack, role, slice_, same_stack=stack.name == own)
    return book.templates.get((stack.name, role, at)) if at != -1 else None


def _slice_of(
    book: Book, child: Template, stack: Stack, role: str, rule: str | int | None, *, same_stack: bool
) -> int | None:
    """The slice of a role that an arrow comes from; None where the role has none, -1 after a fault."""
    if all(node.role != role for node in stack.slice):
        if rule is not None:
            book.blame(child.name, f"no slice for {role!r}, which stands outside the slices", f"slice={rule!r}")
            return -1
        return None
    last = stack.slices if role in stack.states else stack.slices - 1
    step = -1 if child.step is None else child.step
    in_slice = 0 <= step < book.stacks[child.stack].slices  # outside the stacks no step is compared
    in_prologue = same_stack and child.step == -1
    if rule is None:
        rule = "first" if in_prologue else "same" if same_stack and in_slice else "last"
    places = {"first": 0, "last": last} | ({"same": step, "next": step + 1} if in_slice else {})
    at = places.get(rule) if isinstance(rule, str) else rule
    if at is None:
        book.blame(child.name, "slice='first', 'last' or a number, for it stands in no slice", f"slice={rule!r}")
        return -1
    if at > last:
        book.blame(child.name, f"a slice of {role!r} from 0 to {last}", f"slice {at}")
        return -1
    return at


# templates to the folded graph


def _groups(templates: Sequence[Template]) -> tuple[list[list[Template]], list[Fault]]:
    """The templates in a topological order, in groups (of one, or of those that read each other); the cycles."""
    import networkx as nx

    place = {template: k for k, template in enumerate(templates)}
    joins = nx.DiGraph()
    joins.add_nodes_from(templates)
    joins.add_edges_from((parent, child) for child in templates for parent, _, _ in _incoming(child))
    whole = nx.condensation(joins)
    members = {box: sorted(data["members"], key=lambda t: place[t]) for box, data in whole.nodes(data=True)}
    faults: list[Fault] = []
    groups: list[list[Template]] = []
    for box in nx.lexicographical_topological_sort(whole, key=lambda box: place[members[box][0]]):
        group = members[box]
        if len(group) > 1 or joins.has_edge(group[0], group[0]):
            ordered = _word_after_word(group)
            if ordered is None:
                names = [template.name for template in group]
                shown = " -> ".join([*names[:6], "…"] if len(names) > 6 else [*names, names[0]])
                wanted = "no cycle, unless each turn goes back to an earlier word of one stack"
                faults.append(Fault(names[0], wanted, f"a cycle {shown}"))
            group = ordered or group
        groups.append(group)
    return groups, faults


def _incoming(child: Template) -> Iterator[tuple[Template, Reach, str]]:
    """The parents of a template: what fills its slots, and what picks."""
    for slot, source in child.inputs():
        yield source.parent, source.reach, slot
        for _, selector in source.pick:
            yield selector, Reach("same"), "pick"


def _word_after_word(group: list[Template]) -> list[Template] | None:
    """The order within a group that reads itself, word after word; None where a word would wait for itself."""
    import networkx as nx

    now = nx.DiGraph()
    now.add_nodes_from(group)
    for child in group:
        for parent, reach, _ in _incoming(child):
            if parent in now:
                if child.words is None or child.words != parent.words or not reach.backward:
                    return None
                if not reach.strict:
                    now.add_edge(parent, child)
    if not nx.is_directed_acyclic_graph(now):
        return None
    return list(nx.lexicographical_topological_sort(now, key=group.index))


def _graph(declaration: Declaration, groups: Sequence[Sequence[Template]]) -> FoldedGraph:
    index = {template: k for k, template in enumerate(template for group in groups for template in group)}
    arrows: dict[tuple[int, int], list[tuple[Reach, str]]] = {}
    for child in index:
        for parent, reach, slot in _incoming(child):
            arrows.setdefault((index[parent], index[child]), []).append((reach, slot))
    bundles = []
    for (parent_index, child_index), joined in arrows.items():
        reaches, slots = (tuple(dict.fromkeys(each)) for each in zip(*joined, strict=True))
        bundles.append(Bundle(parent_index, child_index, reaches, slots))
    return FoldedGraph(
        tuple(Family(k, t.stack, t.node.role, t.slice, t.plates, t.words, t.step) for t, k in index.items()),
        tuple(bundles),
        {plate.name: plate.size for plate in declaration.plates},
        {stack.name: stack.slices for stack in declaration.stacks},
        tuple(tuple(index[template] for template in group) for group in groups),
    )


def check_reaches(templates: Sequence[Template]) -> list[Fault]:
    """Faults of arity, of single slots that would get a collection and the reverse, and of reaches without words."""
    faults: list[Fault] = []
    for child in templates:
        takes = child.node.tpm.takes()
        open_ended = bool(takes) and takes[-1].startswith("*")
        wrong = len(child.sources) < len(takes) - 1 if open_ended else len(child.sources) != len(takes)
        kind = type(child.node.tpm).__name__
        if wrong:
            wanted = f"{kind} takes {', '.join(takes)}" if takes else f"{kind} takes none"
            got = f"{len(child.sources)}: " + ", ".join(arrow.role for arrow in child.node.arrows)
            faults.append(Fault(child.name, f"{len(takes)} parents ({wanted})", got))
            continue
        for slot, source in child.inputs():
            faults += [*_slot_faults(child, f"for the slot {slot} of {kind}", slot, source)]
            faults += _pick_faults(child, source)
    return faults


def _pick_faults(child: Template, source: Source) -> Iterator[Fault]:
    """A word is picked by a node that reads exactly these words: of the same stack, by the same reach."""
    parent = source.parent
    for plate, selector in source.pick:
        reads = {(s.parent.words, s.reach) for s in selector.sources if s is not None and not s.reach.single}
        if plate == WORD and (selector.node.tpm.states is not None or (parent.words, source.reach) not in reads):
            wanted = f"a pick of a word by a Read of the same words as {parent.name} (reach {source.reach})"
            yield Fault(child.name, wanted, f"pick by {selector.name}")


def _slot_faults(child: Template, where: str, slot: str, source: Source) -> Iterator[Fault]:
    parent, over = source.parent, collection_of(child, source)
    if slot.endswith(".") and not over:
        yield Fault(child.name, where + ", a collection (an arrow from every word or every head)", f"one {parent.name}")
    if not slot.endswith(".") and over:
        got = f"{parent.name} over every {' and '.join(over)} (reach {source.reach})"
        yield Fault(child.name, where + ", a single parent", got)
    if parent.words is not None and child.words is None and source.reach.kind not in ("every", "first", "last", "mask"):
        wanted = "reach 'every', 'first' or 'last', for it has no word of its own"
        yield Fault(child.name, wanted, f"reach {source.reach} to {parent.name}")
    if parent.words is None and source.reach.kind not in ("same", "every"):
        yield Fault(child.name, f"no reach to {parent.name}, which has no words", f"reach {source.reach}")


def collection_of(child: Template, source: Source) -> tuple[str, ...]:
    """The axes over which a slot receives a collection: the parent's plates that the child lacks, then words."""
    parent, picked = source.parent, {plate for plate, _ in source.pick}
    plates = tuple(plate for plate in parent.plates if plate not in child.plates and plate not in picked)
    words = parent.words is not None and not source.reach.single and WORD not in picked
    return (*plates, *((WORD,) if words else ()))
