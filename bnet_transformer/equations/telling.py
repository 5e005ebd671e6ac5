"""From a declaration to the rows of its equations: slices whose equations are equal are told once.

A template is a node of the declaration. Its slices differ in nothing but the number t, unless an arrow comes from
another slice at some of them than at the others. A group of slices becomes the symbols that its TPM writes with, and
from these one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.declare import Network, NodeSpec, ParentSpec, as_network
from bnet_transformer.equations.letters import Letters, meanings
from bnet_transformer.equations.result import Equation, Equations
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import NodeGroup
from bnet_transformer.tpm.symbols import FEATURES, FORMS, Slot, Symbol, Symbols, Untold, scripts

SINGLE = {"same": "i", "rest": "i", "before": "i-1", "first": "0"}


def equations(network: Network, form: str = "word") -> Equations:
    r"""The structural equations of a net, in one of four forms: `word`, `row`, `column`, `einstein`.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4)
    >>> print(net.equations()["q_t"])
    P(q_i^t \mid W_q^t, x_i^t) = \mathbb{I}(\, q_i^t = W_q^t x_i^t \,)
    >>> print(net.equations("row")["q_t"])
    P(Q^t \mid W_q^t, X^t) = \mathbb{I}(\, Q^t = X^t (W_q^t)^\top \,)
    """
    check_choice("form", form, FORMS)
    network = as_network(network)
    letters = Letters(network)
    told = [tell(group, form) for group in groups(network, letters)]
    rows = tuple(row for row, _ in told)
    said = [line for _, lines in told for line in lines]
    return Equations(form, rows, tuple(dict.fromkeys([*meanings(network, letters, form), *said])))


@dataclass(frozen=True)
class Group:
    """The members, one a slice, that one equation tells; `part` where they are not all of the template."""

    network: Network
    letters: Letters
    members: tuple[NodeSpec, ...]
    part: bool = False

    @property
    def first(self) -> NodeSpec:
        """The member whose parents and shapes stand for all."""
        return self.members[0]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices told: none for a node of the prologue, the epilogue or outside the stacks."""
        return tuple(m.group.step or 0 for m in self.members if _in_slices(self.network, m.group))

    def slice(self, families: Sequence[NodeGroup]) -> str | None:
        """What to call the slice of these families, one for each slice of the group.

        Of the node itself it is t, t+1 for a state that leaves, 0 for one that enters.
        """
        family, steps = families[0], self.slices
        if family.slice is None:
            return None
        if steps and (len(_offsets(families, steps)) == 1 or len({f.slice for f in families}) > 1):
            offset = family.slice - steps[0]
            near = family.stack == self.first.group.stack and offset in (0, 1)
            if len(steps) > 1 or near:
                return f"t{offset:+d}" if offset else "t"
        depth, last = self.network.graph.slices[family.stack], self.letters.depth(family.stack)
        if family.slice == depth:
            return last
        if family.slice == depth - 1 and family.slice and not self.network.is_state(family):
            return f"{last}-1"
        return str(family.slice)

    def symbols(self, form: str) -> Symbols:
        """What the TPM is given to write with in one form."""
        family, tpm, shape = self.first.group, self.first.tpm, self.first.shape
        is_matrix = form in ("row", "column")
        # One matrix equation tells all words where each reads the same things in the same way.
        whole = is_matrix and family.word_stack is not None and not any(map(self._singles, self.first.parents))
        discrete = tpm.kind == "discrete"
        if is_matrix and not discrete and len(shape) != 1:
            raise Untold
        sup = self._sup([m.group for m in self.members])
        word = None if family.word_stack is None else "i"
        own = self._symbol(family, sup, word, form, whole, capital=not discrete)
        return Symbols(
            form,
            replace(own, value=True),
            tuple(self._slot(place, form, whole) for place in range(len(self.first.parents))),
            str(self._symbol(family, sup, word)) if tpm.reads_by_index or not discrete else "m",
            "" if family.word_stack is None else self.letters.words(family.word_stack),
            whole,
            tpm.kind,
            len(shape),
            (scripts(*self.letters.role(family.role)),),
            sup
            if self.first.param_prefix == family.name
            else (*self.letters.stack(family.stack), *self._plates(family)),
        )

    def left(self, symbols: Symbols) -> str:
        """`P(node | parents)`."""
        tpm, own = self.first.tpm, symbols.own
        if tpm.kind == "discrete" and not tpm.reads_by_index:
            shown = rf"{own.plain} = \text{{atom }} {symbols.state}"
        elif tpm.kind == "discrete" and not symbols.whole:
            shown = symbols.state
        else:
            shown = str(own[FEATURES[: len(self.first.shape)]]) if symbols.form == "einstein" else own.plain
        given = [slot.left for slot in symbols.slots]
        for place in range(len(symbols.slots)):
            given += self._selectors(place).values()
        bar = rf" \mid {', '.join(dict.fromkeys(given))}" if given else ""
        return f"P({shown}{bar})"

    def _singles(self, given: ParentSpec) -> bool:
        """True where word i reads, or is picked by, something that is its own."""
        members = self.network.specs
        parent = members[given.index]
        picked = any(axis == WORD or members[k].group.word_stack is not None for axis, k in given.pick)
        moved = given.reach.kind in ("before", "rest", "first", "last") or _is_discrete(parent)
        return picked or (parent.group.word_stack is not None and moved)

    def _symbol(
        self,
        family: NodeGroup,
        sup: tuple[str, ...],
        word: str | None,
        form: str = "word",
        whole: bool = False,
        *,
        capital: bool = True,
    ) -> Symbol:
        matrix = capital and form != "word" and family.word_stack is not None
        base, sub = (self.letters.matrix if matrix else self.letters.role)(family.role)
        return Symbol(base, sub, sup, word, form, whole)

    def _plates(self, family: NodeGroup) -> list[str]:
        return [self.letters.plates[plate] for plate in family.plates]

    def _sup(self, families: Sequence[NodeGroup], plates: Sequence[str] | None = None) -> tuple[str, ...]:
        """The superscripts of the first of some families, one for each slice of the group: stack, slice, plates."""
        slice_, family = self.slice(families), families[0]
        own = self._plates(family) if plates is None else plates
        return (*self.letters.stack(family.stack), *([] if slice_ is None else [slice_]), *own)

    def _selectors(self, place: int) -> dict[str, str]:
        """What picks in an input, along each axis."""
        graph, found = self.network.graph, {}
        for number, (axis, _) in enumerate(self.first.parents[place].pick):
            families = [graph.groups[m.parents[place].pick[number][1]] for m in self.members]
            word = None if families[0].word_stack is None else "i"
            found[axis] = str(self._symbol(families[0], self._sup(families), word))
        return found

    def _slot(self, place: int, form: str, whole: bool) -> Slot:
        given, network = self.first.parents[place], self.network
        parent = network.specs[given.index]
        family, discrete = parent.group, _is_discrete(parent)
        families = [network.graph.groups[m.parents[place].index] for m in self.members]
        picked = self._selectors(place)
        letters = {plate: self.letters.plates[plate] for plate in family.plates}
        inside = [picked.get(plate, letter) for plate, letter in letters.items()]
        every = ["." if plate in given.over else picked.get(plate, letter) for plate, letter in letters.items()]
        outside = ["." if plate in given.over or plate in picked else letter for plate, letter in letters.items()]

        shown, condition, count = self._read(given.reach, family)
        read = None if family.word_stack is None else shown if given.reach.is_single else "j"
        word = picked.get(WORD, read)
        matrix = word == "j" or (whole and word == "i")
        form = "word" if discrete else form
        sup = self._sup(families, inside)
        told = self._symbol(family, sup, word, form, matrix if family.word_stack is not None else whole)
        behind = self._sup(families, outside)
        if family.word_stack is None or form == "word":
            left = str(self._symbol(family, behind, shown if read == "j" or WORD in given.over else read))
        else:
            matrix = matrix or read == "j" or form == "einstein"
            left = self._symbol(family, behind, read, form, matrix).plain
        at = word if word is None or (WORD not in given.over and word != "j") else shown
        sizes = [str(network.graph.plate_sizes[axis]) for axis in given.over if axis != WORD]
        return Slot(
            given.slot,
            self._symbol(family, sup, word),
            told,
            left,
            str(self._symbol(family, self._sup(families, every), at)),
            parent.shape,
            discrete,
            tuple("j" if axis == WORD else self.letters.plates[axis] for axis in given.over),
            condition,
            r" \cdot ".join([*sizes, count] if WORD in given.over else sizes),
            self.letters.mask(given.reach) if WORD in given.over else (),
        )

    def _read(self, reach: Reach, family: NodeGroup) -> tuple[str, str, str]:
        """Which words are read: as a subscript (`k_.` for all), as a condition on j, and how many they are."""
        stack, width = family.word_stack or "", reach.width
        count = self.letters.count(stack)
        match reach.kind:
            case "every":
                return ".", rf"j \in {self.letters.words(stack)}", count
            case "causal":
                return r"\le i", r"j \le i", "i+1"
            case "earlier":
                return "<i", "j < i", "i"
            case "window":
                shown, condition = f"i-{width}:i+{width}", rf"|j-i| \le {width}"
            case "recent":
                shown, condition = f"i-{width}:i", rf"i-{width} \le j \le i"
            case "mask":
                table = self.letters.table(reach)
                shown = table if self.first.group.word_stack is not None else table.replace("_i", "")
                condition = rf"j \in {shown}"
            case "last":
                return f"{count}-1", "", ""
            case kind:
                return SINGLE[kind], "", ""
        return shown, condition, rf"|\{{j : {condition}\}}|"


