"""The labelling page in Chromium: keyboard use, undo, two people, a kill, narrow screens and dark mode."""

import pytest

from i2cl.interfaces.server.client import Client
from i2cl.tasks import load_task
from processes import COMMAND, Program

from .test_page import (
    browser,
    check_accessible,
    check_narrow_screen,
    choose_file,
    expect_text,
    open_page,
    sync_api,
)
from .test_serve import address, serving

__all__ = ["browser", "open_page"]  # fixtures

TASK = load_task("mood-colour-1")
GOLD = {row.text: TASK.labels[row.label] for row in TASK.train}
TEXTS = list(GOLD)[:60]
LABELS = ", ".join(TASK.labels)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """URL of a server with the bundled model."""
    with serving(tmp_path_factory.mktemp("labelled") / "tasks") as at:
        yield at


def create(page, name, content=None, labels=LABELS):
    choose_file(page, f"{name}.csv", content or "text\n" + "".join(f"{text}\n" for text in TEXTS))
    page.fill("#labels", labels)
    page.click("#create .main")
    page.wait_for_selector("#answer:not([hidden])", timeout=300_000)  # until the first texts are chosen


def label_by_keyboard(page, count):
    """Give the gold labels of the next texts by the keyboard alone."""
    page.focus("#text")
    for _ in range(count):
        page.wait_for_selector("#answer:not([aria-busy=true])")  # until then, keys that save are ignored
        before = page.inner_text("#text")
        page.keyboard.press(str(TASK.labels.index(GOLD[before]) + 1))
        page.keyboard.press("Enter")
        page.wait_for_function("text => document.querySelector('#text').innerText !== text", arg=before)


def test_texts_are_labelled_by_keyboard_and_served(open_page, url):
    page = open_page(f"{url}/labelling")
    check_accessible(page)
    create(page, "mood")
    expect_text(page, "#state", "^60 texts.$")
    expect_text(page, "#place", r"10 texts left of these; proposal: \w+, \d+ %")
    assert page.locator("#choices input:checked").count() == 1
    label_by_keyboard(page, 3)
    assert page.evaluate("document.activeElement.id") == "text"
    expect_text(page, "#counts", "^mood: 3 of 60 texts labelled")
    skipped = page.inner_text("#text")
    page.keyboard.press("s")
    expect_text(page, "#counts", "3 of 60 texts labelled, 1 skipped")
    sync_api.expect(page.locator("#text")).not_to_have_text(skipped)
    page.keyboard.press("u")
    expect_text(page, "#saved", "undone")
    assert page.inner_text("#text") == skipped
    label_by_keyboard(page, 37)
    expect_text(
        page, "#measured", r"With \d+ labels, a classifier on .+ is right about \d+\.\d % of the labelled"
    )
    assert "labels" in page.get_attribute("#points", "aria-label")
    with page.expect_download() as download:
        page.click("#export")
    head, *rows = download.value.path().read_text().splitlines()
    assert (head, len(rows)) == ("text,label", 40)
    assert all(GOLD[row.rpartition(",")[0]] == row.rpartition(",")[2] for row in rows)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": 1280, "height": 900})
        check_accessible(page)
        check_narrow_screen(page)
    page.click("#serve")
    expect_text(
        page, "#served", r"Task mood is served, fitted on 40 labels. Accuracy in a cross-validation: \d+"
    )
    assert "/v1/classify" in page.inner_text("#code")
    assert Client(url).classify("mood", [TEXTS[0]])[0].label in TASK.labels
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#remove")
    expect_text(page, "#state", "Project mood and its texts were deleted")
    assert page.locator("#answer").is_hidden()


def test_finish_asks_whether_to_leave_out_labels_without_a_text(open_page, url):
    page = open_page(f"{url}/labelling")

    def finish(answer):
        with page.expect_event("dialog") as asked:
            page.once("dialog", answer)
            page.click("#serve")
        return asked.value.message

    create(page, "partial", labels=f"{LABELS}, grey, white")
    label_by_keyboard(page, 10)
    assert len({GOLD[row] for row in labelled_texts(page)}) == len(TASK.labels), "every colour is labelled"
    expect_text(page, "#counts", "^partial: 10 of 60 texts labelled. No text has the label grey or white yet")
    expect_text(page, "#choices", r"grey\(0\).*white\(0\)$")
    expect_text(page, "#round", "Labels without a text are not proposed")
    check_accessible(page)
    question = "No text has the label grey or white. Finish without them?"
    assert finish(lambda dialog: dialog.dismiss()) == question
    assert finish(lambda dialog: dialog.accept()) == question
    expect_text(page, "#served", "Task partial is served, fitted on 10 labels")
    client = Client(url)
    assert [job["kind"] for job in client.jobs() if job.get("name") == "partial"].count("fit") == 1
    assert client.classify("partial", [TEXTS[0]])[0].label in TASK.labels


def labelled_texts(page):
    """Return the texts in the exported file."""
    with page.expect_download() as download:
        page.click("#export")
    _, *rows = download.value.path().read_text().splitlines()
    return [row.rpartition(",")[0] for row in rows]


def test_two_people_label_different_texts_of_one_project(open_page, url):
    ann = open_page(f"{url}/labelling")
    create(ann, "shared")
    bob = open_page(f"{url}/labelling#shared")
    bob.wait_for_selector("#answer:not([hidden])")
    assert ann.inner_text("#text") != bob.inner_text("#text")
    expect_text(bob, "#counts", "2 people are labelling")
    for page in (ann, bob):
        label_by_keyboard(page, 10)
    expect_text(bob, "#counts", "^shared: 20 of 60 texts labelled")


