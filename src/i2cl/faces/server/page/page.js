"use strict";
// Everything from users and from the server goes into textContent, never into HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let call = "curl", job = null;

function made(tag, text, attributes = {}, space) {
  const found = space ? document.createElementNS(space, tag) : document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

function table(head, rows) {
  const found = made("table"), top = made("tr");
  for (const cell of head) top.append(made("th", cell, { scope: "col" }));
  found.append(made("thead"), made("tbody"));
  found.tHead.append(top);
  for (const row of rows) {
    const line = made("tr");
    row.forEach((cell, place) => line.append(place === 0 ? made("th", cell, { scope: "row" })
      : made("td", cell, typeof cell === "number" || /^[\d.–%-]/.test(cell) ? { class: "number" } : {})));
    found.tBodies[0].append(line);
  }
  return found;
}

async function asked(method, path, body, type = "application/json") {
  const headers = body === undefined ? {} : { "Content-Type": type };
  if ($("token").value) headers.Authorization = `Bearer ${$("token").value}`;
  const reply = await fetch(path, { method, headers, body });
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => ({ error: { message: `status ${reply.status}` } }));
  if (reply.status === 401) $("access").open = true;
  throw Object.assign(new Error(told.error.message), { rows: told.error.rows });
}

const json = async (method, path, body) =>
  (await asked(method, path, body === undefined ? undefined : JSON.stringify(body))).json();
const at = (name) => encodeURIComponent(name).replace(/%2F/g, "/");

function refuse(error) {
  $("state").textContent = error.message;
  $("refused").replaceChildren(...(error.rows || []).map((row) => made("li", row)));
}

function request(check) {
  const text = $("examples").value.trim(), shots = $("shots").value;
  const options = { name: $("name").value, template: $("template").value };
  if (shots) options.shots = Number(shots);
  if (check) options.check = true;
  if (text.startsWith("[")) {
    return asked("POST", "v1/tasks", JSON.stringify({ ...options, examples: JSON.parse(text) }));
  }
  if (text.startsWith("{")) {
    const examples = text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    return asked("POST", "v1/tasks", JSON.stringify({ ...options, examples }));
  }
  return asked("POST", `v1/tasks?${new URLSearchParams(options)}`, text + "\n", "text/csv");
}

async function sent(check) {
  $("refused").replaceChildren();
  $("state").textContent = check ? "Checking" : "Sending";
  try {
    const told = await (await request(check)).json();
    if (!check) return await followed(told.id);
    $("state").textContent =
      `${told.rows} rows can be used, labels ${told.labels.join(", ")}; ${told.demonstrations} become demonstrations.`;
  } catch (error) { refuse(error); }
}

