"""Every kind of result is saved and loaded without a change, and has a data frame, a notebook form and a plot."""

import contextlib
import copy
import dataclasses
import functools
import html
import importlib
import io
import json
import pkgutil
import random
import re
import tarfile
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors import safe_open
from safetensors.torch import save_file

import bnet_transformer as bt
from bnet_transformer._core import files, results
from bnet_transformer._core.results import Result
from bnet_transformer._core.stats import ComparableResult
from bnet_transformer.attention import damage, learn_tan
from bnet_transformer.declare import Network, io as net_files
from bnet_transformer.learning.calibration import Calibration
from bnet_transformer.learning.fit import Check
from bnet_transformer.programs.compiled import TrueEdges
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import CASES
from tests.sweep_oracle import get_outputs, make_metric, make_pair

WORDS = ["a", "the", "cat", "dog", "sat", "ran"]
METRIC = {"y_2": ("cat", "dog")}
CLEAN, CORRUPT = ["the cat sat", "the cat ran", "a cat sat"], ["the dog sat", "the dog ran", "a dog sat"]


@functools.cache
def decoder(seed=0):
    return bt.decoder(dim=8, heads=2, slices=2, norm="pre", vocabulary=WORDS, seed=seed)


def pair(seed=0):
    return tuple([decoder(seed).sentence(text) for text in texts] for texts in (CLEAN, CORRUPT))


def sentence():
    return decoder().sentence(CLEAN[0])


@functools.cache
def mixture():
    return bt.bayesuvius(4, slices=2, heads=3, mask="causal", vocabulary=WORDS, observe=Categorical(6), seed=1)


def mixed():
    return mixture().sentence("the cat sat").observe(y_1="sat")


@functools.cache
def fit(steps=2):
    torch.manual_seed(1)
    data = torch.randn(12, 3, 3), torch.randn(12, 3, 3)
    net = bt.bayesuvius(3, heads=2, observe=Normal(0.3))
    return bt.fit(net, data, method=bt.MAP(restarts=1, steps=steps, optimizer="first-order"), progress=False)


def held_out_data():
    torch.manual_seed(2)
    return torch.randn(4, 3, 3), torch.randn(4, 3, 3)


@functools.cache
def circuit():
    return bt.circuit(*pair(), metric=METRIC, threshold="20%", over=("slice", "head"))


@functools.cache
def inclusion():
    return bt.inclusion(decoder(), CLEAN, progress=False)


def curves():
    return bt.faithfulness_curves(*pair(), metric=METRIC, scores=circuit(), over=circuit().over)


