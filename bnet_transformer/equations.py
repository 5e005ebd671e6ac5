"""The equations of a net in LaTeX: for one word, with words as rows or as columns, or in index notation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TypeVar

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.declare import Network, NodeSpec, ParentSpec, Stack, as_network
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.graph import NodeGroup
from bnet_transformer.tpm.symbols import (
    FEATURE_LETTERS,
    FORMS,
    SlotSymbols,
    Symbol,
    Symbols,
    UnsupportedFormError,
    add_scripts,
    escape_latex,
)

# --------------------------------------------------------------------------------------------------------------------
# The result: rows of equations and the definitions of their letters, to print, compile or display.


T = TypeVar("T")
PAGE_WIDTH = 82.0
PAGE_SETUP = r"""\setlength{\textwidth}{17.5cm}
\setlength{\textheight}{24cm}
\setlength{\oddsidemargin}{-0.8cm}
\setlength{\topmargin}{-1.8cm}
\setlength{\parindent}{0pt}
\allowdisplaybreaks
\pagestyle{empty}
"""
DOCUMENT_HEAD = rf"""\documentclass{{article}}
\usepackage{{amsmath,amssymb}}
{PAGE_SETUP}\begin{{document}}
"""


@dataclass(frozen=True)
class Equation:
    """One row: the equation `left = right` of one template of nodes.

    Attributes:
        name: The name of the row, such as `x_(t+1)`.
        left: The left-hand side in LaTeX.
        right: The right-hand side in LaTeX.
        kind: The kind of the TPM: input, deterministic, discrete or continuous.
        form: The form of the equation; it is `"word"` if the requested form cannot express the equation.
        slices: The slices for which the equation is valid; empty for all.
        note: A description of the TPM in words.
    """

    name: str
    left: str
    right: str
    kind: str
    form: str
    slices: tuple[int, ...] = ()
    note: str = ""

    @property
    def latex(self) -> str:
        """The equation as one formula."""
        return f"{self.left} = {self.right}{self.condition}"

    @property
    def condition(self) -> str:
        """The slices for which the equation is valid, in LaTeX; empty for all."""
        if not self.slices:
            return ""
        return rf" \qquad (t = {', '.join(map(str, self.slices))})"

    def __str__(self) -> str:
        return self.latex

    def _repr_latex_(self) -> str:
        """The LaTeX that a notebook displays."""
        return f"$$\n{self.latex}\n$$"


@dataclass(frozen=True)
class Equations:
    r"""The structural equations of a net, one row for each template of nodes, and the definitions of their letters.

    `str()` and `.latex` return an `align*` environment for a paper (amsmath, amssymb); `.document()` returns a complete
    document. Iteration gives the rows. Rows are also found by name, as in a dictionary: `net.equations()["x_(t+1)"]`,
    `get`, `keys`, `values` and `items`; `in` accepts a name or a row.

    Attributes:
        form: The requested form: `"word"`, `"row"`, `"column"` or `"einstein"`.
        rows: The equations.
        where: The definitions of the letters, in LaTeX.
    """

    form: str
    rows: tuple[Equation, ...]
    where: tuple[str, ...]

    @property
    def latex(self) -> str:
        r"""The equations as one `align*` environment."""
        return f"\\begin{{align*}}\n{self._body()}\n\\end{{align*}}"

    def document(self) -> str:
        """A complete LaTeX document, for pdflatex."""
        return f"{DOCUMENT_HEAD}{self.latex}\n\\end{{document}}\n"

    def __str__(self) -> str:
        return self.latex

    def __iter__(self) -> Iterator[Equation]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, item: object) -> bool:
        return item in self.keys() or item in self.rows

    def keys(self) -> tuple[str, ...]:
        """The names of the rows, so that `dict(equations)` is a dictionary of the rows by name."""
        return tuple(row.name for row in self.rows)

    def values(self) -> tuple[Equation, ...]:
        """The equations, as in `rows`."""
        return self.rows

    def items(self) -> tuple[tuple[str, Equation], ...]:
        """Pairs of the name of a row and its equation, as those of a dictionary.

        >>> import bnet_transformer as bt
        >>> names = [name for name, equation in bt.bayesuvius(dim=4).equations().items()]
        >>> names[-1]
        'x_(t+1)'
        """
        return tuple(zip(self.keys(), self.values(), strict=True))

    def __getitem__(self, name: str) -> Equation:
        """The row of a template of nodes.

        Args:
            name: The name of the row, such as `"x_(t+1)"`.

        Returns:
            The equation.

        Raises:
            UnknownNameError: There is no row with this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name_error("equation", name, self.keys())

    def get(self, name: str, default: T | None = None) -> Equation | T | None:
        """The row of a template of nodes, or another value if there is none.

        Args:
            name: The name of the row, such as `"x_(t+1)"`.
            default: The value that is returned if there is no row with this name; None by default.

        Returns:
            The equation, or `default`.

        >>> import bnet_transformer as bt
        >>> equations = bt.bayesuvius(dim=4).equations()
        >>> equations.get("x_(t+1)").name, equations.get("z"), "z" in equations
        ('x_(t+1)', None, False)
        """
        return self[name] if name in self.keys() else default

    def _repr_latex_(self) -> str:
        """The LaTeX that a notebook displays."""
        return f"$$\n\\begin{{aligned}}\n{self._body()}\n\\end{{aligned}}\n$$"

    def _body(self) -> str:
        """The rows of the equations and of the definitions."""
        lines = align_equations([(row.left, row.right + row.condition) for row in self.rows])
        statements = pack_statements(self.where)
        lines += [(r"\text{where} & \quad " if k == 0 else r"& \quad ") + line for k, line in enumerate(statements)]
        return " \\\\\n".join(lines)


