"use strict";
// The page that labels texts. Ten texts at a time are leased to this tab, see labelling_store.py.
const POLL_MS = 2000; // interval at which the state of an open project is read
const WAIT_MS = 1000; // between two requests for texts while the first ones are being chosen
const LINES = "one text per line"; // value of the text column if there are no columns
const MAX_DOUBTS = 5; // listed
const CLASSIFIERS = { embeddings: "sentence embeddings", tfidf: "character n-grams" };
const CHART = { left: 40, right: 390, top: 10, bottom: 130 };
let project = null; // state of the open project
let source = null; // chosen file: { name, format, content }
let queue = []; // texts to label
let given = {}; // labels given in this tab, by id of the text: preselected after an undo
let busy = false; // whether a request that changes the queue is running
let finishing = false;

function labeller() {
  const known = sessionStorage.getItem("labeller");
  if (known) return known;
  const id = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  sessionStorage.setItem("labeller", id);
  return id;
}

const projectPath = (name = project.id) => `v1/labelling/projects/${urlName(name)}`;
const queryPath = (route) => `v1/labelling/${route}?project=${encodeURIComponent(project.id)}`;
const post = (route, body) => json("POST", `v1/labelling/${route}`, { project: project.id, ...body });
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const anyOf = new Intl.ListFormat("en", { type: "disjunction" });
const emptyLabels = () => project.labels.filter((label) => !project.per_label[label]);

// Projects

async function listProjects() {
  const { data } = await json("GET", "v1/labelling/projects");
  $("projects").replaceChildren();
  if (!data.length) return;
  $("projects").append(table(["Project", "Labelled", "Texts", "Open"], data.map((one) => {
    const open = element("button", "Open", { type: "button", "aria-label": `Open ${one.id}` });
    open.addEventListener("click", () => openProject(one.id).catch(showError));
    return [one.id, [String(one.labelled), "number"], [String(one.texts), "number"], open];
  }), "stack"));
}

async function openProject(name) {
  project = await json("GET", projectPath(name));
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  queue = [];
  given = {};
  for (const id of ["labelling", "curve", "review", "finish"]) $(id).hidden = false;
  for (const id of ["code", "copying"]) $(id).hidden = true;
  for (const id of ["served", "saved"]) show(id, "");
  $("new").open = false;
  makeChoices();
  showState();
  if (["queued", "running"].includes(project.fit?.status)) followFit(project.fit.id).catch(showFinishError);
  await Promise.all([nextTexts(), showIssues()]);
  if (!$("answer").hidden) $("text").focus();
}

function closeProject() {
  project = null;
  history.replaceState(null, "", location.pathname);
  for (const id of ["labelling", "curve", "review", "finish"]) $(id).hidden = true;
}

async function removeProject() {
  if (!confirm(`Delete the project ${project.id} with its ${plural(project.texts, "text")} and ${plural(project.labelled, "label")}?`)) return;
  const name = project.id;
  await json("DELETE", projectPath());
  closeProject();
  $("new").open = true;
  await listProjects();
  show("state", `Project ${name} and its texts were deleted. A task that was served from it stays.`);
  $("file").focus();
}

// A new project

function updateColumns() {
  const content = source?.content ?? $("texts").value, format = source?.format ?? formatOf("", content);
  const columns = [...new Set(columnsOf(content, format))];
  const isTable = source ? source.isTable : format !== "csv" || (columns.length > 1 && columns.some((name) => name.toLowerCase() === "text"));
  choose("label-column", columns, "label", LABEL_NAMES);
  $("label-column").options[0].textContent = "No labels yet";
  $("label-column").value = "";
  choose("text-column", columns, "text", TEXT_NAMES);
  $("text-column").append(element("option", "Each line is a text", { value: LINES }));
  if (!isTable) $("text-column").value = LINES;
  else if (columns.length === 1) $("text-column").value = columns[0];
}

async function takeFile(file) {
  source = null;
  if (!file) return updateColumns();
  try {
    const { name, format, content, encoding } = await readFile(file);
    source = { name, format, content, isTable: !/\.txt$/i.test(name) };
    $("name").value ||= stem(name);
    $("texts").value = "";
    updateColumns();
    show("state", encoding === "windows-1252" ? `${name} is read as Windows-1252: save it as UTF-8 if that is wrong.` : `${name} is read: name the labels.`);
  } catch (error) { showError(error); }
}