KINDS = {
    "Sweep": lambda: bt.sweep(*pair(), at=["x", "v -> a"], metric=METRIC),
    "EstimateCalibration": lambda: bt.sweep(*pair(), at="a", metric=METRIC, method=bt.Gradient(check=3)).calibration,
    "Mediation": lambda: bt.mediation(*pair(), through="a", metric=METRIC),
    "Circuit": circuit,
    "CircuitTests": lambda: circuit().test(draws=20),
    "FaithfulnessCurves": curves,
    "Inclusion": inclusion,
    "Damage": lambda: damage(inclusion(), counts=[0, 1], progress=False),
    "Roles": lambda: bt.roles(decoder(), CLEAN),
    "Reads": lambda: mixed().reads(residual=0.3),
    "Lens": lambda: sentence().lens(),
    "TunedLens": lambda: bt.fit_lens(decoder(), CLEAN, steps=2),
    "Contributions": lambda: sentence().contributions("y_2", of=("cat", "dog"), exact=True),
    "PathContributions": lambda: sentence().contributions("y_2", of="cat", paths=2),
    "ScoreContributions": lambda: sentence().contributions("j_1_0_2", exact=True),
    "Tan": lambda: mixed().tan("roles"),
    "TanTree": lambda: mixed().tan_tree(),
    "CorpusTan": lambda: learn_tan([0, 0, 1, 1], [[0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0]], ["a", "b", "c"]),
    "Samples": lambda: mixed().sample(5, seed=1),
    "GroupPosterior": lambda: mixed().posteriors("y"),
    "RankedStates": lambda: mixed().most_probable(count=2),
    "Counterfactual": lambda: mixture().sentence("the cat sat").counterfactual("y_1", do={"c": 0}, evidence={"y_1": 1}),
    "Calibration": lambda: Calibration(
        "exact", {"c": torch.arange(40) % 20}, {"c": torch.full((40,), 19)}, 41, failures={3: "?"}
    ),
    "Fit": fit,
    "Heads": lambda: fit().heads,
    "Comparison": lambda: fit().compare(fit(3)),
    "ModelComparison": lambda: bt.compare({2: fit(), 3: fit(3)}, held_out_data()),
    "Check": lambda: Check({"mean": 1.0}, {"mean": 0.0}, {"mean": 0.5}, {"mean": float("nan")}),
    "Trained": lambda: bt.train(decoder(), CLEAN, steps=3, batch=2, held_out=CORRUPT, progress=False),
    "Generated": lambda: decoder().generate(["the cat"], length=2),
    "TrueEdges": lambda: TrueEdges({"a -> b": 0.5, "b -> c": 0.0}, frozenset({"a -> b"}), 4, True),
    "ResultComparison": lambda: bt.sweep(*pair(), at="a", metric=METRIC).compare(
        bt.sweep(*pair(1), at="a", metric=METRIC)
    ),
    "Cost": lambda: decoder().cost(words=4),
}
WITHOUT_PLOT = {"Generated", "TrueEdges"}
PLOT_OPTIONS = {"Samples": {"node": "y_0"}}
NOT_STORED = {("Contributions", "readout"), ("Fit", "data")}


@functools.cache
def build(kind):
    return KINDS[kind]()


def assert_same(first, second, where=""):
    """Two values are equal bit by bit, in their types too."""
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, where
        bits = torch.int16 if first.dtype == torch.bfloat16 else first.dtype  # numpy has no bfloat16
        first, second = (value.detach().contiguous().view(bits).numpy() for value in (first, second))
    if isinstance(first, np.ndarray):
        assert (first.dtype, first.shape) == (second.dtype, second.shape), where
        assert first.tobytes() == second.tobytes(), where
    elif isinstance(first, bt.BNet | Network):
        assert type(first) is type(second), where
        pair_of_files = [net_files.to_bytes(getattr(net, "network", net)) for net in (first, second)]
        assert pair_of_files[0] == pair_of_files[1], where
    elif dataclasses.is_dataclass(first):
        assert type(first) is type(second), where
        for name in results.get_fields(first):
            if (type(first).__name__, name) not in NOT_STORED and not name.startswith("_"):
                assert_same(getattr(first, name), getattr(second, name), f"{where}.{name}")
    elif isinstance(first, dict | tuple | list):
        assert len(first) == len(second), where
        keys = list(first) if isinstance(first, dict) else range(len(first))
        assert not isinstance(first, dict) or list(second) == keys, where
        for key in keys:
            assert_same(first[key], second[key], f"{where}[{key!r}]")
    elif not hasattr(first, "__dict__"):
        assert first == second or (first != first and second != second), where


def render(result):
    buffer = io.BytesIO()
    bt.plot(result, **PLOT_OPTIONS.get(type(result).__name__, {})).savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_saved_loaded_compared_shown_and_plotted(kind, tmp_path):
    result, path = build(kind), tmp_path / "result.safetensors"
    result.save(path)
    loaded = bt.load(path)
    assert type(result).__name__ == type(loaded).__name__ == kind
    assert_same(result, loaded, kind)
    assert_frame_equal(result.to_dataframe(), loaded.to_dataframe())
    assert len(result.to_dataframe()) and repr(result) == repr(loaded)
    shown = loaded._repr_html_()
    assert shown == result._repr_html_() and "<table" in shown and "tensor(" not in shown
    assert all(html.escape(text) in shown for text in (result.caption, *result._get_notes())) or kind == "Cost"
    if isinstance(result, ComparableResult):
        assert not result.compare(loaded).difference.nan_to_num().any()
    assert kind in WITHOUT_PLOT or render(loaded) == render(result)
    content = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == content or kind in ("Fit", "ModelComparison", "Contributions")


