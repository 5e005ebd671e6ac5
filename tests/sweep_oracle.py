"""The slow oracle of sweeps: one intervention at a time, node by node, by the reference."""

import itertools
from dataclasses import dataclass, replace

import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.reference import AttentionRow

D = torch.float64
AXES = ("slice", "plates", "word", "read")


def rotate_words(net, text, stack=""):
    """Other words for a sentence, as many: its own turned round; new ones but the last, where any may be said."""
    if isinstance(text, dict):
        return {stack: rotate_words(net, words, stack) for stack, words in text.items()}
    if not isinstance(text, str):
        return [*text[1:], text[0]]
    first, *remainder = words = text.split()
    known = stack in net.network.vocabularies
    return " ".join(
        [*remainder, first] if known else ["dog", *(f"{word}s" for word in remainder[:-1]), *words[1:][-1:]]
    )


def make_pair(item, dtype=D):
    """A clean and a corrupt sentence of a case."""
    net = item.net.to(dtype)
    return net.sentence(rotate_words(net, item.text)), net.sentence(item.text)


def get_outputs(s):
    """The outcome at the first and at the last word."""
    nodes = s.ground.select_nodes(s.ground.template.by_name[find_default_output(s.net.network)]).tolist()
    return [s.ground.name(node) for node in dict.fromkeys((nodes[0], nodes[-1]))]


def nonlinear(*values):
    """A number for each example that is no linear function of what a metric is told."""
    flat = [value.flatten(1) for value in values]
    weighed = [v @ torch.cos(torch.arange(v.shape[1], dtype=v.dtype) + k) for k, v in enumerate(flat)]
    return sum(torch.sin(w / 2) for w in weighed) + weighed[0] * weighed[-1] / 20


def make_metric(names):
    """The nonlinear metric of these nodes."""
    given = ", ".join(names)
    return eval(f"lambda {given}: nonlinear({given})", {"nonlinear": nonlinear})


def get_refusal(call, *arguments, **options):
    """The message by which a call is refused; empty where it is not."""
    try:
        call(*arguments, **options)
    except bt.BNetError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Oracle:
    """One example: the run of each sentence in each joint state of the open choices, and what surgery makes of it."""

    clean: bt.Sentence
    corrupt: bt.Sentence
    names: tuple[str, ...]

    def __post_init__(self):
        nodes = [self.corrupt.ground.id(name) for name in self.names]
        result = set()
        for world in (self.clean.state.model, self.corrupt.state.model):
            result |= set(
                reference.find_open_choices(world, range(len(world.ground)), {}, include_ancestors=True)
            ) - set(nodes)
        above = set()
        for node in (*nodes, *result):  # of the other discrete nodes, those that nothing told hangs on are left out
            above |= set(self.corrupt.ancestors(self.corrupt.ground.name(node)))
        result = sorted(n for n in result if self.corrupt.ground.name(n) in above)
        sizes = [self.corrupt.state.model.count_states(n) for n in result]
        states = [
            {n: torch.tensor(k) for n, k in zip(result, at, strict=True)}
            for at in itertools.product(*map(range, sizes))
        ]
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "free", result)
        object.__setattr__(self, "runs", [self._both(at) for at in states])

    def _both(self, states):
        return [reference.ReferenceRun(item.state.model, states) for item in (self.clean, self.corrupt)]

    def inputs(self, patch=lambda clean, corrupt: {}, base=1):
        """What a metric is told of each node: log P, or the mean or the value, averaged over P(choices).

        `patch(clean run, corrupt run)` says what is set, in the corrupt sentence (or in the clean one: `base=0`).
        """
        logs, result, graph = [], [], None
        for both in self.runs:
            done, (world, states) = patch(*both), (both[base].model, both[base].states)
            graph = graph or world.surgery(done)
            run = reference.ReferenceRun(
                with_values(graph, done), {n: state for n, state in states.items() if n not in done}
            )
            logs.append(
                sum((self._log_prob(node, run, both[1 - base]) for node in self.free), torch.zeros((), dtype=D))
            )
            result.append([self._of(run, node) for node in self.nodes])
        share = torch.stack(logs).softmax(0)
        given = []
        for node, item in zip(self.nodes, zip(*result, strict=True), strict=True):
            stacked = torch.stack(item).to(D)
            log = self._kind(node) == "discrete"
            mixed = torch.einsum("s,s...->...", share, stacked.exp() if log else stacked)
            given.append(mixed.log() if log else mixed)
        return [item[None] for item in given]

    def evaluate(self, patch=lambda clean, corrupt: {}, base=1):
        """The nonlinear metric of one intervention."""
        return float(nonlinear(*self.inputs(patch, base)))

    def _kind(self, node):
        world = self.corrupt.state.model
        return world.network.specs[world.ground.group_of(node).index].tpm.kind

    def _log_prob(self, node, run, other):
        """The log probability of a choice in a run; in the other one, if it is set in this one alone."""
        open_in = next((item for item in (run, other) if node not in item.model.do), None)
        return torch.zeros((), dtype=D) if open_in is None else open_in.log_prob(node)

    def _of(self, run, node):
        if self._kind(node) == "deterministic" or node in run.model.do:
            return run.value(node)
        result = run.distribution(node)
        return result.logits if self._kind(node) == "discrete" else result.mean


