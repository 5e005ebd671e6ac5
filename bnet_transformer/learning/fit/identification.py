"""What the likelihood does not identify: the gauge of attention, bases of hidden vectors, the order of heads and atoms.

A basis is free if every map into the vectors and out of them is a learned matrix: an orthogonal matrix R maps the
matrices `W` into the vectors to `R W`, those out of them to `W R^T`, and neither the likelihood nor a Normal prior
changes. `find_free_bases` finds the free bases in the declaration.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import (
    Activation,
    Add,
    Affine,
    Attention,
    Bilinear,
    Categorical,
    Codebook,
    Concat,
    Dot,
    Dropout,
    Embed,
    FeedForward,
    Linear,
    Multiple,
    Neurons,
    Norm,
    Normal,
    Pool,
    Positions,
    Read,
    Recur,
    Select,
    Start,
    Weight,
)

# --------------------------------------------------------------------------------------------------------------------
# The gauge of attention: the pairs of matrices whose entries the net does not determine.

Axes = tuple[tuple[str | None, int | None], ...]  # the plate of each leading axis, and the choice that picks its entry


@dataclass(frozen=True)
class Gauge:
    """A pair of matrices that an orthogonal matrix maps to another pair with the same product: `W_q^T W_k`, `W_o W_v`.

    Attributes:
        node: The name of the attention node.
        left: The names of the matrices, and of the bias if there is one, that compute the queries or the values.
        right: The names of those that compute the keys, or of the matrices `W_o`.
        shared: The number of leading axes that the matrices of both sides have in common, such as that of the heads.
            Each entry has a separate gauge. 0 if all matrices share one gauge, as the atoms of codebooks do.
        has_planes: True if features e and e + w/2 are rotated by rotary positions, so each such plane has one phase.
        is_output: True for `W_v` and `W_o`, or the matrix of a readout, whose columns are the features.
        is_partial: True if rotary positions rotate only some of the features. No coordinates fix this gauge.
    """

    node: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    shared: int
    has_planes: bool = False
    is_output: bool = False
    is_partial: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters of the gauge."""
        return self.left + self.right

    @property
    def product(self) -> str:
        """The product that does not depend on the gauge."""
        return f"{self.right[0]} {self.left[0]}" if self.is_output else "W_q^T W_k"


def find_gauges(network: Network) -> list[Gauge]:
    """Find the gauges of the attention nodes from the structure of the net."""
    result: dict[tuple[str, ...], Gauge] = {}
    finders = _find_score_gauge, _find_output_gauge, _find_readout_gauge
    for spec in network.specs:
        for gauge in (find(network, spec) for find in finders):
            if gauge is not None and not {*gauge.left} & {*gauge.right}:
                result.setdefault(gauge.names, gauge)
    uses = [name for gauge in result.values() for name in gauge.names]
    return [gauge for gauge in result.values() if all(uses.count(name) == 1 for name in gauge.names)]


def _find_score_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the queries and keys of an attention node."""
    # The score q . k does not change if an orthogonal matrix Q maps both q and k: (Q W_q x) . (Q W_k x') = q . k. It
    # changes if q or k has another child. If rotary positions rotate planes of features, only rotations of each plane
    # commute with them. With a bias, the matrix is [W b] and the input [x 1].
    score = _get_dot_score(spec)
    if score is None or not _are_only_scored(network, spec):
        return None
    has_planes, shape = score.rope is not None, network.specs[spec.parents[0].index].shape
    is_partial = score.rope is not None and score.rope.width not in {None, *shape}
    sides = [find_side(network, parent) for parent in spec.parents[:2]]
    if sides[0] is None or sides[1] is None:
        return None
    (left, left_axes), (right, right_axes) = sides[0], sides[1]
    shared = _count_shared(left_axes, right_axes)
    return Gauge(spec.group.name, left, right, shared, has_planes, is_partial=is_partial)


def _find_output_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the values of the heads that a node sums: `sum_h W_o^h sum_j P(j | i) W_v^h x_j`."""
    if not isinstance(spec.tpm, Concat) or not spec.tpm.mapped:
        return None
    weight, attention = (network.specs[parent.index] for parent in spec.parents[:2])
    if not isinstance(weight.tpm, Weight) or not isinstance(attention.tpm, Attention) or attention.tpm.residual:
        return None
    if any(_count_uses(network, index) > 1 for index in (weight.group.index, attention.group.index)):
        return None
    values = attention.parents[2]
    side = find_side(network, values)
    if side is None or _count_uses(network, values.index) > 1:
        return None
    left, axes = side
    shared = _count_shared(axes, tuple((plate, None) for plate in weight.group.plates))
    return Gauge(attention.group.name, left, (f"{weight.param_prefix}.value",), shared, is_output=True)


