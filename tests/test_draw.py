"""Figures show the graph, in every format and with any words; errors propose options that work."""

import inspect
import io
import itertools
import re
import shutil
import subprocess
from xml.etree import ElementTree

import networkx as nx
import numpy as np
import pydot
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures import svg
from bnet_transformer.figures.fonts import label_to_text
from bnet_transformer.figures.graphviz import to_dot
from bnet_transformer.figures.grid_layout import Grid, GridItem
from bnet_transformer.figures.options import SentenceOptions
from bnet_transformer.figures.picture import PALETTES, Frame, NodeBox, Picture, PictureArrow, sample_curve
from bnet_transformer.figures.svg import to_svg
from bnet_transformer.figures.tikz import to_tikz
from bnet_transformer.graph import Quotient
from bnet_transformer.inference.query import find_attention_spec
from bnet_transformer.page.description import PageOptions
from bnet_transformer.reference import compute_read_mask
from bnet_transformer.tpm import Categorical
from tests.cases import CASES, get_case

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>alert(1)</script>",
    "\"quotes\" & 'more'",
    "back\\slash \\N \\l\\",
    "שלום עולם",
    "😀👩‍👩‍👧",
    "x" * 200,
    "\\input{/etc/passwd}",
    "%#_$~^{}",
    "-> [label=evil];",
    "two\nlines\r\ttab",
    "\x00\x1b\x7f\x85",
    "half \ud800",
    "\u202eturned\ufffe",
    "naïve Ærøskøbing żółć ½",
    "<b>&amp;</b>",
    "?`!`--,,``''",
]


def parse_svg(text):
    """Return the graph in an SVG: nodes with their text, and arrows."""
    root = ElementTree.fromstring(text)
    graph = nx.MultiDiGraph()
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "node":
            graph.add_node(group.get("id"), said="".join("".join(text.itertext()) for text in group.iter(f"{SVG}text")))
        elif group.get("class") == "arrow":
            graph.add_edge(group.get("data-source"), group.get("data-target"), weight=group.get("data-weight"))
    return graph


def parse_dot(text):
    """Return the graph in a DOT file, its nodes with the names of their clusters, outermost first."""
    graph = nx.MultiDiGraph()

    def read_part(part, clusters):
        for node in part.get_nodes():
            if node.get_name() not in ("graph", "node", "edge"):
                graph.add_node(unquote(node.get_name()), clusters=clusters, **node.get_attributes())
        for subgraph in part.get_subgraphs():
            (cluster,) = subgraph.get_node("graph")
            read_part(subgraph, (*clusters, unquote(cluster.get("label"))))
        for edge in part.get_edges():
            graph.add_edge(unquote(edge.get_source()), unquote(edge.get_destination()), **edge.get_attributes())

    (graph_data,) = pydot.graph_from_dot_data(text)
    read_part(graph_data, ())
    return graph


def unquote(text):
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def same_graph(picture_graph, graph):
    """Return whether two graphs have the same nodes, and the same arrows with equal multiplicity."""
    pairs = [sorted((a, b) for a, b, *_ in g.edges) for g in (picture_graph, graph)]
    return set(picture_graph) == set(graph) and pairs[0] == pairs[1]


def draw_bytes(tmp_path, obj, suffix, **options):
    path = tmp_path / f"figure.{suffix}"
    bt.draw(obj, path, **options)
    return path.read_bytes()


def find_overlaps(picture):
    """Return the pairs of boxes that overlap, and the boxes that arrows cross."""
    result = []
    for one, other in itertools.combinations(picture.boxes, 2):
        a, b = one.bounds, other.bounds
        result += [(one.name, other.name)] * (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])
    left, top, right, bottom = np.array([box.bounds for box in picture.boxes]).T
    for arrow in picture.arrows:
        x, y = np.array([*sample_curve(arrow.points)]).T[:, :, None]
        hits = ((left < x) & (x < right) & (top < y) & (y < bottom)).any(0)
        names = {box.name for box, is_hit in zip(picture.boxes, hits, strict=True) if is_hit}
        result += [(arrow.source, arrow.target, name) for name in names - {arrow.source, arrow.target}]
    return result


# the figure equals the graph


