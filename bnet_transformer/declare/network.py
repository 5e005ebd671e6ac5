"""The net: a checked declaration with its template graph, a spec for each node group, and parameters.

A spec (`NodeSpec`) has the TPM, the parents, the shape and the parameters of a node group.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_mapping, check_names, set_frozen
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer._core.process import check_memory
from bnet_transformer._core.tensors import is_dense
from bnet_transformer._core.tokens import Labels, Tokenizer
from bnet_transformer.declare.declaration import Declaration, NodeTemplate, collection_axes, declaration_to_graph
from bnet_transformer.errors import NOT_GIVEN, BNetError, BudgetError, DeclarationError, DeclarationFault, format_value
from bnet_transformer.graph.template_graph import NodeGroup, TemplateGraph
from bnet_transformer.tpm.base import TPM, Parameter, Parent, Shape, check_concentration

MAX_GROUPS = 50_000
LOGIT_PARAMETERS = ("logits", "initial")  # the parameters of discrete TPMs with rows that are logits of their states

T = TypeVar("T")


@dataclass(frozen=True)
class ParentSpec:
    """The parent in one slot of a node group.

    Attributes:
        slot: The name of the slot.
        index: The index of the parent's group.
        reach: The words of the parent on which each word depends.
        pick: The plates of the parent that a discrete node indexes, with the index of the group of that node.
        over: The axes of a collection; empty for a single parent.
    """

    slot: str
    index: int
    reach: Reach
    pick: tuple[tuple[str, int], ...]
    over: tuple[str, ...]


@dataclass(frozen=True)
class NodeSpec:
    """A node group with its TPM, parents, shape and parameters.

    Attributes:
        group: The node group.
        tpm: The conditional distribution.
        parents: The parents, one for each slot.
        tpm_parents: The descriptions of the parents that the TPM received.
        shape: The shape of the value of one node.
        param_prefix: The prefix of the names of its parameters.
        scope: `"sentence"`, or `"corpus"` for a root that is drawn once for all sentences.
        parameters: The parameters that the TPM declares, by name.
        is_wordwise: True if each parent is one value at the same word, or has no words.
        states: The number of states of the TPM; None if the sentence decides it or the node has none.
    """

    group: NodeGroup
    tpm: TPM
    parents: tuple[ParentSpec, ...]
    tpm_parents: tuple[Parent, ...]
    shape: Shape
    param_prefix: str
    scope: str
    parameters: Mapping[str, Parameter]
    is_wordwise: bool = field(init=False, compare=False, repr=False)  # torch.compile cannot trace a cached property
    states: int | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_wordwise = all(not (p.pick or p.over) and p.reach.kind == "same" for p in self.parents)
        set_frozen(self, is_wordwise=is_wordwise, states=self.tpm.states)

    @property
    def learnable(self) -> bool:
        """True if training changes one of the parameters."""
        return any(parameter.learnable for parameter in self.parameters.values())

    @cached_property
    def priors(self) -> Mapping[str, Tensor]:
        """The concentrations of the Dirichlet prior of each table of logits, which broadcast to the table's shape.

        `initial` has the prior of `logits`.
        """
        priors = {name: torch.as_tensor(alpha, dtype=torch.float64) for name, alpha in self.tpm.priors().items()}
        if "logits" in priors and "initial" in self.parameters:
            priors.setdefault("initial", priors["logits"])
        return priors

    @cached_property
    def word_parents(self) -> tuple[ParentSpec, ...]:
        """The parents that are collections of words."""
        return tuple(parent for parent in self.parents if WORD in parent.over)

    @cached_property
    def has_word_attention(self) -> bool:
        """True if the TPM has an attention distribution `P(j | i)` over words."""
        return type(self.tpm).attention_weights is not TPM.attention_weights and bool(self.word_parents)


@dataclass(frozen=True)
class Network:
    """A checked declaration with its parameters, from which all other parts of the package work.

    Attributes:
        declaration: The declaration.
        graph: The template graph.
        specs: The spec of each node group, in the order of the graph.
        parameters: The parameters by name, `prefix.name`; the leading dims of a tensor are the plates.
        seed: The seed of the initial parameters. Default 0.
        default_dtype: The floating type of values if there are no parameters. Default float32.
        tokenizer: The tokenizer of text. None (default): text is split at spaces.
    """

    declaration: Declaration
    graph: TemplateGraph
    specs: tuple[NodeSpec, ...]
    parameters: Mapping[str, Tensor]
    seed: int = 0
    default_dtype: torch.dtype = torch.float32
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if any(value.is_inference() for value in self.parameters.values()):  # inference tensors never require gradients
            with torch.inference_mode(False):
                cloned = {name: value.clone() for name, value in self.parameters.items()}
            object.__setattr__(self, "parameters", cloned)

    @cached_property
    def _derived(self) -> dict[object, Any]:
        """The results of `derive`."""
        return {}

    def derive(self, key: object, compute: Callable[[], T]) -> T:
        """Return a result that depends only on the declaration, and that each sentence needs.

        Args:
            key: The name of the result.
            compute: Computes the result; it is called once for each key.

        Returns:
            The result.
        """
        if key not in self._derived:
            self._derived[key] = compute()
        result: T = self._derived[key]
        return result

    @cached_property
    def learnable(self) -> frozenset[str]:
        """The names of the parameters that training can change."""
        return frozenset(name for name, (_, parameter) in self.parameter_specs.items() if parameter.learnable)

    @cached_property
    def functional_groups(self) -> frozenset[int]:
        """The indices of the groups whose nodes are functions of their parents."""
        return frozenset(spec.group.index for spec in self.specs if spec.tpm.kind == "deterministic")

    @cached_property
    def choice_descendants(self) -> frozenset[int]:
        """The indices of the groups that have a discrete group among their ancestors."""
        choices = [spec.group.index for spec in self.specs if spec.tpm.kind == "discrete"]
        return frozenset(self.graph.descendants(choices))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every parameter, plates first."""
        return {name: shape for name, (shape, _) in self.parameter_specs.items()}

    @cached_property
    def parameter_specs(self) -> dict[str, tuple[Shape, Parameter]]:
        """The shape (plates first) and the `Parameter` of every parameter of the TPMs, by name."""
        parameter_specs: dict[str, tuple[Shape, Parameter]] = {}
        for spec in self.specs:
            plates = tuple(self.graph.plate_sizes[plate] for plate in spec.group.plates)
            for name, parameter in spec.parameters.items():
                parameter_specs.setdefault(f"{spec.param_prefix}.{name}", ((*plates, *parameter.shape), parameter))
        return parameter_specs

    @cached_property
    def logit_names(self) -> frozenset[str]:
        """The names of the logits of discrete nodes, in which -inf is a probability of 0."""
        return frozenset(
            f"{spec.param_prefix}.{name}"
            for spec in self.specs
            if spec.tpm.kind == "discrete"
            for name in LOGIT_PARAMETERS
            if name in spec.parameters
        )

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the parameters."""
        return next((p.dtype for p in self.parameters.values()), self.default_dtype)

    @property
    def log_dtype(self) -> torch.dtype:
        """The floating type of probabilities and their logarithms: `dtype`, but float32 for half precision."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((p.device for p in self.parameters.values()), torch.device("cpu"))

    @cached_property
    def vocabularies(self) -> dict[str, Labels]:
        """The vocabulary of each stack that has one; with a tokenizer its tokens are decoded (`Token`)."""
        read_words = Labels if self.tokenizer is None else self.tokenizer.read_vocabulary
        return {s.name: read_words(s.vocabulary) for s in self.declaration.stacks if s.vocabulary is not None}

    @cached_property
    def inputs(self) -> tuple[NodeSpec, ...]:
        """The specs of input nodes."""
        return tuple(spec for spec in self.specs if spec.tpm.kind == "input")

    @cached_property
    def choices(self) -> tuple[NodeSpec, ...]:
        """The specs of discrete nodes with children."""
        out_edges = self.graph.out_edges
        return tuple(spec for spec in self.specs if spec.tpm.kind == "discrete" and out_edges[spec.group.index])

    @cached_property
    def unconditional_logit_names(self) -> tuple[str, ...]:
        """The names of the logits of nodes without vector parents: their rows are log probabilities."""
        conditional = {m.param_prefix for m in self.specs if any(parent.states is None for parent in m.tpm_parents)}
        return tuple(
            name for name in self.shapes if name in self.logit_names and name.rpartition(".")[0] not in conditional
        )

    def count_states(self, index: int, word_counts: Mapping[str, int]) -> int:
        """The number of states of a discrete group.

        Args:
            index: The index of the group.
            word_counts: The number of words of each stack, which is the number of states of a `Read`.

        Returns:
            The number of states.
        """
        spec = self.specs[index]
        return word_counts[self.get_source_stack(spec)] if spec.states is None else spec.states

    def get_source_stack(self, spec: NodeSpec) -> str:
        """The stack of the words that a group reads as a collection.

        Args:
            spec: The spec of the group.

        Returns:
            The name of the stack.
        """
        return self.specs[spec.word_parents[0].index].group.word_stack or ""

    def filter_components(self, groups: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """The strongly connected components of the graph, restricted to some groups.

        Args:
            groups: The indices of the groups.

        Returns:
            The indices of the groups in each component, parents first.
        """
        filtered = (tuple(i for i in component if i in groups) for component in self.graph.components)
        return tuple(filter(None, filtered))

    def ancestral_specs(self, spec: NodeSpec) -> list[NodeSpec]:
        """A spec and all its ancestors.

        Args:
            spec: The spec of a group.

        Returns:
            The specs, parents first.
        """
        needed = self.graph.ancestral_set([spec.group.index])
        return [self.specs[index] for component in self.filter_components(needed) for index in component]

    def is_state(self, group: NodeGroup) -> bool:
        """Whether the role of a group is passed from slice to slice of its stack.

        Args:
            group: The group.

        Returns:
            True for a state such as `x`.
        """
        return (group.stack, group.role) in self._states

    def is_word_state(self, group: NodeGroup) -> bool:
        """Whether a group is a state over the words of the stack that it belongs to, without other plates.

        Args:
            group: The group.

        Returns:
            True for such a state.
        """
        return self.is_state(group) and group.word_stack == group.stack and not group.plates

    @cached_property
    def _states(self) -> frozenset[tuple[str, str]]:
        """The stack and the role of each state."""
        return frozenset((stack.name, role) for stack in self.declaration.stacks for role in stack.states)

    def check_single_dtype(self) -> None:
        """Raise an error if the parameters have different floating types."""
        kinds = sorted({str(value.dtype) for value in self.parameters.values()})
        if len(kinds) > 1:
            hint = "Convert them with net.to(torch.float32)"
            raise BNetError("parameters", expected="one floating type", actual=", ".join(kinds), hint=hint)

    def get_spec(self, name: str) -> NodeSpec:
        """The spec of a group.

        Args:
            name: The name of the group, such as `"q_0"`.

        Returns:
            The spec.
        """
        return self.specs[self.graph.get_group(name).index]

    def with_parameters(self, parameters: Mapping[str, Tensor], *, check_finite: bool = True) -> Network:
        """The same net with some parameters replaced.

        Args:
            parameters: The new tensors by name.
            check_finite: Whether NaN and infinity are errors. Default True.

        Returns:
            A net with these parameters and the others of this net.

        Raises:
            UnknownNameError: If the net has no parameter of a name.
            DeclarationError: If a tensor has another shape, is not floating, or is not finite.
        """
        given = check_mapping("parameters", parameters)
        check_names("parameter", given, self.shapes)
        merged = {**self.parameters, **given}
        check_parameters(self.shapes, merged, self.logit_names, check_finite=check_finite)
        merged = {name: merged[name] for name in self.shapes}  # in the order of the net
        return replace(self, parameters=merged)

    def parts_to_hash(self) -> tuple[object, ...]:
        """The parts of a net from which its digest is computed."""
        tokenizer = self.tokenizer
        fields = (
            None
            if tokenizer is None
            else (tokenizer.json_text, tokenizer.segments_role, tokenizer.start_token_id, tokenizer.first_stack_only)
        )
        return self.declaration, dict(self.parameters), fields, self.seed

    def to(self, *targets: object) -> Network:
        """The same net in another floating type, on another device, or both.

        Parameters that have their declared values, such as those of a `Table`, have them in float64 with all digits.

        Args:
            *targets: A floating `torch.dtype`, a device, or one of each.

        Returns:
            The converted net.

        Raises:
            BNetError: If a target is neither, or if the machine does not have the device.
        """
        dtype, device = None, None
        for target in targets:
            if isinstance(target, torch.dtype) and target.is_floating_point and dtype is None:
                dtype = target
            elif isinstance(target, str | torch.device) and device is None:
                device = target
            else:
                raise BNetError("to", expected="a floating torch.dtype, a device, or one of each", actual=target)
        try:
            exact = {name: self._to_exact(name, value, dtype) for name, value in self.parameters.items()}
            moved = {name: value.to(device=device, dtype=dtype) for name, value in exact.items()}
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's errors for a device
            expected, allowed = "an available device", "'cpu', 'cuda', 'cuda:0', ..."
            raise BNetError("to", expected=expected, actual=device, allowed=allowed) from error
        return replace(self.with_parameters(moved), default_dtype=self.default_dtype if dtype is None else dtype)

    def _to_exact(self, name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        """A parameter in float64 if it has its declared value, rounded, and `dtype` has more digits; else unchanged."""
        fill = self.parameter_specs[name][1].fill
        if fill is None or value.is_meta or dtype != torch.float64 or value.dtype == dtype:
            return value
        declared = torch.as_tensor(fill, dtype=dtype, device=value.device).expand(value.shape)
        is_declared = torch.equal(declared.to(value.dtype), value)
        return declared.clone(memory_format=torch.contiguous_format) if is_declared else value

    def get_parameters(self, spec: NodeSpec) -> dict[str, Tensor]:
        """The parameters of one group.

        Args:
            spec: The spec of the group.

        Returns:
            The tensors by their names in the TPM, plates first.
        """
        return {name: self.parameters[f"{spec.param_prefix}.{name}"] for name in spec.parameters}


def declare(declaration: Declaration, *, seed: int = 0, parameters: Mapping[str, Tensor] | None = None) -> Network:
    """Make a net from its declaration.

    Args:
        declaration: The declaration.
        seed: The seed of the initial parameters. Default 0.
        parameters: The parameters by name; None (default) initialises them.

    Returns:
        The net.

    Raises:
        DeclarationError: If the declaration has faults; it lists all of them.
    """
    network = build_structure(declaration, seed)
    if parameters is not None:
        return network.with_parameters(parameters)
    return replace(network, parameters=initialize_parameters(network, seed))


def build_structure(declaration: Declaration, seed: int = 0) -> Network:
    """The checked net of a declaration, without parameters, so large sizes do not allocate memory."""
    count = len(declaration.nodes)
    for stack in declaration.stacks:
        count += len(stack.prologue) + len(stack.epilogue) + stack.slices * max(len(stack.slice), 1)
    if count > MAX_GROUPS:  # more than any readable net has
        raise BudgetError("declaration", expected=f"at most {MAX_GROUPS} nodes and slices", actual=count)
    graph, ordered, faults = declaration_to_graph(declaration)
    specs: list[NodeSpec] = []
    if graph is not None:
        specs, more = _build_specs(graph, ordered)
        faults += more
    if faults or graph is None:
        raise DeclarationError(_deduplicate_faults(faults))
    return Network(declaration, graph, tuple(specs), {}, seed)


def _build_specs(
    graph: TemplateGraph, templates: Sequence[NodeTemplate]
) -> tuple[list[NodeSpec], list[DeclarationFault]]:
    """The spec of each group, and the faults. Shapes follow from parents to children.

    The children of a group with a fault are skipped.
    """
    index = {template: k for k, template in enumerate(templates)}
    shapes: dict[NodeTemplate, Shape] = {}
    specs: list[NodeSpec] = []
    faults: list[DeclarationFault] = []
    for template, group in zip(templates, graph.groups, strict=True):
        node, parents = template.node, []
        for slot, parent in template.iter_slots():
            picks = tuple((plate, index[selector]) for plate, selector in parent.pick)
            parents.append(
                ParentSpec(slot, index[parent.template], parent.reach, picks, collection_axes(template, parent))
            )
        tpm_parents = _describe_parents(graph.plate_sizes, index, template, parents, shapes, faults)
        if tpm_parents is None:
            continue
        try:
            shape, parameters = _infer_shape_and_parameters(node.tpm, tpm_parents)
        except BNetError as error:
            actual = "" if error.actual is NOT_GIVEN else format_value(error.actual)
            is_parent = any(error.subject == parent.name for parent in tpm_parents)
            part = f"parent {error.subject}" if is_parent else error.subject
            faults.append(DeclarationFault(template.name, error.expected or "", actual, part))
            continue
        has_word_states = node.tpm.kind == "discrete" and node.tpm.states is None
        if has_word_states and not any(WORD in parent.over for parent in parents):
            expected = "a TPM with a number of states, or a parent that is a collection of words"
            faults.append(DeclarationFault(template.name, expected))
            continue
        if node.shape is not None and node.shape != shape:
            faults.append(DeclarationFault(template.name, f"shape {node.shape}, as declared by shape=", f"{shape}"))
            continue
        shapes[template] = shape
        prefix = group.stem if node.shared else group.name
        fields = tuple(parents), tuple(tpm_parents), shape, prefix, node.scope, parameters
        specs.append(NodeSpec(group, node.tpm, *fields))
    first: dict[str, NodeSpec] = {}  # slices that share their parameters must declare the same ones
    for spec in specs:
        previous = first.setdefault(spec.param_prefix, spec)
        if previous.parameters != spec.parameters:
            expected = f"the same parameters as {previous.group.name}, because shared=True"
            faults.append(DeclarationFault(spec.group.name, expected, "other names or shapes"))
    return specs, faults


def _infer_shape_and_parameters(tpm: TPM, parents: Sequence[Parent]) -> tuple[Shape, Mapping[str, Parameter]]:
    """The shape and parameters that a TPM declares, checked because the TPM may be a user's class."""
    name = type(tpm).__name__
    if tpm.kind not in ("input", "deterministic", "discrete", "continuous"):
        raise BNetError(name, expected="kind input, deterministic, discrete or continuous", actual=tpm.kind)
    try:
        shape, parameters = tpm.shape(*parents), tpm.parameters(*parents)
    except Exception as error:
        if isinstance(error, BNetError) and error.expected is not None:
            raise
        description = ", ".join(f"{parent.name} of {parent.form}" for parent in parents)
        expected = f"a TPM for the parents {description}" if parents else "a TPM for no parents"
        raise BNetError(name, expected=expected, actual=repr(error)) from error
    if not isinstance(shape, tuple) or not all(type(size) is int and size > 0 for size in shape):
        raise BNetError(name, expected="a shape, a tuple of integers", actual=shape)
    if not isinstance(parameters, Mapping) or not all(isinstance(p, Parameter) for p in parameters.values()):
        raise BNetError(name, expected="parameters, a mapping from names to Parameter", actual=parameters)
    priors = tpm.priors()
    if not isinstance(priors, Mapping) or not priors.keys() <= parameters.keys():
        names = ", ".join(parameters) or "there are no parameters"
        expected = f"priors, a mapping from names of parameters ({names}) to concentrations"
        raise BNetError(name, expected=expected, actual=priors)
    for key, concentration in priors.items():
        _check_prior(f"{name}, prior of {key}", concentration, parameters[key].shape)
    if "logits" in priors and "initial" in parameters and "initial" not in priors:  # both have the same prior
        row = parameters["initial"].shape[-1:]
        _check_prior(f"{name}, prior of logits and initial", priors["logits"], row)
    return shape, parameters


def _check_prior(subject: str, concentration: object, shape: Shape) -> None:
    """Raise an error unless concentrations are positive: a number, one for each state, or a table of this shape."""
    actual = np.shape(check_concentration(subject, concentration))
    if actual not in ((), shape[-1:], shape):
        tables = "" if len(shape) == 1 else f", an array of shape {shape}"
        expected = f"a positive number{tables} or {shape[-1]} positive numbers"
        raise BNetError(subject, expected=expected, actual=f"an array of shape {actual}")


def _describe_parents(
    sizes: Mapping[str, int],
    index: Mapping[NodeTemplate, int],
    template: NodeTemplate,
    parents: list[ParentSpec],
    shapes: Mapping[NodeTemplate, Shape],
    faults: list[DeclarationFault],
) -> list[Parent] | None:
    """The descriptions of the parents that the TPM receives; None if one of them has a fault."""
    if len(parents) != len(template.node.arrows) or len(parents) != len(template.slots):
        return None
    tpm_parents = []
    for spec, (_, template_parent) in zip(parents, template.iter_slots(), strict=True):
        parent, tpm = template_parent.template, template_parent.template.node.tpm
        shape = shapes.get(parent, parent.node.shape)
        shape = tpm.fixed_shape if shape is None else shape
        if shape is None:
            if spec.index >= index[template]:
                expected = "shape=, because the node is recurrent and its shape cannot be inferred"
                faults.append(DeclarationFault(parent.name, expected))
            return None
        over = tuple((axis, None if axis == WORD else sizes[axis]) for axis in spec.over)
        states = (tpm.states or 0) if tpm.is_index_valued else None
        stack_reach = (parent.word_stack or "", spec.reach) if WORD in spec.over else None
        is_optional = parent.word_stack is not None and spec.reach.is_optional and WORD not in dict(spec.pick)
        tpm_parents.append(Parent(parent.name, shape, states, over, stack_reach, is_optional))
    return tpm_parents


def _deduplicate_faults(faults: list[DeclarationFault]) -> list[DeclarationFault]:
    """The faults, without those that repeat in other slices."""
    unique: dict[tuple[str, ...], DeclarationFault] = {}
    for fault in faults:
        node, part = (re.sub(r"_\d+$", "", text) for text in (fault.node, fault.part))
        unique.setdefault((node, part, fault.expected, re.sub(r"\d+", "#", fault.actual)), fault)
    return list(unique.values())


def initialize_parameters(network: Network, seed: int) -> dict[str, Tensor]:
    """The initial parameters for a seed: random from the normal distribution, or filled."""
    # Each parameter has its own generator, seeded by its name, so that adding a node changes no other parameter.
    store = {}
    count = sum(math.prod(shape) for shape in network.shapes.values())
    check_memory(
        "parameters", count * torch.get_default_dtype().itemsize, "a smaller dim=, fewer heads=, states or words"
    )
    for name, (shape, parameter) in network.parameter_specs.items():
        if parameter.fill is None:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            # Always in float32, so that a seed gives the same parameters in every floating type.
            samples = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            store[name] = samples.to(torch.get_default_dtype()) * parameter.spread
        else:
            fill = torch.as_tensor(parameter.fill, dtype=torch.get_default_dtype(), device="cpu")
            store[name] = fill.expand(shape).clone(memory_format=torch.contiguous_format)
    return store


def check_parameters(
    shapes: Mapping[str, Shape],
    parameters: Mapping[str, Tensor],
    logit_names: Collection[str] = (),
    *,
    check_finite: bool = True,
) -> None:
    """Raise an error for parameters that are missing, have another shape, are not floating, or are not finite.

    Entries of logits (`logit_names`) may be -inf, except all entries of a row. `check_finite=False` allows NaN and
    infinity.
    """
    faults = []
    for name, shape in shapes.items():
        value = parameters.get(name)
        node = name.rpartition(".")[0]
        if not is_dense(value):
            actual = "" if value is None else format_value(value)
            faults.append(DeclarationFault(node, f"a tensor {name} of shape {shape}", actual))
        elif tuple(value.shape) != shape:
            faults.append(DeclarationFault(node, f"{name} of shape {shape}", f"shape {tuple(value.shape)}"))
        elif not value.is_floating_point():
            faults.append(DeclarationFault(node, f"{name} in a floating type", str(value.dtype)))
        elif check_finite and not value.is_meta:
            zero = value.isneginf() if name in logit_names else torch.zeros_like(value, dtype=torch.bool)
            if bad := int((~value.isfinite() & ~zero).sum()):
                actual = f"{bad} entries that are NaN or infinite"
                faults.append(DeclarationFault(node, f"finite numbers in {name}", actual))
            elif name in logit_names and bool(zero.all(-1).any()):
                expected = f"a finite number in every row of {name}"
                faults.append(DeclarationFault(node, expected, "a row with only -inf"))
    if faults:
        raise DeclarationError(faults)


def as_network(net: object) -> Network:
    """The network of a `BNet` or a `Network`; raises an error for other objects."""
    network = getattr(net, "network", net)
    if not isinstance(network, Network):
        raise BNetError("net", expected="a net", actual=net)
    return network


def restore_type(net: object, network: Network) -> Any:
    """A network as a net of the type of another one: a `Network`, or a `BNet` that holds it."""
    return network if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(network)
