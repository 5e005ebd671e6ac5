"""From what a person writes to tensors: text, ids and vectors of a sentence, values for `do` and evidence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tokenizer import Span, TokenizedText, Tokenizer, is_text
from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError, EvidenceError, UnknownNameError, mapping, not_endless, shown, unknown
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm.arrays import is_plain, own_tensor
from bnet_transformer.world import World, support, words_read

Tokens = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class EncodedSentence:
    """A sentence as tensors: the token of each word of each stack, and the value of each `Given` family.

    `told` is what the net's tokenizer made of a stack's text, where it has one; a stack that was said in words or ids
    has none.
    """

    tokens: Tokens
    given: dict[str, Tensor]
    told: dict[str, TokenizedText] = field(default_factory=dict)

    @property
    def words(self) -> dict[str, int]:
        """How many words each stack has."""
        return {stack: len(tokens) for stack, tokens in self.tokens.items()}

    def special(self, network: Network) -> tuple[bool, ...]:
        """Which tokens are special ones of the net's tokenizer, all stacks in order."""
        found: list[bool] = []
        for stack, tokens in self.tokens.items():
            ids = None
            main = family_of_words(network, stack, {})
            image = main is not None and main.tpm.image is not None
            reader = network.tokenizer
            if reader is not None and (stack in self.told or not reader.reads(stack, next(iter(self.tokens)))):
                reader = None
            if reader is not None:
                ids = None if main is None or not main.tpm.reads_by_index else self.given[main.family.name].tolist()
            if stack in self.told:
                found += self.told[stack].special
            elif ids is not None and reader is not None:
                found += reader.is_special(ids)
            else:
                found += [image and k == 0 for k in range(len(tokens))]
        return tuple(found)

    def spans(self) -> tuple[Span | None, ...]:
        """Where each token stands in its text, all stacks in order."""
        found: list[Span | None] = []
        for stack, tokens in self.tokens.items():
            found += self.told[stack].spans if stack in self.told else [None] * len(tokens)
        return tuple(found)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each whole word, all stacks in order."""
        found: list[tuple[int, ...]] = []
        start = 0
        for stack, tokens in self.tokens.items():
            own = self.told[stack].groups if stack in self.told else [(k,) for k in range(len(tokens))]
            found += [tuple(start + k for k in group) for group in own]
            start += len(tokens)
        return tuple(found)


def encode_sentence(
    network: Network,
    said: object = None,
    x: object = None,
    given: Mapping[str, object] | None = None,
    *,
    pair: object = None,
) -> EncodedSentence:
    """Read a sentence: text, a list of words, ids, or vectors `x`; with several stacks, a mapping from stack.

    `given` fills further `Given` nodes, by family name: `[*plates, word, *shape]`. A net with a tokenizer reads text
    and words by it, and a second sentence `pair` behind the first. A net without words takes no sentence.
    """
    network.one_type()
    stacks = network.graph.word_stacks
    extra = dict(mapping("given", given))
    told = _tokenized(network.tokenizer, said, pair, stacks, extra)
    said_by, x_by = _by_stack("sentence", said, stacks), _by_stack("x", x, stacks)
    said_by |= {stack: list(each.ids) for stack, each in told.items()}
    tokens: Tokens = {}
    values: dict[str, Tensor] = {}
    for name in extra:
        if name not in network.graph.by_name or network.member(name).tpm.kind != "input":
            raise unknown("given", name, [m.family.name for m in network.members if m.tpm.kind == "input"])
    for stack in stacks:
        main = _filled(network, stack, extra)
        said_here = said_by.get(stack)
        if said_here is None and main is None:
            said_here = _counted(network, stack, extra)
        tokens[stack], value = _words(network, stack, main, said_here, x_by.get(stack))
        if main is not None and value is not None:
            values[main.family.name] = value
    tokens |= {stack: each.tokens for stack, each in told.items()}
    intake = EncodedSentence(tokens, values, told)
    for member in network.members:
        if member.tpm.kind == "input" and member.family.name not in values:
            values[member.family.name] = _given(network, member, extra, intake.words)
    for stack, here in said_by.items():
        _check_said(network, stack, here, extra, values)
    check_reads(network, intake.words)
    values.update({name: value.to(network.device) for name, value in values.items()})
    return intake


def _tokenized(
    tokenizer: Tokenizer | None, said: object, pair: object, stacks: Sequence[str], extra: dict[str, object]
) -> dict[str, TokenizedText]:
    """What the tokenizer makes of what is said, if it is text; the segments go to their node among `extra`."""
    several = len(stacks) > 1
    if tokenizer is None or several or not is_text(said):
        if pair is not None:
            wanted = "one sentence: a pair is for text, and a net with a tokenizer"
            raise BNetError("pair", expected=wanted, got=pair)
        return tokenizer.read_each(said, stacks) if tokenizer and several and isinstance(said, Mapping) else {}
    found = tokenizer.read(said, pair)
    if tokenizer.segments is not None:
        extra.setdefault(tokenizer.segments, list(found.segments))
    return {stacks[0]: found}


def encode_value(world: World, node: int, value: object, *, evidence: bool) -> Tensor:
    """The tensor for `do` or evidence on a node: a state, a label, or a value of the node's shape."""
    name = world.ground.name(node)
    family = world.ground.family_of(node)
    member = world.network.members[family.index]
    discrete = member.tpm.kind == "discrete" or member.tpm.reads_by_index
    if isinstance(value, str):
        value = _state_of_label(world.network, member, name, value)
    if discrete and (member.tpm.reads_by_index or _is_index(value)):
        count = support(world, node)
        state = _index(name, value, f"a state from 0 to {count - 1}")
        if not 0 <= state < count:
            raise EvidenceError(name, expected=f"a state from 0 to {count - 1}", got=value)
        read = range(count) if evidence or member.tpm.states is not None else words_read(world, node)
        if state not in read:
            raise EvidenceError(name, expected=f"a word that it may read: {list(read)}", got=value)
        return torch.tensor(state, device=world.network.device)
    tensor = _tensor(name, value, world.network.dtype, EvidenceError).to(world.network.device)
    if tuple(tensor.shape) != member.shape:
        way = way_to_one_value(world.network, tensor, member.shape)
        hint = None if way is None else f"a value for one state of what it depends on: {way}"
        raise EvidenceError(
            name,
            expected=f"a value of shape {member.shape}",
            got=f"shape {tuple(tensor.shape)}",
            allowed=hint,
        )
    return tensor


