"""The web page in Chromium: keyboard use, narrow screens, dark mode, and no requests to other hosts.

pip install playwright axe-playwright-python; apt-get install chromium (or: playwright install chromium)
"""

import re
import shutil
from importlib.resources import files
from urllib.parse import urlsplit

import pytest

from i2cl.interfaces.server.client import Client
from i2cl.tasks import load_task

from .test_serve import examples, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which holds axe-core")
pytest.importorskip("fastapi")

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
NAME = "<img src=x onerror=alert(1)>"
SLOW = {"method": "i2cl", "evaluate": 0, "settings": {"epochs": 500}}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """URL of a server with the bundled model."""
    with serving(tmp_path_factory.mktemp("served") / "tasks") as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    result = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    with sync_api.sync_playwright() as play:
        try:
            one = play.chromium.launch(
                executable_path=next(filter(None, result), None), args=["--no-sandbox"]
            )
        except sync_api.Error as error:
            pytest.skip(f"needs Chromium: {str(error).splitlines()[0]}")
        yield one
        one.close()


@pytest.fixture
def open_page(browser, url):
    """Function that opens the page. Fails after the test on requests to other hosts or script errors."""
    wrong, contexts = [], []

    def open_one(at=url, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        own = urlsplit(at).netloc

        def asked(request):
            if urlsplit(request.url).netloc != own and not request.url.startswith("data:"):
                wrong.append(request.url)

        page.on("request", asked)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if "Content Security" in message.text else None,
        )
        page.goto(at)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong


def expect_text(page, where, pattern):
    sync_api.expect(page.locator(where)).to_have_text(re.compile(pattern), timeout=60_000)


def check_accessible(page):
    result = page.evaluate(AXE + ";axe.run(document, {})")
    assert not [(one["id"], [node["target"] for node in one["nodes"]]) for one in result["violations"]]


# Words of headings that are broken across two lines.
SPLIT = """() => [...document.querySelectorAll("h1, h2, h3, th[scope=col] span")].flatMap((head) => {
  const text = head.firstChild, found = [];
  for (const { index, 0: word } of (text?.data ?? "").matchAll(/[^ ]+/g)) {
    const range = document.createRange();
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    if (range.getClientRects().length > 1) found.push(word);
  }
  return found;
})"""


def check_narrow_screen(page, long=()):
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert [word for word in page.evaluate(SPLIT) if word not in long] == []
    check_accessible(page)


