"""The oracle of edges, node by node, by the reference.

What one reader sees is computed from its writers: each of them has its value in the run that the caller names for this
edge. The nodes of the reader are then set to the value computed from it, in a second run.
"""

import torch

from bnet_transformer import reference
from bnet_transformer.interventions.edges import READOUT
from tests.sweep_oracle import AblatedValues


class ReaderView(reference.ReferenceRun):
    """What one reader sees: `choose(w, unit)` is the run in which a writer has its value."""

    def __init__(self, base, structure, choose):
        super().__init__(base.model, base.states)
        self.base, self.structure, self.choose = base, structure, choose

    def _compute_value(self, node):
        spec, index = reference.locate_node(self.model, node)
        w = self.structure.writer_index.get(spec.group.index)
        linear = self.structure.get_linear_positions(spec)
        if w is None and not linear:
            return self.base.value(node)
        if w is not None:
            run = self.choose(w, self.structure.list_units(spec).index(index[: len(spec.group.plates)]))
            if not linear:
                return run.value(node)
        context, *arguments = self.arguments(spec, index, linear)
        value = spec.tpm.value(context, *arguments)
        if w is not None:  # the writer is what the group adds to its linear slots
            value = value + compute_part(run, spec, index, linear) - compute_part(self.base, spec, index, linear)
        return value

    def arguments(self, spec, index, slots):
        """The arguments of a TPM: these slots as the reader sees them, the others in the base run."""
        context, *base = self.base._tpm_arguments(spec, index)
        _, *visible = self._tpm_arguments(spec, index)
        return context, *(s if k in slots else b for k, (b, s) in enumerate(zip(base, visible, strict=True)))


def compute_part(run, spec, index, linear):
    """The value of a node with its linear slots set to zero."""
    arguments_of = run.arguments if isinstance(run, CircuitRun) else run._tpm_arguments
    context, *arguments = arguments_of(spec, index)
    return spec.tpm.value(context, *(torch.zeros_like(a) if k in linear else a for k, a in enumerate(arguments)))


def get_outcome(distribution):
    """The outcome of a random node: log probabilities, or the mean."""
    return distribution.logits if hasattr(distribution, "logits") else distribution.mean


def run_edge(base_model, other_model, structure, edge, nodes, word=None):
    """The outcomes of some nodes with one edge set; at one word of the reader, or at all."""
    base, other = (reference.ReferenceRun(model, {}) for model in (base_model, other_model))
    table = structure.edges
    reader = structure.reader_groups[table.readers[edge]]
    changed = int(table.writers[edge]), int(table.writer_units[edge])
    view = ReaderView(base, structure, lambda w, unit: other if (w, unit) == changed else base)
    spec, ground = reader.target, base_model.ground
    unit = structure.list_units(spec)[table.reader_units[edge]]
    final, outcomes = reference.ReferenceRun(base_model, {}), {}
    for node in ground.select_nodes(spec.group).tolist():
        _, index = ground.unravel_index(node)
        is_at_word = word is None or spec.group.word_stack is None or index[-1] == word
        if index[: len(unit)] != unit or not is_at_word or node in base_model.do:
            continue
        context, *arguments = view.arguments(spec, index, reader.slots)
        if reader.channel != READOUT:
            final.values[node] = spec.tpm.value(context, *arguments)
        elif node in nodes:  # only the metric sees it
            is_random = spec.tpm.is_random
            value = get_outcome(spec.tpm.distribution(context, *arguments)) if is_random else None
            outcomes[node] = value if is_random else spec.tpm.value(context, *arguments)
    return [outcomes[node] if node in outcomes else _read(final, node) for node in nodes]


def _read(run, node):
    spec, _ = reference.locate_node(run.model, node)
    return get_outcome(run.distribution(node)) if spec.tpm.is_random and node not in run.model.do else run.value(node)


class CircuitRun(reference.ReferenceRun):
    """The run of a circuit: along a retained edge a reader sees the writer in this run, else in the corrupt run.

    With an ablation, a reader sees the ablated writer of an edge that is left out.
    """

    def __init__(self, clean_model, corrupt_model, structure, retained, ablation=None):
        super().__init__(clean_model, {})
        self.corrupt, self.structure = reference.ReferenceRun(corrupt_model, {}), structure
        self.left_out = self.corrupt if ablation is None else AblatedValues(self, ablation, self.corrupt)
        table = structure.edges
        columns = zip(table.readers, table.reader_units, table.writers, table.writer_units, strict=True)
        self.retained = {tuple(map(int, row)) for row, flag in zip(columns, retained, strict=True) if flag}

    def view(self, r, unit):
        """What a reader sees."""

        def choose(w, writer_unit):
            return self if (r, unit, w, writer_unit) in self.retained else self.left_out

        return ReaderView(self.corrupt, self.structure, choose)

    def arguments(self, spec, index):
        """The arguments of a TPM, each slot as its reader sees it."""
        structure = self.structure
        unit = structure.list_units(spec).index(index[: len(spec.group.plates)])
        readers = [r for r, part in enumerate(structure.reader_groups) if part.target.group.index == spec.group.index]
        visible = {k for r in readers for k in structure.reader_groups[r].slots}
        names = tuple(p.slot for k, p in enumerate(spec.parents) if k not in visible)
        context, *arguments = (
            self._tpm_arguments(spec, index, names) if not visible else self.corrupt._tpm_arguments(spec, index)
        )
        if visible:
            for k, parent in enumerate(spec.parents):
                if k not in visible:
                    _, *values = self._tpm_arguments(spec, index, (parent.slot,))
                    arguments[k] = values[k]
        for r in readers:
            _, *visible = self.view(r, unit)._tpm_arguments(spec, index)
            for k in structure.reader_groups[r].slots:
                arguments[k] = visible[k]
        return context, *arguments

    def _compute_value(self, node):
        spec, index = reference.locate_node(self.model, node)
        if node in self.model.do or spec.tpm.kind == "input" or spec.tpm.is_random:
            return super()._compute_value(node)
        return spec.tpm.value(*self.arguments(spec, index))

    def value(self, node):
        if node not in self.values:
            self.values[node] = self._compute_value(node)
        return self.values[node]

    def get_outcomes(self, nodes):
        """The outcomes of some nodes."""
        outcomes = []
        for node in nodes:
            spec, index = reference.locate_node(self.model, node)
            if spec.tpm.is_random and node not in self.model.do:
                outcomes.append(get_outcome(spec.tpm.distribution(*self.arguments(spec, index))))
            else:
                outcomes.append(self.value(node))
        return outcomes
