"""The page as a file: its data agree with the sentence, to the resolution of a byte; it loads nothing, and is written
completely or not at all.

`test_page_browser.py` opens it in a browser.
"""

import base64
import gzip
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from pgmpy.inference import VariableElimination

import bnet_transformer as bt
from bnet_transformer.errors import BNetError, BudgetError, FileError, UnknownNameError
from bnet_transformer.figures.picture import DASH_PATTERNS, HEAD_COLOURS, PALETTES, ROLE_DASHES, make_arrow
from bnet_transformer.interventions import Attend, Zero
from bnet_transformer.page import description as page_contributions, description as page_description
from bnet_transformer.page.html import (
    MATHML_ATTRIBUTES,
    MATHML_TAGS,
    MODULES,
    bundle_script,
    render_style_sheet,
    to_mathml,
)
from bnet_transformer.tpm import Categorical
from tests.cases import CASES, hidden_states, jitter
from tests.discrete_networks import PARENTS, textbook, to_pgmpy_model

FRONTEND = Path(page_description.__file__).parent / "frontend"
BYTE = 0.5 / 255 + 1e-6
BY_NAME = {case.name: case for case in CASES}


def read_page(path):
    """Return the description and the buffer in a file."""
    text = path.read_text("utf-8")
    description, buffer = (
        re.search(rf'<script id="bnet-{key}"[^>]*>(.*?)</script>', text, re.S)[1] for key in ("description", "buffer")
    )
    return json.loads(description), gzip.decompress(base64.b64decode(buffer))


def explore_page(s, tmp_path, **options):
    path = tmp_path / "page.html"
    s.draw(path, **options)
    return read_page(path)


def unpack_bit_table(description, buffer, number):
    """A boolean matrix of the description."""
    rows, columns, offset = description["bit_tables"][number]
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8, offset=offset))
    return bits[: rows * columns].reshape(rows, columns).astype(bool)


