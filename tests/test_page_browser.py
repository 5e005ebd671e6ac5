"""The page in Chromium: the DOM agrees with the sentence; pointer, keys and screen reader work; words are text."""

import base64
import itertools
import re
import struct
from functools import cache
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer.data.encode import EncodedSentence
from bnet_transformer.figures.fonts import format_token
from bnet_transformer.figures.picture import get_palette
from bnet_transformer.interventions import Attend, Zero
from bnet_transformer.page.description import PageOptions, describe_sentence
from bnet_transformer.page.widget import check_selected, check_view, list_sections
from bnet_transformer.tpm import Categorical
from tests.browser_page import download_file, needs_chromium, open_browser_page
from tests.cases import get_case, hidden_states, jitter

pytestmark = needs_chromium

WORDS = "the cat sat on the mat"
STEP = 0.5 / 255 + 6e-5  # a byte, and the four decimals of the panel
HOSTILE = [
    "<img src=x onerror=document.title='hacked'>",
    "</script><script>document.title='hacked'</script>",
    "\"quotes\" & 'more'",
    "{{description}} ${1+1} `x`",
    "\u202eturned",
    "שלום",
    "😀👩‍👩‍👧",
    "half \ud800",
    "\x00\x1b",
    "<!--",
    "]]>",
    "x" * 300,
]


@pytest.fixture(scope="module")
def watched():
    with open_browser_page() as watched:
        yield watched


@pytest.fixture
def show(watched, tmp_path):
    """Return a function that opens the page of a sentence; its options `in_...` are those of the browser."""

    def showing(sentence, **options):
        inside = {name[3:]: options.pop(name) for name in list(options) if name.startswith("in_")}
        file = tmp_path / "page.html"
        sentence.draw(file, **options)
        return watched.open_file(file, **inside)

    return showing


@cache
def heads(words=WORDS, **options):
    """A sentence in a net with a plate of heads, whose random parameters make its attention uneven."""
    net = bt.bayesuvius(6, slices=2, **{"heads": 3, "combine": "concat", "residual": True, **options})
    return jitter(net, 0.3).sentence(words)


@cache
def select(**options):
    """A sentence in a net whose heads are states of c."""
    return jitter(bt.bayesuvius(6, slices=2, heads=3, observe=Categorical(5), **options), 0.3).sentence(WORDS)


def box(page, name):
    return page.locator(f'[data-node="{name}"]')


def choose(page, name):
    """Select a node by a click, and wait for its details."""
    box(page, name).click()
    page.wait_for_selector(f'.panel [data-fact="name"]:text-is("{name}")')


def rows(page, part):
    """Return the numbers of a table of the panel, by word, with all rows shown."""
    table = page.locator(f'.panel [data-part="{part}"]')
    if (more := table.get_by_role("button", name="all")).count():
        more.click()
    read = "rows => rows.map(row => [Number(row.dataset.word), Number(row.dataset.weight)])"
    return dict(map(tuple, table.locator("tr").evaluate_all(read)))


def lines(page, kind):
    """The lines of the highlighted boxes, `{(source, target): weight}`."""
    read = "all => all.map(line => [line.dataset.source, line.dataset.target, Number(line.dataset.weight)])"
    return {(a, b): weight for a, b, weight in page.locator(f".front .{kind}").evaluate_all(read)}


def drag(locator, value):
    """Move a slider to a value with the mouse."""
    move = "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', { bubbles: true })); }"
    locator.evaluate(move, value)