def _find_readout_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the values of attention without a residual, of which a readout has a linear map."""
    if not isinstance(spec.tpm, Categorical | Normal) or "weight" not in spec.parameters:
        return None
    attention = network.specs[spec.parents[-1].index]
    values = attention.parents[2] if isinstance(attention.tpm, Attention) and not attention.tpm.residual else None
    if isinstance(attention.tpm, Add) and len(attention.parents) == 1:  # the value of the word that is read
        (values,) = attention.parents
    if values is None or any(_count_uses(network, index) > 1 for index in (attention.group.index, values.index)):
        return None
    side = find_side(network, values)
    right = (f"{spec.param_prefix}.weight",)
    return None if side is None else Gauge(attention.group.name, side[0], right, 0, is_output=True)


def find_unfixed(network: Network, weights: Collection[str]) -> list[str]:
    """Find the attention nodes of which both the queries and the keys are linear maps with these weights."""
    result = []
    for spec in network.specs:
        if isinstance(spec.tpm, Attention | Read):
            sides = [find_side(network, parent) for parent in spec.parents[:2]]
            if all(side is not None and {*side[0]} & {*weights} for side in sides):
                result.append(spec.group.name)
    return result


def _get_dot_score(spec: NodeSpec) -> Dot | None:
    """Return the score `q . k` of an attention node; None for another score or node."""
    if isinstance(spec.tpm, Attention | Read) and isinstance(spec.tpm.score, Dot):
        return spec.tpm.score
    return None


def _are_only_scored(network: Network, attention: NodeSpec) -> bool:
    """Return True if every child of the queries and keys of a node is attention by equally rotated scores of these."""
    score, (query, key) = _get_dot_score(attention), (parent.index for parent in attention.parents[:2])
    for spec in network.specs:
        parents, other = [parent.index for parent in spec.parents], _get_dot_score(spec)
        is_pair = parents[:2] == [query, key] and not {query, key} & {*parents[2:]}
        is_equal = score is not None and other is not None and score.rope == other.rope
        if {query, key} & {*parents} and not (is_pair and is_equal):
            return False
    return query != key


def _count_uses(network: Network, index: int) -> int:
    """Count the slots of all nodes in which a node is a parent."""
    return sum(parent.index == index for spec in network.specs for parent in spec.parents)


def _count_shared(left: Axes, right: Axes) -> int:
    """Count the leading axes that the matrices of both sides have in common."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def find_side(network: Network, parent: ParentSpec) -> tuple[tuple[str, ...], Axes] | None:
    """Find the parameters of the queries, keys or values, and the leading axes of the matrices; None if unknown.

    There are no axes if one vector depends on several atoms, or if the bias has other axes than the matrix.
    """
    source = network.specs[parent.index]
    if not isinstance(source.tpm, Linear | Affine):
        return None
    bias = (f"{source.param_prefix}.bias",) if source.tpm.has_bias else ()
    picks = dict(parent.pick)
    if source.tpm.dim is not None:
        axes: Axes = tuple((plate, picks.get(plate)) for plate in source.group.plates)
        return (f"{source.param_prefix}.weight", *bias), axes
    weight = network.specs[source.parents[0].index]
    name = {Select: "values", Codebook: "atoms", Weight: "value"}.get(type(weight.tpm))
    if name is None or weight.group.word_stack is not None:
        return None
    picks |= dict(source.parents[0].pick)
    axes = tuple((plate, picks.get(plate)) for plate in weight.group.plates)
    if isinstance(weight.tpm, Select):
        axes += tuple((None, p.index) for p in weight.parents)
    if isinstance(weight.tpm, Codebook) or (bias and len(weight.group.plates) != len(source.group.plates)):
        axes = ()
    return (f"{weight.param_prefix}.{name}", *bias), axes


Axis = tuple[int | str, int]  # an axis, counted from the last one, of the value of a node group or of a parameter
FIXED: Axis = ("", 0)  # stands for every axis whose basis is fixed
AxisGroups = list[list[Axis]]