EVERY_CASE = [pytest.param(case, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, case in enumerate(CASES)]


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_every_case_is_drawn_as_it_is(case):
    """The figure shows the graph; no boxes overlap, and no arrow crosses a box."""
    for obj, picture in ((case.sentence, case.sentence.picture(detail="nodes")), (case.net, case.net.picture())):
        assert same_graph(parse_svg(to_svg(picture)), obj.graph())
        assert to_tikz(picture).isascii()
        assert not find_overlaps(picture)
        boxes = {box.name: box for box in picture.boxes}
        for arrow in picture.arrows:
            box, (x, y) = boxes[arrow.target], arrow.points[-1]
            assert box.bounds[0] - 1 <= x <= box.bounds[2] + 1 and box.bounds[1] - 1 <= y <= box.bounds[3] + 1
        for left, top, right, bottom in (box.bounds for box in (*picture.boxes, *picture.lines)):
            assert min(left, top) >= 0 and right <= picture.width and bottom <= picture.height


def test_the_figures_of_the_chapter():
    s = bt.bayesuvius(dim=4, heads=3).sentence("the cat sat")
    with_weights, without_weights = s.picture(), s.picture(weights=False)
    assert [(len(p.boxes), len(p.arrows)) for p in (without_weights, with_weights)] == [(15, 30), (19, 42)]
    boxes = {box.name: box for box in with_weights.boxes}
    assert boxes["c"].y < min(box.y for name, box in boxes.items() if name != "c")  # c on top
    for word, t in itertools.product(range(3), range(2)):
        assert boxes[f"x_{t}_{word}"].x == pytest.approx(boxes[f"x_0_{word}"].x)  # words are columns
        assert boxes[f"x_{t}_{word}"].y == pytest.approx(boxes[f"x_{t}_0"].y)  # slices are rows
    colours = {(a.source[0], a.target[0]): (a.colour, a.dash) for a in without_weights.arrows}
    assert colours["q", "x"] == colours["x", "q"] == ("q", "solid")
    assert len({colours[role, "x"] for role in "qkv"}) == len({colours[role, "x"][1] for role in "qkv"}) == 3
    boxed = s.picture(weights=False, boxes="words")
    assert {f.name for f in boxed.frames} == {"class", "word_0", "word_1", "word_2"}
    with pytest.raises(BNetError, match="adjacent nodes"):
        s.picture(weights=False, boxes={"q_0_0": "a", "v_0_0": "a"})


def test_borders_and_fills_show_the_kind_of_a_node():
    s = bt.bayesuvius(dim=4, heads=3, observe=Categorical(3)).sentence("the cat sat")
    s = s.observe(y_0=1).do(q_0_1=torch.zeros(4))
    box = {b.name: b for b in s.picture().boxes}
    assert (box["c"].border, box["c"].is_dashed, box["c"].fill) == ("single", True, "paper")
    assert (box["k_0_0"].border, box["k_0_0"].is_dashed) == ("double", False)
    assert (box["y_0"].fill, box["x_0_0"].fill, box["y_1"].fill) == ("observed", "observed", "paper")
    assert box["q_0_1"].fill == "do" and not [a for a in s.picture().arrows if a.target == "q_0_1"]
    legend = {entry.text.runs[0].text for entry in s.picture().legend}
    assert {"deterministic", "stochastic", "observed", "set by do", "learnable TPM", "key k"} <= legend
    assert not s.picture(legend=False).legend


def test_arrows_carry_their_probability():
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat").do(c=1)
    arrows = {(a.source, a.target): a for a in s.picture().arrows}
    attention = s.attention(0)
    for i, j in itertools.product(range(3), range(3)):
        assert arrows[f"k_0_{j}", f"x_1_{i}"].weight == pytest.approx(float(attention[i, j]), abs=1e-6)
    by_weight = sorted((a.weight, a.width, a.opacity) for a in arrows.values() if a.weight is not None)
    assert by_weight == sorted(by_weight, key=lambda item: item[1]) == sorted(by_weight, key=lambda item: item[2])
    assert all(a.weight is None for a in s.picture(attention=False).arrows)
    s_large = bt.bayesuvius(dim=2, heads=2, atoms=(5, 4, 4)).sentence("a b")
    assert "160 joint states" in s_large.picture().caption
    assert not any(a.weight for a in s_large.picture().arrows) and any(
        a.weight for a in s_large.picture(attention=True).arrows
    )


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_every_shrunk_slice_is_drawn(case):
    for boxes in ("words", "roles"):
        try:
            tan = case.sentence.tan(boxes)
        except BNetError as error:
            assert any(subject in str(error) for subject in ("state that enters", "word", "stack", "no slices"))
            continue
        for picture in (bt.picture(tan), bt.picture(Quotient(*vars(tan.quotient).values()))):
            assert same_graph(picture.to_networkx(), tan.quotient.to_networkx()) and not find_overlaps(picture)


def test_lanes_keep_clear_of_a_wide_box_in_the_middle():
    positions = {"a": (0, 0), "b": (0, 1), "wide": (1, None), "c": (2, 0), "d": (2, 1)}
    items = [
        GridItem(NodeBox(name, 0, 0, 300 if name == "wide" else 40, 20), *position)
        for name, position in positions.items()
    ]
    arrows = [PictureArrow("a", "c", ()), PictureArrow("b", "d", ())]
    assert not find_overlaps(Picture(*Grid(items, (), arrows).layout()))


# words of any kind


@pytest.mark.skipif(not shutil.which("pdflatex") and not shutil.which("lualatex"), reason="LaTeX is not installed")
@pytest.mark.parametrize("engine", ["pdflatex", "lualatex"])
def test_tex_compiles(tmp_path, engine):
    if not shutil.which(engine):
        pytest.skip(f"{engine} is not installed")
    s = bt.bayesuvius(dim=4, heads=2).sentence(HOSTILE)
    for k, (obj, options) in enumerate(
        [(s, {"detail": "words"}), (s.net.sentence(HOSTILE[:3]), {"theme": "dark"}), (s.net, {}), (s.tan("roles"), {})]
    ):
        bt.draw(obj, tmp_path / f"a{k}.tex", **options)
        command = [engine, "-interaction=nonstopmode", "-halt-on-error", f"a{k}.tex"]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert process.returncode == 0, process.stdout[-2000:]


# scale


def test_a_large_sentence_is_drawn_as_something_to_read(tmp_path):
    words = [f"w{i}" for i in range(64)]
    s = bt.encoder(16, heads=4, slices=4, vocabulary=words).sentence(words)
    picture = s.picture()
    assert len(picture.boxes) == 64 * 5 and 0 < len(picture.arrows) <= 300
    num_shown, total = (
        int(n.replace(",", ""))
        for n in re.search(r"Showing ([\d,]+) of ([\d,]+) reads: the strongest of each", picture.caption).groups()
    )
    assert total == 4 * 64 * 64 and num_shown == len(picture.arrows)
    assert "Mean over 4 heads" in picture.caption and f"320 of {len(s.ground):,} nodes" in picture.caption
    selection = s.picture(detail="words", words=range(4), slices=[3], heads=3, top=6)
    assert len(selection.boxes) == 8 and len(selection.arrows) == 6 and "Head 3" in selection.caption
    attention = s.attention(3)[3][:4, :4]
    weights = sorted((a.weight for a in selection.arrows), reverse=True)
    assert weights == pytest.approx(sorted(attention.flatten().tolist(), reverse=True)[:6], abs=1e-6)
    strong_reads = s.picture(min_weight=0.03)
    assert strong_reads.arrows and all(a.weight >= 0.03 for a in strong_reads.arrows)
    assert len(draw_bytes(tmp_path, s, "svg")) < 2_000_000
    assert "node groups" in s.picture(detail="folded", slices=0).caption


def test_a_part_omits_nodes_without_its_words():
    s = bt.from_pretrained("tiny").sentence("the cat sat on a dog")
    deep_s = bt.bayesuvius(4, slices=3, observe=Categorical(2, pool="mean")).sentence("the cat sat")
    assert {"y"} <= {box.name for box in deep_s.picture(slices=2).boxes}
    names = {box.name for box in deep_s.picture(slices=0, weights=False).boxes}
    assert names == {name for name in deep_s.graph(slices=0, weights=False) if name != "y"}
    assert s.picture(words=["cat"], weights=False).boxes
    with pytest.raises(BudgetError, match="at most 15000 states"):
        bt.bayesuvius(2).sentence([f"w{i}" for i in range(9000)]).picture(detail="words")


def test_above_the_limit_the_error_names_options_that_draw_less():
    words = [f"w{i}" for i in range(40)]
    s = bt.encoder(8, heads=4, slices=4, vocabulary=words).sentence(words)
    with pytest.raises(BudgetError) as error:
        s.picture(detail="nodes")
    message = str(error.value)
    assert f"{s.ground.count_arrows():,} arrows" in message
    assert all(name in message for name in ("words=", "slices=", "heads=", "weights=False", "detail='words'", "limit="))
    assert s.picture(detail="words").boxes


def test_the_words_of_the_reading_grid_are_those_of_the_attention():
    s = bt.bayesuvius(dim=4, heads=3, slices=2, mask="causal").sentence("the cat sat on")
    weights = {(a.source, a.target): a.weight for a in s.picture(detail="words", min_weight=0.0).arrows}
    for t in range(2):
        mean = s.reads(t, residual=0.0).matrix
        for i, j in itertools.product(range(4), range(4)):
            w = weights.get((f"x_{t}_{j}", f"x_{t + 1}_{i}"))
            assert (w is None) == (j > i) and (w is None or w == pytest.approx(float(mean[i, j]), abs=1e-6))
    by_reads = {(a.source, a.target): a.weight for a in bt.picture(s.reads(slices=[0, 1]), min_weight=0.0).arrows}
    assert {end for end in weights if end[0].startswith("x_0")} == {end for end in by_reads if end[0].startswith("x_0")}


def test_a_deep_net_folds_its_slices():
    net = bt.encoder(8, heads=2, slices=6, vocabulary=["a", "b"], readout="word")
    names = {box.name for box in net.picture().boxes}
    assert {"q_0", "x_1", "x_6", "y"} <= names and "q_1" not in names
    assert "Slices 1 to 5" in net.picture().caption
    assert {"q_3", "x_3", "x_4"} <= {box.name for box in net.picture(slices=3).boxes}
    picture = net.picture(slices=range(6))
    assert same_graph(picture.to_networkx(), net.graph()) and "not drawn" not in picture.caption


def test_a_folded_net_shows_the_reach_of_arrows():
    words = ["a", "b"]
    assert "a depends on every word" in bt.encoder(8, heads=2, vocabulary=words, readout="word").picture().caption
    assert "a depends on words j ≤ i" in bt.decoder(8, heads=2, vocabulary=words).picture().caption
    caption = bt.encoder_decoder(8, heads=2, slices=2, vocabulary=words).picture().caption
    parts = (
        "Slice 1 repeats",
        "enc a depends on every word",
        "dec a depends on words j ≤ i",
        "dec cross a depends on every word",
    )
    assert all(text in caption for text in parts)
    windowed = bt.bayesuvius(4, mask=bt.Reach("window", 2)).picture().caption
    assert "x depends on words |i − j| ≤ 2" in windowed


def test_the_attention_grid_has_a_limit_too():
    words = [f"w{i}" for i in range(40)]
    s = bt.encoder(8, heads=4, slices=4, vocabulary=words).sentence(words)
    for options in ({"min_weight": 0.0}, {"min_weight": 0.001, "limit": 100}, {"top": 50, "limit": 20}):
        with pytest.raises(BudgetError, match=r"expected at most .* reads.*min_weight=, top=, words=, slices="):
            s.picture(detail="words", **options)
    assert len(s.picture(detail="words", min_weight=0.0, limit=None).arrows) == 4 * 40 * 40
    assert len(s.picture(detail="words", limit=10).arrows) == 10
    with pytest.raises(BudgetError, match="reads"):
        bt.picture(s.reads(), min_weight=0.0)


def test_every_word_of_a_causal_sentence_has_a_read():
    words = [f"w{i}" for i in range(64)]
    s = bt.decoder(16, heads=2, slices=3, vocabulary=words).sentence(words)
    picture = s.picture()
    assert len(picture.arrows) <= 300 and {a.target.split("_")[-1] for a in picture.arrows} == set(map(str, range(64)))
    weights = {a: (int(a.target.split("_")[-1]) + 1) * a.weight for a in s.picture(min_weight=0.0, limit=None).arrows}
    top_picture = s.picture(top=20)
    assert sorted(weights.values())[-20:] == pytest.approx(
        sorted((int(a.target.split("_")[-1]) + 1) * a.weight for a in top_picture.arrows), abs=1e-6
    )
    shown = {end.split("_")[-1] for a in top_picture.arrows for end in (a.source, a.target)}
    assert {box.name.split("_")[-1] for box in top_picture.boxes} == shown
    assert f"{64 - len(shown)} of 64 words without a drawn read" in top_picture.caption


def test_reads_that_underflow_are_drawn_and_masked_ones_are_not():
    net = bt.bayesuvius(4, heads=1, mask="causal", seed=1)
    net = net.replace({name: 300 * value for name, value in net.parameters.items() if "W_" in name})
    s = net.sentence("the cat sat")
    assert int((s.attention(0) == 0).sum()) > 3
    for picture in (s.picture(detail="words", min_weight=0.0), bt.picture(s.reads(), min_weight=0.0)):
        pairs = {(int(a.source[-1]), int(a.target[-1])) for a in picture.arrows}
        assert pairs == {(j, i) for i in range(3) for j in range(i + 1)}
    a = s.do(x_1_2=torch.zeros(4)).state.model
    assert compute_read_mask(a, find_attention_spec(a, 0, None)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    b = bt.bayesuvius(4, heads=2, combine="concat").sentence("a b").do(a_0_1_0=torch.zeros(4)).state.model
    assert compute_read_mask(b, find_attention_spec(b, 0, None)).all()  # the other head still attends


def test_top_of_the_nodes_counts_reads():
    s = bt.bayesuvius(dim=4, heads=2, combine="concat").sentence("the cat sat")
    for top in (1, 4):
        arrows = [(a.source, a.target) for a in s.picture(detail="nodes", top=top).arrows if a.weight is not None]
        reads = {(a.replace("v_", "k_"), b) for a, b in arrows}
        assert len(reads) == top and len(arrows) == 2 * top
    best = max(float(w) for w in s.attention(0).flatten())
    assert max(a.weight for a in s.picture(detail="nodes", top=1).arrows if a.weight) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("view", "options"),
    [
        *(("folded", {name: value}) for name, value in {
            "words": [0], "heads": 0, "min_weight": 0.1, "top": 3, "boxes": "words", "only": ["c"], "attention": False,
            "limit": 7, "special": False,
        }.items()),
        *(("words", {name: value}) for name, value in {
            "weights": False, "attention": False, "boxes": "words", "only": ["c"],
        }.items()),
    ],
)  # fmt: skip
def test_an_option_that_a_view_does_not_use_is_refused(view, options):
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    with pytest.raises(BNetError, match=f"{next(iter(options))}= has no effect.*detail='nodes'"):
        s.picture(detail=view, **options)


@pytest.mark.slow
def test_what_only_the_nodes_show_is_not_dropped_where_there_are_many():
    words = [f"w{i}" for i in range(40)]
    s = bt.encoder(8, heads=4, slices=4, vocabulary=words).sentence(words)
    for options in ({"boxes": "words"}, {"attention": False}, {"detail": "nodes", "top": 5}):
        with pytest.raises(BudgetError, match="figure of the nodes") as error:
            s.picture(**options)
        assert ("detail='words'" in str(error.value)) == ("top" in options)
    big = bt.encoder(48, heads=12, slices=12, vocabulary=[f"w{i}" for i in range(128)])
    picture = big.sentence([f"w{i}" for i in range(128)]).picture(only=["x_0_90", "q_0_3_90"])
    assert [(a.source, a.target) for a in picture.arrows] == [("x_0_90", "q_0_3_90")]
    cayley = next(case for case in CASES if case.name == "cayley").net.sentence(words)
    assert [box.name for box in cayley.picture(highlight="x_0_0").boxes if not box.is_faded] == ["x_0_0"]


def apply_advice(error, options):
    """The options, changed by each proposal of an error: `Use detail='nodes' without slices=`."""
    for advice in error.hint.partition(" ")[2].split(" or "):
        changes, _, without = advice.partition(" without ")
        yield {k: v for k, v in options.items() if f"{k}=" not in without.split(", ")} | eval(f"dict({changes})")


def get_unfaded(picture):
    return {box.name for box in picture.boxes if not box.is_faded}


INNER, STATES, FAMILIES = ["q_0_1_3", "a_1_0_2"], ["x_1_3", "x_2_9"], ["q_0", "x_2"]


@pytest.fixture(scope="module")
def long():
    """Ten words, with more arrows than the default limit of a figure."""
    words = [f"w{i}" for i in range(10)]
    return bt.encoder(4, heads=2, slices=2, vocabulary=words).sentence(words)


def test_a_family_of_a_slice_that_is_not_drawn_names_its_slice():
    net = bt.encoder(4, heads=2, slices=5)
    for name, options in (("q_3", {}), ("x_5", {"slices": 0}), ("W_q_2", {})):
        with pytest.raises(BNetError, match="highlight") as error:
            net.picture(highlight=name, **options)
        assert get_unfaded(
            net.picture(highlight=name, **options | eval(f"dict({error.value.hint.removeprefix('Pass ')})"))
        ) == {name}
    with pytest.raises(BNetError, match="weights=True"):
        get_case("three stacks").net.picture(weights=False, highlight="c")  # a node group without a stack


def test_a_figure_takes_the_view_that_draws_what_is_highlighted(long):
    assert get_unfaded(long.picture(highlight=INNER)) == set(INNER)
    assert get_unfaded(long.picture(highlight=STATES)) == set(STATES)
    assert {box.name[0] for box in long.picture(highlight=STATES).boxes} == {"x"}  # the attention grid
    assert get_unfaded(long.picture(highlight=FAMILIES)) == set(FAMILIES)
    nodes = {f"q_0_{head}_{word}" for head in range(2) for word in range(10)} | {f"x_2_{word}" for word in range(10)}
    assert get_unfaded(long.picture(highlight=FAMILIES, detail="nodes")) == nodes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        *((INNER, {"detail": detail}) for detail in ("words", "folded")),
        (INNER, {"slices": 1}),
        (INNER, {"words": range(3), "weights": False}),
        (INNER, {"heads": 1}),
        (STATES, {"detail": "folded"}),
        (STATES, {"words": range(5)}),
        (STATES, {"detail": "words", "slices": 0}),
    ],
)
def test_advice_on_what_is_highlighted_draws_it(long, names, options):
    request = {"highlight": names, **options}
    with pytest.raises(BNetError) as error:
        long.picture(**request)
    for advised in apply_advice(error.value, request):
        assert get_unfaded(long.picture(**advised)) == set(names), advised


