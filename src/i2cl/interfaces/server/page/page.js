"use strict";
// The page that creates tasks from labelled examples; common.js has what it shares with the labelling page.
const METHODS = {
  majority_class: "Majority class", zero_shot: "Zero-shot", "zero_shot+batch_calibration": "Zero-shot, calibrated",
  few_shot: "Few-shot", sentence_embeddings: "Sentence embeddings", char_tfidf: "Character n-grams", label_frequency: "Label frequency",
};
const NO_TOKENS = ["majority_class", "label_frequency", "sentence_embeddings", "tfidf", "char_tfidf"]; // methods that do not run the model
const MAX_PROBABILITIES = 5; // listed per text; the others are summed
const RECONNECT_MS = 2000;
const MIN_SECONDS = 5; // shorter waits show no clock
let call = "curl", job = null, clock = null;
let source = null; // file whose rows are in the text area: { name, format }
let test = null; // test file: { name, format, content }
const tokensRead = {}; // tokens per text, by digest of the task

// The rows

function updateColumns() {
  const content = $("examples").value, format = source?.format ?? formatOf("", content);
  const columns = [...new Set(columnsOf(content, format))];
  $("columns").hidden = !columns.length;
  choose("label-column", columns, "label", LABEL_NAMES);
  choose("text-column", columns, "text", TEXT_NAMES, $("label-column").value);
  if (!$("label-column").value) choose("label-column", columns, "label", LABEL_NAMES, $("text-column").value);
}

async function takeFile(file) {
  if (!file) return;
  $("refused").replaceChildren();
  try {
    const { name, format, content, encoding } = await readFile(file);
    if (!$("name").value || $("name").value === stem(source?.name ?? "")) $("name").value = stem(name);
    source = { name, format };
    $("examples").value = content;
    updateColumns();
    show("state", encoding === "windows-1252" ? `${name} is read as Windows-1252: save it as UTF-8 if that is wrong.` : "");
  } catch (error) { showError(error); }
}

async function takeTestFile(file) {
  test = null;
  if (!file) return;
  try {
    const { name, format, content } = await readFile(file);
    test = { name, format, content };
    show("state", "");
  } catch (error) {
    $("test").value = "";
    showError(error);
  }
}

// Fits

function fitRequest(check) {
  const content = $("examples").value, name = source?.name ?? PASTED;
  const body = {
    name: $("name").value || (check ? "unnamed" : ""), template: $("template").value,
    examples: { name, format: source?.format ?? formatOf("", content), content },
  };
  if (!$("columns").hidden) Object.assign(body, { text_column: $("text-column").value, label_column: $("label-column").value });
  const labels = $("labels").value.split(",").map((label) => label.trim());
  if (labels.some((label) => label)) body.labels = labels;
  if ($("separator").value) body.label_separator = $("separator").value;
  if ($("shots").value) body.shots = Number($("shots").value);
  if (test) body.test = test;
  return check ? { ...body, check } : body;
}

function isComplete(check) {
  const fields = ["examples", ...($("columns").hidden ? [] : ["text-column", "label-column"]), ...(check ? [] : ["name"]), "shots", "template"];
  const same = !$("columns").hidden && $("text-column").value && $("text-column").value === $("label-column").value;
  $("label-column").setCustomValidity(same ? "Choose two different columns." : "");
  return fields.every((id) => $(id).reportValidity());
}

async function submitFit(check) {
  if (!isComplete(check)) return;
  if (job) return show("state", "A fit is running: wait for it or cancel it.", true);
  const name = $("name").value, exists = [...$("tasks").options].some((option) => option.value === name);
  if (!check && exists && !confirm(`Replace the task ${name}?`)) return;
  $("refused").replaceChildren();
  for (const id of ["data", "progress", "another"]) $(id).hidden = true;
  show("state", "Checking the rows");
  try {
    const found = await json("POST", "v1/tasks", fitRequest(true));
    showRows(found);
    show("state", `${found.rows} rows can be used; the fit takes up to ${found.demonstrations}.`);
    if (!check) await follow((await json("POST", "v1/tasks", fitRequest(false))).id);
  } catch (error) { showError(error); }
}

