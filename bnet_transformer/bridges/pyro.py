"""The net as a Pyro model with plates and enumeration; deterministic nodes are plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistribution, TorchDistributionMixin
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.do_messenger import DoMessenger
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, constraints

from bnet_transformer._core.checks import check_choice, check_int, check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import is_readable
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.evaluate import Scan, compute_value
from bnet_transformer.compiler.gather import (
    ExecutionRequest,
    ExecutionState,
    TensorLayout,
    gather_parents,
    get_present_mask,
    lay_out_known,
    lay_out_value,
)
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.data import Evidence
from bnet_transformer.data.checks import (
    StackTensors,
    check_mask,
    check_masked_reads,
    check_states,
    describe_shape,
    get_plate_sizes,
    infer_batch_size,
)
from bnet_transformer.declare import Network, NodeSpec, ParentSpec, as_network
from bnet_transformer.errors import BNetError, EvidenceError, format_value, unknown_name_error
from bnet_transformer.inference.elimination import compute_log_evidence
from bnet_transformer.inference.factors import request_factors
from bnet_transformer.inference.sampling import SamplingScan
from bnet_transformer.tpm.base import broadcast_shapes

# --------------------------------------------------------------------------------------------------------------------
# Conversion of values and distributions to Pyro's shapes and classes, and errors for mistakes that Pyro ignores.
#
# Plates have fixed dims from the right; enumerated dims are to the left of them. Errors are raised for data with names
# that are not sites, for wrong shapes, and for enumerated choices that cannot be summed out independently.


UNKNOWN_GROUP = -1  # in a layout: a dim that Pyro enumerates for a site that is not in the net


def event_shape(spec: NodeSpec) -> tuple[int, ...]:
    """Return the event shape of a group's site: its shape, or () for states."""
    return () if spec.tpm.kind == "discrete" else spec.shape


