"""`BNet`: a net and all that can be computed from it. Each method validates its arguments and delegates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer import drawing
from bnet_transformer._core.checks import check_int, check_mapping, check_names, check_seed
from bnet_transformer._core.process import translate_memory_errors, translate_memory_errors_of_methods
from bnet_transformer._core.results import is_result, load_result, read_field_names, register_codec
from bnet_transformer.attention.tan import CorpusTan, learn_tan_from_sentences
from bnet_transformer.bridges.networkx import template_graph_to_networkx
from bnet_transformer.bridges.pgmpy import Roles, bif_to_declaration, pgmpy_to_declaration
from bnet_transformer.data.batch import Batch, encode_batch
from bnet_transformer.data.encode import encode_sentence
from bnet_transformer.declare import Declaration, Network, declare, io
from bnet_transformer.declare.neurons import expose_neurons
from bnet_transformer.drawing import PathLike
from bnet_transformer.equations import Equations, equations
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.figures import Picture
from bnet_transformer.graph import GroundGraph, StructureQueries
from bnet_transformer.inference import Samples, SentenceState
from bnet_transformer.sentence import Sentence

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd
    from pgmpy.models import DiscreteBayesianNetwork

    from bnet_transformer.bridges.pyro import PyroModel
    from bnet_transformer.compiler import CompiledModule
    from bnet_transformer.cost import Cost
    from bnet_transformer.generation.generate import Generated


NET_DESCRIPTION = "a net, or a result that contains one, such as a fit"


@translate_memory_errors_of_methods
class BNet(StructureQueries):
    """A net: one declaration and its parameters. Its methods return sentences, modules, equations and figures.

    Args:
        declaration: A `Declaration`, or the network of another net.
        seed: The seed of the random initial parameters.

    Raises:
        DeclarationError: The declaration has faults; the error lists them all.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=8, slices=2, heads=4)
    >>> net.sentence("the cat sat")["x_2_1"].shape          # for each state of c
    torch.Size([4, 8])
    """

    @translate_memory_errors("BNet")
    def __init__(self, declaration: Declaration | Network, *, seed: int = 0) -> None:
        if not isinstance(declaration, Declaration | Network):
            raise BNetError("BNet", expected="a Declaration", actual=declaration)
        self.network = declaration if isinstance(declaration, Network) else declare(declaration, seed=check_seed(seed))

    @property
    def declaration(self) -> Declaration:
        """The declaration of the net."""
        return self.network.declaration

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters: a read-only mapping from a name, such as `W_q_0.values` or `c.logits`, to its tensor."""
        return MappingProxyType(dict(self.network.parameters))

    # modified copies

    def replace(self, parameters: Mapping[str, Tensor]) -> BNet:
        """A net with the same declaration and other values of some parameters.

        Args:
            parameters: A mapping from the name of a parameter to its new tensor, which is copied. Other parameters
                keep their values.

        Returns:
            The new net.

        Raises:
            UnknownNameError: A name is unknown.
            DeclarationError: A tensor has another shape than the parameter, or invalid numbers.
        """
        values = check_mapping("parameters", parameters).items()
        copies = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values}
        return BNet(self.network.with_parameters(copies))

    def to(self, *targets: torch.dtype | torch.device | str) -> BNet:
        """The same net in another floating type, on another device, or both.

        Args:
            *targets: A floating type such as `torch.float64`, a device such as `"cuda"`, or both.

        Returns:
            The new net.
        """
        return BNet(self.network.to(*targets))

    def expose_neurons(self) -> BNet:
        """The same net with neurons as nodes: each feed-forward node is its hidden activations, and a map of them.

        The node `ffn_1_4` has the new parent `neuron_1_4`, the hidden activations `[hidden]` after the nonlinearity.
        In a stack `enc` they are `enc_neuron_1_4`, and those of another role `e` are `e_neuron_1_4`. The net
        computes the same and has the same tensors as parameters, without a copy. All methods apply to neurons as to
        other nodes.

        Returns:
            The net.

        Raises:
            BNetError: The net has no feed-forward node, or has nodes of the new role already.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(dim=8, heads=2, slices=2, hidden=32, vocabulary=["the", "cat", "sat"]).expose_neurons()
        >>> s = net.sentence("the cat sat")
        >>> s["neuron_1_2"].shape, s.parents("ffn_1_2"), s.do(neuron_1_2=0)["ffn_1_2"].shape
        (torch.Size([32]), ['neuron_1_2'], torch.Size([8]))
        """
        return BNet(expose_neurons(self.network))

    def save(self, path: PathLike) -> None:
        """Write the net to one safetensors file: its parameters, and its declaration as versioned JSON.

        Args:
            path: The file to write; `bt.load` reads it.
        """
        io.save(self.network, path)

    # derived objects

    def check(self) -> bool:
        """Check the declaration and the parameters.

        Returns:
            True if there is no fault.

        Raises:
            DeclarationError: There are faults; the error lists all of them.
        """
        declare(self.declaration, parameters=self.network.parameters)
        return True

    def graph(self) -> nx.MultiDiGraph:
        """The template graph as a networkx graph: one node for each node group and slice, with plates as attributes."""
        return template_graph_to_networkx(self.network)

    def equations(self, form: str = "word") -> Equations:
        """The structural equations and TPMs of the net in LaTeX.

        Args:
            form: The notation: `"word"` for vectors of one word with indices, `"row"` or `"column"` for matrices
                with a row or a column for each word, `"einstein"` for sums over repeated indices.

        Returns:
            The equations; a notebook typesets them, and `latex()` returns their source.
        """
        return equations(self.network, form)

    def sentence(
        self,
        sentence: object = None,
        *,
        pair: object = None,
        x: object = None,
        given: Mapping[str, object] | None = None,
    ) -> Sentence:
        """The bnet of one sentence.

        Args:
            sentence: A text, a list of words, or a list of integer ids; in a net with several stacks, a mapping from
                stack to one of these. A pretrained net splits text by its tokenizer. None for a net without words.
            pair: A second sentence, which follows the first; for a pretrained net of sentence pairs.
            x: Vectors `[word, dim]` instead of words; in a net with several stacks, a mapping from stack.
            given: A mapping from the name of another input node group to its value.

        Returns:
            The sentence, to query and to intervene on.

        Raises:
            BNetError: The words, vectors or values do not fit the net.
        """
        encoded = encode_sentence(self.network, sentence, x, given, pair=pair)
        return Sentence(self, SentenceState(self._module, encoded))

    def batch(self, sentences: Sequence[object], *, pairs: Sequence[object] | None = None) -> Batch:
        """A batch of sentences of different lengths, padded, as input of the compiled net.

        Pass it as `module(batch.x, batch.mask, given=batch.given)`.

        Args:
            sentences: A list of sentences; each is a text, a list of words, a list of integer ids, or a mapping from
                stack.
            pairs: A second sentence for each sentence, for a pretrained net of sentence pairs.

        Returns:
            The batch; `batch.x` is a tensor `[sentence, word]` of ids or `[sentence, word, dim]` of vectors.

        Raises:
            BNetError: A sentence does not fit the net.
        """
        return encode_batch(self.network, sentences, pairs)

    def module(self) -> CompiledModule:
        """The compiled net: an `nn.Module` that computes node groups of many sentences by batched tensor operations.

        >>> import bnet_transformer as bt
        >>> module = bt.bayesuvius(dim=8, heads=4).module()
        >>> module(torch.zeros(2, 5, 8)).shape                  # [states of c, batch, word, dim]
        torch.Size([4, 2, 5, 8])
        """
        from bnet_transformer.compiler import CompiledModule

        return CompiledModule(self.network)

    @cached_property
    def _module(self) -> CompiledModule:
        """The compiled net, shared by all sentences of this net."""
        return self.module().eval()

    def pyro(self, parameters: str = "prior", *, choices: str = "sites") -> PyroModel:
        """The net as a Pyro model `model(x, y)` with plates; its `Categorical` sites can be enumerated.

        A net without words has no `x`: call `model(y=...)`; the batch size is that of `y`.

        Args:
            parameters: `"prior"` samples each table that has a prior from it (a Dirichlet site), to infer the tables.
                `"own"` uses the tables of the net, to sample data.
            choices: `"sites"` (default): each latent choice is a site. `"summed"`: all latent choices are summed out
                exactly, and the log evidence of each sentence is one factor, `log_evidence`. This is for chains along
                words, which Pyro cannot enumerate in a plate.

        Returns:
            The model, a callable with the names of its sites (`sites`).

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, observe=bt.tpm.Categorical(3), prior=1.0)
        >>> net.pyro().sites, net.pyro(parameters="own").sites
        (('theta_c', 'c', 'y'), ('c', 'y'))
        """
        from bnet_transformer.bridges.pyro import PyroModel

        return PyroModel(self.network, parameters, choices)

    def generate(self, prompt: object = None, **options: Any) -> Generated:
        """New words after each prompt.

        Args:
            prompt: One prompt (a text, a list of words or of ids), or a list of prompts.
            **options: The options of `generation.generate`, such as `method="greedy"`, `"beam"` or `"sample"`; `do=`
                sets or changes nodes at every word (activation steering, ablations, patches), and `choices="draw"`
                draws latent choices.

        Returns:
            The words, ids and log probabilities of each continuation, and the drawn states of choices.

        >>> import torch
        >>> import bnet_transformer as bt
        >>> from bnet_transformer.interventions import Shift, Zero
        >>> net = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "cat", "sat"])
        >>> steered = net.generate("the cat", length=3, do={"x_1": Shift(torch.ones(8)), "a_0_1": Zero()})
        >>> len(steered.words[0]), len(steered.log_probs[0])
        (3, 3)
        """
        from bnet_transformer.generation import generate

        return generate(self.network, prompt, **_check_options(options, generate))

    def sample(self, n: int = 1, *, words: object = None, start: object = None, seed: int = 0) -> Samples:
        """Samples of sentences from the joint distribution of the net (ancestral sampling): choices, then words.

        For the random nodes of a given sentence, use `net.sentence(...).sample(n)`.

        Args:
            n: The number of samples.
            words: The number of words of each sentence; for several stacks, a mapping from stack. None for a net
                without words.
            start: In a net that predicts the next word, the word before the first word. By default the start word of
                the tokenizer.
            seed: The seed of the random numbers.

        Returns:
            The samples of every random node. In a net that predicts the next word, the readout of word i is word i + 1:
            `samples["y_0"]` is the word after the start word, `samples["c"]` the choice of each sentence, and
            `samples.texts` has the texts.

        Raises:
            BNetError: The words are an input that the net does not generate.

        >>> import bnet_transformer as bt
        >>> words = ["the", "cat", "sat"]
        >>> net = bt.bayesuvius(4, vocabulary=words, mask="causal", observe=bt.tpm.Categorical(3))
        >>> samples = net.sample(5, words=2, start="the")
        >>> list(samples.states), samples["y_1"].shape
        (['c', 'y_0', 'y_1'], torch.Size([5]))
        """
        count, seed = check_int("n", n), check_seed(seed)
        has_inputs = any(spec.tpm.kind == "input" and spec.tpm.default is None for spec in self.network.specs)
        if not (has_inputs and self.network.graph.word_stacks):
            return self.sentence(words).sample(count, seed=seed)
        from bnet_transformer.generation.generate import sample_words

        return sample_words(self.network, count, words, start, seed)

    def iterate(self, window: object, steps: int, **options: Any) -> Tensor:
        """The next vectors after a window of vectors: each predicted vector is an input of the next step.

        Args:
            window: The first vectors, `[..., word, dim]`.
            steps: The number of new vectors.
            **options: The options of `generation.iterate`.

        Returns:
            A tensor `[..., steps, dim]`.
        """
        from bnet_transformer.generation.forecast import iterate

        return iterate(self.network, window, steps, **{"module": self._module, **_check_options(options, iterate)})

    def cost(
        self, words: int | Mapping[str, int] | None = None, *, batch: int = 1, want: Sequence[str] | None = None
    ) -> Cost:
        """The cost of a forward pass of `module()`: parameters, FLOPs, bytes and path lengths.

        Args:
            words: The number of words of a sentence, or a mapping from stack to its number; None for a net without
                words.
            batch: The number of sentences.
            want: The names of the node groups or roles to compute; by default the outputs of `module()`.

        Returns:
            The cost, in total and for each node group.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=8).cost(words=6).order
        'O(n^2 d |c| + n d^2 |c|)'
        """
        from bnet_transformer.cost import cost

        return cost(self.network, words, batch, want)

    def edges(self) -> pd.DataFrame:
        """The edges from writers to readers, as in ACDC and edge attribution patching, at all words at once.

        A writer is a node without its word that adds to a chain of sums, linear maps and norms: an embedding, the mix
        of a head, a feed-forward step. A reader is where such a chain ends: the queries, keys or values of a head, the
        input of a step, the readout. `bt.sweep(clean, corrupt, at="edges", ...)` computes their effects.

        Returns:
            A row for each edge: `edge` (its name), `writer`, `reader`, `channel` (`"q"`, `"k"`, `"v"`, the slot of
            another node, or `"readout"`), `kind` of the writer, `writer_slice` and `reader_slice`.

        Raises:
            BNetError: A recurrent node depends on the words, so that it is no sum of writers.

        >>> import bnet_transformer as bt
        >>> net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "sat"])
        >>> net.edges()["edge"].head(2).tolist()
        ['embed -> q_0_0', 'embed -> q_0_1']
        """
        from bnet_transformer.interventions.edges import EdgeStructure

        return EdgeStructure.of_network(self.network).to_dataframe()

    def tan(
        self,
        sentences: Sequence[object],
        classes: object = "c",
        *,
        slice: int = 0,
        head: int | None = None,
        role: str | None = None,
    ) -> CorpusTan:
        """Learn a tree-augmented naive Bayes (TAN) model of the attention of a slice over a corpus.

        The feature of word i is the word j to which it attends most. Given the class, each feature depends on at most
        one other feature.

        Args:
            sentences: The sentences, all with the same number of words.
            classes: A label for each sentence, or the name of a discrete node; the class is then the node's most
                probable state given the evidence of the sentence.
            slice: The index of the slice, from 0, or from -1 for the last one.
            head: The index of one head; by default the heads of a plate are averaged.
            role: The role of the node with attention, such as `"x"`; required if the slice has several.

        Returns:
            The model: its tree, tables and scores.
        """
        if isinstance(sentences, str) or not isinstance(sentences, Sequence):
            raise BNetError("sentences", expected="a list of sentences", actual=sentences)
        items = [sentence if isinstance(sentence, Sentence) else self.sentence(sentence) for sentence in sentences]
        return learn_tan_from_sentences([s.state for s in items], classes, slice, head, role)

    # structure

    @cached_property
    def _graph(self) -> GroundGraph:
        return GroundGraph(self.network.graph.without_plates, {})

    @property
    def _functional_groups(self) -> frozenset[int]:
        return self.network.functional_groups

    # figures

    def picture(self, **options: Any) -> Picture:
        """The template graph as a figure.

        Args:
            **options: `slices` selects slices by index. `weights=False` omits selectors and weights. `highlight` marks
                names. `theme` is "light", "dark" or "auto". `legend=False` omits the legend. `width` is the physical
                width of the file, such as "8.5cm", "column", "text" or "slide"; `font` is a font family; `title` is the
                text above the figure.

        Returns:
            The figure. A notebook displays it; its methods write it to a file.

        Raises:
            BNetError: The figure does not fit `width` at a legible size; the error names a width that suffices.

        >>> import bnet_transformer as bt
        >>> len(bt.bayesuvius(dim=4).picture().boxes)               # c, W_q, W_k, W_v, x, q, k, v, x
        9
        """
        return drawing.picture(self.network, **options)

    def draw(self, path: PathLike, **options: Any) -> None:
        """Write the template graph to a file.

        Args:
            path: The file. Its suffix selects the format: svg, png, pdf, tex, dot, json, graphml or gexf. A path that
                ends in `/` is a folder, in which `nodes.parquet` and `arrows.parquet` are written; this requires
                pyarrow (the extra `parquet`).
            **options: The options of `picture`.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).draw(f"{folder}/net.svg")
        ...     Path(f"{folder}/net.svg").read_text()[:4]
        '<svg'
        """
        drawing.draw(self.network, path, **options)

    def __repr__(self) -> str:
        slices = "".join(f"{s.name or 'slices'}={s.slices}, " for s in self.declaration.stacks)
        count = sum(p.numel() for p in self.network.parameters.values())
        groups = len(self.network.graph.groups)
        return f"<BNet {self.declaration.name}: {slices}{groups} node groups, {count:,} parameters>"


