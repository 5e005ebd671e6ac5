"""Neurons as nodes: the net in which each node with hidden activations is two, the activations and the map of them.

The declaration changes and the tensors do not, so that every reading treats neurons as it treats other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from bnet_transformer._core.naming import join_stem
from bnet_transformer.declare.declaration import Arrow, Node, Stack
from bnet_transformer.declare.network import Network, build_structure
from bnet_transformer.errors import BNetError

NEURON = "neuron"


def name_neurons(role: str) -> str:
    """The role of the hidden activations of a node.

    >>> name_neurons("ffn"), name_neurons("e")
    ('neuron', 'e_neuron')
    """
    return NEURON if role == "ffn" else f"{role}_{NEURON}"


def expose_neurons(network: Network) -> Network:
    """The net in which each node with hidden activations is two: the activations, and the map of them.

    Args:
        network: The net.

    Returns:
        The net, with the same tensors as parameters.

    Raises:
        BNetError: No node has hidden activations (`TPM.split_neurons`), a role of the new nodes is declared already, or
            the slices differ in the width of a node with hidden activations.
    """
    specs = {(spec.group.stack, spec.group.role, spec.group.step): spec for spec in network.specs}
    halves = {key: spec.tpm.split_neurons(*spec.tpm_parents) for key, spec in specs.items()}
    if not any(halves.values()):
        kinds = ", ".join(sorted({type(spec.tpm).__name__ for spec in network.specs}))
        expected = "a net with a feed-forward node whose neurons are no nodes yet"
        raise BNetError("expose_neurons", expected=expected, actual=f"nodes of {kinds}")
    sources = dict(specs)  # the node group whose tensors a group of the new net has

    def split(
        stack: str, nodes: Sequence[Node], steps: Iterable[int | None], prologue: Sequence[Node] = ()
    ) -> list[Node]:
        """The nodes of a block of a declaration, with two nodes for each that has hidden activations."""
        result = list[Node]()
        for node in nodes:
            role, keys = name_neurons(node.role), [(stack, node.role, step) for step in steps]
            parts = [half for key in keys if (half := halves[key]) is not None]
            if not parts:
                result.append(node)
                continue
            first, second, _ = parts[0]
            name = join_stem(stack, node.role)
            if any(part[:2] != (first, second) for part in parts):
                raise BNetError(name, expected="the same width in all slices, to split it", actual="several widths")
            if any(key[:2] == (stack, role) for key in specs):
                raise BNetError(
                    name, expected=f"no node of the role {role!r}, which is that of its neurons", actual=role
                )
            shape = None if node.shape is None else first.shape(*specs[keys[0]].tpm_parents)
            is_state = any(other.role == role for other in prologue)  # the neurons of a state that the prologue has too
            result += [
                replace(node, role=role, tpm=first, shape=shape),
                replace(node, tpm=second, parents=[Arrow(role, slice="next" if is_state else None)]),
            ]
            sources.update({(stack, role, step): specs[stack, node.role, step] for step in steps})
        return result

    stacks, declaration = list[Stack](), network.declaration
    for stack in declaration.stacks:
        prologue = split(stack.name, stack.prologue, [-1])
        nodes = split(stack.name, stack.slice, range(stack.slices), prologue)
        epilogue = split(stack.name, stack.epilogue, [stack.slices])
        stacks.append(replace(stack, prologue=prologue, slice=nodes, epilogue=epilogue))
    exposed = replace(declaration, stacks=stacks, nodes=split("", declaration.nodes, [None]))
    structure, parameters = build_structure(exposed, network.seed), dict[str, Tensor]()
    for spec in structure.specs:
        key = spec.group.stack, spec.group.role, spec.group.step
        half, prefix = halves.get(key), sources[key].param_prefix
        for name in spec.parameters:
            source = name if half is None else half[2][name]
            parameters[f"{spec.param_prefix}.{name}"] = network.parameters[f"{prefix}.{source}"]
    tokenizer, dtype = network.tokenizer, network.default_dtype
    return replace(structure, parameters=parameters, tokenizer=tokenizer, default_dtype=dtype)
