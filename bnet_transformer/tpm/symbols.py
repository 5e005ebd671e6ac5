r"""The symbols with which a TPM writes its LaTeX equation in the four forms: word, row, column and einstein.

`TPM.latex(s)` returns the right-hand side of `P(node | parents) = ...`. It can use:

- `s["x"]`, the value in slot `x` *for one word*: `x_i^t`. An equation with such symbols is written for one word in
  every form, because `s["x"]` raises `UnsupportedFormError` in the others. This is enough for your own TPM:

      def latex(self, s: Symbols) -> str:
          return s.equals(rf"\sigma({s['g']}) \odot {s['x']}")

- `s.of("x")`, the same value in the requested form: `x_i^t`, a matrix `X^t` with words as rows (or columns), or
  `X_{ia}^t` with its indices. `s.map(W, x)`, `s.plus(b)` and `s.equals(...)` write `W x`, `+ b` and the indicator
  in all forms, so most TPMs need one line. `s.form` is the requested form.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bnet_transformer.errors import unknown_name_error

FORMS = ("word", "row", "column", "einstein")
FEATURE_LETTERS = "abdefg"


class UnsupportedFormError(Exception):
    """The form cannot express an equation. The caller then writes the equation for one word."""


@dataclass(frozen=True)
class Symbol:
    r"""The LaTeX symbol of one quantity.

    Args:
        base: The letter.
        sub: The subscripts.
        sup: The superscripts.
        word: The index of the word of the value; None for a value without words.
        form: `"word"`, `"row"`, `"column"` or `"einstein"`.
        is_full_matrix: Whether one matrix equation holds for all words.
        is_value: Whether the symbol is a value, which the matrix forms repeat for every word.
        indices: The letters of the feature indices in the form `"einstein"`; None for none.

    >>> x = Symbol("x", sup=("t",), word="i")
    >>> str(x), x.T
    ('x_i^t', '(x_i^t)^\\top')
    >>> str(replace(x, base="X", form="row")), str(replace(x, base="X", form="einstein")["a"])
    ('X^t', 'X_{ia}^t')
    """

    base: str
    sub: tuple[str, ...] = ()
    sup: tuple[str, ...] = ()
    word: str | None = None
    form: str = "word"
    is_full_matrix: bool = True
    is_value: bool = False
    indices: str | None = None

    def __str__(self) -> str:
        if self.form == "einstein":
            return self.plain if self.indices is None else self.entry(*self.indices)
        if self.is_value and self.word is None and self.form == "row":
            return rf"\mathbf{{1}} {self._transposed}" if self.is_full_matrix else self._transposed
        if self.is_value and self.word is None and self.form == "column" and self.is_full_matrix:
            return rf"{self.plain} \mathbf{{1}}^\top"
        return self.plain

    @property
    def plain(self) -> str:
        """The symbol without transpose and repetition, as on the left-hand side."""
        if self.word is None or self.form == "einstein" or (self.form != "word" and self.is_full_matrix):
            return add_scripts(self.base, self.sub, self.sup)
        return add_scripts(self.base, (*self.sub, self.word), self.sup) if self.form == "word" else self.entry(":")

    @property
    def T(self) -> str:
        """The transpose."""
        if self.is_value and self.word is None and self.form in ("row", "column"):
            if not self.is_full_matrix:
                return self.plain if self.form == "row" else self._transposed
            one = r"\mathbf{1}"
            return rf"{self.plain} {one}^\top" if self.form == "row" else rf"{one} {self._transposed}"
        return self._transposed

    @property
    def _transposed(self) -> str:
        """The transpose of the plain symbol."""
        return rf"({self.plain})^\top" if "^" in self.plain else rf"{self.plain}^\top"

    def __getitem__(self, letters: str) -> Symbol:
        """The symbol with feature indices, which only the form `"einstein"` shows."""
        return replace(self, indices=letters)

    def entry(self, *indices: str) -> str:
        """One entry in any form, with the index of the word before or after the feature indices."""
        if self.word is not None and self.form != "word":
            indices = (*indices, self.word) if self.form == "column" else (self.word, *indices)
        if not indices:
            return self.plain
        indices = ("".join(indices),) if all(len(index) == 1 for index in indices) else indices
        if self.sub or (self.word is not None and self.form == "word"):
            return add_scripts(
                f"({self.plain if self.form == 'word' else add_scripts(self.base, self.sub, self.sup)})", indices
            )
        return add_scripts(self.base, indices, self.sup)

    def with_sub(self, *more: str) -> Symbol:
        """The symbol with further subscripts."""
        return replace(self, sub=(*self.sub, *more))

    def with_states(self, *states: str) -> Symbol:
        """The tensor that the states of discrete parents choose for this node."""
        number = ",".join(states)
        return replace(self, sub=(*self.sub, number if self.word is None else f"({number})"), word=None)

    def with_accent(self, accent: str) -> Symbol:
        """The symbol with an accent, `bar` or `hat`."""
        long_accents = {"bar": "overline", "hat": "widehat"}
        return replace(self, base=rf"\{accent if len(self.base) == 1 else long_accents[accent]}{{{self.base}}}")


@dataclass(frozen=True)
class SlotSymbols:
    """The symbols of the parent in one slot of a TPM.

    Args:
        name: The name of the slot.
        word_symbol: The symbol for one word.
        form_symbol: The symbol in the requested form.
        lhs: The name in the condition of `P(node | parents)`.
        collection: The name of a collection.
        shape: The shape of the value.
        is_discrete: Whether the value is an integer state.
        over: The letters of the indices of a collection; empty for a single parent.
        condition: The words of the collection that are read, such as `j \\le i`.
        count: The number of these words.
        mask: The superscript of the mask; empty if all words have an arrow.
        is_optional: Whether a word may have no such parent.
    """

    name: str
    word_symbol: Symbol
    form_symbol: Symbol
    lhs: str
    collection: str
    shape: tuple[int, ...] = ()
    is_discrete: bool = False
    over: tuple[str, ...] = ()
    condition: str = ""
    count: str = ""
    mask: tuple[str, ...] = ()
    is_optional: bool = False


@dataclass(frozen=True)
class Symbols:
    """The symbols of one node template in one form; the docstring of this module shows how a TPM uses them.

    Args:
        form: `"word"`, `"row"`, `"column"` or `"einstein"`.
        node: The symbol of the node.
        slots: The symbols of the parents, in order.
        state: The symbol of the state of a discrete node.
        words: The set of the node's words; empty for a node without words.
        is_full_matrix: Whether one matrix equation holds for all words.
        kind: The kind of the TPM.
        rank: The number of dims of the node's value.
        role: The superscript with the role in the names of parameters.
        plates: The superscripts of the plates.
        definitions: The statements that `define` collects.
        is_primed: Whether the indices of collections have a prime.
    """

    form: str
    node: Symbol
    slots: tuple[SlotSymbols, ...]
    state: str
    words: str = ""
    is_full_matrix: bool = False
    kind: str = "deterministic"
    rank: int = 1
    role: tuple[str, ...] = ()
    plates: tuple[str, ...] = ()
    definitions: list[str] = field(default_factory=list)
    is_primed: bool = False

    # the parents

    def slot(self, name: str | int) -> SlotSymbols:
        """The symbols of the parent in a slot, with its shape and collection."""
        if isinstance(name, int):
            return self.slots[name]
        for filled in self.slots:
            if filled.name == name:
                return filled
        raise unknown_name_error("slot", name, [filled.name for filled in self.slots])

    def __getitem__(self, slot: str | int) -> Symbol:
        """The value in a slot for one word; raises `UnsupportedFormError` in the other forms."""
        self.require_form("word")
        return self._add_primes(self.slot(slot), self.slot(slot).word_symbol)

    def of(self, slot: str | int, letters: str | None = None) -> Symbol:
        """The value in a slot in the requested form; `letters` are its feature indices in the form `"einstein"`."""
        filled = self.slot(slot)
        if self.form != "word" and not filled.is_discrete:
            rank = len(filled.shape)
            if rank > len(FEATURE_LETTERS) or (self.form != "einstein" and rank != 1):
                raise UnsupportedFormError
            filled = replace(
                filled, form_symbol=filled.form_symbol[FEATURE_LETTERS[:rank] if letters is None else letters]
            )
        return self._add_primes(filled, replace(filled.form_symbol, is_value=True))

    def weight(self, slot: str | int, letters: str = "ab") -> Symbol:
        """A matrix in a slot (`W`, `A`) that is the same for every word."""
        filled = self.slot(slot)
        if self.form != "word" and filled.form_symbol.word is not None:
            raise UnsupportedFormError
        return self._add_primes(filled, filled.form_symbol[letters])

    def slot_indices(self) -> list[str | int]:
        """The numbers of the slots, for a TPM with any number of parents."""
        return list(range(len(self.slots)))

    @property
    def i(self) -> str:
        """The index of the node's own word."""
        if self.is_full_matrix and self.form in ("row", "column"):
            raise UnsupportedFormError
        return self.node.word or "0"

    # collections

    def sum(self, slot: str) -> str:
        r"""The sum over a collection: `\sum_{j \le i}`."""
        filled = self.slot(slot)
        prime = "'" if self.is_primed else ""
        letters = [letter + prime for letter in filled.over]
        if filled.condition and "j" in filled.over:  # the condition replaces j, such as `j \in S`
            letters.remove("j" + prime)
            letters.append(filled.condition.replace("j", "j" + prime, 1))
        return rf"\sum_{{{', '.join(letters)}}}"

    def require_over_words(self, *slots: str) -> None:
        """Raise `UnsupportedFormError` in a matrix form unless these collections are over words only."""
        if self.form != "word" and any(self.slot(slot).over != ("j",) for slot in slots):
            raise UnsupportedFormError

    def index_letters(self, slot: str) -> str:
        """The letters of a collection's indices."""
        return "".join(self.slot(slot).over)

    def mask(self, slot: str, letter: str = "M") -> str:
        r"""The mask of a collection in the requested form, such as `M^{\mathrm{causal}}`; empty if no word is masked.

        The mask `M` is 0 if word i attends to word j, else -oo; the mask `B` is 1 or 0.
        """
        filled = self.slot(slot)
        if not filled.mask:
            return ""
        inside, outside = ("0", r"-\infty") if letter == "M" else ("1", "0")
        table = Symbol(letter, sup=filled.mask)
        self.define(rf"{table.entry('i', 'j')} = {inside} \text{{ if }} {filled.condition}, \text{{ else }} {outside}")
        return self.pair_table(table)

    def pair_table(self, table: Symbol) -> str:
        """A table over pairs (word i, word j that it reads) in the requested form."""
        if self.node.word is None:
            raise UnsupportedFormError
        if self.form == "einstein":
            return table.entry("i", "j")
        if self.is_full_matrix:
            return table.plain if self.form == "row" else table.T
        row = table.entry("i", ":")
        return row if self.form == "row" else rf"({row})^\top"

    def with_primes(self) -> Symbols:
        """These symbols with primed indices of collections, for a sum within a sum."""
        return replace(self, is_primed=True)

    def with_read_index(self, index: str) -> Symbols:
        """These symbols with another index for the words of a collection."""
        slots = tuple(
            replace(
                s, word_symbol=_set_read_index(s.word_symbol, index), form_symbol=_set_read_index(s.form_symbol, index)
            )
            if s.over == ("j",)
            else s
            for s in self.slots
        )
        return replace(self, slots=slots)

    # the parameters

    def parameter(self, letter: str, *sub: str, letters: str = "", role: bool = True) -> Symbol:
        r"""A tensor that the TPM owns, with the role of the node as superscript: `W_1^{\mathrm{ffn},t}`."""
        sup = (*self.role, *self.plates) if role else self.plates
        return Symbol(letter, sub, sup, None, self.form, self.is_full_matrix, indices=letters or None)

    # the right-hand side

    def equals(self, value: str | Symbol) -> str:
        r"""The TPM of a deterministic node: `\mathbb{I}(\, v_i^t = W_v^t x_i^t \,)`."""
        return self.indicator(f"{self._node_symbol()} = {value}")

    def indicator(self, statement: str) -> str:
        r"""The indicator of a statement, 1 if it is true and 0 otherwise: `\mathbb{I}(\, statement \,)`."""
        needs_big = any(word in statement for word in (r"\frac", r"\underbrace", r"\sum", r"\begin"))
        left, right = (r"\Big(", r"\Big)") if needs_big else ("(", ")")
        return rf"\mathbb{{I}}{left}\, {statement} \,{right}"

    def delta(self, value: str | Symbol) -> str:
        r"""A delta distribution at a tensor of the net: `\delta(W, W_c)`."""
        return rf"\delta({self._node_symbol()}, {value})"

    def call(self, name: str) -> str:
        """A function of the parents for one word: the default equation of a TPM."""
        self.require_form("word")
        inside = ", ".join(slot.collection for slot in self.slots)
        if self.kind in ("input", "deterministic"):
            return self.equals(f"{format_operator(name)}({inside})")
        return f"{format_operator(name)}({'; '.join(filter(None, (self.state, inside)))})"

    def softmax(self, scores: str, name: str = "", letter: str = "a") -> str:
        """The probability of the state of a discrete node under a softmax of `scores`; `letter` is the index."""
        name = name or add_scripts(r"\operatorname{softmax}", ["a"] if self.form == "einstein" else [])
        inside = rf"\left({scores}\right)"
        if self.form == "einstein":
            return rf"\left[{name}{inside}\right]_{{{letter} = {self.state}}}"
        if not self.is_full_matrix or self.form == "word":
            return add_scripts(f"{name}{inside}", [self.state])
        at = rf"i, {self.state}" if self.form == "row" else rf"{self.state}, i"
        return rf"\prod_{{i \in {self.words}}} {name}{inside}_{{{at}}}"

    def map(self, weight: Symbol, value: str | Symbol, letters: str = "ab") -> str:
        r"""`W x` in the requested form: `W x_i`, `X W^\top`, `W X`, `W_{ab} X_{ib}`."""
        if isinstance(value, Symbol):
            value = str(value[letters[1]])
        space = r" \, " if str(value).startswith("\\") else " "
        return f"{value} {weight.T}" if self.form == "row" else f"{weight[letters]}{space}{value}"

    def plus(self, bias: Symbol, letter: str = "a") -> str:
        r"""`+ b` in the requested form; the same for every word, so `+ \mathbf{1} b^\top` if words are rows."""
        return f" + {replace(bias, is_value=True)[letter]}"

    def define(self, statement: str) -> None:
        """Add a definition below the equations, unless it is already there."""
        if statement not in self.definitions:
            self.definitions.append(statement)

    def require_form(self, *forms: str) -> None:
        """Raise `UnsupportedFormError` unless the form is one of `forms`."""
        if self.form not in forms:
            raise UnsupportedFormError

    def _node_symbol(self) -> str:
        """The symbol of the node with its feature indices."""
        if self.form == "einstein" and self.rank > len(FEATURE_LETTERS):
            raise UnsupportedFormError
        return str(self.node[FEATURE_LETTERS[: self.rank]])

    def _add_primes(self, slot: SlotSymbols, symbol: Symbol) -> Symbol:
        """The symbol of a collection with primed indices, if these symbols are primed."""
        if not (self.is_primed and slot.over):
            return symbol
        word = symbol.word + "'" if symbol.word in slot.over and symbol.word is not None else symbol.word
        return replace(symbol, word=word, sup=tuple(f"{s}'" if s in slot.over else s for s in symbol.sup))