def test_reads_of_a_stack_are_between_its_states():
    s = next(case for case in CASES if case.name == "encoder-decoder").sentence
    boxes = {box.name for box in bt.picture(s.reads(role="dec_a")).boxes}
    assert "dec_x_0_0" in boxes and boxes <= set(s.graph())
    grid = s.picture(detail="words")
    boxes_by_name = {box.name: box for box in grid.boxes}
    for text in (text for text in grid.texts if label_to_text(text.runs).startswith("dec x")):
        assert text.x > max(box.x for box in boxes_by_name.values())  # no read between stacks runs through it


def test_the_legend_has_heads_where_the_arrows_have(tmp_path):
    words = [f"w{i}" for i in range(40)]
    s = bt.encoder(8, heads=4, slices=4, vocabulary=words).sentence(words)
    for options, head in (({"top": 200}, False), ({"top": 20}, True)):
        picture = s.picture(detail="words", **options)
        assert {a.has_head for a in picture.arrows} == {e.handle.has_head for e in picture.legend} == {head}


# results


def test_results_are_highlighted():
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    trail = s.active_trail("q_0_0", "k_0_1")
    marked = {b.name for b in s.picture(highlight=trail).boxes if b.mark}
    assert marked == set(trail.nodes)
    strong = [(a.source, a.target) for a in s.picture(highlight=trail).arrows if a.opacity == 1.0]
    assert len(strong) == len(trail) and all(s.ground.id(a) in s.ground.parents(s.ground.id(b)) for a, b in strong)
    separation = s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"])
    assert {b.name: b.mark for b in s.picture(highlight=separation).boxes if b.mark} == {
        "q_0_0": "x",
        "k_0_1": "y",
        "W_q_0": "given",
        "x_0_0": "given",
    }
    blanket = s.blanket("q_0_0")
    assert {b.name for b in s.picture(highlight=blanket).boxes if not b.is_faded} == set(blanket)


