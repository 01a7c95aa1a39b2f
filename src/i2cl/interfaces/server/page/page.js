"use strict";
// Text from users and from the server is only assigned to textContent, never parsed as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const METHODS = {
  majority_class: "Majority class", zero_shot: "Zero-shot", "zero_shot+batch_calibration": "Zero-shot, calibrated",
  few_shot: "Few-shot", sentence_embeddings: "Sentence embeddings", label_frequency: "Label frequency",
};
const NO_TOKENS = ["majority_class", "label_frequency", "sentence_embeddings", "tfidf"]; // methods that do not run the model
const FORMATS = ["csv", "tsv", "json", "jsonl"];
const PASTED = "pasted text"; // name of rows that come from no file
const TEXT_NAMES = /text|message|review|sentence|content|body|comment|question|query|utterance|description/i;
const LABEL_NAMES = /label|category|class|intent|topic|sentiment|rating|target|tag/i;
const MAX_LISTED_ROWS = 100; // of refused rows
const MAX_PROBABILITIES = 5; // listed per text; the others are summed
const RECONNECT_MS = 2000;
const MIN_SECONDS = 5; // shorter waits show no clock
let call = "curl", job = null, clock = null;
let source = null; // file whose rows are in the text area: { name, format }
let test = null; // test file: { name, format, content }
const tokensRead = {}; // tokens per text, by digest of the task

function element(tag, text, attributes = {}, namespace) {
  const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Build a table. A cell is text, a node, or [text, class]; the first cell of a row is its header.
// Roles are explicit because the layout of narrow screens (class "stack") would remove them.
function table(head, rows, kind) {
  const node = element("table", undefined, { role: "table", ...(kind ? { class: kind } : {}) });
  node.append(element("thead", undefined, { role: "rowgroup" }), element("tbody", undefined, { role: "rowgroup" }));
  const line = (parent, cells) => {
    const row = element("tr", undefined, { role: "row" });
    row.append(...cells);
    parent.append(row);
  };
  line(node.tHead, head.map((name, column) => {
    const cell = element("th", undefined, { scope: "col", role: "columnheader" });
    if (/^number/.test(rows[0]?.[column]?.[1])) cell.className = "number";
    cell.append(element("span", name)); // limits the width without splitting words
    return cell;
  }));
  for (const row of rows) {
    line(node.tBodies[0], row.map((value, column) => {
      if (column === 0) return element("th", value, { scope: "row", role: "rowheader" });
      const [content, name] = Array.isArray(value) ? value : [value];
      const cell = element("td", undefined, { role: "cell", "data-head": head[column], ...(name ? { class: name } : {}) });
      cell.append(content);
      return cell;
    }));
  }
  return node;
}

function throwUnreachable() {
  throw Object.assign(new Error("The server cannot be reached: check that it is running."), { away: true });
}

async function send(method, path, body) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if ($("token").value) headers.Authorization = `Bearer ${$("token").value}`;
  const reply = await fetch(path, { method, headers, body: body && JSON.stringify(body) }).catch(throwUnreachable);
  if (reply.ok) return reply;
  const { error } = await reply.json().catch(() => ({ error: { message: `The server returned status ${reply.status}.` } }));
  if (reply.status === 401) {
    $("access").open = true;
    $("denied").textContent = error.message;
  }
  throw Object.assign(new Error(error.message), { rows: error.rows, code: error.code, status: reply.status, away: reply.status > 501 });
}

const json = async (method, path, body) => (await send(method, path, body)).json();
const urlName = (name) => encodeURIComponent(name).replace(/%2F/g, "/");

function show(id, text, wrong = false) {
  $(id).textContent = text;
  $(id).classList.toggle("wrong", wrong);
}

// One problem is shown as the status; several are listed below it.
function showError(error) {
  const rows = error.rows?.length > 1 ? error.rows : [];
  show("state", rows.length ? `${rows.length} rows cannot be used.` : error.message, true);
  $("refused").replaceChildren(...rows.slice(0, MAX_LISTED_ROWS).map((row) => element("li", row)));
  if (rows.length > MAX_LISTED_ROWS) $("refused").append(element("li", `and ${rows.length - MAX_LISTED_ROWS} more`));
}

// Files and their columns

function formatOf(name, content) {
  const ending = name.split(".").pop().toLowerCase();
  if (FORMATS.includes(ending)) return ending;
  return { "[": "json", "{": "jsonl" }[content.trim()[0]] ?? "csv";
}

// Returns { name, format, content, encoding }.
async function readFile(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2).join()] ?? "utf-8", content;
  try {
    content = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    encoding = "windows-1252";
    content = new TextDecoder(encoding).decode(bytes);
  }
  if (content.includes("\0")) throw new Error(`${file.name} is not a text file: save it as CSV, TSV, JSON or JSON Lines.`);
  if (!content.trim()) throw new Error(`${file.name} is empty: choose a file with labelled rows.`);
  return { name: file.name, format: formatOf(file.name, content), content, encoding };
}

function firstRecord(text, delimiter) {
  const cells = [""];
  let quoted = false;
  for (let at = 0; at < text.length; at += 1) {
    const character = text[at];
    if (character === '"') {
      if (quoted && text[at + 1] === '"') {
        cells[cells.length - 1] += '"';
        at += 1;
      } else quoted = !quoted;
    } else if (!quoted && character === delimiter) cells.push("");
    else if (!quoted && /[\r\n]/.test(character)) break;
    else cells[cells.length - 1] += character;
  }
  return cells.map((cell) => cell.trim());
}