def _set_read_index(symbol: Symbol, index: str) -> Symbol:
    """The symbol with `index` instead of the word j."""
    return replace(symbol, word=index) if symbol.word == "j" else symbol


# names and numbers in LaTeX, valid in pdflatex, MathJax and KaTeX

_ESCAPES = {c: rf"\{c}" for c in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}


def add_scripts(base: str, sub: Sequence[str] = (), sup: Sequence[str] = ()) -> str:
    """A letter with subscripts and superscripts in LaTeX.

    >>> add_scripts("x", ["i"], ["t+1"]), add_scripts("m", ["q", "i"])
    ('x_i^{t+1}', 'm_{q,i}')
    """
    low, high = ",".join(sub), ",".join(sup)
    return base + (f"_{_add_braces(low)}" if low else "") + (f"^{_add_braces(high)}" if high else "")


def format_operator(name: str) -> str:
    r"""The name of a class as the name of a function in LaTeX.

    >>> format_operator("My_Gate")
    '\\operatorname{My\\_Gate}'
    """
    return rf"\operatorname{{{escape_latex(name) or 'f'}}}"


def escape_latex(text: str) -> str:
    r"""Text with special characters escaped for LaTeX; other letters are converted to ASCII or dropped.

    >>> print(escape_latex("cross_q"), escape_latex("50% of $x^2$"), escape_latex("Größe"))
    cross\_q 50\% of \$x\textasciicircum{}2\$ Groe
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "".join(_ESCAPES.get(letter, letter) for letter in plain if letter.isprintable())


def format_number(x: float) -> str:
    r"""A number in LaTeX: decimal if that is short and exact, else a fraction, a root or a power of ten.

    >>> format_number(0.5), format_number(1 / 3), format_number(8**-0.5), format_number(512**0.5), format_number(1e-5)
    ('0.5', '\\frac{1}{3}', '\\frac{1}{\\sqrt{8}}', '\\sqrt{512}', '10^{-5}')
    """
    short = f"{x:g}"
    if float(short) != x and x > 0:
        shapes = ((1 / x, r"\frac{1}{%d}"), (x**2, r"\sqrt{%d}"), (x**-2, r"\frac{1}{\sqrt{%d}}"))
        for power, shape in shapes:
            if 1 < power < 1e6 and abs(power - round(power)) < 1e-9 * power:
                return shape % round(power)
    mantissa, _, exponent = short.partition("e")
    if not exponent:
        return short
    factor = "" if mantissa == "1" else "-" if mantissa == "-1" else rf"{mantissa} \cdot "
    return f"{factor}10^{{{int(exponent)}}}"


def format_power(x: float, power: str) -> str:
    r"""A number to a power, in LaTeX.

    >>> format_power(10000.0, "2e/d"), format_power(1e6, "2e/d")
    ('10000^{2e/d}', '(10^{6})^{2e/d}')
    """
    base = format_number(x)
    return add_scripts(f"({base})" if "^" in base or base[0] in "-\\" else base, (), [power])


def format_multiple(scale: float, value: str) -> str:
    """A number times `value`, in LaTeX; a factor of 1 is omitted."""
    return value if scale == 1 else rf"{format_number(scale)} \, {value}"


def _add_braces(script: str) -> str:
    """A subscript or superscript, in braces if it is longer than one character."""
    return script if len(script) == 1 else f"{{{script}}}"
