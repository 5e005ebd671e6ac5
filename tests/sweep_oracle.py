"""The oracle of sweeps: one intervention at a time, node by node, by the reference."""

import itertools
from dataclasses import dataclass, replace

import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.data.do_values import Mean, Noise, Project, Scale, Set, Swap, Zero
from bnet_transformer.inference.plan import Obstacle
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.reference import AttentionRow

D = torch.float64
AXES = ("slice", "plates", "word", "read")


def rotate_words(net, text, stack=""):
    """Return a text of the same length: the words rotated, or new words except the last if the vocabulary is open."""
    if isinstance(text, dict):
        return {stack: rotate_words(net, words, stack) for stack, words in text.items()}
    if not isinstance(text, str):
        return [*text[1:], text[0]]
    first, *remainder = words = text.split()
    has_vocabulary = stack in net.network.vocabularies
    return " ".join(
        [*remainder, first] if has_vocabulary else ["dog", *(f"{word}s" for word in remainder[:-1]), *words[1:][-1:]]
    )


def make_pair(case, dtype=D):
    """A clean and a corrupt sentence of a case."""
    net = case.net.to(dtype)
    return net.sentence(rotate_words(net, case.text)), net.sentence(case.text)


def get_outputs(s):
    """The outcome at the first and at the last word."""
    nodes = s.ground.select_nodes(s.ground.template.by_name[find_default_output(s.net.network)]).tolist()
    return [s.ground.name(node) for node in dict.fromkeys((nodes[0], nodes[-1]))]


def nonlinear(*values):
    """Return a number for each example: a nonlinear function of the inputs of a metric."""
    flat = [value.flatten(1) for value in values]
    projections = [v @ torch.cos(torch.arange(v.shape[1], dtype=v.dtype) + k) for k, v in enumerate(flat)]
    return sum(torch.sin(p / 2) for p in projections) + projections[0] * projections[-1] / 20


def make_metric(names):
    """The nonlinear metric of these nodes."""
    parameters = ", ".join(names)
    return eval(f"lambda {parameters}: nonlinear({parameters})", {"nonlinear": nonlinear})


def forbid_shared_runs(monkeypatch):
    """Let each cell have a separate run."""
    monkeypatch.setattr(Examples, "find_obstacle", lambda *_: Obstacle("x_1", "in the way"))


def get_refusal(call, *arguments, **options):
    """Return the error message of a call, or an empty string if it succeeds."""
    try:
        call(*arguments, **options)
    except bt.BNetError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Oracle:
    """One example: the run of each sentence in each joint state of latent choices, and the outputs after surgery."""

    clean: bt.Sentence
    corrupt: bt.Sentence
    names: tuple[str, ...]

    def __post_init__(self):
        nodes = [self.corrupt.ground.id(name) for name in self.names]
        choices = set()
        for model in (self.clean.state.model, self.corrupt.state.model):
            choices |= set(
                reference.find_open_choices(model, range(len(model.ground)), {}, include_ancestors=True)
            ) - set(nodes)
        ancestors = set()
        for node in (*nodes, *choices):  # other discrete nodes have no effect on the outputs
            ancestors |= set(self.corrupt.ancestors(self.corrupt.ground.name(node)))
        choices = sorted(n for n in choices if self.corrupt.ground.name(n) in ancestors)
        sizes = [self.corrupt.state.model.count_states(n) for n in choices]
        states = [
            {n: torch.tensor(k) for n, k in zip(choices, at, strict=True)}
            for at in itertools.product(*map(range, sizes))
        ]
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "runs", [self._run_pair(at) for at in states])

    def _run_pair(self, states):
        return [reference.ReferenceRun(sentence.state.model, states) for sentence in (self.clean, self.corrupt)]

    def inputs(self, patch=lambda clean, corrupt: {}, base=1):
        """Return the inputs of a metric, one for each node: log P, or the mean or the value, averaged over P(choices).

        `patch(clean run, corrupt run)` returns the values to set in the corrupt sentence (or in the clean one:
        `base=0`).
        """
        log_probs, outputs, patched = [], [], None
        for pair in self.runs:
            patches, (model, states) = patch(*pair), (pair[base].model, pair[base].states)
            patched = patched or model.surgery(patches)
            run = reference.ReferenceRun(
                with_values(patched, patches), {n: state for n, state in states.items() if n not in patches}
            )
            log_probs.append(
                sum((self._log_prob(node, run, pair[1 - base]) for node in self.choices), torch.zeros((), dtype=D))
            )
            outputs.append([self._get_output(run, node) for node in self.nodes])
        weights = torch.stack(log_probs).softmax(0)
        mixed = []
        for node, states in zip(self.nodes, zip(*outputs, strict=True), strict=True):
            values = torch.stack(states).to(D)
            is_log = self._kind(node) == "discrete"
            mean = torch.einsum("s,s...->...", weights, values.exp() if is_log else values)
            mixed.append(mean.log() if is_log else mean)
        return [states[None] for states in mixed]

    def evaluate(self, patch=lambda clean, corrupt: {}, base=1):
        """The nonlinear metric of one intervention."""
        return float(nonlinear(*self.inputs(patch, base)))

    def _kind(self, node):
        model = self.corrupt.state.model
        return model.network.specs[model.ground.group_of(node).index].tpm.kind

    def _log_prob(self, node, run, other):
        """Return the log probability of a choice in a run, or in the other run if only this run sets it."""
        run_where_open = next((candidate for candidate in (run, other) if node not in candidate.model.do), None)
        return torch.zeros((), dtype=D) if run_where_open is None else run_where_open.log_prob(node)

    def _get_output(self, run, node):
        if self._kind(node) == "deterministic" or node in run.model.do:
            return run.value(node)
        distribution = run.distribution(node)
        return distribution.logits if self._kind(node) == "discrete" else distribution.mean


