"""Invalid arguments of every public function: a wrong type, a mistyped name, a number out of range.

Each argument of each public function in turn gets a wrong value among valid ones. The call must raise a `BNetError`
that names the argument, and leave nets, sentences and random generators as they were.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer._core.checks import is_integer, parse_float

WORDS = ["the", "cat", "sat"]
TEXTS = ["the cat sat", "sat the cat"]
PAIRS = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
METRIC = {"y_2": ("cat", "sat")}

# Valid arguments of every public function, by its name.
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "EM",
            "Laplace",
            "MAP",
            "NUTS",
            "SVI",
            "AdamW",
            "Gradient",
            "EarlyStopping",
            "Execution",
            "Reach",
            "Stack",
        )
    },
    **{"Arrow": {"role": "x"}, "Checkpoints": {"folder": "run"}, "Plate": {"name": "head", "size": 2}},
    **{"Node": {"role": "x", "tpm": tpm.Add(), "parents": ["x"]}, "Declaration": {}},
}
SMALL = {"dim": 4, "heads": 2, "slices": 1, "vocabulary": WORDS}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("encoder", "decoder", "encoder_decoder"), SMALL),
    **{name: {"dim": 4} for name in ("bayesuvius", "geometric", "volume_preserving")},
    "recurrent": {"dim": 4, "features": 4},
}
TPMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Activation", "Add", "Affine", "Attention", "Bilinear", "Concat", "Dot", "Dropout")},
    **{name: {} for name in ("Gated", "Norm", "Normaliser", "Pool", "Read", "Rotary", "Start", "Triangular")},
    **{name: {"dim": 4} for name in ("Embed", "Linear", "Recur", "Sinusoid", "Skew")},
    **{
        "Categorical": {"n": 3},
        "Cayley": {},
        "FeedForward": {"hidden": 4},
        "Neurons": {"hidden": 4},
        "Given": {"size": 4},
        "Normal": {"sigma": 1.0},
    },
    **{
        "Positions": {"length": 4, "dim": 4},
        "Relative": {"limit": 2},
        "Multiple": {"factor": 2.0},
        "Select": {"size": (4, 4)},
        "Table": {"probabilities": (0.5, 0.5)},
        "Weight": {"size": 4},
    },
}
STRUCTURE: dict[str, dict[str, Any]] = {
    **{name: {"x": "x_1", "y": "y", "given": "c"} for name in ("active_trail", "separated")},
    **{name: {"x": "x_1", "y": "y"} for name in ("minimal_cut", "minimal_separator")},
    **{name: {"name": "x_1"} for name in ("blanket", "children", "parents")},
    "draw": {"path": "net.svg"},
}
NET_METHODS: dict[str, dict[str, Any]] = {
    **STRUCTURE,
    **{
        "batch": {"sentences": TEXTS},
        "cost": {"words": 3},
        "equations": {},
        "expose_neurons": {},
        "pyro": {},
        "replace": {"parameters": {}},
    },
    **{"save": {"path": "n.safetensors"}, "sentence": {"sentence": "the cat"}, "to": {}},
    **{"separations": {"questions": [("x_1", "y", "c")]}, "tan": {"sentences": TEXTS, "classes": ["a", "b"]}},
}
GROUND = {"x_1": "x_1_0", "y": "y_0"}
SENTENCE_METHODS: dict[str, dict[str, Any]] = {
    "labels": {"name": "y_0"},
    **{name: {key: GROUND.get(value, value) for key, value in args.items()} for name, args in STRUCTURE.items()},
    **{"attention": {"slice": 0}, "counterfactual": {"name": "y_0", "do": {"c": 1}}, "explain": {"question": "reads"}},
    **{"limits": {"budget": 9}, "most_probable": {"nodes": "c"}, "posteriors": {"group": "c"}},
    **{"graph": {}, "log_prob": {"evidence": {"y_0": 1}}, "posterior": {"name": "c"}},
    **{
        "reads": {},
        "sample": {},
        "separations": {"questions": [("x_1_0", "y_0", "c")]},
        "shrink": {"boxes": str.upper},
    },
    **{"tan": {}, "tan_tree": {}, "to_pgmpy": {}, "top": {"name": "c"}, "tpm": {"name": "c"}},
}
# Names without an argument to test: classes of results and errors, and functions with only `**options` or `*names`.
EXCLUDED = {
    "Fit",
    "Sentence",
    "fit_from_pyro",
    "load_geometric",
    "models",
    "picture",
    "programs",
    "tpm",
    *(name for name in bt.__all__ if "Error" in name),
}
EXCLUDED |= {f"{owner}.{name}" for owner in ("BNet", "Sentence") for name in ("ancestors", "descendants", "picture")}
EXCLUDED |= {"BNet.check", "BNet.edges", "BNet.generate", "BNet.graph", "BNet.iterate", "BNet.module", "Sentence.do"}
EXCLUDED |= {"Sentence.observe", "Sentence.observe_words", "Sentence.undo", "Sentence.widget"}

# The name of an argument in error messages, where it differs from the signature.
ERROR_NAMES = {
    **{
        "path": "path|file",
        "folder": "path",
        "checkpoints": "path",
        "size": "plate|Given|Select|Weight",
        "n": "n|states",
        "kind": "reach|normaliser",
    },
    **{
        "of": "of|y_1",
        "readout": "readout|node group",
        "form": "form|norm",
        "how": "pool",
        "reach": "mask|reach",
        "target_vocabulary": "vocabulary",
        "through": "at",
    },
    **{
        "declaration": "Declaration",
        "output": "node group",
        "device_map": "device",
        "slices": "slices?",
        "slice": "slices?",
        "start": "data|start",
        "stop": "data|stop",
    },
    **{"x": "node|x", "y": "node|y", "name": "node|name", "given": "node|given"},
}
ANY_NUMBER = {"seed", "scale", "factor", "bound"}  # a negative one is valid
ANY_TEXT = {"name", "checkpoints", "folder", "path"}


@cache
def get_net() -> bt.BNet:
    """A mixture of heads with a readout."""
    return bt.bayesuvius(4, heads=3, vocabulary=WORDS, observe=tpm.Categorical(3, labels=WORDS))


@cache
def get_decoder() -> bt.BNet:
    """Return a net in which each word attends to earlier words."""
    return bt.decoder(8, heads=2, slices=1, vocabulary=WORDS)


@cache
def get_sentence() -> bt.Sentence:
    """A sentence of the mixture."""
    return get_net().sentence(TEXTS[0])


def build_mixture(heads: int) -> bt.BNet:
    """A mixture of some heads."""
    return bt.bayesuvius(4, heads=heads, vocabulary=WORDS, observe=tpm.Categorical(3, labels=WORDS))


@cache
def get_pgmpy_model() -> object:
    """A network of one coin."""
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    model = DiscreteBayesianNetwork()
    model.add_node("coin")
    model.add_cpds(TabularCPD("coin", 2, [[0.5], [0.5]]))
    return model


@cache
def list_functions() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function, with valid arguments."""
    two = {"clean": get_decoder().sentence(TEXTS[0]), "corrupt": get_decoder().sentence(TEXTS[1]), "metric": METRIC}
    entries: dict[str, dict[str, Any]] = {
        **{**CONFIGS, **MODELS, "BNet": {"declaration": get_net().declaration}, "plot": {"result": torch.ones(3)}},
        **{"circuit": {**two, "threshold": 0.1}, "explain": {"task": "posterior"}, "load": {"path": "net.safetensors"}},
        "faithfulness_curves": {**two, "scores": {"v_0_0_0 -> a_0_0_1": 1.0}},
        **{"from_pgmpy": {"model": get_pgmpy_model()}, "read_bif": {"path": "net.bif"}},
        **{name: {**two, "progress": False} for name in ("sweep", "mediation")},
        **{"fit": {"net": get_net(), "data": PAIRS, "method": bt.MAP(steps=1), "progress": False}},
        **{"fit_heads": {"create": build_mixture, "data": PAIRS, "method": bt.EM(steps=1), "progress": False}},
        **{"compare": {"fits": {"a": get_net(), "b": get_net()}, "data": PAIRS}},
        **{"calibrate": {"net": get_net(), "method": bt.SVI(steps=1), "x": TEXTS, "spread": 1.0, "progress": False}},
        **{"train": {"net": get_decoder(), "data": TEXTS, "steps": 1, "progress": False}},
        **{"fit_lens": {"net": get_decoder(), "sentences": TEXTS, "steps": 1}},
        **{"inclusion": {"net": get_decoder(), "sentences": TEXTS, "draws": 20, "progress": False}},
        **{"roles": {"net": get_decoder(), "sentences": TEXTS, "draws": 20}, "from_pretrained": {"source": "minilm"}},
    }
    result = {name: (getattr(bt, name), args) for name, args in entries.items()}
    result |= {f"tpm.{name}": (getattr(tpm, name), args) for name, args in TPMS.items()}
    for owner, methods in ((get_net(), NET_METHODS), (get_sentence(), SENTENCE_METHODS)):
        result |= {f"{type(owner).__name__}.{name}": (getattr(owner, name), args) for name, args in methods.items()}
    result["BNet.sample"] = (get_decoder().sample, {"words": 2, "start": WORDS[0]})
    sentence = two["clean"]
    result["Sentence.lens"] = (sentence.lens, {})
    result["draw"] = (partial(bt.draw, get_sentence()), {"path": "net.svg"})
    result["Sentence.contributions"] = (sentence.contributions, {"node": "y_1", "of": (WORDS[0], WORDS[1])})
    return result


