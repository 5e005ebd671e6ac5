"""The oracle of edges: one edge by hand, node by node, by the reference.

The state that one reader sees is computed from its writers: all writers have their values in the base run, except one
node, whose value comes from the other run. The reader's nodes are then set to the value computed from this state, in a
second run.
"""

import torch

from bnet_transformer import reference


class ReaderView(reference.ReferenceRun):
    """What one reader sees: a run in which all writers are fixed, and one of them is that of the other run."""

    def __init__(self, base, other, structure, writer, unit):
        super().__init__(base.model, base.states)
        self.base, self.other, self.structure, self.changed = base, other, structure, (writer, unit)

    def _compute_value(self, node):
        spec, index = reference.locate_node(self.model, node)
        w = self.structure.writer_index.get(spec.group.index)
        plates = index[: len(spec.group.plates)]
        is_changed = w == self.changed[0] and self.structure.list_units(spec).index(plates) == self.changed[1]
        if node in self.model.do and node in self.other.model.do and not self.structure.leaves:
            return self.base.value(node)
        if w is not None and not self.structure.writer_groups[w].is_part:
            return (self.other if is_changed else self.base).value(node)
        if not self.structure.get_linear_positions(spec):
            return self.base.value(node)
        context, *arguments = self.arguments(spec, index, self.structure.get_linear_positions(spec))
        value = spec.tpm.value(context, *arguments)
        if w is not None and is_changed:
            value = value + self.own_part(self.other, spec, index) - self.own_part(self.base, spec, index)
        return value

    def own_part(self, run, spec, index):
        """The value with the linear slots set to zero."""
        context, *arguments = run._tpm_arguments(spec, index)
        linear = self.structure.get_linear_positions(spec)
        return spec.tpm.value(context, *(torch.zeros_like(a) if k in linear else a for k, a in enumerate(arguments)))

    def arguments(self, spec, index, slots):
        """The arguments of a TPM: these slots as the reader sees them, the others in the base run."""
        context, *base = self.base._tpm_arguments(spec, index)
        _, *seen = self._tpm_arguments(spec, index)
        return context, *(s if k in slots else b for k, (b, s) in enumerate(zip(base, seen, strict=True)))


def get_outcome(run, node):
    """The outcome of a node: log probabilities, a mean, or a value."""
    spec, _ = reference.locate_node(run.model, node)
    if not spec.tpm.is_random or node in run.model.do:
        return run.value(node)
    distribution = run.distribution(node)
    return distribution.logits if hasattr(distribution, "logits") else distribution.mean


def run_edge(base_model, other_model, structure, edge, nodes, word=None):
    """The outcomes of some nodes with one edge set by hand; at one word of the reader, or at all."""
    base, other = (reference.ReferenceRun(model, {}) for model in (base_model, other_model))
    table = structure.edges
    reader = structure.reader_groups[table.readers[edge]]
    view = ReaderView(base, other, structure, int(table.writers[edge]), int(table.writer_units[edge]))
    spec, ground = reader.target, base_model.ground
    unit = structure.list_units(spec)[table.reader_units[edge]]
    final = reference.ReferenceRun(base_model, {})
    outcomes = {}
    for node in ground.select_nodes(spec.group).tolist():
        _, index = ground.unravel_index(node)
        at_word = word is None or spec.group.word_stack is None or index[-1] == word
        if index[: len(unit)] != unit or not at_word or node in base_model.do:
            continue
        context, *arguments = view.arguments(spec, index, reader.slots)
        if not spec.tpm.is_random:
            final.values[node] = spec.tpm.value(context, *arguments)
        elif node in nodes:
            distribution = spec.tpm.distribution(context, *arguments)
            outcomes[node] = distribution.logits if hasattr(distribution, "logits") else distribution.mean
    return [outcomes[node] if node in outcomes else get_outcome(final, node) for node in nodes]