def check_weights(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(abs(actual[key] - expected[key]) <= STEP for key in expected), (actual, expected)


def row(table, i):
    """Return row i of a table of attention, by word."""
    return {j: float(weight) for j, weight in enumerate(table[i])}


# the page agrees with the sentence


@pytest.mark.slow
def test_the_panel_shows_the_attention_of_a_word_in_each_head(show):
    s = heads(mask="causal")
    with show(s, detail="words") as page:
        for head, slice_, word in (("mean", 0, 0), ("mean", 1, 5), (2, 0, 4), (2, 1, 3)):
            page.locator('[name="head"]').select_option(str(head))
            attention = s.attention(slice_).detach()
            table = attention.mean(0) if head == "mean" else attention[head]
            choose(page, f"x_{slice_ + 1}_{word}")
            check_weights(rows(page, f"reads-a_{slice_}"), {j: float(table[word, j]) for j in range(word + 1)})
            choose(page, f"x_{slice_}_{word}")
            check_weights(rows(page, f"readers-a_{slice_}"), {i: float(table[i, word]) for i in range(word, 6)})
        page.locator('[name="head"]').select_option("mean")
        choose(page, "x_2_5")
        cells = page.locator('.panel [data-part="heads-a_1"] tbody tr')
        read = "all => all.map(({ dataset: { head, word, weight } }) => [head, word, weight].map(Number))"
        strongest = cells.evaluate_all(read)
        weights, words = s.attention(1).detach()[:, 5].max(-1)
        assert {head: word for head, word, _ in strongest} == dict(enumerate(words.tolist()))
        check_weights({head: weight for head, _, weight in strongest}, row(weights[None], 0))
        assert [weight for *_, weight in strongest] == sorted((weight for *_, weight in strongest), reverse=True)
        cells.locator("button").last.click()
        assert page.locator('[name="head"]').input_value() == str(strongest[-1][0]) and not cells.count()
        check_weights(rows(page, "reads-a_1"), row(s.attention(1).detach()[strongest[-1][0]], 5))


@pytest.mark.slow
def test_a_link_is_the_view(show):
    s = heads(mask="causal")
    with show(s, detail="words", in_fragment="#x_2_3&head=2&unfolded=1&highlight=parents") as page:
        page.wait_for_selector('.panel [data-fact="name"]:text-is("x_2_3")')
        check_weights(rows(page, "reads-a_1"), {j: float(s.attention(1)[2, 3, j]) for j in range(4)})
        assert box(page, "q_1_2_3").count() and not box(page, "q_0_2_3").count()
        marked = page.locator(".node.marked").evaluate_all("all => all.map(node => node.dataset.node)")
        assert set(marked) >= {"x_1_3"} and "x_1_2" not in marked
        choose(page, "x_1_2")
        page.locator('[name="head"]').select_option("all")
        drag(page.locator('[name="min_weight"]'), 0.3)
        expected = "#x_1_2&unfolded=1&head=all&min_weight=0.3&highlight=parents"
        page.wait_for_function("hash => location.hash === hash", arg=expected)
        page.locator('[data-slice-section=":1"]').click()
        assert page.evaluate("location.hash") == expected.replace("&unfolded=1", "")
        # a change of the address changes the view: a node of a folded slice is shown, and invalid parts are named
        page.evaluate("location.hash = 'a_0_*_4'")
        page.locator('.node.selected[aria-label^="a_0, 3 nodes"]').wait_for()
        assert page.locator('[name="head"]').input_value() == "mean"
        page.evaluate("location.hash = 'x_9_9&unfolded=7&colour=%FF&top=3'")
        page.locator('.footer:has-text("x_9_9")').wait_for()
        assert all(text in page.locator(".footer").inner_text() for text in ("unfolded", "colour"))
        assert page.locator('[name="top"]').input_value() == "3" and not page.locator(".node.selected").count()
        page.evaluate("location.hash = ''")
        page.wait_for_selector('[name="top"]:placeholder-shown')


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["three stacks", "vanilla encoder-decoder", "two selectors", "chapter, words", "sites"]
)
def test_python_and_the_page_name_the_same_view(show, name):
    s = get_case(name).sentence
    description, _ = describe_sentence(s.state, PageOptions())
    with show(s, detail="words") as page:
        for command in ("fold", "unfold"):
            page.locator(f'[data-command="{command}"]').click()
        page.locator(".node").last.click()
        node, *settings = [unquote(part) for part in page.evaluate("location.hash").removeprefix("#").split("&")]
        assert check_selected(s.ground, node) == node
        names = [item for text in settings for item in text.removeprefix("unfolded=").split(",")]
        unfolded = [int(item) if re.fullmatch(r"-?\d+", item) else item for item in names]
        assert check_view({"unfolded": unfolded}, s.ground, description) == {"unfolded": unfolded}
        assert set(unfolded) == set(list_sections(description))


@pytest.mark.slow
def test_in_a_frame_without_an_address_the_page_works(show, watched, tmp_path):
    file, outer = tmp_path / "inner.html", tmp_path / "outer.html"
    heads().draw(file)
    text = file.read_text().replace("&", "&amp;").replace('"', "&quot;")
    outer.write_text(f'<!doctype html><title>frame</title><iframe sandbox="allow-scripts" srcdoc="{text}"></iframe>')
    with watched.open_file(outer, ready="iframe") as page:
        frame = page.frame_locator("iframe")
        frame.locator('[data-node="x_1_2"]').click()
        frame.locator('.panel [data-fact="name"]:text-is("x_1_2")').wait_for()


@pytest.mark.slow
def test_inclusion_of_heads_is_shown_with_intervals(show):
    s = heads()
    posterior = bt.inclusion(s.net, torch.randn(2, 3, 6), draws=60, progress=False)
    for inclusion, has_interval in ((posterior, True), (posterior.mean, False)):
        with show(s, inclusion=inclusion) as page:
            cells = page.locator('[data-part="inclusion"] td')
            probs = cells.evaluate_all("all => all.map(cell => Number(cell.dataset.weight))")
            assert np.allclose(probs, posterior.mean.flatten().numpy(), atol=1e-6)
            assert [f"{prob:.2f}".removeprefix("0") for prob in probs] == cells.all_inner_texts()
            assert ("from" in cells.first.get_attribute("aria-label")) == has_interval


@pytest.mark.slow
def test_contributions_are_ranked_in_the_panel_of_their_readout_and_select_writers(show):
    words = ["the", "cat", "sat"]
    s = jitter(bt.decoder(6, heads=2, slices=2, norm="pre", vocabulary=words), 0.3).sentence("the cat sat")
    result = s.contributions("logits_2", of=("cat", "sat"), exact=True)
    with show(s, contributions=result, detail="nodes") as page:
        assert page.locator('[data-part="contributions"]').count() == 0
        choose(page, "logits_1")
        assert page.locator('[data-part="contributions"]').count() == 0
        choose(page, "logits_2")
        table = page.locator('.panel [data-part="contributions"]')
        if (more := table.get_by_role("button", name="more")).count():
            more.click()
        read = "rows => rows.map(row => [row.dataset.writer, Number(row.dataset.weight)])"
        actual = table.locator("tbody tr").evaluate_all(read)
        expected = result.top(len(result.writers))
        assert [name for name, _ in actual] == [name for name, _ in expected]
        assert np.allclose([part for _, part in actual], [part for _, part in expected])
        bars = table.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => { const bar = row.querySelector('.bar').getBoundingClientRect(),"
            " cell = row.querySelector('.bar-cell').getBoundingClientRect();"
            " return (bar.left + bar.right - cell.left - cell.right) / cell.width; })"
        )
        greatest = abs(expected[0][1])
        assert np.allclose(bars, [part / greatest / 2 for _, part in expected], atol=0.03)
        assert "norm" in table.inner_text() and table.locator("[data-effect]").count() == len(result.writers)
        table.locator('[data-name="a_1_0_2"]').click()
        page.wait_for_selector('.panel [data-fact="name"]:text-is("a_1_0_2")')
        assert page.locator(".node.selected").count() == 1


