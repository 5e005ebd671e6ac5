"""The live page in Chromium: what it shows equals what the sentence says, read from the DOM; and hostile input."""

import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import quote, unquote

import numpy as np
import pytest

import bnet_transformer as bt
from bnet_transformer.interventions import Zero
from bnet_transformer.serve.answers import Limits
from tests.browser_page import download_file, launch_chromium, needs_chromium
from tests.cases import encoder_decoder
from tests.live_server import build_decoder, build_selector, run_live_server
from tests.test_page_browser import HOSTILE, box, choose

pytest.importorskip("starlette", reason='the live page: pip install "bnet-transformer[serve]"')
pytestmark = needs_chromium

TEXT, OTHER = "the cat sat", "the dog sat"
DECODER, SELECTOR = build_decoder(), build_selector()
gate = threading.Event()


def load_slowly():
    gate.wait(20)
    return DECODER


MODELS = {
    "selector": lambda: SELECTOR,
    "decoder": lambda: DECODER,
    "slow": load_slowly,
    "slower": load_slowly,
    "encoder-decoder": encoder_decoder,
}


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def url():
    with run_live_server(MODELS, Limits(words=30)) as url:
        yield url


class LiveTab:
    """A tab of the live page, which must not log errors, open dialogs or request anything from another origin."""

    def __init__(self, browser, url, fragment=None, size=(1280, 860)):
        self.url, self.faults = url, []
        self.context = browser.new_context(
            accept_downloads=True, viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: self._add(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._add(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._add(True, "a dialog"), dialog.dismiss()))
        origin = url.partition("/?")[0]
        self.page.on(
            "request", lambda request: self._add(not request.url.startswith((origin, "data:", "blob:")), request.url)
        )
        self.page.goto(url + ("" if fragment is None else "#" + quote(json.dumps(fragment))))

    def _add(self, is_fault, text):
        # Chromium logs the status of each rejected request; the page shows the reason.
        if is_fault and not re.search(r"status of 4\d\d", text):
            self.faults.append(text)


@pytest.fixture
def open_tab(browser, url):
    """Return a function that opens the page, of a sentence or of the first one of the server."""
    tabs = []

    def opening(model=None, text=TEXT, ready=".node", address=None, **fields):
        size = fields.pop("size", (1280, 860))
        fragment = None if model is None else {"model": model, "text": text, **fields}
        tabs.append(LiveTab(browser, address or url, fragment, size))
        if ready:
            tabs[-1].page.wait_for_selector(ready, state="attached")
        return tabs[-1].page

    yield opening
    for tab in tabs:
        tab.context.close()
        assert not tab.faults, tab.faults


def fact(page, name):
    return page.locator(f'.panel [data-fact="{name}"]').inner_text()


def fragment(page):
    """The state in the address."""
    return json.loads(unquote(page.evaluate("location.hash").removeprefix("#")))


@contextmanager
def wait_until_updated(page):
    """Wait until the page of an action in the block is drawn."""
    with page.expect_response(lambda response: response.url.endswith("/api/page")) as response:
        yield
    assert response.value.status == 200, response.value.text()
    page.wait_for_selector(".live:not(.running)")  # the policy of the page forbids wait_for_function
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


# the page agrees with the sentence


@pytest.mark.slow
def test_a_typed_sentence_a_do_and_its_undo_are_those_of_the_sentence(open_tab):
    page = open_tab("decoder", "the a cat")
    with wait_until_updated(page):
        page.locator('[name="text"]').fill(TEXT)
        page.keyboard.press("Enter")
    assert page.locator(".word").evaluate_all("all => all.map(word => word.firstChild.data)") == TEXT.split()
    s = DECODER.sentence(TEXT)
    choose(page, "a_1_0_2") if box(page, "a_1_0_2").count() else choose(page, "x_2_2")
    choose(page, "x_1_0")
    with wait_until_updated(page):
        page.locator('[data-action="zero"]').click()
    after = s.do(x_1_0=Zero())
    assert fact(page, "kind") == "set by do"
    choose(page, "x_2_2")
    changed = page.locator('[data-fact="change"]').get_attribute("data-weight")
    assert float(changed) == pytest.approx(float((after["x_2_2"] - s["x_2_2"]).norm() / s["x_2_2"].norm()), abs=1e-5)
    with wait_until_updated(page):
        page.locator('[data-command="back"]').click()
    assert not page.locator('[data-fact="change"]').count() and "steps" not in fragment(page)
    with wait_until_updated(page):
        page.locator('[data-command="forward"]').click()
    assert fragment(page)["steps"] == [{"do": [["x_1_0", {"set": "zero"}]]}]
    choose(page, "x_1_0")
    assert fact(page, "kind") == "set by do"
    with wait_until_updated(page):
        page.locator('[data-action="undo"]').click()
    assert "steps" not in fragment(page)


GRAPH = """() => [...document.querySelectorAll(".nodes, .back, .strip-words, .strip-slices")].map((part) => {
  const copy = part.cloneNode(true);
  for (const element of copy.querySelectorAll("[tabindex]")) element.removeAttribute("tabindex");
  const transient = ["focused", "connected", "selected", "marked"];
  for (const element of copy.querySelectorAll(".node")) element.classList.remove(...transient);
  for (const element of copy.querySelectorAll("[aria-selected]")) element.removeAttribute("aria-selected");
  return copy.innerHTML;
})"""


@pytest.mark.slow
@pytest.mark.parametrize("unfold", [False, True])
def test_a_graph_that_is_drawn_in_place_is_the_graph_of_a_new_page(open_tab, unfold):
    page = open_tab("decoder", "the a cat sat")
    actions = [("x_1_0", "zero"), ("x_1_2", "zero"), ("x_2_1", "zero"), (None, "back"), ("x_1_1", "zero")]
    for node, action in actions:
        if node:
            choose(page, node)
        selector = f'[data-action="{action}"], [data-command="{action}"]'
        with wait_until_updated(page):
            page.locator(selector).first.click()
        fresh = open_tab(**fragment(page))
        for tab in (page, fresh):
            if unfold:
                tab.locator('[data-command="unfold"]').click()
        assert page.evaluate(GRAPH) == fresh.evaluate(GRAPH)
        fresh.context.close()


def posterior(page, node):
    """The prior bars and the probabilities of a posterior in the panel."""
    cells = page.locator(f'[data-posterior="{node}"] td[data-weight]')
    return cells.evaluate_all("all => all.map(cell => Number(cell.dataset.weight))")


@pytest.mark.slow
def test_evidence_moves_the_posterior_as_in_the_sentence(open_tab):
    page = open_tab("selector")
    s = SELECTOR.sentence(TEXT)
    assert np.allclose(posterior(page, "c"), s.posterior("c").numpy(), atol=1e-5)
    choose(page, "y_1")
    with wait_until_updated(page):
        page.locator('[data-action="posterior"]').click()
    assert np.allclose(posterior(page, "y_1"), s.posterior("y_1").numpy(), atol=1e-5)
    with wait_until_updated(page):
        page.locator('[data-action="no-posterior"]').click()
    assert not posterior(page, "y_1") and "posterior" not in fragment(page)
    with wait_until_updated(page):
        page.locator('[data-action="posterior"]').click()
    with wait_until_updated(page):
        page.locator('[data-action="observe-3"]').click()
    assert fact(page, "kind") == "observed"
    page.keyboard.press("Escape")
    observed = s.observe(y_1=3)
    assert np.allclose(posterior(page, "c"), observed.posterior("c").numpy(), atol=1e-5)
    assert page.locator('[data-posterior="c"] .bar.prior').count() == 3
    choose(page, "y_2")
    page.locator('[data-action="observe"] input').fill("0")
    with wait_until_updated(page):
        page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    both = observed.observe(y_2=0)
    assert np.allclose(posterior(page, "c"), both.posterior("c").numpy(), atol=1e-5)
    with wait_until_updated(page):
        page.locator('[data-action="forget-y_1"]').click()
    assert np.allclose(posterior(page, "c"), s.observe(y_2=0).posterior("c").numpy(), atol=1e-5)
    with wait_until_updated(page):
        page.locator('[data-command="back"]').click()
    assert np.allclose(posterior(page, "c"), both.posterior("c").numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_patch_shows_the_sweep_and_its_cells_can_be_set(open_tab):
    page = open_tab("decoder")
    for name, value in (("other", OTHER), ("node", "y_2"), ("first", "dog"), ("second", "cat")):
        page.locator(f'[data-live="patch"] [name="{name}"]').fill(value)
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-fact="metric"]')
    clean, base = DECODER.sentence(OTHER), DECODER.sentence(TEXT)
    result = bt.sweep(clean, base, at="x", metric={"y_2": ("dog", "cat")})
    cells = page.locator('[data-live="patch"] .cell')
    read = "all => all.map(cell => [cell.dataset.name, Number(cell.dataset.weight)])"
    effects = dict(cells.evaluate_all(read))
    assert effects == pytest.approx(
        {name: float(result.values[index]) for index, name in result.names.items()}, abs=1e-5
    )
    for cell in cells.all():
        shown, effect = cell.inner_text(), float(cell.get_attribute("data-weight"))
        assert float(shown.replace("−", "-")) == pytest.approx(effect, abs=0.006 * max(map(abs, effects.values())))
        cell.hover()
        assert page.locator('[data-live="patch"] [data-fact="cell"]').inner_text().endswith(f": {shown}")
    largest = page.locator('[data-live="patch"] .name').evaluate_all("all => all.map(cell => cell.dataset.name)")
    assert 0 < len(largest) <= 3 and all(effects[name] for name in largest)
    page.emulate_media(media="print")
    assert not any(part.is_visible() for part in page.locator("form, [data-live='lens'], .live-message").all())
    assert page.locator('[data-live="patch"] table').is_visible()
    page.emulate_media(media="screen")
    page.locator('[data-live="patch"] .cell[data-name="x_1_1"]').click()
    assert fact(page, "name") == "x_1_1"
    with wait_until_updated(page):
        page.locator('[data-action="other"]').click()
    choose(page, "x_2_2")
    after = base.do(x_1_1=clean)
    changed = float(page.locator('[data-fact="change"]').get_attribute("data-weight"))
    assert changed == pytest.approx(float((after["x_2_2"] - base["x_2_2"]).norm() / base["x_2_2"].norm()), abs=1e-5)


@pytest.mark.slow
def test_a_patch_of_a_net_with_several_stacks_has_a_cell_for_each_word_of_the_stack(open_tab):
    page = open_tab("encoder-decoder", "the cat sat | le chat", other="sat cat the | chat le")
    page.wait_for_selector('[data-fact="metric"]')
    words = page.locator('[data-live="patch"] tbody bdi').all_inner_texts()
    assert words == ["the ← sat", "cat", "sat ← the"]
    names = page.locator('[data-live="patch"] .cell').evaluate_all("all => all.map(cell => cell.dataset.name)")
    assert set(names) == {f"enc_x_{t}_{i}" for t in range(3) for i in range(3)}


@pytest.mark.slow
def test_the_lens_and_contributions_are_those_of_the_sentence(open_tab):
    page = open_tab("decoder")
    page.locator('[data-action="lens"]').click()
    page.wait_for_selector('[data-live="lens"] .cell')
    s = DECODER.sentence(TEXT)
    lens = s.lens()
    for t, state in enumerate(lens.states):
        for word in range(3):
            ((label, probability),) = lens.top(t, word, 1)
            cell = page.locator(f'[data-live="lens"] .cell[data-name="{state}_{word}"]')
            assert cell.inner_text() == label
            assert float(cell.get_attribute("data-weight")) == pytest.approx(probability, abs=1e-6)
    choose(page, "y_2")
    for name, value in (("first", "cat"), ("second", "sat")):
        page.locator(f'[data-live="contributions"] [name="{name}"]').fill(value)
    with wait_until_updated(page):
        page.keyboard.press("Enter")
    table = page.locator('[data-part="contributions"]')
    result = s.contributions("y_2", of=("cat", "sat"))
    assert float(table.get_attribute("data-total")) == pytest.approx(float(result.value), abs=1e-5)
    parts = table.locator("tbody tr").evaluate_all("all => all.map(row => Number(row.dataset.weight))")
    assert np.allclose(parts, [part for _, part in result.top(len(parts))], atol=1e-5)


# the address


@pytest.mark.slow
def test_a_fragment_restores_the_state_and_has_no_token(open_tab, url):
    page = open_tab("selector")
    token = url.partition("=")[2]
    choose(page, "y_0")
    page.locator('[data-action="observe"] input').fill("2")
    with wait_until_updated(page):
        page.keyboard.press("Enter")
    page.locator('[name="top"]').fill("2")
    page.wait_for_url(lambda url: "top" in url)
    address = page.evaluate("location.href")
    assert token not in address and fragment(page)["selected"] == "y_0" and fragment(page)["view"] == {"top": 2}
    assert page.evaluate("document.body.innerHTML").count(token) == 0
    second = open_tab(address=url + "#" + address.partition("#")[2])
    assert fact(second, "name") == "y_0" and fact(second, "kind") == "observed"
    assert second.locator('[name="top"]').input_value() == "2"
    second.keyboard.press("Escape")
    expected = SELECTOR.sentence(TEXT).observe(y_0=2).posterior("c")
    assert np.allclose(posterior(second, "c"), expected.numpy(), atol=1e-5)
    with wait_until_updated(second):
        second.reload()
    assert np.allclose(posterior(second, "c"), expected.numpy(), atol=1e-5)
    with wait_until_updated(page):
        page.locator('[data-command="back"]').click()  # undo changes the evidence and not the view
    assert page.locator('[name="top"]').input_value() == "2" and fragment(page)["view"] == {"top": 2}
    assert "evidence" not in fragment(page)


@pytest.mark.slow
def test_without_the_token_the_page_asks_for_it(open_tab, url):
    for address in (url.partition("?")[0], url.partition("=")[0] + "=wrong"):
        page = open_tab(address=address, ready='[name="token"]')
        assert "token" in page.locator(".live-message").inner_text() and not page.locator(".node").count()
        page.locator('[name="token"]').fill(url.partition("=")[2])
        page.keyboard.press("Enter")
        page.wait_for_selector(".node")
        assert not page.locator(".live-message").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("hash_", ["#x", "#%7B%22steps%22%3A3%7D", "#%FF", "#[]", '#{"unknown":1}'])
def test_a_fragment_that_is_no_state_is_one_line(open_tab, url, hash_):
    page = open_tab(address=url + hash_)
    page.wait_for_selector(".live-message:not(:empty)")
    assert "address" in page.locator(".live-message").inner_text()
    assert page.locator(".word").count() == 6  # an example is shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"model": "nobody", "text": TEXT}, "nobody"),
        ({"model": "decoder", "text": TEXT, "steps": [{"do": [["x_9_0", {"set": "zero"}]]}]}, "x_9_0"),
        ({"model": "decoder", "text": TEXT, "evidence": {"y_0": "zebra"}}, "zebra"),
        ({"model": "decoder", "text": TEXT, "evidence": {"x_1_0": "1,2"}}, "x_1_0"),
    ],
)
def test_a_state_that_the_server_rejects_is_one_line_and_stays_in_the_address(open_tab, state, match):
    fields = dict(state)
    page = open_tab(fields.pop("model"), fields.pop("text"), ready=".live-message:not(:empty)", **fields)
    assert match in page.locator(".live-message").inner_text() and fragment(page) == state
    assert page.locator(".word").count() == 6