def wrong_values(parameter: inspect.Parameter) -> Iterator[object]:
    """Return invalid values: of a wrong type, outside every range, a mistyped choice."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return
    yield object()
    annotation = str(parameter.annotation)
    if re.search(r"\b(int|float)\b", annotation) and parameter.name not in ANY_TEXT:
        yield from (float("nan"), "x")
        if parameter.name not in ANY_NUMBER:
            yield -9 if parameter.name in ("slice", "slices") else -1  # -1 is the last slice
    if isinstance(parameter.default, str) and parameter.name not in ANY_TEXT:
        yield f"{parameter.default}q"


def find_fault(call: Callable[[], object], name: str) -> str | None:
    """Return the fault of the error for a wrong argument, or None."""
    try:
        result = call()
    except bt.BNetError as error:
        message = str(error)
        if len(message) < 2000 and re.search(rf"\b({ERROR_NAMES.get(name, name)})\b", message):
            return None
        return f"the error does not name it: {message:.200}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, but {result!r:.80}"


@pytest.fixture(autouse=True)
def _check_state_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that an error leaves nets, sentences, random generators and the current folder unchanged."""
    before = {name: value.clone() for name, value in get_net().parameters.items()}
    value, generator = get_sentence()["x_1_2"].clone(), torch.get_rng_state()
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
    assert all(get_net().parameters[name].equal(tensor) for name, tensor in before.items())
    assert get_sentence()["x_1_2"].equal(value)
    assert torch.get_rng_state().equal(generator)