def groups(network: Network, letters: Letters) -> list[Group]:
    """Every template with its slices, in the order of the graph; equal slices side by side."""
    templates: dict[tuple[str, str, object], list[NodeSpec]] = {}
    for member in network.specs:
        family = member.group
        block = "slice" if _in_slices(network, family) else family.step
        templates.setdefault((family.stack, family.role, block), []).append(member)
    found = []
    for members in templates.values():
        parts = _alike(network, sorted(members, key=lambda member: member.group.step or 0))
        found += [Group(network, letters, tuple(part), len(parts) > 1) for part in parts]
    return found


def _alike(network: Network, members: Sequence[NodeSpec]) -> list[list[NodeSpec]]:
    """The slices of a template into which every arrow comes from one fixed slice, or from one at a fixed distance."""
    steps = [member.group.step or 0 for member in members]
    arrows = [
        [network.graph.groups[k] for given in m.parents for k in (given.index, *(chosen for _, chosen in given.pick))]
        for m in members
    ]
    keys: list[list[int | None]] = [[] for _ in members]
    for families in zip(*arrows, strict=True):
        fixed = len(_offsets(families, steps)) > 1 and len({f.slice for f in families}) == 1
        for key, family, step in zip(keys, families, steps, strict=True):
            key.append(family.slice if fixed else (family.slice or 0) - step)
    parts: dict[object, list[NodeSpec]] = {}
    for key, member in zip(keys, members, strict=True):
        parts.setdefault(tuple(key), []).append(member)
    return list(parts.values())