def test_a_task_is_created_tried_and_evaluated_by_keyboard(open_page, url):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    keys = page.keyboard
    page.on("dialog", lambda dialog: dialog.accept())
    page.wait_for_selector("#none:not([hidden])" if not Client(url).tasks() else "#about:not([hidden])")
    check_accessible(page)

    def tab_to(selector):
        for _ in range(80):  # wraps around after the last element
            keys.press("Tab")
            if page.evaluate("given => document.activeElement.matches(given)", selector):
                return
        pytest.fail(f"{selector} is not reached")

    page.fill("#examples", "text,label\na,x\nb,y\n")
    tab_to("#check")  # works without a name
    keys.press("Enter")
    expect_text(page, "#state", "2 rows can be used")
    tab_to("#name")
    keys.type(NAME)
    tab_to("#example")
    keys.press("Enter")
    expect_text(page, "#code", "gloomy baker")
    assert page.input_value("#name") == NAME
    tab_to("#check")
    keys.press("Enter")
    expect_text(page, "#state", r"40 rows can be used; the fit takes up to \d+")
    expect_text(page, "#counts", r"^Rows per label: blue \d+, green \d+, red \d+, yellow \d+\.")
    expect_text(page, "#counted", r"^40 rows\. The longest text has \d+ tokens; the model takes up to 1024")
    tab_to("#begin")
    keys.press("Enter")
    expect_text(page, "#state", r"is ready, fitted on \d+ examples")
    first, last = map(float, page.inner_text("#losses").split(" → "))
    assert first > 0.5 > last
    assert len(page.get_attribute("#loss polyline", "points").split()) >= 3
    assert NAME in page.inner_text("#state")
    assert page.locator("img").count() == 0
    assert page.locator("#tasks option:checked").inner_text() == NAME
    tab_to("#texts")
    keys.press("Control+A")
    keys.type("the gloomy baker rested\n\na cheerful nurse walked")
    tab_to("#ask .main")
    keys.press("Enter")
    expect_text(page, "#answered", r"2 texts, \d+ ms, \d+ tokens read")
    head, *rows = [row.split("\t") for row in page.inner_text("#answers table").splitlines()]
    assert head == ["Text", "Label", "Confidence", "Probabilities"]
    assert [row[1] for row in rows] == ["blue", "red"]
    listed = dict(
        one.rsplit(" ", 1)
        for one in page.locator("#answers td:last-child").first.locator(".probability").all_inner_texts()
    )
    assert listed.keys() == {"blue", "green", "red", "yellow"}
    assert sum(map(float, listed.values())) == pytest.approx(1, abs=5e-3)
    assert listed["blue"] == rows[0][2] == max(listed.values())
    evaluation = [row.split("\t") for row in page.inner_text("#evaluation table").splitlines()]
    scores = {row[0]: dict(zip(evaluation[0], row, strict=True)) for row in evaluation[1:]}
    assert scores.keys() >= {"Zero-shot", "Zero-shot, calibrated", "Few-shot", "This task"}
    assert re.fullmatch(r"Accuracy on \d+ rows", evaluation[0][1])
    assert "%" in scores["This task"][evaluation[0][1]]
    assert int(scores["Few-shot"]["Tokens read"]) > int(scores["This task"]["Tokens read"]) > 0
    tab_to("[data-call=Python]")
    keys.press("Enter")
    tab_to("#copy")
    keys.press("Enter")
    expect_text(page, "#copied", "Copied")
    call = page.evaluate("navigator.clipboard.readText()")
    assert f'client.classify("{NAME}", ["the gloomy baker rested"])' in call
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": 1100, "height": 900})
        check_accessible(page)
        check_narrow_screen(page)
    tab_to("#remove")
    keys.press("Enter")
    expect_text(page, "#answered", "was removed")
    assert NAME not in [one["id"] for one in Client(url).tasks()]


def test_texts_below_min_confidence_get_no_label(open_page, url):
    client, task = Client(url), load_task("mood-colour-1")
    fit = client.fit("unsure", examples(task, 40), task.template.format, evaluate=0, settings={"steps": 0})
    client.wait(fit)
    page = open_page()
    page.select_option("#tasks", "unsure")
    page.fill("#least", "0.999")
    page.fill("#texts", "a warm film")
    page.click("#ask .main")
    expect_text(page, "#answered", r"1 text, 1 without a label \(confidence below 0.999\), ")
    assert page.locator("#answers td.none").all_inner_texts() == ["none"]
    assert '"min_confidence":0.999' in page.inner_text("#code")
    page.fill("#least", "")
    page.click("#ask .main")
    expect_text(page, "#answered", r"1 text, \d+ ms")
    assert page.locator("#answers td.none").count() == 0
    assert "min_confidence" not in page.inner_text("#code")
    client.delete("unsure")


def test_replacing_a_task_asks_first(open_page, url):
    client, task = Client(url), load_task("mood-colour-1")
    fit = client.fit("kept", examples(task, 40), task.template.format, evaluate=0, settings={"steps": 0})
    client.wait(fit)
    page = open_page()
    expect_text(page, "#tasks", "kept")
    page.fill("#name", "kept")
    page.click("#example")
    expect_text(page, "#label-column", "label")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#begin")
    assert page.inner_text("#state") == ""
    client.delete("kept")


