"""First pass, declaration to templates: every node unrolled over its slices, every arrow resolved to what it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bnet_transformer.axes import SLICE, WORD, Reach, join, role_fault, stem_of
from bnet_transformer.errors import Fault, unknown
from bnet_transformer.network.declaration import Arrow, Declaration, Node, Stack


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
    asked: dict[str, str] = field(default_factory=dict)
    templates: dict[tuple[str, str, int | None], Template] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stacks = {stack.name: stack for stack in self.declaration.stacks}
        self.outside = {node.role: node for node in self.declaration.nodes}

    def near(self, reference: str, known: list[str]) -> str:
        """The known roles near to one that is unknown."""
        if reference not in self.asked:
            self.asked[reference] = unknown("role", reference.rpartition(".")[2], known).allowed or ""
        return self.asked[reference]

    def blame(self, node: str, expected: str, got: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(node, expected, got))


def declaration_to_templates(declaration: Declaration) -> tuple[list[Template], list[Fault]]:
    """Every node of every slice with its arrows resolved, and every fault of names, plates and references."""
    book, templates = Book(declaration), []
    _check_names(book)
    for stack, slice_, step, node in _placed(declaration):
        plates, words = _plates(book, stack, slice_, node), _words(book, stack, step, node)
        templates.append(Template(stack, slice_, step, node, plates, words))
    book.templates |= {(each.stack, each.node.role, each.slice): each for each in templates}
    for template in templates:
        template.sources = tuple(_source(book, template, arrow) for arrow in template.node.arrows)
    return templates, book.faults


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
    return Source(parent, arrow.reach, tuple(picks))


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
        known = [
            *sorted(roles),
            *book.outside,
            *(f"{s.name}.{n.role}" for s in book.stacks.values() if s.name for n in s.slice),
        ]
        near = book.near(reference, known)
        book.blame(child.name, f"an arrow from a declared role ({near})", repr(reference))
        return None
    assert stack is not None
    at = _slice_of(book, child, stack, role, slice_, same_stack=stack.name == own)
    return book.templates.get((stack.name, role, at)) if at != -1 else None


def _slice_of(
    book: Book, child: Template, stack: Stack, role: str, rule: str | int | None, *, same_stack: bool
) -> int | None:
    """The slice of a role that an arrow comes from; None where the role has none, -1 after a fault."""
    sliced = any(node.role == role for node in stack.slice)
    if not sliced:
        if rule is not None:
            book.blame(child.name, f"no slice for {role!r}, which stands outside the slices", f"slice={rule!r}")
            return -1
        return None
    last = stack.slices if role in stack.states else stack.slices - 1
    in_slice = child.step is not None and 0 <= child.step < book.stacks[child.stack].slices
    in_prologue = same_stack and child.step == -1
    if rule is None:
        rule = "first" if in_prologue else "same" if same_stack and in_slice else "last"
    at: int
    match rule:
        case "first":
            at = 0
        case "last":
            at = last
        case "same" | "next" if in_slice and child.step is not None:
            at = child.step + (1 if rule == "next" else 0)
        case int():
            at = rule
        case _:
            book.blame(child.name, "slice='first', 'last' or a number, for it stands in no slice", f"slice={rule!r}")
            return -1
    if at > last:
        book.blame(child.name, f"a slice of {role!r} from 0 to {last}", f"slice {at}")
        return -1
    return at