def test_a_label_that_looks_wrong_is_changed(open_page, url):
    rows = [f"the invoice of order {number} is wrong,billing" for number in range(8)]
    rows += [f"my parcel {number} has not arrived,delivery" for number in range(8)]
    right, wrong = rows[0], "the invoice of order 0 is wrong,delivery"
    page = open_page(f"{url}/labelling")
    choose_file(page, "doubts.csv", "\n".join(["text,label", wrong, *rows[1:], "one more,"]))
    page.select_option("#label-column", "label")
    page.fill("#labels", "billing, delivery")
    page.click("#create .main")
    page.wait_for_selector("#issues li", timeout=300_000)
    expect_text(page, "#doubts", r"an accuracy of \d+\.\d %, disagree with \d+ label")
    item = page.locator("#issues li", has_text="the invoice of order 0 is wrong").first
    sync_api.expect(item).to_contain_text("more probable: billing")
    check_narrow_screen(page)
    check_accessible(page)
    item.get_by_role("button", name="Change to billing").click()
    sync_api.expect(page.locator("#issues")).not_to_contain_text("Labelled delivery")
    with page.expect_download() as download:
        page.click("#export")
    assert right in download.value.path().read_text().splitlines()


def test_labels_survive_a_kill_in_the_middle(open_page, tmp_path):
    def start(port):
        return Program(COMMAND, "serve", "reference", "--tasks", tmp_path / "tasks", "--port", port)

    server = start(0)
    at = address(server)
    page = open_page(f"{at}/labelling")
    create(page, "mood")
    label_by_keyboard(page, 12)
    server.process.kill()
    server.process.join()
    page.focus("#text")
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    expect_text(page, "#saved", "The server cannot be reached")
    here = page.inner_text("#text")
    server = start(at.rpartition(":")[2])
    address(server)
    assert page.inner_text("#text") == here  # the text waits for its label
    label_by_keyboard(page, 2)
    expect_text(page, "#counts", "^mood: 14 of 60 texts labelled")
    expect_text(page, "#measured", "With 1[0-4] labels|Measured by")
    page.click("#serve")
    expect_text(page, "#served", "Fitting all 14 labels|Evaluating")
    server.process.kill()
    server.process.join()
    expect_text(page, "#served", "does not answer. The fit continues")
    server = start(at.rpartition(":")[2])
    address(server)
    page.reload()  # shows the running fit again
    expect_text(page, "#served", "Task mood is served, fitted on 14 labels")
    server.process.terminate()
    assert server.wait()[0] == 0


def test_bad_input_is_reported_in_one_line(open_page, url):
    page = open_page(f"{url}/labelling")
    page.click("#create .main")
    assert page.evaluate("document.activeElement.id") == "texts"
    page.fill("#texts", "a warm film\ndull")
    page.fill("#name", "few")
    page.fill("#labels", "one")
    page.click("#create .main")
    assert "two labels" in page.locator("#labels").evaluate("input => input.validationMessage")
    page.fill("#labels", "good, good")
    page.click("#create .main")
    expect_text(page, "#state", "label word 'good' is given twice")
    page.fill("#labels", "good, bad")
    page.click("#create .main")
    page.wait_for_selector("#answer:not([hidden])")
    for count in (1, 2):
        page.focus("#text")
        page.keyboard.press("1")
        page.keyboard.press("Enter")
        expect_text(page, "#counts", f"{count} of 2 texts labelled")
    expect_text(page, "#saved", "No text is left")
    page.click("#serve")
    expect_text(page, "#served", "no text has the label 'bad': label one text of each$")
    page.click("#new summary")
    page.click("#create .main")
    expect_text(page, "#state", "there is a labelling project 'few': continue it, delete it")
    choose_file(page, "a.xlsx", b"PK\x03\x04\0\0")
    expect_text(page, "#state", "a.xlsx is not a text file")


def test_a_file_that_changed_is_read_again(open_page, url, tmp_path):
    page = open_page(f"{url}/labelling")
    path = tmp_path / "texts.csv"
    for columns in ("text,old", "text,new"):
        path.write_text(f"{columns}\na warm film,1\n", encoding="utf-8")
        with page.expect_file_chooser() as chooser:
            page.click("#file")
        chooser.value.set_files(path)
        expect_text(page, "#label-column", f"{columns.rpartition(',')[2]}$")


def test_an_answer_is_corrected_on_the_first_page(open_page, url):
    client = Client(url)
    rows = [{"text": text, "label": GOLD[text]} for text in TEXTS]
    client.wait(client.fit("corrected", rows, TASK.template.format, evaluate=0, settings={"steps": 0}))
    page = open_page(url)
    page.select_option("#tasks", "corrected")
    page.fill("#texts", "a cold night\na warm film")
    page.click("#ask .main")
    expect_text(page, "#answered", "2 texts")
    page.click("#wrong summary")
    page.select_option("#wrong-text", "a warm film")
    page.select_option("#right-label", "red")
    check_accessible(page)
    page.click("#correct button")
    expect_text(page, "#corrected", "The labelling project corrected has 1 label now")


def test_read_only_server_hides_the_form(open_page, tmp_path):
    with serving(tmp_path):
        pass  # creates the folder
    with serving(tmp_path, "--read-only") as at:
        page = open_page(f"{at}/labelling")
        page.wait_for_selector("#closed:not([hidden])")
        assert page.locator("#create").is_hidden()
        check_accessible(page)