@pytest.mark.slow
def test_another_model_shows_the_sentence_or_an_example(open_tab):
    page = open_tab()
    assert fragment(page) == {"model": "selector", "text": "the cat sat on the mat"}
    with page.expect_response(lambda response: response.status == 200 and response.url.endswith("/api/page")):
        page.locator('[name="model"]').select_option("decoder")
    page.wait_for_selector(".live-message:not(:empty)")
    assert "on" in page.locator(".live-message").inner_text() and fragment(page) == {"model": "decoder", "text": TEXT}
    assert page.locator('[name="text"]').input_value() == TEXT and page.locator(".word").count() == 3
    with wait_until_updated(page):
        page.locator('[name="model"]').select_option("selector")
    assert fragment(page) == {"model": "selector", "text": TEXT} and not page.locator(".live-message").inner_text()
    with wait_until_updated(page):
        page.locator('[name="text"]').fill("")
        page.keyboard.press("Enter")
    assert page.locator(".word").count() == 6


@pytest.mark.slow
def test_a_model_that_loads_is_named_and_can_be_cancelled(open_tab):
    gate.clear()
    page = open_tab("decoder")
    page.locator('[name="model"]').select_option("slower")
    page.wait_for_selector('.live-progress [role="status"]:has-text("loading slower")')
    page.locator('[data-command="cancel"]').click()
    page.wait_for_selector('.live-message:has-text("cancelled")')
    assert page.locator(".live-progress p").is_hidden() and page.locator('[name="model"]').input_value() == "decoder"
    page.locator('[name="model"]').select_option("slower")
    page.wait_for_selector('.live-progress [role="status"]:has-text("loading slower")')
    page.locator('[name="model"]').select_option("selector")  # is not delayed by the load
    page.wait_for_selector('.panel h2:has-text("the cat sat")')
    page.wait_for_selector(".live:not(.running)")
    assert fragment(page)["model"] == "selector" and page.locator(".live-progress p").is_hidden()
    gate.set()