# layout of equations on a page

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\s]")
_WIDTH_TABLE = {  # the widths of commands that are neither letters nor relations
    0.0: r"\right \mathbb \mathrm \text \bar \hat \overline \widehat",
    0.1: r"\mathbf",
    0.3: r"\, \mathcal \operatorname",
    0.4: r"\left \Big",
    0.5: r"\; \ ",
    1.2: r"\sqrt",
    2.0: r"\quad \ldots",
    2.2: r"\sum \prod",
    2.6: r"\exp",
    3.5: r"\tanh",
    4.0: r"\qquad",
}
_TOKEN_WIDTHS = {token: width for width, tokens in _WIDTH_TABLE.items() for token in _TOKEN.findall(tokens)}
_RELATIONS = frozenset({"=", "+", "-", "<", r"\mid", r"\in", r"\sim", r"\le", r"\ge", r"\odot", r"\circ", r"\cdot"})
_UPRIGHT = frozenset({r"\mathrm", r"\text", r"\operatorname"})
_NARROW = frozenset("ijl.,:;()[]|'")


def estimate_width(latex: str) -> float:
    """An estimate of the width of a formula, in letters.

    >>> estimate_width("x") < estimate_width("x_i^t") < estimate_width(r"x_i^t + x_j^t") < 8
    True
    """
    return _measure(iter(_TOKEN.findall(latex)))


def _measure(tokens: Iterator[str], closing: str | None = None) -> float:
    """The width of tokens up to a closing token."""
    total = 0.0
    scripts: dict[str, float] = {}
    for token in tokens:
        if token == closing:
            break
        if token in "_^":
            scripts[token] = 0.62 * _measure_argument(tokens)
            continue
        total += max(scripts.values(), default=0.0)
        scripts = {}
        total += _measure_token(token, tokens)
    return total + max(scripts.values(), default=0.0)


def _measure_token(token: str, tokens: Iterator[str]) -> float:
    """The width of one token, with its arguments."""
    if token == "{":
        return _measure(tokens, "}")
    if token == r"\frac":
        return max(_measure_argument(tokens), _measure_argument(tokens)) + 0.5
    if token == r"\underbrace":
        body = _measure_argument(tokens)
        next(tokens, "")
        return max(body, 0.62 * _measure_argument(tokens))
    if token == r"\begin":  # the environment `cases`
        _measure_argument(tokens)
        rows = " ".join(takewhile(lambda token: token != r"\end", tokens)).split(r"\\")
        _measure_argument(tokens)
        return 3.0 + max(map(estimate_width, rows))
    if token in _RELATIONS:
        return 2.2
    if token in _UPRIGHT:
        return _TOKEN_WIDTHS[token] + 0.88 * _measure_argument(tokens)
    if token in _NARROW:
        return 0.9 if token in ",;" else 0.6
    return _TOKEN_WIDTHS.get(token, 1.35 if token.isupper() else 1.1)