def way_to_one_value(network: Network, value: Tensor, shape: tuple[int, ...]) -> str | None:
    """The `do` after which a value with a dim for each open choice is one of that shape; None for any other value."""
    graph = network.graph
    choices = [m.family.name for m in network.members if m.tpm.kind == "discrete" and graph.out_of[m.family.index]]
    leads = value.dim() > len(shape) and tuple(value.shape[value.dim() - len(shape) :]) == shape
    return f"do({choices[0]}=...) first, where {choices[0]} is open" if choices and leads else None


def once(what: str, nodes: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes told by a mapping and by keyword, none by both."""
    for name in nodes:
        if name in named:
            raise EvidenceError(f"{what} of {name}", expected="one value", got="two, in the mapping and by keyword")
    return {**nodes, **named}


def word_vector(word: str, dim: int, seed: int) -> Tensor:
    """The fixed vector of a word in a net without vocabulary: normal, seeded by the word itself.

    >>> word_vector("cat", 4, 0).equal(word_vector("cat", 4, 0))
    True
    """
    digest = hashlib.sha256(f"{seed}/word/{word}".encode(errors="surrogatepass")).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(dim, generator=generator, dtype=torch.float32, device="cpu")


def _by_stack(what: str, value: object, stacks: Sequence[str]) -> dict[str, object]:
    if value is None:
        return {}
    if not stacks:
        allowed = "given=, for the nodes that are given; observe and do, for the others"
        raise BNetError(what, expected="None: the net has no words", got=shown(value), allowed=allowed)
    if isinstance(value, Mapping):
        for stack in value:
            if stack not in stacks:
                raise unknown("stack", stack, stacks)
        return dict(value)
    if len(stacks) > 1:
        names = ", ".join(repr(stack) for stack in stacks)
        raise BNetError(what, expected=f"a mapping from stack ({names})", got=shown(value))
    return {stacks[0]: value}


def family_of_words(network: Network, stack: str, extra: Mapping[str, object]) -> Member | None:
    """The family that a stack's words fill: its `Given` nodes over words, the discrete one where there are several."""
    over = [
        member
        for member in network.members
        if member.tpm.kind == "input" and member.family.words == stack and not member.family.plates
    ]
    open_ones = [member for member in over if member.family.name not in extra]
    return main_of(open_ones)


def main_of(members: Sequence[Member]) -> Member | None:
    """Of a stack's `Given` families over words, the one that its words fill: the discrete one, none with a default."""
    needed = [m for m in members if m.tpm.default is None]
    return next(iter([m for m in needed if m.tpm.reads_by_index] or needed or members), None)


def _filled(network: Network, stack: str, extra: Mapping[str, object]) -> Member | None:
    """The family that what is said fills: none that has a default, where the words' own is given."""
    main = family_of_words(network, stack, extra)
    spare = main is not None and main.tpm.default is not None
    return None if spare and main is not family_of_words(network, stack, {}) else main


def _check_said(
    network: Network, stack: str, said: object, extra: Mapping[str, object], values: Mapping[str, Tensor]
) -> None:
    """Refuse words that are said beside other ids that are given for them."""
    whole = family_of_words(network, stack, {})
    if whole is None or not whole.tpm.reads_by_index or _filled(network, stack, extra) is not None:
        return
    name, where = whole.family.name, f"sentence of stack {stack!r}" if stack else "sentence"
    tokens, ids = _tokens(network, stack, where, said)
    if tokens and (ids is not None or stack in network.vocabularies):
        wanted = _ids(network, whole, where, tokens, ids).tolist()
        if wanted != values[name].tolist():
            expected = f"{wanted}, the ids of the words that are said, or no words"
            raise BNetError(f"given[{name!r}]", expected=expected, got=values[name].tolist())


def _counted(network: Network, stack: str, extra: Mapping[str, object]) -> list[str] | None:
    """Numbers for words, where all that is said of a stack is the value of its given nodes."""
    for name, value in extra.items():
        family = network.member(name).family
        if isinstance(value, Tensor) and not is_plain(value):
            continue  # which is refused where it is read
        shape = tuple(getattr(value, "shape", ())) or np.asarray(value, dtype=object).shape
        if family.words == stack and len(shape) > len(family.plates):
            return [str(i) for i in range(shape[len(family.plates)])]
    return None


def _words(
    network: Network, stack: str, main: Member | None, said: object, x: object
) -> tuple[tuple[str, ...], Tensor | None]:
    """A stack's tokens, and the value of its main family."""
    where = f"sentence of stack {stack!r}" if stack else "sentence"
    image = main.tpm.image if main is not None else None
    if image is not None and said is not None:
        if isinstance(said, str) or x is not None:
            wanted = "an image [channel, row, column], or its words as vectors (x=)"
            raise BNetError(where, expected=wanted, got=shown(said) if x is None else "both")
        return image.tokens, image.read(_tensor("image", said, network.dtype, BNetError))
    tokens, ids = _tokens(network, stack, where, said)
    if x is not None:
        if main is None or main.tpm.reads_by_index:
            raise BNetError("x", expected="a net whose words are given as vectors", got=f"vectors for {where}")
        vectors = _tensor("x", x, network.dtype, BNetError)
        if not vectors.dim() or tuple(vectors.shape[1:]) != main.shape or not len(vectors):
            wanted = f"vectors of shape (words, {', '.join(map(str, main.shape))}), at least one word"
            raise BNetError("x", expected=wanted, got=f"shape {tuple(vectors.shape)}")
        tokens = tokens or tuple(str(i) for i in range(len(vectors)))
        if len(tokens) != len(vectors):
            raise BNetError(where, expected=f"{len(vectors)} words, as x has rows", got=f"{len(tokens)}")
        return tokens, vectors
    if not tokens:
        raise BNetError(where, expected="at least one word", got="none" if said is None else shown(said))
    if main is None:
        return tokens, None
    if main.tpm.reads_by_index:
        return tokens, _ids(network, main, where, tokens, ids)
    if len(main.shape) != 1:
        raise BNetError(where, expected=f"values of shape {main.shape} for each word (x=)", got=shown(said))
    if ids is not None:
        raise BNetError(where, expected="words or vectors (x=): the net has no vocabulary", got="ids")
    vectors = torch.stack([word_vector(token, main.shape[0], network.seed) for token in tokens])
    return tokens, vectors.to(network.dtype)


def _tokens(network: Network, stack: str, where: str, said: object) -> tuple[tuple[str, ...], list[int] | None]:
    """What was said as tokens, and as ids where it was ids."""
    if said is None:
        return (), None
    if isinstance(said, str):
        return tuple(said.split()), None
    if isinstance(said, Tensor | np.ndarray):
        try:
            said = (own_tensor(said) if isinstance(said, Tensor) else said).tolist()
        except TypeError as problem:
            raise BNetError(where, expected="text, a list of words, ids, or x=vectors", got=said) from problem
    if not isinstance(said, Sequence) or isinstance(said, bytes):
        raise BNetError(where, expected="text, a list of words, ids, or x=vectors", got=said)
    not_endless(where, said)
    if all(isinstance(word, str) for word in said):
        if any(not word for word in said):
            raise BNetError(where, expected="words, none empty", got=list(said))
        return tuple(said), None
    if not all(_is_index(word) for word in said):
        raise BNetError(where, expected="text, a list of words, ids, or x=vectors", got=said)
    ids = [int(word) for word in said]
    vocabulary = network.vocabularies.get(stack)
    named = [vocabulary[i] if vocabulary and 0 <= i < len(vocabulary) else str(i) for i in ids]
    return tuple(named), ids


def _ids(network: Network, main: Member, where: str, tokens: tuple[str, ...], ids: list[int] | None) -> Tensor:
    states = main.tpm.states or 0
    if ids is None:
        vocabulary = network.vocabularies.get(main.family.stack)
        if vocabulary is None:
            allowed = "from_pretrained(..., tokenizer=), for a model that came without one"
            raise BNetError(where, expected="ids: the net has no vocabulary", got=" ".join(tokens), allowed=allowed)
        place = {word: k for k, word in enumerate(vocabulary)}
        for token in tokens:
            if token not in place:
                raise unknown(f"word of the {where}", token, vocabulary)
        ids = [place[token] for token in tokens]
    for i in ids:
        if not 0 <= i < states:
            raise BNetError(where, expected=f"ids from 0 to {states - 1}", got=i)
    return torch.tensor(ids)


def _given(network: Network, member: Member, extra: Mapping[str, object], words: Mapping[str, int]) -> Tensor:
    family = member.family
    default = member.tpm.default
    if family.name not in extra and default is not None:
        lead = tuple(network.graph.sizes[plate] for plate in family.plates)
        return torch.full((*lead, *(() if family.words is None else (words[family.words],))), default)
    if family.name not in extra:
        raise BNetError(
            family.name,
            expected="a value, for it is given with the sentence",
            got="none",
            allowed=f"given={{{family.name!r}: ...}}",
        )
    plates = tuple(network.graph.sizes[plate] for plate in family.plates)
    shape = (*plates, *((words[family.words],) if family.words is not None else ()), *member.shape)
    value = extra[family.name]
    if member.tpm.reads_by_index:
        try:
            tensor = own_tensor(value)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise BNetError(family.name, expected="whole numbers", got=shown(value)) from problem
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise BNetError(family.name, expected="whole numbers", got=f"{tensor.dtype}")
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < (member.tpm.states or 0):
            raise BNetError(family.name, expected=f"states from 0 to {(member.tpm.states or 0) - 1}", got=value)
    else:
        tensor = _tensor(family.name, value, network.dtype, BNetError)
    if tuple(tensor.shape) != shape:
        raise BNetError(family.name, expected=f"a value of shape {shape}", got=f"shape {tuple(tensor.shape)}")
    return tensor


def check_reads(network: Network, words: Mapping[str, int]) -> None:
    """Every word that reads must have a word to read, and none may lie past the positions that were learned."""
    for member in network.members:
        family = member.family
        n = 1 if family.words is None else words[family.words]
        longest = member.tpm.longest
        if longest is not None and n > longest:
            raise BNetError(family.name, expected=f"at most {longest} words, its learned positions", got=f"{n} words")
        for given in member.inputs:
            parent = network.members[given.parent].family
            if parent.words is not None:
                given.reach.check(n, words[parent.words], f"{parent.name} -> {family.name}, ")
                empty = given.reach.idle(n, words[parent.words])
                if WORD in given.over and empty is not None and not member.tpm.may_read_nothing:
                    raise BNetError(
                        f"word {empty} of {family.name}",
                        expected=f"at least one word of {parent.name} to read",
                        got=f"none (reach {given.reach}, {words[parent.words]} words)",
                    )


def _state_of_label(network: Network, member: Member, name: str, label: str) -> int:
    """The state that a label names: one of the TPM's own labels, or a word of the stack's vocabulary."""
    labels = getattr(member.tpm, "labels", None)
    readout = member.family.step == network.graph.slices.get(member.family.stack) and member.tpm.kind == "discrete"
    if labels is None and (readout or member.tpm.kind == "input"):
        labels = network.vocabularies.get(member.family.stack)
    if labels is None or len(labels) != member.tpm.states:
        raise EvidenceError(name, expected="a state or a tensor: its states have no labels", got=label)
    if label not in labels:
        error: UnknownNameError = unknown("", label, labels)
        raise EvidenceError(name, expected="one of its labels", got=label, allowed=error.allowed)
    return tuple(labels).index(label)


def _is_index(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not (value.is_floating_point() or value.is_complex()) and value.dtype != torch.bool
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_ | np.ndarray | type)


def _index(name: str, value: object, wanted: str) -> int:
    if not _is_index(value):
        raise EvidenceError(name, expected=wanted, got=shown(value))
    return int(value)  # type: ignore[call-overload, no-any-return]


def _tensor(name: str, value: object, dtype: torch.dtype, error: type[BNetError]) -> Tensor:
    """A finite tensor of numbers."""
    try:
        tensor = own_tensor(value)
        if tensor.is_complex():
            raise TypeError("complex")
        tensor = tensor.to(dtype)
        finite = bool(torch.isfinite(tensor).all())
    except (TypeError, ValueError, RuntimeError) as problem:
        raise error(name, expected="real numbers", got=shown(value)) from problem
    if not finite:
        raise error(name, expected="finite numbers", got="NaN or infinity")
    return tensor