# hostile input, slow models and closed tabs


@pytest.mark.slow
def test_bad_input_is_one_line_and_changes_nothing(open_tab):
    page = open_tab("decoder")
    before = page.evaluate("location.hash")
    for text in (*HOSTILE, "the zebra", "the " * 31, "x" * 2000):
        page.locator('[name="text"]').fill(text)
        with page.expect_response(lambda response: response.url.endswith("/api/page")) as response:
            page.locator(".live-form button[type=submit]").click()
        assert response.value.status == 422, text
        page.wait_for_selector(".live-message:not(:empty)")
        line = page.locator(".live-message").inner_text()
        assert line and "\n" not in line and page.evaluate("location.hash") == before, text
        assert not page.locator(".live-message *").count() and "hacked" not in page.title()
        assert page.locator(".word").count() == 3
    with wait_until_updated(page):
        page.locator('[name="text"]').fill(OTHER)
        page.keyboard.press("Enter")
    assert page.locator(".live-message").inner_text() == ""


@pytest.mark.slow
def test_a_slow_model_does_not_delay_another_tab_and_a_closed_tab_is_no_problem(open_tab, browser, url):
    gate.clear()
    slow = open_tab("slow", ready=None)
    closed = LiveTab(browser, url, {"model": "slow", "text": TEXT})
    page = open_tab("decoder")
    assert page.locator(".word").count() == 3 and not slow.locator(".node").count()
    closed.context.close()
    with wait_until_updated(page):
        page.locator('[name="text"]').fill(OTHER)
        page.keyboard.press("Enter")
    gate.set()
    slow.wait_for_selector(".node")
    assert slow.locator(".word").count() == 3


