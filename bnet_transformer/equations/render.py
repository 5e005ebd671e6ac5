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
from bnet_transformer.equations.notation import Notation, describe_notation
from bnet_transformer.equations.result import Equation, Equations
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import NodeGroup
from bnet_transformer.tpm.symbols import (
    FEATURE_LETTERS,
    FORMS,
    SlotSymbols,
    Symbol,
    Symbols,
    UnsupportedFormError,
    add_scripts,
)

READ_INDICES = {"same": "i", "rest": "i", "before": "i-1", "first": "0"}


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
    letters = Notation(network)
    told = [render_equation(group, form) for group in share_equations(network, letters)]
    rows = tuple(row for row, _ in told)
    said = [line for _, lines in told for line in lines]
    return Equations(form, rows, tuple(dict.fromkeys([*describe_notation(network, letters, form), *said])))


@dataclass(frozen=True)
class SharedEquation:
    """The members, one a slice, that one equation tells; `is_partial` where they are not all of the template."""

    network: Network
    notation: Notation
    specs: tuple[NodeSpec, ...]
    is_partial: bool = False

    @property
    def representative(self) -> NodeSpec:
        """The member whose parents and shapes stand for all."""
        return self.specs[0]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices told: none for a node of the prologue, the epilogue or outside the stacks."""
        return tuple(m.group.step or 0 for m in self.specs if _is_in_slices(self.network, m.group))

    def slice_label(self, groups: Sequence[NodeGroup]) -> str | None:
        """What to call the slice of these families, one for each slice of the group.

        Of the node itself it is t, t+1 for a state that leaves, 0 for one that enters.
        """
        family, steps = groups[0], self.slices
        if family.slice is None:
            return None
        if steps and (len(_slice_offsets(groups, steps)) == 1 or len({f.slice for f in groups}) > 1):
            offset = family.slice - steps[0]
            near = family.stack == self.representative.group.stack and offset in (0, 1)
            if len(steps) > 1 or near:
                return f"t{offset:+d}" if offset else "t"
        depth, last = self.network.graph.slices[family.stack], self.notation.slice_count(family.stack)
        if family.slice == depth:
            return last
        if family.slice == depth - 1 and family.slice and not self.network.is_state(family):
            return f"{last}-1"
        return str(family.slice)

    def build_symbols(self, form: str) -> Symbols:
        """What the TPM is given to write with in one form."""
        family, tpm, shape = self.representative.group, self.representative.tpm, self.representative.shape
        is_matrix = form in ("row", "column")
        # One matrix equation tells all words where each reads the same things in the same way.
        whole = (
            is_matrix and family.word_stack is not None and not any(map(self._is_per_word, self.representative.parents))
        )
        discrete = tpm.kind == "discrete"
        if is_matrix and not discrete and len(shape) != 1:
            raise UnsupportedFormError
        sup = self._superscripts([m.group for m in self.specs])
        word = None if family.word_stack is None else "i"
        own = self._build_symbol(family, sup, word, form, whole, capital=not discrete)
        return Symbols(
            form,
            replace(own, is_value=True),
            tuple(self._build_slot(place, form, whole) for place in range(len(self.representative.parents))),
            str(self._build_symbol(family, sup, word)) if tpm.is_index_valued or not discrete else "m",
            "" if family.word_stack is None else self.notation.word_set(family.word_stack),
            whole,
            tpm.kind,
            len(shape),
            (add_scripts(*self.notation.role_letter(family.role)),),
            sup
            if self.representative.param_prefix == family.name
            else (*self.notation.stack_superscript(family.stack), *self._plate_letters(family)),
        )

    def format_lhs(self, symbols: Symbols) -> str:
        """`P(node | parents)`."""
        tpm, own = self.representative.tpm, symbols.node
        if tpm.kind == "discrete" and not tpm.is_index_valued:
            shown = rf"{own.plain} = \text{{atom }} {symbols.state}"
        elif tpm.kind == "discrete" and not symbols.is_full_matrix:
            shown = symbols.state
        else:
            shown = (
                str(own[FEATURE_LETTERS[: len(self.representative.shape)]]) if symbols.form == "einstein" else own.plain
            )
        given = [slot.lhs for slot in symbols.slots]
        for place in range(len(symbols.slots)):
            given += self._selector_symbols(place).values()
        bar = rf" \mid {', '.join(dict.fromkeys(given))}" if given else ""
        return f"P({shown}{bar})"

    def _is_per_word(self, parent: ParentSpec) -> bool:
        """True where word i reads, or is picked by, something that is its own."""
        members = self.network.specs
        parent_spec = members[parent.index]
        picked = any(axis == WORD or members[k].group.word_stack is not None for axis, k in parent.pick)
        moved = parent.reach.kind in ("before", "rest", "first", "last") or _is_discrete(parent_spec)
        return picked or (parent_spec.group.word_stack is not None and moved)

    def _build_symbol(
        self,
        group: NodeGroup,
        sup: tuple[str, ...],
        word: str | None,
        form: str = "word",
        is_full_matrix: bool = False,
        *,
        capital: bool = True,
    ) -> Symbol:
        matrix = capital and form != "word" and group.word_stack is not None
        base, sub = (self.notation.matrix_letter if matrix else self.notation.role_letter)(group.role)
        return Symbol(base, sub, sup, word, form, is_full_matrix)

    def _plate_letters(self, group: NodeGroup) -> list[str]:
        return [self.notation.plate_indices[plate] for plate in group.plates]

    def _superscripts(self, groups: Sequence[NodeGroup], plates: Sequence[str] | None = None) -> tuple[str, ...]:
        """The superscripts of the first of some families, one for each slice of the group: stack, slice, plates."""
        slice_, family = self.slice_label(groups), groups[0]
        own = self._plate_letters(family) if plates is None else plates
        return (*self.notation.stack_superscript(family.stack), *([] if slice_ is None else [slice_]), *own)

    def _selector_symbols(self, idx: int) -> dict[str, str]:
        """What picks in an input, along each axis."""
        graph, found = self.network.graph, {}
        for number, (axis, _) in enumerate(self.representative.parents[idx].pick):
            families = [graph.groups[m.parents[idx].pick[number][1]] for m in self.specs]
            word = None if families[0].word_stack is None else "i"
            found[axis] = str(self._build_symbol(families[0], self._superscripts(families), word))
        return found

    def _build_slot(self, idx: int, form: str, is_full_matrix: bool) -> SlotSymbols:
        given, network = self.representative.parents[idx], self.network
        parent = network.specs[given.index]
        family, discrete = parent.group, _is_discrete(parent)
        families = [network.graph.groups[m.parents[idx].index] for m in self.specs]
        picked = self._selector_symbols(idx)
        letters = {plate: self.notation.plate_indices[plate] for plate in family.plates}
        inside = [picked.get(plate, letter) for plate, letter in letters.items()]
        every = ["." if plate in given.over else picked.get(plate, letter) for plate, letter in letters.items()]
        outside = ["." if plate in given.over or plate in picked else letter for plate, letter in letters.items()]

        shown, condition, count = self._describe_reach(given.reach, family)
        read = None if family.word_stack is None else shown if given.reach.is_single else "j"
        word = picked.get(WORD, read)
        matrix = word == "j" or (is_full_matrix and word == "i")
        form = "word" if discrete else form
        sup = self._superscripts(families, inside)
        told = self._build_symbol(family, sup, word, form, matrix if family.word_stack is not None else is_full_matrix)
        behind = self._superscripts(families, outside)
        if family.word_stack is None or form == "word":
            left = str(self._build_symbol(family, behind, shown if read == "j" or WORD in given.over else read))
        else:
            matrix = matrix or read == "j" or form == "einstein"
            left = self._build_symbol(family, behind, read, form, matrix).plain
        at = word if word is None or (WORD not in given.over and word != "j") else shown
        sizes = [str(network.graph.plate_sizes[axis]) for axis in given.over if axis != WORD]
        return SlotSymbols(
            given.slot,
            self._build_symbol(family, sup, word),
            told,
            left,
            str(self._build_symbol(family, self._superscripts(families, every), at)),
            parent.shape,
            discrete,
            tuple("j" if axis == WORD else self.notation.plate_indices[axis] for axis in given.over),
            condition,
            r" \cdot ".join([*sizes, count] if WORD in given.over else sizes),
            self.notation.mask_superscript(given.reach) if WORD in given.over else (),
        )

    def _describe_reach(self, reach: Reach, group: NodeGroup) -> tuple[str, str, str]:
        """Which words are read: as a subscript (`k_.` for all), as a condition on j, and how many they are."""
        stack, width = group.word_stack or "", reach.width
        count = self.notation.word_count(stack)
        match reach.kind:
            case "every":
                return ".", rf"j \in {self.notation.word_set(stack)}", count
            case "causal":
                return r"\le i", r"j \le i", "i+1"
            case "earlier":
                return "<i", "j < i", "i"
            case "window":
                shown, condition = f"i-{width}:i+{width}", rf"|j-i| \le {width}"
            case "recent":
                shown, condition = f"i-{width}:i", rf"i-{width} \le j \le i"
            case "mask":
                table = self.notation.mask_set(reach)
                shown = table if self.representative.group.word_stack is not None else table.replace("_i", "")
                condition = rf"j \in {shown}"
            case "last":
                return f"{count}-1", "", ""
            case kind:
                return READ_INDICES[kind], "", ""
        return shown, condition, rf"|\{{j : {condition}\}}|"


def share_equations(network: Network, notation: Notation) -> list[SharedEquation]:
    """Every template with its slices, in the order of the graph; equal slices side by side."""
    templates: dict[tuple[str, str, object], list[NodeSpec]] = {}
    for member in network.specs:
        family = member.group
        block = "slice" if _is_in_slices(network, family) else family.step
        templates.setdefault((family.stack, family.role, block), []).append(member)
    found = []
    for members in templates.values():
        parts = _split_slices(network, sorted(members, key=lambda member: member.group.step or 0))
        found += [SharedEquation(network, notation, tuple(part), len(parts) > 1) for part in parts]
    return found


def _split_slices(network: Network, specs: Sequence[NodeSpec]) -> list[list[NodeSpec]]:
    """The slices of a template into which every arrow comes from one fixed slice, or from one at a fixed distance."""
    steps = [member.group.step or 0 for member in specs]
    arrows = [
        [network.graph.groups[k] for given in m.parents for k in (given.index, *(chosen for _, chosen in given.pick))]
        for m in specs
    ]
    keys: list[list[int | None]] = [[] for _ in specs]
    for families in zip(*arrows, strict=True):
        fixed = len(_slice_offsets(families, steps)) > 1 and len({f.slice for f in families}) == 1
        for key, family, step in zip(keys, families, steps, strict=True):
            key.append(family.slice if fixed else (family.slice or 0) - step)
    parts: dict[object, list[NodeSpec]] = {}
    for key, member in zip(keys, specs, strict=True):
        parts.setdefault(tuple(key), []).append(member)
    return list(parts.values())


def _slice_offsets(groups: Sequence[NodeGroup], steps: Sequence[int]) -> set[int]:
    """How far these families are from the slices of the group."""
    return {(family.slice or 0) - step for family, step in zip(groups, steps, strict=True)}


def _is_in_slices(network: Network, group: NodeGroup) -> bool:
    return group.step is not None and 0 <= group.step < network.graph.slices[group.stack]


def render_equation(shared: SharedEquation, form: str) -> tuple[Equation, list[str]]:
    """One row, and what must be said below the equations; word by word where the form has no words for it."""
    member = shared.representative
    wordless = member.group.word_stack is None and all(
        shared.network.specs[given.index].group.word_stack is None for given in member.parents
    )
    for chosen in dict.fromkeys(["word" if wordless else form, "word"]):
        try:
            symbols = shared.build_symbols(chosen)
            right = member.tpm.latex(symbols)
        except UnsupportedFormError:
            continue
        if not isinstance(right, str):
            raise BNetError(f"{type(member.tpm).__name__}.latex", expected="LaTeX, a string", actual=right)
        return _build_equation(shared, chosen, shared.format_lhs(symbols), right), list(symbols.definitions)
    expected = "an equation, at least in the form 'word'"
    raise BNetError(f"{type(member.tpm).__name__}.latex", expected=expected, actual="none (Untold)")


def _build_equation(shared: SharedEquation, form: str, left: str, right: str) -> Equation:
    member = shared.representative
    family = member.group
    steps = {"t": "t", "t+1": "(t+1)"}
    index = shared.slice_label([m.group for m in shared.specs])
    name = family.stem if index is None else f"{family.stem}_{steps.get(index, index)}"
    what = [type(member.tpm).__name__, member.tpm.kind, *(["learnable"] if member.learnable else [])]
    over = [*(["slice"] if shared.slices else []), *family.plates, *(["word"] if family.word_stack is not None else [])]
    note = ", ".join(what) + (f"; for each {', '.join(over)}" if over else "")
    note += "; one draw for the whole corpus" if member.scope == "corpus" else ""
    return Equation(name, left, right, member.tpm.kind, form, shared.slices if shared.is_partial else (), note)


def _is_discrete(spec: NodeSpec) -> bool:
    return (spec.tpm.kind == "discrete" or spec.tpm.states is not None) and spec.tpm.is_index_valued