def test_only_a_part_is_drawn_and_the_rest_counted():
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    circuit = nx.DiGraph([("x_0_1", "v_0_1"), ("v_0_1", "x_1_2")])
    picture = s.picture(only=circuit)
    assert same_graph(picture.to_networkx(), circuit)
    assert "16 of 19 nodes and 40 of 42 arrows are not drawn" in picture.caption
    assert same_graph(
        s.picture(only=["c", "W_q_0", "q_0_0"]).to_networkx(), nx.path_graph(["c", "W_q_0", "q_0_0"], nx.DiGraph)
    )
    with pytest.raises(BNetError, match="arrows of the bnet"):
        s.picture(only=nx.DiGraph([("x_0_1", "x_1_2")]))
    with pytest.raises(BNetError, match="near matches"):
        s.picture(only=["q_0_9a"])


def test_an_unknown_option_lists_all_options_if_none_is_similar(tmp_path):
    s = bt.bayesuvius(dim=4).sentence("the cat")
    with pytest.raises(BNetError) as error:
        s.draw(tmp_path / "cat.svg", caption=False)
    listed = str(error.value).partition("allowed: ")[2].split(", ")
    assert set(listed) == set(inspect.signature(SentenceOptions).parameters)
    with pytest.raises(BNetError, match="near matches are legend"):
        s.draw(tmp_path / "cat.svg", legends=False)
    with pytest.raises(BNetError) as error:
        s.draw(tmp_path / "cat.html", caption=False)
    listed = str(error.value).partition("allowed: ")[2].split(", ")
    assert set(listed) == set(inspect.signature(PageOptions).parameters)