def unpack_attention(description, buffer):
    """Return, by the name of the attending group, its description, and P(j | i) as `[slot, plate, word, word]`."""
    result, end = {}, 0
    for item in description["attention"]:
        mask = unpack_bit_table(description, buffer, item["mask"])
        table = np.zeros((item["num_slots"], item["num_plates"], *mask.shape))
        size = item["num_slots"] * item["num_plates"] * int(mask.sum())
        values = np.frombuffer(buffer[item["offset"] : item["offset"] + size], np.uint8)
        table[..., mask] = values.reshape(item["num_slots"], item["num_plates"], -1) / description["quantization_steps"]
        result[description["groups"][item["group"]]["name"]] = item, table
        assert item["offset"] == end
        end += size
    assert len(buffer) == end + sum(-(-rows * columns // 8) for rows, columns, _ in description["bit_tables"])
    return result


@cache
def explore_case(name):
    """A case of `CASES` with its evidence: the sentence, the description and the buffer of its page."""
    case = BY_NAME[name]
    s = case.sentence.observe(case.evidence) if case.evidence else case.sentence
    with tempfile.TemporaryDirectory() as folder:
        return s, *explore_page(s, Path(folder))


def get_stem(group):
    return "_".join(part for part in (group["stack"], group["role"]) if part)


def average_attention(s, description, step, role):
    """Return the attention averaged over the joint states of the latent choices, each set by do."""
    names = [posterior["node"] for posterior in description["posteriors"]]
    joint = s.posterior(names)
    total = 0.0
    for state in itertools.product(*map(range, joint.shape)):
        if float(joint[state]) > 0:
            total = total + float(joint[state]) * s.do(dict(zip(names, state, strict=True))).attention(step, role=role)
    return total


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_reads_of_the_page_equal_the_attention(case):
    s, description, buffer = explore_case(case.name)
    results = unpack_attention(description, buffer)
    for name, (item, table) in results.items():
        group = description["groups"][item["group"]]
        step, role = group["step"], get_stem(group)
        states = math.prod(size for _, size in item["choices"])
        if item["choices"] or not item["has_mean"]:
            expected = s.attention(step, role=role).double().numpy()
            expected = expected.reshape(states, -1, *expected.shape[-2:])
            assert np.abs(table[-states:] - expected).max() <= BYTE
        if item["has_mean"] and math.prod(len(p["states"]) for p in description["posteriors"]) <= 40:
            expected = average_attention(s, description, step, role).double().numpy()
            assert np.abs(table[0] - expected.reshape(table[0].shape)).max() <= BYTE, name
        assert item["num_slots"] == (states if item["choices"] else 0 if item["has_mean"] else 1) + item["has_mean"]
    for spec in s.net.network.specs:  # where a word has no P(j | i), the page gives the reason
        name = spec.group.name
        if spec.has_word_attention and name not in results:
            assert [note for note in description["notes"] if note.startswith(f"{name} has no P(j | i)")]


@pytest.mark.slow
def test_posteriors_are_those_of_the_sentence():
    for case in CASES:
        s, description, _ = explore_case(case.name)
        for posterior in description["posteriors"]:
            before, after = (torch.tensor([row[k] for row in posterior["states"]]).double() for k in (1, 2))
            assert (after - s.posterior(posterior["node"]).double()).abs().max() < 1e-6, case.name
            assert (before - case.sentence.posterior(posterior["node"]).double()).abs().max() < 1e-6, case.name
        assert description["evidence"].keys() == set(case.evidence), case.name


@pytest.mark.slow
def test_every_family_has_its_equation_and_facts():
    for case in CASES:
        s, description, _ = explore_case(case.name)
        equations, graph = s.net.equations(), s.graph()
        assert description["counts"] == [len(s.ground), s.ground.count_arrows()], case.name
        for index, item in enumerate(description["groups"]):
            group = s.ground.template.groups[index]
            first = graph.nodes[s.ground.name(int(s.ground.offsets[index]))]
            row = description["equations"][item["equation"]]
            for fact in ("role", "stack", "slice", "tpm"):
                assert item[fact] == first[fact], (case.name, group.name, fact)
            assert item["is_learnable"] == first["learnable"], (case.name, group.name)
            assert item["name"] == group.name and tuple(item["value_shape"]) == first["shape"], (case.name, group.name)
            assert row["latex"] == equations[row["name"]].latex, (case.name, group.name)
            assert re.fullmatch(rf"{re.escape(group.stem)}(_\S+)?", row["name"]), (case.name, group.name)
            assert row["mathml"] is not None and len(row["mathml"]) == 2, (case.name, group.name)


NODE = """
import { readFileSync } from 'node:fs';
const { GroundGraph } = await import(process.argv[1]);
const answers = JSON.parse(readFileSync(process.argv[2], 'utf8')).map(([description, buffer]) => {
  const graph = new GroundGraph(description, new Uint8Array(Buffer.from(buffer, 'base64')));
  const names = Array.from({ length: graph.offsets.at(-1) }, (_, k) => graph.nodeName(k));
  return Object.fromEntries(names.map((name, k) => {
    if (graph.findNode(name) !== k) throw new Error(`${name} is found at ${graph.findNode(name)}`);
    const answers = { parents: graph.parents(k), children: graph.children(k), ancestors: graph.ancestors([k]),
      descendants: graph.descendants([k]), blanket: graph.blanket(k) };
    const named = Object.entries(answers).map(([query, ids]) => [query, ids.map((id) => names[id])]);
    return [name, Object.fromEntries(named)];
  }));
});
console.log(JSON.stringify(answers));
"""


def windowed():
    mask = [
        [True, False, True, True],
        [False, True, False, True],
        [True, True, True, False],
        [False, False, True, True],
    ]
    for reach in (bt.Reach("window", 1), "causal", mask):
        net = bt.bayesuvius(4, heads=2, slices=2, mask=reach, combine="concat")
        yield net.sentence("a cat sat down")
    s = bt.bayesuvius(4, heads=2, slices=2, residual=True, vocabulary=["a", "b"]).sentence("a b a")
    yield s.do({"x_1_1": torch.ones(4), "q_0_*": Zero(), "c": 1})
    yield s.do({"x_1_0": Attend([0.5, 0.5, 0.0]), "x_2_2": Attend([1.0, 0.0, 0.0]), "x_2_1": torch.ones(4)})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="the front end's graph is asked by node")
def test_the_front_end_answers_questions_of_structure_as_the_sentence_does(tmp_path):
    pages = [*map(explore_case, BY_NAME), *((s, *explore_page(s, tmp_path)) for s in windowed())]
    sentences = [s for s, _, _ in pages]
    data, module = tmp_path / "descriptions.json", tmp_path / "ground_graph.mjs"
    data.write_text(json.dumps([[a, base64.b64encode(b).decode()] for _, a, b in pages]))
    for file in FRONTEND.glob("*.js"):
        shutil.copy(file, tmp_path / file.with_suffix(".mjs").name)
    process = subprocess.run(
        ["node", "--input-type=module", "-e", NODE, module.as_uri(), str(data)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not process.returncode, process.stderr
    for s, answers in zip(sentences, json.loads(process.stdout), strict=True):
        assert list(answers) == s.ground.names
        changed = {s.ground.name(node) for nodes in (s.ground.cut_nodes, s.ground.retained_parents) for node in nodes}
        for name in changed | set(random.Random(0).sample(s.ground.names, min(8, len(s.ground)))):
            for query, names in answers[name].items():
                assert names == sorted(set(getattr(s, query)(name)), key=s.ground.id), (repr(s), name, query)


def small(words="the cat sat", **options):
    return bt.bayesuvius(4, heads=3, slices=2, combine="concat", seed=2, **options).sentence(words)


def test_do_empties_the_rows_of_set_nodes_and_shows_changes_of_states(tmp_path):
    s = small()
    description, buffer = explore_page(s.do({"a_0_1_*": Zero(), "a_0_2_0": torch.ones(4)}), tmp_path)
    results = unpack_attention(description, buffer)
    expected = s.attention(0).double().numpy()
    expected[1], expected[2, 0] = 0, 0
    assert np.abs(results["a_0"][1][0] - expected).max() <= BYTE
    after = s.do({"a_0_1_*": Zero(), "a_0_2_0": torch.ones(4)})
    assert np.abs(results["a_1"][1][0] - after.attention(1).double().numpy()).max() <= BYTE
    assert description["interventions"] == {
        "a_0_1_0": "zero",
        "a_0_1_1": "zero",
        "a_0_1_2": "zero",
        "a_0_2_0": "a vector",
    }
    assert len(description["relative_changes"]) == 3
    for group, changes in description["relative_changes"].items():
        for word, change in enumerate(changes):
            name = f"{description['groups'][int(group)]['name']}_{word}"
            expected_change = (after[name] - s[name]).double().norm() / s[name].double().norm()
            assert change == pytest.approx(float(expected_change), abs=2e-6)
    assert explore_page(s, tmp_path)[0]["relative_changes"] is None


def test_slices_and_heads_keep_a_part_of_what_is_read(tmp_path):
    s = small()
    description, buffer = explore_page(s, tmp_path, slices=1, heads=[2, 0])
    ((name, (_, table)),) = unpack_attention(description, buffer).items()
    assert name == "a_1" and description["heads"] == [0, 2]
    assert np.abs(table[0] - s.attention(1)[[0, 2]].double().numpy()).max() <= BYTE
    assert len(description["groups"]) == len(s.ground.template.groups)  # the structure is still there


def test_given_values_are_shown(tmp_path):
    net = bt.bayesuvius(4, heads=2, slices=2, vocabulary=["a", "b"], observe=Categorical(2))
    s = net.sentence("a b").observe(y_1="b")
    description, _ = explore_page(
        s, tmp_path, posterior="y_0", inclusion=[0.25, 1.0], title="one <two>", detail="words", theme="dark"
    )
    assert [item["node"] for item in description["posteriors"]] == ["y_0", "c"]
    assert description["evidence"] == {"y_1": "b"}
    assert [row[0] for row in description["posteriors"][0]["states"]] == ["a", "b"]
    assert description["inclusion"]["probabilities"] == [[0.25, 1.0]] * 2
    assert (description["title"], description["detail"], description["theme"]) == ("one <two>", "words", "dark")
    text = (tmp_path / "page.html").read_text()
    assert "<title>one &lt;two&gt;" in text and 'data-theme="dark"' in text and '"color-scheme" content="dark"' in text


@pytest.mark.slow
def test_the_posterior_of_heads_has_its_intervals(tmp_path):
    for net, words in (
        (bt.encoder(4, heads=4, slices=2, vocabulary=["a", "b"]), "a b"),
        (bt.encoder_decoder(4, heads=2, slices={"enc": 1, "dec": 2}, vocabulary=["a", "b"]), {"enc": "a", "dec": "b"}),
    ):
        s, posterior = net.sentence(words), bt.inclusion(net, [words] * 2, draws=50, interval=0.5, progress=False)
        inclusion = explore_page(s, tmp_path, inclusion=posterior)[0]["inclusion"]
        assert inclusion["rows"] == list(posterior.slices)
        assert "2 sentences" in inclusion["note"] and "50%" in inclusion["note"]
        for name, values in (("probabilities", posterior.mean), ("low", posterior.low), ("high", posterior.high)):
            assert np.allclose(inclusion[name], values.numpy(), atol=1e-6)
        assert np.allclose(inclusion["log_bayes"], posterior.log_bayes.numpy(), atol=1e-6)
        s.draw(tmp_path / "b.html", inclusion=posterior)
        assert (tmp_path / "b.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    without = replace(posterior, method="svi")
    inclusion = explore_page(s, tmp_path, inclusion=without)[0]["inclusion"]
    assert inclusion["low"] == inclusion["high"] == [[None, None]] * len(posterior.slices)
    assert "without intervals" in inclusion["note"]
    one = bt.inclusion(net, [words], role="dec_cross_a", draws=50, progress=False)
    assert explore_page(s, tmp_path, inclusion=one)[0]["inclusion"]["rows"] == ["dec_cross_a_0", "dec_cross_a_1"]


def test_the_posterior_of_other_heads_is_refused(tmp_path):
    other_net = bt.encoder(4, heads=4, slices=2, vocabulary=["a", "b"])
    posterior = bt.inclusion(other_net, ["a b"], draws=5, progress=False)
    for net, match in (
        (bt.encoder(4, heads=2, slices=2, vocabulary=["a", "b"]), "a_0 with 4 heads; got a_0 with 2 heads"),
        (bt.encoder(4, heads=4, slices=1, vocabulary=["a", "b"]), "a_1 with 4 heads; got no node group a_1"),
        (bt.bayesuvius(4, heads=4, slices=2, vocabulary=["a", "b"]), "a_0 with 4 heads; got no node group a_0"),
    ):
        with pytest.raises(BNetError, match=match):
            net.sentence("a b").draw(tmp_path / "a.html", inclusion=posterior)
    assert not list(tmp_path.iterdir())


def test_contributions_have_the_largest_parts_and_their_nodes(tmp_path, monkeypatch):
    net = jitter(bt.decoder(4, heads=2, slices=2, norm="pre", vocabulary=["a", "b", "c"]))
    s = net.sentence("a b c")
    pair, single = s.contributions("logits_2", of=("a", "b"), exact=True), s.contributions("x_1_1", of=torch.ones(4))
    readouts = explore_page(s, tmp_path, contributions=[pair, single])[0]["contributions"]
    for readout, result in zip(readouts, (pair, single), strict=True):
        assert readout["node"] == result.node and readout["norms"] == list(result.norms)
        parts = {item["writer"]: item["part"] for item in readout["parts"]}
        assert sum(parts.values()) == pytest.approx(readout["value"], abs=1e-5)
        assert parts == pytest.approx({name: float(result[name]) for name in parts}) and len(parts) == len(
            result.writers
        )
        sizes = [abs(part) for part in parts.values()]
        assert sizes == sorted(sizes, reverse=True)
        assert all(s.ground.name(s.ground.id(item["node"])) == item["node"] for item in readout["parts"])
    effects = {item["writer"]: item["effect"] for item in readouts[0]["parts"]}
    for writer, effect in zip(pair.writers, pair.effects.tolist(), strict=True):
        assert effects[writer.name] is None if writer.kind == "bias" else effects[writer.name] == pytest.approx(effect)
    assert {item["writer"]: item["node"] for item in readouts[0]["parts"]}["a_0_1"] == "a_0_1_2"
    monkeypatch.setattr(page_contributions, "MAX_PARTS", 3)
    (readout,) = explore_page(s, tmp_path, contributions=pair)[0]["contributions"]
    assert readout["num_omitted"] == len(pair.writers) - 3
    assert readout["omitted"] + sum(item["part"] for item in readout["parts"]) == pytest.approx(
        readout["value"], abs=1e-5
    )


def test_contributions_of_another_sentence_are_refused(tmp_path):
    def sentence(text="a b", **options):
        return bt.decoder(4, **{"heads": 2, "slices": 2, "norm": "pre", "vocabulary": ["a", "b"], **options}).sentence(
            text
        )

    s = sentence()
    for other, match in ((sentence("b a"), "words"), (sentence(heads=4), "writer"), (sentence(slices=3), "writer")):
        with pytest.raises(BNetError, match=match):
            s.draw(tmp_path / "a.html", contributions=other.contributions("logits_1", of=(0, 1)))
    for result in (s.contributions("j_0_0_1"), s.contributions("logits_1", of=0, paths=2), "logits_1", [0]):
        with pytest.raises(BNetError, match=r"contributions\(\.\.\.\)"):
            s.draw(tmp_path / "a.html", contributions=result)
    result = s.contributions("logits_1", of=(0, 1))
    result.save(tmp_path / "result.safetensors")
    loaded = bt.load(tmp_path / "result.safetensors")
    with pytest.raises(BNetError, match="ScoreContributions, item 1"):
        s.draw(tmp_path / "a.html", contributions=[result, s.contributions("j_0_0_1")])
    for other in (sentence(seed=1), s.do({"a_0_0_*": Zero()}), s.do(logits_1=torch.ones(2))):
        for saved in (result, loaded):
            with pytest.raises(BNetError, match="other interventions"):
                other.draw(tmp_path / "a.html", contributions=saved)
    with pytest.raises(BNetError, match="without its readout"):
        s.draw(tmp_path / "a.html", contributions=replace(result, readout=None))
    assert not list(tmp_path.glob("*.html"))
    s.draw(tmp_path / "a.html", contributions=loaded)


def test_only_the_most_probable_of_many_states_are_shown(tmp_path):
    net = bt.bayesuvius(4, heads=2, vocabulary=[f"w{k}" for k in range(60)], observe=Categorical(60))
    s = net.sentence("w1 w2")
    (posterior, _) = explore_page(s, tmp_path, posterior=["y_1"])[0]["posteriors"]
    p = s.posterior("y_1")
    best = p.topk(page_description.MAX_STATES).indices.sort().values.tolist()
    assert [row[0] for row in posterior["states"]] == [f"w{k}" for k in best]
    assert posterior["num_omitted"] == 60 - len(best)


def test_the_page_fetches_nothing(tmp_path):
    small().draw(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "default-src 'none'" in text
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= namespaces
    assert not re.search(
        r"\b(src|href)=|@import|url\((?!#)|\b(fetch|XMLHttpRequest|WebSocket|eval)\(|innerHTML|document\.write", text
    )


def test_colours_dashes_and_widths_are_those_of_every_picture(tmp_path):
    sheet = render_style_sheet()
    for theme, palette in PALETTES.items():
        for name, colour in [*palette.items(), *((f"head-{k}", c) for k, c in enumerate(HEAD_COLOURS[theme]))]:
            assert f"--{name}: {colour}" in sheet
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b", (FRONTEND / "style.css").read_text())
    set_by_script = {"fraction", "low", "high", "head", "left", "content"}
    assert set(re.findall(r"var\(--([\w-]+)", sheet)) <= set(re.findall(r"--([\w-]+):", sheet)) | set_by_script
    style = explore_page(small(), tmp_path)[0]["line_style"]
    arrow = make_arrow("a", "b", "k", 0.5)
    assert style["width"][0] + 0.5 * style["width"][1] == pytest.approx(arrow.width)
    assert style["opacity"][0] + 0.5 * style["opacity"][1] == pytest.approx(arrow.opacity)
    assert style["dashes"] == {role: list(DASH_PATTERNS[dash]) for role, dash in ROLE_DASHES.items()}


def test_the_front_end_is_one_module_that_no_tag_can_end():
    for entry_point in ("boot", "widget", "serve"):
        text = bundle_script(entry_point)
        assert ("$live_state" in text) == (entry_point == "serve")  # other pages contain no code of the live page
        assert "</" not in text and "<!--" not in text and not re.search(r"^import ", text, re.M)
    assert {file.stem for file in FRONTEND.glob("*.js")} == {*MODULES, "boot", "widget", "serve"}
    for k, name in enumerate(MODULES):  # a module imports only earlier modules
        assert set(re.findall(r'^import .* from "\./(\w+)\.js";$', (FRONTEND / f"{name}.js").read_text(), re.M)) <= set(
            MODULES[:k]
        )
    for file in FRONTEND.glob("*.js"):
        assert file.read_text().startswith("// @ts-check\n")


def test_formulas_are_lists_of_known_tags():
    def tags(element):
        tag, attributes, children = element
        assert set(attributes) <= MATHML_ATTRIBUTES | {"class"}
        yield tag
        for child in children if isinstance(children, list) else ():
            yield from tags(child)

    latex = r"\mathrm{norm1}_i^t = \underbrace{\frac{\exp(x)}{\sqrt{2}}}_{P(j \mid i)} \text{if } i"
    assert set(tags(to_mathml(latex))) <= MATHML_TAGS
    assert "norm1" in json.dumps(to_mathml(latex)) and "brace" in json.dumps(to_mathml(latex))
    assert to_mathml(r"\frac{1}{") is None and to_mathml(r"\text{<img>}") is None  # the page shows such LaTeX unchanged


# bad input


def test_a_sentence_above_the_limit_is_refused_with_advice(tmp_path, monkeypatch):
    long = bt.bayesuvius(2, heads=1).sentence(["w"] * (page_description.MAX_WORDS + 1))
    limit = page_description.MAX_WORDS
    with pytest.raises(BudgetError, match=f"at most {limit} words; got {limit + 1} words"):
        long.draw(tmp_path / "a.html")
    s = small("a b c d")  # 2 slices of 3 heads of 16 pairs
    for maximum, fits in (
        (50, ["slices=range(1)", "heads=range(1)"]),
        (40, ["heads=range(1)"]),
        (20, ["slices=0, heads=range(1)"]),
    ):
        monkeypatch.setattr(page_description, "MAX_BYTES", maximum)
        with pytest.raises(BudgetError, match="got 96") as refused:
            s.draw(tmp_path / "a.html")
        assert refused.value.hint.removeprefix("Pass ").split(" or ") == fits
        for arguments in fits:
            s.draw(tmp_path / "fits.html", **eval(f"dict({arguments})"))
    monkeypatch.setattr(page_description, "MAX_BYTES", 10)
    with pytest.raises(BudgetError, match="a shorter sentence"):
        s.draw(tmp_path / "a.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fits.html"]


BAD = [
    ({"detail": "folded"}, "detail"),
    ({"posterior": "x_1_0"}, "discrete"),
    ({"inclusion": [0.5]}, "inclusion"),
    ({"inclusion": [0.5, 2.0]}, "inclusion"),
    ({"inclusion": "all"}, "inclusion"),
]


def test_bad_options_are_refused_and_leave_what_was_there(tmp_path):
    path = tmp_path / "a.html"
    path.write_text("old")
    s = bt.bayesuvius(4, heads=2).sentence("a b")
    for options, error in BAD:
        with pytest.raises(BNetError, match=error):
            s.draw(path, **options)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.html"]


def test_bad_targets_are_refused(tmp_path):
    s = small()
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "folder.html", tmp_path / "no" / "a.html"):
        with pytest.raises(FileError):
            s.draw(path)
    with pytest.raises(UnknownNameError, match="posterior"):
        s.draw(tmp_path / "a.html", posteriors="c")
    with pytest.raises(BNetError, match="suffix"):
        s.net.draw(tmp_path / "a.html")
    assert os.listdir(tmp_path) == ["folder.html"]


def test_large_pages_are_small(tmp_path):
    words = 128
    heads, slices = 12, 12
    net = bt.encoder(24, heads=heads, slices=slices, vocabulary=["a", "b", "c"])
    s = net.sentence(["a", "b", "c", "a"] * (words // 4))
    s.draw(tmp_path / "page.html")
    description, buffer = read_page(tmp_path / "page.html")
    reads = heads * slices * words * words
    assert reads <= len(buffer) < 1.01 * reads + 1000
    front_size = (tmp_path / "page.html").stat().st_size - len(base64.b64encode(gzip.compress(buffer, 4)))
    worst = front_size + 4 / 3 * (1.001 * len(buffer))  # for data that cannot be compressed
    assert worst <= 5e6
    assert description["counts"][0] == len(s.ground)


def test_without_words_every_discrete_node_has_its_posterior_and_states_stay_in_view(tmp_path):
    s = textbook().sentence().observe(dysp="yes")
    description, _ = explore_page(s, tmp_path)
    oracle = VariableElimination(to_pgmpy_model(textbook()))
    assert {posterior["node"] for posterior in description["posteriors"]} == set(PARENTS) - {"dysp"}
    for posterior in description["posteriors"]:
        probs = oracle.query([posterior["node"]], evidence={"dysp": 1}, show_progress=False).values
        np.testing.assert_allclose([state[2] for state in posterior["states"]], probs, atol=1e-6)
    description, _ = explore_page(jitter(hidden_states()).sentence(), tmp_path)
    assert {group["name"] for group in description["groups"] if group["is_state"]} == {"x_0", "x_1", "x_2", "x_3"}
    nodes = {item["node"] for item in description["posteriors"]}
    assert nodes == {f"x_{k}" for k in range(4)} | {f"y_{k}" for k in range(3)}