function newProject() {
  const content = source?.content ?? $("texts").value, column = $("text-column").value;
  const body = { name: $("name").value, labels: $("labels").value.split(",").map((label) => label.trim()).filter((label) => label) };
  if (column === LINES) return { ...body, texts: content.split(/\r?\n/).filter((line) => line.trim()) };
  const texts = { name: source?.name ?? PASTED, format: source?.format ?? formatOf("", content), content };
  return { ...body, texts, text_column: column, ...($("label-column").value ? { label_column: $("label-column").value } : {}) };
}

async function create(event) {
  event.preventDefault();
  $("texts").setCustomValidity(source || $("texts").value.trim() ? "" : "Choose a file, or paste texts.");
  const few = $("labels").value.split(",").filter((label) => label.trim()).length < 2;
  $("labels").setCustomValidity(few ? "Name at least two labels, separated by commas." : "");
  const same = $("label-column").value && $("label-column").value === $("text-column").value;
  $("label-column").setCustomValidity(same ? "Choose two different columns." : "");
  if (!["texts", "text-column", "label-column", "labels", "name"].every((id) => $(id).reportValidity())) return;
  $("refused").replaceChildren();
  show("state", "Reading the texts");
  try {
    const made = await json("POST", "v1/labelling/projects", newProject());
    const reasons = { unusable: "empty or unreadable", too_long: "too long for the model", repeated: "repeated" };
    const left = Object.entries(made.left_out).filter(([, count]) => count).map(([reason, count]) => `${count} ${reasons[reason]}`);
    show("state", `${plural(made.texts, "text")}${left.length ? `; left out: ${left.join(", ")}` : ""}.`);
    await listProjects();
    await openProject(made.id);
  } catch (error) { showError(error); }
}

// Labelling

function makeChoices() {
  $("choices").replaceChildren($("choices").firstElementChild, ...project.labels.map((label, place) => {
    const choice = element("label"), key = place < 9 ? element("kbd", String(place + 1)) : "";
    choice.append(element("input", undefined, { type: "radio", name: "label", value: String(place) }), key, element("span", label), element("span", "", { class: "count" }));
    return choice;
  }));
}

const radios = () => [...$("choices").querySelectorAll("input")];

function showText() {
  const [text] = queue;
  $("answer").hidden = !text;
  if (!text) return;
  const proposal = given[text.id] ?? text.proposal;
  radios().forEach((radio, place) => { radio.checked = project.labels[place] === proposal; });
  $("text").textContent = text.text;
  const sure = text.confidence === null ? "no proposal yet" : `proposal: ${text.proposal}, ${(100 * text.confidence).toFixed(0)} %`;
  $("place").textContent = `${plural(queue.length, "text")} left of these; ${sure}`;
}

async function nextTexts() {
  if (queue.length || !project) return showText();
  const name = project.id;
  const { data, waiting } = await post("next", { labeller: labeller() });
  if (project?.id !== name) return;
  queue = data;
  showText();
  listProjects().catch(showSaveError);
  if (waiting) {
    show("saved", "Choosing the first texts");
    setTimeout(() => nextTexts().catch(showSaveError), WAIT_MS);
  } else if (!queue.length) {
    const counts = project.labels.map((label) => `${label} ${project.per_label[label]}`).join(", ");
    show("saved", `No text is left: all are labelled (${counts}), skipped, or being labelled by another person.`);
  } else if ($("saved").textContent === "Choosing the first texts") show("saved", "");
}

function showSaveError(error) {
  show("saved", error.message, true);
}

function showFinishError(error) {
  show("served", error.message, true);
}

// Run an action on the queue unless another one is running, and then show the next text.
async function act(action) {
  if (busy || !project) return;
  busy = true;
  $("answer").ariaBusy = "true";
  const inside = $("answer").contains(document.activeElement);
  try {
    await action();
    await nextTexts();
  } catch (error) { showSaveError(error); } finally { busy = false; }
  $("answer").ariaBusy = "false";
  if (inside && !$("answer").hidden) $("text").focus();
}