@pytest.mark.slow
def test_shrunk_graphs_and_trees_are_drawn(tmp_path):
    s = bt.bayesuvius(dim=4, heads=2).sentence(["<a>", "b&", "c\\"])
    boxes = {"q_0_0": "<my & box>", "k_0_0": "<my & box>"}
    for obj in (s.tan(), s.tan("roles"), s.tan_tree(), s.shrink(boxes), s.reads()):
        expected = bt.picture(obj).to_networkx()
        assert same_graph(parse_svg(draw_bytes(tmp_path, obj, "svg")), expected)
        assert same_graph(parse_dot(bt.picture(obj).to_graphviz().source), expected)
        assert draw_bytes(tmp_path, obj, "dot").decode() == bt.picture(obj).to_graphviz().source
        assert draw_bytes(tmp_path, obj, "tex")
        quotient = getattr(obj, "quotient", obj)
        if hasattr(quotient, "boxes"):
            assert same_graph(expected, nx.MultiDiGraph(quotient.to_networkx()))
    tree = s.tan_tree()
    edges = {(f"word_{p}", f"word_{i}") for i, p in enumerate(tree.parents) if p >= 0}
    assert edges == {(a.source, a.target) for a in bt.picture(tree).arrows if a.source != "class"}


# light, dark, files


