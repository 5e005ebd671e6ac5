"""`P(j | i)` averaged over the posterior of the open choices: of whole families, and as weights of arrows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer.axes import WORD
from bnet_transformer.graph import Selection
from bnet_transformer.inference.joint_posterior import joint_log_evidence, joint_posterior
from bnet_transformer.inference.node_queries import Answers
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.route import Route
from bnet_transformer.network import Member
from bnet_transformer.tpm.arrays import in_numpy


def expected_reading(query: Query, answers: Answers, member: Member) -> Tensor:
    """`sum_c P(c | evidence) P(j | i, c)` of a family, `[*plates, word, word read]` in float64; zero for set nodes.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        answers: The values of the same sentence.
        member: A family that reads words.
    """
    world, family, nodes = query.world, member.family, answers.reading_query(member)
    shape = (*world.ground.shapes[family.index], answers.words_read(member))
    table = torch.zeros(len(world.ground.nodes(family)), shape[-1], dtype=torch.float64)
    route, first = route_expected_reading(answers, member), int(world.ground.offsets[family.index])
    if route.algorithm == "reference":
        route.warn_if_slow()
        for node in (node for node in world.ground.nodes(family).tolist() if node not in world.do):
            reading = asking.expected_reading(world, node, query.evidence, query.budget)
            if reading is not None:
                table[node - first, reading[0]] = reading[1]
        return table.reshape(shape)
    states = answers.reading(member, route).detach().double().cpu()
    flat = states.reshape(-1, len(table), shape[-1])
    groups: dict[tuple[int, ...], list[int]] = {}  # nodes that depend on the same choices have one posterior
    for node in (node for node in world.ground.nodes(family).tolist() if node not in world.do):
        groups.setdefault(tuple(nodes.choices.get(node, ())), []).append(node - first)
    for choices, places in groups.items():
        if not choices:  # one row for all states
            table[places] = flat[0, places]
            continue
        share = joint_posterior(replace(query, nodes=choices))
        table[places] = torch.einsum("s,snm->nm", share.reshape(-1).double(), flat[:, places])
    return table.reshape(shape)


def route_expected_reading(answers: Answers, member: Member) -> Route:
    """How `P(j | i)` of a family is averaged: from its tables in every state, or node by node by the reference."""
    route = answers.route_reading(member)
    nodes = answers.reading_query(member)
    if asking.shared_and_own(answers.world, nodes.choices) is not None or route.algorithm == "reference":
        return route
    count = len(nodes.above) * route.states * len(answers.world.ground)
    reason = "its words depend on different choices, for which no table of the family has a dim each"
    return replace(route, algorithm="reference", reason=reason, node=member.family.name, evaluations=count)


def arrow_weights(query: Query, answers: Answers, selection: Selection) -> dict[tuple[int, int], float]:
    """The weight `P(j | i, evidence)` of each selected arrow along which a node reads another word.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        answers: The values of the same sentence.
        selection: The part of the ground graph.

    Returns:
        For each arrow, (source, target) by ground id, its weight. A parent that fills a slot of its own (the query, the
        residual) has none.
    """
    joint_log_evidence(query)  # evidence that is impossible is refused, whatever is read
    ground, members = query.world.ground, query.world.network.members
    reading = {
        member.family.index: member
        for member in members
        if member.reads_words and member.tpm.has_reading and ground.kept(member.family, selection)
    }
    answers.prepare([m for m in reading.values() if answers.route_reading(m).algorithm == "compiled"])
    rows, weights = {}, dict[tuple[int, int], float]()
    for index, member in reading.items():
        table = in_numpy(expected_reading(query, answers, member))
        rows[index] = table.reshape(-1, table.shape[-1])
    for bundle, sources, targets in ground.arrows(selection):
        if bundle.child not in rows:
            continue
        inputs = [given for given in reading[bundle.child].inputs if given.parent == bundle.parent]
        if not any(WORD in given.over for given in inputs):
            continue
        words = (sources - int(ground.offsets[bundle.parent])) % ground.shapes[bundle.parent][-1]
        shares = rows[bundle.child][targets - int(ground.offsets[bundle.child]), words]
        arrows = dict(zip(zip(sources.tolist(), targets.tolist(), strict=True), shares.tolist(), strict=True))
        if any(WORD not in given.over for given in inputs):
            arrows = {(s, t): w for (s, t), w in arrows.items() if s not in asking.single_parents(query.world, t)}
        weights |= arrows
    return weights