def _measure_argument(tokens: Iterator[str]) -> float:
    """The width of the next argument."""
    return _measure_token(next(tokens, ""), tokens)


def align_equations(pairs: Sequence[tuple[str, str]], page_width: float = PAGE_WIDTH) -> list[str]:
    """The lines of an `align` environment, from left and right sides; too wide pairs are broken between the sides."""
    lefts, rights = [estimate_width(left) for left, _ in pairs], [estimate_width(right) + 2.2 for _, right in pairs]
    options = []
    for column in sorted({*lefts, 0.0}, reverse=True):
        broken = frozenset(k for k, left in enumerate(lefts) if left > column or column + rights[k] > page_width)
        reach = [column + (max(lefts[k], rights[k] + 2) if k in broken else rights[k]) for k in range(len(pairs))]
        options.append((max(0.0, max(reach, default=0.0) - page_width), len(broken), broken))
    *_, cut = min(options, key=lambda option: option[:2])
    lines = []
    for k, (left, right) in enumerate(pairs):
        lines += [rf"& {left}", rf"& \quad = {right}"] if k in cut else [f"{left} &= {right}"]
    return lines


def pack_statements(statements: Sequence[str], column_width: float = PAGE_WIDTH / 2) -> list[str]:
    """Put short statements next to each other, and long statements on separate lines."""
    lines: list[str] = []
    for statement in statements:
        longer = rf"{lines[-1]}, \qquad {statement}" if lines else ""
        if longer and estimate_width(longer) <= column_width:
            lines[-1] = longer
        else:
            lines.append(statement)
    return lines


# --------------------------------------------------------------------------------------------------------------------
# Notation: distinct letters for roles, plates, stacks, sets of words and masks.
#
# A role with a one-letter part uses that letter, with the other parts as subscripts (`W_q` is `W_q`, `cross_q` is
# `q_{\mathrm{cross}}`); any other role is upright (`\mathrm{norm1}`). The matrix of all words has the capital letter.
# It is bold if the capital letter has another meaning, and another letter if a different role uses it.
# `describe_notation` writes the definitions below the equations: the ranges of indices, and the layout of words in
# matrices.


Letter = tuple[str, tuple[str, ...]]

RESERVED_LETTERS = frozenset("imntTP")
TAKEN_CAPITALS = frozenset("EIMPRT")
SPARE_CAPITALS = "ZHGQ"
GREEK = ["alpha", "beta", "zeta", "eta", "kappa", "lambda", "mu", "nu", "rho", "tau", "phi", "chi", "psi", "omega"]