def test_themes():
    s = bt.bayesuvius(dim=4).sentence("the cat")
    options = {"weights": False, "boxes": "words", "highlight": "q_0_0"}
    light, dark, auto = (to_svg(s.picture(theme=theme, **options)) for theme in ("light", "dark", "auto"))
    assert PALETTES["light"]["paper"] in light and PALETTES["dark"]["paper"] in dark
    assert PALETTES["light"]["ink"] not in dark and "prefers-color-scheme: dark" in auto
    assert same_graph(parse_svg(light), parse_svg(dark)) and same_graph(parse_svg(light), parse_svg(auto))


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_arrows_have_contrast_with_the_background(theme):
    colours = PALETTES[theme]
    for name, minimum in {"ink": 7.0, "grey": 4.5, "q": 3.0, "k": 3.0, "v": 3.0, "accent": 3.0}.items():
        darker, lighter = sorted([luminance(colours[name]), luminance(colours["paper"])])
        assert (lighter + 0.05) / (darker + 0.05) >= minimum, name


def test_an_svg_has_a_description_and_fits_a_page(tmp_path):
    s = bt.bayesuvius(dim=4, slices=2, mask="causal").sentence("one two three four five six seven eight nine ten")
    root = ElementTree.fromstring(draw_bytes(tmp_path, s, "svg", detail="nodes", weights=False))
    assert root[0].tag == f"{SVG}title" and root[1].tag == f"{SVG}desc" and root.get("role") == "img"
    assert f"{len(s.graph(weights=False))} nodes" in root[1].text and "not drawn" in root[1].text
    assert float(root.get("width")) <= 680 and "max-width:100%" in root.get("style")