@pytest.mark.slow
def test_a_selector_is_averaged_over_its_posterior_or_set_to_a_state(show):
    s = select().observe(y_1=3, y_4=0)
    posterior = s.posterior("c").double()
    with show(s, detail="words") as page:
        cells = page.locator('[data-posterior="c"] td[data-weight]')
        shown = cells.evaluate_all("cells => cells.map(cell => Number(cell.dataset.weight))")
        torch.testing.assert_close(torch.tensor(shown, dtype=posterior.dtype), posterior, atol=1e-5, rtol=0)
        for state in ("mean", 2):
            page.locator('[name="states"]').select_option(str(state))
            for slice_ in range(2):
                attention = s.attention(slice_).detach().double()
                table = torch.tensordot(posterior, attention, 1) if state == "mean" else attention[state]
                choose(page, f"x_{slice_ + 1}_4")
                check_weights(rows(page, f"reads-x_{slice_ + 1}"), row(table, 4))


@pytest.mark.slow
def test_the_panel_lists_relatives_as_the_graph_has_them(show):
    s = heads("a b c", mask="causal", heads=2).do({"a_0_1_*": Zero(), "a_1_0_2": Attend([0.5, 0.5, 0])})
    boxes = {"x_1_2": ["x_1_2"], "a_1_0_2": ["a_1_0_2"], "W_o_1_*": ["W_o_1_0", "W_o_1_1"]}
    with show(s, detail="nodes") as page:
        page.locator('[name="unfold_heads"]').check()
        for box, names in boxes.items():
            page.locator(f'[data-node="{box}"], [data-nodes="{box}"]').click()
            single = ("parents", "children", "blanket") if len(names) == 1 else ()
            for relation in ("ancestors", "descendants", *single):
                expected = {other for name in names for other in getattr(s, relation)(name)} - set(names)
                page.locator(f'.panel [data-relation="{relation}"] summary').click()
                listed = page.locator(f'.panel [data-relation="{relation}"] [data-name]')
                if expected:
                    listed.nth(len(expected) - 1).wait_for(state="attached")
                listed_names = listed.evaluate_all("all => all.map(each => each.dataset.name)")
                assert len(listed_names) == len(expected) and set(listed_names) == expected, (box, relation)


@pytest.mark.slow
def test_details_of_a_node_agree_with_the_graph(show):
    s = select().observe(y_1=1).do(x_1_0=Zero())
    graph = s.graph()
    with show(s, detail="nodes") as page:
        for name in ("c", "q_0_2", "x_1_3", "x_0_0", "W_q_1"):
            choose(page, name)
            tpm_text = page.locator('[data-fact="tpm"]').inner_text()
            assert tpm_text.split(",")[0] == graph.nodes[name]["tpm"], name
            latex = page.locator('[data-fact="latex"]').text_content()
            (equation,) = [row.name for row in s.net.equations().rows if row.latex == latex]
            assert equation.partition("_")[0] == name.partition("_")[0]
            assert page.locator(".equation math").count() >= 1
        choose(page, "x_1_0")
        assert page.locator('[data-fact="kind"]').inner_text() == "set by do"


# interaction


@pytest.mark.slow
def test_hover_shows_the_reads_from_and_to_a_word(show):
    s = heads()
    first, second = (np.rint(255 * s.attention(t).detach().numpy()).mean(0) / 255 for t in range(2))
    with show(s, detail="words") as page:
        assert not lines(page, "line")
        for min_weight in (0.04, 0.13, 0.3):
            drag(page.locator('[name="min_weight"]'), min_weight)
            box(page, "x_1_2").hover()
            strong = [{k: p for k, p in row(table, 2).items() if p >= min_weight} for table in (first, second.T)]
            check_weights(lines(page, "source"), {(f"x_0_{j}", "x_1_2"): p for j, p in strong[0].items()})
            check_weights(lines(page, "reader"), {("x_1_2", f"x_2_{i}"): p for i, p in strong[1].items()})
            page.locator(".footer").hover()
        drag(page.locator('[name="min_weight"]'), 0.05)
        box(page, "x_1_2").hover()
        dashes = {k: page.locator(f".front .{k}").first.get_attribute("stroke-dasharray") for k in ("source", "reader")}
        assert dashes["source"] is None and dashes["reader"]  # colour is not the only sign
        page.locator('.word[data-word="4"]').hover()
        assert {target for _, target in lines(page, "source")} == {"x_1_4", "x_2_4"}
        page.locator(".footer").hover()
        assert not lines(page, "line")


def test_a_set_node_has_no_reads_but_is_still_attended_to(show):
    s = heads().do(x_1_2=Zero())
    with show(s, detail="words") as page:
        drag(page.locator('[name="min_weight"]'), 0.0)
        page.locator('[name="top"]').fill("")
        counts = page.locator(".back .lines").evaluate_all("all => all.map((path) => Number(path.dataset.count))")
        tables = [np.rint(255 * s.attention(t).detach().numpy()).mean(0) for t in range(2)]
        assert sum(counts) == int((np.delete(tables[0], 2, 0) > 0).sum() + (tables[1] > 0).sum())
        box(page, "x_1_2").hover()
        assert not lines(page, "source") and lines(page, "reader")
        choose(page, "x_1_2")
        assert not page.locator('[data-part^="reads-"]').count()
        assert box(page, "x_1_2").locator(".fill-do").count() == 1 and "zero" in page.locator(".panel").inner_text()


