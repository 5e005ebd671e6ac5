"""The live page without a browser: answers equal those of a sentence, and the server rejects what it must reject."""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
from itertools import chain
from pathlib import Path

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer._core.process import Cancelled, check_cancelled
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.interventions import Zero
from bnet_transformer.page.description import PageOptions, describe_sentence
from bnet_transformer.page.html import bundle_script
from bnet_transformer.serve.answers import (
    Limits,
    SentenceSource,
    compute_lens,
    compute_patch,
    describe_page,
    parse_page_state,
)
from tests.cases import CASES, jitter

pytest.importorskip("starlette", reason='the live page: pip install "bnet-transformer[serve]"')
pytest.importorskip("httpx2", reason="the test client of starlette requires httpx2")
from starlette.testclient import TestClient

from bnet_transformer.serve.server import JobQueue, create_app
from tests.live_server import WORDS, build_decoder, build_selector, run_live_server

TEXT, OTHER = "the cat sat", "the dog sat"
TOKEN, HOST = "secret-token", "127.0.0.1:8765"
LIMITS = Limits(words=12, body=5000)

MODELS = {"decoder": build_decoder, "selector": build_selector}


@pytest.fixture
def source():
    return SentenceSource(MODELS, LIMITS)


def state(**fields):
    return parse_page_state({"model": "decoder", "text": TEXT, **fields}, LIMITS)


def describe(sentence, **options):
    """The description and the buffer of the page that `explore` writes."""
    return describe_sentence(sentence.state, PageOptions(**options))


def check_page(source, sentence, page_state, **options):
    """Check that an answer is the page of a sentence."""
    description, buffer = describe_page(source, "tab", page_state)
    live = description.pop("live")
    assert live["words"] == len(sentence.words) and live["text"] == page_state.text
    expected = describe(sentence, **options)
    if changes := description.pop("relative_changes"):
        for group, values in expected[0].pop("relative_changes").items():
            assert changes[group] == pytest.approx(values, abs=2e-6)
    assert description == {key: expected[0][key] for key in description} and buffer == expected[1]


# answers


TYPED = [case for case in CASES if isinstance(case.text, str | dict)]


