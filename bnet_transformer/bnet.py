"""`BNet`: a net and everything that can be derived from it. Each method validates its arguments and delegates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer import drawing
from bnet_transformer._core.checks import check_mapping, check_names, check_seed
from bnet_transformer._core.memory import translate_memory_errors, translate_memory_errors_of_methods
from bnet_transformer.attention.tan import CorpusTan, learn_tan_from_sentences
from bnet_transformer.bridges.networkx import template_graph_to_networkx
from bnet_transformer.data.batch import Batch, encode_batch
from bnet_transformer.data.encode import encode_sentence
from bnet_transformer.declare import Declaration, Network, declare, io
from bnet_transformer.drawing import PathLike
from bnet_transformer.equations import Equations, equations
from bnet_transformer.errors import BNetError
from bnet_transformer.figures import Picture
from bnet_transformer.graph import GroundGraph, StructureQueries
from bnet_transformer.inference import SentenceState
from bnet_transformer.sentence import Sentence

if TYPE_CHECKING:
    import graphviz
    import networkx as nx

    from bnet_transformer.bridges.pyro import PyroModel
    from bnet_transformer.compiler import CompiledModule
    from bnet_transformer.cost import Cost
    from bnet_transformer.learning.training import Generated


@translate_memory_errors_of_methods
class BNet(StructureQueries):
    """A net: one declaration, its parameters, and everything that can be derived from them.

    Args:
        declaration: A `Declaration`, or a network that was declared before.
        seed: The seed of the parameters.

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
        """The parameter store: a tensor for each name, such as `W_q_0.values` and `c.logits`."""
        return MappingProxyType(dict(self.network.parameters))

    # modified copies

    def replace(self, parameters: Mapping[str, Tensor]) -> BNet:
        """The same net with other values for some parameters.

        Args:
            parameters: Tensors by name; they are copied.
        """
        values = check_mapping("parameters", parameters).items()
        copies = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in values}
        return BNet(self.network.with_parameters(copies))

    def to(self, *targets: torch.dtype | torch.device | str) -> BNet:
        """The same net in another floating type, on another device, or both.

        Args:
            *targets: A floating type, a device such as `"cuda"`, or both.
        """
        return BNet(self.network.to(*targets))

    def save(self, path: PathLike) -> None:
        """Write the net to one safetensors file: its parameters, and its declaration as versioned JSON.

        Args:
            path: The file, for `bt.load`.
        """
        io.save(self.network, path)

    # derived objects

    def check(self) -> bool:
        """True; raises an error that lists every fault of the declaration and the parameters."""
        declare(self.declaration, parameters=self.network.parameters)
        return True

    def graph(self) -> nx.MultiDiGraph:
        """The folded graph: one node for each template and slice, its plates as attributes."""
        return template_graph_to_networkx(self.network)

    def equations(self, form: str = "word") -> Equations:
        """The structural equations and TPMs in LaTeX.

        Args:
            form: `"word"`, `"row"`, `"column"` or `"einstein"`.
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
        """The bnet of a sentence.

        Args:
            sentence: Text, a list of words, or ids; with several stacks a mapping from stack. A pretrained net encodes
                text by its tokenizer. None for a net without words.
            pair: A second sentence after the first, for a pretrained net.
            x: Vectors of shape `[word, dim]` in place of words.
            given: Values of the declaration's other inputs, by group.
        """
        encoded = encode_sentence(self.network, sentence, x, given, pair=pair)
        return Sentence(self, SentenceState(self._module, encoded))

    def batch(self, sentences: Sequence[object], *, pairs: Sequence[object] | None = None) -> Batch:
        """Sentences of any lengths as tensors for `module(batch.x, batch.mask, given=batch.given)`.

        Args:
            sentences: As for `sentence`.
            pairs: A second sentence after each.
        """
        return encode_batch(self.network, sentences, pairs)

    def module(self) -> CompiledModule:
        """The compiled net: an `nn.Module` in batched tensor operations.

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

    def pyro(self, parameters: str = "prior") -> PyroModel:
        """The net as a Pyro model, `model(x, y)`: plates, and `Categorical` sites that can be enumerated.

        A net without words has no `x`: call `model(y=...)`; the batch size is that of `y`.

        Args:
            parameters: With `"prior"` each table with a prior is sampled from it (a Dirichlet site), for inference of
                the tables. With `"own"` all tables are those of the net, for samples of data.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(4, observe=bt.tpm.Categorical(3), prior=1.0)
        >>> net.pyro().sites, net.pyro(parameters="own").sites
        (('theta_c', 'c', 'y'), ('c', 'y'))
        """
        from bnet_transformer.bridges.pyro import PyroModel

        return PyroModel(self.network, parameters)

    def generate(self, prompt: object = None, **options: Any) -> Generated:
        """New words after each prompt.

        Args:
            prompt: One prompt, or several.
            **options: Those of `training.generate`, such as `method="greedy"`, `"beam"` or `"sample"`.
        """
        from bnet_transformer.learning.training import generate

        return generate(self.network, prompt, **_check_options(options, generate))

    def iterate(self, window: object, steps: int, **options: Any) -> Tensor:
        """The next words after a window.

        Args:
            window: Vectors `[..., word, dim]`.
            steps: The number of words.
            **options: Those of `training.iterate`.

        Returns:
            `[..., steps, dim]`.
        """
        from bnet_transformer.learning.training import iterate

        return iterate(self.network, window, steps, **{"module": self._module, **_check_options(options, iterate)})

    def cost(
        self, words: int | Mapping[str, int] | None = None, *, batch: int = 1, want: Sequence[str] | None = None
    ) -> Cost:
        """The cost of a forward pass of `module()`: parameters, FLOPs, bytes, paths.

        Args:
            words: The number of words, or one for each stack; None for a net without words.
            batch: How many sentences.
            want: The groups that are computed, as in `module()`.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=8).cost(words=6).order
        'O(n^2 d |c| + n d^2 |c|)'
        """
        from bnet_transformer.cost import cost

        return cost(self.network, words, batch, want)

    def tan(
        self,
        sentences: Sequence[object],
        classes: object = "c",
        *,
        slice: int = 0,
        head: int | None = None,
        role: str | None = None,
    ) -> CorpusTan:
        """The tree-augmented naive Bayes model of words over a corpus, given a discrete class.

        The code of a word is the word with its maximum attention in a slice.

        Args:
            sentences: Sentences of one length.
            classes: A label for each sentence, or a node: its most probable state given the sentence's evidence.
            slice: The slice.
            head: One head; by default the heads of a plate are averaged.
            role: The node with attention, if a slice has several.
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
        """The folded graph as a figure.

        Args:
            **options: `slices=`, `weights=`, `highlight=`, `theme=`, `legend=`.

        >>> import bnet_transformer as bt
        >>> len(bt.bayesuvius(dim=4).picture().boxes)               # c, W_q, W_k, W_v, x, q, k, v, x
        9
        """
        layout: Picture = drawing.make_picture(self.network, **options)
        return layout

    def to_graphviz(self, **options: Any) -> graphviz.Source:
        """The folded graph as DOT for editing: structure, labels and colours, plates as clusters, without a layout.

        Args:
            **options: Those of `picture`.

        Returns:
            A `graphviz.Source`. `.source` is the DOT; `.render(...)` and `.pipe(...)` draw it with the program `dot`. A
            notebook shows the drawing of `dot`, or the figure of `picture` if `dot` is not installed.

        >>> import bnet_transformer as bt
        >>> bt.bayesuvius(dim=4).to_graphviz().source.splitlines()[0]
        'digraph bnet {'
        """
        return drawing.make_picture(self.network, **options).to_graphviz()

    def draw(self, path: PathLike, **options: Any) -> None:
        """Write the folded graph.

        Args:
            path: The file. Its suffix is svg, png, pdf, tex, dot, json or graphml.
            **options: Those of `picture`.

        >>> import bnet_transformer as bt
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bt.bayesuvius(dim=4).draw(f"{folder}/net.svg")
        ...     Path(f"{folder}/net.svg").read_text()[:4]
        '<svg'
        """
        drawing.write_picture(self.network, path, **options)

    def __repr__(self) -> str:
        slices = "".join(f"{s.name or 'slices'}={s.slices}, " for s in self.declaration.stacks)
        count = sum(p.numel() for p in self.network.parameters.values())
        groups = len(self.network.graph.groups)
        return f"<BNet {self.declaration.name}: {slices}{groups} families of nodes, {count:,} parameters>"


def load(path: PathLike, *, trust: Collection[str] | bool = ()) -> Any:
    """Read a file of `save`: a net (`BNet`), or a fit (`Fit`).

    Args:
        path: The file.
        trust: Names of TPM classes of other packages that may be imported.
    """
    from bnet_transformer.learning.fit import result as fits

    if not fits.is_fit(path):
        return BNet(io.load(path, trust=trust))
    result: Any = fits.load(path, trust=trust)
    return replace(result, net=BNet(result.network))


def load_net(path: PathLike, *, trust: Collection[str] | bool = ()) -> BNet:
    """The net in a file of `save`; of a fit, the fitted net.

    Args:
        path: The file.
        trust: Names of TPM classes of other packages that may be imported.
    """
    result = load(path, trust=trust)
    return result if isinstance(result, BNet) else BNet(result.network)


def _check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """The options, after a check that the function has them all."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    check_names(f"option of {function.__name__}", options, names)
    return options