def test_suspicious_labels_are_shown_before_a_fit(open_page):
    page = open_page()
    page.fill("#examples", "text,label\na,price\nb,price\nc,Price\nd,food\nd,price\nd,price\n")
    page.click("#check")
    expect_text(page, "#counted", r"6 rows \(4 distinct\)")
    odd = page.locator("#odd li").all_inner_texts()
    assert odd[0].startswith("The label Price has 1 row: did you mean price?")
    assert 'The text "d" has the labels food and price' in odd[1]
    check_accessible(page)


def test_invalid_rows_are_listed(open_page):
    page = open_page()
    page.fill("#name", "none")
    for text, message in (
        ("text,label\na,x\n,y\nb,\n", ["row 3", "row 4"]),
        ('[{"text": "a", "label": "x"}, {"text": 1, "label": "y"}, {"label": "y"}]', ["item 2", "item 3"]),
    ):
        page.fill("#examples", text)
        page.click("#check")
        expect_text(page, "#state", "2 rows cannot be used")
        rows = page.locator("#refused li").all_inner_texts()
        assert [word in row for word, row in zip(message, rows, strict=True)] == [True, True]
    check_narrow_screen(page)


def choose_file(page, name, content, field="#file"):
    """Choose a file in a file input."""
    buffer = content if isinstance(content, bytes) else content.encode()
    page.set_input_files(field, {"name": name, "mimeType": "text/plain", "buffer": buffer})


def test_a_text_can_have_several_labels(open_page):
    page = open_page()
    rows = [("charged twice", "billing;refund"), ("wrong invoice", "billing"), ("money back", "refund")]
    rows = [f"{text} {number},{label}\n" for number in range(3) for text, label in [*rows, ("thanks", "")]]
    page.fill("#examples", "text,label\n" + "".join(rows))
    page.fill("#name", "several")
    page.fill("#separator", ";")
    page.click("#check")
    expect_text(page, "#counts", "^Rows per label: billing 6, refund 6")
    page.click("#begin")
    expect_text(page, "#state", "Task several is ready")
    page.fill("#texts", "charged twice 1\nthanks 1")
    page.click("#ask .main")
    expect_text(page, "#answered", r"2 texts, (\d without a label, )?\d+ ms")
    expect_text(page, "#answers", "billing [01]\\.")
    assert page.locator("#wrong").is_hidden()


TICKETS = "ticket_text,category\ncharged twice,billing\nit crashes,bug\n"


@pytest.mark.parametrize(
    ("name", "content", "columns", "chosen"),
    [
        ("a.csv", TICKETS, ["ticket_text", "category"], ("ticket_text", "category")),
        ("a.csv", 'id,label,"the ""text"""\n1,x,a\n', ["id", "label", 'the "text"'], ('the "text"', "label")),
        ("a.csv", "klass;satz;n\na;b;1\n", ["klass", "satz", "n"], ("", "")),
        ("a.csv", "sep=;\nreview;stars\na;1\n", ["review", "stars"], ("review", "stars")),
        ("a.tsv", "topic\tbody, title\nx\ty\n", ["topic", "body, title"], ("body, title", "topic")),
        ("a.json", '[{"body": "a", "kind": "x"}]', ["body", "kind"], ("body", "kind")),
        (
            "a.jsonl",
            '{"n": 1, "message": "a", "intent": "x"}\n',
            ["n", "message", "intent"],
            ("message", "intent"),
        ),
        ("a.txt", "message,intent\na,x\n", ["message", "intent"], ("message", "intent")),
        ("a.csv", "text,label\n".encode("utf-16"), ["text", "label"], ("text", "label")),
    ],
)
def test_columns_are_read_from_the_file(open_page, name, content, columns, chosen):
    page = open_page()
    choose_file(page, name, content)
    sync_api.expect(page.locator("#columns")).to_be_visible()
    assert page.locator("#text-column option").all_inner_texts() == ["Choose a column", *columns]
    assert (page.input_value("#text-column"), page.input_value("#label-column")) == chosen