@pytest.mark.slow  # the tests below are quick ones of the same
@pytest.mark.parametrize("case", TYPED, ids=lambda case: case.name)
def test_a_page_is_that_of_explore(case):
    source = SentenceSource({"net": lambda: case.net}, Limits())
    is_typed = isinstance(case.text, str) or all(isinstance(text, str) for text in case.text.values())
    if not is_typed:
        pytest.skip("the words of the case are not text")
    text = case.text if isinstance(case.text, str) else " | ".join(case.text.values())
    numbers = {name: value for name, value in case.evidence.items() if isinstance(value, int | str)}
    document = {"model": "net", "text": text, "evidence": numbers}
    sentence = case.sentence.observe(numbers) if numbers else case.sentence
    check_page(source, sentence, parse_page_state(document, Limits()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_net_opens_with_a_sentence_that_it_accepts(case):
    source = SentenceSource({"net": lambda: case.net}, Limits())
    start = parse_page_state({"model": "net"}, Limits())
    stacks, takes_ids = case.net.network.graph.word_stacks, isinstance(case.text, list)
    if takes_ids:  # a text cannot name its words
        with pytest.raises(BNetError, match="ids"):
            source.choose_text("tab", start)
        return
    opened = source.choose_text("tab", start)
    words = [text.split() for text in opened.text.split(" | ")] if stacks else []
    s = source.build("tab", opened).current
    assert list(s.words) == list(chain(*words)) and len(words) == len(stacks) and all(words) and len(s.ground) > 0
    assert source.choose_text("tab", opened) == opened


def test_an_example_has_known_words_and_is_not_too_long():
    source = SentenceSource(MODELS, Limits(words=2))
    net = bt.decoder(8, heads=2, slices=1, vocabulary=["a b", "le", "x|y", "chat", "noir"])
    source.models["chat"] = lambda: net
    opened = [source.choose_text("tab", parse_page_state({"model": name}, Limits())).text for name in source.models]
    assert opened == ["the cat", "the cat", "le chat"]


def test_interventions_are_those_of_the_sentence(source):
    s = build_decoder().sentence(TEXT)
    steps = [{"do": [["x_1_0", {"set": "zero"}]]}]
    check_page(source, s.do(x_1_0=Zero()), state(steps=steps))
    steps.append({"do": [["a_1_0_*", {"set": "zero"}], ["x_0_1", {"set": "node", "from": "x_0_2"}]]})
    after = s.do(x_1_0=Zero())
    after = after.do({"a_1_0_*": Zero(), "x_0_1": after["x_0_2"]})
    check_page(source, after, state(steps=steps))
    steps.append({"undo": ["x_1_0"]})
    check_page(source, after.undo("x_1_0"), state(steps=steps))
    other = [{"do": [["x_1_1", {"set": "other"}]]}]
    patched = s.do(x_1_1=build_decoder().sentence(OTHER))
    check_page(source, patched, state(steps=other, other=OTHER))
    check_page(source, s, state(steps=[*steps, {"undo": []}]))


def test_values_of_earlier_interventions_are_freed(source):
    steps = [{"do": [[f"x_1_{k % 3}", {"set": "node", "from": "x_0_2"}]]} for k in range(7)]
    for count in range(len(steps) + 1):
        sentence = source.build("tab", state(steps=steps[:count])).current
        assert sentence.state.previous is None and sentence.state.evaluator.previous is None
    assert len(source._sentences) <= LIMITS.sentences
    s = build_decoder().sentence(TEXT)
    torch.testing.assert_close(sentence["x_2_2"], s.do({f"x_1_{k}": s["x_0_2"] for k in range(3)})["x_2_2"])


SET_READOUT = [{"do": [["y_2", {"set": "state", "state": 1}]]}]


@pytest.mark.parametrize("fields", [{"steps": SET_READOUT}, {"evidence": {"y_2": 1}}], ids=["do", "evidence"])
def test_a_node_whose_posterior_is_shown_can_be_set_and_observed(source, fields):
    shown = {
        item["node"]: item for item in describe_page(source, "tab", state(posterior=["y_2"], **fields))[0]["posteriors"]
    }
    if "steps" in fields:
        assert "y_2" not in shown
    else:
        assert [row[2] for row in shown["y_2"]["states"]] == [0, 1, 0, 0, 0]


def test_evidence_moves_the_posterior(source):
    s = build_selector().sentence(TEXT)
    page_state = parse_page_state({"model": "selector", "text": TEXT, "evidence": {"y_1": "3"}}, LIMITS)
    check_page(source, s.observe(y_1=3), page_state)
    description, _ = describe_page(source, "tab", page_state)
    (posterior,) = [item for item in description["posteriors"] if item["node"] == "c"]
    for after, row in zip(s.posterior("c", {"y_1": 3}), posterior["states"], strict=True):
        assert row[2] == pytest.approx(float(after), abs=1e-5) and row[1] != row[2]


def test_an_error_of_contributions_is_shown_in_their_section_and_blocks_nothing_else(source):
    question = {"contributions": {"node": "x_1_0"}, "steps": [{"do": [["x_1_0", {"set": "zero"}]]}]}
    description, _ = describe_page(
        source, "tab", parse_page_state({"model": "decoder", "text": TEXT, **question}, LIMITS)
    )
    assert "x_1_0" in description["live"]["contributions_error"]
    assert list(description["interventions"]) == ["x_1_0"] and not description["contributions"]


def test_a_posterior_and_contributions_are_shown_on_request(source):
    s = build_decoder().sentence(TEXT)
    result = s.contributions("y_2", of=("cat", "dog"))
    question = {"node": "y_2", "of": ["cat", "dog"]}
    check_page(source, s, state(posterior=["y_2"], contributions=question), posterior=["y_2"], contributions=result)


@pytest.mark.parametrize("model", ["decoder", "selector"])
def test_contributions_without_a_state_are_those_of_the_most_probable_state_and_choice(source, model):
    s = {"decoder": build_decoder, "selector": build_selector}[model]().sentence(TEXT)
    page_state = parse_page_state({"model": model, "text": TEXT, "contributions": {"node": "y_2"}}, LIMITS)
    description, _ = describe_page(source, "tab", page_state)
    (shown,) = description["contributions"]
    best = int(s.posterior("y_2").argmax())
    if model == "selector":
        choice = int(s.posterior("c").argmax())
        assert f"c = {choice}" in shown["of"]
        s = s.do(c=choice)
    result = s.contributions("y_2", of=best)
    expected = dict(zip([writer.name for writer in result.writers], result.parts.tolist(), strict=True))
    assert {part["writer"]: part["part"] for part in shown["parts"]} == pytest.approx(expected, abs=1e-5)
    assert shown["value"] == pytest.approx(result.value.item(), abs=1e-5)


def test_the_lens_is_that_of_the_sentence(source):
    lens = build_decoder().sentence(TEXT).do(x_1_0=Zero()).lens()
    answer = compute_lens(source, "tab", state(steps=[{"do": [["x_1_0", {"set": "zero"}]]}]))
    assert answer["states"] == list(lens.states)
    for t, word in ((0, 0), (1, 2), (2, 1)):
        ((label, probability),) = lens.top(t, word, 1)
        assert answer["labels"][t][word] == label
        assert answer["probabilities"][t][word] == pytest.approx(probability, abs=1e-6)


def test_the_patch_is_a_sweep_from_the_other_sentence(source):
    net = build_decoder()
    base, other = net.sentence(TEXT), net.sentence(OTHER)
    expected = bt.sweep(other, base, at="x", metric={"y_2": ("dog", "cat")})
    answer = compute_patch(source, "tab", state(other=OTHER, patch={"node": "y_2", "of": ["dog", "cat"]}))
    torch.testing.assert_close(torch.tensor(answer["effects"]), expected.values.float())
    assert answer["metric"] == "log P(y_2 = dog) - log P(y_2 = cat)"
    assert answer["names"] == [[f"x_{t}_{i}" for i in range(3)] for t in range(3)]
    assert answer["before"] == pytest.approx(float(expected.corrupt)) and answer["after"] == pytest.approx(
        float(expected.clean)
    )


def test_a_patch_under_a_choice_that_is_set_has_this_choice_in_both_sentences(source):
    net = build_selector()
    base, other = net.sentence(TEXT).do(c=1), net.sentence(OTHER).do(c=1)
    document = {"model": "selector", "text": TEXT, "other": OTHER, "patch": {"node": "y_2", "of": ["3"]}}
    steps = [{"do": [["c", {"set": "state", "state": 1}]]}]
    answer = compute_patch(source, "tab", parse_page_state({**document, "steps": steps}, LIMITS))
    expected = bt.sweep(other, base, at="x", metric={"y_2": 3})
    torch.testing.assert_close(torch.tensor(answer["effects"]), expected.values.float())
    steps.append({"do": [["x_1_1", {"set": "other"}]]})
    patched = source.build("tab", parse_page_state({**document, "steps": steps}, LIMITS)).current
    torch.testing.assert_close(patched["x_2_2"], base.do(x_1_1=other)["x_2_2"])


@pytest.mark.parametrize("role", ["x", "a"])
def test_a_patch_without_a_readout_measures_the_position_between_both_values(source, role):
    net = build_decoder()
    base, other = net.sentence(TEXT), net.sentence(OTHER)
    answer = compute_patch(source, "tab", state(other=OTHER, patch={"node": "x_2_2"}, roles=role))
    assert answer["before"] == pytest.approx(0, abs=1e-6) and answer["after"] == pytest.approx(1, abs=1e-6)
    name = f"{role}_1_1" if role == "x" else "a_1_*_1"
    difference = other["x_2_2"] - base["x_2_2"]
    moved = base.do({name: other})["x_2_2"] - base["x_2_2"]
    expected = float(moved @ difference / difference.square().sum())
    assert answer["effects"][1][1] == pytest.approx(expected, abs=1e-5)


def get_case(name):
    return next(case for case in CASES if case.name == name)


def patch_case(net, text, other, **fields):
    """The answer of a patch of a net, with the default metric and the default role."""
    document = {"model": "net", "text": text, "other": other, **fields}
    return compute_patch(SentenceSource({"net": lambda: net}, Limits()), "tab", parse_page_state(document, Limits()))


@pytest.mark.parametrize(("role", "words"), [("enc_x", (0, 3)), ("dec_x", (3, 5)), ("dec_cross_k", (0, 3))])
def test_a_patch_has_the_words_of_the_stack_whose_nodes_are_patched(role, words):
    text, other = "the cat sat | le chat", "sat cat the | chat le"
    answer = patch_case(get_case("encoder-decoder").net, text, other, roles=role)
    words = slice(*words)
    assert answer["words"] == text.replace("| ", "").split()[words]
    assert answer["other_words"] == other.replace("| ", "").split()[words]
    assert {len(row) for row in (*answer["names"], *answer["effects"])} == {len(answer["words"])}
    with pytest.raises(BNetError, match="3 words of enc"):  # also if the sum of the words is the same
        patch_case(get_case("encoder-decoder").net, text, "the cat | le chat noir")


@pytest.mark.parametrize("case", TYPED, ids=lambda case: case.name)
def test_a_default_patch_is_a_table_or_one_error_in_the_words_of_the_page(case):
    texts = [case.text] if isinstance(case.text, str) else list(case.text.values())
    if not all(isinstance(text, str) for text in texts):
        pytest.skip("the words of the case are not text")
    other = " | ".join(" ".join(reversed(text.split())) for text in texts)
    try:
        answer = patch_case(case.net, " | ".join(texts), other)
    except BNetError as error:
        assert error.subject in ("patch", "other sentence") or error.expected == "one value"
        return
    assert all(len(row) == len(answer["words"]) for row in answer["names"])
    if answer["metric"].startswith("position"):
        assert answer["before"] == pytest.approx(0, abs=1e-5) and answer["after"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dim", [1, 3])
def test_the_position_of_a_vector_with_a_latent_choice_needs_its_state(dim):
    net = jitter(bt.bayesuvius(dim, slices=2, heads=3), 0.5)
    with pytest.raises(BNetError, match=r"one value of x_2_2.*do\(c = "):
        patch_case(net, TEXT, OTHER)
    steps = [{"do": [["c", {"set": "state", "state": 1}]]}]
    answer = patch_case(net, TEXT, OTHER, steps=steps)
    assert patch_case(net, TEXT, OTHER, steps=steps, patch={"node": "x_2_-1"}) == answer
    base, other = (net.sentence(text).do(c=1) for text in (TEXT, OTHER))
    start, end = base["x_2_2"], other["x_2_2"]
    moved = base.do(x_1_1=other)["x_2_2"]
    expected = float((moved - start) @ (end - start) / (end - start).square().sum())
    assert answer["effects"][1][1] == pytest.approx(expected, abs=1e-5)


# bad input


REJECTED = [
    ([], "an object"),
    ({"model": "nobody"}, "known name"),
    ({"text": "the " * 13}, "at most 12 words"),
    ({"text": "x" * 481}, "characters"),
    ({"text": "a \0"}, "UTF-8"),
    ({"text": "a \ud800"}, "UTF-8"),
    ({"text": 3}, "a text"),
    ({"text": "the zebra"}, "zebra"),
    ({"unknown": 3}, "unknown"),
    ({"steps": [{"do": [["nobody", {"set": "zero"}]]}]}, "nobody"),
    ({"steps": [{"do": [["x_1_0", {"set": "eval"}]]}]}, "setting"),
    ({"steps": [{"do": [["x_1_0", "zero"]]}]}, "message"),
    ({"steps": [{"do": [["x_1_0", {"set": "node", "from": "x_1_0"}]]}]}, "another node"),
    ({"steps": [{"do": [["x_1_0", {"set": "node", "from": "x_1_-3"}]]}]}, "another node"),
    ({"steps": [{"do": [["x_1", {"set": "node", "from": "x_1_*"}]]}]}, "another node"),
    ({"steps": [{"do": [["x_1_*", {"set": "node", "from": "x_1"}]]}]}, "another node"),
    ({"steps": [{"do": [["x_1_0", {"set": "node", "from": None}]]}]}, "known name"),
    ({"steps": [{"do": [["x_1_0", {"set": "other"}]]}]}, "another sentence"),
    ({"steps": [{"undo": ["x_1_0"]}]}, "undo"),
    ({"steps": [{"undo": [["x_1_0"]]}]}, "known name"),
    ({"steps": [{"undo": []}] * 65}, "at most 64"),
    ({"evidence": {"y_1": [1]}}, "index of a state"),
    ({"evidence": {"y_1": "zebra"}}, "zebra"),
    ({"evidence": {"y_9": 1}}, "y_9"),
    *(({"evidence": {"y_1": text}}, "y_1") for text in ("١", "²", "+1", "1_0", " 1", "1 ", "1.0")),
    ({"posterior": ["x_1_1"]}, "discrete"),
    ({"contributions": {"node": "y_2", "of": ["a", "cat", "sat"]}}, "two states"),
]


@pytest.mark.parametrize(("fields", "match"), REJECTED, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_clear_error(source, fields, match):
    document = fields if isinstance(fields, list) else {"model": "decoder", "text": TEXT, **fields}
    with pytest.raises(BNetError, match=match):
        describe_page(source, "tab", parse_page_state(document, LIMITS))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "another sentence"),
        ({"other": "the dog"}, "3 words"),
        ({"other": TEXT}, "words that differ"),
        ({"other": OTHER, "evidence": {"y_2": 1}}, "no evidence.*evidence on y_2.*Remove"),
        ({"other": OTHER, "patch": {"node": "x_2_2", "of": ["cat"]}}, "no states"),
        ({"other": OTHER, "patch": {"node": "x_2_0"}}, "differs"),
        ({"other": OTHER, "patch": {"node": "x_*_2"}}, "one node.*x_0_2 to x_2_2"),
        ({"other": OTHER, "roles": "nobody"}, "nobody"),
        ({"other": OTHER, "patch": {"node": "y_2", "of": ["dog", "dog"]}}, "two different states"),
        ({"other": OTHER, "patch": {"node": "y_2", "of": ["dog", str(WORDS.index("dog"))]}}, "two different states"),
    ],
)
def test_a_patch_that_cannot_be_computed_is_one_clear_error(source, fields, match):
    with pytest.raises(BNetError, match=match):
        compute_patch(source, "tab", state(**{"patch": {"node": "x_2_2"}, **fields}))


def test_expensive_work_is_rejected_before_it_starts():
    source = SentenceSource(MODELS, Limits(flops=1e3))
    with pytest.raises(BudgetError, match="operations"):
        describe_page(source, "tab", state())
    source = SentenceSource(MODELS, Limits(flops=2e4))
    describe_page(source, "tab", state())
    with pytest.raises(BudgetError, match="operations"):
        compute_patch(source, "tab", state(other=OTHER, patch={"node": "y_2", "of": ["dog"]}))


# the server


@pytest.fixture
def client():
    with TestClient(create_app(MODELS, token=TOKEN, hosts=[HOST], limits=LIMITS), base_url=f"http://{HOST}") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


def send(client, kind="page", tab="tab", headers=None, **fields):
    document = {"tab": tab, "state": {"model": "decoder", "text": TEXT, **fields}}
    return client.post(f"/api/{kind}", json=document, headers=headers)


def unpack(content):
    """The description and the buffer of an answer."""
    length = int.from_bytes(content[:4], "little")
    return json.loads(content[4 : 4 + length]), content[4 + length :]


def test_an_answer_has_the_page_and_its_buffer(client):
    response = send(client)
    description, buffer = unpack(response.content)
    assert response.status_code == 200 and buffer == describe(build_decoder().sentence(TEXT))[1]
    assert description["stacks"][0]["words"] == TEXT.split()
    models = client.get("/api/models").json()
    assert models["models"] == ["decoder", "selector"] and models["max_words"] == 12 and "decoder" in models["loaded"]
    assert unpack(send(client, text=" ").content)[0]["live"]["text"] == "the cat sat"
    page = send(client, "file")
    assert page.text.startswith("<!doctype html>") and TOKEN not in page.text
    assert send(client, "lens").json()["readout"] == "y"
    assert send(client, "patch", other=OTHER, patch={"node": "x_2_2"}).json()["after"] == pytest.approx(1)


def test_the_shell_needs_no_token_and_contains_no_secret(client):
    del client.headers["authorization"]
    for path in ("/", "/serve.js", "/serve.css"):
        response = client.get(path)
        assert response.status_code == 200 and TOKEN not in response.text and "decoder" not in response.text
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert response.headers["referrer-policy"] == "no-referrer"
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert "<script>" not in client.get("/").text and "onclick" not in client.get("/").text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"bearer {TOKEN}"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1:1"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"https://{HOST}"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
    ids=str,
)
def test_foreign_hosts_origins_and_tokens_are_rejected(client, headers, status):
    response = send(client, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert list(response.json()) == ["error"] and "\n" not in response.json()["error"]


def test_a_token_in_the_address_is_not_accepted(client):
    del client.headers["authorization"]
    assert client.get(f"/api/models?token={TOKEN}").status_code == 401


def test_a_large_body_is_rejected_with_and_without_its_length(client):
    assert send(client, text="x" * 6000).status_code == 413

    def stream():
        for _ in range(20):
            yield b"x" * 1000

    assert client.post("/api/page", content=stream()).status_code == 413
    assert send(client).status_code == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 4000, b'{"tab": 1}', b'{"tab": "", "state": {}}'])