@dataclass(frozen=True)
class FreeBasis:
    """A basis of hidden vectors that the likelihood does not determine.

    Attributes:
        hidden: The names of the node groups of the vectors.
        width: The width of the vectors. Vectors of several blocks of this width have the same basis in each block.
        uses: The parameters with an axis in this basis, and the axis, counted from the last one.
    """

    hidden: tuple[str, ...]
    width: int
    uses: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the net."""
        return tuple(dict.fromkeys(name for name, _ in self.uses))

    @property
    def vectors(self) -> str:
        """The names of the first and the last of the hidden vectors."""
        return " and ".join(dict.fromkeys((self.hidden[0], self.hidden[-1])))

    @property
    def reason(self) -> str:
        """The reason why the parameters are not identified."""
        return f"the basis of {self.vectors} is free: a rotation changes {', '.join(self.names)}, but no likelihood"

    def draw_rotation(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw an orthogonal matrix of determinant -1, `[width, width]`: of width 1 it changes the sign."""
        R: Tensor = torch.linalg.qr(torch.randn(self.width, self.width, generator=generator, dtype=dtype))[0]
        return torch.cat([R[:, :1] * -torch.linalg.det(R), R[:, 1:]], 1)

    def rotate(self, values: Mapping[str, Tensor], R: Tensor) -> dict[str, Tensor]:
        """Return the parameters in the basis that an orthogonal matrix R maps the basis to."""
        result = dict(values)
        for name, axis in self.uses:
            blocks = result[name].movedim(axis, -1).unflatten(-1, (-1, self.width)) @ R.mT
            result[name] = blocks.flatten(-2).movedim(-1, axis)
        return result


@dataclass
class _AxisClasses:
    """Classes of axes with the same basis: a disjoint-set forest (Tarjan 1975)."""

    parents: dict[Axis, Axis] = field(default_factory=dict)

    def find(self, axis: Axis) -> Axis:
        """Find the representative of the class of an axis."""
        while (parent := self.parents.setdefault(axis, axis)) != axis:
            axis = parent
        return axis

    def join(self, *axes: Axis) -> None:
        """Join the classes of axes."""
        first, *remaining = map(self.find, axes)
        for axis in remaining:
            self.parents[axis] = first

    def list_free(self) -> list[list[Axis]]:
        """Return the classes without a fixed axis, in the order in which their first axes were added."""
        members: dict[Axis, list[Axis]] = {}
        for axis in self.parents:
            members.setdefault(self.find(axis), []).append(axis)
        members.pop(self.find(FIXED))
        return list(members.values())


def find_free_bases(network: Network, learned: Collection[str]) -> list[FreeBasis]:
    """Find the bases that no value of the learned parameters determines.

    Args:
        network: The net. All of its readouts are observed.
        learned: The names of the learned parameters. Another parameter fixes the basis, unless a rotation does not
            change it, such as a bias of 0.
    """
    # If a TPM passes a vector on unchanged, adds it to others or averages it, the vectors have the same basis. A matrix
    # separates the basis of its columns from that of its rows. All other TPMs (inputs, activations, gains, readouts
    # without a matrix, TPMs of users) fix the bases of their vectors. An axis of a parameter that several nodes use has
    # one basis.
    classes, readouts = _AxisClasses(), infer_fit_task(network).readouts
    specs = {spec.group.index: spec for readout in readouts for spec in network.ancestral_specs(readout)}
    classes.join(FIXED)
    for _, spec in sorted(specs.items()):
        for group in _group_axes(_AxisReader(network, spec)):
            classes.join(*group)
    result, order = [], list(network.parameters)
    for axes in classes.list_free():
        groups = sorted({k for k, _ in axes if isinstance(k, int)})
        hidden = tuple(network.specs[k].group.name for k in groups if len(network.specs[k].shape) == 1)
        uses = sorted(((k, d) for k, d in axes if isinstance(k, str)), key=lambda use: order.index(use[0]))
        sizes = [network.parameters[name].shape[axis] for name, axis in uses]
        basis = FreeBasis(hidden, min(sizes, default=1), tuple(uses))
        if uses and all(size % basis.width == 0 for size in sizes) and _is_learned(basis, network, learned):
            result.append(basis)
    return result


