"use strict";
// Everything from users and from the server goes into textContent, never into HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const METHODS = { zero_shot: "Zero-shot", "zero_shot+batch_calibration": "Zero-shot, calibrated", few_shot: "Few-shot", sentence_embeddings: "Sentence embeddings" };
const MOST_SHOWN = 100; // rows that are refused
const AGAIN = 2000; // milliseconds before a server that went away is asked again
const SIDE = 18, LEFT = 92; // pixels of a cell of the map, and of the names of its rows
let call = "curl", job = null, read = {}, clock = null;

function made(tag, text, attributes = {}, space) {
  const found = space ? document.createElementNS(space, tag) : document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

// Cells are text, or numbers already written as [text, whether it is the largest].
function table(head, rows) {
  const found = made("table"), top = made("tr");
  head.forEach((cell, place) => {
    const name = made("th", undefined, { scope: "col", ...(Array.isArray(rows[0]?.[place]) ? { class: "number" } : {}) });
    name.append(made("span", cell)); // which has a width of its own: a cell would split words
    top.append(name);
  });
  found.append(made("thead"), made("tbody"));
  found.tHead.append(top);
  for (const row of rows) {
    const line = made("tr");
    row.forEach((cell, place) => line.append(place === 0 ? made("th", cell, { scope: "row" })
      : Array.isArray(cell) ? made("td", cell[0], { class: cell[1] ? "number best" : "number" }) : made("td", cell)));
    found.tBodies[0].append(line);
  }
  return found;
}

function lost() {
  throw Object.assign(new Error("The server cannot be reached: check that it runs."), { away: true });
}

async function asked(method, path, body, type = "application/json") {
  const headers = body === undefined ? {} : { "Content-Type": type };
  if ($("token").value) headers.Authorization = `Bearer ${$("token").value}`;
  const reply = await fetch(path, { method, headers, body }).catch(lost);
  if (reply.ok) return reply;
  const { error } = await reply.json().catch(() => ({ error: { message: `The server answered with status ${reply.status}.` } }));
  if (reply.status === 401) {
    $("access").open = true;
    $("denied").textContent = error.message;
  }
  throw Object.assign(new Error(error.message), { rows: error.rows, code: error.code, status: reply.status, away: reply.status > 501 });
}

const json = async (method, path, body) =>
  (await asked(method, path, body === undefined ? undefined : JSON.stringify(body))).json();
const at = (name) => encodeURIComponent(name).replace(/%2F/g, "/");

function say(id, text, wrong = false) {
  $(id).textContent = text;
  $(id).classList.toggle("wrong", wrong);
}

function refuse(error) {
  const rows = error.rows || [];
  say("state", rows.length > 1 ? `${rows.length} rows cannot be used.` : error.message, true);
  $("refused").replaceChildren(...rows.slice(0, MOST_SHOWN).map((row) => made("li", row)));
  if (rows.length > MOST_SHOWN) $("refused").append(made("li", `and ${rows.length - MOST_SHOWN} more`));
}

function parsed(text, where) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${where} cannot be read as JSON (${error.message}): correct it.`);
  }
}

function request(check) {
  const text = $("examples").value.trim(), shots = $("shots").value;
  const options = { name: $("name").value || (check ? "unnamed" : ""), template: $("template").value };
  if (shots) options.shots = Number(shots);
  if (check) options.check = true;
  if (!/^[[{]/.test(text)) return asked("POST", `v1/tasks?${new URLSearchParams(options)}`, `${text}\n`, "text/csv");
  const examples = text.startsWith("[") ? parsed(text, "The list")
    : text.split("\n").flatMap((line, place) => line.trim() ? [parsed(line, `Line ${place + 1}`)] : []);
  return asked("POST", "v1/tasks", JSON.stringify({ ...options, examples }));
}

async function sent(check) {
  const needed = check ? ["shots", "template", "examples"] : ["name", "shots", "template", "examples"];
  if (!needed.every((id) => $(id).reportValidity())) return;
  if (job) return say("state", "A fit runs: wait for it, or cancel it.", true);
  const name = $("name").value, there = [...$("tasks").options].some((one) => one.value === name);
  if (!check && there && !confirm(`Replace the task ${name}?`)) return;
  $("refused").replaceChildren();
  for (const id of ["data", "progress", "another"]) $(id).hidden = true;
  say("state", "Checking");
  try {
    const told = await (await request(true)).json();
    surveyed(told);
    say("state", `${told.rows} rows can be used; ${told.demonstrations} become demonstrations.`);
    if (!check) await followed((await (await request(false)).json()).id);
  } catch (error) { refuse(error); }
}

// What the rows are, before anything is fitted to them.
function surveyed({ data, test_rows }) {
  const most = data.most_tokens ? ` of the ${data.most_tokens} that the model takes` : "";
  const distinct = data.distinct < data.rows ? `, ${data.distinct} of them distinct` : "";
  $("counted").textContent = `${data.rows} rows${distinct}${test_rows ? `, and ${test_rows} to score on` : ""}; the longest text has ${
    data.longest_tokens} tokens${most}.`;
  $("counts").textContent = `Rows of each label: ${Object.entries(data.labels).map(([label, count]) => `${label} ${count}`).join(", ")}.`;
  const odd = Object.entries(data.slips).map(([label, other]) =>
    `The label ${label} has ${data.labels[label]} row${data.labels[label] === 1 ? "" : "s"}: did you mean ${other}? Each is a label of its own.`);
  for (const { text, labels } of data.contradictions) odd.push(`The text "${text}" is labelled ${labels.join(" and ")}: keep one.`);
  const more = data.contradicting - data.contradictions.length;
  if (more > 0) odd.push(`${more} more texts have several labels.`);
  $("odd").replaceChildren(...odd.map((one) => made("li", one)));
  $("data").hidden = false;
}

const lasts = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s` : `${Math.round(seconds / 60)} minutes`;

// Tells each second how long something takes, and from its steps how long it still does at most.
function timed(what) {
  clearInterval(clock);
  $("left").textContent = "";
  if (!what) return;
  const began = Date.now();
  const tell = () => {
    const since = (Date.now() - began) / 1000;
    $("left").textContent = what.left === undefined ? `For ${lasts(since)} so far.` : `At most ${lasts(what.left - since)} left, then the scoring.`;
  };
  clock = setInterval(tell, 1000);
  tell();
}

// Until the fit has ended, also over a server that goes away and comes back: it tells all from the start again.
async function followed(id) {
  job = id;
  $("cancel").hidden = false;
  $("progress").hidden = true;
  timed(null);
  while (job) {
    try {
      await watched(id);
    } catch (error) {
      if (!error.away) {
        refuse(error);
        job = null;
      }
    }
    if (job) {
      say("state", "The server does not answer; the fit goes on when it is back.", true);
      await new Promise((done) => setTimeout(done, AGAIN));
    }
  }
  timed(null);
  $("steps").hidden = true;
  $("live").replaceChildren();
  if (document.activeElement === $("cancel")) $("begin").focus();
  $("cancel").hidden = true;
}

async function watched(id) {
  const losses = [];
  let began;
  for await (const told of events(await asked("GET", `v1/jobs/${id}/events`))) {
    if (told.event === "queued") say("state", "Waiting for its turn");
    if (told.event === "started" || told.event === "resumed") {
      began = told.at;
      say("state", "Fitting");
      timed({});
    }
    if (told.event === "step") {
      losses.push([told.step, told.loss]);
      $("steps").hidden = false;
      $("bar").max = told.steps;
      $("bar").value = told.step;
      $("step").textContent = `step ${told.step} of at most ${told.steps}`;
      curve(losses);
      if (told.sizes) map($("live"), told);
      if (told.step) timed({ left: (told.at - began) / told.step * (told.steps - told.step) });
    }
    if (told.event === "scoring") {
      say("state", `Scoring ${METHODS[told.method] || "the task"} on rows that it was not fitted to`);
      timed({});
    }
    if (!["failed", "cancelled", "done"].includes(told.event)) continue;
    job = null;
    if (told.event === "failed") refuse(new Error(told.error.message));
    if (told.event === "cancelled") say("state", "Cancelled");
    if (told.event === "done") {
      say("state", `Task ${told.name} is ready, from ${told.demonstrations} demonstrations.`);
      if (told.history.length) curve(told.history.map((loss, step) => [step, loss]));
      $("another").hidden = false;
      read[told.digest] = told.tokens;
      await tasks(told.name);
    }
  }
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

// Of pairs of a step and its loss: not every step is told of.
function curve(losses) {
  const most = Math.max(...losses.map(([, loss]) => loss), 1e-9), wide = Math.max(1, losses.at(-1)[0] - losses[0][0]);
  const points = losses.map(([step, loss]) => `${400 * (step - losses[0][0]) / wide},${98 - 94 * loss / most}`).join(" ");
  $("losses").textContent = `${losses[0][1].toFixed(3)} → ${losses.at(-1)[1].toFixed(3)}`;
  $("loss").replaceChildren(made("polyline", undefined, { points, class: "curve" }, SVG));
  $("progress").hidden = false;
}

const writers = (sizes) => sizes[0].length === 1 ? ["block"] : ["attention", "MLP"];

// In bands of as many layers as fit side by side; drawn anew when the page's width changes.
function map(figure, told) {
  const { coefficients, sizes } = told, names = writers(sizes), betas = coefficients.map((layer) => layer.map((pair) => pair[1]));
  const most = Math.max(...sizes.flat(), 1e-9), away = Math.max(...betas.flat().map((beta) => Math.abs(beta - 1)), 1e-9);
  const wide = $("make").parentElement.clientWidth - 32, band = Math.min(sizes.length, Math.max(5, 5 * Math.floor((wide - LEFT) / SIDE / 5)));
  const width = LEFT + band * SIDE, tall = (2 * names.length + 1) * SIDE + 8, height = Math.ceil(sizes.length / band) * tall, cells = [];
  const row = (number, name, values, share, kind) => {
    values.forEach((value, layer) => {
      const x = LEFT + layer % band * SIDE, y = Math.floor(layer / band) * tall + number * SIDE;
      if (layer % band === 0) cells.push(made("text", name, { x: 0, y: y + 13 }, SVG));
      const cell = made("rect", undefined, { x, y, width: SIDE - 2, height: SIDE - 2,
        class: kind(value), "fill-opacity": Math.min(1, share(value)).toFixed(3) }, SVG);
      cell.append(made("title", `${name}, layer ${layer + 1}: ${value.toFixed(4)}`, {}, SVG));
      cells.push(cell);
    });
  };
  names.forEach((name, index) => {
    row(index, `λv ${name}`, sizes.map((layer) => layer[index]), (one) => one / most, () => "more");
    row(names.length + index, `β ${name}`, betas.map((layer) => layer[index]),
      (one) => Math.abs(one - 1) / away, (one) => one < 1 ? "less" : "more");
  });
  for (let layer = 0; layer < sizes.length; layer += 1) {
    if (layer % band && (layer + 1) % 5) continue;
    cells.push(made("text", layer + 1, { x: LEFT + layer % band * SIDE, y: (Math.floor(layer / band) + 1) * tall - 12 }, SVG));
  }
  const drawn = made("svg", undefined, { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "Map of lambda v and beta by layer and writer" }, SVG);
  drawn.append(...cells);
  const note = away > 1e-5 ? `β, blue above 1 and orange below, up to ${away.toFixed(3)} away from it` : "β is 1 throughout";
  figure.replaceChildren(made("figcaption", `What is injected by layer: the size of λv, up to ${most.toFixed(3)}; ${note}`), drawn);
  figure.told = told;
}

async function about() {
  const name = $("tasks").value;
  $("about").hidden = !name;
  if (!name) return;
  const told = await json("GET", `v1/tasks/${at(name)}`), found = told.worth, tokens = read[told.digest];
  if ($("tasks").value !== name) return;
  $("what").textContent = `${name}: ${told.labels.length} labels from ${told.demonstrations} demonstrations.`;
  map($("map"), told);
  $("numbers").replaceChildren(...table(["Layer, writer", "λ", "β", "size of λv"], told.sizes.flatMap((layer, number) =>
    layer.map((size, index) => [`${number + 1} ${writers(told.sizes)[index]}`,
      ...[...told.coefficients[number][index], size].map((value) => [value.toFixed(5)])]))).children);
  $("worth").hidden = !found;
  $("verdict").textContent = found ? `Whether it pays: ${found.verdict}.` : "It was not scored: no labelled rows were left for that.";
  if (!found) return;
  const percent = (share) => (100 * share).toFixed(0), best = Math.max(...Object.values(found.methods).map((one) => one.accuracy));
  const timed = Object.values(found.methods).every((one) => one.milliseconds_per_query !== undefined);
  const rows = Object.entries(found.methods).map(([method, one]) => [METHODS[method] || "This task",
    [`${(100 * one.accuracy).toFixed(1)} %`, one.accuracy === best], [`${percent(one.low)}–${percent(one.high)}`],
    ...(timed ? [[one.milliseconds_per_query.toFixed(1)]] : []), ...(tokens ? [[method.startsWith("few_shot") ? tokens.few_shot : tokens.task]] : [])]);
  const head = ["Method", `Accuracy on ${found.rows} rows`, "95\u00a0%", ...(timed ? ["ms a text"] : [])];
  $("worth").replaceChildren(table(tokens ? [...head, "Tokens read"] : head, rows),
    ...Object.entries(found.not_run).map(([method, why]) => made("p", `${METHODS[method] || "This task"} was not run: ${why}`)));
}

async function tasks(chosen) {
  const told = await json("GET", "v1/models"), [base, ...all] = told.data;
  $("base").textContent = `Labelled examples become a task of one frozen model, ${base.id}.`;
  $("tasks").replaceChildren(...all.map((one) => made("option", one.id, { value: one.id })));
  if (chosen !== undefined) $("tasks").value = chosen;
  besides();
  $("ask").hidden = !all.length;
  $("none").hidden = all.length > 0;
  $("answers").hidden = true;
  say("answered", "");
  shown();
  await about();
}

// The tasks that can answer beside the chosen one.
function besides() {
  const names = [...$("tasks").options].map((one) => one.value).filter((name) => name !== $("tasks").value), before = $("beside").value;
  $("beside").replaceChildren(made("option", "no other task", { value: "" }), ...names.map((name) => made("option", name, { value: name })));
  $("beside").value = names.includes(before) ? before : "";
  $("second").hidden = !names.length;
}

function answer(told, input, named) {
  const sure = (one) => Math.max(...one.probs);
  const rows = told.data.map((one) => [input[one.index], one.label || null, [sure(one).toFixed(2)],
    ...one.probs.map((p) => [p.toFixed(4), p === sure(one)])]);
  const found = table(["Text", "Label", "Confidence", ...told.labels], rows);
  rows.forEach((row, place) => {
    if (row[1] === null) found.tBodies[0].rows[place].cells[1].replaceWith(made("td", "none", { class: "none" }));
  });
  const wide = made("div", undefined, { class: "wide", role: "region", "aria-label": `Answers of ${told.model}`, tabindex: 0 });
  wide.append(found);
  return [...(named ? [made("h3", told.model)] : []), wide];
}

async function classified(event) {
  event.preventDefault();
  const input = $("texts").value.split("\n").filter((line) => line.trim()), started = performance.now();
  const least = $("least").valueAsNumber, names = [$("tasks").value, $("beside").value].filter((name) => name);
  say("answered", "Asking");
  $("answers").hidden = true;
  try {
    const all = await Promise.all(names.map((model) =>
      json("POST", "v1/classify", { model, input, ...(least ? { min_confidence: least } : {}) })));
    $("answers").replaceChildren(...all.flatMap((told) => answer(told, input, names.length > 1)));
    $("answers").hidden = false;
    const milliseconds = (performance.now() - started).toFixed(0), none = all[0].data.filter((one) => !one.label).length;
    const tokens = all.reduce((sum, told) => sum + told.usage.prompt_tokens, 0);
    say("answered", `${input.length} text${input.length > 1 ? "s" : ""}${none ? `, ${none} without a label: below ${least}` : ""}, ${milliseconds} ms, ${tokens} tokens read.`);
  } catch (error) { say("answered", error.message, true); }
}

async function removed() {
  const name = $("tasks").value;
  if (!confirm(`Remove the task ${name}?`)) return;
  try {
    await json("DELETE", `v1/tasks/${at(name)}`);
    await tasks();
    say("answered", `Task ${name} is removed.`);
  } catch (error) { say("answered", error.message, true); }
}

// With a token, calls name the variable that holds it, and never the token itself.
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

function shown() {
  const text = $("texts").value.split("\n").find((line) => line.trim()) || "a text";
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  $("code").textContent = CALLS[call](url, $("tasks").value || "TASK", text, $("token").value, $("least").valueAsNumber);
  for (const button of $("copies").children) button.setAttribute("aria-pressed", String(button.dataset.call === call));
  $("copied").textContent = "";
}

async function taken(file) {
  if (!file) return;
  try {
    $("examples").value = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    say("state", "");
  } catch {
    refuse(new Error(`${file.name} is no text in UTF-8: save it as that.`));
  }
}

async function example() {
  $("name").value ||= "mood";
  $("template").value = "{text}\nAnswer: {label}";
  $("examples").value = await (await asked("GET", "example.csv")).text();
  $("texts").value ||= "the gloomy baker rested near the harbour\na cheerful nurse walked despite the rain";
  shown();
}

// An empty form; the tasks that are there stay.
function another() {
  for (const id of ["name", "shots", "examples", "file"]) $(id).value = "";
  for (const id of ["data", "progress", "another"]) $(id).hidden = true;
  say("state", "");
  $("name").focus();
}

async function opened() {
  $("denied").textContent = "";
  try {
    await tasks();
    const running = (await json("GET", "v1/jobs")).data.find((one) => one.kind === "fit" && ["queued", "running"].includes(one.status));
    if (running && !job) {
      $("name").value ||= running.name;
      await followed(running.id);
    }
  } catch (error) {
    $("closed").hidden = error.code !== "read_only";
    $("fit").hidden = error.code === "read_only";
    if (error.status !== 401 && error.code !== "read_only") refuse(error);
  }
}

function started() {
  for (const name of Object.keys(CALLS)) {
    const button = made("button", name, { type: "button", "data-call": name });
    button.addEventListener("click", () => { call = name; shown(); });
    $("copies").append(button);
  }
  $("copy").addEventListener("click", () => (navigator.clipboard?.writeText($("code").textContent) ?? Promise.reject()).then(
    () => { $("copied").textContent = "Copied"; }, () => { $("copied").textContent = "Select it and copy by hand"; }));
  $("check").addEventListener("click", () => sent(true));
  $("fit").addEventListener("submit", (event) => { event.preventDefault(); sent(false); });
  $("example").addEventListener("click", () => example().catch(refuse));
  $("cancel").addEventListener("click", () => json("POST", `v1/jobs/${job}/cancel`).catch(refuse));
  $("ask").addEventListener("submit", classified);
  $("tasks").addEventListener("change", () => { besides(); shown(); about().catch(refuse); });
  $("least").addEventListener("input", shown);
  $("another").addEventListener("click", another);
  addEventListener("resize", () => { for (const id of ["live", "map"]) if ($(id).firstChild) map($(id), $(id).told); });
  $("texts").addEventListener("input", shown);
  $("remove").addEventListener("click", removed);
  $("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", $("token").value);
    opened();
  });
  const field = $("examples");
  $("file").addEventListener("change", () => taken($("file").files[0]));
  field.addEventListener("dragover", (event) => { event.preventDefault(); field.classList.add("drop"); });
  field.addEventListener("dragleave", () => field.classList.remove("drop"));
  field.addEventListener("drop", (event) => {
    field.classList.remove("drop");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    taken(event.dataTransfer.files[0]);
  });
  $("token").value = sessionStorage.getItem("token") ?? "";
  shown();
  opened();
}

started();