def test_a_file_with_its_own_columns_and_a_test_file_is_fitted(open_page, url):
    page = open_page(viewport={"width": 390, "height": 800})
    choose_file(page, "my tickets.csv", TICKETS)
    choose_file(page, "later.tsv", "category\tticket_text\nbug\tno sound\n", "#test")
    page.fill("#shots", "1")
    page.fill("#template", "{ticket} {label}")
    page.click("#check")
    expect_text(page, "#state", "{text}")  # the error names the missing field
    page.fill("#template", "{text} {label}")
    page.click("#begin")
    expect_text(page, "#state", "Task my tickets is ready, fitted on 2 examples")
    expect_text(page, "#counted", "^2 rows, 1 test rows")
    expect_text(page, "#evaluation", "Accuracy on 1 rows")
    labels = {task["id"]: task["labels"] for task in Client(url).tasks()}
    assert labels["my tickets"] == ["billing", "bug"]
    Client(url).delete("my tickets")


def test_columns_have_to_be_chosen_and_different(open_page):
    page = open_page()
    page.fill("#examples", "a,b,c\n1,2,3\n")
    page.click("#check")
    assert page.evaluate("document.activeElement.id") == "text-column"
    for column in ("#text-column", "#label-column"):
        page.select_option(column, "b")
    page.click("#check")
    message = page.locator("#label-column").evaluate("select => select.validationMessage")
    assert message == "Choose two different columns."
    assert page.inner_text("#state") == ""


def test_the_task_name_defaults_to_the_file_name(open_page):
    page = open_page()
    for name in ("first.csv", "second.v2.csv"):
        choose_file(page, name, TICKETS)
        sync_api.expect(page.locator("#name")).to_have_value(name.removesuffix(".csv"))
    page.fill("#name", "mine")
    choose_file(page, "third.csv", TICKETS.replace("category", "topic"))
    expect_text(page, "#label-column", "topic")
    assert page.input_value("#name") == "mine"


def test_files_that_are_not_utf_8_are_read_as_windows_1252_with_a_notice(open_page):
    page = open_page()
    choose_file(page, "l.csv", b"text,label\n\xe9,x\n")
    expect_text(page, "#state", "l.csv is read as Windows-1252: save it as UTF-8 if that is wrong")
    assert page.input_value("#examples") == "text,label\né,x\n"
    page.set_input_files("#file", [])  # the user clears the choice


def test_a_binary_file_is_refused(open_page):
    page = open_page()
    for field in ("#file", "#test"):
        choose_file(page, "a.xlsx", b"PK\x03\x04\0\0", field)
        expect_text(page, "#state", "a.xlsx is not a text file: save it as CSV, TSV, JSON or JSON Lines")


MANY = [f"customer asks about topic number {number}" for number in range(12)]


def task_json(labels, methods):
    """Return a response of GET /v1/tasks/NAME with an evaluation."""
    score = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "macro_f1": 0.45}
    scores = {
        "rows": 10 * len(labels),
        "verdict": "inconclusive",
        "methods": dict.fromkeys(methods, score),
        "not_run": {},
        "support": dict.fromkeys(labels, 10),
        "recall": {label: None if label == labels[0] else 0.5 for label in labels},
        "confusion": [[7 if row == column else 3 for column in labels] for row in labels],
    }
    return {"digest": "d", "labels": labels, "demonstrations": 24, "evaluation": scores}


