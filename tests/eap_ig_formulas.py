"""EAP, EAP-IG and exact edge patching on the explicit graph of a GPT-2: oracles of edges.

The formulas are those of Hanna, Pezzelle and Belinkov 2024 (arXiv:2403.17806) as github.com/hannamw/EAP-IG computes
them at commit 795f560 (src/eap: graph, utils, attribute, evaluate), written here again in plain PyTorch.

A *writer* adds its output to the residual stream: `input` (embedding and position), the head `a{l}.h{h}` (without the
bias of the output map, which the heads of a layer share) and the step `m{l}`. A *reader* reads the stream before its
layer norm: `a{l}.h{h}<q>`, `<k>`, `<v>`, `m{l}` and `logits`. An edge `writer->reader` connects a reader with a writer
before it, at all words at once. In a parallel net (`parallel_attn_mlp` in `cfg`) the step of a layer does not read the
heads of its layer.

Conventions of the package, for a metric m that it differentiates:

- The difference of a writer is `corrupt - clean`, and the score of an edge is the inner product of this difference and
  the gradient of m at the input of the reader, summed over features, words and examples, divided by the number of
  examples. The score is positive if the corruption increases m. The package differentiates a loss (its notebooks and
  MIB use the negative logit difference), so that useful edges are positive.
- m is the number that the metric returns for a batch. If it is a sum over the examples, the score is their mean. If it
  is a mean (as in the notebooks and in MIB), the package divides by the size of the batch a second time.
- The package interpolates the embedding without the position, which is the same in both runs: the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Metric = Callable[[Tensor], Tensor]  # logits [example, word, token] -> a number


@dataclass(frozen=True)
class Run:
    """A forward pass: the logits, the outputs of writers and the inputs of readers, `[example, word, feature]`."""

    logits: Tensor
    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class EdgeGraph:
    """The writers and readers of a `GPT2LMHeadModel` of transformers, or of the parallel net of its weights."""

    model: Any
    is_parallel: bool = False

    @property
    def layers(self) -> list[tuple[list[str], str]]:
        """The heads and the feed-forward step of each layer."""
        config = self.model.config
        return [([f"a{t}.h{h}" for h in range(config.n_head)], f"m{t}") for t in range(config.n_layer)]

    @property
    def writers_of(self) -> dict[str, tuple[str, ...]]:
        """The writers before each reader, in the order of the forward pass."""
        result, writers = {}, ["input"]
        for heads, step in self.layers:
            result |= {f"{head}<{letter}>": tuple(writers) for head in heads for letter in "qkv"}
            result[step] = tuple(writers if self.is_parallel else writers + heads)
            writers += [*heads, step]
        return {**result, "logits": tuple(writers)}

    @property
    def edges(self) -> list[str]:
        """The names of all edges, as in the JSON files of the package and of MIB."""
        return [f"{writer}->{reader}" for reader, writers in self.writers_of.items() for writer in writers]

    def run(
        self,
        ids: Tensor,
        fixed: Mapping[str, Tensor] | None = None,
        shares: Mapping[str, float | Tensor] | None = None,
        other: Run | None = None,
    ) -> Run:
        """Return a forward pass in which every reader has its own input: the sum of the outputs before it.

        `fixed` sets the outputs of writers to constants. An edge with a share s reads (1 - s) of the output of its
        writer in this run and s of that in the run `other`; the other readers of this writer read it in this run.
        """
        body, fixed, shares, writers_of = self.model.transformer, fixed or {}, shares or {}, self.writers_of
        outputs, inputs = {}, {}
        bias = torch.zeros((), dtype=self.model.dtype)  # of the output maps of the layers so far: no writer's output

        def mix(writer: str, edge: str) -> Tensor:
            value = outputs[writer]
            return value + shares[edge] * (other.outputs[writer] - value) if edge in shares else value

        def read(reader: str, norm: Callable[[Tensor], Tensor], bias: Tensor) -> Tensor:
            terms = [mix(writer, f"{writer}->{reader}") for writer in writers_of[reader]]
            state = torch.stack(terms).sum(0) + bias
            inputs[reader] = state if state.requires_grad else state.requires_grad_()
            return norm(inputs[reader])

        def write(writer: str, value: Tensor) -> None:
            outputs[writer] = fixed.get(writer, value)

        write("input", body.wte(ids) + body.wpe(torch.arange(ids.shape[1])))
        for (heads, step), block in zip(self.layers, body.h, strict=True):
            for h, head in enumerate(heads):
                rows = {letter: read(f"{head}<{letter}>", block.ln_1, bias) for letter in "qkv"}
                write(head, _attend(block.attn, h, rows))
            before, bias = bias, bias + block.attn.c_proj.bias
            write(step, block.mlp(read(step, block.ln_2, before if self.is_parallel else bias)))
        return Run(self.model.lm_head(read("logits", body.ln_f, bias)), outputs, inputs)

    def run_circuit(self, clean: Tensor, corrupt: Tensor, retained: Collection[str]) -> Run:
        """Return the run on clean words in which every edge outside a circuit reads the corrupt run (`evaluate_graph`).

        Edges of the circuit read the output of their writer in this run, as changed by the edges before it.
        """
        return self.run(clean, shares=dict.fromkeys(set(self.edges) - set(retained), 1.0), other=self.run(corrupt))


def _attend(attention: Any, h: int, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the output of a head, mapped to the stream, without the bias of the output map."""
    width, size = attention.embed_dim, attention.head_dim
    columns = {letter: slice(n * width + h * size, n * width + (h + 1) * size) for n, letter in enumerate("qkv")}
    maps = attention.c_attn
    q, k, v = (rows[s] @ maps.weight[:, columns[s]] + maps.bias[columns[s]] for s in "qkv")
    is_later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(is_later, -torch.inf)
    return scores.softmax(-1) @ v @ attention.c_proj.weight[h * size : (h + 1) * size]