drawing.picture.register(BNet, BNet.picture)
drawing.draw.register(BNet, BNet.draw)


def load(path: PathLike, *, trust: Collection[str] | bool = ()) -> Any:
    """Read a net, a fit or another result from a file that `save` wrote.

    Args:
        path: The file.
        trust: The full names of TPM classes of other packages that the file may import, such as `"mine.Gate"`; True
            for all. By default none.

    Returns:
        A `BNet`, a `Fit`, or the result: an object of the class that was saved.

    Raises:
        FileError: The file is missing, corrupt, of an unsupported version, of an unknown kind, or names a class that is
            not trusted.
    """
    return load_result(path, trust) if is_result(path) else BNet(io.load(path, trust=trust))


def from_pgmpy(model: DiscreteBayesianNetwork, *, roles: Roles = None, learnable: bool = False) -> BNet:
    """A net of a discrete Bayesian network of pgmpy: a node without words, with a `Table`, for each variable.

    `net.sentence().to_pgmpy()` is the network again.

    Args:
        model: The network, with a `TabularCPD` for each variable. The names of states become labels; the numbers 0, 1,
            ... are states without labels. Rows whose sum differs from 1 by at most 0.01 are divided by their sum.
        roles: The roles of variables with names that are no valid roles, such as `"X_1"`: a mapping, or a function from
            names to roles. None (default): the names are the roles.
        learnable: Whether fits change the tables. Default False.

    Returns:
        The net, in float64.

    Raises:
        BNetError: A variable has no table, its table is no distribution, or its name is no valid role.

    >>> import bnet_transformer as bt
    >>> from pgmpy.factors.discrete import TabularCPD
    >>> from pgmpy.models import DiscreteBayesianNetwork
    >>> model = DiscreteBayesianNetwork([("rain", "wet")])
    >>> model.add_cpds(
    ...     TabularCPD("rain", 2, [[0.8], [0.2]]),
    ...     TabularCPD("wet", 2, [[0.9, 0.2], [0.1, 0.8]], evidence=["rain"], evidence_card=[2]),
    ... )
    >>> bt.from_pgmpy(model).sentence().posterior("rain", {"wet": 1}).numpy().round(3)
    array([0.333, 0.667])
    """
    return BNet(declare(pgmpy_to_declaration(model, roles=roles, learnable=learnable)).to(torch.float64))