@pytest.mark.slow
def test_threshold_and_top_choose_the_reads_that_are_drawn(show):
    s = heads()
    tables = [np.rint(255 * s.attention(t).detach().numpy()).mean(0) / 255 for t in range(2)]

    def count_lines(page):
        return sum(page.locator(".back .lines").evaluate_all("all => all.map((path) => Number(path.dataset.count))"))

    with show(s, detail="words") as page:
        for min_weight, top in ((0.0, 0), (0.15, 0), (0.3, 0), (0.0, 1), (0.12, 2), (1.0, 0)):
            drag(page.locator('[name="min_weight"]'), min_weight)
            page.locator('[name="top"]').fill(str(top) if top else "")
            rows = [np.sort(line)[::-1][: top or None] for table in tables for line in table]
            expected = sum(int(((line >= min_weight - 1e-7) & (line > 0)).sum()) for line in rows)
            assert count_lines(page) == expected == int(page.locator(".footer").get_attribute("data-reads"))
        drag(page.locator('[name="min_weight"]'), 0.0)
        page.locator('[name="all_words"]').uncheck()
        assert count_lines(page) == 0


@pytest.mark.slow
def test_slices_and_heads_fold_and_unfold(show):
    with show(heads(), detail="words") as page:
        shown = set(page.locator("[data-node]").evaluate_all("all => all.map(n => n.dataset.node)"))
        assert shown == {f"x_{t}_{i}" for t in range(3) for i in range(6)}
        section = page.get_by_role("button", name="unfold slice 1")
        assert section.get_attribute("aria-expanded") == "false"
        section.click()
        assert page.get_by_role("button", name="fold slice 1", exact=True).get_attribute("aria-expanded") == "true"
        assert page.locator('[data-nodes="q_1_*_3"]').count() == 1 and not page.locator('[data-nodes^="q_0"]').count()
        page.locator('[name="unfold_heads"]').check()
        assert {page.locator(f'[data-node="q_1_{h}_3"]').count() for h in range(3)} == {1}
        page.get_by_role("button", name="fold slice 1", exact=True).click()
        assert page.locator("[data-node]").count() == 18
        page.locator('[data-command="unfold"]').click()
        assert page.locator('[data-node="v_0_2_5"]').count() == page.locator('[data-node="a_1_0_0"]').count() == 1


def test_states_of_slices_without_words_stay_when_a_slice_is_folded(show):
    s = jitter(hidden_states()).sentence()
    with show(s) as page:
        count = "all => all.reduce((sum, path) => sum + Number(path.dataset.count), 0)"
        assert page.locator(".back .lines").evaluate_all(count) == len(s.graph().edges)
        page.get_by_role("button", name="fold slice 1", exact=True).click()
        shown = set(page.locator("[data-node]").evaluate_all("all => all.map(n => n.dataset.node)"))
        assert shown == set(s.graph()) - {"y_1"}
        assert page.locator(".back .lines").evaluate_all(count) == len(s.graph().subgraph(shown).edges)


def test_search_marks_words_and_goes_from_one_to_the_next(show):
    with show(heads(), detail="words") as page:
        search = page.locator('[name="search"]')
        search.fill("THE")
        assert page.locator(".word.match").evaluate_all("all => all.map(w => w.dataset.word)") == ["0", "4"]
        assert page.locator(".status").inner_text().strip()
        first = page.locator(".node.focused").get_attribute("data-node")
        search.press("Enter")
        assert (first, page.locator(".node.focused").get_attribute("data-node")) == ("x_0_0", "x_0_4")
        search.fill("<b>")
        assert not page.locator(".word.match").count()


def test_keys_do_what_the_pointer_does(show):
    with show(heads(), detail="words") as page:
        page.locator(".stage").locator('[tabindex="0"]').focus()
        focused = page.locator(".node.focused")
        page.keyboard.press("ArrowRight")
        start = focused.get_attribute("data-node")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        name = focused.get_attribute("data-node")
        word = int(start.rpartition("_")[2]) + 1
        assert re.fullmatch(rf"x_[02]_{word}", name) and name[2] != start[2]
        page.keyboard.press("Enter")
        assert page.locator('[data-fact="name"]').inner_text() == name
        page.keyboard.press("Escape")
        assert not page.locator('[data-fact="name"]').count()
        before = page.locator(".main .pane").get_attribute("style")
        page.keyboard.press("+")
        assert page.locator(".main .pane").get_attribute("style") != before
        count = page.locator("[data-node], [data-nodes]").count()
        page.keyboard.press("f")
        assert page.locator("[data-node], [data-nodes]").count() > count
        assert focused.get_attribute("data-node")
        page.keyboard.press("/")
        page.keyboard.type("cat f")  # letters in the field are letters
        assert page.locator('[name="search"]').input_value() == "cat f"
        page.keyboard.press("Escape")
        assert page.locator('[name="search"]').input_value() == ""