def find_exchangeable_atoms(network: Network, learned: Collection[str]) -> dict[str, str]:
    """Find the parameters of atoms whose order is free, because their probabilities are learned too, with the reason.

    A prior with different concentrations of the atoms gives them an order.

    The atoms are those of codebooks, and the entries of a plate that a discrete node with parents picks.
    """
    tables = {}
    for spec in network.specs:
        if isinstance(spec.tpm, Codebook):
            tables[f"{spec.param_prefix}.atoms"] = f"{spec.param_prefix}.logits"
        for slot, (plate, index) in ((parent.index, pick) for parent in spec.parents for pick in parent.pick):
            source, choice = network.specs[slot], network.specs[index]
            is_selector = {p.index for p in choice.parents} <= {index}  # the order of its heads is matched
            for weight in (source, *(network.specs[p.index] for p in source.parents)):
                if isinstance(weight.tpm, Weight) and plate in weight.group.plates and not is_selector:
                    tables[f"{weight.param_prefix}.value"] = f"{choice.param_prefix}.logits"
    priors = {f"{spec.param_prefix}.{name}": alpha for spec in network.specs for name, alpha in spec.priors.items()}
    is_ordered = {name for name, alpha in priors.items() if alpha.dim() and bool((alpha != alpha[..., :1]).any())}
    result: dict[str, str] = {}
    for atoms, logits in tables.items():
        if {atoms, logits} <= {*learned} - is_ordered and network.parameters[logits].shape[-1] > 1:
            reason = f"the order of the atoms of {atoms.rpartition('.')[0]} is free"
            result |= dict.fromkeys((atoms, logits), reason)
    return result


def find_shifted_logits(network: Network, learned: Collection[str]) -> dict[str, str]:
    """Find the learned maps of vectors to logits, with the reason: only differences of rows are identified."""
    result: dict[str, str] = {}
    for spec in network.specs:
        if isinstance(spec.tpm, Categorical) and "weight" in spec.parameters:
            reason = f"a shift of all logits changes no probability of {spec.group.name}"
            names = (f"{spec.param_prefix}.{name}" for name in ("weight", "logits"))
            result |= {name: reason for name in names if name in learned}
    return result


def find_rotary_pairs(network: Network, learned: Collection[str]) -> dict[str, str]:
    """Find the learned queries and keys with rotary positions, with the reason: a phase of each plane is free."""
    result: dict[str, str] = {}
    for spec in network.specs:
        score = _get_dot_score(spec)
        if score is not None and score.rope is not None:
            sides = [find_side(network, parent) for parent in spec.parents[:2]]
            names = [[name for name in side[0] if name in learned] for side in sides if side is not None]
            if len(names) == 2 and all(names):
                reason = f"rotations of queries and keys of {spec.group.name} that commute with its rotary positions"
                result |= dict.fromkeys([*names[0], *names[1]], f"{reason} change no likelihood")
    return result


def _is_learned(basis: FreeBasis, network: Network, learned: Collection[str]) -> bool:
    """Return True if a random rotation changes learned parameters, and no other ones."""
    store = {name: network.parameters[name].detach().cpu() for name in basis.names}
    fixed = {name: value for name, value in store.items() if name not in learned}
    if len(fixed) == len(store):
        return False
    R = basis.draw_rotation(torch.Generator().manual_seed(0), network.dtype)
    rotated = basis.rotate(store, R)
    return all(torch.allclose(rotated[name], value) for name, value in fixed.items())


@dataclass(frozen=True)
class _AxisReader:
    """The axes of a node group, of its parents and of its parameters."""

    network: Network
    spec: NodeSpec

    @property
    def value(self) -> Axis:
        """The last axis of the value."""
        return self.spec.group.index, -1

    def parent(self, slot: int, axis: int = -1) -> Axis:
        """An axis of the parent in a slot."""
        return self.spec.parents[slot].index, axis

    def parameter(self, name: str, axis: int = -1) -> list[Axis]:
        """An axis of a parameter; an empty list if the TPM has no parameter of this name."""
        return [(f"{self.spec.param_prefix}.{name}", axis)] if name in self.spec.parameters else []

    def all_axes(self, index: int) -> list[Axis]:
        """All axes of the value of a node group."""
        return [(index, -d) for d in range(1, len(self.network.specs[index].shape) + 1)]