def _offsets(families: Sequence[NodeGroup], steps: Sequence[int]) -> set[int]:
    """How far these families are from the slices of the group."""
    return {(family.slice or 0) - step for family, step in zip(families, steps, strict=True)}


def _in_slices(network: Network, family: NodeGroup) -> bool:
    return family.step is not None and 0 <= family.step < network.graph.slices[family.stack]


def tell(group: Group, form: str) -> tuple[Equation, list[str]]:
    """One row, and what must be said below the equations; word by word where the form has no words for it."""
    member = group.first
    wordless = member.group.word_stack is None and all(
        group.network.specs[given.index].group.word_stack is None for given in member.parents
    )
    for chosen in dict.fromkeys(["word" if wordless else form, "word"]):
        try:
            symbols = group.symbols(chosen)
            right = member.tpm.latex(symbols)
        except Untold:
            continue
        if not isinstance(right, str):
            raise BNetError(f"{type(member.tpm).__name__}.latex", expected="LaTeX, a string", actual=right)
        return _row(group, chosen, group.left(symbols), right), list(symbols.defined)
    expected = "an equation, at least in the form 'word'"
    raise BNetError(f"{type(member.tpm).__name__}.latex", expected=expected, actual="none (Untold)")


def _row(group: Group, form: str, left: str, right: str) -> Equation:
    member = group.first
    family = member.group
    steps = {"t": "t", "t+1": "(t+1)"}
    index = group.slice([m.group for m in group.members])
    name = family.stem if index is None else f"{family.stem}_{steps.get(index, index)}"
    what = [type(member.tpm).__name__, member.tpm.kind, *(["learnable"] if member.learnable else [])]
    over = [*(["slice"] if group.slices else []), *family.plates, *(["word"] if family.word_stack is not None else [])]
    note = ", ".join(what) + (f"; for each {', '.join(over)}" if over else "")
    note += "; one draw for the whole corpus" if member.scope == "corpus" else ""
    return Equation(name, left, right, member.tpm.kind, form, group.slices if group.part else (), note)


def _is_discrete(member: NodeSpec) -> bool:
    return (member.tpm.kind == "discrete" or member.tpm.states is not None) and member.tpm.reads_by_index