function showRows({ data, test_rows }) {
  const most = data.most_tokens ? `; the model takes up to ${data.most_tokens}` : "";
  const distinct = data.distinct < data.rows ? ` (${data.distinct} distinct)` : "";
  const tests = test_rows ? `, ${test_rows} test rows` : "";
  $("counted").textContent = `${data.rows} rows${distinct}${tests}. The longest text has ${data.longest_tokens} tokens${most}.`;
  $("counts").textContent = `Rows per label: ${Object.entries(data.labels).map(([label, count]) => `${label} ${count}`).join(", ")}.`;
  const warnings = Object.entries(data.typos).map(([label, other]) =>
    `The label ${label} has ${data.labels[label]} row${data.labels[label] === 1 ? "" : "s"}: did you mean ${other}? They are two labels now.`);
  for (const { text, labels } of data.contradictions) warnings.push(`The text "${text}" has the labels ${labels.join(" and ")}: keep one.`);
  if (data.codes) warnings.push(`The labels are ${data.codes}, which mean nothing to the model: use words.`);
  if (data.separator) warnings.push(`Some labels look like several, separated by "${data.separator}": enter it as the label separator.`);
  const more = data.contradicting - data.contradictions.length;
  if (more > 0) warnings.push(`${more} more ${more === 1 ? "text has" : "texts have"} several labels.`);
  $("odd").replaceChildren(...warnings.map((warning) => element("li", warning)));
  $("data").hidden = false;
}

// Show a clock: time left if it is known, else time spent once the wait is long. Without argument: stop it.
function startClock(left) {
  clearInterval(clock);
  $("left").textContent = "";
  if (left === undefined) return;
  const began = Date.now();
  const tick = () => {
    const spent = (Date.now() - began) / 1000;
    if (left !== null) $("left").textContent = `At most ${duration(left - spent)} left, then the evaluation.`;
    else if (spent >= MIN_SECONDS) $("left").textContent = `${duration(spent)} so far.`;
  };
  clock = setInterval(tick, 1000);
  tick();
}

// Follow a fit to its end, reconnecting if the server is restarted: it then sends all events again.
async function follow(id) {
  job = id;
  $("cancel").hidden = false;
  $("progress").hidden = true;
  while (job) {
    try {
      await watch(id);
    } catch (error) {
      if (!error.away) {
        showError(error);
        job = null;
      }
    }
    if (job) {
      startClock();
      $("steps").hidden = true;
      show("state", "The server does not answer. The fit continues when it is back.", true);
      await new Promise((done) => setTimeout(done, RECONNECT_MS));
    }
  }
  startClock();
  $("steps").hidden = true;
  if (document.activeElement === $("cancel")) $("begin").focus();
  $("cancel").hidden = true;
}

async function watch(id) {
  const losses = [];
  let began;
  for await (const event of events(await send("GET", `v1/jobs/${id}/events`))) {
    if (event.event === "queued") show("state", "Waiting for other fits to finish");
    if (event.event === "started" || event.event === "resumed") {
      began = event.at;
      show("state", "Fitting");
      startClock(null);
    }
    if (event.event === "drawn") {
      const seconds = event.seconds ? ` (about ${duration(event.seconds)})` : "";
      show("state", `Fitting on ${event.demonstrations} examples${seconds}`);
    }
    if (event.event === "step") {
      losses.push([event.step, event.loss]);
      $("steps").hidden = false;
      $("bar").max = event.steps;
      $("bar").value = event.step;
      $("step").textContent = `step ${event.step} of at most ${event.steps}`;
      showLoss(losses);
      if (event.step) startClock((event.at - began) / event.step * (event.steps - event.step));
    }
    if (event.event === "embedding") {
      $("steps").hidden = true;
      show("state", `Embedding ${event.texts} texts`);
      startClock(null);
    }
    if (event.event === "scoring") {
      $("steps").hidden = true;
      show("state", `Evaluating: ${METHODS[event.method] ?? "this task"}`);
      startClock(null);
    }
    if (!["failed", "cancelled", "done"].includes(event.event)) continue;
    job = null;
    if (event.event === "failed") showError(new Error(event.error.message));
    if (event.event === "cancelled") show("state", "Cancelled");
    if (event.event === "done") {
      show("state", `Task ${event.name} is ready, fitted on ${event.demonstrations} examples.`);
      if (event.history.length) showLoss(event.history.map((loss, step) => [step, loss]));
      $("another").hidden = false;
      tokensRead[event.digest] = event.tokens;
      await listTasks(event.name);
    }
  }
}