@pytest.mark.slow
def test_the_page_can_be_dragged(show):
    with show(heads(), detail="nodes", in_size=(700, 420)) as page:
        page.locator('[data-command="in"]').click(click_count=6)
        boxes = [node.bounding_box() for node in page.locator(".node").all()]
        node_box = next(p for p in boxes if 150 < p["x"] < 500 and 150 < p["y"] < 350)
        x, y = node_box["x"] + node_box["width"] / 2, node_box["y"] + node_box["height"] / 2
        before, nodes = page.locator(".main .pane").get_attribute("style"), page.locator(".nodes").inner_html()
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 60, y - 40, steps=4)
        page.mouse.up()
        assert page.locator(".main .pane").get_attribute("style") != before
        assert not page.locator('[data-fact="name"]').count()  # a drag is not a click
        assert re.sub(' class="[^"]*"', "", page.locator(".nodes").inner_html()) == re.sub(' class="[^"]*"', "", nodes)


def inside(box, around):
    """Return whether a box is inside another, to a pixel."""
    return all(
        around[at] - 1 <= box[at] and box[at] + box[size] <= around[at] + around[size] + 1
        for at, size in (("x", "width"), ("y", "height"))
    )


def overlap(one, other, tolerance=0.5):
    return all(
        min(one[at] + one[size], other[at] + other[size]) - max(one[at], other[at]) > tolerance
        for at, size in (("x", "width"), ("y", "height"))
    )