@dataclass(frozen=True)
class Notation:
    """The letters of the equations of one net."""

    network: Network

    @cached_property
    def role_letters(self) -> dict[str, Letter]:
        """The letter and the subscripts of each role, for one word or a value without words; all are distinct."""
        roles = list(dict.fromkeys(group.role for group in self.network.graph.groups))
        names = {role: _parse_role(role) for role in roles}
        count = Counter(names.values())
        return {role: (format_upright(role), ()) if count[name] > 1 else name for role, name in names.items()}

    @cached_property
    def matrix_letters(self) -> dict[str, Letter]:
        """The letter and the subscripts of the matrix of all words of each role."""
        taken = set(self.role_letters.values())
        letters = {base.upper() for base, _ in taken}
        spare = [letter for letter in SPARE_CAPITALS if letter not in letters]
        capitals = dict(self.role_letters)
        for role, (base, sub) in self.role_letters.items():
            if len(base) == 1 and base.islower():
                capital, clashes = base.upper(), (base.upper(), sub) in taken
                if clashes and spare:
                    capital = spare.pop(0)
                elif clashes or capital in TAKEN_CAPITALS:
                    capital = rf"\mathbf{{{capital}}}"
                capitals[role] = (capital, sub)
        return capitals

    @cached_property
    def plate_indices(self) -> dict[str, str]:
        """The index of each plate: h for heads, Greek letters for the others."""
        other_plates = [plate for plate in self.network.graph.plate_sizes if plate != "head"]
        greek = [rf"\{name}" for name in GREEK] + [rf"\omega_{{{k}}}" for k in range(1, len(other_plates))]
        return {"head": "h", **dict(zip(other_plates, greek, strict=False))}

    def stack_superscript(self, name: str) -> tuple[str, ...]:
        """The superscript of a stack; empty for a stack without a name."""
        return (format_upright(name),) if name else ()

    def word_set(self, stack: str) -> str:
        """The symbol of the set of words of a stack."""
        return add_scripts(r"\mathcal{S}", self.stack_superscript(stack))

    def word_count(self, stack: str) -> str:
        """The symbol of the number of words of a stack."""
        return add_scripts("n", self.stack_superscript(stack))

    def slice_count(self, stack: str) -> str:
        """The symbol of the number of slices of a stack."""
        return add_scripts("T", self.stack_superscript(stack))

    @cached_property
    def mask_tables(self) -> dict[Reach, int]:
        """The masks that are tables, with their numbers."""
        reaches = [parent.reach for spec in self.network.specs for parent in spec.parents]
        return {reach: k for k, reach in enumerate(dict.fromkeys(r for r in reaches if r.kind == "mask"))}

    def mask_set(self, reach: Reach) -> str:
        """The symbol of the set of words that word i reads by a table."""
        return self._add_number(reach, r"\mathcal{M}", ("i",))

    def mask_superscript(self, reach: Reach) -> tuple[str, ...]:
        """The superscript of the mask of a reach; empty if every word has an arrow."""
        match reach.kind:
            case "every":
                return ()
            case "window" | "recent":
                return (rf"\mathrm{{{reach.kind}}}\,{reach.width}",)
            case "mask":
                return (self._add_number(reach, r"\mathrm{mask}", ()),)
            case kind:
                return (rf"\mathrm{{{kind}}}",)

    def _add_number(self, reach: Reach, base: str, sub: tuple[str, ...]) -> str:
        """The letter of a mask, with a number if there are several."""
        number = (f"({self.mask_tables[reach] + 1})",) if len(self.mask_tables) > 1 else ()
        return add_scripts(base, sub, number)


def format_upright(name: str) -> str:
    """A name of several letters as upright LaTeX."""
    return rf"\mathrm{{{escape_latex(name)}}}"


def _parse_role(role: str) -> Letter:
    """The letter and the subscripts of a role."""
    parts = [part for part in role.split("_") if part]
    letter = next((k for k, part in enumerate(parts) if len(part) == 1), None)
    if letter is None or (len(parts) == 1 and role in RESERVED_LETTERS):
        return format_upright(role), ()
    subscripts = parts[:letter] + parts[letter + 1 :]
    return parts[letter], tuple(part if len(part) == 1 else format_upright(part) for part in subscripts)


def describe_notation(network: Network, notation: Notation, form: str) -> list[str]:
    """The definitions of the letters of a net, in LaTeX."""
    lines = [_describe_stack(network, notation, stack) for stack in network.declaration.stacks]
    used = [plate for plate in network.graph.plate_sizes if any(plate in f.plates for f in network.graph.groups)]
    for plate in used:
        last = network.graph.plate_sizes[plate] - 1
        values = rf"0, \ldots, {last}" if last > 1 else "0, 1" if last else "0"
        lines.append(rf"{notation.plate_indices[plate]} \in \{{{values}\}} \quad \text{{({escape_latex(plate)})}}")
    lines += [line for reach in notation.mask_tables for line in _describe_mask(notation, reach)]
    return (
        lines
        + _describe_initial_values(network, notation)
        + _describe_first_words(network, notation)
        + _describe_matrices(network, notation, form)
    )


def _describe_stack(network: Network, notation: Notation, stack: Stack) -> str:
    """The ranges of the slices and the words of a stack."""
    depth, words, count = (
        notation.slice_count(stack.name),
        notation.word_set(stack.name),
        notation.word_count(stack.name),
    )
    slices = "t = 0" if stack.slices == 1 else rf"t = 0, \ldots, {depth}-1"
    line = rf"{slices}, \quad {depth} = {stack.slices}"
    if any(group.word_stack == stack.name for group in network.graph.groups):
        index = "" if stack.name else r"i, j \in "
        line += rf", \qquad {index}{words} = \{{0, \ldots, {count}-1\}}"
    return rf"\text{{in }} {notation.stack_superscript(stack.name)[0]}: \; {line}" if stack.name else line


