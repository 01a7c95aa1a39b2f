"""The page in Chromium: all of it, by keyboard alone, narrow and dark, with nothing loaded from elsewhere.

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
    """Of a server of the bundled model."""
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
def opened(browser, url):
    """Opens the page; at the end no request has gone elsewhere, and no script has failed."""
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


def shows(page, where, pattern):
    sync_api.expect(page.locator(where)).to_have_text(re.compile(pattern), timeout=60_000)


def accessible(page):
    result = page.evaluate(AXE + ";axe.run(document, {})")
    assert not [(one["id"], [node["target"] for node in one["nodes"]]) for one in result["violations"]]


# Words of headings that stand on two lines.
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


def narrow(page, long=()):
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert [word for word in page.evaluate(SPLIT) if word not in long] == []
    accessible(page)


def test_a_task_is_made_tried_and_compared_by_keyboard_alone(opened, url):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    keys = page.keyboard
    page.on("dialog", lambda dialog: dialog.accept())
    page.wait_for_selector("#none:not([hidden])" if not Client(url).tasks() else "#about:not([hidden])")
    accessible(page)

    def to(selector):
        for _ in range(80):  # behind the last comes the first
            keys.press("Tab")
            if page.evaluate("given => document.activeElement.matches(given)", selector):
                return
        pytest.fail(f"{selector} is not reached")

    page.fill("#examples", "text,label\na,x\nb,y\n")
    to("#check")  # which takes no name
    keys.press("Enter")
    shows(page, "#state", "2 rows can be used")
    to("#name")
    keys.type(NAME)
    to("#example")
    keys.press("Enter")
    shows(page, "#code", "gloomy baker")
    assert page.input_value("#name") == NAME
    to("#check")
    keys.press("Enter")
    shows(page, "#state", "40 rows can be used; 20 become demonstrations")
    shows(page, "#counts", r"of each label: blue \d+, green \d+, red \d+, yellow \d+\.")
    shows(page, "#counted", r"^40 rows; the longest text has \d+ tokens of the 1024")
    to("#begin")
    keys.press("Enter")
    shows(page, "#state", "is ready, from 20 demonstrations")
    first, last = map(float, page.inner_text("#losses").split(" → "))
    assert first > 0.5 > last
    assert len(page.get_attribute("#loss polyline", "points").split()) >= 3
    assert NAME in page.inner_text("#state")
    assert page.locator("img").count() == 0
    assert page.locator("#tasks option:checked").inner_text() == NAME
    to("#texts")
    keys.press("Control+A")
    keys.type("the gloomy baker rested\n\na cheerful nurse walked")
    to("#ask .main")
    keys.press("Enter")
    shows(page, "#answered", r"2 texts, \d+ ms, \d+ tokens read")
    head, *rows = [row.split("\t") for row in page.inner_text("#answers table").splitlines()]
    assert head == ["Text", "Label", "Confidence", "blue", "green", "red", "yellow"]
    assert [row[1] for row in rows] == ["blue", "red"]
    assert sum(map(float, rows[0][3:])) == pytest.approx(1, abs=1e-3)
    assert float(rows[0][2]) == pytest.approx(max(map(float, rows[0][3:])), abs=0.006)
    worth = [row.split("\t") for row in page.inner_text("#worth table").splitlines()]
    assert worth[0] == ["Method", "Accuracy on 20 rows", "95\u00a0%", "Tokens read"]
    assert [row[0] for row in worth[1:]] == ["Zero-shot", "Zero-shot, calibrated", "Few-shot", "This task"]
    assert int(worth[3][3]) > int(worth[4][3]) > 0
    assert page.locator("#map rect").count() == 4 * 4
    to("summary")
    keys.press("Enter")
    assert page.locator("#numbers tbody tr").count() == 4 * 2
    to("[data-call=Python]")
    keys.press("Enter")
    to("#copy")
    keys.press("Enter")
    shows(page, "#copied", "Copied")
    call = page.evaluate("navigator.clipboard.readText()")
    assert f'client.classify("{NAME}", ["the gloomy baker rested"])' in call
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": 1100, "height": 900})
        accessible(page)
        narrow(page)
    to("#remove")
    keys.press("Enter")
    shows(page, "#answered", "is removed")
    assert NAME not in [one["id"] for one in Client(url).tasks()]


def test_a_second_task_answers_beside_the_first_and_nobody_is_sure(opened, url):
    client = Client(url)
    task = load_task("mood-colour-1")
    for name in ("one", "two"):
        rows = examples(task, 40)
        client.wait(client.fit(name, rows, task.template.format, evaluate=0, settings={"steps": 0}))
    page = opened(viewport={"width": 1280, "height": 800})
    page.select_option("#tasks", "one")
    assert page.locator("#beside option").all_inner_texts() == ["no other task", "two"]
    page.select_option("#beside", "two")
    page.fill("#least", "0.999")
    page.fill("#texts", "a warm film")
    page.click("#ask .main")
    shows(page, "#answered", "1 text, 1 without a label: below 0.999, ")
    assert page.locator("#answers h3").all_inner_texts() == ["one", "two"]
    assert page.locator("#answers td.none").all_inner_texts() == ["none"] * 2
    assert '"min_confidence":0.999' in page.inner_text("#code")
    page.fill("#least", "")
    page.select_option("#tasks", "two")
    assert page.locator("#beside option").all_inner_texts() == ["no other task", "one"]
    page.click("#ask .main")
    shows(page, "#answered", r"1 text, \d+ ms")
    assert page.locator("#answers table").count() == 1
    assert page.locator("#answers td.none").count() == 0
    assert "min_confidence" not in page.inner_text("#code")
    page.fill("#name", "one")
    page.click("#example")
    page.once("dialog", lambda dialog: dialog.dismiss())  # replace the task one?
    page.click("#begin")
    assert page.inner_text("#state") == ""
    accessible(page)
    for name in ("one", "two"):
        client.delete(name)


@pytest.mark.parametrize("width", [375, 1280])
def test_a_map_of_many_layers_fits_into_the_page(opened, width):
    page = opened(viewport={"width": width, "height": 800})
    page.evaluate("""() => {
        document.getElementById("about").hidden = false;
        const layers = (row) => Array.from({ length: 32 }, () => row);
        const told = { coefficients: layers([[0.1, 1], [0.1, 0.9]]), sizes: layers([1, 2]) };
        map(document.getElementById("map"), told);
    }""")
    inside = """() => {
        const right = (one) => one.getBoundingClientRect().right;
        const cells = [...document.querySelectorAll("#map rect")];
        return right(document.getElementById("about")) - Math.max(...cells.map(right));
    }"""
    assert page.evaluate(inside) >= 0
    assert page.locator("#map rect").count() == 32 * 4
    page.set_viewport_size({"width": 375, "height": 800})
    page.wait_for_function(f"({inside})() >= 0")  # it is drawn anew, some time after


def test_what_looks_wrong_with_rows_is_said_before_a_fit(opened):
    page = opened()
    page.fill("#examples", "text,label\na,price\nb,price\nc,Price\nd,food\nd,price\nd,price\n")
    page.click("#check")
    shows(page, "#counted", "6 rows, 4 of them distinct")
    odd = page.locator("#odd li").all_inner_texts()
    assert odd[0].startswith("The label Price has 1 row: did you mean price?")
    assert 'The text "d" is labelled food and price' in odd[1]
    accessible(page)


def test_rows_that_are_refused_are_listed(opened):
    page = opened()
    page.fill("#name", "none")
    for text, message in (
        ("text,label\na,x\n,y\nb,\n", ["row 3", "row 4"]),
        ('[{"text": "a", "label": "x"}, {"text": 1, "label": "y"}, {"label": "y"}]', ["item 2", "item 3"]),
    ):
        page.fill("#examples", text)
        page.click("#check")
        shows(page, "#state", "2 rows cannot be used")
        rows = page.locator("#refused li").all_inner_texts()
        assert [word in row for word, row in zip(message, rows, strict=True)] == [True, True]
    narrow(page)
    for text, message in (
        ('{"text": "a", "label": "x"}\n{', "Line 2 cannot be read as JSON"),
        ("a", "name the columns text and label"),
    ):
        page.fill("#examples", text)
        page.click("#begin")
        shows(page, "#state", message)
    for name, message, state in (
        ("l", b"text,label\n\xe9,x\n", "l.csv is no text in UTF-8"),
        ("u", "é,x".encode(), "^$"),
    ):
        page.set_input_files("#file", {"name": f"{name}.csv", "mimeType": "text/csv", "buffer": message})
        shows(page, "#state", state)
    assert page.input_value("#examples") == "é,x"
    page.set_input_files("#file", [])  # a choice that is taken back


def test_a_fit_is_followed_over_a_reload_and_a_server_that_is_away(opened, url):
    task = load_task("mood-colour-1")
    job = Client(url).fit("slow", examples(task, 40), task.template.format, **SLOW)
    page = opened()
    shows(page, "#step", r"step \d+ of at most")
    shows(page, "#left", r"At most \d+ (s|minutes) left")
    assert page.input_value("#name") == "slow"
    assert page.locator("#live rect").count() == 4 * 4
    accessible(page)
    page.fill("#template", "{text} {label}")
    page.fill("#examples", "text,label\na,x\nb,y\n")
    page.click("#begin")
    shows(page, "#state", "A fit runs")
    page.route("**/events", lambda route: route.abort())
    page.reload()
    shows(page, "#state", "The server does not answer")
    page.unroute("**/events")
    shows(page, "#step", r"step \d+ of at most")
    page.focus("#cancel")
    page.keyboard.press("Enter")
    shows(page, "#state", "Cancelled")
    assert Client(url).job(job)["status"] == "cancelled"
    assert page.evaluate("document.activeElement.id") == "begin"


def test_many_classes_long_labels_and_a_server_that_is_lost(opened, url):
    labels = [f"{'very ' * 6}long label {number} {'of' * 30}" for number in range(20)]
    rows = [{"text": f"text {number} {label[-9:]}", "label": label} for number, label in enumerate(labels)]
    client = Client(url)
    client.wait(client.fit("n" * 128, rows, "{text} {label}", evaluate=0, settings={"steps": 0}))
    page = opened()
    page.select_option("#tasks", "n" * 128)
    shows(page, "#verdict", "not scored")
    page.fill("#texts", f"{'w' * 300}\nshort")
    page.click("#ask .main")
    shows(page, "#answered", "2 texts")
    assert page.locator("#answers td.best").count() == 2
    narrow(page, {"of" * 30})  # wider than a column may be
    page.fill("#texts", "long " * 3000)
    page.click("#ask .main")
    shows(page, "#answered", "exceed|context|tokens")
    assert page.locator("#answers").is_hidden()
    page.route("**/v1/**", lambda route: route.abort())
    page.click("#ask .main")
    shows(page, "#answered", "cannot be reached")
    client.delete("n" * 128)


def test_a_token_is_asked_for_kept_and_not_told(opened, tmp_path):
    (tmp_path / "tokens").write_text("admin 0123456789abcdefA\n")
    headers = {"curl": "Bearer $I2CL_TOKEN", "Python": 'os.environ["I2CL_TOKEN"]', "OpenAI": "I2CL"}
    with serving(tmp_path / "tasks", "--token-file", tmp_path / "tokens") as address:
        page = opened(address)
        shows(page, "#denied", "send Authorization")
        accessible(page)
        page.fill("#token", "0123456789abcdefA")
        page.keyboard.press("Enter")
        shows(page, "#base", "reference")
        page.reload()
        shows(page, "#base", "reference")
        for name, header in headers.items():
            page.click(f"[data-call={name}]")
            assert header in page.inner_text("#code")
            assert "0123456789abcdefA" not in page.inner_text("body")


def test_a_server_that_only_reads_takes_no_examples(opened, tmp_path):
    (tmp_path / "names").mkdir()
    (tmp_path / "artefacts").mkdir()
    with serving(tmp_path, "--read-only") as address:
        page = opened(address)
        page.wait_for_selector("#closed:not([hidden])")
        assert page.locator("#fit").is_hidden()
        accessible(page)