def test_a_body_that_is_no_request_is_one_line(client, body):
    response = client.post("/api/page", content=body)
    assert response.status_code == 422 and "expected" in response.json()["error"]


def test_bad_input_is_one_line_on_the_page_and_in_the_log_and_the_server_continues(client, caplog):
    hostile = "\x1b[2J</script>\u202e\n"
    with caplog.at_level(logging.WARNING):
        response = send(client, text=f"the {hostile}")
    line = response.json()["error"]
    assert response.status_code == 422 and "\n" not in line and "\x1b" not in line and "\u202e" not in line
    (record,) = caplog.records
    assert record.getMessage() == f"422 {line}"
    assert send(client).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api/nobody", 404), ("GET", "/api/page", 405), ("POST", "/api/models", 405), ("POST", "/api/page/", 404)],
)
def test_an_unknown_path_or_method_is_one_line_on_the_page_and_in_the_log(client, caplog, method, path, status):
    with caplog.at_level(logging.WARNING):
        response = client.request(method, path, follow_redirects=False)
    assert response.status_code == status and path in response.json()["error"]
    (record,) = caplog.records
    assert record.getMessage() == f"{status} {response.json()['error']}"
    assert ("allow" in response.headers) == (status == 405)


def test_an_error_of_the_library_is_one_line_and_its_traceback_is_in_the_log(caplog):
    loads = []

    def fail():
        loads.append(time.monotonic())
        raise RuntimeError("a bug\x1b[2J")

    app = create_app({"net": fail, "decoder": build_decoder}, token=TOKEN, hosts=[HOST])
    with TestClient(app, base_url=f"http://{HOST}") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        response = send(client, model="net")
        assert len(loads) <= 2  # at the start, and by the request
        assert response.status_code == 500 and "a bug" not in response.json()["error"]
        assert any("a bug" in record.getMessage() for record in caplog.records)
        assert not any("\x1b" in record.getMessage() for record in caplog.records)
        assert send(client).status_code == 200


