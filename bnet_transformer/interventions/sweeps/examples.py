"""Examples: sentences of one net and one length that are computed as one batch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.result_comparison import digest_words
from bnet_transformer._core.saved_results import Fields, register_codec
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.errors import BNetError, EvidenceError, UnsupportedError
from bnet_transformer.inference.query import build_length_inputs, group_interventions
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import GroundModel

DEFAULT_MEMORY = 2**29  # the default number of bytes that are used at once
Overrides = Mapping[int, tuple[Tensor, Tensor]]  # values `[example, *plates, word, *shape]`, and masks, by group


def get_sentence_state(sentence: object) -> SentenceState | None:
    """The state of a sentence; None if the object is not a sentence."""
    state = getattr(sentence, "state", None)
    return state if isinstance(state, SentenceState) else None


@dataclass(frozen=True)
class Examples:
    """Sentences of one net that can be one batch: they have the same numbers of words and the same set nodes.

    Args:
        module: The compiled net.
        models: The ground model of each sentence.
        tokens: The tokens of each sentence, by stack.
        special: The indices of the special tokens of each sentence, by stack.
    """

    module: CompiledModule
    models: tuple[GroundModel, ...]
    tokens: tuple[Mapping[str, Sequence[str]], ...]
    special: tuple[Mapping[str, Sequence[int]], ...] = ()

    @property
    def model(self) -> GroundModel:
        """The first sentence; all sentences have the same names, arrows and word counts."""
        return self.models[0]

    def __len__(self) -> int:
        return len(self.models)

    @property
    def digests(self) -> tuple[str, ...]:
        """A digest of the words of each sentence."""
        special = self.special or ({},) * len(self)
        return tuple(map(digest_words, self.tokens, special))

    def digest_pairs(self, partners: Examples | None) -> tuple[str, ...]:
        """A digest of the words of each sentence and of its partner; empty if the words of one are unknown."""
        if partners is None:
            return self.digests
        pairs = zip(self.digests, partners.digests, strict=True)
        return tuple(f"{one}/{other}" if one and other else "" for one, other in pairs)

    def with_choices(self, states: Mapping[int, Tensor]) -> Examples:
        """The same sentences with their latent choices set to these states."""
        if not states:
            return self
        open_states = {node: state for node, state in states.items() if node not in self.model.do}
        return replace(self, models=tuple(model.surgery(open_states) for model in self.models))

    def split(self, size: int) -> Iterator[Examples]:
        """Split the sentences, in order, into parts of `size`."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield replace(self, models=self.models[part], tokens=self.tokens[part], special=self.special[part])

    def run(
        self,
        groups: Collection[int],
        record_attention: Collection[int] = (),
        perturbations: Mapping[int, Tensor] | None = None,
        overrides: Overrides | None = None,
    ) -> ExecutionState:
        """Run all sentences in one batch. No group may depend on a latent choice; `routing` excludes such groups.

        Args:
            groups: The node groups whose values are recorded, `[1 or N, *plates, word, *shape]`.
            record_attention: The node groups whose attention `P(j | i)` is recorded.
            perturbations: Zeros that are added to the values of some groups, so that they have a gradient.
            overrides: Values that replace those of some nodes, and the masks of these nodes, by group.

        Returns:
            The state of the execution, with the values and the attention.
        """
        graph = self.model.network.graph
        names = tuple(graph.groups[index].name for index in sorted(groups))
        ancestors = {*groups, *record_attention, *graph.ancestors([*groups, *record_attention])}
        interventions = [group_interventions(model, ancestors) for model in self.models]
        do_values = {name: torch.cat([item["do"][name] for item in interventions]) for name in interventions[0]["do"]}
        patched = _stack_sentences([item["patched"] for item in interventions])
        for index, (values, mask) in (overrides or {}).items():
            if index in ancestors:
                _override_values(graph.groups[index].name, values, mask, do_values, patched)
        request = ExecutionRequest(
            names,
            build_length_inputs(self.model),
            do=do_values,
            patched=patched,
            attention_rows=_stack_sentences([item["attention_rows"] for item in interventions]),
            given={name: torch.stack([model.inputs[name] for model in self.models]) for name in self.model.inputs},
            record_attention=frozenset(record_attention),
            perturbations=perturbations,
            training=False,
        )
        with torch.set_grad_enabled(bool(perturbations)):
            state, plan = self.module.run(request)
        if plan.enumerated:
            name = graph.groups[plan.enumerated[0]].name
            raise UnsupportedError(f"{name} is a latent choice, which one run cannot compute", hint=f"Set {name} by do")
        return state


