"""The page in a real browser: pick, generate, look at a token, compare, stop, and what goes wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.serve.conftest import DAMAGED
from tests.serve.support import save_endless, start, wait_until
from tests.tiny_runs import build_decoder, save
from tests.tokenizer.test_huggingface import qwen

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("page")]

CHROMIUM = Path(os.environ.get("GENESIS_CHROMIUM", "/usr/bin/chromium"))
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT_MS = 90_000
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        reason = f"no browser at {CHROMIUM}: install chromium, or name one by GENESIS_CHROMIUM"
        pytest.fail(reason) if os.environ.get("GENESIS_REQUIRE_BROWSER") == "1" else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page in a browser that knows nothing; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    context.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    page = context.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert [text for text in complaints if "Failed to load resource" not in text] == []


def panel(page: Page, name: str):
    return page.locator(f'.panel[data-name="{name}"]')


def generated(page: Page, name: str) -> str:
    return "".join(panel(page, name).locator(".token").all_text_contents())


def generate(page: Page) -> None:
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("button", name="Generate")).to_be_visible()


def text_of(server, **asked) -> str:
    status, answer, _ = server.ask("/v1/completions", {"prompt": "", "max_tokens": 30, **asked})
    assert status == 200
    return answer["choices"][0]["text"]


def test_a_checkpoint_is_picked_and_continues_the_prompt_as_the_api_does(server, page):
    page.goto(f"{server.url}#chat=0")
    expect(page.locator("#about")).to_contain_text("3 checkpoints")
    page.get_by_label("Checkpoint", exact=True).first.select_option("step-00000001")
    expect(panel(page, "a").locator(".facts")).to_have_text("100 tokens seen \u00b7 validation loss 5.400")
    page.get_by_label("Prompt").fill("alpha def \u00e9t\u00e9")
    for name, value in (("Temperature", "0.7"), ("Top-p", "0.9"), ("Top-k", "40"), ("Max tokens", "30"), ("Seed", "5")):
        page.get_by_label(name).fill(value)
    generate(page)
    asked = {"model": "step-00000001", "prompt": "alpha def \u00e9t\u00e9", "seed": 5}
    assert generated(page, "a") == text_of(server, **asked, temperature=0.7, top_p=0.9, top_k=40)
    expect(panel(page, "a").locator(".prompt")).to_have_text("alpha def \u00e9t\u00e9")
    expect(panel(page, "a").locator(".foot")).to_have_text(re.compile(r"30 tokens .* per second .* perplexity"))


def test_a_token_tells_its_probability_and_the_most_likely_others_by_pointer_and_by_keyboard(server, page):
    page.goto(f"{server.url}#chat=0&a=step-00000003&prompt=alpha&temperature=0&max_tokens=8")
    generate(page)
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    tokens = panel(page, "a").locator(".token")
    tokens.nth(2).hover()
    _, answer, _ = server.ask(
        "/v1/completions",
        {"model": "step-00000003", "prompt": "alpha", "temperature": 0, "max_tokens": 8, "logprobs": 5},
    )
    top_logprobs = answer["choices"][0]["logprobs"]["top_logprobs"][2]
    assert len(top_logprobs) == 5
    expect(tip.locator(".row")).to_have_count(5)
    shares = [float(text.strip("<% ")) / 100 for text in tip.locator(".percent").all_text_contents()]
    assert shares == pytest.approx(
        sorted((2.718281828**value for value in top_logprobs.values()), reverse=True), abs=6e-3
    )
    expect(tip.locator(".own .percent")).to_have_text(tip.locator(".percent").first.text_content())
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_be_visible()
    page.locator("h1").hover()
    tokens.nth(4).click()
    expect(tip).to_be_visible()


def test_two_checkpoints_continue_one_prompt_side_by_side(server, page):
    page.goto(f"{server.url}#chat=0&prompt=class+&seed=3&max_tokens=30&temperature=1&a=step-00000003&b=step-00000001")
    expect(panel(page, "b")).to_be_hidden()
    page.get_by_text("Compare").click()
    generate(page)
    texts = [generated(page, name) for name in ("a", "b")]
    models = ("step-00000003", "step-00000001")
    assert texts == [text_of(server, model=model, prompt="class ", seed=3, temperature=1) for model in models]
    assert texts[0] != texts[1]
    boxes = [panel(page, name).bounding_box() for name in ("a", "b")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator("body")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [panel(page, name).bounding_box() for name in ("a", "b")]
    assert boxes[0]["x"] == boxes[1]["x"]


def test_the_address_brings_everything_back(server, page):
    page.goto(f"{server.url}#chat=0")
    page.get_by_label("Prompt").fill("beta & 100% #1\n")
    page.get_by_label("Seed").fill("9")
    page.get_by_text("Compare").click()
    page.get_by_label("Checkpoint", exact=True).last.select_option("step-00000001")
    expect(page).to_have_url(re.compile("b=step-00000001.*seed=9"))
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.get_by_label("Prompt")).to_have_value("beta & 100% #1\n")
    expect(page.get_by_label("Seed")).to_have_value("9")
    expect(page.get_by_label("Checkpoint", exact=True).last).to_have_value("step-00000001")
    expect(panel(page, "b")).to_be_visible()


def test_stop_stops_and_frees_the_row(tmp_path, tokenizer_file, page):
    run = tmp_path / "long"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(tokenizer_file, run)
    with start(run) as server:
        page.goto(f"{server.url}#chat=0")
        expect(page.locator("#about")).to_contain_text("no checkpoint yet")
        save_endless(run)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Prompt").fill("alpha")
        page.get_by_label("Max tokens").fill("190000")
        expect(page.locator("#about")).to_contain_text("1 checkpoint")
        page.get_by_role("button", name="Generate").click()
        expect(panel(page, "a").locator(".token").nth(3)).to_be_visible()
        assert server.num_busy() == 1
        page.get_by_role("button", name="Stop").click()
        expect(panel(page, "a").locator(".foot")).to_contain_text("stopped")
        wait_until(lambda: server.num_busy() == 0)
        expect(panel(page, "a").locator(".error")).to_be_hidden()
        page.get_by_label("Max tokens").fill("3")
        generate(page)
        expect(panel(page, "a").locator(".token")).to_have_count(3)


def test_a_new_checkpoint_appears_by_itself_and_the_newest_means_it(server, served_run, page):
    page.goto(f"{server.url}#chat=0&a=latest")
    expect(page.get_by_label("Checkpoint", exact=True).first.locator("option").first).to_have_text(
        "newest \u2014 step 3"
    )
    expect(page.locator("#chart .dot")).to_have_count(3)
    page.get_by_label("Checkpoint", exact=True).first.focus()
    identity = {"tokenizer_hash": None}
    made = save(served_run / "checkpoints", 12, build_decoder(12), identity)
    try:
        expect(page.locator("#about")).to_contain_text("4 checkpoints")
        expect(page.get_by_label("Checkpoint", exact=True).first.locator("option").first).to_have_text(
            "newest \u2014 step 12"
        )
        expect(page.get_by_label("Checkpoint", exact=True).first).to_have_value("latest")
        page.get_by_label("Seed").fill("1")
        page.get_by_label("Max tokens").fill("30")
        page.get_by_label("Temperature").fill("0")
        generate(page)
        assert generated(page, "a") == text_of(server, model="step-00000012", temperature=0)
    finally:
        shutil.rmtree(made)
    expect(page.locator("#about")).to_contain_text("3 checkpoints")


def test_a_dot_of_the_curve_picks_its_checkpoint(server, page):
    page.goto(f"{server.url}#chat=0")
    page.locator("#chart .dot").first.click()
    expect(page.get_by_label("Checkpoint", exact=True).first).to_have_value("step-00000001")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"a={DAMAGED}", "its bytes have changed"),
        ("a=step-00000077", "no such model: 'step-00000077'"),
        ("a=step-00000001&max_tokens=5000", "in the model's context of 256: set max_tokens to at most"),
        ("a=step-00000001&top_p=7", "top_p is 7: it must be a number"),
    ],
)
def test_an_error_is_shown_where_the_text_would_be_and_the_next_try_is_free(server, page, address, message):
    page.goto(f"{server.url}#chat=0&{address}")
    generate(page)
    error = panel(page, "a").locator(".error")
    expect(error).to_contain_text(message)
    page.get_by_label("Checkpoint", exact=True).first.select_option("step-00000001")
    page.get_by_label("Max tokens").fill("2")
    page.get_by_label("Top-p").fill("1")
    generate(page)
    expect(error).to_be_hidden()


def test_markup_in_a_prompt_is_text(server, page):
    page.goto(f"{server.url}#chat=0")
    page.get_by_label("Prompt").fill("<img src=x onerror=alert(1)><b>bold</b>")
    page.get_by_label("Max tokens").fill("2")
    generate(page)
    expect(panel(page, "a").locator(".prompt")).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")
    assert panel(page, "a").locator("img, b").count() == 0


def test_a_server_with_a_token_asks_for_it_once_and_keeps_it_out_of_the_address(run, page):
    with start(run, GENESIS_TOKEN=TOKEN) as server:
        page.goto(f"{server.url}#chat=0")
        page.get_by_label("This server requires a token").fill("not the token")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert").first).to_contain_text("Wrong token")
        expect(page.locator("#main")).to_be_hidden()
        page.get_by_label("This server requires a token").fill(TOKEN)
        page.get_by_role("button", name="Open").click()
        page.get_by_label("Max tokens").fill("2")
        generate(page)
        expect(panel(page, "a").locator(".token").first).to_be_attached()
        assert TOKEN not in page.url
        page.reload()
        expect(page.locator("#main")).to_be_visible()
    page.get_by_role("button", name="Generate").click()
    expect(panel(page, "a").locator(".error")).to_have_text("The server does not respond.")


def test_a_chat_shows_its_turns_and_sends_those_before_with_the_next(browser, page, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5), {})
    with start(directory) as running:
        page.goto(f"{running.url}#temperature=0&max_tokens=6")
        expect(page.get_by_label("Chat", exact=True)).to_be_checked()  # without being asked for
        turns = panel(page, "a").locator(".turn")
        messages = []
        for text in ("All human?", "And beings?"):
            page.get_by_label("Message").fill(text)
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_role("button", name="Send")).to_be_visible()
            messages.append({"role": "user", "content": text})
            asked = {"model": "latest", "messages": messages, "temperature": 0, "max_tokens": 6}
            status, answer, _ = running.ask("/v1/chat/completions", asked)
            assert status == 200, answer
            content = answer["choices"][0]["message"]["content"]
            expect(turns).to_have_count(len(messages) + 1)
            expect(turns.nth(len(messages) - 1)).to_have_text(text)
            assert "".join(turns.nth(len(messages)).locator(".token").all_text_contents()) == content
            messages.append({"role": "assistant", "content": content})
            expect(page.get_by_label("Message")).to_have_value("")
        if os.environ.get("GENESIS_SCREENSHOT"):
            page.screenshot(path=os.environ["GENESIS_SCREENSHOT"])
        page.get_by_role("button", name="New chat").click()
        expect(turns).to_have_count(0)
        page.get_by_label("Chat", exact=True).uncheck(force=True)
        expect(page.get_by_label("Prompt")).to_be_visible()
        page.wait_for_url("**chat=0**")
        page.reload()
        expect(page.get_by_label("Prompt")).to_be_visible()


def test_enter_sends_with_the_system_instructions_and_the_answer_stays_in_view_and_is_copied(page, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5), {})
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.set_viewport_size({"width": 700, "height": 420})
    with start(directory) as running:
        page.goto(f"{running.url}#temperature=0&max_tokens=150&chat=1")
        page.get_by_label("System instructions").fill("Be brief.")
        box = page.get_by_label("Message")
        box.fill("All")
        box.press("Shift+Enter")
        box.press_sequentially("human?")
        expect(box).to_have_value("All\nhuman?")
        box.press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "All\nhuman?"}]
        asked = {"model": "latest", "messages": messages, "temperature": 0, "max_tokens": 150}
        status, answer, _ = running.ask("/v1/chat/completions", asked)
        assert status == 200, answer
        content = answer["choices"][0]["message"]["content"]
        expect(panel(page, "a").locator(".turn").last).to_have_text(content, use_inner_text=False)
        assert page.evaluate("document.documentElement.scrollHeight > innerHeight")
        page.wait_for_function("innerHeight + scrollY - document.documentElement.scrollHeight > -40")
        expect(box).to_be_in_viewport()
        panel(page, "a").get_by_role("button", name="Copy").click()
        expect(panel(page, "a").get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == content


def test_a_model_without_a_chat_template_offers_no_chat(served_run, page):
    with start(served_run) as running:
        page.goto(f"{running.url}#chat=1")
        expect(page.get_by_label("Prompt")).to_be_visible()
        expect(page.get_by_label("Chat", exact=True)).to_be_disabled()
        expect(page.get_by_title("This model has no chat template")).to_be_visible()


def test_a_schema_and_penalties_reach_the_model_and_text_that_is_no_json_is_an_error(page, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5), {})
    schema = '{"enum": ["yes", "no"]}'
    with start(directory) as running:
        page.goto(f"{running.url}#chat=0&temperature=0&max_tokens=30&schema={schema}&presence_penalty=1.5")
        page.get_by_text("More options").click()
        expect(page.get_by_label("Presence penalty")).to_have_value("1.5")
        generate(page)
        assert generated(page, "a").strip() in ('"yes"', '"no"')
        expect(panel(page, "a").locator(".foot")).to_have_text(re.compile("end of text"))
        page.get_by_label("JSON schema").fill("{")
        page.get_by_role("button", name="Generate").click()
        expect(panel(page, "a").locator(".error")).to_have_text(re.compile("JSON schema is not JSON"))
        page.get_by_label("JSON schema").fill('{"type": "wizard"}')
        generate(page)
        expect(panel(page, "a").locator(".error")).to_have_text(re.compile("Invalid type: wizard"))


def test_calls_that_come_in_pieces_are_shown_as_calls(page, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5), {})
    arguments = '{"city": "Paris", "days": 2}'
    pieces = [{"id": "a", "function": {"name": "weather", "arguments": ""}}]
    pieces += [{"function": {"arguments": part}} for part in (arguments[:9], arguments[9:])]
    calls = [{"index": 0, **piece} for piece in pieces]
    calls.append({"index": 1, "id": "b", "function": {"name": "now", "arguments": "{}"}})
    deltas = [({"content": "I look."}, None), *(({"tool_calls": [call]}, None) for call in calls), ({}, "tool_calls")]
    log_probs = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}
    events = [{"choices": [{"delta": delta, "finish_reason": end, "logprobs": log_probs}]} for delta, end in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(headers={"content-type": "text/event-stream"}, body=body)
    )
    with start(directory) as running:
        page.goto(f"{running.url}#chat=1")
        page.get_by_label("Message").fill("What is the weather?")
        page.get_by_role("button", name="Send").click()
        shown = f"I look.\nweather({arguments})\nnow({{}})"
        expect(panel(page, "a").locator(".turn").last).to_have_text(shown, use_inner_text=False)
        expect(panel(page, "a").locator(".foot")).to_contain_text("calls a tool")
        if os.environ.get("GENESIS_SCREENSHOT"):
            page.screenshot(path=os.environ["GENESIS_SCREENSHOT"])


def test_reasoning_is_shown_apart_and_is_no_part_of_the_conversation(page, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5), {})
    deltas = [
        ({"reasoning_content": "It "}, None),
        ({"reasoning_content": "rains.", "content": "Rain"}, None),
        ({"content": "."}, "stop"),
    ]
    log_probs = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}
    events = [{"choices": [{"delta": delta, "finish_reason": end, "logprobs": log_probs}]} for delta, end in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    asked = []

    def answer(route):
        asked.append(json.loads(route.request.post_data)["messages"])
        route.fulfill(headers={"content-type": "text/event-stream"}, body=body)

    page.route("**/v1/chat/completions", answer)
    with start(directory) as running:
        page.goto(f"{running.url}#chat=1")
        turns = panel(page, "a").locator(".turn")
        for number in (1, 2):
            page.get_by_label("Message").fill("Sun?")
            page.get_by_role("button", name="Send").click()
            expect(turns).to_have_count(3 * number)
            expect(turns.last).to_have_text("Rain.", use_inner_text=False)
            expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(panel(page, "a").locator(".reasoning")).to_have_text(["It rains."] * 2, use_inner_text=False)
    user = {"role": "user", "content": "Sun?"}
    assert asked == [[user], [user, {"role": "assistant", "content": "Rain."}, user]]
