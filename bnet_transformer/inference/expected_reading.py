"""`P(j | i)` averaged over the posterior of the open choices: of whole families, and as weights of arrows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer.axes import WORD
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import Selection
from bnet_transformer.inference.joint_posterior import joint_log_evidence, joint_posterior
from bnet_transformer.inference.node_queries import Answers, NodeQuery
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.route import Route
from bnet_transformer.tpm.arrays import in_numpy


def expected_reading(query: Query, reading: NodeQuery) -> Tensor:
    """`sum_c P(c | evidence) P(j | i, c)` of a family, `[*plates, word, word read]` in float64; zero for set nodes.

    Args:
        query: The sentence and its evidence, the budget and the tolerance.
        reading: What is asked of a family that reads words (`Answers.reading_query`).
    """
    world, member, answers = query.world, reading.member, reading.answers
    shape = (*world.ground.shapes[member.family.index], answers.words_read(member))
    nodes, first = world.ground.nodes(member.family).tolist(), int(world.ground.offsets[member.family.index])
    table = torch.zeros(len(nodes), shape[-1], dtype=torch.float64)
    nodes = [node for node in nodes if node not in world.do]
    route = route_expected_reading(reading)
    if route.algorithm == "reference":
        route.warn_if_slow()
        for node in nodes:
            row = asking.expected_reading(world, node, query.evidence, query.budget)
            if row is not None:
                table[node - first, row[0]] = row[1]
        return table.reshape(shape)
    flat = answers.compute(reading, route).detach().double().cpu().reshape(-1, len(table), shape[-1])
    if bool(flat.isnan().any()):
        raise BNetError(member.family.name, expected="numbers", got="NaN")
    groups: dict[tuple[int, ...], list[int]] = {}  # nodes that depend on the same choices have one posterior
    for node in nodes:
        groups.setdefault(tuple(reading.choices.get(node, ())), []).append(node - first)
    for choices, places in groups.items():
        if not choices:  # one row for all states
            table[places] = flat[0, places]
            continue
        share = joint_posterior(replace(query, nodes=choices))
        table[places] = torch.einsum("s,snm->nm", share.reshape(-1).double(), flat[:, places])
    return table.reshape(shape)


def route_expected_reading(reading: NodeQuery) -> Route:
    """How `P(j | i)` of a family is averaged: from its tables in every state, or node by node by the reference."""
    world, route = reading.answers.world, reading.answers.route(reading)
    if asking.shared_and_own(world, reading.choices) is not None or route.algorithm == "reference":
        return route
    count = len(reading.above) * route.states * len(world.ground)
    reason = "its words depend on different choices, for which no table of the family has a dim each"
    return replace(route, algorithm="reference", reason=reason, node=reading.member.family.name, evaluations=count)


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
        member.family.index: answers.reading_query(member)
        for member in members
        if member.reads_words and member.tpm.has_reading and ground.kept(member.family, selection)
    }
    answers.prepare([each.member for each in reading.values() if answers.route(each).algorithm == "compiled"])
    rows, weights = {}, dict[tuple[int, int], float]()
    for index, each in reading.items():
        table = in_numpy(expected_reading(query, each))
        rows[index] = table.reshape(-1, table.shape[-1])
    for bundle, sources, targets in ground.arrows(selection):
        if bundle.child not in rows:
            continue
        inputs = [given for given in reading[bundle.child].member.inputs if given.parent == bundle.parent]
        if not any(WORD in given.over for given in inputs):
            continue
        words = (sources - int(ground.offsets[bundle.parent])) % ground.shapes[bundle.parent][-1]
        shares = rows[bundle.child][targets - int(ground.offsets[bundle.child]), words]
        arrows = dict(zip(zip(sources.tolist(), targets.tolist(), strict=True), shares.tolist(), strict=True))
        if any(WORD not in given.over for given in inputs):
            arrows = {(s, t): w for (s, t), w in arrows.items() if s not in asking.single_parents(query.world, t)}
        weights |= arrows
    return weights