async function followed(id) {
  job = id;
  $("cancel").hidden = false;
  const losses = [];
  $("state").textContent = "Waiting for its turn";
  for await (const told of events(await asked("GET", `v1/jobs/${id}/events`))) {
    if (told.event === "step") {
      losses.push(told.loss);
      $("state").textContent = `Step ${told.step} of at most ${told.steps}, loss ${told.loss.toFixed(4)}`;
      curve(losses);
    } else if (told.event === "scoring") $("state").textContent = `Scoring ${told.method}`;
    if (told.sizes) map(told);
    if (told.event === "failed") refuse(new Error(told.error.message));
    if (told.event === "cancelled") $("state").textContent = "Cancelled";
    if (told.event === "done") {
      $("state").textContent = `Task ${told.name} is ready.`;
      worth(told);
      await tasks(told.name);
    }
  }
  $("cancel").hidden = true;
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

function curve(losses) {
  const most = Math.max(...losses, 1e-9), step = 380 / Math.max(1, losses.length - 1);
  const points = losses.map((loss, place) => `${10 + place * step},${105 - 90 * loss / most}`).join(" ");
  $("progress").hidden = false;
  $("loss").replaceChildren(made("polyline", undefined, { points, class: "curve" }, SVG),
    made("text", most.toFixed(3), { x: 0, y: 10 }, SVG), made("text", "0", { x: 0, y: 112 }, SVG));
}

function map({ coefficients, sizes }) {
  const writers = sizes[0].length === 1 ? ["block"] : ["attention", "MLP"], side = 14, left = 60;
  const betas = coefficients.map((layer) => layer.map((pair) => pair[1]));
  const most = Math.max(...sizes.flat(), 1e-9), away = Math.max(...betas.flat().map((beta) => Math.abs(beta - 1)), 1e-9);
  const cells = [];
  const drawn = (row, name, value, share, sign) => {
    cells.push(made("text", name, { x: 0, y: row * side + 11 }, SVG));
    value.forEach((one, layer) => cells.push(made("rect", undefined, {
      x: left + layer * side, y: row * side, width: side - 1, height: side - 1, stroke: "#8a8f98", "stroke-width": .3,
      fill: sign(one) < 0 ? "#b4560e" : "#0b5cad", "fill-opacity": Math.min(1, share(one)).toFixed(3) }, SVG)));
  };
  writers.forEach((name, index) => {
    drawn(index, `λv ${name}`, sizes.map((layer) => layer[index]), (one) => one / most, () => 1);
    drawn(writers.length + index, `β ${name}`, betas.map((layer) => layer[index]),
      (one) => Math.abs(one - 1) / away, (one) => one - 1);
  });
  $("heat").setAttribute("viewBox", `0 0 ${Math.max(200, left + sizes.length * side)} ${2 * writers.length * side}`);
  $("heat").replaceChildren(...cells);
  const rows = sizes.flatMap((layer, number) => layer.map((size, index) =>
    [`${number + 1} ${writers[index]}`, coefficients[number][index][0], coefficients[number][index][1], size]));
  $("numbers").replaceChildren(...table(["Layer, writer", "lambda", "beta", "size of lambda v"], rows).children);
  $("map").hidden = false;
}

function worth({ worth: found, tokens }) {
  $("worth").hidden = !found;
  if (!found) return;
  const read = (name) => name.startsWith("few_shot") ? tokens.few_shot : tokens.task;
  const rows = Object.entries(found.methods).map(([name, one]) => [name,
    `${(100 * one.accuracy).toFixed(1)} % (${(100 * one.low).toFixed(0)}–${(100 * one.high).toFixed(0)})`,
    one.milliseconds_per_query.toFixed(1), read(name)]);
  $("worth").replaceChildren(
    table(["Method", `Accuracy on ${found.rows} rows (95 %)`, "ms a text", "Tokens read"], rows),
    made("p", `Whether it pays: ${found.verdict}.`));
}

async function tasks(chosen) {
  const told = await json("GET", "v1/tasks");
  $("tasks").replaceChildren(...told.data.map((one) => made("option", one.id, { value: one.id })));
  if (chosen !== undefined) $("tasks").value = chosen;
  shown();
}

async function classified(event) {
  event.preventDefault();
  const input = $("texts").value.split("\n").filter((line) => line.trim());
  const started = performance.now();
  try {
    const told = await json("POST", "v1/classify", { model: $("tasks").value, input });
    const rows = told.data.map((one) => [input[one.index], one.label, ...one.probs.map((p) => p.toFixed(4))]);
    $("answers").replaceChildren(table(["Text", "Label", ...told.labels], rows));
    $("answers").hidden = false;
    const milliseconds = (performance.now() - started).toFixed(0);
    $("answered").textContent = `${input.length} texts, ${milliseconds} ms, ${told.usage.prompt_tokens} tokens read.`;
  } catch (error) { $("answered").textContent = error.message; }
  shown();
}

const CALLS = {
  curl: (url, task, text) => `curl ${url}/v1/classify -H 'Content-Type: application/json' \\\n  -d ${
    `'${JSON.stringify({ model: task, input: text }).replaceAll("'", "'\\''")}'`}`,
  Python: (url, task, text) => `from i2cl.faces.server.client import Client\n\nclient = Client(${
    JSON.stringify(url)})\nprint(client.classify(${JSON.stringify(task)}, [${JSON.stringify(text)}]))`,
  OpenAI: (url, task, text) => `from openai import OpenAI\n\nclient = OpenAI(base_url=${
    JSON.stringify(`${url}/v1`)}, api_key="TOKEN")\nreply = client.chat.completions.create(\n    model=${
    JSON.stringify(task)},\n    messages=[{"role": "user", "content": ${
    JSON.stringify(text)}}],\n    logprobs=True,\n)\nprint(reply.choices[0].message.content)`,
};

function shown() {
  const text = $("texts").value.split("\n")[0] || "a text";
  $("code").textContent = CALLS[call](location.origin, $("tasks").value || "TASK", text);
  for (const button of $("copies").children) {
    if (button.dataset.call) button.setAttribute("aria-pressed", String(button.dataset.call === call));
  }
}

function started() {
  for (const name of Object.keys(CALLS)) {
    const button = made("button", name, { type: "button", "data-call": name, "aria-pressed": "false" });
    button.addEventListener("click", () => { call = name; shown(); });
    $("copies").append(button);
  }
  const copy = made("button", "Copy", { type: "button" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText($("code").textContent).then(
      () => { $("copied").textContent = "Copied"; }, () => { $("copied").textContent = "Select it and copy by hand"; });
  });
  $("copies").append(copy);
  $("check").addEventListener("click", () => sent(true));
  $("fit").addEventListener("submit", (event) => { event.preventDefault(); sent(false); });
  $("cancel").addEventListener("click", () => json("DELETE", `v1/jobs/${job}`).catch(refuse));
  $("ask").addEventListener("submit", classified);
  $("tasks").addEventListener("change", shown);
  $("texts").addEventListener("input", shown);
  $("token").addEventListener("change", () => tasks().catch(refuse));
  $("remove").addEventListener("click", () =>
    json("DELETE", `v1/tasks/${at($("tasks").value)}`).then(() => tasks(), (error) => { $("answered").textContent = error.message; }));
  $("file").addEventListener("change", async () => { $("examples").value = await $("file").files[0].text(); });
  const field = $("examples");
  field.addEventListener("dragover", (event) => { event.preventDefault(); field.classList.add("drop"); });
  field.addEventListener("dragleave", () => field.classList.remove("drop"));
  field.addEventListener("drop", async (event) => {
    field.classList.remove("drop");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    field.value = await event.dataTransfer.files[0].text();
  });
  tasks().catch(refuse);
}

started();