def _group_axes(axes: _AxisReader) -> AxisGroups:
    """Group the axes of the value of a node, of its parents and of its parameters that have the same basis."""
    tpm = axes.spec.tpm
    if isinstance(tpm, Weight | Select | Codebook):
        (name,) = {"value", "values", "atoms"} & {*axes.spec.parameters}
        return [[axis, *axes.parameter(name, axis[1])] for axis in axes.all_axes(axes.spec.group.index)]
    if isinstance(tpm, Linear | Affine):
        columns, rows = (axes.parameter("weight", d) or [axes.parent(0, d)] for d in (-1, -2))
        return [[axes.parent(-1), *columns], [axes.value, *rows, *axes.parameter("bias")]]
    if isinstance(tpm, Concat):  # a sum of heads; without a matrix the value has a block for each head
        added = [*axes.parameter("bias"), *([axes.parent(-1)] if tpm.residual else [])]
        if tpm.mapped:
            return [[axes.parent(1), axes.parent(0)], [axes.value, axes.parent(0, -2), *added]]
        return [[axes.value, axes.parent(0), *added]]
    if isinstance(tpm, Attention | Read):
        return _group_attention(axes, tpm)
    if isinstance(tpm, FeedForward):
        inside = [[axes.parent(0), *axes.parameter("weight_in"), *axes.parameter("weight_gate")]]
        return [*inside, [axes.value, *axes.parameter("weight_out", -2), *axes.parameter("bias_out")]]
    if isinstance(tpm, Neurons):  # the nonlinearity acts on each neuron
        return [[axes.parent(0), *axes.parameter("weight_in"), *axes.parameter("weight_gate")], [FIXED, axes.value]]
    if isinstance(tpm, Embed | Positions | Start):  # rows of a table, whose other axis has the basis of the states
        if isinstance(tpm, Embed) and tpm.tied:
            return [[axes.value, axes.parent(0)], [FIXED, axes.parent(0, -2)]]
        rows = axes.parameter("table") + axes.parameter("vector")
        return [[axes.value, *rows, *([axes.parent(0)] if isinstance(tpm, Start) else [])]]
    if isinstance(tpm, Categorical | Normal | Recur) and (columns := axes.parameter("weight") or axes.parameter("W")):
        slot = 0 if isinstance(tpm, Recur) else -1
        state = [[FIXED, axes.parent(1)]] if isinstance(tpm, Recur) else []
        return [[axes.parent(slot), *columns], [FIXED, *axes.all_axes(axes.spec.group.index)], *state]
    if _preserves_basis(axes):
        parents = range(len(axes.spec.parents))
        return [[axis, *(axes.parent(k, axis[1]) for k in parents)] for axis in axes.all_axes(axes.spec.group.index)]
    indices = axes.spec.group.index, *(parent.index for parent in axes.spec.parents)
    return [[FIXED, *(axis for index in indices for axis in axes.all_axes(index))]]


def _preserves_basis(axes: _AxisReader) -> bool:
    """Return True if a rotation of all parents of a node rotates its value in the same way."""
    tpm = axes.spec.tpm
    if isinstance(tpm, Norm):
        return tpm.form == "rms" and not axes.spec.parameters
    is_identity = isinstance(tpm, Activation) and tpm.activation == "identity"
    return isinstance(tpm, Add | Pool | Dropout | Multiple) or is_identity


def _group_attention(axes: _AxisReader, tpm: Attention | Read) -> AxisGroups:
    """Group the axes of attention: the score determines those of queries and keys, the mix those of values."""
    slots = dict(zip(tpm.get_slots(), (parent.index for parent in axes.spec.parents), strict=True))
    query, key, *extra = (slots[slot] for slot in tpm.attention_slots())
    score = tpm.score
    groups: AxisGroups = []
    if isinstance(score, Bilinear):
        A = extra.pop(0)
        groups += [[(query, -1), (A, -2)], [(key, -1), (A, -1)]]
    elif isinstance(score, Dot) and score.rope is None:
        groups.append([(query, -1), (key, -1)])
    else:
        extra += [query, key]
    groups.append([FIXED, *(axis for index in extra for axis in axes.all_axes(index))])
    if isinstance(tpm, Attention):
        groups.append([axes.value, axes.parent(2), *([axes.parent(-1)] if tpm.residual else [])])
    return groups