def _describe_mask(notation: Notation, reach: Reach) -> list[str]:
    """The words that a mask allows: all of them for small masks."""
    name = notation.mask_set(reach)
    if len(reach.table) > 6:
        size = rf"{len(reach.table)} \times {len(reach.table[0])}"
        return [rf"{name} \text{{ holds the words that row }} i \text{{ of the mask }} ({size}) \text{{ marks}}"]
    rows = [
        rf"{name.replace('_i', f'_{i}')} = \{{{', '.join(str(j) for j, cell in enumerate(row) if cell)}\}}"
        for i, row in enumerate(reach.table)
    ]
    return [r", \quad ".join(rows)]


def _describe_matrices(network: Network, notation: Notation, form: str) -> list[str]:
    """The layout of words in a matrix, for the first role and for roles with another letter."""
    vector_roles = [m.group.role for m in network.specs if m.group.word_stack is not None and len(m.shape) == 1]
    if form == "word" or not vector_roles:
        return []
    letters = {role: (notation.role_letters[role][0], notation.matrix_letters[role][0]) for role in vector_roles}
    renamed = [role for role, (x, X) in letters.items() if len(X) == 1 and X not in (x, x.upper())]
    roles = dict.fromkeys([vector_roles[0], *renamed])
    vectors = [Symbol(*notation.role_letters[role], word="i") for role in roles]
    matrices = [Symbol(*notation.matrix_letters[role], word="i", form=form, is_full_matrix=False) for role in roles]
    pairs = list(zip(matrices, vectors, strict=True))
    match form:
        case "row":
            return [r"\text{words are rows: } " + r", \quad ".join(f"{X} = {x.T}" for X, x in pairs)]
        case "column":
            return [r"\text{words are columns: } " + r", \quad ".join(f"{X} = {x}" for X, x in pairs)]
        case _:
            entry = rf"{matrices[0]['a']} \text{{ is feature }} a \text{{ of word }} i"
            descriptions = [rf"{X['a']} \text{{ that of }} {x}" for X, x in pairs[1:]]
            return [
                r", \quad ".join([entry, *descriptions]),
                r"\text{indices that are repeated, and not on the left, are summed over}",
            ]


def _describe_first_words(network: Network, notation: Notation) -> list[str]:
    """The parents that a first word does not read (reach `rest`)."""
    read = {(m.group.role, parent.index) for m in network.specs for parent in m.parents if parent.reach.kind == "rest"}
    pairs = dict.fromkeys((role, network.graph.groups[k].role) for role, k in sorted(read))
    symbols = [
        (Symbol(*notation.role_letters[child], word="0"), Symbol(*notation.role_letters[parent], word="0"))
        for child, parent in pairs
    ]
    return [rf"{child} \text{{ does not read }} {parent}" for child, parent in symbols]


def _describe_initial_values(network: Network, notation: Notation) -> list[str]:
    """The value of the word before the first word, and after the last word, for roles in which it is read."""
    read = {
        (parent.index, {"before": "-1", "after": "n"}[parent.reach.kind])
        for m in network.specs
        for parent, described in zip(m.parents, m.tpm_parents, strict=True)
        if parent.reach.kind in ("before", "after") and not ("initial" in m.parameters and described.states is not None)
    }
    roles = dict.fromkeys((network.graph.groups[k].role, word) for k, word in sorted(read))
    return [f"{Symbol(*notation.role_letters[role], word=word)} = 0" for role, word in roles]


# --------------------------------------------------------------------------------------------------------------------
# Build the rows of the equations of a net; slices with equal equations share one row.
#
# The equations of the slices of a template differ only in the number t, unless an arrow comes from different relative
# slices. Slices that share an equation are translated to `Symbols`, with which their TPM writes the equation.


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
            (add_scripts(*self.notation.role_letters[group.role]),),
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
        base, sub = (self.notation.matrix_letters if matrix else self.notation.role_letters)[group.role]
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