SLOW_ANSWERS = """() => {
  const fetchAtOnce = window.fetch;
  window.fetch = async (address, options) => {
    await new Promise((resolve, reject) => {
      setTimeout(resolve, 500);
      options.signal?.addEventListener("abort", () => reject(options.signal.reason));
    });
    return fetchAtOnce(address, options);
  };
}"""


def click_twice(page, *selectors):
    """Click two elements before the answer to the first click arrives."""
    for selector in selectors:
        page.evaluate("selector => document.querySelector(selector).click()", selector)
        page.wait_for_timeout(50)


def wait_until_idle(page):
    page.wait_for_timeout(100)
    page.wait_for_selector(".live:not(.running)")
    page.wait_for_timeout(100)


@pytest.mark.slow
def test_a_change_before_an_answer_follows_the_awaited_state(open_tab):
    page = open_tab("decoder")
    page.evaluate(SLOW_ANSWERS)
    click_twice(page, '[data-switch="a_0_0"]', '[data-switch="a_0_1"]')
    page.locator('[data-node="x_2_2"]').dispatch_event("click")  # while the answer is awaited
    wait_until_idle(page)
    off = [{"do": [[f"a_0_{head}_*", {"set": "zero"}]]} for head in (0, 1)]
    assert fragment(page)["steps"] == off and fragment(page)["selected"] == "x_2_2" and fact(page, "name") == "x_2_2"
    page.keyboard.press("Escape")
    click_twice(page, '[data-command="back"]', '[data-switch="a_1_1"]')
    wait_until_idle(page)
    assert fragment(page)["steps"] == [{"do": [["a_1_1_*", {"set": "zero"}]]}]