function save(label) {
  return act(async () => {
    const [text] = queue;
    if (!text) return;
    try {
      const counts = await post("answers", { labeller: labeller(), text: text.id, label, replaces: text.label });
      Object.assign(project, counts);
      if (label !== null) project.per_label[label] += 1;
      given[text.id] = label;
      show("saved", "");
    } catch (error) {
      if (error.status !== 409 && error.status !== 404) throw error;
      showSaveError(error); // another person has this text: go on with the next one
    }
    queue.shift();
    showText();
    showState();
  });
}

function saveChosen() {
  const place = radios().findIndex((radio) => radio.checked);
  if (place < 0) return show("saved", "Choose a label first, or skip the text.", true);
  return save(project.labels[place]);
}

const undo = () => act(async () => {
  const text = await post("undo", { labeller: labeller() });
  queue = [text, ...queue.filter((other) => other.id !== text.id)];
  showText();
  show("saved", "The last answer was undone.");
  await readState();
});

// Keys work while the focus is in the form, so they do not collide with those of screen readers.
function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const place = Number(event.key) - 1;
  if (place >= 0 && place < Math.min(9, project.labels.length)) radios()[place].checked = true;
  else if (event.key === "Enter" && event.target.tagName !== "BUTTON") saveChosen();
  else if (event.key.toLowerCase() === "s") save(null);
  else if (event.key.toLowerCase() === "u") undo();
  else return;
  event.preventDefault();
}

// State of the project

async function readState() {
  if (!project) return;
  const before = project, state = await json("GET", projectPath());
  if (project !== before) return;
  const isNew = state.job?.status === "done" && state.job.id !== before.job?.id || state.job?.status !== before.job?.status;
  project = state;
  showState();
  if (isNew || state.issues !== before.issues) await showIssues();
}

function showState() {
  const { labelled, texts, skipped, labellers, labels, per_label: perLabel } = project;
  const empty = emptyLabels();
  const missing = labelled && empty.length ? ` No text has the label ${anyOf.format(empty)} yet.` : "";
  const others = labellers > 1 ? ` ${labellers} people are labelling.` : "";
  $("counts").textContent = `${project.id}: ${labelled} of ${plural(texts, "text")} labelled${skipped ? `, ${skipped} skipped` : ""}.${missing}${others}`;
  $("choices").querySelectorAll(".count").forEach((count, place) => { count.textContent = `(${perLabel[labels[place]]})`; });
  showRound(project.job);
  showCurve(project);
  showExpected(project);
  $("serve").disabled = finishing;
}

function showRound(job) {
  const last = job?.last;
  let text = "";
  if (job?.status === "queued") text = "Waiting for the model: you can go on labelling.";
  else if (job?.status === "running") text = `${last.event === "embedding" ? `Comparing ${plural(last.texts, "text")}` : "Choosing texts"}: you can go on labelling.`;
  else if (job?.status === "failed") text = `The last round failed: ${last.error.message}`;
  else if (last?.labels && project.labels.length - last.missing.length < 2) text = "The proposals are zero-shot answers until two labels have a text.";
  else if (last?.labels && last.missing.length) text = "Labels without a text are not proposed: choose them yourself.";
  if ($("round").textContent !== text) show("round", text, job?.status === "failed");
}