def test_every_public_function_is_in_the_table():
    public = set(bt.__all__)
    for owner in (bt.BNet, bt.Sentence):
        methods = (name for name in dir(owner) if inspect.isfunction(getattr(owner, name)) and not name.startswith("_"))
        public |= {f"{owner.__name__}.{name}" for name in methods}
    assert public - EXCLUDED == {name for name in list_functions() if not name.startswith("tpm.")}


@pytest.mark.parametrize("owner", ["tpm", "BNet", "Sentence", ""])
def test_a_wrong_argument_is_refused_by_its_name(owner):
    faults = []
    for name, (function, args) in list_functions().items():
        if name.rpartition(".")[0] != owner:
            continue
        for parameter in inspect.signature(function).parameters.values():
            for value in wrong_values(parameter):
                fault = find_fault(lambda f=function, a={**args, parameter.name: value}: f(**a), parameter.name)
                faults += [f"{name}({parameter.name}={value!r}): {fault}"] if fault else []
    assert not faults, "\n".join(faults)


# Names, mistyped by a letter, and the name that the error must offer.
MISTYPED: dict[str, Callable[[], object]] = {
    "x_1_0": lambda: get_sentence()["x_1_O"],
    "q_0_0": lambda: get_sentence().do({"q_0_O": torch.zeros(4)}),
    "y_0": lambda: get_sentence().observe(y_O=1),
    "sat": lambda: get_net().sentence("the cat sta"),
    "cat": lambda: get_sentence().observe(y_0="cta"),
    "x_1": lambda: get_net().parents("x_I"),
    "k_0": lambda: get_net().module()(torch.tensor([[0, 1]]), want=["k_O"]),
    "W_q_0.values": lambda: get_net().replace({"W_q_O.values": torch.zeros(3, 4, 4)}),
    "resume": lambda: bt.Checkpoints("run", resume="resum"),
    "'em'": lambda: bt.fit(get_net(), PAIRS, method="me"),
    "length": lambda: get_decoder().generate("the", lenght=2),
    "sweep": lambda: bt.explain("sweeep"),
    "theme": lambda: get_sentence().picture(them="dark"),
}