// Draw pairs of a step and its loss; the server does not send every step.
function showLoss(losses) {
  const most = Math.max(...losses.map(([, loss]) => loss), 1e-9), width = Math.max(1, losses.at(-1)[0] - losses[0][0]);
  const points = losses.map(([step, loss]) => `${400 * (step - losses[0][0]) / width},${98 - 94 * loss / most}`).join(" ");
  $("losses").textContent = `${losses[0][1].toFixed(3)} → ${losses.at(-1)[1].toFixed(3)}`;
  $("loss").replaceChildren(element("polyline", undefined, { points, class: "curve" }, SVG));
  $("progress").hidden = false;
}

// Tasks

async function showTask() {
  const name = $("tasks").value;
  $("about").hidden = !name;
  if (!name) return;
  const task = await json("GET", `v1/tasks/${urlName(name)}`), scores = task.evaluation;
  if ($("tasks").value !== name) return; // another task was chosen meanwhile
  const how = scores?.split === "demonstrations" ? " Evaluated by cross-validation." : "";
  const single = scores?.not_evaluated?.length ? ` Not evaluated, because they have one text: ${scores.not_evaluated.join(", ")}.` : "";
  $("what").textContent = `${name}: ${task.labels.length} labels, fitted on ${task.demonstrations} examples.${how}${single}`;
  $("evaluation").hidden = !scores;
  $("errors").hidden = !scores?.confusion;
  const advice = scores?.advice ? ` Advice: ${scores.advice}.` : "";
  $("verdict").textContent = scores ? `Verdict: ${scores.verdict}.${advice}` : "Not evaluated: no labelled rows were left for that.";
  if (!scores) return;
  showScores(scores, tokensRead[task.digest]);
  if (scores.confusion) showConfusion(task.labels, scores);
}

function showScores(scores, tokens) {
  const percent = (share) => (100 * share).toFixed(0), methods = Object.entries(scores.methods), fitted = methods.at(-1)[0];
  const [metric, metricName] = scores.labels_per_row === undefined ? ["accuracy", "Accuracy"] : ["micro_f1", "Micro-F1"];
  const best = Math.max(...methods.map(([, score]) => score[metric]));
  const columns = {
    [`${metricName} on ${scores.rows} rows`]: (score) => [`${(100 * score[metric]).toFixed(1)} %`, score[metric] === best ? "number best" : "number"],
    "95\u00a0% interval": (score) => [`${percent(score.low)}–${percent(score.high)}`, "number"],
    "Macro-F1": (score) => score.macro_f1 === undefined ? null : [score.macro_f1.toFixed(3), "number"],
    "ms per text": (score) => score.milliseconds_per_query === undefined ? null : [score.milliseconds_per_query.toFixed(1), "number"],
    "Tokens read": (_, method) => tokens ? [String(NO_TOKENS.includes(method) ? "–" : method.startsWith("few_shot") ? tokens.few_shot : tokens.task), "number"] : null,
  };
  const shown = Object.entries(columns).filter(([, cell]) => methods.every(([method, score]) => cell(score, method)));
  const title = (method) => METHODS[method] ?? (method === fitted ? "This task" : method.replaceAll("_", " "));
  $("evaluation").replaceChildren(
    table(["Method", ...shown.map(([name]) => name)], methods.map(([method, score]) => [title(method), ...shown.map(([, cell]) => cell(score, method))]), "stack"),
    ...Object.entries(scores.not_run).map(([method, reason]) => element("p", `${title(method)} was not evaluated: ${reason}`)));
}