@torch.no_grad()
def patch_edge(graph: EdgeGraph, clean: Tensor, corrupt: Tensor, edge: str) -> Tensor:
    """Return the logits of the clean run in which one edge reads the output of its writer in the corrupt run."""
    return graph.run(clean, shares={edge: 1.0}, other=graph.run(corrupt)).logits


@torch.no_grad()
def score_exactly(graph: EdgeGraph, clean: Tensor, corrupt: Tensor, metric: Metric) -> dict[str, float]:
    """Return `m(patched) - m(clean)` of each edge (`get_scores_exact`); m is a sum over the examples."""
    other, base = graph.run(corrupt), metric(graph.run(clean).logits)
    logits = {edge: graph.run(clean, shares={edge: 1.0}, other=other).logits for edge in graph.edges}
    return {edge: float(metric(value) - base) / len(clean) for edge, value in logits.items()}


def score_eap(graph: EdgeGraph, clean: Tensor, corrupt: Tensor, metric: Metric) -> dict[str, float]:
    """Return the scores of EAP (`get_scores_eap`; Syed, Rager and Conmy 2023, arXiv:2310.10348).

    `s(u->v) = (u_corrupt - u_clean) . dm/dv` at the clean run.
    """
    return _contract(graph, clean, corrupt, [differentiate(graph.run(clean), metric)])


def score_eap_ig_inputs(
    graph: EdgeGraph, clean: Tensor, corrupt: Tensor, metric: Metric, steps: int
) -> dict[str, float]:
    """Return the scores of EAP-IG on inputs (`get_scores_eap_ig`; arXiv:2403.17806).

    `s(u->v) = (u_corrupt - u_clean) . 1/m sum_(k=0..m-1) dm/dv` at the run on the embeddings
    `e_corrupt + k/m (e_clean - e_corrupt)`: a left Riemann sum, which includes the corrupt run and not the clean one.
    """
    start, end = (graph.run(ids).outputs["input"].detach() for ids in (corrupt, clean))
    runs = [graph.run(clean, {"input": start + k / steps * (end - start)}) for k in range(steps)]
    return _contract(graph, clean, corrupt, [differentiate(run, metric) for run in runs])