def test_a_name_mistyped_by_a_letter_is_offered():
    for name, call in MISTYPED.items():
        with pytest.raises(bt.BNetError) as error:
            call()
        assert name in str(error.value), f"{name}: {error.value}"


# Values of the right type that do not fit, and what the error names.
UNFIT: list[tuple[Callable[[], object], str]] = [
    (lambda: get_net().sentence(""), "at least one word"),
    (lambda: tpm.Parameter((2,), spread=-1.0), "spread of a parameter"),
    (lambda: tpm.Parameter((2,), fill=(1.0, 2.0, 3.0)), r"shape \(2,\)"),
    (lambda: get_net().sentence(["the", ""]), "word"),
    (lambda: get_net().sentence([0, 3]), "ids from 0 to 2"),
    (lambda: get_net().sentence("the", x=torch.zeros(2, 4)), "x"),
    (lambda: get_net().sentence("the cat", given={"token": [2, 2]}), "token"),
    (lambda: bt.bayesuvius(4).sentence(x=torch.zeros(3, 5)), r"shape \(3, 5\)"),
    (lambda: bt.bayesuvius(4).sentence(x=torch.full((2, 4), torch.nan)), "finite"),
    (lambda: bt.bayesuvius(4, mask=[[True, False], [True, True]]).sentence("a b c"), "2 words"),
    (lambda: bt.bayesuvius(4, mask="earlier").sentence("a b"), "word 0 of x_1"),
    (lambda: bt.bayesuvius(4, residual=True, value_dim=3), "width 3"),
    (lambda: bt.bayesuvius(4, per="word", combine="concat"), "selector"),
    (lambda: bt.bayesuvius(4, vocabulary=["a", "a"]), "vocabulary: .* different"),
    (lambda: bt.bayesuvius(99999999999), "parameters"),
    (lambda: get_sentence().do(c=3), "c: .* from 0 to 2"),
    (lambda: get_sentence().do(c=1.0), "c: .* a state"),
    (lambda: get_sentence().do(x_1_0=torch.zeros(3)), r"x_1_0: .*shape \(4,\)"),
    (lambda: get_sentence().do(x_1_0=torch.full((4,), torch.inf)), "x_1_0: .*finite"),
    (lambda: get_sentence().do(x_1_0=get_sentence()["x_1_1"]), r"x_1_0: .*do\(c=...\)"),
    (lambda: get_sentence().do(x_1_9=torch.zeros(4)), "x_0_0 to x_1_2"),
    (lambda: get_sentence().do(c=1).observe(c=1), "not both"),
    (lambda: get_sentence().observe(c=1).posterior("c", {"c": 0}), "c: "),
    (lambda: get_sentence().posterior("x_1_0"), "nodes of c"),
    (lambda: get_sentence().posterior("c", {"token_0": 1}), "token_0: .*possible"),
    (lambda: get_sentence().attention(1), "from 0 to 0"),
    (lambda: get_sentence().do(c=bt.interventions.Mean()), "c has no words$"),
    (lambda: get_sentence().do(W_q_0=bt.interventions.Mean()), r"W_q_0 has no words. Use Mean\(sentences\)"),
    (lambda: get_sentence().do({"x_1_0": torch.zeros(4), "x_1_*": torch.zeros(4)}), "'x_1_[*]' sets x_1_0, which has"),
    (lambda: get_sentence().shrink(3), "a mapping from names, or a function of a name; got 3"),
    (lambda: get_net().cost({}), "words: expected a number of words. Pass an integer"),
    (lambda: get_decoder().generate(), "prompt: expected at least one word. Pass words, or start="),
    (lambda: bt.sweep([], get_sentence(), metric=METRIC), r"clean: .*; got \[\]"),
    (lambda: bt.from_pretrained("tiny", readout=None, dtype=torch.float64), "does not accept dtype=, readout="),
    (lambda: tpm.Given(4, default=0), "default of Given: expected None, because states= is not given; got 0"),
    (lambda: tpm.Given(4, states=3), r"not both; got size=\(4,\) and states=3"),
    (lambda: bt.bayesuvius(...), "dim: .*; got Ellipsis"),
    (lambda: get_sentence().graph(limit=10), "arrows"),
    (
        lambda: get_sentence().minimal_cut("x_0_0", "y_0", limit=3),
        "at most 3 arrows; got [0-9]+ arrows between 3 words",
    ),
    (lambda: get_sentence().graph(words="dog"), "word: "),
    (lambda: get_net().replace({"W_q_0.values": torch.zeros(2)}), "W_q_0.values of shape"),
    (lambda: get_net().to(torch.int32), "to: "),
    (lambda: get_net().to("cuda:99"), "to: "),
    (lambda: bt.sweep(get_sentence(), get_net().sentence("the cat"), metric=METRIC), "words"),
    (lambda: bt.train(get_decoder(), [], steps=1), "data"),
    (lambda: bt.fit(get_net(), [("the cat", "cat")]), "data|y"),
    (lambda: bt.load("no_such_file.safetensors"), "no_such_file"),
    (lambda: get_sentence().draw("figure.xyz"), "figure.xyz"),
    (lambda: get_net().save("no_such_folder/net.safetensors"), "no_such_folder"),
]


