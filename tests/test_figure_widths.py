"""Figures with a width, font and title: sizes and texts are read back from the files; special tokens are left out."""

import io
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import bnet_transformer as bt
from bnet_transformer.errors import BNetError
from bnet_transformer.figures import svg
from bnet_transformer.figures.fonts import MIN_FONT_SIZE, label_to_text, parse_width, resolve_font
from bnet_transformer.figures.svg import to_svg
from bnet_transformer.figures.tikz import to_tikz
from tests.cases import CASES, get_case
from tests.test_draw import SVG, find_overlaps, same_graph

WIDTHS = ("column", "text", "slide")
SCALE = re.compile(r"x=([\d.]+)bp")
BOUNDS = re.compile(r"\\useasboundingbox \(0,0\) rectangle \(([\d.]+),([\d.]+)\)")


def iter_figures(case):
    """The objects of a case that have a figure, each with options."""
    s = case.sentence
    yield case.net, {}
    for detail in ("nodes", "words"):
        yield s, {"detail": detail}
    for make in (s.tan, s.tan_tree, s.reads):
        try:
            yield make(), {}
        except BNetError:  # a net without attention over words, or without slices
            continue


def read_svg(text):
    """The width of an SVG in points, the font sizes of its texts in points, and whether all texts are inside."""
    root = ElementTree.fromstring(text)
    width = float(root.get("width").removesuffix("pt"))
    scale = width / float(root.get("viewBox").split()[2])
    sizes = [
        float(run.get("font-size", line.get("font-size"))) * scale
        for line in root.iter(f"{SVG}text")
        for run in line.iter(f"{SVG}tspan")
    ]
    return width, sizes


def draw_or_widen(obj, width, **options):
    """The picture at a width; if it does not fit, at the width that the error names. Also return the width.

    The picture is None if the figure is higher than a page or slide.
    """
    try:
        return bt.picture(obj, width=width, **options), width
    except BNetError as error:
        if error.subject.startswith("height"):
            limit, height = (float(re.search(r"([\d.]+)in", text)[1]) for text in (error.expected, error.actual))
            assert height > limit == pytest.approx(max_height(width), rel=1e-3) and "without width=" in error.hint
            return None, width
        assert error.subject == "width" and error.hint
        inches = float(re.search(r"at least ([\d.]+)in", error.expected)[1])
        assert inches > parse_width(width)
        with pytest.raises(BNetError, match="at least"):
            bt.picture(obj, width=f"{inches - 0.05}in", **options)
        return draw_or_widen(obj, f"{inches}in", **options)


def max_height(width):
    """The height of a page, or of a slide for a wide figure, in inches."""
    return 9 / 16 * parse_width(width) if parse_width(width) > parse_width("text") else 9


QUICK = ("chapter", "marginal")
SAMPLED_CASES = [  # each third case, and the quick ones
    pytest.param(case, marks=[pytest.mark.slow] * (case.name not in QUICK))
    for k, case in enumerate(CASES)
    if k % 3 == 0 or case.name in QUICK
]


@pytest.mark.parametrize("case", SAMPLED_CASES, ids=lambda case: case.name)
def test_every_figure_has_its_width_and_legible_text(case):
    for obj, options in iter_figures(case):
        try:
            natural = bt.picture(obj, **options)
        except BNetError:  # no attention grid, or a cell of it without attention
            continue
        for width in WIDTHS:
            picture, width = draw_or_widen(obj, width, **options)
            if picture is None:
                continue
            assert picture.height * picture.scale <= 72 * max_height(width) + 1e-3
            points, sizes = read_svg(to_svg(picture))
            assert points == pytest.approx(72 * parse_width(width), rel=1e-5)
            assert min(sizes, default=MIN_FONT_SIZE) >= MIN_FONT_SIZE - 1e-3
            assert not find_overlaps(picture)
            if obj is case.net:  # slices and weights may be omitted
                assert {box.name for box in picture.boxes} <= {box.name for box in natural.boxes}
                assert ("not drawn" in picture.caption) or len(picture.boxes) == len(natural.boxes)
            else:
                assert same_graph(picture.to_networkx(), natural.to_networkx()) and picture.caption == natural.caption
            for left, top, right, bottom in (part.bounds for part in (*picture.boxes, *picture.lines)):
                assert min(left, top) >= 0 and right <= picture.width and bottom <= picture.height
            for one, other in itertools.combinations(picture.lines, 2):
                (a, b, c, d), (e, f, g, h) = one.bounds, other.bounds
                assert not (a < g and e < c and b + 2 < h and f + 2 < d), (one, other)