MEASURE = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
  const of = (selector) => [...document.querySelectorAll(selector)].map((e) => e.getBoundingClientRect().toJSON());
  const parts = ['.view', '.panel', '.footer', '.toolbar'].flatMap(of);
  done({ parts, main: of('.main')[0], nodes: of('.node'), width: document.documentElement.clientWidth });
})))"""


SCROLL = """() => new Promise((done) => {
  const view = document.querySelector(".view"), intervals = [];
  let last = performance.now(), count = 0;
  const step = () => {
    const now = performance.now();
    intervals.push(now - last);
    last = now;
    if (++count > 60) { setTimeout(() => done(intervals), 400); return; }
    view.dispatchEvent(new WheelEvent("wheel", { deltaX: 300, bubbles: true, cancelable: true }));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def check_fits(page, case):
    """Check that all nodes are in the view, and that no other part of the page covers it."""
    measured = page.evaluate(MEASURE)
    parts = measured["parts"]
    assert not any(overlap(one, other) for one, other in itertools.combinations(parts, 2)), (case, parts)
    assert all(part["x"] >= 0 and part["x"] + part["width"] <= measured["width"] for part in parts), (case, parts)
    assert all(inside(node, measured["main"]) for node in measured["nodes"]), case


@pytest.mark.slow
@pytest.mark.parametrize("detail", ["words", "nodes"])
def test_the_whole_net_is_in_the_view_at_every_width(show, detail):
    section, again = ("unfold", "fold") if detail == "words" else ("fold", "unfold")
    with show(heads(), detail=detail) as page:
        for width in (700, 819, 820, 1000):
            page.set_viewport_size({"width": width, "height": 800})
            check_fits(page, f"{width} wide")
            start = page.locator(".main .pane").get_attribute("style")
            page.get_by_role("button", name=f"{section} slice 1", exact=True).click()
            check_fits(page, f"{width} wide, {section}")
            page.locator('[data-command="in"]').click(click_count=3)
            page.get_by_role("button", name=f"{again} slice 1", exact=True).click()
            check_fits(page, f"{width} wide, {again}")
            assert page.locator(".main .pane").get_attribute("style") == start
            page.locator('[name="unfold_heads"]').check()
            check_fits(page, f"{width} wide, with heads")
            page.locator('[name="unfold_heads"]').uncheck()
        page.locator('[data-command="in"]').click(click_count=3)
        scale = page.locator(".main .pane").get_attribute("style").partition("scale")[2]
        page.set_viewport_size({"width": 700, "height": 600})
        assert page.locator(".main .pane").get_attribute("style").partition("scale")[2] == scale  # the reader's choice


@pytest.mark.slow
def test_words_that_do_not_fit_side_by_side_are_slanted(show):
    with show(heads("she signed the important paper because everybody understood"), detail="words") as page:
        for width, is_slanted in ((375, True), (1200, False), (375, True)):
            page.set_viewport_size({"width": width, "height": 800})
            check_fits(page, width) if not is_slanted else page.evaluate(MEASURE)
            words = page.locator(".strip-words .word")
            assert page.locator(".strip-words.slanted").count() == is_slanted
            assert words.evaluate_all("all => all.every((word) => word.getAttribute('visibility') === 'visible')")
            header = page.locator(".top").bounding_box()
            for word in words.all():
                assert word.bounding_box()["y"] >= header["y"] - 1
                assert word.bounding_box()["y"] + word.bounding_box()["height"] <= header["y"] + header["height"]
            boxes = [word.bounding_box() for word in words.all()]
            gaps = [right["x"] - left["x"] - left["width"] for left, right in itertools.pairwise(boxes)]
            assert is_slanted or min(gaps) > 3


CONTROLS = """() => [...document.querySelectorAll("button, select, input, summary, .section")].flatMap((e) => {
  if (!e.checkVisibility()) return [];
  const box = (e.closest("label.check") ?? e).getBoundingClientRect(), part = e.closest(".toolbar, .panel, .view");
  const text = e.outerHTML.slice(0, 90), isCut = e.closest(".view, .wide, .names") !== null;
  return [{ text, part: part.className, isCut, x: box.x, y: box.y, width: box.width, height: box.height }];
})"""


def check_controls(page, width):
    """Check that the document does not scroll sideways, and that all controls are in it, apart, and large enough."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
    controls = page.evaluate(CONTROLS)
    assert len(controls) > 6
    for control in controls:
        assert min(control["width"], control["height"]) >= 23.9, (width, control)
        is_inside = control["x"] >= 0 and control["x"] + control["width"] <= width
        assert control["isCut"] or is_inside, (width, control)
    for one, other in itertools.combinations(controls, 2):
        assert one["part"] != other["part"] or not overlap(one, other, 1.1), (width, one, other)  # borders are shared


@pytest.mark.slow
def test_windows_from_320_pixels_to_4k(show):
    sizes = {}
    with show(heads().do(x_1_2=Zero()), detail="nodes") as page:
        for width, height in ((320, 640), (375, 812), (600, 800), (768, 1024), (1280, 800), (3840, 2160)):
            page.set_viewport_size({"width": width, "height": height})
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            toggle = page.locator('[data-command="settings"]')
            assert toggle.is_visible() == (width <= 680)
            check_controls(page, width)
            if width <= 680:
                assert not page.locator('[name="head"]').is_visible()
                toggle.click()
                assert toggle.get_attribute("aria-expanded") == "true" and page.locator('[name="head"]').is_visible()
                check_controls(page, width)
                toggle.click()
                box(page, "x_1_2").click()
                check_controls(page, width)
                assert "zero" in page.locator(".panel").inner_text()
                page.keyboard.press("Escape")
                page.locator('[data-command="fit"]').click(click_count=2)  # the initial part, then the whole net
            check_fits(page, width)
            sizes[width] = page.evaluate(
                "() => ({"
                " text: parseFloat(getComputedStyle(document.querySelector('.panel h2')).fontSize),"
                " nodes: Math.max(...[...document.querySelectorAll('.node')].map((e) => e.getBoundingClientRect().x))"
                " / document.querySelector('.main').getBoundingClientRect().right })"
            )
        assert sizes[3840]["text"] >= 1.4 * sizes[1280]["text"] and sizes[3840]["nodes"] > 0.7


@pytest.mark.slow
def test_fingers_pan_zoom_and_select(show):
    with show(heads(), detail="nodes", in_size=(375, 800)) as page:
        session = page.context.new_cdp_session(page)

        def touch(kind, *points):
            touches = [{"x": x, "y": y, "id": k} for k, (x, y) in enumerate(points)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})

        def transform():
            style = page.locator(".main .pane").get_attribute("style")
            return [float(number) for number in re.findall(r"-?[\d.]+", style)[:3]]

        x, _, scale = transform()
        touch("touchStart", (200, 250))
        for step in range(1, 6):
            touch("touchMove", (200 - 20 * step, 250))
        touch("touchEnd")
        assert transform()[0] == pytest.approx(x - 100, abs=25) and not page.locator('[data-fact="name"]').count()
        touch("touchStart", (200, 250))
        touch("touchStart", (200, 250), (240, 250))
        for step in range(1, 6):
            touch("touchMove", (200 - 10 * step, 250), (240 + 10 * step, 250))
        touch("touchEnd")
        assert transform()[2] > 1.5 * scale and not page.locator('[data-fact="name"]').count()
        session.detach()


@pytest.mark.slow
def test_a_printed_page_has_the_sentence_the_whole_graph_and_the_facts(show):
    long = " ".join(WORDS.split() * 12)
    for words, count in ((WORDS, 1), (long, 2)):
        with show(heads(words), detail="words", in_color_scheme="dark") as page:
            choose(page, "x_1_2")
            pdf = page.pdf(format="A4")
            assert pdf[:5] == b"%PDF-" and not page.locator(".printout svg").count()
            page.emulate_media(media="print")
            page.wait_for_selector(".printout .band")
            for width in (700, 1030):  # A4, upright and across
                page.set_viewport_size({"width": width, "height": 900})
                bands = [band.bounding_box() for band in page.locator(".printout .band").all()]
                assert len(bands) == count
                assert all(band["x"] >= 0 and band["x"] + band["width"] <= width for band in bands)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                assert page.locator(".band .word").all_text_contents() == words.split()
                nodes = page.locator(".band .node").evaluate_all("all => all.map((node) => node.dataset.node)")
                assert sorted(nodes) == sorted({f"x_{t}_{k}" for t in range(3) for k in range(len(words.split()))})
                assert page.locator(".printout h1").inner_text() == words
                text = page.locator("main").inner_text()
                assert "x_1_2" in text and "deterministic" in text and "reads with P(j | i)" in text
                hidden = page.locator(".toolbar, .view, .close, .panel [data-highlight]")
                assert not any(part.is_visible() for part in hidden.all())
                faint = "all => all.map((part) => getComputedStyle(part).opacity)"
                assert page.locator(".band .back").evaluate_all(faint) == ["1"] * count  # a selection dims no arrow
                assert colours(page, ".printout h1") == [rgb(get_palette("light")[name]) for name in ("ink", "paper")]


@pytest.mark.slow
def test_a_sentence_of_512_words_scrolls(show):
    net = bt.bayesuvius(12, slices=6, heads=12, combine="concat", residual=True)
    s = net.sentence(" ".join(f"w{k}" for k in range(512)))
    with show(s, detail="words") as page:
        assert page.locator(".node").count() >= 7 * 512
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def count_layouts():
            return next(
                m["value"] for m in session.send("Performance.getMetrics")["metrics"] if m["name"] == "LayoutCount"
            )

        layouts = count_layouts()
        intervals = page.evaluate(SCROLL)
        assert count_layouts() - layouts <= 6, "scrolling computes the layout of the page"
        assert np.median(intervals) < 100, intervals
        last = box(page, "x_3_511")
        view, node = page.locator(".main").bounding_box(), last.bounding_box()
        assert inside(node, view)  # the end is reached
        word = page.locator('.word[data-word="511"]').bounding_box()
        section, rows_ = (
            page.locator('[data-slice-section=":3"]').bounding_box(),
            [box(page, f"x_{t}_511").bounding_box() for t in (3, 4)],
        )
        assert abs(word["x"] - node["x"]) < 20 and word["y"] < view["y"] and section["x"] < view["x"]
        assert rows_[0]["y"] < section["y"] + section["height"] / 2 < rows_[1]["y"] + rows_[1]["height"]
        choose(page, "x_3_511")
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.dataset.node") == "x_3_508"
        page.locator('[name="search"]').fill("w7")
        assert inside(page.locator(".node.focused").bounding_box(), view)
        page.locator('[data-command="fit"]').click()
        page.locator('[data-command="fit"]').click()
        check_fits(page, "all words")


@pytest.mark.slow
def test_the_view_is_saved_as_svg_and_png(show):
    with show(heads(), detail="words") as page:
        box(page, "x_1_2").hover()
        name, svg = download_file(page, page.locator('[data-command="svg"]').click)
        root = ElementTree.fromstring(svg)
        texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
        assert name.endswith(".svg") and {"cat", "mat"} <= texts
        paths = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("d")]
        assert paths and all(path.get("stroke", "").startswith(("rgb", "#")) for path in paths)
        assert not re.search(rb"var\(|class=|<script|foreignObject", svg)
        name, png = download_file(page, page.locator('[data-command="png"]').click)
        assert name.endswith(".png") and png[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", png[16:24])
        view = page.locator(".view").bounding_box()
        assert (width, height) == (round(2 * view["width"]), round(2 * view["height"]))
        size = "async (data) => { const i = new Image(); i.src = data; await i.decode(); return i.naturalWidth; }"
        assert page.evaluate(size, "data:image/png;base64," + base64.b64encode(png).decode()) == width


# hostile words and nets without attention


@pytest.mark.slow
def test_hostile_words_stay_text(show):
    net = bt.bayesuvius(4, slices=1, heads=2, vocabulary=HOSTILE, observe=Categorical(3))
    s = net.sentence(HOSTILE).observe(y_1=1)
    with show(s, title=HOSTILE[1] + HOSTILE[0], detail="words") as page:
        shown = page.locator(".word").evaluate_all("all => all.map(word => word.firstChild.data)")
        assert shown[0].startswith("<img") and shown[1].startswith("</script>") and len(shown) == len(HOSTILE)
        assert shown == [format_token(word) for word in HOSTILE]
        assert "\u202e" not in page.content() and "\x1b" not in page.content()
        for word in range(len(HOSTILE)):
            choose(page, f"x_0_{word}")
        page.locator('[name="search"]').fill("<img")
        assert page.locator(".word.match").count() == 1
        assert "hacked" in page.title() and page.title() != "hacked"  # the title is shown, and not executed
        assert not page.locator("img").count() and page.locator("script").count() == 3
        _, svg = download_file(page, page.locator('[data-command="svg"]').click)
        assert not [e for e in ElementTree.fromstring(svg).iter() if e.tag.rpartition("}")[2] in ("img", "script")]


def test_a_net_without_attention_distributions_shows_its_structure(show):
    node, word = bt.Node, ["word"]
    mix = node("x", tpm.Cayley("arbitrary"), [bt.Arrow("x", "every"), "A"], plates=word)
    stack = bt.Stack([node("A", tpm.Weight((3, 3))), mix], [node("x", tpm.Given(3), plates=word)])
    s = bt.BNet(bt.Declaration([stack])).sentence("a b c")
    with show(s) as page:
        if page.locator('[data-command="unfold"]').count():
            page.locator('[data-command="unfold"]').click()
        choose(page, "x_1_1")
        details = page.locator('[data-relation="ancestors"]')
        assert int(details.get_attribute("data-count")) == len(s.ancestors("x_1_1"))
        assert (
            not page.locator('[name="min_weight"]').count() and not page.locator('.panel [data-part^="reads"]').count()
        )


# accessibility


def colours(page, selector):
    """Return the text colour and background of an element, as three numbers from 0 to 255 each."""
    read = """element => { let back = element; const of = (e) => getComputedStyle(e).backgroundColor;
      while (back.parentElement && /rgba?\\(.*, 0\\)|transparent/.test(of(back))) back = back.parentElement;
      const style = getComputedStyle(element), ink = element instanceof SVGElement ? style.fill : style.color;
      return [ink, of(back)].map((colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number)); }"""
    return page.locator(selector).first.evaluate(read)


# A canvas converts colours such as those of color-mix to red, green and blue.
NODE_COLOURS = """kind => { const node = document.querySelector(`.node:has(.fill-${kind}):has(text)`);
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  return [node.querySelector("text"), node.querySelector(`.fill-${kind}`)].map((element) => {
    context.fillStyle = getComputedStyle(element).fill; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); }); }"""


def contrast(one, other):
    def light(colour):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def rgb(colour):
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


@pytest.mark.slow
def test_light_and_dark_follow_the_reader_and_can_be_chosen(show):
    with show(select().observe(y_1=3).do(x_1_2=Zero()), detail="nodes") as page:
        for scheme, theme in itertools.product(("light", "dark"), ("auto", "light", "dark")):
            page.emulate_media(color_scheme=scheme)
            page.locator('[name="theme"]').select_option(theme)
            palette = get_palette(scheme if theme == "auto" else theme)
            for selector in (".word", ".panel h2", ".footer", ".panel .small", ".section text", "button"):
                ink, paper = colours(page, selector)
                assert contrast(ink, paper) >= 4.5, (selector, scheme, theme)
            for kind in ("do", "observed", "paper"):
                text, fill = page.evaluate(NODE_COLOURS, kind)
                assert contrast(text, fill) >= 4.5, (kind, scheme, theme)
            assert colours(page, "#bnet")[1] == rgb(palette["paper"])


def test_options_precede_preferences_and_reduced_motion_stops_movement(show):
    moving = """() => [...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);
      return /[1-9]/.test(s.transitionDuration) || s.animationName !== 'none'; }).length"""
    with show(heads(), theme="dark", in_color_scheme="light", in_reduced_motion="reduce") as page:
        assert colours(page, "#bnet")[1] == rgb(get_palette("dark")["paper"])
        assert page.evaluate(moving) == 0


def test_a_screen_reader_gets_all_content(show):
    s = heads()
    with show(s, detail="words") as page:
        assert page.get_by_role("grid").count() == page.get_by_role("toolbar").count() == 1
        rows = page.get_by_role("grid").get_by_role("row")
        assert rows.count() == 3 and rows.first.get_by_role("gridcell").count() == 6
        assert page.get_by_role("gridcell", name="x_1_2, “sat”").count() == 1
        for role in ("button", "combobox", "slider", "spinbutton", "checkbox", "searchbox"):
            for element in page.get_by_role(role).all():
                named = re.search(r'"[^"]+"', element.aria_snapshot().splitlines()[0])
                assert named, (role, element.evaluate("e => e.outerHTML"))
        assert page.locator(".back, .front").evaluate_all("all => all.every(e => e.getAttribute('aria-hidden'))")
        focusable = page.get_by_role("gridcell").evaluate_all("all => all.filter(e => e.tabIndex === 0).length")
        assert focusable == 1  # one Tab stop; arrow keys move from there
        page.get_by_role("gridcell", name="x_1_2, “sat”").focus()
        status = page.locator(".status").inner_text()
        best = s.attention(0).detach().mean(0)[2]
        j = int(best.argmax())
        assert "x_1_2" in status and f"attends to “{s.words[j]}” {float(best[j]):.2f}" in status.replace("\xa0", " ")
        assert page.locator("html").get_attribute("lang") == "en" and page.get_by_role("main").count() == 1


@pytest.mark.slow
def test_keys_work_at_once_and_tab_reaches_every_control(show):
    with show(heads(), detail="words") as page:
        page.keyboard.press("/")
        page.keyboard.type("mat")
        assert page.locator(".word.match").count() == 1
        focused = """() => { const e = document.activeElement;
          const names = ['name', 'data-command', 'data-slice-section', 'data-node'];
          return names.map((name) => e.getAttribute(name)).find(Boolean) ?? e.tagName; }"""
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(focused))
        assert {"head", "min_weight", "top", "all_words", "search", "svg", "png", "theme", "fit"} <= reached
        assert any(name.startswith("x_") for name in reached)


SHOWN = """() => [...document.querySelectorAll(".nodes, .back, .strip-words, .strip-slices, .panel")].map((part) => {
  const copy = part.cloneNode(true);
  for (const element of copy.querySelectorAll("[tabindex]")) element.removeAttribute("tabindex");
  return copy.innerHTML;
})"""


@pytest.mark.slow
def test_special_tokens_are_hidden_in_the_page_as_by_python(show, monkeypatch):
    s = heads(mask="causal")
    with show(s) as page:
        assert not page.locator('[name="show_special"]').count()
    monkeypatch.setattr(EncodedSentence, "flag_special_tokens", lambda *_: (True, *[False] * 4, True))
    shown, note = {}, "special tokens the and mat are not"
    for special in (True, False):
        with show(s, special=special, detail="nodes") as page:
            switch = page.locator('[name="show_special"]')
            for is_shown in (special, not special, special):
                switch.set_checked(is_shown)
                shown.setdefault(is_shown, []).append(page.evaluate(SHOWN))
                assert (note in page.locator(".panel").inner_text()) == (not is_shown)
    assert len(shown[True]) == len(shown[False]) == 3
    assert all(states.count(states[0]) == 3 for states in shown.values()) and shown[True] != shown[False]
    with show(s, detail="words") as page:
        choose(page, "x_1_1")
        page.locator('[name="show_special"]').uncheck()
        assert list(rows(page, "reads-a_0")) == [1] and "not listed" in page.locator(".panel").inner_text()
        box(page, "x_1_1").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".node.focused").get_attribute("data-node") == "x_1_1"
        page.keyboard.press("ArrowRight")
        assert page.locator(".node.focused").get_attribute("data-node") == "x_1_2"


def test_special_tokens_are_not_shown(show, monkeypatch):
    s = heads()
    monkeypatch.setattr(EncodedSentence, "flag_special_tokens", lambda *_: (True, *[False] * 5))
    mean = float(s.attention(0).mean(0)[3, 0])
    with show(s, special=False, detail="words") as page:
        names = [element.get_attribute("data-node") for element in page.locator("[data-node]").all()]
        assert "x_1_3" in names and not [name for name in names if name.startswith("x_") and name.endswith("_0")]
        assert page.locator(".strip-words .word").count() == 5
        assert "special token" in page.locator(".note").last.inner_text()
        choose(page, "x_1_3")
        words = {int(row.get_attribute("data-word")) for row in page.locator("tr[data-word]").all()}
        assert words == set(range(1, 6))
        stated = re.search(r"special tokens, not listed: ([\d.]+)", page.locator(".panel").inner_text())
        assert float(stated[1]) == pytest.approx(mean, abs=0.006)