def mock_task(page, labels, methods):
    """Replace the server's tasks by one with many labels."""
    models = {"data": [{"id": "base"}, {"id": "many"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/tasks/*", lambda route: route.fulfill(json=task_json(labels, methods)))
    answers = [{"index": index, "label": labels[0], "probs": [0.5, 0.2, *[0.03] * 10]} for index in (0, 1)]
    reply = {"model": "many", "labels": labels, "data": answers, "usage": {"prompt_tokens": 9}}
    page.route("**/v1/classify", lambda route: route.fulfill(json=reply))
    page.reload()


def test_evaluation_shows_every_method_macro_f1_and_the_confusion_matrix(open_page):
    page = open_page()
    mock_task(page, MANY, ["majority_class", "zero_shot", "some_baseline", "anchored"])
    expect_text(page, "#evaluation", "Majority class")
    head, *rows = [row.split("\t") for row in page.inner_text("#evaluation table").splitlines()]
    assert head == ["Method", "Accuracy on 120 rows", "95\u00a0% interval", "Macro-F1"]
    assert [row[0] for row in rows] == ["Majority class", "Zero-shot", "some baseline", "This task"]
    assert page.locator("#confusion").is_hidden()
    page.click("#errors summary")
    head, first, second, *_ = [row.split("\t") for row in page.inner_text("#confusion table").splitlines()]
    assert head == ["True label", "Rows", "Recall", *(f"as {label}" for label in MANY)]
    assert first[:4] == [MANY[0], "10", "–", "7"]
    assert second[:4] == [MANY[1], "10", "0.50", "3"]
    check_accessible(page)


CUT = """() => [...document.querySelectorAll("#answers *, #evaluation *")].filter((node) =>
  node.getBoundingClientRect().right > document.documentElement.clientWidth && node.closest("thead") === null)
  .map((node) => node.textContent)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answers_and_scores_of_many_labels_fit_a_phone(open_page, scheme):
    page = open_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    mock_task(page, MANY, ["zero_shot", "zero_shot+batch_calibration", "anchored"])
    page.fill("#texts", f"a text\nhttps://example.org/{'x' * 200}")
    page.click("#ask .main")
    expect_text(page, "#answered", "2 texts")
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert "7 other labels 0.210" in page.locator("#answers td:last-child").first.inner_text()
    check_accessible(page)


def test_page_follows_a_fit_across_reload_and_lost_connection(open_page, url):
    task = load_task("mood-colour-1")
    job = Client(url).fit("slow", examples(task, 40), task.template.format, **SLOW)
    page = open_page()
    expect_text(page, "#step", r"step \d+ of at most")
    expect_text(page, "#left", r"At most \d+ (s|minutes) left")
    assert page.input_value("#name") == "slow"
    check_accessible(page)
    page.fill("#template", "{text} {label}")
    page.fill("#examples", "text,label\na,x\nb,y\n")
    page.click("#begin")
    expect_text(page, "#state", "A fit is running")
    page.route("**/events", lambda route: route.abort())
    page.reload()
    expect_text(page, "#state", "The server does not answer")
    page.unroute("**/events")
    expect_text(page, "#step", r"step \d+ of at most")
    page.focus("#cancel")
    page.keyboard.press("Enter")
    expect_text(page, "#state", "Cancelled")
    assert Client(url).job(job)["status"] == "cancelled"
    assert page.evaluate("document.activeElement.id") == "begin"


def test_page_asks_for_a_token_and_does_not_show_it(open_page, tmp_path):
    (tmp_path / "tokens").write_text("admin 0123456789abcdefA\n")
    headers = {"curl": "Bearer $I2CL_TOKEN", "Python": 'os.environ["I2CL_TOKEN"]', "OpenAI": "I2CL"}
    with serving(tmp_path / "tasks", "--token-file", tmp_path / "tokens") as address:
        page = open_page(address)
        expect_text(page, "#denied", "send Authorization")
        check_accessible(page)
        page.fill("#token", "0123456789abcdefA")
        page.keyboard.press("Enter")
        expect_text(page, "#base", "reference")
        page.reload()
        expect_text(page, "#base", "reference")
        for name, header in headers.items():
            page.click(f"[data-call={name}]")
            assert header in page.inner_text("#code")
            assert "0123456789abcdefA" not in page.inner_text("body")


def test_read_only_server_hides_the_form(open_page, tmp_path):
    with serving(tmp_path):
        pass  # creates the folder
    with serving(tmp_path, "--read-only") as address:
        page = open_page(address)
        expect_text(page, "#closed", "^This server is read-only.$")
        page.wait_for_selector("#closed:not([hidden])")
        assert page.locator("#fit").is_hidden()
        check_accessible(page)