def test_every_file_has_the_width(tmp_path):
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    for width in ("column", "8.5cm", "slide"):
        points = 72 * parse_width(width)
        picture = s.picture(width=width, theme="dark", title="Three words")
        image = Image.open(io.BytesIO(svg.to_png(picture)))
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert [side / 300 * 72 for side in image.size] == pytest.approx(
            [points, picture.height * picture.scale], abs=0.25
        )
        page = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", svg.to_pdf(picture))
        assert float(page[1]) == pytest.approx(points, abs=0.01)
        tex = to_tikz(picture)
        assert float(SCALE.search(tex)[1]) * float(BOUNDS.search(tex)[1]) == pytest.approx(points, rel=1e-3)
        assert float(re.search(r'width="([\d.]+)pt"', to_svg(picture))[1]) == pytest.approx(points, rel=1e-5)
    with pytest.raises(BNetError, match="DOT"):
        s.draw(tmp_path / "a.dot", width="column")
    assert not list(tmp_path.iterdir())


def test_a_narrow_figure_is_laid_out_again_and_not_only_scaled():
    words = ["electroencephalography", *["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]]
    s = bt.bayesuvius(4, slices=3).sentence(words)
    column, text = (s.picture(detail="words", width=width) for width in ("column", "text"))
    natural = s.picture(detail="words")
    assert column.scale > 1.4 * 72 * parse_width("column") / natural.width  # more than the scale to its width
    assert text.scale > 0.7
    legend = {entry.text.y for entry in column.legend}
    assert len(legend) >= len({entry.text.y for entry in natural.legend})
    assert len({label_to_text(line.runs) for line in column.lines if line.colour == "grey"}) > 1
    folded = s.net.picture(width="text")  # the caption does not widen it, and it is not enlarged
    assert folded.scale <= 1.0


@pytest.mark.parametrize("count", [3, 14])  # words are columns, or rows
def test_marked_dots_have_their_effects(count):
    s = bt.bayesuvius(dim=4, slices=2).sentence(["the"] * count)
    effects = {f"x_1_{k}": f"{k - 1.5:+.2g}" for k in range(3)}
    picture = s.picture(detail="words", highlight=effects, width="column")
    texts = {label_to_text(line.runs): line for line in picture.lines}
    boxes = {box.name: box for box in picture.boxes}
    for name, effect in effects.items():
        line, box = texts[effect], boxes[name]
        ranked = sorted(boxes.values(), key=lambda other: np.hypot(other.x - line.x, other.y - line.y))
        assert ranked[0] is box and box.title.endswith(effect) and line.size * picture.scale >= MIN_FONT_SIZE
    assert [entry.handle.border for entry in picture.legend if label_to_text(entry.text.runs) == "effect"] == ["dot"]


@pytest.mark.slow
def test_a_figure_that_is_higher_than_a_page_shows_less_or_is_refused():
    net = bt.decoder(4, heads=2, slices=2, vocabulary=["the", "cat", "sat"])
    column = net.picture(width="column")
    assert {"a_0", "a_1", "x_2"} & {box.name for box in column.boxes} == {"a_0", "x_2"}  # one slice and the last state
    assert "Slice 1 repeats slice 0" in column.caption and "not drawn" in column.caption
    with pytest.raises(BNetError, match="slices") as error:  # a slice with a mark is not omitted
        net.picture(width="column", highlight="q_1")
    assert error.value.subject.startswith("height")
    s = net.sentence("the cat sat")
    slide = s.picture(width="slide")
    assert {box.name[0] for box in slide.boxes} == {"x"} and slide.height * slide.scale <= 72 * max_height("slide")
    with pytest.raises(BNetError, match="at most 6") as error:
        s.picture(width="slide", detail="nodes")
    assert {"words=", "slices=", "detail='words'"} <= set(re.split("[ ,;]+", error.value.hint))


def test_frames_and_marks_have_the_width_too():
    s = bt.bayesuvius(dim=4, heads=2).sentence("the cat sat")
    frames = {"weights": False, "boxes": "words"}
    marks = {"highlight": s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"])}
    for options, width in itertools.product((frames, marks), WIDTHS):
        picture = s.picture(width=width, **options)
        _, sizes = read_svg(to_svg(picture))
        assert min(sizes) >= MIN_FONT_SIZE - 1e-3 and not find_overlaps(picture)
        for one, other in itertools.combinations(picture.frames, 2):
            is_separate = one.x + one.width < other.x or other.x + other.width < one.x
            assert is_separate or one.y + one.height < other.y or other.y + other.height < one.y


def test_rows_of_a_shrunk_graph_are_centred():
    s = bt.bayesuvius(dim=4).sentence("the cat sat")
    rows = {}
    for box in bt.picture(s.shrink({"q_0_0": "a", "k_0_0": "a"})).boxes:
        rows.setdefault(box.y, []).append(box.bounds)
    middles = [(min(b[0] for b in row) + max(b[2] for b in row)) / 2 for row in rows.values()]
    assert len(rows) > 2 and middles == pytest.approx([middles[0]] * len(rows), abs=0.01)


def test_a_long_caption_does_not_widen_a_small_figure():
    tan = bt.picture(bt.bayesuvius(4).sentence("a b").tan("roles"))
    content = max(box.bounds[2] for box in tan.boxes) - min(box.bounds[0] for box in tan.boxes)
    assert len(tan.caption) > 60 and tan.width < content + 130


def test_a_deep_folded_net_is_not_a_diagonal():
    vocabulary = ["a", "b"]
    net = bt.encoder_decoder(8, heads=2, slices=6, vocabulary=vocabulary)
    picture = net.picture()
    boxes = {box.name: box for box in picture.boxes}
    last_encoder = max(box.y for name, box in boxes.items() if name.startswith("enc_"))
    first_decoder = min(box.y for name, box in boxes.items() if name.startswith("dec_"))
    assert first_decoder < 0.5 * last_encoder  # the decoder does not begin below the encoder
    assert boxes["enc_x_1"].y < boxes["enc_x_6"].y < boxes["dec_cross_a_0"].y


def test_fonts_are_names_in_svg_and_must_exist_in_images(tmp_path):
    s = bt.bayesuvius(dim=4).sentence("the cat")
    text = to_svg(s.picture(font="Times New Roman"))
    assert (
        text.count("'Times New Roman', ") > 4
        and 'fontname="Times New Roman"' in s.picture(font="Times New Roman").to_graphviz().source
    )
    assert "IfFontExistsTF{Times New Roman}" in to_tikz(s.picture(font="Times New Roman"))
    assert 'font-family="serif, ' in to_svg(s.picture(font="serif"))
    boxes = [{b.name: b for b in s.picture(font=font).boxes} for font in (None, "monospace", "No Such Font")]
    assert boxes[1]["k_0_0"].width >= boxes[0]["k_0_0"].width and boxes[2] == boxes[0]
    narrow = bt.bayesuvius(dim=4).sentence("ill illi")  # narrow letters in the default font
    assert narrow.picture(font="monospace").boxes[-1].width > 1.2 * narrow.picture().boxes[-1].width
    families = svg._load_fonts().families()
    assert resolve_font("monospace", families) == "DejaVu Sans Mono"
    images = {font: svg.to_png(s.picture(font=font)) for font in (None, "serif", "monospace")}
    assert len(set(images.values())) == 3
    with pytest.raises(BNetError, match="DejaVu Sans") as error:
        s.draw(tmp_path / "a.png", font="DejaVu Sanz")
    assert error.value.subject == "font" and not list(tmp_path.iterdir())
    s.draw(tmp_path / "a.svg", font="No Such Font")
    for font in ("", "serif ", "a;b", 3, "x{y}", "'q'"):
        with pytest.raises(BNetError, match="font"):
            s.picture(font=font)


def test_a_title_is_above_the_figure(tmp_path):
    s = bt.bayesuvius(dim=4).sentence("the cat")
    title = "A long title with <markup> & several words that is wrapped at the width of a column"
    for obj in (s, s.net, s.tan(), s.tan_tree(), s.reads()):
        natural, picture = bt.picture(obj), bt.picture(obj, title=title, width="column")
        top = min(box.bounds[1] for box in picture.boxes)
        above = [line for line in picture.lines if line.y < top and line.size == 12.0]
        assert " ".join(label_to_text(line.runs) for line in sorted(above, key=lambda line: line.y)) == title
        assert len(above) > 1 and ElementTree.fromstring(to_svg(picture))[0].text == title
        plain = bt.picture(obj, title="")
        assert plain.title == natural.title and len(list(plain.lines)) == len(list(natural.lines))
        assert "several words" in bt.picture(obj, title=title).to_graphviz().source
    with pytest.raises(BNetError, match="title"):
        s.picture(title=3)


@pytest.mark.parametrize("width", ["wide", "3", 3.3, "3 miles", "0.1in", "1e9in", "", "-3in"])
def test_an_unknown_width_is_refused(tmp_path, width):
    with pytest.raises(BNetError, match="width"):
        bt.bayesuvius(dim=4).draw(tmp_path / "a.svg", width=width)
    assert not list(tmp_path.iterdir())


# special tokens


@pytest.fixture(scope="module")
def mini():
    """A sentence with special tokens in a real net."""
    return bt.from_pretrained("minilm").sentence("The cat sat on the mat")


@pytest.mark.slow
def test_special_tokens_are_left_out_and_their_attention_is_stated(mini):
    n = len(mini.words)
    words = [k for k in range(n) if not mini.tokens.special[k]]
    mean = np.stack([mini.attention(t).mean(0).numpy() for t in range(6)])
    share = mean[:, words][:, :, [0, n - 1]].sum(-1).mean()
    for picture in (mini.picture(special=False), bt.picture(mini.reads(range(6)), special=False)):
        assert {int(box.name.split("_")[-1]) for box in picture.boxes} == set(words)
        assert f"[CLS] and [SEP] are not drawn; {share:.1%} of the attention" in picture.caption
        for arrow in picture.arrows:  # the weights are not normalised again
            (_, t, j), (_, _, i) = arrow.source.split("_"), arrow.target.split("_")
            assert arrow.weight == pytest.approx(mean[int(t), int(i), int(j)], abs=1e-5)
    assert "[CLS]" not in mini.picture().caption
    nodes = mini.picture(detail="nodes", slices=2, heads=3, words=["[CLS]", "cat"], weights=False, special=False)
    assert {box.name.split("_")[-1] for box in nodes.boxes} == {"2"}
    head = mini.attention(2)[3].numpy()
    assert f"{head[2, [0, n - 1]].sum():.1%}" in nodes.caption
    with pytest.raises(BNetError, match="no special tokens"):
        mini.picture(words=["[CLS]"], special=False)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_figures_of_real_nets_have_their_width(mini, width):
    tiny = bt.from_pretrained("tiny").sentence("a bird sang a bird")
    nodes = {"detail": "nodes", "slices": 2, "heads": 3, "words": ["cat", "sat"], "weights": False}
    objects = [(mini, {}), (mini, {"special": False}), (mini, nodes), (mini.net, {}), (mini.reads(), {})]
    objects += [(mini.tan_tree(), {}), (tiny, {"detail": "words"}), (tiny.tan("roles"), {}), (tiny.net, {})]
    for obj, options in objects:
        picture, width = draw_or_widen(obj, width, **options)
        if picture is None:  # higher than a slide
            assert width == "slide" and isinstance(obj, type(mini.net))
            continue
        points, sizes = read_svg(to_svg(picture))
        assert points == pytest.approx(72 * parse_width(width), rel=1e-5) and min(sizes) >= MIN_FONT_SIZE - 1e-3


@pytest.mark.slow
def test_the_error_names_options_that_make_the_figure_smaller(mini):
    options = {"detail": "nodes", "slices": 2, "heads": 3}
    with pytest.raises(BNetError) as error:
        mini.picture(width="column", **options)
    widths = [float(re.search(r"at least ([\d.]+)in", error.value.expected)[1])]
    assert {"words=", "special=False", "weights=False"} <= set(
        error.value.hint.removeprefix("To draw less, use ").split(", ")
    )
    for smaller in ({"special": False}, {"weights": False}, {"words": ["cat", "sat", "mat"]}):
        with pytest.raises(BNetError) as error:
            mini.picture(width="0.5in", **options | smaller)
        widths.append(float(re.search(r"at least ([\d.]+)in", error.value.expected)[1]))
    assert max(widths[1:]) < widths[0]


def test_special_tokens_are_hidden_in_the_page(monkeypatch):
    from bnet_transformer.data.encode import EncodedSentence
    from bnet_transformer.page.description import describe_sentence, parse_page_options

    s = get_case("chapter").sentence if any(case.name == "chapter" for case in CASES) else CASES[0].sentence
    count = len(s.words)
    monkeypatch.setattr(EncodedSentence, "flag_special_tokens", lambda *_: (True, *[False] * (count - 1)))
    shown, hidden = (describe_sentence(s.state, parse_page_options({"special": flag}))[0] for flag in (True, False))
    assert [stack["special"] for stack in shown["stacks"]] == [[0]] == [stack["special"] for stack in hidden["stacks"]]
    assert shown["special"]["is_shown"] and not hidden["special"]["is_shown"]
    assert shown["stacks"][0]["words"] == hidden["stacks"][0]["words"]  # indices of words stay
    assert "special" in hidden["special"]["note"] and shown["special"]["note"] == hidden["special"]["note"]
