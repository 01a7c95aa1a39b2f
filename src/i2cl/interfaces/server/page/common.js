"use strict";
// Shared by both pages. Text from users and from the server is only assigned to textContent, never parsed as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const FORMATS = ["csv", "tsv", "json", "jsonl"];
const PASTED = "pasted text"; // name of rows that come from no file
const TEXT_NAMES = /text|message|review|sentence|content|body|comment|question|query|utterance|description/i;
const LABEL_NAMES = /label|category|class|intent|topic|sentiment|rating|target|tag/i;
const MAX_LISTED_ROWS = 100; // of refused rows

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
  const buffer = await file.arrayBuffer().catch(() => { throw new Error(`${file.name} has changed or cannot be read: choose it again.`); });
  const bytes = new Uint8Array(buffer);
  let encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2).join()] ?? "utf-8", content;
  try {
    content = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    encoding = "windows-1252";
    content = new TextDecoder(encoding).decode(bytes);
  }
  if (content.includes("\0")) throw new Error(`${file.name} is not a text file: save it as CSV, TSV, JSON or JSON Lines.`);
  if (!content.trim()) throw new Error(`${file.name} is empty: choose another file.`);
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

const stem = (name) => name.replace(/\.[^.]*$/, "").trim().slice(0, 128);

// Jobs

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

const duration = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s` : `${Math.round(seconds / 60)} minutes`;

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
