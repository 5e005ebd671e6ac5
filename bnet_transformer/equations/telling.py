"""From one group of slices to the symbols that its TPM writes with, and from these to one row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.equations.groups import Group
from bnet_transformer.equations.letters import Letters
from bnet_transformer.equations.result import Equation
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import Family
from bnet_transformer.network import Input, Member
from bnet_transformer.tpm.symbols import FEATURES, Slot, Symbol, Symbols, Untold, scripts

SHOWN = {"same": "i", "rest": "i", "before": "i-1", "first": "0", "every": ".", "causal": r"\le i", "earlier": "<i"}
CONDITIONS = {"causal": r"j \le i", "earlier": "j < i"}
COUNTS = {"causal": "i+1", "earlier": "i"}


@dataclass(frozen=True)
class Teller:
    """Tells the equation of one group of slices in one form."""

    group: Group
    form: str

    @property
    def letters(self) -> Letters:
        return self.group.letters

    @property
    def member(self) -> Member:
        return self.group.first

    @property
    def family(self) -> Family:
        return self.member.family

    def whole(self) -> bool:
        """True where one matrix equation tells all words: each reads the same things in the same way."""
        return self.family.words is not None and not any(map(self._singles, self.member.inputs))

    def _singles(self, given: Input) -> bool:
        """True where word i reads, or is picked by, something that is its own."""
        parent = self._at(given.parent)
        picked = any(axis == WORD or self._at(k).family.words is not None for axis, k in given.pick)
        moved = parent.family.words is not None and given.reach.kind in ("before", "rest", "first", "last")
        return picked or moved or (parent.family.words is not None and _is_discrete(parent))

    def symbols(self) -> Symbols:
        """What the TPM is given to write with."""
        family, tpm, shape = self.family, self.member.tpm, self.member.shape
        whole = self.form in ("row", "column") and self.whole()
        discrete = tpm.kind == "discrete"
        if self.form in ("row", "column") and not discrete and len(shape) != 1:
            raise Untold
        sup = self._sup(family, self.group.own, [self.letters.plates[plate] for plate in family.plates])
        word = None if family.words is None else "i"
        own = self._symbol(family, sup, word, self.form, whole, capital=not discrete)
        single = self._symbol(family, sup, word)
        owner = (
            sup if self.member.owner == family.name else self._sup(family, None, sup[len(sup) - len(family.plates) :])
        )
        return Symbols(
            self.form,
            replace(own, value=True),
            tuple(self._slot(place, whole) for place in range(len(self.member.inputs))),
            str(single) if tpm.reads_by_index or not discrete else "m",
            "" if family.words is None else self.letters.words(family.words),
            whole,
            tpm.kind,
            len(shape),
            (scripts(*self.letters.role(family.role)),),
            tuple(owner),
        )

    def left(self, symbols: Symbols) -> str:
        """`P(node | parents)`."""
        tpm, own = self.member.tpm, symbols.own
        if tpm.kind == "discrete" and not tpm.reads_by_index:
            shown = rf"{own.plain} = \text{{atom }} {symbols.state}"
        elif tpm.kind == "discrete" and not symbols.whole:
            shown = symbols.state
        else:
            shown = str(own[FEATURES[: len(self.member.shape)]]) if self.form == "einstein" else own.plain
        given = [slot.left for slot in symbols.slots]
        for place, slot in enumerate(self.member.inputs):
            given += [str(self._selector(place, k)) for k in range(len(slot.pick))]
        bar = rf" \mid {', '.join(dict.fromkeys(given))}" if given else ""
        return f"P({shown}{bar})"

    def _symbol(
        self,
        family: Family,
        sup: list[str],
        word: str | None,
        form: str = "word",
        whole: bool = False,
        *,
        capital: bool = True,
    ) -> Symbol:
        matrix = capital and form != "word" and family.words is not None
        base, sub = (self.letters.matrix if matrix else self.letters.role)(family.role)
        return Symbol(base, sub, tuple(sup), word, form, whole)

    def _sup(self, family: Family, slice_: str | None, plates: list[str]) -> list[str]:
        return [*self.letters.stack(family.stack), *([] if slice_ is None else [slice_]), *plates]

    def _slot(self, place: int, whole: bool) -> Slot:
        given = self.member.inputs[place]
        parent = self._at(given.parent)
        family = parent.family
        picked = {axis: str(self._selector(place, k)) for k, (axis, _) in enumerate(given.pick)}
        letters = {plate: self.letters.plates[plate] for plate in family.plates}
        inside = [picked.get(plate, letter) for plate, letter in letters.items()]
        every = ["." if plate in given.over else picked.get(plate, letter) for plate, letter in letters.items()]
        outside = ["." if plate in given.over or plate in picked else letter for plate, letter in letters.items()]
        slice_ = self.group.parent(place)
        word = picked.get(WORD, self._word(given, family))
        matrix = word == "j" or (whole and word == "i")
        discrete = _is_discrete(parent)
        form = "word" if discrete else self.form
        sup = self._sup(family, slice_, inside)
        told = self._symbol(family, sup, word, form, matrix if family.words is not None else whole)
        return Slot(
            given.slot,
            self._symbol(family, sup, word),
            told,
            self._left(given, family, self._sup(family, slice_, outside), discrete, matrix),
            str(self._symbol(family, self._sup(family, slice_, every), self._shown(given, family, word))),
            parent.shape,
            discrete,
            tuple("j" if axis == WORD else self.letters.plates[axis] for axis in given.over),
            self._condition(given.reach, family),
            self._count(given, family),
            self.letters.mask(given.reach) if WORD in given.over else (),
        )

    def _left(self, given: Input, family: Family, sup: list[str], discrete: bool, matrix: bool) -> str:
        """A parent as it stands behind the bar."""
        if family.words is None or discrete or self.form == "word":
            return str(self._symbol(family, sup, self._shown(given, family, self._word(given, family))))
        word = self._word(given, family)
        return self._symbol(family, sup, word, self.form, matrix or word == "j" or self.form == "einstein").plain

    def _selector(self, place: int, number: int) -> Symbol:
        family = self._at(self.member.inputs[place].pick[number][1]).family
        plates = [self.letters.plates[plate] for plate in family.plates]
        sup = self._sup(family, self.group.selector(place, number), plates)
        return self._symbol(family, sup, None if family.words is None else "i")

    def _at(self, index: int) -> Member:
        return self.group.network.members[index]

    def _word(self, given: Input, family: Family) -> str | None:
        """The index of the word that is read: j where there are many."""
        if family.words is None:
            return None
        if given.reach.kind == "last":
            return f"{self.letters.count(family.words or '')}-1"
        return SHOWN[given.reach.kind] if given.reach.single else "j"

    def _shown(self, given: Input, family: Family, word: str | None) -> str | None:
        """The words that are read, as a subscript behind the bar: `k_.` for all of them."""
        if word is None or (WORD not in given.over and word != "j"):
            return word
        match given.reach.kind:
            case "window":
                return f"i-{given.reach.width}:i+{given.reach.width}"
            case "recent":
                return f"i-{given.reach.width}:i"
            case "mask":
                return self._table(given.reach)
            case kind:
                return SHOWN[kind]

    def _condition(self, reach: Reach, family: Family) -> str:
        match reach.kind:
            case "every":
                return rf"j \in {self.letters.words(family.words or '')}"
            case "window":
                return rf"|j-i| \le {reach.width}"
            case "recent":
                return rf"i-{reach.width} \le j \le i"
            case "mask":
                return rf"j \in {self._table(reach)}"
            case kind:
                return CONDITIONS.get(kind, "")

    def _table(self, reach: Reach) -> str:
        table = self.letters.table(reach)
        return table if self.family.words is not None else table.replace("_i", "")

    def _count(self, given: Input, family: Family) -> str:
        parts = [str(self.group.network.graph.sizes[axis]) for axis in given.over if axis != WORD]
        if WORD in given.over:
            every = {"every": self.letters.count(family.words or "")}
            condition = self._condition(given.reach, family)
            parts.append((COUNTS | every).get(given.reach.kind, rf"|\{{j : {condition}\}}"))
        return r" \cdot ".join(parts)


def tell(group: Group, form: str) -> tuple[Equation, list[str]]:
    """One row, and what must be said below the equations; word by word where the form has no words for it."""
    member = group.first
    wordless = member.family.words is None and all(
        group.network.members[given.parent].family.words is None for given in member.inputs
    )
    for chosen in dict.fromkeys(["word" if wordless else form, "word"]):
        teller = Teller(group, chosen)
        try:
            symbols = teller.symbols()
            right = member.tpm.latex(symbols)
        except Untold:
            continue
        if not isinstance(right, str):
            raise BNetError(f"{type(member.tpm).__name__}.latex", expected="LaTeX, a string", got=right)
        return _row(group, chosen, teller.left(symbols), right), list(symbols.defined)
    raise BNetError(
        f"{type(member.tpm).__name__}.latex",
        expected="an equation, at least in the form 'word'",
        got="none (Untold)",
    )


def _row(group: Group, form: str, left: str, right: str) -> Equation:
    member = group.first
    family = member.family
    steps = {"t": "t", "t+1": "(t+1)"}
    index = group.own
    name = family.stem if index is None else f"{family.stem}_{steps.get(index, index)}"
    what = [type(member.tpm).__name__, member.tpm.kind, *(["learnable"] if member.learnable else [])]
    over = [
        *(["slice"] if group.slices else []),
        *family.plates,
        *(["word"] if family.words is not None else []),
    ]
    note = ", ".join(what) + (f"; for each {', '.join(over)}" if over else "")
    note += "; one draw for the whole corpus" if member.scope == "corpus" else ""
    return Equation(name, left, right, member.tpm.kind, form, group.slices if group.part else (), note)


def _is_discrete(member: Member) -> bool:
    return (member.tpm.kind == "discrete" or member.tpm.states is not None) and member.tpm.reads_by_index