# jobs


async def wait_forever():
    await asyncio.Event().wait()


def run_until(event):
    """A function that runs until an event, or until its job is cancelled."""
    while not event.wait(0.005):
        check_cancelled()
    return "done"


def test_two_tabs_do_not_wait_for_each_other():
    async def scenario():
        queue, event = JobQueue(2, 9), threading.Event()
        slow = asyncio.create_task(queue.run("first", "page", lambda: run_until(event), wait_forever))
        await asyncio.sleep(0.02)
        assert await queue.run("second", "page", lambda: "quick", wait_forever) == "quick"
        assert not slow.done()
        event.set()
        assert await slow == "done"
        assert not queue._tabs and not queue._tasks
        queue.close()

    asyncio.run(scenario())


def test_a_newer_request_of_a_tab_and_a_disconnect_cancel_a_job():
    async def scenario():
        queue, event, left = JobQueue(2, 9), threading.Event(), asyncio.Event()
        stopped = []

        def run():
            try:
                return run_until(event)
            except Cancelled:
                stopped.append(time.monotonic())
                raise

        old = asyncio.create_task(queue.run("tab", "page", run, wait_forever))
        lens = asyncio.create_task(queue.run("tab", "lens", run, wait_forever))
        await asyncio.sleep(0.02)
        assert await queue.run("tab", "page", lambda: "new", wait_forever) == "new"
        for task in (old, lens):
            with pytest.raises(Cancelled):
                await task
        assert len(stopped) == 1  # the lens waited, and never started
        closed = asyncio.create_task(queue.run("tab", "page", run, left.wait))
        await asyncio.sleep(0.02)
        left.set()
        with pytest.raises(Cancelled):
            await closed
        while queue._tabs:
            await asyncio.sleep(0.005)
        assert len(stopped) == 2
        queue.close()

    asyncio.run(scenario())