def iter_classes(kind):
    """Yield all subclasses of a class."""
    for part in kind.__subclasses__():
        yield part
        yield from iter_classes(part)


def test_the_tables_have_every_kind_of_result():
    for info in pkgutil.walk_packages(bt.__path__, "bnet_transformer."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
    kinds = {kind for kind in iter_classes(Result) if kind.__module__.startswith("bnet_transformer.")}
    known = {results.find_class(name, "") for names in results.RESULTS.values() for name in names}
    bases = {base for kind in kinds for base in kind.__mro__[1:]}
    assert kinds - bases == known and {kind.__name__ for kind in known} == set(KINDS)


def test_files_of_version_0_1_are_read(tmp_path):
    """The archive has a file of each kind of result, which the code of version 0.1 wrote."""
    with tarfile.open(Path(__file__).with_name("results_of_0_1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    paths = {path.stem: path for path in tmp_path.glob("*.safetensors")}
    assert set(KINDS) <= set(paths)
    for kind, path in paths.items():
        loaded = bt.load(path)
        assert_frame_equal(loaded.to_dataframe(), bt.load(path).to_dataframe())
        assert type(loaded).__name__ == kind.rstrip("3") and loaded._repr_html_()
        loaded.save(tmp_path / "again")
        assert_same(loaded, bt.load(tmp_path / "again"))


@pytest.mark.slow
def test_a_loaded_circuit_runs_on_sentences_of_the_net(tmp_path):
    original = circuit()
    original.save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    assert loaded.pairs.clean.model.network is loaded.pairs.corrupt.model.network is not decoder().network
    clean, corrupt = (part[:1] for part in pair())
    assert loaded.run(clean, corrupt).outcome.equal(original.run(clean, corrupt).outcome)
    assert (loaded - original).edges == 0 and (original & loaded).retained == original.retained
    assert loaded.test(draws=5).minimality == original.test(draws=5).minimality


def test_a_metric_that_is_a_function_is_not_in_the_file(tmp_path):
    original = bt.circuit(*pair(), metric=lambda x_2_2: x_2_2[:, 0], threshold="20%", over=("slice", "head"))
    original.save(tmp_path / "circuit.safetensors")
    loaded = bt.load(tmp_path / "circuit.safetensors")
    assert loaded.faithfulness == original.faithfulness
    with pytest.raises(bt.BNetError, match="a file does not contain"):
        loaded.run(*pair())
    assert loaded.run(*pair(), metric=METRIC).outcome.equal(original.run(*pair(), metric=METRIC).outcome)


def test_a_loaded_lens_computes_full_distributions(tmp_path):
    lens = sentence().lens()
    lens.save(tmp_path / "lens.safetensors")
    loaded = bt.load(tmp_path / "lens.safetensors")
    assert loaded.probability("cat").equal(lens.probability("cat"))
    assert loaded.distribution(1).probs.equal(lens.distribution(1).probs)


def write(path, header, tensors=None, **changes):
    files.write_tensors(path, {**header, **changes}, tensors or {})


HEADER = {"format": results.FORMAT, "version": 1, "kind": "Check", "content": {"class": "Check", "fields": {}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2, "library": "9.0"}, "written by bnet_transformer 9.0.*pip install"),
        ({"version": "1"}, "format version"),
        ({"content": {"class": "Oracle", "fields": {}}}, "known kind of result.*Oracle.*newer version"),
        ({"content": {"class": "os:system", "fields": {}}}, "known kind of result"),
        ({"content": {"class": "Check", "fields": {"hidden": 1}}}, "hidden"),
        ({"content": {"tensor": "absent"}}, "a tensor, an array"),
        ({"content": {"same": 0}}, "a tensor, an array"),
        ({"format": "another"}, "expected a net"),
    ],
)
def test_files_of_other_kinds_and_versions_raise_errors(changes, message, tmp_path):
    path = tmp_path / "result.safetensors"
    write(path, HEADER, **changes)
    content = path.read_bytes()
    with pytest.raises(bt.FileError, match=message):
        bt.load(path)
    assert path.read_bytes() == content


WRONG_VALUES = None, "text", 7, 2.5, True, [1, "a"], {"list": [1]}, {"dict": [["a", 1]]}, [[["deep"]]]


def iter_leaves(data, keys=()):
    """Yield the position, as keys, of each leaf and each list in JSON data."""
    if isinstance(data, list | dict):
        for key, part in data.items() if isinstance(data, dict) else enumerate(data):
            yield from iter_leaves(part, (*keys, key))
    if not isinstance(data, dict):
        yield keys


def replace_leaf(data, keys, value):
    """Copy JSON data, with the value at a position replaced; None if the value has the same type."""
    copied = copy.deepcopy(data)
    part = functools.reduce(lambda part, key: part[key], keys[:-1], copied)
    old, part[keys[-1]] = part[keys[-1]], value
    is_valid = type(old) is type(value) or (isinstance(old, float) and type(value) is int)
    return None if is_valid else copied


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_value_of_another_type_is_refused_or_shown(count, kind, tmp_path):
    """The checksum of the changed file is valid: loading it raises an error, or all of its forms work."""
    path = tmp_path / "result.safetensors"
    header, tensors = read_parts(kind, path)
    paths = list(iter_leaves(header["content"]))
    for keys in random.Random(kind).sample(paths, min(count, len(paths))):
        for value in WRONG_VALUES:
            changed = replace_leaf(header["content"], keys, value)
            if changed is not None:
                write(path, header, tensors, content=changed)
                assert_refused_or_shown(path)


def read_parts(kind, path):
    """Save a result; return the header without its checksum, and the tensors."""
    build(kind).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[files.METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["sha256"]
    return header, tensors


def assert_refused_or_shown(path, label=""):
    try:
        loaded = bt.load(path)
    except bt.FileError as error:
        assert str(path) in str(error)
        return
    try:
        assert repr(loaded) and loaded._repr_html_() and loaded.to_dataframe() is not None
    except bt.BNetError:  # a library's error names the cause
        return
    except Exception as error:
        raise AssertionError(f"{label}: {error!r}") from error


def change_lens(fields, tensors):
    """A latent choice that the net does not have, with one state."""
    fields["reader"]["fields"]["choices"] = {"list": [999]}
    tensors["reader.joint_states"] = torch.zeros(1, 1, dtype=torch.long)


INVALID = {  # values of the right types that no result has
    "Counterfactual": lambda fields, tensors: fields.update(probabilities=None),
    "FaithfulnessCurves": lambda fields, tensors: fields.update(kl={"dict": []}),
    "TanTree": lambda fields, tensors: fields.update(weights=[{"float": "inf"} for _ in fields["weights"]]),
    "CorpusTan": lambda fields, tensors: fields.update(parents=[7 for _ in fields["parents"]]),
    "CircuitTests": lambda fields, tensors: fields["changes"]["dict"].pop(),
    "ModelComparison": lambda fields, tensors: fields["fits"]["dict"].pop(),
    "Contributions": lambda fields, tensors: fields["words"].pop(),
    "Lens": change_lens,
}


@pytest.mark.parametrize("kind", INVALID)
def test_values_that_do_not_agree_are_refused(kind, tmp_path):
    path = tmp_path / "result.safetensors"
    header, tensors = read_parts(kind, path)
    INVALID[kind](header["content"]["fields"], tensors)
    write(path, header, tensors)
    with pytest.raises(bt.FileError, match=r"result\.safetensors"):
        bt.load(path)


def test_an_integer_is_a_float_only_if_a_float_represents_it(tmp_path):
    path = tmp_path / "result.safetensors"
    header, tensors = read_parts("FaithfulnessCurves", path)
    shares = header["content"]["fields"]["shares"]
    shares[-1] = 1
    write(path, header, tensors)
    assert_frame_equal(bt.load(path).summary(), build("FaithfulnessCurves").summary())
    shares[-1] = 10**30
    write(path, header, tensors)
    with pytest.raises(bt.FileError, match="expected float"):
        bt.load(path)


def test_the_shapes_of_every_result_name_its_arrays():
    """A new array of a result is checked when its file is read."""
    for name in results.MODULES:
        kind = results.find_class(name, "")
        if issubclass(kind, Result):
            hints = typing.get_type_hints(kind)
            names = {field.name for field in dataclasses.fields(kind) if field.init}
            arrays = {name for name in names if "Tensor" in str(hints[name]) or "ndarray" in str(hints[name])}
            assert arrays <= set(re.findall(r"\w+", kind._shapes)), kind


def test_results_of_a_net_in_bfloat16_are_loaded(tmp_path):
    net = decoder().to(torch.bfloat16)
    clean = net.sentence(CLEAN[0])
    sweep = bt.sweep([clean], [net.sentence(CORRUPT[0])], at="a", metric=METRIC)
    results = clean.lens(), clean.contributions("y_2", of="cat"), bt.fit_lens(net, CLEAN, steps=2), sweep
    for result in results:
        result.save(tmp_path / "result.safetensors")
        loaded = bt.load(tmp_path / "result.safetensors")
        assert_same(result, loaded)
        assert repr(loaded) and loaded._repr_html_()


def iter_changed(value):
    """Yield the tensor with another dtype, another rank, and fewer entries along a dim."""
    for dtype in (torch.int64, torch.int8, torch.bool, torch.float16, torch.complex64):
        yield value.to(dtype)
    yield value[None]
    yield value.flatten()
    for dim in range(value.dim()):
        yield value.narrow(dim, 0, max(0, value.shape[dim] - 1))
        yield value.narrow(dim, 0, 0)
        yield torch.cat([value, value], dim)
    if value.numel():
        yield value.flatten()[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_tensor_of_another_dtype_or_shape_is_refused_or_shown(count, kind, tmp_path):
    """As above, for the tensors of the file; those of a net are tested with its file."""
    path = tmp_path / "result.safetensors"
    header, tensors = read_parts(kind, path)
    names = sorted(tensors)
    for name in random.Random(kind).sample(names, min(count, len(names))):
        for changed in iter_changed(tensors[name]):
            if (changed.dtype, changed.shape) != (tensors[name].dtype, tensors[name].shape):
                write(path, header, {**tensors, name: changed.contiguous()})
                assert_refused_or_shown(path, f"{name} {changed.dtype} {tuple(changed.shape)}")


def test_a_fit_in_a_file_has_no_other_class_of_nets(tmp_path):
    dataclasses.replace(fit(), net=build("Samples")).save(tmp_path / "a")
    with pytest.raises(bt.FileError, match=r"a net.*draws"):
        bt.load(tmp_path / "a")


def test_damaged_and_foreign_files_raise_errors(tmp_path):
    path = tmp_path / "result.safetensors"
    build("Sweep").save(path)
    content = path.read_bytes()
    for end in (0, 4, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(bt.FileError, match=r"result\.safetensors"):
            bt.load(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(bt.FileError, match="SHA-256"):
        bt.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(bt.FileError, match="another format"):
        bt.load(path)
    with pytest.raises(bt.FileError, match="no such file"):
        bt.load(tmp_path / "absent.safetensors")


def test_a_failed_save_leaves_what_is_there(tmp_path):
    folder, path = tmp_path / "folder", tmp_path / "result.safetensors"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    result = build("Check")
    for target in (folder, tmp_path / "absent" / "a.safetensors", ""):
        with pytest.raises(bt.FileError):
            result.save(target)
    assert (folder / "a.txt").read_text() == "a"
    result.save(path)
    content = path.read_bytes()
    with pytest.raises(bt.BNetError, match="a file can store"):
        dataclasses.replace(result, readout=object()).save(path)
    assert path.read_bytes() == content and sorted(item.name for item in tmp_path.iterdir()) == ["folder", path.name]


def test_functions_and_no_other_callables_are_left_out(tmp_path):
    result, path = build("ResultComparison"), tmp_path / "result.safetensors"
    dataclasses.replace(
        result, columns={"a": (lambda y_1, scale=2: y_1 * scale, torch.sin) * (len(result.cells) // 2)}
    ).save(path)
    loaded = bt.load(path).columns["a"][:2]
    assert [results.get_parameter_names(item) for item in loaded] == [("y_1",), ()]
    for value in (torch.nn.Linear(1, 1), functools.partial(max, 1), Values):
        with pytest.raises(bt.BNetError, match="a file can store"):
            dataclasses.replace(result, columns={"a": (value,)}).save(path)


def test_arrays_without_dims_have_the_same_shape_in_a_file(tmp_path):
    count = len(build("ResultComparison").cells)
    arrays = {"zero": (np.array(2.5),) * count, "reversed": (np.arange(6).reshape(2, 3)[:, ::-1].T,) * count}
    dataclasses.replace(build("ResultComparison"), columns=arrays).save(tmp_path / "a")
    assert_same(arrays, bt.load(tmp_path / "a").columns)


class Values(dict):
    """A class whose objects are no parts of results."""


def test_a_name_in_a_file_means_one_class():
    duplicate = dataclasses.make_dataclass("Sweep", [])
    with pytest.raises(bt.BNetError, match="a file can store"):
        dataclasses.replace(build("Check"), readout=duplicate()).save("a")
    with pytest.raises(bt.FileError, match="Sweep") as error:
        results.find_class("Oracle", "")
    assert not {"CellResult", "ComparableResult", "HeadTable"} & {*error.value.allowed.split(", ")}


def test_a_file_of_a_result_with_a_net_is_read_as_the_net(tmp_path):
    from bnet_transformer.bnet import load_net

    for kind, net in (("Trained", build("Trained").net), ("Inclusion", decoder())):
        build(kind).save(tmp_path / "a.safetensors")
        assert_same(load_net(tmp_path / "a.safetensors"), net)
    build("Check").save(tmp_path / "a.safetensors")
    with pytest.raises(bt.FileError, match="contains one"):
        load_net(tmp_path / "a.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case_", [case_ for case_ in CASES if case_.text is not None], ids=lambda case_: case_.name)
def test_results_of_every_architecture_are_saved(case_, tmp_path):
    clean, corrupt = make_pair(case_)
    metric = make_metric(get_outputs(corrupt)[-1:])
    specs = clean.net.network.specs
    role = next((spec.group.stem for spec in specs if spec.tpm.kind == "deterministic"), "x")
    makers = {
        "circuit": lambda: bt.circuit(clean, corrupt, metric=metric, edges="* -> *"),
        "sweep": lambda: bt.sweep(clean, corrupt, at=role, metric=metric, progress=False),
        "reads": clean.reads,
        "lens": clean.lens,
        "samples": lambda: clean.sample(3, seed=0),
        "cost": lambda: clean.net.cost(clean.ground.word_counts),
    }
    count = 0
    for name, make in makers.items():
        result = None
        with contextlib.suppress(bt.BNetError):  # not every architecture has every result
            result = make()
        if result is None:
            continue
        count += 1
        result.save(tmp_path / name)
        loaded = bt.load(tmp_path / name, trust=True)
        assert_same(result, loaded, name)
        if name == "circuit":
            assert torch.equal(loaded.run(clean, corrupt, metric=metric).outcome, result.outcome)
        if name == "lens":
            assert torch.equal(loaded.probability(0), result.probability(0))
    assert count >= 2