def score_eap_ig_activations(
    graph: EdgeGraph, clean: Tensor, corrupt: Tensor, metric: Metric, steps: int
) -> dict[str, float]:
    """Return the scores of EAP-IG on activations (`get_scores_ig_activations`).

    There are (1 + 2 layers) groups of writers: the input, all heads of a layer, the step of a layer. A run sets one
    group to the constants `k/m clean + (1 - k/m) corrupt`, k = 1..m: a right Riemann sum, which includes the clean run
    and not the corrupt one. The writers before it are clean, those after it are computed. The gradients of *all*
    readers are averaged over the `(1 + 2 layers) m` runs, also those of edges from other writers. No gradient flows
    through a constant.
    """
    first, last = graph.run(clean), graph.run(corrupt)
    groups = [["input"], *(group for heads, step in graph.layers for group in (heads, [step]))]
    gradients = []
    for group in groups:
        for k in range(1, steps + 1):
            pairs = {writer: (first.outputs[writer].detach(), last.outputs[writer].detach()) for writer in group}
            fixed = {writer: k / steps * a + (1 - k / steps) * b for writer, (a, b) in pairs.items()}
            gradients.append(differentiate(graph.run(clean, fixed), metric))
    return _contract(graph, clean, corrupt, gradients)


def score_clean_corrupted(graph: EdgeGraph, clean: Tensor, corrupt: Tensor, metric: Metric) -> dict[str, float]:
    """Return the scores of the mean of the gradients at the clean run and at the corrupt run
    (`get_scores_clean_corrupted`)."""
    return _contract(graph, clean, corrupt, [differentiate(graph.run(ids), metric) for ids in (clean, corrupt)])


@dataclass(frozen=True)
class EdgeRuns:
    """Runs of circuits of edges, with the methods that a search, a curve and a learned mask need.

    The metric has one number for each example. Names of edges are those of the graph, with spaces around the arrow.
    """

    graph: EdgeGraph
    clean: Tensor
    corrupt: Tensor
    metric: Metric

    @property
    def edge_names(self) -> tuple[str, ...]:
        """The edges, ordered by reader."""
        return tuple(edge.replace("->", " -> ") for edge in self.graph.edges)

    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric of circuits with the masks `retained`, `[circuit, edge]`: `[circuit, example]`."""
        with torch.no_grad():
            return torch.stack([self.evaluate_with_grad(row.to(self.graph.model.dtype)) for row in retained])

    def evaluate_with_grad(self, shares: Tensor) -> Tensor:
        """The metric if each edge reads this share of this run and the remainder of the corrupt run, `[edge]`."""
        with torch.no_grad():
            other = self.graph.run(self.corrupt)
        table = dict(zip(self.graph.edges, 1 - shares, strict=True))
        return self.metric(self.graph.run(self.clean, shares=table, other=other).logits)

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`."""
        return self.metric(self.graph.run(self.clean).logits).detach()

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`."""
        return self.swap().evaluate_clean()

    def swap(self) -> EdgeRuns:
        """The same edges with the clean and the corrupt words exchanged."""
        return EdgeRuns(self.graph, self.corrupt, self.clean, self.metric)


def differentiate(run: Run, metric: Metric) -> dict[str, Tensor]:
    """Return the gradient of the metric at the input of each reader, which is zero without a path to the metric."""
    states = tuple(run.inputs.values())
    gradients = torch.autograd.grad(metric(run.logits), states, allow_unused=True, materialize_grads=True)
    return dict(zip(run.inputs, gradients, strict=True))


def _contract(graph: EdgeGraph, clean: Tensor, corrupt: Tensor, gradients: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return `(corrupt - clean) . (mean gradient)` of each edge, divided by the number of examples."""
    with torch.no_grad():
        first, last = graph.run(clean).outputs, graph.run(corrupt).outputs
    mean = {reader: torch.stack([item[reader] for item in gradients]).mean(0) for reader in graph.writers_of}
    return {
        f"{writer}->{reader}": float(((last[writer] - first[writer]) * mean[reader]).sum()) / len(clean)
        for reader, writers in graph.writers_of.items()
        for writer in writers
    }