def test_a_job_that_waits_for_its_input_needs_no_thread_and_leaves_its_tab_when_it_is_cancelled():
    async def scenario():
        queue, left = JobQueue(1, 9), asyncio.Event()
        slow = asyncio.create_task(queue.run("tab", "page", lambda: 1, left.wait, wait_forever))
        await asyncio.sleep(0)
        assert await queue.run("other", "page", lambda: "quick", wait_forever) == "quick"
        lens = asyncio.create_task(queue.run("tab", "lens", lambda: "lens", wait_forever))
        left.set()
        with pytest.raises(Cancelled):
            await slow
        assert await asyncio.wait_for(lens, 5) == "lens"

        async def fail():
            raise FileNotFoundError("no such folder")

        with pytest.raises(FileNotFoundError):
            await queue.run("tab", "page", lambda: 1, wait_forever, fail)
        assert not queue._tabs and not queue._tasks
        queue.close()

    asyncio.run(scenario())


def test_too_many_requests_are_rejected():
    async def scenario():
        queue, event = JobQueue(1, 2), threading.Event()
        tasks = [
            asyncio.create_task(queue.run(f"{k}", "page", lambda: run_until(event), wait_forever)) for k in range(2)
        ]
        await asyncio.sleep(0.02)
        with pytest.raises(BNetError, match="busy"):
            await queue.run("other", "page", lambda: 1, wait_forever)
        event.set()
        assert await asyncio.gather(*tasks) == ["done"] * 2
        queue.close()

    asyncio.run(scenario())


