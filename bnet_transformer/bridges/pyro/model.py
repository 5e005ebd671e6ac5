"""The net as a Pyro model: one site for each random family, in plates; all that is deterministic is plain tensors."""

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
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.evaluate import Scan, compute_value as value_of
from bnet_transformer.compiler.execution_state import (
    ExecutionState,
    StackTensors,
    TensorLayout,
    gather_parents,
    get_present_mask,
)
from bnet_transformer.compiler.module import find_default_output
from bnet_transformer.compiler.validate_inputs import (
    check_mask,
    check_masked_reads,
    get_plate_sizes,
    infer_batch_size,
    lay_out_value,
    lay_out_values as received_values,
)
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.errors import BNetError, EvidenceError, unknown_name_error


class PyroModel:
    """`model(x, y)`: a Pyro model of a batch of sentences.

    `x` and `mask` are as for the compiled module. `y` maps families to what is seen of them, `[batch, *plates, word,
    *shape]` (a tensor for the only readout); `seen` says, for a readout, of which words (booleans). `do` sets
    families, deterministic ones too; `want` records deterministic ones under their names. `total` is the number of
    sentences of the corpus of which `x` is a part; `batch` is the number of sentences where nothing else tells it, as
    in a net without words; `parameters` replaces some of the net's (by `pyro.param`s, say).

    Every random family is one site under its name, in the plates `sentence`, those of the net, and `word`
    (`enc_word`, ... where stacks have names). With `parameters="prior"` a table with a prior is a random variable: a
    Dirichlet site `theta_<owner>`. With `parameters="own"` every table has the values of the net, and there is no such
    site: this is the model whose draws are data of this net. States have Pyro's shape, `[sentence, *plates, word]`
    with size 1 where a family has no such plate: `data` makes it.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.tpm import Categorical
    >>> model = PyroModel(bt.bayesuvius(4, observe=Categorical(3), prior=1.0).network)
    >>> model.sites, model.max_plate_nesting
    (('theta_c', 'c', 'y'), 2)
    >>> PyroModel(model.network, "own").sites
    ('c', 'y')
    """

    def __init__(self, network: Network, parameters: str = "prior") -> None:
        self.network = network = as_network(network)
        check_choice("parameters", parameters, ("prior", "own"))
        self.plates = tuple(network.graph.plate_sizes)
        self.max_plate_nesting = len(self.plates) + 2
        self._module = CompiledModule(network)
        self.random_specs = tuple(m for m in network.specs if m.tpm.is_random)
        self.priors = {
            f"{member.param_prefix}.{name}": f"theta_{member.param_prefix}"
            if name == "logits"
            else f"theta_{member.param_prefix}_{name}"
            for member in self.random_specs
            for name in member.tpm.priors()
            if parameters == "prior"
        }
        self.sites = (*dict.fromkeys(self.priors.values()), *(member.group.name for member in self.random_specs))
        if len(set(self.sites)) != len(self.sites):
            raise BNetError("sites", expected="a name for each", actual=", ".join(self.sites))

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
        """One course of events; returns the value of each site and wanted family, in Pyro's shape."""
        sites = frozenset(name for name in self.sites if name not in check_mapping("do", do))
        y = self._observations_by_group(y)
        handled = checks.check_handled_sites(self.network, sites, frozenset(y))
        inputs, words, told_of, device = self._module.validate_inputs(x, given)
        set_ = self._module.validate_values("do", do, words, told_of)
        told_of = infer_batch_size(self.network, set_, told_of)
        batch = checks.count_sentences(self.network, y, self.max_plate_nesting, told_of, batch)
        present = check_mask(mask, words, batch)
        layout = TensorLayout((), self.plates)
        stored = {**self.network.parameters, **self._check_parameters(parameters)}
        course = ExecutionState(self.network, layout, stored, {}, words, present, False, {}, self.network.dtype, device)
        course.known = received_values(course, {**inputs, **set_})
        check_masked_reads(course, self.network.specs if present else ())
        observed, shown = self._lay_out_observations(course, y, observed_mask, set_, batch)
        course.parameters = {**stored, **self._sample_tables(stored)}
        plates = self._create_plates(course, batch, total)
        scale = 1.0 if total is None else total / batch
        told = _ModelRun(course, observed, shown, handled, plates, frozenset(set_), batch, scale)
        return self._run(told, tuple(record))

    def data(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values `[batch, *plates, word, *shape]` of random families in Pyro's shape, for `condition` and `do`.

        Types, forms and states are checked here; what hangs on the sentences (how many, of how many words) in a run.
        """
        cpu = torch.device("cpu")
        course = ExecutionState(
            self.network, TensorLayout((), self.plates), {}, {}, {}, {}, False, {}, self.network.dtype, cpu
        )
        found = {}
        for name, value in check_mapping("data", values).items():
            if name in self.priors.values():
                key = next(key for key, site in self.priors.items() if site == name)
                checks.check_probabilities(f"data[{name!r}]", value, self.network.parameters[key])
                found[name] = value
                continue
            if name not in self.sites:
                raise unknown_name_error("site", name, self.sites)
            member = self.network.get_spec(name)
            found[name] = lay_out_value(course, member.group.index, checks.check_data(course, member, value))
        return found

    def _run(self, run: _ModelRun, want: tuple[str, ...]) -> dict[str, Tensor]:
        """Family after family: sites are drawn, the rest is computed."""
        course, found, graph = run.state, {}, self.network.graph
        output = () if self.random_specs or want else (find_default_output(self.network),)
        asked = [
            *(member.group.index for member in self.random_specs),
            *(graph.get_group(n).index for n in (*want, *output)),
        ]
        for group in self.network.filter_components(graph.ancestral_set(asked)):
            random = [
                index for index in group if self.network.specs[index].tpm.is_random and index not in run.intervened
            ]
            scanned = group[0] in graph.recurrent
            for index in random if scanned else ():
                if index not in run.observed:
                    name = self.network.specs[index].group.name
                    wanted = "a value (y= or do=), for each word's choice depends on the word before"
                    raise BNetError(name, expected=wanted, actual="none: word after word there is no plate of words")
                seen_ = checks.align_site_value(course, self.network.specs[index], run.observed[index])
                course.known = {**course.known, index: seen_}
            if scanned:
                course.values |= Scan(course, group).run()
            elif not random:
                course.values[group[0]] = value_of(course, group[0])
            for index in random:
                member = self.network.specs[index]
                found[member.group.name] = value = self._sample_site(run, member)
                if not scanned:
                    state = checks.align_site_value(course, member, value)  # first: the layout may grow
                    course.known = {**course.known, index: state}
                    course.values[group[0]] = value_of(course, group[0])
        for name in want:
            member = self.network.get_spec(name)
            if not member.tpm.is_random:
                value = course.values[member.group.index]
                found[name] = pyro.deterministic(name, value, event_dim=len(checks.event_shape(member)))
        return found

    def _sample_site(self, run: _ModelRun, spec: NodeSpec) -> Tensor:
        """Draw a random family, or take what is seen of it."""
        index, name = spec.group.index, spec.group.name
        at, parents = gather_parents(run.state, spec)
        if spec.tpm.kind == "discrete":
            fn = dist.Categorical(logits=spec.tpm.logits(at, *parents), validate_args=False)
        else:
            fn = checks.to_pyro_distribution(name, spec.tpm.distribution(at, *parents))
        missing = self.max_plate_nesting - len(fn.batch_shape)
        fn = fn.expand([1] * missing + list(fn.batch_shape)) if missing > 0 else fn
        obs = run.observed.get(index)
        infer: Any = {"enumerate": "parallel"} if spec.tpm.kind == "discrete" and obs is None else {}
        with contextlib.ExitStack() as stack:
            for plate in run.get_plates(spec):
                stack.enter_context(plate)
            shown = run.get_observed_mask(spec, name in run.handled_sites["condition"] or obs is not None)
            if shown is not None:
                stack.enter_context(poutine.mask(mask=shown))
            watch = stack.enter_context(checks.SiteStatusMessenger())
            drawn: Tensor = pyro.sample(name, fn, obs=obs, infer=infer)
        if obs is None:
            how = "" if not watch.is_fixed else "do" if name in run.handled_sites["do"] else "condition"
            what = f"{how} on {name}".removeprefix(" on ")
            drawn = checks.check_sample(run.state, spec, what, drawn, run.get_site_sizes(spec), how)
        if watch.is_enumerated:  # a choice that is enumerated must not meet those of other words
            met = checks.find_meeting_group(self.network, index, run.intervened)
            if met is not None:
                wanted = "a choice whose words do not meet, to be enumerated for all words at once"
                got, allowed = f"{met}, which reads other words' choices", "a guide that draws it (SVI), or do= for it"
                raise BNetError(name, expected=wanted, actual=got, allowed=allowed)
            if spec.scope == "corpus" and run.scale != 1:
                every = f"all sentences of the corpus in x, for {name} is one draw for them and is summed out"
                allowed = f"a guide that draws {name} (SVI); do= or y= for it"
                raise BNetError("total", expected=every, actual="a part of them", allowed=allowed)
        return drawn

    def _sample_tables(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tables with a prior: log of Dirichlet rows, drawn once for the corpus."""
        found: dict[str, Tensor] = {}
        for member in self.random_specs:
            for name, concentration in member.tpm.priors().items():
                key = f"{member.param_prefix}.{name}"
                if key in self.priors and key not in found:
                    rows = torch.full_like(stored[key].detach(), concentration)
                    prior = dist.Dirichlet(rows, validate_args=False).to_event(rows.dim() - 1)
                    with checks.SiteStatusMessenger() as watch:
                        drawn: Tensor = pyro.sample(self.priors[key], prior)
                    if watch.is_fixed:
                        checks.check_probabilities(self.priors[key], drawn, stored[key])
                    if member.group.plates and drawn.dim() > stored[key].dim():
                        got = f"{self.priors[key]} of shape {tuple(drawn.shape)}"
                        raise BNetError("plates with priors", expected="no vectorized particles", actual=got)
                    found[key] = drawn.log()
        return found

    def _check_parameters(self, parameters: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        for name, value in check_mapping("parameters", parameters).items():
            if name not in self.network.shapes:
                raise unknown_name_error("parameter", name, self.network.shapes)
            if name in self.priors:
                drawn = f"one that the site {self.priors[name]} draws"
                allowed = 'net.pyro(parameters="own"), which has no prior sites; condition on the site'
                wanted = "a parameter without a prior"
                raise BNetError(f"parameters[{name!r}]", expected=wanted, actual=drawn, allowed=allowed)
            if not isinstance(value, Tensor) or tuple(value.shape) != self.network.shapes[name]:
                got = tuple(value.shape) if isinstance(value, Tensor) else value
                raise BNetError(name, expected=f"shape {self.network.shapes[name]}", actual=got)
        return check_mapping("parameters", parameters)

    def _create_plates(self, state: ExecutionState, batch: int, total: int | None) -> dict[tuple[str, str | None], Any]:
        """The plates of a run, by kind (and by stack, for words).

        A plate of one entry is left out, which changes nothing: Pyro's marginals fail on it with a KeyError.
        """
        taken = set(self.sites) | set(self.network.graph.by_name)
        if total is not None and check_int("total", total) < batch:
            raise BNetError("total", expected=f"at least the {batch} sentences of x", actual=total)
        found: dict[tuple[str, str | None], Any] = {}
        if total is not None or batch > 1:
            part = None if total is None else torch.arange(batch, device=state.device)
            name, dim = _unique_name("sentence", taken), -self.max_plate_nesting
            found["sentence", None] = pyro.plate(name, total or batch, subsample=part, dim=dim)
        around = {plate for member in self.random_specs for plate in member.group.plates}
        for k, name in enumerate(self.plates):
            if name in around and (size := self.network.graph.plate_sizes[name]) > 1:
                found["plate", name] = pyro.plate(_unique_name(name, taken), size, dim=k - len(self.plates) - 1)
        for stack, count in state.word_counts.items():
            if count > 1 and any(member.group.word_stack == stack for member in self.random_specs):
                found[WORD, stack] = pyro.plate(
                    _unique_name(f"{stack}_{WORD}" if stack else WORD, taken), count, dim=-1
                )
        return found

    def _lay_out_observations(
        self,
        state: ExecutionState,
        y: Mapping[str, Tensor],
        observed_mask: Mapping[str, Tensor] | None,
        intervened: Collection[int],
        batch: int,
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What is seen, all finite, zero where nothing is; and of which entries something is, both in the layout."""
        told: dict[int, tuple[str, Tensor]] = {}
        names = [m.group.name for m in self.random_specs]
        for name, value in y.items():
            what = f"y[{name!r}]"
            if name not in names:
                raise unknown_name_error("random family of y", name, names)
            member = self.network.get_spec(name)
            if member.group.index in intervened:
                raise EvidenceError(name, expected="do or evidence on a node, not both", actual="both")
            checks.check_type(what, member, value, state.dtype)
            shape = (*_get_batch_shape(state, member, batch), *checks.event_shape(member))
            if tuple(value.shape) != shape:
                raise BNetError(what, expected=f"shape {shape}", actual=tuple(value.shape))
            told[member.group.index] = what, value
        shown: dict[int, Tensor] = {}
        for name, value in check_mapping("observed_mask", observed_mask).items():
            member, where = self.network.get_spec(name), f"observed_mask[{name!r}]"
            if member.group.index not in told:
                raise BNetError(where, expected="what is seen, in y", actual="nothing")
            if self.network.graph.out_edges[member.group.index]:
                raise BNetError(where, expected="a readout, which nothing reads", actual="one that is read")
            lead = _get_batch_shape(state, member, batch)
            if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != lead:
                got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
                raise BNetError(where, expected=f"booleans of shape {lead}", actual=got)
            shown[member.group.index] = lay_out_value(state, member.group.index, value)
        observed = received_values(state, told)
        for index, value in observed.items():
            some = shown.get(index)
            checks.check_finite(told[index][0], value, some)
            if some is not None:
                observed[index] = value.where(some.reshape(*some.shape, *[1] * (value.dim() - some.dim())), 0)
        return observed, shown

    def _observations_by_group(self, y: StackTensors | None) -> Mapping[str, Tensor]:
        """What is seen, by family: a tensor alone is the only readout's."""
        leaves = [m.group.name for m in self.random_specs if not self.network.graph.out_edges[m.group.index]]
        if isinstance(y, Tensor):
            if len(leaves) != 1:
                raise BNetError("y", expected="a mapping from family", actual="one tensor", allowed=", ".join(leaves))
            return {leaves[0]: y}
        return check_mapping("y", y)


@dataclass(frozen=True)
class _ModelRun:
    """What one run is told: what is seen and of which entries, which sites are under `condition` and `do`, which
    families are set, how many sentences there are, and how many each stands for."""

    state: ExecutionState
    observed: Mapping[int, Tensor]
    observed_masks: Mapping[int, Tensor]
    handled_sites: Mapping[str, frozenset[str]]
    plates: Mapping[tuple[str, str | None], Any]
    intervened: frozenset[int]
    batch: int
    scale: float

    def get_site_sizes(self, spec: NodeSpec) -> list[int]:
        """How many entries a site has along the sentences, each plate of the net, and the words."""
        family, network = spec.group, self.state.network
        sizes = [
            network.graph.plate_sizes[plate] if plate in family.plates else 1 for plate in self.state.layout.plates
        ]
        words = 1 if family.word_stack is None else self.state.word_counts[family.word_stack]
        return [1 if spec.scope == "corpus" else self.batch, *sizes, words]

    def get_plates(self, spec: NodeSpec) -> list[Any]:
        """The plates around a site."""
        keys: list[tuple[str, str | None]] = [] if spec.scope == "corpus" else [("sentence", None)]
        keys += [("plate", plate) for plate in spec.group.plates]
        keys += [(WORD, spec.group.word_stack)] if spec.group.word_stack is not None else []
        return [self.plates[key] for key in keys if key in self.plates]

    def get_observed_mask(self, spec: NodeSpec, is_fixed: bool) -> Any:
        """Of which entries a seen site counts: those that are seen, of words that are present.

        The choices of words that are absent still sum to one, so they are not masked: a masked sum would count states.
        """
        course = self.state
        shown = self.observed_masks.get(spec.group.index)
        there = get_present_mask(course, spec.group.word_stack) if is_fixed else None
        if there is not None:
            there = there.reshape(there.shape[course.layout.batch_dim :])
            shown = there if shown is None else shown & there
        return shown


def _get_batch_shape(state: ExecutionState, spec: NodeSpec, batch: int) -> tuple[int, ...]:
    one = () if spec.scope == "corpus" else (batch,)
    return (*one, *get_plate_sizes(state.network, spec, state.word_counts))


def _unique_name(name: str, used_names: set[str]) -> str:
    while name in used_names:
        name += "_plate"
    return name