function showCurve({ rounds, classifier }) {
  $("figure").hidden = !rounds.length;
  if (!rounds.length) return;
  const last = rounds.at(-1);
  $("measured").textContent = `With ${plural(last.labels, "label")}, a classifier on ${CLASSIFIERS[classifier]} is right about ${
    percent(last.accuracy)} of the labelled texts in a cross-validation (95 % interval ${(100 * last.low).toFixed(0)} to ${
    (100 * last.high).toFixed(0)} %). The task adds the LLM, which is fitted and evaluated when you finish.`;
  const { left, right, top, bottom } = CHART, most = last.labels;
  const x = (labels) => left + (right - left) * labels / most, y = (share) => bottom - (bottom - top) * share;
  const nodes = [0, 0.5, 1].flatMap((share) => [
    element("line", undefined, { x1: left, x2: right, y1: y(share), y2: y(share), class: "grid" }, SVG),
    element("text", `${100 * share} %`, { x: left - 5, y: y(share) + 4, "text-anchor": "end" }, SVG)]);
  for (const one of rounds) {
    nodes.push(element("line", undefined, { x1: x(one.labels), x2: x(one.labels), y1: y(one.low), y2: y(one.high), class: "interval" }, SVG),
      element("circle", undefined, { cx: x(one.labels), cy: y(one.accuracy), r: 3.5, class: "point" }, SVG));
  }
  const shown = rounds.filter((one, place) => place === rounds.length - 1 || x(last.labels) - x(one.labels) > 25);
  nodes.push(...shown.map((one) => element("text", String(one.labels), { x: x(one.labels), y: bottom + 18, "text-anchor": "middle" }, SVG)));
  const points = rounds.map((one) => `${x(one.labels)},${y(one.accuracy)}`).join(" ");
  $("points").replaceChildren(...nodes, element("polyline", undefined, { points, class: "curve" }, SVG));
  $("points").setAttribute("aria-label", `Accuracy by number of labels: ${rounds.map((one) => `${one.labels} labels ${percent(one.accuracy)}`).join(", ")}`);
}

function showExpected({ next_round: next, labels_per_round: step }) {
  const signed = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)}`;
  $("expected").textContent = next ? `${step} more labels typically change the accuracy on new texts by ${signed(next.gain)} points (95 % of the time by ${
    signed(next.low)} to ${signed(next.high)}).` : "";
}

// Probably wrong labels

async function showIssues() {
  const { data } = await json("GET", queryPath("review"));
  const accuracy = project.rounds.at(-1)?.accuracy;
  $("doubts").textContent = data.length ? `Classifiers fitted without these texts, with an accuracy of ${percent(accuracy)}, disagree with ${
    plural(data.length, "label")}${data.length > MAX_DOUBTS ? `; these are the least probable` : ""}.` : "No label looks wrong so far.";
  $("issues").replaceChildren(...data.slice(0, MAX_DOUBTS).map((issue) => {
    const item = element("li"), line = element("p", undefined, { class: "row" });
    item.append(element("p", issue.text, { class: "doubtful" }),
      element("p", `Labelled ${issue.label} (probability ${issue.probability.toFixed(2)}); more probable: ${issue.suggested}.`));
    for (const other of issue.near_duplicates) item.append(element("p", `Nearly the same text has the label ${other.label}: ${other.text}`));
    for (const [label, caption] of [[issue.suggested, `Change to ${issue.suggested}`], [issue.label, `Keep ${issue.label}`]]) {
      const button = element("button", caption, { type: "button" });
      button.addEventListener("click", () => decide(issue, label).catch(showSaveError));
      line.append(button);
    }
    item.append(line);
    return item;
  }));
}

async function decide(issue, label) {
  const place = [...$("issues").children].findIndex((item) => item.contains(document.activeElement));
  await post("answers", { labeller: labeller(), text: issue.id, label, replaces: issue.label }).catch((error) => {
    if (error.status !== 409) throw error; // another person was faster
  });
  await showIssues();
  await readState();
  ($("issues").children[Math.min(place, $("issues").children.length - 1)]?.querySelector("button") ?? $("serve")).focus();
}

// The task

async function exportLabels() {
  const url = URL.createObjectURL(await (await send("GET", queryPath("export"))).blob());
  element("a", undefined, { href: url, download: `${project.id.replaceAll("/", "_")}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// Fit and serve the task. Labels without a text are left out of it if the user agrees.
async function finish() {
  const name = project.id, tasks = (await json("GET", "v1/models")).data;
  if (tasks.some((task) => task.id === name && task.object === "model" && task.parent) && !confirm(`Replace the task ${name}?`)) return;
  await readState();
  if (project?.id !== name) return;
  const empty = emptyLabels(), omit = empty.length > 0 && project.labels.length - empty.length > 1;
  if (omit && !confirm(`No text has the label ${anyOf.format(empty)}. Finish without ${empty.length === 1 ? "it" : "them"}?`)) return;
  await followFit((await post("finish", { omit_empty_labels: omit })).id);
}