def test_a_slow_model_delays_neither_its_tab_nor_others_if_more_tabs_than_threads_wait_for_it():
    started, finish = threading.Event(), threading.Event()
    tabs = [f"slow {k}" for k in range(Limits().threads + 1)]

    def load():
        started.set()
        finish.wait(20)
        return build_decoder()

    app = create_app({"decoder": build_decoder, "slow": load}, token=TOKEN, hosts=[HOST])
    with TestClient(app, base_url=f"http://{HOST}") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        responses = {}

        def request(tab):
            responses[tab] = send(client, tab=tab, model="slow").status_code

        threads = [threading.Thread(target=request, args=(tab,)) for tab in tabs]
        for thread in threads:
            thread.start()
        assert started.wait(20)
        time.sleep(0.1)  # until all of them wait
        assert send(client, tab="other").status_code == 200 and not responses
        assert client.get("/api/models").json()["loaded"] == ["decoder"]
        assert send(client, tab=tabs[0]).status_code == 200  # a newer request of the tab cancels the one that waits
        threads[0].join(20)
        assert responses == {tabs[0]: 499}
        finish.set()
        for thread in threads[1:]:
            thread.join(20)
        assert [responses[tab] for tab in tabs[1:]] == [200] * len(tabs[1:])
        assert client.get("/api/models").json()["loaded"] == ["decoder", "slow"]