function showConfusion(labels, { confusion, support, recall }) {
  const rows = labels.map((label, place) => [label, [String(support[label]), "number"],
    [recall[label] === null ? "–" : recall[label].toFixed(2), "number"],
    ...confusion[place].map((count, other) => [String(count), other === place ? "number best" : "number"])]);
  $("confusion").replaceChildren(table(["True label", "Rows", "Recall", ...labels.map((label) => `as ${label}`)], rows));
}

async function listTasks(chosen) {
  const { data: [base, ...tasks] } = await json("GET", "v1/models");
  $("base").textContent = `Create text classifiers for the model ${base.id} from labelled examples.`;
  $("tasks").replaceChildren(...tasks.map((task) => element("option", task.id, { value: task.id })));
  if (chosen !== undefined) $("tasks").value = chosen;
  $("ask").hidden = !tasks.length;
  $("none").hidden = tasks.length > 0;
  $("answers").hidden = $("wrong").hidden = true;
  show("answered", "");
  showCode();
  await showTask();
}

function probabilities(labels, values, multiLabel) {
  const ranked = labels.map((label, place) => [label, values[place]]).sort((a, b) => b[1] - a[1]);
  const rest = ranked.splice(MAX_PROBABILITIES), node = element("span");
  if (rest.length && !multiLabel) ranked.push([`${rest.length} other labels`, rest.reduce((sum, [, value]) => sum + value, 0)]);
  for (const [label, value] of ranked) node.append(element("span", `${label} ${value.toFixed(3)}`, { class: "probability" }), " ");
  return node;
}

function answerTable(reply, texts) {
  const rows = reply.data.map((answer) => [texts[answer.index], answer.label ? [answer.label, "label"] : ["none", "none"],
    [Math.max(...answer.probs).toFixed(3), "number"], probabilities(reply.labels, answer.probs, reply.multi_label)]);
  return table(["Text", "Label", "Confidence", "Probabilities"], rows, "stack");
}

async function classify(event) {
  event.preventDefault();
  const input = $("texts").value.split("\n").filter((line) => line.trim()), started = performance.now();
  const model = $("tasks").value, least = $("least").valueAsNumber;
  show("answered", "Classifying");
  $("answers").hidden = $("wrong").hidden = true;
  try {
    const reply = await json("POST", "v1/classify", { model, input, ...(least ? { min_confidence: least } : {}) });
    $("answers").replaceChildren(answerTable(reply, input));
    $("answers").hidden = false;
    if (!reply.multi_label) offerCorrection(model, input, reply.labels);
    const milliseconds = (performance.now() - started).toFixed(0), none = reply.data.filter((answer) => !answer.label).length;
    show("answered", `${input.length} text${input.length > 1 ? "s" : ""}${none ? `, ${none} without a label${least ? ` (confidence below ${least})` : ""}` : ""}, ${
      milliseconds} ms, ${reply.usage.prompt_tokens} tokens read.`);
  } catch (error) { show("answered", error.message, true); }
}

function offerCorrection(model, texts, labels) {
  $("wrong").hidden = !$("closed").hidden;
  $("wrong").dataset.model = model;
  $("wrong-text").replaceChildren(...texts.map((text) => element("option", text, { value: text })));
  $("right-label").replaceChildren(element("option", "Choose a label", { value: "" }), ...labels.map((label) => element("option", label, { value: label })));
  show("corrected", "");
}

async function correct(event) {
  event.preventDefault();
  const name = $("wrong").dataset.model, body = { task: name, text: $("wrong-text").value, label: $("right-label").value };
  try {
    const { labelled } = await json("POST", "v1/feedback", body);
    $("right-label").value = "";
    show("corrected", `Saved. The labelling project ${name} has ${labelled} label${labelled === 1 ? "" : "s"} now.`);
  } catch (error) { show("corrected", error.message, true); }
}

async function removeTask() {
  const name = $("tasks").value;
  if (!confirm(`Remove the task ${name}?`)) return;
  try {
    await json("DELETE", `v1/tasks/${urlName(name)}`);
    await listTasks();
    show("answered", `Task ${name} was removed.`);
  } catch (error) { show("answered", error.message, true); }
}