def read_bif(path: PathLike, *, roles: Roles = None, learnable: bool = False) -> BNet:
    """A net of a discrete Bayesian network in a BIF file, such as those of the bnlearn repository.

    Files that `s.draw("net.bif")` wrote restore the labels of the states.

    Args:
        path: The file.
        roles: The roles of variables with names that are no valid roles, as in `from_pgmpy`. Default None.
        learnable: Whether fits change the tables. Default False.

    Returns:
        The net, in float64.

    Raises:
        FileError: The file is missing or not in the BIF format.
        BNetError: A variable has no table, its table is no distribution, or its name is no valid role.

    >>> import bnet_transformer as bt
    >>> import tempfile
    >>> coin = bt.BNet(bt.Declaration(nodes=[bt.Node("coin", bt.tpm.Table((0.5, 0.5), ("heads", "tails")))]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     coin.sentence().draw(f"{folder}/coin.bif")
    ...     bt.read_bif(f"{folder}/coin.bif").sentence().labels("coin")
    ('heads', 'tails')
    """
    return BNet(declare(bif_to_declaration(path, roles=roles, learnable=learnable)).to(torch.float64))


def load_net(path: PathLike, *, trust: Collection[str] | bool = ()) -> BNet:
    """Read the net from a file that `save` wrote; from the file of a fit or a training, the net that it returned.

    Args:
        path: The file.
        trust: The full names of TPM classes of other packages that the file may import; True for all.
    """
    result = load(path, trust=trust)
    if isinstance(result, BNet):
        return result
    network = getattr(getattr(result, "net", result), "network", None)
    if not isinstance(network, Network):
        raise FileError(str(path), expected=NET_DESCRIPTION, actual=type(result).__name__)
    return BNet(network)


def check_has_net(path: PathLike) -> None:
    """Raise the error of `load_net` for the file of a result that contains no net, without reading its tensors."""
    kind, fields = read_field_names(path)
    if not {"net", "network"} & {*fields}:
        raise FileError(str(path), expected=NET_DESCRIPTION, actual=kind)


def _check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """The options; an unknown option is an error with near names."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    check_names(f"option of {function.__name__}", options, names)
    return options


register_codec(
    BNet, lambda net: {"network": net.network}, lambda fields, trust: BNet(fields["network"]), {"network": Network}
)