def test_a_model_that_failed_is_loaded_again(caplog):
    results = [FileNotFoundError("no such folder"), TimeoutError("too late"), None]

    def load():
        error = results.pop(0)
        if error:
            raise error
        return build_decoder()

    source = SentenceSource({"net": load}, LIMITS)
    for match in ("folder", "late"):
        with pytest.raises(OSError, match=match):
            source.get_net("net")
    assert source.list_loaded() == [] and source.get_net("net") is source.get_net("net")


# a real server


def connect(url):
    """A connection to the server, and its port."""
    port = int(re.search(r":(\d+)/", url)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=20), port


def build_request(url, port, body=b"", length=None):
    token = url.partition("=")[2]
    head = f"POST /api/page HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
    framing = (
        f"Content-Length: {len(body) if length is None else length}"
        if length != "chunked"
        else ("Transfer-Encoding: chunked")
    )
    return f"{head}{framing}\r\n\r\n".encode() + body


def receive_status(connection):
    """The status of an answer, of which the first bytes are received."""
    return int(connection.recv(64).split()[1])


def request_status(url):
    """The status of the answer to a valid request on a new connection."""
    connection, port = connect(url)
    with connection:
        connection.sendall(build_request(url, port, BODY))
        return receive_status(connection)


def read_memory():
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BODY = json.dumps({"tab": "tab", "state": {"model": "decoder", "text": TEXT}}).encode()


def is_dropped(connection):
    """Whether the server ends a connection; the rest of an answer is read before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**20):
            pass
    return True  # otherwise `recv` raises TimeoutError


def send_bytes(connection, data):
    """Send a byte from time to time, until the server ends the connection."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
        pytest.fail("the server received all bytes")


