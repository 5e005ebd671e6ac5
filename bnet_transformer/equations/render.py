"""Build the rows of the equations of a net; slices with equal equations share one row.

The equations of the slices of a template differ only in the number t, unless an arrow comes from different relative
slices. Slices that share an equation are translated to `Symbols`, with which their TPM writes the equation.
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

READ_INDICES = {"same": "i", "rest": "i", "before": "i-1", "after": "i+1", "first": "0"}


def equations(network: Network, form: str = "word") -> Equations:
    r"""The structural equations of a net in LaTeX.

    Args:
        network: The net.
        form: The notation: `"word"` for vectors of one word with indices, `"row"` or `"column"` for matrices with a row
            or a column for each word, `"einstein"` for sums over repeated indices.

    Returns:
        The equations; a notebook typesets them.

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
    rendered = [render_equation(shared, form) for shared in share_equations(network, letters)]
    rows = tuple(row for row, _ in rendered)
    definitions = [line for _, lines in rendered for line in lines]
    return Equations(form, rows, tuple(dict.fromkeys([*describe_notation(network, letters, form), *definitions])))


@dataclass(frozen=True)
class SharedEquation:
    """The specs, one for each slice, that share an equation; `is_partial` if the template has further slices."""

    network: Network
    notation: Notation
    specs: tuple[NodeSpec, ...]
    is_partial: bool = False

    @property
    def representative(self) -> NodeSpec:
        """The first spec; all specs have corresponding parents and equal shapes."""
        return self.specs[0]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices of the equation; empty for a node of the prologue, the epilogue or outside the stacks."""
        return tuple(m.group.step or 0 for m in self.specs if _is_in_slices(self.network, m.group))

    def slice_label(self, groups: Sequence[NodeGroup]) -> str | None:
        """The superscript for the slice of these groups, one for each slice of the equation.

        It is t for nodes of the slice, t+1 for the output state of the slice, and 0 for the input state of the stack.
        """
        group, steps = groups[0], self.slices
        if group.slice is None:
            return None
        if steps and (len(_slice_offsets(groups, steps)) == 1 or len({f.slice for f in groups}) > 1):
            offset = group.slice - steps[0]
            is_adjacent = group.stack == self.representative.group.stack and offset in (0, 1)
            if len(steps) > 1 or is_adjacent:
                return f"t{offset:+d}" if offset else "t"
        depth, last = self.network.graph.slices[group.stack], self.notation.slice_count(group.stack)
        if group.slice == depth:
            return last
        if group.slice == depth - 1 and group.slice and not self.network.is_state(group):
            return f"{last}-1"
        return str(group.slice)

    def build_symbols(self, form: str) -> Symbols:
        """The symbols of the equation in one form."""
        group, tpm, shape = self.representative.group, self.representative.tpm, self.representative.shape
        is_matrix = form in ("row", "column")
        # One matrix equation is valid for all words if each word depends on the same parents in the same way.
        is_per_word = any(map(self._is_per_word, self.representative.parents))
        is_full_matrix = is_matrix and group.word_stack is not None and not is_per_word
        discrete = tpm.kind == "discrete"
        if is_matrix and not discrete and len(shape) != 1:
            raise UnsupportedFormError
        sup = self._superscripts([m.group for m in self.specs])
        word = None if group.word_stack is None else "i"
        node = self._build_symbol(group, sup, word, form, is_full_matrix, capital=not discrete)
        return Symbols(
            form,
            replace(node, is_value=True),
            tuple(self._build_slot(idx, form, is_full_matrix) for idx in range(len(self.representative.parents))),
            str(self._build_symbol(group, sup, word)) if tpm.is_index_valued or not discrete else "m",
            "" if group.word_stack is None else self.notation.word_set(group.word_stack),
            is_full_matrix,
            tpm.kind,
            len(shape),
            (add_scripts(*self.notation.role_letter(group.role)),),
            sup
            if self.representative.param_prefix == group.name
            else (*self.notation.stack_superscript(group.stack), *self._plate_letters(group)),
        )

    def format_lhs(self, symbols: Symbols) -> str:
        """`P(node | parents)`."""
        tpm, node = self.representative.tpm, symbols.node
        if tpm.kind == "discrete" and not tpm.is_index_valued:
            shown = rf"{node.plain} = \text{{atom }} {symbols.state}"
        elif tpm.kind == "discrete" and not symbols.is_full_matrix:
            shown = symbols.state
        else:
            letters = FEATURE_LETTERS[: len(self.representative.shape)]
            shown = str(node[letters]) if symbols.form == "einstein" else node.plain
        conditions = [slot.lhs for slot in symbols.slots]
        for idx in range(len(symbols.slots)):
            conditions += self._selector_symbols(idx).values()
        bar = rf" \mid {', '.join(dict.fromkeys(conditions))}" if conditions else ""
        return f"P({shown}{bar})"

    def _is_per_word(self, parent: ParentSpec) -> bool:
        """True if word i reads a value that is specific to word i, or if a choice of word i picks the value."""
        specs = self.network.specs
        parent_spec = specs[parent.index]
        is_picked = any(axis == WORD or specs[k].group.word_stack is not None for axis, k in parent.pick)
        is_shifted = parent.reach.kind in ("before", "after", "rest", "first", "last") or _is_discrete(parent_spec)
        return is_picked or (parent_spec.group.word_stack is not None and is_shifted)

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
        """The symbol of the value of a group, with superscripts and subscripts."""
        matrix = capital and form != "word" and group.word_stack is not None
        base, sub = (self.notation.matrix_letter if matrix else self.notation.role_letter)(group.role)
        return Symbol(base, sub, sup, word, form, is_full_matrix)

    def _plate_letters(self, group: NodeGroup) -> list[str]:
        """The indices of the plates of a group."""
        return [self.notation.plate_indices[plate] for plate in group.plates]

    def _superscripts(self, groups: Sequence[NodeGroup], plates: Sequence[str] | None = None) -> tuple[str, ...]:
        """The superscripts of the first of some groups, one for each slice of the equation: stack, slice, plates."""
        slice_, group = self.slice_label(groups), groups[0]
        plate_letters = self._plate_letters(group) if plates is None else plates
        return (*self.notation.stack_superscript(group.stack), *([] if slice_ is None else [slice_]), *plate_letters)

    def _selector_symbols(self, idx: int) -> dict[str, str]:
        """The selector of a parent along each axis."""
        graph, symbols = self.network.graph, {}
        for number, (axis, _) in enumerate(self.representative.parents[idx].pick):
            groups = [graph.groups[m.parents[idx].pick[number][1]] for m in self.specs]
            word = None if groups[0].word_stack is None else "i"
            symbols[axis] = str(self._build_symbol(groups[0], self._superscripts(groups), word))
        return symbols

    def _build_slot(self, idx: int, form: str, is_full_matrix: bool) -> SlotSymbols:
        """The symbols of one slot: its parent, the words of the collection, and their number."""
        parent, network = self.representative.parents[idx], self.network
        spec = network.specs[parent.index]
        group, discrete = spec.group, _is_discrete(spec)
        groups = [network.graph.groups[m.parents[idx].index] for m in self.specs]
        picked = self._selector_symbols(idx)
        letters = {plate: self.notation.plate_indices[plate] for plate in group.plates}
        inside = [picked.get(plate, letter) for plate, letter in letters.items()]
        all_plates = ["." if plate in parent.over else picked.get(plate, letter) for plate, letter in letters.items()]
        lhs_plates = ["." if plate in parent.over or plate in picked else letter for plate, letter in letters.items()]

        shown, condition, count = self._describe_reach(parent.reach, group)
        read = None if group.word_stack is None else shown if parent.reach.is_single else "j"
        word = picked.get(WORD, read)
        is_matrix = word == "j" or (is_full_matrix and word == "i")
        form = "word" if discrete else form
        sup = self._superscripts(groups, inside)
        is_full = is_matrix if group.word_stack is not None else is_full_matrix
        form_symbol = self._build_symbol(group, sup, word, form, is_full)
        lhs_sup = self._superscripts(groups, lhs_plates)
        if group.word_stack is None or form == "word":
            lhs = str(self._build_symbol(group, lhs_sup, shown if read == "j" or WORD in parent.over else read))
        else:
            is_matrix = is_matrix or read == "j" or form == "einstein"
            lhs = self._build_symbol(group, lhs_sup, read, form, is_matrix).plain
        collection_word = word if word is None or (WORD not in parent.over and word != "j") else shown
        sizes = [str(network.graph.plate_sizes[axis]) for axis in parent.over if axis != WORD]
        return SlotSymbols(
            parent.slot,
            self._build_symbol(group, sup, word),
            form_symbol,
            lhs,
            str(self._build_symbol(group, self._superscripts(groups, all_plates), collection_word)),
            spec.shape,
            discrete,
            tuple("j" if axis == WORD else self.notation.plate_indices[axis] for axis in parent.over),
            condition,
            r" \cdot ".join([*sizes, count] if WORD in parent.over else sizes),
            self.notation.mask_superscript(parent.reach) if WORD in parent.over else (),
            self.representative.tpm_parents[idx].is_optional,
        )

    def _describe_reach(self, reach: Reach, group: NodeGroup) -> tuple[str, str, str]:
        """The words of the collection: a subscript (`k_.` for all), a condition on j, and the number of words."""
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
    """All templates with their slices, in the order of the graph; slices that share an equation are joined."""
    templates: dict[tuple[str, str, object], list[NodeSpec]] = {}
    for spec in network.specs:
        group = spec.group
        block = "slice" if _is_in_slices(network, group) else group.step
        templates.setdefault((group.stack, group.role, block), []).append(spec)
    shared = []
    for specs in templates.values():
        parts = _split_slices(network, sorted(specs, key=lambda spec: spec.group.step or 0))
        shared += [SharedEquation(network, notation, tuple(part), len(parts) > 1) for part in parts]
    return shared


def _split_slices(network: Network, specs: Sequence[NodeSpec]) -> list[list[NodeSpec]]:
    """The slices of a template, grouped by arrows: an arrow comes from a fixed slice, or from a fixed distance."""
    steps = [spec.group.step or 0 for spec in specs]
    arrows = [
        [network.graph.groups[k] for parent in m.parents for k in (parent.index, *dict(parent.pick).values())]
        for m in specs
    ]
    keys: list[list[int | None]] = [[] for _ in specs]
    for groups in zip(*arrows, strict=True):
        fixed = len(_slice_offsets(groups, steps)) > 1 and len({f.slice for f in groups}) == 1
        for key, group, step in zip(keys, groups, steps, strict=True):
            key.append(group.slice if fixed else (group.slice or 0) - step)
    parts: dict[object, list[NodeSpec]] = {}
    for key, spec in zip(keys, specs, strict=True):
        parts.setdefault(tuple(key), []).append(spec)
    return list(parts.values())


def _slice_offsets(groups: Sequence[NodeGroup], steps: Sequence[int]) -> set[int]:
    """The distances of these groups from the slices of the equation."""
    return {(group.slice or 0) - step for group, step in zip(groups, steps, strict=True)}


def _is_in_slices(network: Network, group: NodeGroup) -> bool:
    """True for a group that belongs to the slices of a stack."""
    return group.step is not None and 0 <= group.step < network.graph.slices[group.stack]


def render_equation(shared: SharedEquation, form: str) -> tuple[Equation, list[str]]:
    """One row and the definitions that it requires; the form is "word" if the requested form cannot express it."""
    spec = shared.representative
    wordless = spec.group.word_stack is None and all(
        shared.network.specs[parent.index].group.word_stack is None for parent in spec.parents
    )
    for candidate in dict.fromkeys(["word" if wordless else form, "word"]):
        try:
            symbols = shared.build_symbols(candidate)
            right = spec.tpm.latex(symbols)
        except UnsupportedFormError:
            continue
        if not isinstance(right, str):
            raise BNetError(f"{type(spec.tpm).__name__}.latex", expected="LaTeX, a string", actual=right)
        return _build_equation(shared, candidate, shared.format_lhs(symbols), right), list(symbols.definitions)
    raise BNetError(f"{type(spec.tpm).__name__}.latex supports no form", hint="It has to support the form 'word'")


def _build_equation(shared: SharedEquation, form: str, left: str, right: str) -> Equation:
    """The row of an equation, with its name and its note."""
    spec = shared.representative
    group = spec.group
    steps = {"t": "t", "t+1": "(t+1)"}
    index = shared.slice_label([m.group for m in shared.specs])
    name = group.stem if index is None else f"{group.stem}_{steps.get(index, index)}"
    kinds = [type(spec.tpm).__name__, spec.tpm.kind, *(["learnable"] if spec.learnable else [])]
    axes = [*(["slice"] if shared.slices else []), *group.plates, *(["word"] if group.word_stack is not None else [])]
    note = ", ".join(kinds) + (f"; for each {', '.join(axes)}" if axes else "")
    note += "; one draw for the whole corpus" if spec.scope == "corpus" else ""
    return Equation(name, left, right, spec.tpm.kind, form, shared.slices if shared.is_partial else (), note)


def _is_discrete(spec: NodeSpec) -> bool:
    """True for a group whose value is a state."""
    return (spec.tpm.kind == "discrete" or spec.tpm.states is not None) and spec.tpm.is_index_valued