// Column names of the rows, or none if they cannot be read: the server then says what is wrong.
function columnsOf(content, format) {
  const text = content.trimStart();
  if (format === "csv" || format === "tsv") {
    const [, separator] = /^sep=([,;\t|])\s*\n/.exec(text) ?? []; // a line that Excel writes
    const start = separator ? text.slice(text.indexOf("\n") + 1) : text;
    const delimiters = separator ? [separator] : [format === "tsv" ? "\t" : ",", ",", ";", "\t", "|"];
    const headers = delimiters.map((delimiter) => firstRecord(start, delimiter));
    return headers.reduce((best, cells) => (cells.length > best.length ? cells : best)).filter((name) => name);
  }
  try {
    const value = JSON.parse(format === "json" ? text : text.split("\n", 1)[0]);
    const row = Array.isArray(value) ? value[0] : value;
    return typeof row === "object" && row ? Object.keys(row) : [];
  } catch {
    return [];
  }
}

function choose(id, columns, exact, pattern, taken) {
  const before = $(id).value, free = columns.filter((name) => name !== taken);
  const named = free.find((name) => name.toLowerCase() === exact) ?? free.find((name) => pattern.test(name));
  $(id).replaceChildren(element("option", "Choose a column", { value: "" }),
    ...columns.map((name) => element("option", name, { value: name })));
  $(id).value = free.includes(before) && before ? before : named ?? (columns.length === 2 && taken ? free[0] : "");
}

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

const stem = (name) => name.replace(/\.[^.]*$/, "").trim().slice(0, 128);

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
  if (data.separator) warnings.push(`Some labels look like several, separated by "${data.separator}": send a JSON file with lists of labels instead.`);
  const more = data.contradicting - data.contradictions.length;
  if (more > 0) warnings.push(`${more} more texts have several labels.`);
  $("odd").replaceChildren(...warnings.map((warning) => element("li", warning)));
  $("data").hidden = false;
}

const duration = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s` : `${Math.round(seconds / 60)} minutes`;

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

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(throwUnreachable);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
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
  $("what").textContent = `${name}: ${task.labels.length} labels, fitted on ${task.demonstrations} examples.${how}`;
  $("evaluation").hidden = !scores;
  $("errors").hidden = !scores?.confusion;
  $("verdict").textContent = scores ? `Verdict: ${scores.verdict}.` : "Not evaluated: no labelled rows were left for that.";
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
  $("answers").hidden = true;
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
  $("answers").hidden = true;
  try {
    const reply = await json("POST", "v1/classify", { model, input, ...(least ? { min_confidence: least } : {}) });
    $("answers").replaceChildren(answerTable(reply, input));
    $("answers").hidden = false;
    const milliseconds = (performance.now() - started).toFixed(0), none = reply.data.filter((answer) => !answer.label).length;
    show("answered", `${input.length} text${input.length > 1 ? "s" : ""}${none ? `, ${none} without a label (confidence below ${least})` : ""}, ${
      milliseconds} ms, ${reply.usage.prompt_tokens} tokens read.`);
  } catch (error) { show("answered", error.message, true); }
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

// Code to copy. It names the variable that holds the token, never the token itself.
const CALLS = {
  curl: (url, task, text, token, least) => `curl ${url}/v1/classify -H 'Content-Type: application/json' \\\n${
    token ? "  -H \"Authorization: Bearer $I2CL_TOKEN\" \\\n" : ""}  -d ${
    `'${JSON.stringify({ model: task, input: text, ...(least ? { min_confidence: least } : {}) }).replaceAll("'", "'\\''")}'`}`,
  Python: (url, task, text, token, least) => `${token ? "import os\n\n" : ""}from i2cl.interfaces.server.client import Client\n\nclient = Client(${
    JSON.stringify(url)}${token ? ", token=os.environ[\"I2CL_TOKEN\"]" : ""})\nprint(client.classify(${
    JSON.stringify(task)}, [${JSON.stringify(text)}]${least ? `, min_confidence=${least}` : ""}))`,
  OpenAI: (url, task, text, token) => `${token ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(\n    base_url=${
    JSON.stringify(`${url}/v1`)},\n    api_key=${token ? "os.environ[\"I2CL_TOKEN\"]" : "\"none\""},\n)\nreply = client.chat.completions.create(\n    model=${
    JSON.stringify(task)},\n    messages=[{"role": "user", "content": ${
    JSON.stringify(text)}}],\n    logprobs=True,\n)\nprint(reply.choices[0].message.content)`,
};

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
  for (const id of ["name", "shots", "labels", "examples", "file", "test"]) $(id).value = "";
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
  $("tasks").addEventListener("change", () => { showCode(); $("answers").hidden = true; show("answered", ""); showTask().catch(showError); });
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
  $("file").addEventListener("change", () => takeFile($("file").files[0]));
  $("test").addEventListener("change", () => takeTestFile($("test").files[0]));
  $("token").value = sessionStorage.getItem("token") ?? "";
  updateColumns();
  showCode();
  load();
}

start();