def test_a_picture_shows_itself_in_a_notebook():
    s = bt.bayesuvius(dim=4).sentence("the cat sat")
    for figure in map(bt.picture, (s, s.net, s.tan(), s.tan_tree(), s.reads())):
        assert figure._repr_svg_() == to_svg(figure) and len(repr(figure)) < 100
        assert f"{len(figure.boxes)} boxes, {len(figure.arrows)} arrows" in repr(figure)


def test_pictures_are_the_same_each_time(tmp_path):
    make = lambda: bt.bayesuvius(dim=4, heads=2).sentence("the cat")  # noqa: E731
    for suffix in ("svg", "dot", "tex", "png", "pdf", "html"):
        assert draw_bytes(tmp_path, make(), suffix) == draw_bytes(tmp_path, make(), suffix)


def count_dark_pixels(png):
    from matplotlib import image

    return float((image.imread(png)[..., :3].mean(-1) < 0.45).sum())


def test_pngs_show_text_on_a_machine_without_fonts(tmp_path, monkeypatch):
    import typst

    s, make_fonts = bt.bayesuvius(dim=4).sentence("the cat"), typst.Fonts
    s.draw(tmp_path / "with.png")
    monkeypatch.setattr(typst, "Fonts", lambda **options: make_fonts(**{**options, "include_system_fonts": False}))
    monkeypatch.setattr(svg, "_load_fonts", svg._load_fonts.__wrapped__)  # it caches its result
    s.draw(tmp_path / "without.png")
    counts = [count_dark_pixels(tmp_path / name) for name in ("with.png", "without.png")]
    assert counts[1] == pytest.approx(counts[0], rel=0.05) and counts[0] > 1000


def test_a_letter_that_no_font_has_is_warned_of(tmp_path):
    net = bt.bayesuvius(dim=4)
    letters = {"\U000308a2": "fonts-noto-cjk", "\U0001fad9": "fonts-noto-color-emoji", "\U00011a01": "fonts-noto-core"}
    for word, package in letters.items():  # rare ones: few machines have fonts with them
        with pytest.warns(UserWarning, match=f"no installed font has the characters.*{package}") as warnings_:
            net.sentence(["the", word]).draw(tmp_path / "a.png")
        assert warnings_[0].filename == __file__
    net.sentence(["naïve", "שלום", "مرحبا", "Ж", "😀"]).draw(tmp_path / "a.pdf")  # DejaVu has these