def test_a_value_that_does_not_fit_is_refused():
    for k, (call, named) in enumerate(UNFIT):
        with pytest.raises(bt.BNetError) as error:
            call()
        assert re.search(named, str(error.value)), f"{k}, {named}: {error.value}"


HOSTILE = st.one_of(
    st.none() | st.booleans() | st.integers(-5, 10) | st.integers(10**18, 10**30) | st.floats() | st.text(max_size=8),
    st.binary(max_size=4) | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.lists(st.integers(-2, 4) | st.text(max_size=3) | st.floats(), max_size=4),
    st.sampled_from([torch.zeros(0), torch.zeros(4), torch.tensor(1), np.zeros((2, 2)), len, 1j, 10**5000]),
    st.sampled_from(["x_0_0", "q_0_1", "c", "y_1", "W_k_1", "x_0_99", "\x00", "é_1", "\ud800", "x_0_0" * 50]),
)
WRITES_OR_SLOW = {"draw", "save", "sweep", "mediation", "circuit", "fit", "train", "inclusion", "roles"}


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_value_of_any_argument_is_answered_or_refused(data):
    quick = [name for name in list_functions() if name.rpartition(".")[2] not in WRITES_OR_SLOW | {"from_pretrained"}]
    function, args = list_functions()[data.draw(st.sampled_from(quick))]
    names = [name for name, p in inspect.signature(function).parameters.items() if p.kind.name.endswith("KEYWORD")]
    changed = data.draw(st.dictionaries(st.sampled_from(names), HOSTILE, max_size=2)) if names else {}
    try:
        function(**{**args, **changed})
    except bt.BNetError as error:
        assert 0 < len(str(error)) < 2000


@given(
    st.text(st.sampled_from("01²١+-_. eE") | st.characters(), max_size=6)
    | st.integers().map(str)
    | st.floats().map(str)
)
def test_a_state_is_ascii_digits_and_a_number_has_no_other_characters(text):
    assert is_integer(text) == (text != "" and set(text) <= set("0123456789"))
    try:
        expected = float(text) if set(text) <= set("0123456789+-.eE") else None
    except ValueError:
        expected = None
    assert parse_float(text) == (None if expected in (float("inf"), float("-inf")) else expected)