@pytest.mark.slow
def test_undo_stays_on_the_page_and_changes_nothing_if_it_is_cancelled(open_tab):
    page = open_tab("decoder")
    with wait_until_updated(page):
        page.locator('[data-switch="a_0_0"]').click()
    changed = fragment(page)
    page.evaluate(SLOW_ANSWERS)
    page.locator('[data-command="back"]').click()
    page.wait_for_timeout(100)
    page.evaluate("document.querySelector('[data-command=\"cancel\"]').click()")
    wait_until_idle(page)
    assert fragment(page) == changed and page.locator('[data-command="forward"]').is_disabled()
    page.locator('[data-node="x_1_1"]').dispatch_event("click")
    assert fragment(page) == changed | {"selected": "x_1_1"}
    click_twice(page, '[data-command="back"]', '[data-command="back"]')  # there is only one change
    wait_until_idle(page)
    assert "steps" not in fragment(page) and page.locator(".node").count()
    page.reload()
    page.wait_for_selector(".node", state="attached")
    with wait_until_updated(page):
        page.locator('[data-command="forward"]').click()
    assert fragment(page)["steps"] == changed["steps"]


@pytest.mark.slow
def test_typed_text_stays_when_a_table_arrives_and_a_patch_is_removed_with_its_undo(open_tab):
    steps = [{"do": [["x_1_1", {"set": "other"}], ["x_1_0", {"set": "zero"}]]}, {"undo": ["x_1_1"]}]
    page = open_tab("decoder", other=OTHER, steps=steps)
    page.wait_for_selector('[data-live="patch"] .cell')
    with wait_until_updated(page):
        page.locator('[data-action="unpatch"]').click()
    assert fragment(page)["steps"] == [{"do": [["x_1_0", {"set": "zero"}]]}] and "other" not in fragment(page)
    page.evaluate(SLOW_ANSWERS)
    page.locator('[data-action="lens"]').click()
    page.locator('[data-live="patch"] [name="other"]').fill("the dog")
    page.locator('[data-live="patch"] [name="first"]').fill("a state")
    page.wait_for_selector('[data-live="lens"] .cell')
    values = [page.locator(f'[data-live="patch"] [name="{name}"]').input_value() for name in ("other", "first")]
    assert values == ["the dog", "a state"]