def with_values(graph, done):
    """A sentence after surgery, with other values for what was set."""
    rows = {node: item.weights for node, item in done.items() if isinstance(item, AttentionRow)}
    values = {node: item for node, item in done.items() if node not in rows}
    return replace(graph, do={**graph.do, **values}, attention_rows={**graph.attention_rows, **rows})


def set_values(nodes):
    """The clean values of these nodes put into the corrupt run."""
    return lambda clean, corrupt: {node: clean.value(node) for node in nodes}


def set_rows(nodes, words=None):
    """The clean rows P(j | i) of these nodes put into the corrupt run; or only how much they read these words."""

    def patch(clean, corrupt):
        done = {}
        for node in nodes:
            (present, new), (same, old) = clean.attention(node), corrupt.attention(node)
            assert present == same
            member = clean.model.network.specs[clean.model.ground.group_of(node).index]
            given = next(item for item in member.parents if item.slot == "v.")
            stack = clean.model.network.specs[given.index].group.word_stack
            row = torch.zeros(clean.model.ground.word_counts[stack], dtype=new.dtype)
            for word, actual, local in zip(present, new, old, strict=True):
                row[word] = actual if words is None or word in words else local
            done[node] = AttentionRow(row)
        return done

    return patch


def patch_path(*nodes):
    """The clean value of the first node carried along this path alone: what its last node is set to.

    Each child is computed with the value so far in place of its parent's, all its other parents as in the corrupt run.
    """

    def patch(clean, corrupt):
        carried = clean.value(nodes[0])
        for parent, child in itertools.pairwise(nodes):
            corrupt.value(child)
            single = reference.ReferenceRun(corrupt.model, corrupt.states)
            single.values = {**corrupt.values, parent: carried}
            carried = single._compute_value(child)
        return {nodes[-1]: carried}

    return patch


def get_axes(s, role):
    """The axes of the sweep of a role: slice, plates, word."""
    family = s.ground.template.by_stem[role][0]
    return (("slice",) if family.slice is not None else ()) + s.ground.axes(family)


def get_cells(s, role, over=None):
    """For each index of the sweep of a role, the nodes that are set together."""
    families, axes = s.ground.template.by_stem[role], get_axes(s, role)
    slices = [family.slice for family in families]
    result = {}
    for family in families:
        for node in s.ground.select_nodes(family).tolist():
            index = s.ground.unravel_index(node)[1]
            full = dict(zip(axes, (slices.index(family.slice), *index) if "slice" in axes else index, strict=True))
            result.setdefault(tuple(full[axis] for axis in (axes if over is None else over)), []).append(node)
    return result


def get_arrows(s, first, last):
    """For each place of an arrow between roles, its two nodes: slice, plates, word (the child's), word read."""
    ground, result = s.ground, {}
    for family in ground.template.by_stem[last]:
        inputs = s.net.network.specs[family.index].parents
        for node in ground.select_nodes(family).tolist():
            local = dict(zip(ground.axes(family), ground.unravel_index(node)[1], strict=True))
            for parent in ground.parents(node):
                above, index = ground.unravel_index(parent)
                if above.stem == first:
                    peer = dict(zip(ground.axes(above), index, strict=True))
                    plates = [{**peer, **local}[p] for p in dict.fromkeys((*family.plates, *above.plates))]
                    separate = any(given.reach.kind != "same" for given in inputs if given.index == above.index)
                    read = WORD in peer and (WORD not in local or above.word_stack != family.word_stack or separate)
                    at = [] if family.slice is None else [family.slice]
                    words = [local[WORD]] if WORD in local else []
                    result[*at, *plates, *words, *([peer[WORD]] if read else [])] = parent, node
    return result


def by_index(result, positions):
    """What is told by place, by the index of the result: along each axis stand only places where there is a cell."""
    return {
        tuple(result.positions[axis].index(k) for axis, k in zip(result.axes, at, strict=True)): item
        for at, item in positions.items()
    }