// Follow the fit of the task to its end, reconnecting if the server is restarted.
async function followFit(id) {
  const name = project.id;
  finishing = $("serve").disabled = true;
  try {
    while (!await watchFit(name, id)) await new Promise((done) => setTimeout(done, WAIT_MS));
  } finally {
    finishing = $("serve").disabled = false;
  }
}

// Show the events of a fit, and return whether it has ended or its project was closed.
async function watchFit(name, id) {
  const labels = `all ${plural(project.labelled, "label")}`;
  try {
    for await (const event of events(await send("GET", `v1/jobs/${id}/events`))) {
      if (project?.id !== name) return true;
      if (event.event === "queued") show("served", "Waiting for other fits to finish");
      if (["started", "resumed"].includes(event.event)) show("served", `Fitting ${labels}`);
      if (event.event === "drawn") show("served", `Fitting ${labels}${event.seconds ? ` (about ${duration(event.seconds)})` : ""}`);
      if (event.event === "step") show("served", `Fitting ${labels}: step ${event.step} of at most ${event.steps}`);
      if (event.event === "embedding") show("served", `Fitting ${labels}: embedding ${plural(event.texts, "text")}`);
      if (event.event === "scoring") show("served", `Evaluating: ${event.method.replaceAll("_", " ")}`);
      if (event.event === "cancelled") show("served", "Cancelled");
      if (event.event === "failed") show("served", event.error.message, true);
      if (event.event === "done") showTask(name, event);
      if (["done", "failed", "cancelled"].includes(event.event)) return true;
    }
  } catch (error) {
    if (!error.away) throw error;
    show("served", "The server does not answer. The fit continues when it is back.", true);
  }
  return false;
}

function showTask(name, { demonstrations, evaluation }) {
  const score = Object.values(evaluation?.methods ?? {}).at(-1);
  const accuracy = score ? ` Accuracy in a cross-validation: ${percent(score.accuracy)}.` : "";
  show("served", `Task ${name} is served, fitted on ${plural(demonstrations, "label")}.${accuracy} Call it:`);
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  $("code").textContent = CALLS.curl(url, name, queue[0]?.text ?? "a text", $("token").value);
  for (const id of ["code", "copying"]) $(id).hidden = false;
  $("copied").textContent = "";
}

async function load() {
  $("denied").textContent = "";
  try {
    await listProjects();
    const name = decodeURIComponent(location.hash.slice(1));
    if (name) await openProject(name);
  } catch (error) {
    const closed = error.code === "read_only";
    $("closed").hidden = !closed;
    $("new").hidden = closed;
    if (error.status !== 401 && !closed) showError(error);
  }
}

function start() {
  $("token").value = sessionStorage.getItem("token") ?? "";
  $("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", $("token").value);
    load();
  });
  $("create").addEventListener("submit", create);
  $("file").addEventListener("click", () => {
    $("file").value = ""; // otherwise a changed file cannot be chosen again
    takeFile();
  });
  $("file").addEventListener("change", () => takeFile($("file").files[0]));
  const area = $("texts");
  area.addEventListener("input", () => {
    source = null;
    $("file").value = "";
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
  $("answer").addEventListener("submit", (event) => { event.preventDefault(); saveChosen(); });
  $("answer").addEventListener("keydown", pressKey);
  $("skip").addEventListener("click", () => save(null));
  $("undo").addEventListener("click", undo);
  $("serve").addEventListener("click", () => finish().catch(showFinishError));
  $("export").addEventListener("click", () => exportLabels().catch(showFinishError));
  $("remove").addEventListener("click", () => removeProject().catch(showFinishError));
  $("copy").addEventListener("click", () => (navigator.clipboard?.writeText($("code").textContent) ?? Promise.reject()).then(
    () => { $("copied").textContent = "Copied"; }, () => { $("copied").textContent = "Select the code and copy it"; }));
  setInterval(() => { if (!document.hidden) readState().catch(() => {}); }, POLL_MS);
  updateColumns();
  load();
}

start();