def _override_values(
    name: str, values: Tensor, mask: Tensor, do: dict[str, Tensor], patched: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Replace the values of some nodes of a group in the values that `do` sets, or set these nodes."""
    selected = mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))
    if name in do:
        do[name] = torch.where(selected, values.to(do[name].dtype), do[name])
    elif name in patched:
        before, was_set = patched[name]
        patched[name] = torch.where(selected, values, before), mask | was_set
    else:
        patched[name] = values, mask


def _stack_sentences(by_sentence: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Concatenate the values of groups, and the masks of the nodes that are set, along the sentences."""
    columns = {name: zip(*(tensors[name] for tensors in by_sentence), strict=True) for name in by_sentence[0]}
    return {name: (torch.cat(values), torch.cat(masks)) for name, (values, masks) in columns.items()}


def get_batch_key(model: GroundModel) -> Hashable:
    """The key that sentences of one batch share: word counts, and the shapes of the nodes that are set or given."""
    values = [*model.do.items(), *model.inputs.items()]
    shapes = frozenset((key, value.shape, value.dtype) for key, value in values)
    return tuple(model.ground.word_counts.items()), frozenset(model.attention_rows), shapes


def parse_examples(subject: str, sentences: object) -> Examples:
    """Validate one sentence, or a list of them, as the examples of one batch."""
    items: list[Any] = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
    states = [state for item in items if (state := get_sentence_state(item)) is not None]
    if not states or len(states) < len(items):
        actual = next((item for item in items if get_sentence_state(item) is None), items)
        raise BNetError(subject, expected="a Sentence, or a list of sentences", actual=actual)
    first = states[0]
    for k, item in enumerate(states):
        name = f"{subject}[{k}]" if isinstance(sentences, list | tuple) else subject
        if item.model.network is not first.model.network:
            raise BNetError(
                name, expected="a sentence of the same net as the first", actual="a sentence of another net"
            )
        if item.model.ground.word_counts != first.model.ground.word_counts:
            expected = f"a sentence of {_format_word_counts(first.model)}, like {subject}[0]"
            raise BNetError(name, expected=expected, actual=_format_word_counts(item.model))
        if item.evidence:
            observed = ", ".join(item.model.ground.name(node) for node in item.evidence)
            expected, hint = "a sentence without evidence", "Use do() to set a node"
            raise EvidenceError(name, expected=expected, actual=f"evidence on {observed}", hint=hint)
        if get_batch_key(item.model) != get_batch_key(first.model):
            expected = f"interventions on the same nodes as in {subject}[0]"
            hint = "Set the same nodes in each sentence, or pass the sentences in separate calls"
            raise BNetError(name, expected=expected, hint=hint)
    special = tuple(s.encoded.find_special_words(s.network) for s in states)
    return Examples(first.module, tuple(s.model for s in states), tuple(s.tokens for s in states), special)


def parse_example_pair(clean: object, corrupt: object, *, has_alignment: bool = False) -> tuple[Examples, Examples]:
    """Validate the clean and the corrupt sentences: equally many, of one net and, without an alignment, one length."""
    clean_examples, corrupt_examples = parse_examples("clean", clean), parse_examples("corrupt", corrupt)
    if len(clean_examples) != len(corrupt_examples):
        expected = f"as many sentences as clean, {len(clean_examples)}"
        raise BNetError("corrupt", expected=expected, actual=len(corrupt_examples))
    clean_model, corrupt_model = clean_examples.model, corrupt_examples.model
    if clean_model.network is not corrupt_model.network:
        raise BNetError("corrupt", expected="sentences of the same net as clean", actual="sentences of another net")
    if clean_model.ground.word_counts != corrupt_model.ground.word_counts and not has_alignment:
        expected = f"sentences of {_format_word_counts(clean_model)}, like clean"
        hint = "Or align words in a sweep: words={word: word of the other sentence}"
        raise BNetError("corrupt", expected=expected, actual=_format_word_counts(corrupt_model), hint=hint)
    return clean_examples, corrupt_examples


def has_difference(first: Examples, second: Examples) -> bool:
    """True if the inputs, the set values or the set rows of attention differ in some pair of examples."""
    for one, other in zip(first.models, second.models, strict=True):
        for name in ("inputs", "do", "attention_rows"):
            values, peer_values = getattr(one, name), getattr(other, name)
            is_same = values.keys() == peer_values.keys()
            if not is_same or any(not torch.equal(values[key], peer_values[key]) for key in values):
                return True
    return False


def _format_word_counts(model: GroundModel) -> str:
    """The number of words of each stack, as text."""
    return " and ".join(
        f"{count} words" + (f" ({stack})" if stack else "") for stack, count in model.ground.word_counts.items()
    )


def _to_fields(examples: Examples) -> Fields:
    """The sentences without the compiled net, which their net determines."""
    tokens, special = (tuple(map(dict, values)) for values in (examples.tokens, examples.special))
    return {"models": examples.models, "tokens": tokens, "special": special}


def _from_fields(fields: Fields) -> Examples:
    """The sentences of `_to_fields`."""
    models = fields["models"]
    return Examples(CompiledModule(models[0].network).eval(), models, fields["tokens"], fields["special"])


STORED_TYPES = {
    "models": tuple[GroundModel, ...],
    "tokens": tuple[Mapping[str, Sequence[str]], ...],
    "special": tuple[Mapping[str, Sequence[int]], ...],
}
register_codec(Examples, _to_fields, lambda fields, trust: _from_fields(fields), STORED_TYPES)