def test_a_word_outside_latin_is_a_separate_text_element():
    """typst sets a whole element in the font of its rarest letter, and x would no longer be a serif italic."""
    picture = bt.bayesuvius(dim=4).sentence(["中文", "the"]).picture()
    counts = {is_print: to_svg(picture, is_print=is_print).count("<text ") for is_print in (True, False)}
    num_foreign = sum("中文" in label_to_text(box.label) for box in picture.boxes)
    assert counts[True] - counts[False] == num_foreign > 0


def test_a_large_png_and_a_large_pdf_keep_to_their_sizes():
    from matplotlib import image

    picture = Picture((NodeBox("a", 4000.0, 30.0, 40.0, 20.0),), (), width=8000.0, height=60.0)
    assert image.imread(io.BytesIO(svg.to_png(picture))).shape[1] == pytest.approx(8000, abs=1)
    size = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", svg.to_pdf(picture))
    assert [float(side) for side in size.groups()] == pytest.approx([468, 3.51], abs=0.01)


# DOT to edit


def test_dot_has_labels_colours_and_plates_as_clusters():
    net = bt.bayesuvius(dim=4)
    graph = parse_dot(bt.picture(net, theme="dark").to_graphviz().source)
    assert same_graph(graph, net.graph())
    assert graph.nodes["x_0"]["clusters"] == ("word",) and graph.nodes["W_q_0"]["clusters"] == ()
    assert PALETTES["dark"]["q"] in graph.edges["q_0", "x_1", 0]["color"]
    s = bt.bayesuvius(dim=4).sentence("the cat")
    boxed_graph = parse_dot(s.picture(weights=False, boxes="words").to_graphviz().source)
    assert boxed_graph.nodes["q_0_1"]["clusters"] == ("word_1",)
    assert boxed_graph.nodes["x_0_1"]["label"] == "<<I>x</I><SUB>1</SUB><SUP>0</SUP> “cat”>"
    assert "pos" not in boxed_graph.nodes["x_0_1"]


def test_clusters_are_nested_or_disjoint():
    boxes = tuple(NodeBox(name, 10.0 * k, 0.0, 5.0, 5.0) for k, name in enumerate("abcd"))
    plates = {"outer": (-5.0, 40.0), "inner": (5.0, 20.0), "across": (15.0, 20.0)}
    frames = tuple(Frame(x, -5.0, width, 10.0, name=name) for name, (x, width) in plates.items())
    graph = parse_dot(to_dot(Picture(boxes, (), frames)))
    clusters = [("outer",), ("outer", "inner"), ("outer", "inner"), ("outer",)]
    assert [graph.nodes[name]["clusters"] for name in "abcd"] == clusters  # "across" has c and d, and no cluster


def test_a_notebook_shows_our_figure_where_there_is_no_dot(monkeypatch):
    picture = bt.bayesuvius(dim=4).sentence("the cat").picture()
    monkeypatch.setenv("PATH", "")
    assert picture.to_graphviz()._repr_mimebundle_() == {"image/svg+xml": to_svg(picture)}


@pytest.mark.skipif(not shutil.which("dot"), reason="needs the program dot")
def test_dot_renders_what_we_write():
    for obj in (bt.bayesuvius(dim=4), bt.bayesuvius(dim=4).sentence(["a\\N", "<b>&amp;", "c:d"])):
        assert b"<svg" in bt.picture(obj).to_graphviz().pipe(format="svg")


INVALID_OPTIONS = {"theme": "blue", "detail": "all", "highlight": 3, "top": 0, "min_weight": 2, "boxes": "foo"}


@pytest.mark.parametrize(
    ("file", "options", "error", "match"),
    [
        ("a.docx", {}, BNetError, r"'.docx'.*\.dot.*\.pdf.*\.png.*\.svg.*\.tex"),
        ("a.svg", {"colour": 1}, BNetError, "option of a picture"),
        ("a.json", {"theme": "dark"}, BNetError, "option of a graph"),
        *(("a.svg", {name: bad}, BNetError, name) for name, bad in INVALID_OPTIONS.items()),
        ("a.svg", {"limit": 3, "detail": "nodes"}, BudgetError, "at most 3 arrows"),
        ("a.svg", {"words": "dog"}, BNetError, "word"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_file(tmp_path, file, options, error, match):
    with pytest.raises(error, match=match):
        bt.bayesuvius(dim=4).sentence("the cat").draw(tmp_path / file, **options)
    assert not list(tmp_path.iterdir())


def test_nets_without_attention_are_folded_when_large():
    case = next(case for case in CASES if case.name == "cayley")
    s = case.net.sentence([f"w{i}" for i in range(40)])
    assert {box.name for box in s.picture().boxes} == set(case.net.graph())
    with pytest.raises(BNetError, match="P\\(j \\| i\\)"):
        s.picture(detail="words")
    assert np.isfinite(s.picture().width)
