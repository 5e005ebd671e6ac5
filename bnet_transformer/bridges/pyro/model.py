"""The net as a Pyro model: one site for each random group, in plates; deterministic nodes are plain tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_mapping
from bnet_transformer._core.naming import WORD
from bnet_transformer.bridges.pyro import checks
from bnet_transformer.bridges.pyro.word_by_word import ComponentSampler, WordByWord
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.evaluate import Scan, compute_value
from bnet_transformer.compiler.execution_state import ExecutionState, StackTensors, TensorLayout
from bnet_transformer.compiler.gather import gather_parents, get_present_mask
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.compiler.validate_inputs import (
    check_mask,
    check_masked_reads,
    get_plate_sizes,
    infer_batch_size,
    lay_out_value,
    lay_out_values,
)
from bnet_transformer.data import Evidence
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, EvidenceError, unknown_name_error
from bnet_transformer.inference import log_evidence


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
            f"{spec.param_prefix}.{name}": f"theta_{spec.param_prefix}"
            if name == "logits"
            else f"theta_{spec.param_prefix}_{name}"
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
        handled = checks.check_handled_sites(self.network, sites, frozenset(y), is_summed=self.choices == "summed")
        if self.choices == "summed" and not y:
            raise BNetError("y", expected="observations, because the model has no other sites with choices='summed'")
        if self.choices == "summed" and record:
            expected = "no names, because with choices='summed' no values of nodes are computed"
            raise BNetError("record", expected=expected, actual=tuple(record))
        inputs, word_counts, num_sentences, device = self._module.validate_inputs(x, given)
        assigned = self._module.validate_values("do", do, word_counts, num_sentences)
        num_sentences = infer_batch_size(self.network, assigned, num_sentences)
        batch = checks.count_sentences(self.network, y, self.max_plate_nesting, num_sentences, batch)
        present = check_mask(mask, word_counts, batch)
        layout = TensorLayout((), self.plates)
        stored = {**self.network.parameters, **self._check_parameters(parameters)}
        state = ExecutionState(
            self.network, layout, stored, {}, word_counts, present, False, {}, self.network.dtype, device
        )
        state.known = lay_out_values(state, {**inputs, **assigned})
        check_masked_reads(state, self.network.specs if present else ())
        observed, observed_masks = self._lay_out_observations(state, y, observed_mask, assigned, batch)
        state.parameters = {**stored, **self._sample_tables(stored)}
        plates = self._create_plates(state, batch, total)
        scale = 1.0 if total is None else total / batch
        if self.choices == "summed":
            evidence = {
                name: Evidence(value, check_mapping("observed_mask", observed_mask).get(name))
                for name, value in y.items()
            }
            self._add_log_evidence(state, plates, evidence, {"x": x, "mask": mask, "do": do, "given": given})
            return {}
        run = _ModelRun(state, observed, observed_masks, handled, plates, frozenset(assigned), batch, scale)
        return self._run(run, tuple(record))

    def _add_log_evidence(
        self,
        state: ExecutionState,
        plates: Mapping[tuple[str, str | None], Any],
        evidence: Mapping[str, Evidence],
        arguments: Mapping[str, Any],
    ) -> None:
        """Add the log evidence of each sentence, summed over all latent choices, as a factor."""
        stored = {f"module.store.{name.replace('.', '/')}": value for name, value in state.parameters.items()}
        for name, value in state.parameters.items():
            if value.dim() > self.network.parameters[name].dim():
                expected = "no vectorized particles, because choices='summed' sums the choices for one set of tables"
                raise BNetError(
                    "vectorize_particles", expected=expected, actual=f"{name} of shape {tuple(value.shape)}"
                )
        total = torch.func.functional_call(self._log_evidence, stored, (evidence, arguments))
        is_batch = len(total) > 1 or ("sentence", None) in plates
        with plates["sentence", None] if is_batch else contextlib.nullcontext():
            pyro.factor(
                "log_evidence", total.reshape(-1, *[1] * (self.max_plate_nesting - 1)) if is_batch else total[0]
            )

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
                checks.check_probabilities(f"data[{name!r}]", value, self.network.parameters[key])
                result[name] = value
                continue
            if name not in self.sites:
                raise unknown_name_error("site", name, self.sites)
            spec = self.network.get_spec(name)
            result[name] = lay_out_value(state, spec.group.index, checks.check_data(state, spec, value))
        return result

    def _run(self, run: _ModelRun, record: tuple[str, ...]) -> dict[str, Tensor]:
        """Run component by component in topological order: sample the sites, compute deterministic groups."""
        state, values, graph = run.state, dict[str, Tensor](), self.network.graph
        output = () if self.random_specs or record else (find_default_output(self.network),)
        requested = [
            *(spec.group.index for spec in self.random_specs),
            *(graph.get_group(n).index for n in (*record, *output)),
        ]
        for component in self.network.filter_components(graph.ancestral_set(requested)):
            random = [
                index for index in component if self.network.specs[index].tpm.is_random and index not in run.intervened
            ]
            is_scanned = component[0] in graph.recurrent
            for index in random if is_scanned else ():
                if index in run.observed:
                    observed = checks.align_site_value(state, self.network.specs[index], run.observed[index])
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
                    aligned = checks.align_site_value(state, spec, value)  # first: the layout may grow
                    state.known = {**state.known, index: aligned}
                    state.values[component[0]] = compute_value(state, component[0])
        for name in record:
            spec = self.network.get_spec(name)
            if not spec.tpm.is_random:
                value = state.values[spec.group.index]
                values[name] = pyro.deterministic(name, value, event_dim=len(checks.event_shape(spec)))
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
            if spec.group.index in sampler.samples and checks.is_enumerating():
                expected = "a choice whose words do not interact, because enumeration sums each word out separately"
                hint = "Use net.pyro(choices='summed'), sample the choice in a guide (SVI), or set it with do="
                raise BNetError(spec.group.name, expected=expected, actual="a chain along words", hint=hint)
            values[spec.group.name] = value
            state.known = {**state.known, spec.group.index: checks.align_site_value(state, spec, value)}
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
            fn = checks.to_pyro_distribution(name, spec.tpm.distribution(context, *parents))
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
            watch = stack.enter_context(checks.SiteStatusMessenger())
            sample: Tensor = pyro.sample(name, fn, obs=obs, infer=infer)
        if obs is None:
            handler = "" if not watch.is_fixed else "do" if name in run.handled_sites["do"] else "condition"
            subject = f"{handler} on {name}".removeprefix(" on ")
            sample = checks.check_sample(run.state, spec, subject, sample, run.get_site_sizes(spec), handler)
        if watch.is_enumerated:  # an enumerated choice must not interact with choices of other words
            reader = checks.find_meeting_group(self.network, index, run.intervened)
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
                    with checks.SiteStatusMessenger() as watch:
                        sample: Tensor = pyro.sample(self.priors[key], prior)
                    if watch.is_fixed:
                        checks.check_probabilities(self.priors[key], sample, stored[key])
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
                plates[WORD, stack] = pyro.plate(
                    _unique_name(f"{stack}_{WORD}" if stack else WORD, used_names), count, dim=-1
                )
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
        names = [m.group.name for m in self.random_specs]
        for name, value in y.items():
            label = f"y[{name!r}]"
            if name not in names:
                raise unknown_name_error("random node group of y", name, names)
            spec = self.network.get_spec(name)
            if spec.group.index in intervened:
                raise EvidenceError(name, expected="do or evidence on a node, not both")
            checks.check_type(label, spec, value, state.dtype)
            shape = (*_get_batch_shape(state, spec, batch), *checks.event_shape(spec))
            if tuple(value.shape) != shape:
                raise BNetError(label, expected=f"shape {shape}", actual=tuple(value.shape))
            by_group[spec.group.index] = label, value
        masks: dict[int, Tensor] = {}
        for name, value in check_mapping("observed_mask", observed_mask).items():
            spec, label = self.network.get_spec(name), f"observed_mask[{name!r}]"
            if spec.group.index not in by_group:
                raise BNetError(label, expected=f"observations in y[{name!r}]; they are missing")
            if self.network.graph.out_edges[spec.group.index]:
                expected = "a readout, which has no children"
                raise BNetError(label, expected=expected, actual="a node group with children")
            batch_shape = _get_batch_shape(state, spec, batch)
            if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != batch_shape:
                actual = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
                raise BNetError(label, expected=f"booleans of shape {batch_shape}", actual=actual)
            masks[spec.group.index] = lay_out_value(state, spec.group.index, value)
        observed = lay_out_values(state, by_group)
        for index, value in observed.items():
            mask = masks.get(index)
            checks.check_finite(by_group[index][0], value, mask)
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

    def forward(self, evidence: Mapping[str, Evidence], arguments: Mapping[str, Any]) -> Tensor:
        """Compute the log evidence of each sentence; impossible evidence is not an error."""
        return log_evidence(self.module.eval(), evidence, **arguments, check=False)


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
        num_words = 1 if group.word_stack is None else self.state.word_counts[group.word_stack]
        return [1 if spec.scope == "corpus" else self.batch, *sizes, num_words]

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
