"""The names of nodes and how they are parsed, and the reach of an arrow, which is the set of words that it joins.

The name of a node is its role, followed by its indices in the order slice, other plates, word, joined by `_`. The name
of a stack is a prefix. A role never ends in `_` and digits, so parsing is unambiguous.

A pattern is a name of several nodes, by one rule for all functions that take names: a star is every value of one
index, and indices that are missing at the end have every value; `*` is every node. A negative word counts from the end.

The tables of hooks name the nodes in TransformerLens.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_choice, check_int, set_frozen
from bnet_transformer._core.process import check_memory
from bnet_transformer.errors import BNetError

SLICE, WORD = "slice", "word"
ARROW = "->"
EVERY_NODE = "*"

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")

_INDEX_PATTERN = re.compile(r"\*|0|-?[1-9]\d{0,17}", re.ASCII)
_ENTRIES_PATTERN = re.compile(r"([^\[]+)\[ *(\d{1,18}(?: *, *\d{1,18})*) *\]", re.ASCII)
_ROLE_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)


def join_stem(stack: str, role: str) -> str:
    """The part of a node's name before the indices.

    >>> join_stem("enc", "x"), join_stem("", "W_q")
    ('enc_x', 'W_q')
    """
    return f"{stack}_{role}" if stack else role


def join_name(stem: str, indices: Iterable[int | str]) -> str:
    """The name of a node from its stem and indices.

    >>> join_name("W_q", (1,)), join_name("q", (1, 3, 2)), join_name("c", ())
    ('W_q_1', 'q_1_3_2', 'c')
    """
    return "_".join([stem, *map(str, indices)])


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The stem and the indices of a node's name: the inverse of `join_name`.

    >>> split_name("W_q_1"), split_name("enc_x_0_4"), split_name("c")
    (('W_q', (1,)), ('enc_x', (0, 4)), ('c', ()))
    """
    stem, indices = split_pattern(name)
    values = tuple(index for index in indices if index is not None)
    return (stem, values) if len(values) == len(indices) else (name, ())


@lru_cache(maxsize=4096)  # the ends of edges occur in many edges
def split_pattern(pattern: str) -> tuple[str, tuple[int | None, ...]]:
    """The stem and the indices of a name or a pattern; None for a star.

    >>> split_pattern("q_1_*_-1"), split_pattern("*")
    (('q', (1, None, -1)), ('*', ()))
    """
    parts = pattern.split("_")
    first = len(parts)
    while first > 1 and _INDEX_PATTERN.fullmatch(parts[first - 1]):
        first -= 1
    return "_".join(parts[:first]), tuple(None if part == "*" else int(part) for part in parts[first:])


def count_word_from_start(name: str, words: int) -> str:
    """The same name or pattern, with a word that is counted from the start if it is counted from the end.

    >>> count_word_from_start("q_0_*_-1", 3), count_word_from_start("y_1", 3), count_word_from_start("x_0_-1[7]", 3)
    ('q_0_*_2', 'y_1', 'x_0_2[7]')
    """
    nodes, mark, entries = name.partition("[")
    stem, indices = split_pattern(nodes)
    if not indices or not -words <= (indices[-1] or 0) < 0:
        return name
    indices = (*indices[:-1], (indices[-1] or 0) + words)
    return join_name(stem, ["*" if i is None else i for i in indices]) + mark + entries


def split_entries(name: str) -> tuple[str, tuple[int, ...] | None]:
    """The name or pattern of nodes, and the entries of their values in brackets after it; None without brackets.

    >>> split_entries("neuron_1_*[7, 9]"), split_entries("x_1_2")
    (('neuron_1_*', (7, 9)), ('x_1_2', None))

    Raises:
        BNetError: An entry occurs twice.
    """
    match = _ENTRIES_PATTERN.fullmatch(name)
    if match is None:
        return name, None
    entries = tuple(map(int, match[2].split(",")))
    if len({*entries}) < len(entries):
        raise BNetError(name, expected="each entry once, as in x_1_2[3, 5]", actual=list(entries))
    return match[1], entries


def split_path(text: str) -> list[str]:
    """The names along an edge or a path.

    >>> split_path("v_0_0_1->a_0_0_3")
    ['v_0_0_1', 'a_0_0_3']
    """
    return [name.strip() for name in text.split(ARROW)]


