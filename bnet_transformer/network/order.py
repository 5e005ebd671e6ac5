"""Second pass, templates to the folded graph: a topological order, recurrent groups, cycles reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.errors import Fault
from bnet_transformer.graph.folded import Bundle, Family, FoldedGraph
from bnet_transformer.network.declaration import Declaration
from bnet_transformer.network.templates import Source, Template


def templates_to_graph(
    declaration: Declaration, templates: Sequence[Template]
) -> tuple[FoldedGraph | None, tuple[Template, ...], list[Fault]]:
    """The folded graph of templates with, for each family in its order, the template that it stands for; or the
    cycles in it."""
    import networkx as nx

    place = {template: k for k, template in enumerate(templates)}
    joins = nx.DiGraph()
    joins.add_nodes_from(range(len(templates)))
    for child in templates:
        for parent, _, _ in _incoming(child):
            joins.add_edge(place[parent], place[child])
    whole = nx.condensation(joins, list(nx.strongly_connected_components(joins)))
    members = {box: sorted(data["members"]) for box, data in whole.nodes(data=True)}
    faults: list[Fault] = []
    groups: list[list[int]] = []
    for box in nx.lexicographical_topological_sort(whole, key=lambda box: members[box][0]):
        group = members[box]
        if len(group) > 1 or joins.has_edge(group[0], group[0]):
            group, fault = _recurrent([templates[k] for k in group], group)
            faults.extend(fault)
        groups.append(group)
    if faults:
        return None, (), faults
    ordered = tuple(templates[k] for group in groups for k in group)
    return _graph(declaration, ordered, [len(group) for group in groups]), ordered, []


def _incoming(child: Template) -> Iterator[tuple[Template, Reach, str]]:
    """The parents of a template: what fills its slots, and what picks."""
    for slot, source in child.inputs():
        yield source.parent, source.reach, slot
        for _, selector in source.pick:
            yield selector, Reach("same"), "pick"


def _recurrent(group: Sequence[Template], places: Sequence[int]) -> tuple[list[int], list[Fault]]:
    """The order within a group that reads itself, word after word; a fault where a word would wait for itself."""
    import networkx as nx

    now = nx.DiGraph()
    now.add_nodes_from(places)
    where = dict(zip(group, places, strict=True))
    for child in group:
        for parent, reach, _ in _incoming(child):
            if parent in where:
                over_words = child.words is not None and child.words == parent.words
                if not over_words or not reach.backward:
                    return list(places), [_cycle(group)]
                if not reach.strict:
                    now.add_edge(where[parent], where[child])
    if not nx.is_directed_acyclic_graph(now):
        return list(places), [_cycle(group)]
    return list(nx.lexicographical_topological_sort(now)), []


def _cycle(group: Sequence[Template]) -> Fault:
    names = [template.name for template in group]
    shown = " -> ".join([*names[:6], "…"] if len(names) > 6 else [*names, names[0]])
    return Fault(names[0], "no cycle, unless each turn goes back to an earlier word of one stack", f"a cycle {shown}")


def _graph(declaration: Declaration, templates: Sequence[Template], sizes: Sequence[int]) -> FoldedGraph:
    index = {template: k for k, template in enumerate(templates)}
    families = tuple(
        Family(k, t.stack, t.node.role, t.slice, t.plates, t.words, t.step) for k, t in enumerate(templates)
    )
    bundles: dict[tuple[int, int], tuple[list[Reach], list[str]]] = {}
    for child in templates:
        for parent, reach, slot in _incoming(child):
            reaches, slots = bundles.setdefault((index[parent], index[child]), ([], []))
            if reach not in reaches:
                reaches.append(reach)
            if slot not in slots:
                slots.append(slot)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return FoldedGraph(
        families,
        tuple(Bundle(p, c, tuple(reaches), tuple(slots)) for (p, c), (reaches, slots) in bundles.items()),
        {plate.name: plate.size for plate in declaration.plates},
        {stack.name: stack.slices for stack in declaration.stacks},
        tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)),
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