@pytest.mark.slow
def test_a_newer_sentence_replaces_one_that_is_computed(open_tab):
    page = open_tab("decoder")
    for text in ("the a", "the cat", "the dog", "the dog sat"):
        page.locator('[name="text"]').fill(text)
        page.locator(".live-form button[type=submit]").click()
    page.wait_for_selector('.panel h2:has-text("the dog sat")')
    page.wait_for_timeout(300)
    assert page.locator(".word").count() == 3 and fragment(page)["text"] == "the dog sat"
    assert page.locator(".live-message").inner_text() == ""


@pytest.mark.slow
def test_a_foreign_page_can_neither_read_nor_embed_the_server(browser, url):
    page = browser.new_context().new_page()
    page.goto("data:text/html,<title>foreign</title>")
    origin, token = url.partition("/?")[0], url.partition("=")[2]
    fetching = """async ([url, token]) => { try { const response = await fetch(url + "/api/models",
      { headers: { authorization: "Bearer " + token } }); return response.status; } catch { return "blocked"; } }"""
    assert page.evaluate(fetching, [origin, token]) == "blocked"
    page.evaluate(
        "url => { const e = document.createElement('iframe'); e.src = url; document.body.append(e); }", origin
    )
    page.wait_for_timeout(500)
    assert not [frame for frame in page.frames if frame.locator("#serve").count()]
    page.context.close()