class AblatedValues:
    """The values that an ablation sets instead of those of a run; `other` is the run of the sentence of a swap."""

    def __init__(self, run, ablation, other=None):
        self.run, self.ablation, self.other = run, ablation, other

    def value(self, node):
        ground, ablation = self.run.model.ground, self.ablation
        name = ground.name(node)
        group, index = ground.unravel_index(node)
        if isinstance(ablation, Mean) and ablation.sentences:
            return torch.stack([sentence[name] for sentence in ablation.sentences]).mean(0)
        if isinstance(ablation, Mean):
            words = range(ground.word_counts[group.word_stack])
            return torch.stack([self.run.value(node - index[-1] + word) for word in words]).mean(0)
        value = self.run.value(node)
        match ablation:
            case Zero():
                return torch.zeros_like(value)
            case Noise():
                return value + ablation.get_constant(name, value)
            case Scale():
                return ablation.factor * value
            case Project() | Set() | Swap():  # of entries
                is_within = torch.zeros(value.numel(), dtype=torch.bool)
                is_within[ablation.basis] = True
                target = torch.zeros_like(value) if isinstance(ablation, Project) else ablation.target
                target = self.other.value(node) if isinstance(ablation, Swap) else target
                return torch.where(is_within.reshape(value.shape), target, value)
        return ablation(value)


def with_values(model, patches):
    """A ground model after surgery, with other values at the nodes that are set."""
    rows = {node: patch.weights for node, patch in patches.items() if isinstance(patch, AttentionRow)}
    values = {node: patch for node, patch in patches.items() if node not in rows}
    return replace(model, do={**model.do, **values}, attention_rows={**model.attention_rows, **rows})


def set_values(nodes):
    """Set the clean values of these nodes in the corrupt run."""
    return lambda clean, corrupt: {node: clean.value(node) for node in nodes}


def set_rows(nodes, words=None):
    """Set the clean rows P(j | i) of these nodes in the corrupt run, or only their attention to these words."""

    def patch(clean, corrupt):
        patches = {}
        for node in nodes:
            (words_read, clean_row), (peer_words, corrupt_row) = clean.attention(node), corrupt.attention(node)
            assert words_read == peer_words
            spec = clean.model.network.specs[clean.model.ground.group_of(node).index]
            value_parent = next(parent for parent in spec.parents if parent.slot == "v.")
            stack = clean.model.network.specs[value_parent.index].group.word_stack
            row = torch.zeros(clean.model.ground.word_counts[stack], dtype=clean_row.dtype)
            for word, new, old in zip(words_read, clean_row, corrupt_row, strict=True):
                row[word] = new if words is None or word in words else old
            patches[node] = AttentionRow(row)
        return patches

    return patch


def patch_path(*nodes):
    """Return the clean value of the first node propagated only along this path: the value to set at the last node.

    Each child is computed with the propagated value of its parent, and with all its other parents as in the corrupt
    run.
    """

    def patch(clean, corrupt):
        carried = clean.value(nodes[0])
        for parent, child in itertools.pairwise(nodes):
            corrupt.value(child)
            run = reference.ReferenceRun(corrupt.model, corrupt.states)
            run.values = {**corrupt.values, parent: carried}
            carried = run._compute_value(child)
        return {nodes[-1]: carried}

    return patch


def get_axes(s, role):
    """The axes of the sweep of a role: slice, plates, word."""
    group = s.ground.template.by_stem[role][0]
    return (("slice",) if group.slice is not None else ()) + s.ground.axes(group)


def get_cells(s, role, over=None):
    """Return for each index of the sweep of a role the nodes that are set together."""
    groups, axes = s.ground.template.by_stem[role], get_axes(s, role)
    slices = [group.slice for group in groups]
    result = {}
    for group in groups:
        for node in s.ground.select_nodes(group).tolist():
            index = s.ground.unravel_index(node)[1]
            position = dict(zip(axes, (slices.index(group.slice), *index) if "slice" in axes else index, strict=True))
            if "group" in axes and over is not None and "group" not in over and "head" in over:  # over all groups
                heads = s.ground.shapes[group.index][axes.index("head") - ("slice" in axes)]
                position["head"] += heads * position["group"]
            result.setdefault(tuple(position[axis] for axis in (axes if over is None else over)), []).append(node)
    return result


def get_arrows(s, first, last):
    """Return the two nodes of each arrow between roles, by slice, plates, word of the child and attended word."""
    ground, result = s.ground, {}
    for group in ground.template.by_stem[last]:
        parents = s.net.network.specs[group.index].parents
        for node in ground.select_nodes(group).tolist():
            target = dict(zip(ground.axes(group), ground.unravel_index(node)[1], strict=True))
            for parent in ground.parents(node):
                above, index = ground.unravel_index(parent)
                if above.stem == first:
                    source = dict(zip(ground.axes(above), index, strict=True))
                    plates = [{**source, **target}[p] for p in dict.fromkeys((*group.plates, *above.plates))]
                    between = any(p.reach.kind != "same" for p in parents if p.index == above.index)
                    between |= WORD not in target or above.word_stack != group.word_stack
                    slice_index = [] if group.slice is None else [group.slice]
                    child_word = [target[WORD]] if WORD in target else []
                    word_read = [source[WORD]] if between and WORD in source else []
                    result[*slice_index, *plates, *child_word, *word_read] = parent, node
    return result


def by_index(result, positions):
    """Convert values by position to values by index of the result, whose axes contain only positions with a cell."""
    return {
        tuple(result.positions[axis].index(k) for axis, k in zip(result.axes, position, strict=True)): value
        for position, value in positions.items()
    }