function showCode() {
  const text = $("texts").value.split("\n").find((line) => line.trim()) || "a text";
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  $("code").textContent = CALLS[call](url, $("tasks").value || "TASK", text, $("token").value, $("least").valueAsNumber);
  for (const button of $("copies").children) button.setAttribute("aria-pressed", String(button.dataset.call === call));
  $("copied").textContent = "";
}

// The form

async function fillExample() {
  $("name").value ||= "mood";
  $("template").value = "{text}\nAnswer: {label}";
  source = null;
  $("examples").value = await (await send("GET", "example.csv")).text();
  $("texts").value ||= "the gloomy baker rested near the harbour\na cheerful nurse walked despite the rain";
  updateColumns();
  showCode();
}

function clearForm() {
  for (const id of ["name", "shots", "labels", "separator", "examples", "file", "test"]) $(id).value = "";
  for (const id of ["data", "progress", "another"]) $(id).hidden = true;
  source = test = null;
  updateColumns();
  show("state", "");
  $("name").focus();
}

async function load() {
  $("denied").textContent = "";
  try {
    await listTasks();
    const running = (await json("GET", "v1/jobs")).data.find((other) => other.kind === "fit" && ["queued", "running"].includes(other.status));
    if (running && !job) {
      $("name").value ||= running.name;
      await follow(running.id);
    }
  } catch (error) {
    const closed = error.code === "read_only";
    $("closed").hidden = !closed;
    $("fit").hidden = closed;
    $("remove").hidden = closed;
    if (error.status !== 401 && !closed) showError(error);
  }
}

function start() {
  for (const name of Object.keys(CALLS)) {
    const button = element("button", name, { type: "button", "data-call": name });
    button.addEventListener("click", () => { call = name; showCode(); });
    $("copies").append(button);
  }
  $("copy").addEventListener("click", () => (navigator.clipboard?.writeText($("code").textContent) ?? Promise.reject()).then(
    () => { $("copied").textContent = "Copied"; }, () => { $("copied").textContent = "Select the code and copy it"; }));
  $("check").addEventListener("click", () => submitFit(true));
  $("fit").addEventListener("submit", (event) => { event.preventDefault(); submitFit(false); });
  $("example").addEventListener("click", () => fillExample().catch(showError));
  $("cancel").addEventListener("click", () => json("POST", `v1/jobs/${job}/cancel`).catch(showError));
  $("ask").addEventListener("submit", classify);
  $("correct").addEventListener("submit", correct);
  $("tasks").addEventListener("change", () => { showCode(); $("answers").hidden = $("wrong").hidden = true; show("answered", ""); showTask().catch(showError); });
  $("least").addEventListener("input", showCode);
  $("another").addEventListener("click", clearForm);
  $("texts").addEventListener("input", showCode);
  $("remove").addEventListener("click", removeTask);
  $("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", $("token").value);
    load();
  });
  const area = $("examples");
  area.addEventListener("paste", () => { // over everything: these are other rows
    if (area.selectionStart === 0 && area.selectionEnd === area.value.length) source = null;
  });
  area.addEventListener("input", () => {
    if (!area.value.trim()) source = null;
    updateColumns();
  });
  area.addEventListener("dragover", (event) => { event.preventDefault(); area.classList.add("drop"); });
  area.addEventListener("dragleave", () => area.classList.remove("drop"));
  area.addEventListener("drop", (event) => {
    area.classList.remove("drop");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    takeFile(event.dataTransfer.files[0]);
  });
  for (const id of ["file", "test"]) {
    $(id).addEventListener("click", () => { $(id).value = ""; }); // otherwise a changed file cannot be chosen again
  }
  $("test").addEventListener("click", () => takeTestFile());
  $("file").addEventListener("change", () => takeFile($("file").files[0]));
  $("test").addEventListener("change", () => takeTestFile($("test").files[0]));
  $("token").value = sessionStorage.getItem("token") ?? "";
  updateColumns();
  showCode();
  load();
}

start();