# layout, and the file for others


@pytest.mark.slow
def test_the_saved_file_shows_the_same_without_a_server(open_tab, browser, tmp_path):
    page = open_tab("selector", evidence={"y_1": 3}, steps=[{"do": [["x_1_0", {"set": "zero"}]]}])
    name, content = download_file(page, page.locator('[data-command="save"]').click)
    assert name == "bnet.html" and b"token=" not in content
    file = tmp_path / name
    file.write_bytes(content)
    saved = browser.new_context().new_page()
    saved.goto(file.as_uri())
    saved.wait_for_selector(".node")
    assert posterior(saved, "c") == posterior(page, "c")
    choose(saved, "x_1_0")
    assert fact(saved, "kind") == "set by do" and not saved.locator("[data-action]").count()
    saved.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 700, 1400, 3840])
def test_no_part_of_the_page_is_wider_than_the_window(open_tab, width):
    page = open_tab("decoder", other=OTHER, lens=True, size=(width, 800))
    page.wait_for_selector('[data-live="lens"] .cell')
    page.wait_for_selector('[data-fact="metric"]')
    overflowing = """() => [...document.querySelectorAll('.live *:not(.view *):not(.scroller *):not(.status)')]
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(overflowing) == [] and page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 360:
        page.locator('[data-command="settings"]').click()
    page.locator('[name="theme"]').select_option("dark")
    background = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor"
    assert page.evaluate(background, ".live") == page.evaluate(background, ".live-content > .bnet")


NAMED = {"button", "checkbox", "combobox", "gridcell", "searchbox", "slider", "spinbutton", "table", "textbox"}


@pytest.mark.slow
def test_a_screen_reader_gets_names_headers_and_answers(open_tab):
    page = open_tab("decoder", other=OTHER, lens=True)
    page.wait_for_selector('[data-live="lens"] .cell')
    page.wait_for_selector('[data-fact="metric"]')
    session = page.context.new_cdp_session(page)

    def check_tree(*expected):
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
        assert {"grid", "row", "gridcell", "toolbar", "main", "complementary", "status", *expected} <= set(roles)
        for node in nodes:
            names = {item["name"]: item["value"].get("value") for item in node.get("properties", ())}
            if not node["ignored"] and (node["role"]["value"] in NAMED or names.get("focusable")):
                is_document = node["role"]["value"] == "RootWebArea"
                assert is_document or node["name"].get("value"), node
        for table in page.locator("table").all():
            assert table.locator("caption").inner_text().strip()
            assert table.locator("th").evaluate_all(
                "all => all.every((cell) => cell.scope && cell.innerText !== undefined)"
            )

    check_tree("table", "columnheader", "rowheader", "cell")
    choose(page, "y_2")
    with wait_until_updated(page):
        page.locator('[data-action="observe"] input').fill("1")
        page.keyboard.press("Enter")
    focused = "document.activeElement.closest('.panel') !== null"
    assert page.evaluate(focused) and "1 observed" in page.locator(".status").inner_text()
    page.keyboard.press("Escape") if page.evaluate("document.activeElement.tagName") != "INPUT" else None
    choose(page, "x_1_1")
    with wait_until_updated(page):
        page.locator('[data-action="zero"]').focus()
        page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.action") == "undo"  # the button that follows set to zero
    assert "1 set by do" in page.locator(".status").inner_text()
    with wait_until_updated(page):
        page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.action") == "zero"
    check_tree()
    page.locator('[name="text"]').fill("the zebra")
    page.keyboard.press("Enter")
    page.wait_for_selector(".live-message:not(:empty)")
    assert "zebra" in page.get_by_role("alert").inner_text() and page.evaluate("document.activeElement.name") == "text"
    session.detach()