class SiteStatusMessenger(Messenger):
    """Records whether a site inside it is enumerated, and whether its value is fixed (`obs=`, condition, do)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enumerated = False
        self.is_fixed = False

    def _pyro_post_sample(self, msg: Any) -> None:
        """Record the status of a site after its sample statement."""
        self.is_enumerated = (msg["infer"] or {}).get("_enumerate_dim") is not None
        self.is_fixed = bool(msg["is_observed"])


def iterate_handled_sites() -> Iterator[tuple[str, str, object]]:
    """Iterate over the data of the handlers around the model: `"condition"` or `"do"`, the name, the value."""
    for handler in _PYRO_STACK:
        if isinstance(handler, ConditionMessenger | DoMessenger) and isinstance(handler.data, dict):
            kind = "do" if isinstance(handler, DoMessenger) else "condition"
            yield from ((kind, name, value) for name, value in handler.data.items())


def count_sentences(
    network: Network, observed: Mapping[str, Tensor], max_plate_nesting: int, minimum: int, batch: int | None
) -> int:
    """Return the number of sentences: of the inputs (`minimum`) if above 1, else of the observations, or `batch`.

    Observations are `[batch, *plates, word, *shape]`. The data of `condition` and `do` have Pyro's shape, with
    `max_plate_nesting` plates.
    """
    specs = {m.group.name: m for m in network.specs if m.tpm.is_random and m.scope != "corpus"}
    by_group = {specs[name].group.index: (name, value) for name, value in observed.items() if name in specs}
    counts = [infer_batch_size(network, by_group, minimum)]
    for _, name, value in iterate_handled_sites() if minimum == 1 else ():
        if name in specs and isinstance(value, Tensor):
            event_dim = len(specs[name].shape) if value.is_floating_point() else 0
            start = value.dim() - event_dim - max_plate_nesting
            counts += value.shape[start:][:1] if start >= 0 else []
    if batch is not None and check_int("batch", batch) != max(counts) > 1:
        raise BNetError("batch", expected=f"{max(counts)}, the number of sentences in the data", actual=batch)
    return max(counts) if batch is None else batch


def check_handled_sites(
    network: Network, sites: frozenset[str], observed: frozenset[str], *, is_summed: bool = False
) -> dict[str, frozenset[str]]:
    """Return the sites with `condition` and `do`; raise an error for other nodes, and for `do` on an observed site.

    `is_summed` is true for a model that sums all random nodes out.
    """
    handled: dict[str, set[str]] = {"condition": set(), "do": set()}
    for handler, name, _ in iterate_handled_sites():
        if name in sites:
            handled[handler].add(name)
        elif name in network.graph.by_name:
            if network.get_spec(name).tpm.is_random and is_summed:
                hint = "Pass observations as y= and interventions as do=, or use net.pyro(choices='sites')"
                message = f"{handler} on {name}: with choices='summed' choices are summed out, and no node is a site"
                raise BNetError(message, hint=hint)
            is_set = network.get_spec(name).tpm.is_random
            kind = "a node that do= sets" if is_set else "a deterministic node"
            hint = f"Leave {name} out of do=" if is_set else f"Use model(x, do={{{name!r}: ...}}) to set the node"
            expected = "a random site of the model"
            actual = f"{kind}, for which Pyro would silently ignore the value"
            allowed = ", ".join(sorted(sites))
            raise BNetError(f"{handler} on {name}", expected=expected, actual=actual, allowed=allowed, hint=hint)
        # A name that is not a node of the net may be a site of a model around this one.
        elif (owner := network.graph.find_group_of_node(name)) is not None:
            hint = f"Use {owner.name!r}"
            hint += f", or y={{{owner.name!r}: ...}} with observed_mask=" if owner.name in sites else ""
            expected = "the name of a node group, because all its nodes are one site"
            raise BNetError(f"{handler} on {name}", expected=expected, actual="the name of one node", hint=hint)
    for name in sorted(handled["do"] & (handled["condition"] | observed)):
        raise EvidenceError(name, expected="do or evidence on a node, not both")
    return {handler: frozenset(names) for handler, names in handled.items()}


def check_type(subject: str, spec: NodeSpec, value: object, dtype: torch.dtype) -> Tensor:
    """Check the type of a value of a random group: states are integers, other values have the dtype of the net."""
    if not isinstance(value, Tensor):
        raise BNetError(subject, expected="a tensor", actual=value)
    discrete = spec.tpm.kind == "discrete"
    if discrete == (value.is_floating_point() or value.is_complex()) or value.dtype == torch.bool:
        expected = "integers, which are states" if discrete else "real numbers"
        raise BNetError(subject, expected=expected, actual=f"{value.dtype}")
    if not discrete and value.dtype != dtype:
        hint = f"Convert the net with net.to({value.dtype}), or the value to {dtype}"
        raise BNetError(subject, expected=f"{dtype}, the dtype of the net", actual=f"{value.dtype}", hint=hint)
    return value


def check_finite(subject: str, value: Tensor, observed_mask: Tensor | None = None) -> None:
    """Raise an error for NaN and infinity in observed entries."""
    if not value.is_floating_point() or not is_readable(value):
        return
    bad = ~torch.isfinite(value.detach())
    if observed_mask is not None:
        bad = bad & observed_mask.reshape(*observed_mask.shape, *[1] * (bad.dim() - observed_mask.dim()))
    if bool(bad.any()):
        raise EvidenceError(subject, expected="finite numbers", actual=value.detach()[bad][0].item())


def check_data(state: ExecutionState, spec: NodeSpec, value: object) -> Tensor:
    """Check the shape of a value `[batch, *plates, word, *shape]`, as far as it is known before a run."""
    name, network, event = f"data[{spec.group.name!r}]", state.network, event_shape(spec)
    value = check_type(name, spec, value, network.dtype)
    words = value.shape[value.dim() - len(event) - 1] if value.dim() > len(event) else 0
    sizes = (*get_plate_sizes(network, spec, {spec.group.word_stack or "": words}), *event)
    fits = value.dim() in (len(sizes), len(sizes) + 1) and value.shape[value.dim() - len(sizes) :] == sizes
    if not fits or 0 in value.shape:
        expected = describe_shape(spec, is_state=spec.tpm.kind == "discrete")
        expected += "".join(f", {network.graph.plate_sizes[plate]} along {plate}" for plate in spec.group.plates)
        raise BNetError(name, expected=expected, actual=f"shape {tuple(value.shape)}")
    check_finite(name, value)
    if spec.tpm.states is not None:  # else the states are words, whose number is known only in a run
        check_states(network, {spec.group.index: name}, {spec.group.index: value}, state.word_counts, {})
    return value


def check_sample(
    state: ExecutionState, spec: NodeSpec, subject: str, value: object, sizes: Sequence[int], handler: str
) -> Tensor:
    """Check the value of a site: its states, and in `condition` and `do` (`handler`) its shape.

    `sizes` are the numbers of sentences, entries of each plate, and words of the site. `do` may set one value for all.
    Additional leading dims are those of vectorized samples.
    """
    if handler or spec.tpm.kind == "discrete":
        value = check_type(subject, spec, value, state.dtype)
    assert isinstance(value, Tensor)
    if handler:
        event, full = event_shape(spec), tuple(sizes)
        split = max(0, value.dim() - len(event))
        leading = tuple(value.shape[:split])
        if len(leading) < len(full) and set(leading) <= {1}:
            leading = (1,) * (len(full) - len(leading)) + leading
        fitting = [full, (1, *full[1:]), (1,) * len(full)] if handler == "do" else [full]
        if leading[max(0, len(leading) - len(full)) :] not in fitting or value.shape[split:] != event:
            expected = f"shape {(*full, *event)}, which starts with the {len(full)} dims of sentence, plates and word"
            actual = f"shape {tuple(value.shape)}"
            raise BNetError(subject, expected=expected, actual=actual, hint="Use model.data to create these dims")
        check_finite(subject, value)
    check_states(state.network, {spec.group.index: subject}, {spec.group.index: value}, state.word_counts, {})
    return value


def check_probabilities(subject: str, value: object, stored: Tensor) -> None:
    """Raise an error for a table with a wrong shape or dtype, or with rows that are not probabilities."""
    if not isinstance(value, Tensor) or value.dtype != stored.dtype:
        actual = f"{value.dtype}" if isinstance(value, Tensor) else value
        raise BNetError(subject, expected=f"probabilities in {stored.dtype}", actual=actual)
    if value.shape[max(0, value.dim() - stored.dim()) :] != stored.shape:
        raise BNetError(subject, expected=f"shape {tuple(stored.shape)}", actual=f"shape {tuple(value.shape)}")
    if is_readable(value):
        rows = value.detach()
        is_normalized = (rows.sum(-1) - 1).abs() <= torch.finfo(rows.dtype).eps ** 0.5
        if not bool(is_normalized.all() & (rows >= 0).all()):
            raise BNetError(subject, expected="rows of probabilities that sum to 1", actual=rows.tolist())


def find_meeting_group(network: Network, index: int, known: frozenset[int]) -> str | None:
    """Find the first group in which several entries of an enumerated choice interact; None if there is none.

    Parallel enumeration gives all entries of a plate one dim of states, and sums them out independently. This is exact
    only if no value depends on two entries of the choice (Obermeyer et al. 2019, tensor variable elimination).
    """
    spec = network.specs[index]
    choice_axes = set(spec.group.plates) | ({WORD} if spec.group.word_stack is not None else set())
    reached = {index: choice_axes}
    before: dict[int, set[str]] = {}
    while reached != before:  # to a fixed point: in a recurrent component no order puts all parents first
        before = dict(reached)
        for child in network.specs:
            child_id = child.group.index
            if child_id in known or (child_id == index and not any(parent.index == index for parent in child.parents)):
                continue
            axes: set[str] = set()
            for parent in child.parents:
                if parent.index in reached:
                    if any(_meets(child, parent, axis) for axis in reached[parent.index]):
                        return child.group.name
                    axes |= reached[parent.index]
                axes |= {axis for _, selector in parent.pick for axis in reached.get(selector, ())}
            reads = any(g.index in reached or any(s in reached for _, s in g.pick) for g in child.parents)
            if reads and child.tpm.kind == "deterministic":
                reached[child_id] = axes
    return None


def _meets(child: NodeSpec, parent: ParentSpec, axis: str) -> bool:
    """Return True if one entry of the child reads other entries of its parent along an axis."""
    if axis in parent.over or axis in dict(parent.pick):
        return True
    return not parent.reach.is_positionwise if axis == WORD else axis not in child.group.plates


def align_site_value(state: ExecutionState, spec: NodeSpec, value: Tensor) -> Tensor:
    """Align the value of a site with all dims of the layout; the layout grows if Pyro enumerated another site."""
    split = value.dim() - len(event_shape(spec))
    leading, shape = list(value.shape[:split]), list(value.shape[split:])
    while len(leading) > state.layout.rank and leading[0] == 1:
        del leading[0]
    plain = state.layout.rank - state.layout.batch_dim
    if 0 < len(leading) < plain and value.numel() > 1:
        expected = f"a value with the {plain} dims of sentence, plates and word"
        actual, hint = f"shape {tuple(value.shape)}", "Use model.data to create these dims"
        raise BNetError(spec.group.name, expected=expected, actual=actual, hint=hint)
    more = len(leading) - state.layout.rank
    if more > 0:  # Pyro allocates enumerated dims to the left, so earlier values get dims of size 1 in front
        state.layout = TensorLayout((*state.layout.enumerated, *[UNKNOWN_GROUP] * more), state.layout.plates)
        state.values.update({k: v.reshape([1] * more + list(v.shape)) for k, v in state.values.items()})
        state.known = {k: v.reshape([1] * more + list(v.shape)) for k, v in state.known.items()}
    return value.reshape([1] * (state.layout.rank - len(leading)) + leading + shape)


def to_pyro_distribution(subject: str, distribution: Distribution) -> Any:
    """Convert a distribution to the class of Pyro with the same name."""
    if isinstance(distribution, TorchDistributionMixin):
        return distribution
    if isinstance(distribution, Independent):
        return to_pyro_distribution(subject, distribution.base_dist).to_event(distribution.reinterpreted_batch_ndims)
    kind = getattr(dist, type(distribution).__name__, None)
    arguments = {name: vars(distribution)[name] for name in distribution.arg_constraints if name in vars(distribution)}
    if kind is None or not arguments:
        expected, hint = "a distribution that Pyro defines", "Use a class of pyro.distributions"
        raise BNetError(subject, expected=expected, actual=format_value(distribution), hint=hint)
    if "logits" in arguments:
        arguments.pop("probs", None)
    return kind(**arguments, validate_args=False)


# --------------------------------------------------------------------------------------------------------------------
# The distribution of random groups that depend on each other at neighbouring words, as one Pyro site for each group.
#
# Given all values, the log probabilities of the words are those of their TPMs, so they are computed at once. Samples
# are drawn word by word: the state of a word is drawn from its TPM, given the states of the words before it (or after
# it).


class ComponentSampler:
    """Samples of the groups of one recurrent component, drawn together on first use.

    Args:
        state: The state of the run; the values of all groups outside the component are computed.
        component: The groups, in the order of their computation at one word.
        sizes: For each random group, its sizes along sentences, plates and words.
    """

    def __init__(self, state: ExecutionState, component: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> None:
        self.state, self.component = state, component
        self.sampled_groups = [index for index in sizes if index not in state.known]
        self.samples: dict[int, Tensor] = {}
        scan, shapes = Scan(state, component), []
        for index in sizes:  # the dims of enumerated sites on which the component depends
            spec = state.network.specs[index]
            context, parents = scan.gather_word(spec, 0)
            shapes.append(spec.tpm.logits(context, *parents).shape[:-1])
        shape = broadcast_shapes(*shapes)
        self.shapes = {index: broadcast_shapes(shape, size) for index, size in sizes.items()}

    def sample(self, index: int, shape: Sequence[int]) -> Tensor:
        """The states of a group; `shape` has dims of particles before those of the group."""
        if index not in self.samples:
            particles = tuple(shape[: len(shape) - len(self.shapes[index])])
            shapes = {k: (*particles, *self.shapes[k]) for k in self.sampled_groups}
            draw_states = lambda logits: Categorical(logits=logits, validate_args=False).sample()  # noqa: E731
            with torch.no_grad():
                self.samples = SamplingScan(self.state, self.component, shapes, draw_states).sample()
        return self.samples[index].reshape(torch.Size(shape))


class WordByWord(TorchDistribution):
    """The distribution of the states of a random group that depends on itself at the neighbouring word."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.nonnegative_integer
    has_enumerate_support = False

    def __init__(self, sampler: ComponentSampler, spec: NodeSpec, batch_shape: Sequence[int]) -> None:
        self.sampler, self.spec = sampler, spec
        super().__init__(torch.Size(batch_shape), torch.Size(), validate_args=False)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw the states of all words."""
        return self.sampler.sample(self.spec.group.index, (*sample_shape, *self.batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """The log probability of the state of each word, given the others."""
        context, parents = gather_parents(self.sampler.state, self.spec)
        logits = self.spec.tpm.logits(context, *parents)
        log_prob: Tensor = Categorical(logits=logits, validate_args=False).log_prob(value)
        return log_prob

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> WordByWord:
        """The distribution with more leading dims."""
        return WordByWord(self.sampler, self.spec, batch_shape)


# --------------------------------------------------------------------------------------------------------------------
# The net as a Pyro model: one site for each random group, in plates; deterministic nodes are plain tensors.


class PyroModel:
    """A Pyro model of a batch of sentences, `model(x, y)`.

    Every random group is one site with the name of the group. Its plates are `sentence`, the plates of the net, and
    `word` (`enc_word`, ... if stacks have names). States have Pyro's shape, `[sentence, *plates, word]`, with size 1
    for plates that a group does not have; `data` converts values to this shape.

    Args:
        network: The net.
        parameters: With `"prior"` a table with a prior is a random variable, the Dirichlet site `theta_<owner>`. With
            `"own"` every table has the values of the net and there are no such sites: samples of this model are data of
            this net.
        choices: With `"sites"` each latent choice is a site. With `"summed"` all latent choices are summed out exactly
            (`inference.log_evidence`), and the log evidence of each sentence is one factor, `log_evidence`: the model
            has no other sites than the tables, and observations are passed as `y`. This is for chains along words,
            which Pyro cannot enumerate in a plate.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.tpm import Categorical
    >>> model = PyroModel(bt.bayesuvius(4, observe=Categorical(3), prior=1.0).network)
    >>> model.sites, model.max_plate_nesting
    (('theta_c', 'c', 'y'), 2)
    >>> PyroModel(model.network, "own").sites
    ('c', 'y')
    """

    def __init__(self, network: Network, parameters: str = "prior", choices: str = "sites") -> None:
        self.network = network = as_network(network)
        check_choice("parameters", parameters, ("prior", "own"))
        check_choice("choices", choices, ("sites", "summed"))
        self.choices = choices
        self.plates = tuple(network.graph.plate_sizes)
        self.max_plate_nesting = len(self.plates) + 2
        self._module = CompiledModule(network)
        self._log_evidence = _LogEvidence(self._module)
        self.random_specs = tuple(m for m in network.specs if m.tpm.is_random)
        self.priors = {
            f"{spec.param_prefix}.{name}": f"theta_{spec.param_prefix}{'' if name == 'logits' else f'_{name}'}"
            for spec in self.random_specs
            for name in spec.priors
            if parameters == "prior"
        }
        random_sites = () if choices == "summed" else (spec.group.name for spec in self.random_specs)
        self.sites = (*dict.fromkeys(self.priors.values()), *random_sites)
        if len(set(self.sites)) != len(self.sites):
            raise BNetError("sites", expected="a different name for each site", actual=", ".join(self.sites))

    def __call__(
        self,
        x: StackTensors | None = None,
        y: StackTensors | None = None,
        *,
        mask: StackTensors | None = None,
        observed_mask: Mapping[str, Tensor] | None = None,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        record: Sequence[str] = (),
        parameters: Mapping[str, Tensor] | None = None,
        total: int | None = None,
        batch: int | None = None,
    ) -> dict[str, Tensor]:
        """Run the model once.

        Args:
            x: The words, as for the compiled module: `[batch, word, ...]`, or a mapping from stack to words.
            y: The observations, `[batch, *plates, word, *shape]`, by node group; a tensor for the only readout.
            mask: True for words that are present, `[batch, word]`, as for the compiled module.
            observed_mask: True for the observed words of a readout, `[batch, *plates, word]`, by node group.
            do: Values that node groups are set to, also deterministic ones.
            given: The values of other given nodes, as for the compiled module.
            record: The deterministic node groups to add as sites with their names.
            parameters: Values that replace parameters of the net, such as `pyro.param`s, by name.
            total: The number of sentences of the corpus of which `x` is a part; None if `x` is the corpus.
            batch: The number of sentences, if neither inputs nor observations determine it.

        Returns:
            The value of each site and each recorded group by name, in Pyro's shape; empty if the choices are summed.
        """
        sites = frozenset(name for name in self.sites if name not in check_mapping("do", do))
        y = self._observations_by_group(y)
        handled = check_handled_sites(self.network, sites, frozenset(y), is_summed=self.choices == "summed")
        if self.choices == "summed" and not y:
            raise BNetError("y", expected="observations, because the model has no other sites with choices='summed'")
        if self.choices == "summed" and record:
            expected = "no names, because with choices='summed' no values of nodes are computed"
            raise BNetError("record", expected=expected, actual=tuple(record))
        inputs = self._module.check_inputs(x, given, do)
        word_counts = inputs.word_counts
        batch = count_sentences(self.network, y, self.max_plate_nesting, inputs.batch, batch)
        present = check_mask(mask, word_counts, batch)
        layout = TensorLayout((), self.plates)
        stored = {**self.network.parameters, **self._check_parameters(parameters)}
        state = ExecutionState(
            self.network, layout, stored, {}, word_counts, present, False, {}, self.network.dtype, inputs.device
        )
        check_states(self.network, inputs.subjects, inputs.values, word_counts, present)
        state.known = self._module.lay_out_inputs(state, inputs.values)
        check_masked_reads(self.network, range(len(self.network.specs)), state.known, present, word_counts)
        observed, observed_masks = self._lay_out_observations(state, y, observed_mask, inputs.values, batch)
        state.parameters = {**stored, **self._sample_tables(stored)}
        plates = self._create_plates(state, batch, total)
        scale = 1.0 if total is None else total / batch
        if self.choices == "summed":
            masks = check_mapping("observed_mask", observed_mask)
            evidence = {self.network.graph.get_group(k).index: Evidence(value, masks.get(k)) for k, value in y.items()}
            request = ExecutionRequest((), inputs.values, word_counts, inputs.device, present)
            self._add_log_evidence(state, plates, evidence, request)
            return {}
        run = _ModelRun(state, observed, observed_masks, handled, plates, frozenset(inputs.values), batch, scale)
        return self._run(run, tuple(record))

    def _add_log_evidence(
        self,
        state: ExecutionState,
        plates: Mapping[tuple[str, str | None], Any],
        evidence: Mapping[int, Evidence],
        request: ExecutionRequest,
    ) -> None:
        """Add the log evidence of each sentence, summed over all latent choices, as a factor."""
        stored = {f"module.store.{name.replace('.', '/')}": value for name, value in state.parameters.items()}
        for name, value in state.parameters.items():
            if value.dim() > self.network.parameters[name].dim():
                expected = "no vectorized particles, because choices='summed' sums the choices for one set of tables"
                actual = f"{name} of shape {tuple(value.shape)}"
                raise BNetError("vectorize_particles", expected=expected, actual=actual)
        total = torch.func.functional_call(self._log_evidence, stored, (evidence, request))
        is_batch = len(total) > 1 or ("sentence", None) in plates
        with plates["sentence", None] if is_batch else contextlib.nullcontext():
            shape = [-1, *[1] * (self.max_plate_nesting - 1)] if is_batch else []
            pyro.factor("log_evidence", total.reshape(shape))

    def data(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert values of random groups to Pyro's shape, for `condition` and `do`.

        Types, shapes and states are checked. The numbers of sentences and words are checked when the model runs.

        Args:
            values: The values by site, `[batch, *plates, word, *shape]`; tables of prior sites as they are.

        Returns:
            The values by site, in Pyro's shape `[sentence, *plates, word, *shape]`.

        Raises:
            BNetError: If a value has a wrong type or shape.
            UnknownNameError: If there is no such site.
        """
        cpu = torch.device("cpu")
        state = ExecutionState(
            self.network, TensorLayout((), self.plates), {}, {}, {}, {}, False, {}, self.network.dtype, cpu
        )
        result = {}
        for name, value in check_mapping("data", values).items():
            if name in self.priors.values():
                key = next(key for key, site in self.priors.items() if site == name)
                check_probabilities(f"data[{name!r}]", value, self.network.parameters[key])
                result[name] = value
                continue
            if name not in self.sites:
                raise unknown_name_error("site", name, self.sites)
            spec = self.network.get_spec(name)
            result[name] = lay_out_value(state, spec.group.index, check_data(state, spec, value))
        return result

    def _run(self, run: _ModelRun, record: tuple[str, ...]) -> dict[str, Tensor]:
        """Run component by component in topological order: sample the sites, compute deterministic groups."""
        state, values, graph = run.state, dict[str, Tensor](), self.network.graph
        output = () if self.random_specs or record else (find_default_output(self.network),)
        requested = [spec.group.index for spec in self.random_specs]
        requested += [graph.get_group(name).index for name in (*record, *output)]
        for component in self.network.filter_components(graph.ancestral_set(requested)):
            random = [index for index in component if self.network.specs[index].tpm.is_random]
            random = [index for index in random if index not in run.intervened]
            is_scanned = component[0] in graph.recurrent
            for index in random if is_scanned else ():
                if index in run.observed:
                    observed = align_site_value(state, self.network.specs[index], run.observed[index])
                    state.known = {**state.known, index: observed}
            if is_scanned and not all(index in state.known for index in random):
                values |= self._sample_component(run, component, random)
                continue
            if is_scanned:
                state.values |= Scan(state, component).run()
            elif not random:
                state.values[component[0]] = compute_value(state, component[0])
            for index in random:
                spec = self.network.specs[index]
                values[spec.group.name] = value = self._sample_site(run, spec)
                if not is_scanned:
                    aligned = align_site_value(state, spec, value)  # first: the layout may grow
                    state.known = {**state.known, index: aligned}
                    state.values[component[0]] = compute_value(state, component[0])
        for name in record:
            spec = self.network.get_spec(name)
            if not spec.tpm.is_random:
                value = state.values[spec.group.index]
                values[name] = pyro.deterministic(name, value, event_dim=len(event_shape(spec)))
        return values

    def _sample_component(self, run: _ModelRun, component: Sequence[int], random: Sequence[int]) -> dict[str, Tensor]:
        """Sample or observe the sites of groups that depend on each other at neighbouring words."""
        state, values, specs = run.state, {}, [self.network.specs[index] for index in random]
        for spec in specs:
            if spec.tpm.kind != "discrete":
                expected = "a value (y= or do=), because the value of each word depends on the previous word"
                raise BNetError(spec.group.name, expected=expected)
        sizes = {spec.group.index: run.get_site_sizes(spec) for spec in specs}
        sampler = ComponentSampler(state, component, sizes)
        for spec in specs:
            value = self._sample_site(run, spec, WordByWord(sampler, spec, sampler.shapes[spec.group.index]))
            # inside a handler that enumerates sites, such as that of `TraceEnum_ELBO`
            is_enumerated = any(isinstance(handler, EnumMessenger) for handler in _PYRO_STACK)
            if spec.group.index in sampler.samples and is_enumerated:
                expected = "a choice whose words do not interact, because enumeration sums each word out separately"
                hint = "Use net.pyro(choices='summed'), sample the choice in a guide (SVI), or set it with do="
                raise BNetError(spec.group.name, expected=expected, actual="a chain along words", hint=hint)
            values[spec.group.name] = value
            state.known = {**state.known, spec.group.index: align_site_value(state, spec, value)}
        state.values |= Scan(state, component).run()
        return values

    def _sample_site(self, run: _ModelRun, spec: NodeSpec, fn: Any = None) -> Tensor:
        """Sample or observe the site of a random group; its distribution is `fn`, by default that of its TPM."""
        index, name = spec.group.index, spec.group.name
        context, parents = (None, []) if fn is not None else gather_parents(run.state, spec)
        if context is None:
            pass
        elif spec.tpm.kind == "discrete":
            fn = dist.Categorical(logits=spec.tpm.logits(context, *parents), validate_args=False)
        else:
            fn = to_pyro_distribution(name, spec.tpm.distribution(context, *parents))
        missing = self.max_plate_nesting - len(fn.batch_shape)
        fn = fn.expand([1] * missing + list(fn.batch_shape)) if missing > 0 else fn
        obs = run.observed.get(index)
        infer: Any = {"enumerate": "parallel"} if fn.has_enumerate_support and obs is None else {}
        with contextlib.ExitStack() as stack:
            for plate in run.get_plates(spec):
                stack.enter_context(plate)
            observed_mask = run.get_observed_mask(spec, name in run.handled_sites["condition"] or obs is not None)
            if observed_mask is not None:
                stack.enter_context(poutine.mask(mask=observed_mask))
            watch = stack.enter_context(SiteStatusMessenger())
            sample: Tensor = pyro.sample(name, fn, obs=obs, infer=infer)
        if obs is None:
            handler = "" if not watch.is_fixed else "do" if name in run.handled_sites["do"] else "condition"
            subject = f"{handler} on {name}".removeprefix(" on ")
            sample = check_sample(run.state, spec, subject, sample, run.get_site_sizes(spec), handler)
        if watch.is_enumerated:  # an enumerated choice must not interact with choices of other words
            reader = find_meeting_group(self.network, index, run.intervened)
            if reader is not None:
                expected = "a choice whose words do not interact, because enumeration sums each word out separately"
                actual = f"{reader}, which depends on the choices of several words"
                hint = "Sample the choice in a guide (SVI), or set it with do="
                raise BNetError(name, expected=expected, actual=actual, hint=hint)
            if spec.scope == "corpus" and run.scale != 1:
                expected = f"all sentences of the corpus in x, because they share one draw of the enumerated {name}"
                hint = f"Sample {name} in a guide (SVI), or set it with do= or y="
                raise BNetError("total", expected=expected, actual="a part of the sentences", hint=hint)
        return sample

    def _sample_tables(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sample the tables with a prior (Dirichlet rows, one draw for the corpus); return log probabilities."""
        tables: dict[str, Tensor] = {}
        for spec in self.random_specs:
            for name, concentration in spec.priors.items():
                key = f"{spec.param_prefix}.{name}"
                if key in self.priors and key not in tables:
                    rows = concentration.to(stored[key].detach()).expand(stored[key].shape)
                    prior = dist.Dirichlet(rows, validate_args=False).to_event(rows.dim() - 1)
                    with SiteStatusMessenger() as watch:
                        sample: Tensor = pyro.sample(self.priors[key], prior)
                    if watch.is_fixed:
                        check_probabilities(self.priors[key], sample, stored[key])
                    if spec.group.plates and sample.dim() > stored[key].dim():
                        actual = f"{self.priors[key]} of shape {tuple(sample.shape)}"
                        expected = "no vectorized particles, because a table with plates has a prior"
                        raise BNetError("vectorize_particles", expected=expected, actual=actual)
                    tables[key] = sample.log()
        return tables

    def _check_parameters(self, parameters: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Check the names and shapes of parameters that replace those of the net."""
        for name, value in check_mapping("parameters", parameters).items():
            if name not in self.network.shapes:
                raise unknown_name_error("parameter", name, self.network.shapes)
            if name in self.priors:
                source = f"a parameter that the site {self.priors[name]} samples"
                hint = 'Use net.pyro(parameters="own"), which has no prior sites, or condition on the site'
                expected = "a parameter without a prior"
                raise BNetError(f"parameters[{name!r}]", expected=expected, actual=source, hint=hint)
            if not isinstance(value, Tensor) or tuple(value.shape) != self.network.shapes[name]:
                actual = tuple(value.shape) if isinstance(value, Tensor) else value
                raise BNetError(name, expected=f"shape {self.network.shapes[name]}", actual=actual)
        return check_mapping("parameters", parameters)

    def _create_plates(self, state: ExecutionState, batch: int, total: int | None) -> dict[tuple[str, str | None], Any]:
        """Create the plates of a run, by kind (and by stack, for words).

        Plates of size 1 are left out: they have no effect, and Pyro's marginals fail for them with a KeyError.
        """
        used_names = set(self.sites) | set(self.network.graph.by_name)
        if total is not None and check_int("total", total) < batch:
            raise BNetError("total", expected=f"at least {batch}, the number of sentences of x", actual=total)
        plates: dict[tuple[str, str | None], Any] = {}
        if total is not None or batch > 1:
            subsample = None if total is None else torch.arange(batch, device=state.device)
            name, dim = _unique_name("sentence", used_names), -self.max_plate_nesting
            plates["sentence", None] = pyro.plate(name, total or batch, subsample=subsample, dim=dim)
        used_plates = {plate for spec in self.random_specs for plate in spec.group.plates}
        for k, name in enumerate(self.plates):
            if name in used_plates and (size := self.network.graph.plate_sizes[name]) > 1:
                plates["plate", name] = pyro.plate(_unique_name(name, used_names), size, dim=k - len(self.plates) - 1)
        for stack, count in state.word_counts.items():
            if count > 1 and any(spec.group.word_stack == stack for spec in self.random_specs):
                name = _unique_name(f"{stack}_{WORD}" if stack else WORD, used_names)
                plates[WORD, stack] = pyro.plate(name, count, dim=-1)
        return plates

    def _lay_out_observations(
        self,
        state: ExecutionState,
        y: Mapping[str, Tensor],
        observed_mask: Mapping[str, Tensor] | None,
        intervened: Collection[int],
        batch: int,
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Lay out the observations, with zero in unobserved entries, and their masks; both by group."""
        by_group: dict[int, tuple[str, Tensor]] = {}
        names = [spec.group.name for spec in self.random_specs]
        for name, value in y.items():
            label = f"y[{name!r}]"
            if name not in names:
                raise unknown_name_error("random node group of y", name, names)
            spec = self.network.get_spec(name)
            if spec.group.index in intervened:
                raise EvidenceError(name, expected="do or evidence on a node, not both")
            check_type(label, spec, value, state.dtype)
            shape = (*_get_batch_shape(state, spec, batch), *event_shape(spec))
            if tuple(value.shape) != shape:
                raise BNetError(label, expected=f"shape {shape}", actual=tuple(value.shape))
            by_group[spec.group.index] = label, value
        masks: dict[int, Tensor] = {}
        for name, value in check_mapping("observed_mask", observed_mask).items():
            spec, label = self.network.get_spec(name), f"observed_mask[{name!r}]"
            if spec.group.index not in by_group:
                raise BNetError(label, expected=f"observations in y[{name!r}]; they are missing")
            if self.network.graph.out_edges[spec.group.index]:
                raise BNetError(label, expected="a readout, which has no children", actual="a node group with children")
            batch_shape = _get_batch_shape(state, spec, batch)
            if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != batch_shape:
                actual = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
                raise BNetError(label, expected=f"booleans of shape {batch_shape}", actual=actual)
            masks[spec.group.index] = lay_out_value(state, spec.group.index, value)
        subjects = {index: label for index, (label, _) in by_group.items()}
        values = {index: value for index, (_, value) in by_group.items()}
        check_states(self.network, subjects, values, state.word_counts, state.present)
        observed = {index: lay_out_known(state, index, value) for index, value in values.items()}
        for index, value in observed.items():
            mask = masks.get(index)
            check_finite(by_group[index][0], value, mask)
            if mask is not None:
                observed[index] = value.where(mask.reshape(*mask.shape, *[1] * (value.dim() - mask.dim())), 0)
        return observed, masks

    def _observations_by_group(self, y: StackTensors | None) -> Mapping[str, Tensor]:
        """Return the observations by group; a single tensor is the observation of the only readout."""
        leaves = [m.group.name for m in self.random_specs if not self.network.graph.out_edges[m.group.index]]
        if isinstance(y, Tensor):
            if len(leaves) != 1:
                expected = "a mapping from node group to observations"
                raise BNetError("y", expected=expected, actual="one tensor", allowed=", ".join(leaves))
            return {leaves[0]: y}
        return check_mapping("y", y)


class _LogEvidence(torch.nn.Module):
    """`log P(evidence)` of each sentence as a module, so that its parameters can be replaced."""

    def __init__(self, module: CompiledModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, evidence: Mapping[int, Evidence], request: ExecutionRequest) -> Tensor:
        """Compute the log evidence of each sentence; impossible evidence is not an error."""
        module = self.module.eval()
        return compute_log_evidence(module, request_factors(module, evidence, None, request), check=False)


@dataclass(frozen=True)
class _ModelRun:
    """The inputs of one run: observations and their masks, the sites in `condition` and `do`, the plates, the groups
    that `do=` sets, the number of sentences, and the scale `total / batch`.
    """

    state: ExecutionState
    observed: Mapping[int, Tensor]
    observed_masks: Mapping[int, Tensor]
    handled_sites: Mapping[str, frozenset[str]]
    plates: Mapping[tuple[str, str | None], Any]
    intervened: frozenset[int]
    batch: int
    scale: float

    def get_site_sizes(self, spec: NodeSpec) -> list[int]:
        """Return the sizes of a site along the sentences, each plate of the net, and the words."""
        group, network = spec.group, self.state.network
        sizes = [network.graph.plate_sizes[plate] if plate in group.plates else 1 for plate in self.state.layout.plates]
        return [1 if spec.scope == "corpus" else self.batch, *sizes, group.count_words(self.state.word_counts)]

    def get_plates(self, spec: NodeSpec) -> list[Any]:
        """Return the plates around a site."""
        keys: list[tuple[str, str | None]] = [] if spec.scope == "corpus" else [("sentence", None)]
        keys += [("plate", plate) for plate in spec.group.plates]
        keys += [(WORD, spec.group.word_stack)] if spec.group.word_stack is not None else []
        return [self.plates[key] for key in keys if key in self.plates]

    def get_observed_mask(self, spec: NodeSpec, is_fixed: bool) -> Any:
        """Return the mask of the entries of a site whose log probability counts: observed, at present words.

        Sampled choices of padding words are not masked. Their probabilities sum to 1, while masked factors (each 1)
        would sum to the number of states.
        """
        state = self.state
        mask = self.observed_masks.get(spec.group.index)
        present = get_present_mask(state, spec.group.word_stack) if is_fixed else None
        if present is not None:
            present = present.reshape(present.shape[state.layout.batch_dim :])
            mask = present if mask is None else mask & present
        return mask


def _get_batch_shape(state: ExecutionState, spec: NodeSpec, batch: int) -> tuple[int, ...]:
    """Return the shape of a value of a group without its event dims."""
    one = () if spec.scope == "corpus" else (batch,)
    return (*one, *get_plate_sizes(state.network, spec, state.word_counts))


def _unique_name(name: str, used_names: set[str]) -> str:
    """Append `_plate` to a name until it is unused."""
    while name in used_names:
        name += "_plate"
    return name