def test_a_request_that_does_not_arrive_in_time_ends_its_connection(caplog):
    """Its head or its body is sent a byte at a time, or stalls, also after another request of the connection."""
    with run_live_server(MODELS, Limits(transfer_seconds=0.4)) as url:
        for first in (b"", b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n"):
            for stalled in (b"", b"POST /api/page HTTP/1.1\r\nHost:", build_request(url, 0, b"{", 500)):
                connection, port = connect(url)
                with connection:
                    connection.sendall(first.replace(b"%s", f"127.0.0.1:{port}".encode()))
                    connection.sendall(stalled.replace(b"127.0.0.1:0", f"127.0.0.1:{port}".encode()))
                    assert is_dropped(connection)
        connection, port = connect(url)
        with connection:
            send_bytes(connection, build_request(url, port, BODY * 20))
        connection, port = connect(url)
        with connection:
            connection.sendall(build_request(url, port, b"", 5000))
            send_bytes(connection, b"x" * 5000)
        assert request_status(url) == 200


def test_the_computation_of_an_answer_may_take_longer_than_its_transfer():
    def load():
        time.sleep(0.5)
        return build_decoder()

    with run_live_server({"decoder": load}, Limits(transfer_seconds=0.1)) as url:
        assert request_status(url) == 200


@pytest.mark.slow
def test_an_answer_that_is_not_read_ends_its_connection_and_one_that_is_read_slowly_does_not():
    with run_live_server(MODELS, Limits(transfer_seconds=1)) as url:
        connection, port = connect(url)
        request = f"GET /serve.js HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        total = 100 * len(bundle_script("serve"))  # more than the buffers of both sockets
        with connection:
            connection.sendall(request * 100)
            time.sleep(2.5)
            received = 0
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(2**20):
                    received += len(part)
            assert received < total / 2
        connection, port = connect(url)
        with connection:
            connection.sendall(request * 100)
            received = reads = 0
            while received < total:
                part = connection.recv(2**20)
                assert part
                received, reads = received + len(part), reads + 1
                if reads < 20:
                    time.sleep(0.1)  # 2 seconds in total


def test_connections_above_the_limit_are_closed_and_the_others_are_answered():
    with run_live_server(MODELS, Limits(connections=3)) as url:
        connections = [connect(url) for _ in range(3)]
        for _ in range(5):
            extra, _ = connect(url)
            with extra:
                assert is_dropped(extra)
        for connection, port in connections:
            connection.sendall(build_request(url, port, BODY))
            assert receive_status(connection) == 200
            connection.close()
        assert request_status(url) == 200


@pytest.mark.slow
def test_a_body_of_a_gigabyte_and_dropped_connections_leave_the_server_running():
    with run_live_server(MODELS) as url:
        connection, port = connect(url)
        with connection:
            connection.sendall(build_request(url, port, length=10**9))
            assert receive_status(connection) == 413
        before = read_memory()
        connection, port = connect(url)
        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(build_request(url, port, length="chunked"))
            for _ in range(1000):
                connection.sendall(chunk)
        assert read_memory() - before < 60e6
        for body, length in ((b"x", 500), (BODY, None), (b"", 0)):
            connection, port = connect(url)
            connection.sendall(build_request(url, port, body, length))
            connection.close()
        assert request_status(url) == 200


@pytest.mark.slow
def test_a_client_that_disconnects_cancels_its_work_also_while_a_model_is_loaded():
    started, finish = threading.Event(), threading.Event()

    def load():
        started.set()
        finish.wait(60)
        return build_decoder()

    with run_live_server({"decoder": build_decoder, "slow": load}) as url:
        first, port = connect(url)
        first.sendall(build_request(url, port, BODY.replace(b'"decoder"', b'"slow"')))
        assert started.wait(20)
        first.close()
        second, port = connect(url)
        with second:  # another kind of request of the same tab, which waits for the first and does not cancel it
            second.sendall(build_request(url, port, BODY).replace(b"/api/page", b"/api/lens"))
            assert receive_status(second) == 200 and not finish.is_set()
        finish.set()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_thousand_requests_need_no_more_memory_than_a_hundred():
    memory = []
    with run_live_server(MODELS, Limits(words=12)) as url:
        connection, port = connect(url)
        base = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.close()
        for k in range(1100):
            words = [["the", "a", "cat", "dog", "sat"][(k * m) % 5] for m in range(1, 9)]
            steps = [{"do": [[f"x_1_{k % 8}", {"set": "zero"}]]}] * (k % 3)
            state = {"model": "decoder", "text": " ".join(words), "steps": steps}
            document = {"tab": f"tab {k % 7}", "state": state}
            headers = {"Authorization": f"Bearer {url.partition('=')[2]}"}
            base.request("POST", "/api/page", json.dumps(document), headers)
            with base.getresponse() as response:
                assert response.status == 200 and response.read()
            if k in (100, 1099):
                gc.collect()
                memory.append(read_memory())
        base.close()
    assert memory[1] - memory[0] < 15e6