def join_path(names: Iterable[str]) -> str:
    """The name of an edge or a path.

    >>> join_path(["v_0_0_1", "a_0_0_3"])
    'v_0_0_1 -> a_0_0_3'
    """
    return f" {ARROW} ".join(names)


def is_match(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a node, or of the end of an edge (`a_0_1<k>`, with or without its slot).

    In `name` a star is a joined index, which only a star or a missing index matches.

    >>> [is_match("a_0_*", name) for name in ("a_0_1", "a_0_1_2", "a_0_1<k>", "a_1_1", "a_0")]
    [True, True, True, False, False]
    """
    if pattern in (EVERY_NODE, name):
        return True
    (text, _, slot), (node, _, slot_of_node) = pattern.partition("<"), name.partition("<")
    (stem, indices), (stem_of_node, values) = split_pattern(text), split_pattern(node)
    if stem != stem_of_node or slot not in ("", slot_of_node) or len(indices) > len(values):
        return False
    return all(index is None or index == value for index, value in zip(indices, values, strict=False))


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names of nodes, edges or paths that a pattern matches, in their order.

    >>> match_names("a_0_* -> *", ["a_0_0 -> y", "a_0_1 -> y", "x_0 -> y"])
    ['a_0_0 -> y', 'a_0_1 -> y']
    """
    ends = split_path(pattern)
    pairs = ((name, split_path(name)) for name in names)
    return [name for name, parts in pairs if len(parts) == len(ends) and all(map(is_match, ends, parts))]


def format_label(
    role: str,
    *,
    stack: str = "",
    slice: int | None = None,
    plates: Sequence[int] = (),
    word: int | None = None,
    token: str | None = None,
) -> str:
    """The label of a node in figures: the word as subscript, slice and (in parentheses) other plates as superscript.

    >>> format_label("x", slice=1, word=2, token="sat"), format_label("c")
    ('x₂¹ "sat"', 'c')
    >>> format_label("q", stack="enc", slice=0, plates=(3,), word=12)
    'enc q₁₂⁰⁽³⁾'
    """
    above = "" if slice is None else str(slice).translate(_SUPERSCRIPTS)
    above += "".join(f"⁽{str(index).translate(_SUPERSCRIPTS)}⁾" for index in plates)
    below = "" if word is None else str(word).translate(_SUBSCRIPTS)
    name = f"{stack} {role}" if stack else role
    return name + below + above + ("" if token is None else f' "{token}"')


def find_role_fault(role: object, stacks: Sequence[str] = ()) -> str | None:
    """The reason that a role is invalid; None for a valid role.

    >>> find_role_fault("W_q"), find_role_fault("x_1")
    (None, "the role 'x_1', which ends in _ and digits")
    """
    if not isinstance(role, str) or not _ROLE_PATTERN.fullmatch(role):
        return f"the role {role!r}, which is not an identifier of ASCII letters, digits and _"
    if re.search(r"_\d+$", role):
        return f"the role {role!r}, which ends in _ and digits"
    if role.endswith("_"):
        return f"the role {role!r}, which ends in _"
    if keyword.iskeyword(role) or keyword.issoftkeyword(role):
        return f"the role {role!r}, which is a Python keyword"
    if role in stacks:
        return f"the role {role!r}, which is the name of a stack"
    return None


@dataclass(frozen=True)
class Reach:
    """The words j of the parent that word i of the child reads.

    Args:
        kind: The rule:

            - `"same"` (default): j = i;
            - `"every"`: all words;
            - `"causal"`: j <= i;
            - `"earlier"`: j < i;
            - `"before"`: j = i - 1;
            - `"after"`: j = i + 1;
            - `"rest"`: j = i, except that the first word depends on no word;
            - `"first"`, `"last"`: the first or the last word of the parent;
            - `"window"`: |i - j| <= `width`;
            - `"recent"`: 0 <= i - j <= `width`;
            - `"mask"`: the words with True in row i of `table`.
        width: The width of `"window"` and `"recent"`, in words. Default 0.
        table: The table of `"mask"`, `[word of the child, word of the parent]`. Default: empty.

    >>> Reach("causal").matrix(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    kind: str = "same"
    width: int = 0
    table: tuple[tuple[bool, ...], ...] = ()

    def __post_init__(self) -> None:
        check_choice("reach", self.kind, REACH_KINDS)
        set_frozen(self, width=check_int(f"{self.kind} width", self.width, minimum=0))
        if self.width and self.kind not in KINDS_WITH_WIDTH:
            expected = f"no width, because only {' and '.join(KINDS_WITH_WIDTH)} have one"
            raise BNetError(f"reach {self.kind}", expected=expected, actual=self.width)
        if self.kind == "mask":
            set_frozen(self, table=_check_table(self.table))
        elif not isinstance(self.table, tuple) or self.table:
            expected = "no table, because only mask has one"
            raise BNetError(f"reach {self.kind}", expected=expected, actual=self.table)

    @property
    def is_single(self) -> bool:
        """True if each word depends on at most one word, so that the slot holds a single value and not a collection."""
        return self.kind in ("same", "before", "after", "rest", "first", "last")

    @property
    def is_optional(self) -> bool:
        """True if a word may have no word to read, although the slot holds a single value: it then receives zero."""
        return self.kind in ("before", "after", "rest")

    @property
    def is_positionwise(self) -> bool:
        """True if no word depends on another word."""
        return self.kind in ("same", "rest")

    @property
    def is_strictly_causal(self) -> bool:
        """True if each word depends only on earlier words."""
        return self.kind in ("before", "earlier") or (self.kind == "mask" and self._is_lower_triangular(0))

    @property
    def is_causal(self) -> bool:
        """True if no word depends on a later word."""
        kinds = ("same", "before", "rest", "earlier", "causal", "recent")
        return self.kind in kinds or (self.kind == "mask" and self._is_lower_triangular(1))

    def matrix(self, children: int, parents: int) -> NDArray[np.bool_]:
        """The table of all pairs of words.

        Args:
            children: The number of words of the child.
            parents: The number of words of the parent.

        Returns:
            `[children, parents]`: True if word i of the child reads word j of the parent.

        Raises:
            BNetError: If the reach does not exist for these numbers of words.
        """
        return _compute_matrix(self, children, parents)

    def count_arrows(self, i: NDArray[Any], j: NDArray[Any], children: int, parents: int) -> int:
        """The number of arrows from some words j of the parent to some words i of the child.

        Except for a mask, it is computed without the table of all pairs.

        Args:
            i: The sorted indices of words of the child.
            j: The sorted indices of words of the parent.
            children: The number of words of the child.
            parents: The number of words of the parent.

        Returns:
            The number of arrows.

        >>> Reach("causal").count_arrows(np.arange(10**6), np.arange(10**6), 10**6, 10**6)
        500000500000
        """
        if self.kind == "mask":
            return int(self.matrix(children, parents)[np.ix_(i, j)].sum())
        self.check_word_counts(children, parents)
        low, high = self.word_range(i, parents)
        return int(np.maximum(np.searchsorted(j, high) - np.searchsorted(j, low), 0).sum())

    def word_range(self, i: Any, parents: int) -> tuple[Any, Any]:
        """The range of words that word i reads; not defined for a mask.

        Args:
            i: The index of the word, or an array of any library.
            parents: The number of words of the parent.

        Returns:
            The first word of the range, and the word after the last. They can exceed the words of the parent.
        """
        return WORD_RANGES[self.kind](i, parents, self.width)

    def first_empty_row(self, children: int, parents: int) -> int | None:
        """The first word of the child that depends on no word.

        Except for a mask, it is computed without the table of all pairs.

        Args:
            children: The number of words of the child.
            parents: The number of words of the parent.

        Returns:
            The index of the word; None if every word depends on at least one word.

        >>> Reach("earlier").first_empty_row(3, 3), Reach("window", 1).first_empty_row(9, 4)
        (0, 5)
        >>> Reach("causal").first_empty_row(10**9, 10**9)
        """
        if self.kind == "mask":
            empty = np.flatnonzero(~self.matrix(children, parents).any(1))
            return int(empty[0]) if len(empty) else None
        if self.kind in ("earlier", "before", "rest"):
            return 0
        if self.kind == "after":
            return max(0, parents - 1) if children >= parents else None
        first_empty = parents + self.width
        return first_empty if self.kind in KINDS_WITH_WIDTH and first_empty < children else None

    def check_word_counts(self, children: int, parents: int, prefix: str = "") -> None:
        """Check the numbers of words.

        Args:
            children: The number of words of the child.
            parents: The number of words of the parent.
            prefix: The start of the error message, such as the names of the nodes. Default: empty.

        Raises:
            BNetError: If the reach does not exist for these numbers of words.
        """
        fixed = (len(self.table), len(self.table[0])) if self.kind == "mask" else (children, children)
        if self.kind in ("same", "rest", "mask") and (children, parents) != fixed:
            expected = f"{fixed[0]} words that read {fixed[1]}"
            reason = "the shape of the mask" if self.kind == "mask" else "word i reads word i"
            actual = f"{children} words that read {parents}"
            raise BNetError(f"{prefix}reach {self.kind}", expected=f"{expected} ({reason})", actual=actual)

    def has_arrow(self, i: Any, j: Any, parents: int) -> Any:
        """Whether word i reads word j; not defined for a mask.

        Args:
            i: The index of a word of the child, or an array of any library.
            j: The index of a word of the parent, or an array that broadcasts with `i`.
            parents: The number of words of the parent.

        Returns:
            A boolean, or an array of booleans.
        """
        low, high = self.word_range(i, parents)
        return (low <= j) & (j < high)

    def __str__(self) -> str:
        return f"{self.kind}({self.width})" if self.kind in KINDS_WITH_WIDTH else self.kind

    def _is_lower_triangular(self, diagonal: int) -> bool:
        """True if row i of the table has no word from `i + diagonal` on."""
        return all(not cell for i, row in enumerate(self.table) for cell in row[i + diagonal :])


# For word i of the child, m words of the parent and a width: the first word of the reach and the word after the last.
WORD_RANGES: dict[str, Callable[[Any, int, int], tuple[Any, Any]]] = {
    "same": lambda i, m, width: (i, i + 1),
    "every": lambda i, m, width: (0 * i, 0 * i + m),
    "causal": lambda i, m, width: (0 * i, i + 1),
    "earlier": lambda i, m, width: (0 * i, i),
    "before": lambda i, m, width: (i - 1, i),
    "after": lambda i, m, width: (i + 1, i + 2),
    "rest": lambda i, m, width: (i + (i == 0), i + 1),
    "first": lambda i, m, width: (0 * i, 0 * i + 1),
    "last": lambda i, m, width: (0 * i + m - 1, 0 * i + m),
    "window": lambda i, m, width: (i - width, i + width + 1),
    "recent": lambda i, m, width: (i - width, i + 1),
}
KINDS_WITH_WIDTH = ("window", "recent")
REACH_KINDS = (*WORD_RANGES, "mask")


def _check_table(value: object) -> tuple[tuple[bool, ...], ...]:
    """A table of booleans from nested lists or an array."""
    try:
        table = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise BNetError("mask", expected="a table of booleans", actual=value) from error
    if table.dtype != bool or table.ndim != 2 or not table.size:
        actual = f"{table.dtype} of shape {table.shape}" if table.dtype != object else value
        without_width = ", ".join(kind for kind in WORD_RANGES if kind not in KINDS_WITH_WIDTH)
        allowed = f"{without_width}, Reach('window', width), Reach('recent', width), a table of booleans"
        raise BNetError("mask", expected="a table [word, word] of booleans", actual=actual, allowed=allowed)
    return tuple(tuple(bool(cell) for cell in row) for row in table)


@lru_cache(maxsize=64, typed=True)  # typed: 3.0 must raise an error, and not use the entry of 3
def _compute_matrix(reach: Reach, children: int, parents: int) -> NDArray[np.bool_]:
    """The table of all pairs of words of a reach, read-only and cached."""
    reach.check_word_counts(check_int("children", children, minimum=0), check_int("parents", parents, minimum=0))
    check_memory("the matrix of a reach", children * parents, "fewer words")
    if reach.kind == "mask":
        pairs = np.array(reach.table, dtype=bool)
    else:
        pairs = reach.has_arrow(np.arange(children)[:, None], np.arange(parents)[None, :], parents)
    pairs.setflags(write=False)
    return pairs


def as_reach(value: object) -> Reach:
    """A `Reach` from a name, a `Reach` or a table of booleans; None is the reach `"every"`.

    >>> as_reach("causal"), as_reach(None).kind
    (Reach(kind='causal', width=0, table=()), 'every')
    """
    if value is None:
        return Reach("every")
    if isinstance(value, Reach):
        return value
    if isinstance(value, str):
        if value in (*KINDS_WITH_WIDTH, "mask"):
            option = "a table" if value == "mask" else "a width"
            hint = "Pass the table itself" if value == "mask" else f"Pass bt.Reach({value!r}, width)"
            raise BNetError("reach", expected=f"{option} for the reach {value!r}", hint=hint)
        return Reach(value)
    return Reach("mask", table=_check_table(value))


# --------------------------------------------------------------------------------------------------------------------
# The hooks of TransformerLens by role of node, for nets that normalise after a residual sum, and before it.
#
# `pretrained.names` maps names by these tables in both directions, and `unknown_node_error` of the template graph names
# the node in the error for a name such as `blocks.0.hook_resid_pre`.


FIRST_STATE, NEXT_STATE = "first x", "next x"
# Role -> the hooks of a TransformerBridge (TransformerLens 4.3) that hold it; `to_lens` returns the first.
COMMON_HOOKS = {
    "embed": ("embed.hook_out",),
    "position": ("hook_pos_embed", "pos_embed.hook_out"),
    "q": ("blocks.{t}.attn.hook_q", "blocks.{t}.attn.q.hook_out"),
    "k": ("blocks.{t}.attn.hook_k", "blocks.{t}.attn.k.hook_out"),
    "v": ("blocks.{t}.attn.hook_v", "blocks.{t}.attn.v.hook_out"),
    "j": ("blocks.{t}.attn.hook_pattern",),
    "a": ("blocks.{t}.attn.hook_z", "blocks.{t}.attn.o.hook_in"),
    "neuron": ("blocks.{t}.mlp.hook_post", "blocks.{t}.mlp.out.hook_in"),
    "ffn": ("blocks.{t}.hook_mlp_out", "blocks.{t}.mlp.hook_out", "blocks.{t}.mlp.out.hook_out"),
    "x": ("blocks.{t}.hook_resid_pre", "blocks.{t}.hook_in"),
    NEXT_STATE: ("blocks.{t}.hook_resid_post", "blocks.{t}.hook_out"),
    "logits": ("unembed.hook_out", "hook_unembed"),
}
POST_NORM_HOOKS = {
    **COMMON_HOOKS,
    "segment_embed": ("token_type_embed.hook_out",),
    "add": ("embed_ln.hook_in",),
    "mix": ("blocks.{t}.attn.o.hook_out",),
    "add1": ("blocks.{t}.ln1.hook_in",),
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_out", "blocks.{t}.hook_attn_out"),
    "add2": ("blocks.{t}.ln2.hook_in", "blocks.{t}.hook_resid_mid"),
    "dense": ("mlm_head.hook_out",),
    "transform": ("ln_final.hook_in",),
    "transform_norm": ("ln_final.hook_out", "unembed.hook_in"),
    FIRST_STATE: ("hook_embed", "embed_ln.hook_out"),
}
PRE_NORM_HOOKS = {
    **COMMON_HOOKS,
    "embed": ("embed.hook_out", "hook_embed"),
    "norm1": ("blocks.{t}.ln1.hook_out", "blocks.{t}.attn.hook_in"),
    "mix": ("blocks.{t}.hook_attn_out", "blocks.{t}.attn.hook_out", "blocks.{t}.attn.o.hook_out"),
    "add1": ("blocks.{t}.hook_resid_mid", "blocks.{t}.ln2.hook_in"),
    "norm2": ("blocks.{t}.ln2.hook_out", "blocks.{t}.mlp.hook_in"),
    "norm": ("ln_final.hook_out", "unembed.hook_in"),
}
# Hooks of a HookedTransformer by another name. `hook_normalized` is the node itself where the scale and bias of the
# norm are folded into the next weights, which is the default of TransformerLens.
HOOK_ALIASES = {"hook_normalized": "hook_out", "attn.hook_attn_out": "hook_attn_out"}
HOOK_PATTERN = re.compile(
    r"(?:(?P<blocks>blocks|encoder|decoder)\.(?P<t>\d{1,9})\.)?(?P<point>(?:\w+\.)*hook_\w+)(?:\[.*\])?", re.ASCII
)
STACK_BLOCKS = {"encoder": "enc", "decoder": "dec"}
