// The page: images go to POST predict one by one, and each answer becomes a card.
"use strict";

const KEY_NAME = "phalanx-api-key"; // in sessionStorage: gone when the tab is closed
const AT_ONCE = 3; // requests under way
const MOST_FILES = 100; // of one drop
const MOST_WAITS = 5; // for a server that says 429, per image
const FEW_PIXELS = 96; // images up to this size are shown with sharp pixels
const PLACES = [["upper left", "top", "upper right"], ["left", "centre", "right"],
  ["lower left", "bottom", "lower right"]];
const HEAT = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
const find = (id) => document.getElementById(id);

let queue = [];
let running = 0;
let leave = new AbortController(); // ends what is under way when the results are cleared
let keyAsked = null; // the one question for a key that is open
let modelName = "";
let mostBytes = Infinity; // of a request, as the server says

// --- images come in ---

function take(files, problems = []) {
  const kept = files.slice(0, MOST_FILES);
  if (files.length > kept.length) {
    problems.push(`Only the first ${MOST_FILES} of ${files.length} images were taken; for many, ` +
      "use phalanx request.");
  }
  find("notice").textContent = problems.join("\n");
  if (!kept.length) return;
  find("results").hidden = false;
  const cards = kept.map((file) => makeCard(file));
  find("cards").prepend(...cards.map((job) => job.card));
  queue.push(...cards);
  say(kept.length === 1 ? `Classifying ${kept[0].name}` : `Classifying ${kept.length} images`);
  work();
}

function makeCard(file) {
  const card = find("card").content.firstElementChild.cloneNode(true);
  const job = { file, name: file.name || "pasted image", card, waits: 0 };
  const original = card.querySelector(".original");
  card.querySelector(".name").textContent = job.name;
  job.address = URL.createObjectURL(file);
  original.alt = job.name;
  original.onload = () => original.classList.toggle("few", original.naturalWidth <= FEW_PIXELS);
  original.onerror = () => { card.querySelector(".own").hidden = true; }; // TIFF, HEIC, no image
  original.src = job.address;
  card.querySelector(".network").hidden = true;
  card.querySelector(".again").onclick = () => {
    job.waits = 0;
    show(job, { waiting: "waiting" });
    queue.push(job);
    work();
  };
  return job;
}

function takeDropped(transfer) {
  const items = [...transfer.items].filter((item) => item.kind === "file");
  const files = [], problems = [];
  for (const item of items) {
    const entry = item.webkitGetAsEntry?.(), file = item.getAsFile();
    if (entry?.isDirectory) problems.push(`${entry.name} is a folder; drop the images in it.`);
    else if (file) files.push(file);
    else problems.push("A file that was dropped cannot be read; choose it instead.");
  }
  if (!items.length) problems.push("No file was dropped; save the image first, then drop the file.");
  take(files, problems);
}

// --- requests go out ---

function work() {
  while (running < AT_ONCE && queue.length) {
    running += 1;
    const job = queue.shift();
    classify(job, leave.signal).finally(() => { running -= 1; work(); });
  }
}

async function classify(job, signal) {
  for (;;) {
    show(job, { waiting: "classifying" });
    const key = sessionStorage.getItem(KEY_NAME);
    const reply = await send(job, key, signal);
    if (signal.aborted) return;
    if (reply.status === 401 && await getKey(key)) continue;
    if (reply.status === 429 && job.waits < MOST_WAITS) {
      job.waits += 1;
      show(job, { waiting: `the server is busy; trying again in ${reply.wait} s` });
      await new Promise((done) => { setTimeout(done, 1000 * reply.wait); });
      if (signal.aborted) return;
      continue;
    }
    show(job, reply);
    say(describe(job, reply));
    return;
  }
}

async function send(job, key, signal) {
  if (job.file.size > mostBytes) { // it would hang up in the middle of the file
    return { status: 413, error: `${job.name}: ${toMib(job.file.size)} MiB, and this server takes up ` +
      `to ${toMib(mostBytes)} MiB; send a smaller image` };
  }
  const body = new FormData();
  body.append("image", job.file, job.name);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const began = performance.now();
  let response, text;
  try {
    response = await fetch("predict?details=true", { method: "POST", body, headers, signal });
    text = await response.text();
  } catch (problem) {
    return { status: 0, error: `No answer from ${location.host}: ${problem.message}. Is the server ` +
      "still running, and the file still there?" };
  }
  const reply = { status: response.status, tookMs: performance.now() - began };
  reply.wait = Math.min(60, Math.max(0.1, Number(response.headers.get("Retry-After")) || 1));
  let found = null;
  try { found = JSON.parse(text); } catch { /* not from the server itself, a proxy perhaps */ }
  const prediction = found?.predictions?.[0];
  if (response.ok && prediction) return { ...reply, found, prediction, error: prediction.problem };
  reply.error = found?.error ?? `HTTP ${response.status} ${response.statusText}`.trim();
  return reply;
}

function getKey(used) {
  if (sessionStorage.getItem(KEY_NAME) !== used) return Promise.resolve(true); // given meanwhile
  if (keyAsked) return keyAsked;
  const dialog = find("key-dialog"), input = find("key");
  find("key-problem").textContent = used ? "The server refused this key." : "";
  input.value = "";
  keyAsked = new Promise((answered) => {
    dialog.onclose = () => {
      keyAsked = null;
      answered(dialog.returnValue === "given");
    };
  });
  dialog.returnValue = "";
  dialog.showModal();
  return keyAsked;
}

// --- answers are shown ---

async function askModel() {
  const key = sessionStorage.getItem(KEY_NAME);
  try {
    const reply = await fetch("model", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (key || reply.status === 401) showCurl('-H "X-API-Key: KEY" ');
    if (reply.ok) showModel(await reply.json());
  } catch { /* the first image will say what is wrong */ }
}

function showCurl(header) {
  const address = new URL("predict", location.href);
  find("curl").textContent = `curl ${header}-F image=@photo.jpg ${address}`;
}

function showModel({ name, model, weights, classes, image_size: size, max_request_bytes: most }) {
  modelName = name;
  mostBytes = most ?? mostBytes;
  document.title = `${name}: classify images`;
  const facts = model ? ` (${model}, ${classes.length} classes, ${size}\u00a0×\u00a0${size} pixels)` : "";
  const random = weights === "random" ? "Its weights are random: what it answers means nothing. " : "";
  find("model-facts").textContent = `Model ${name}${facts}. ${random}`;
}

function show(job, { waiting = "", error = "", prediction = null, found = null, tookMs = 0 }) {
  const part = (name) => job.card.querySelector(`.${name}`);
  part("waiting").textContent = waiting;
  part("waiting").hidden = !waiting;
  part("failed").hidden = !error;
  part("failure").textContent = error;
  part("guesses").replaceChildren(...(prediction?.guesses ?? []).map(makeBar));
  part("timing").textContent = prediction && !error ? describeTiming(found.timing_ms ?? {}, tookMs) : "";
  part("network").hidden = !prediction?.seen;
  if (found && !modelName) showModel({ name: found.model });
  if (prediction?.seen) showSeen(job, prediction);
}

function makeBar({ class: label, probability }) {
  const row = document.createElement("li"), words = ["label", "share"];
  const texts = [label, `${(100 * probability).toFixed(1)}%`];
  for (const [at, word] of words.entries()) {
    const cell = document.createElement("span");
    cell.className = word;
    cell.textContent = texts[at];
    row.append(cell, " ");
  }
  const track = document.createElement("div"), fill = document.createElement("div");
  track.className = "track";
  fill.className = "fill";
  track.append(fill);
  row.append(track);
  requestAnimationFrame(() => { fill.style.width = `${100 * probability}%`; });
  return row;
}

function showSeen(job, prediction) {
  const seen = job.card.querySelector(".seen"), canvas = job.card.querySelector(".map");
  const best = prediction.guesses[0]?.class ?? "";
  seen.onload = () => {
    const [width, height] = [seen.naturalWidth, seen.naturalHeight];
    seen.classList.toggle("few", width <= FEW_PIXELS);
    seen.alt = `${job.name} as the network saw it, ${width} by ${height} pixels`;
    job.card.querySelector(".seen-caption").textContent =
      `as the network saw it, ${width}\u00a0×\u00a0${height}\u00a0pixels`;
  };
  seen.src = prediction.seen;
  const map = prediction.activation_map;
  canvas.hidden = !map;
  if (!map) return;
  find("map-switch").hidden = false;
  find("map-legend").hidden = !find("show-map").checked;
  drawMap(canvas, map);
  canvas.setAttribute("aria-label", `Class activation map for ${best}: strongest at the ${findPeak(map)}`);
}

function drawMap(canvas, map) {
  const size = 192, rows = map.length, columns = map[0].length;
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  // values are blended between the centres of the map's cells, colours come after
  const place = (at, cells) => Math.min(cells - 1, Math.max(0, ((at + 0.5) * cells) / size - 0.5));
  for (let y = 0; y < size; y += 1) {
    const v = place(y, rows), top = Math.floor(v), bottom = Math.min(rows - 1, top + 1);
    for (let x = 0; x < size; x += 1) {
      const u = place(x, columns), left = Math.floor(u), right = Math.min(columns - 1, left + 1);
      const above = map[top][left] * (1 - u + left) + map[top][right] * (u - left);
      const below = map[bottom][left] * (1 - u + left) + map[bottom][right] * (u - left);
      const value = above * (1 - v + top) + below * (v - top);
      image.data.set([...heat(value), 40 + 150 * value], 4 * (y * size + x));
    }
  }
  context.putImageData(image, 0, 0);
}

function heat(value) {
  const at = Math.min(1, Math.max(0, value)) * (HEAT.length - 1);
  const low = Math.min(HEAT.length - 2, Math.floor(at)), part = at - low;
  return HEAT[low].map((from, channel) => from + part * (HEAT[low + 1][channel] - from));
}

function findPeak(map) {
  let best = -Infinity, place = PLACES[1][1];
  for (const [y, row] of map.entries()) {
    for (const [x, value] of row.entries()) {
      if (value <= best) continue;
      best = value;
      const [down, along] = [(y + 0.5) / map.length, (x + 0.5) / row.length];
      place = PLACES[Math.floor(3 * down)][Math.floor(3 * along)];
    }
  }
  return place;
}

function describe(job, { error, prediction }) {
  const best = prediction?.guesses?.[0];
  if (error || !best) return `${job.name} failed: ${error || "the answer has no class"}`;
  return `${job.name}: ${best.class}, ${Math.round(100 * best.probability)} percent`;
}

function describeTiming(timing, tookMs) {
  const parts = ["decode", "queue", "compute"].filter((name) => typeof timing[name] === "number")
    .map((name) => `${name} ${timing[name].toFixed(1)}`);
  const inside = typeof timing.total === "number" ? `${timing.total.toFixed(1)} ms in the server` : "";
  return [inside + (parts.length ? ` (${parts.join(", ")})` : ""),
    `${tookMs.toFixed(0)} ms round trip`].filter(Boolean).join("; ");
}

function toMib(bytes) {
  return (bytes / 2 ** 20).toFixed(1);
}

function say(text) {
  find("status").textContent = text;
}

// --- what people do ---

find("files").onchange = (event) => {
  take([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
};
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  takeDropped(event.dataTransfer);
});
document.addEventListener("paste", (event) => {
  if (find("key-dialog").open) return; // the key is pasted there
  const files = [...event.clipboardData.files];
  take(files, files.length ? [] : ["The clipboard holds no image; copy one, then paste it here."]);
});
find("show-map").onchange = (event) => {
  document.body.classList.toggle("without-map", !event.target.checked);
  find("map-legend").hidden = !event.target.checked;
};
find("clear").onclick = () => {
  leave.abort();
  leave = new AbortController();
  queue = [];
  for (const image of find("cards").querySelectorAll(".original")) URL.revokeObjectURL(image.src);
  find("cards").replaceChildren();
  for (const id of ["results", "map-switch", "map-legend"]) find(id).hidden = true;
  say("Results cleared");
  find("files").focus();
};
find("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, find("key").value.trim());
  find("key").value = "";
  find("key-dialog").close("given");
  askModel();
};
find("key-cancel").onclick = () => find("key-dialog").close("");

const scale = find("scale").getContext("2d");
for (let x = 0; x < 96; x += 1) {
  scale.fillStyle = `rgb(${heat(x / 95).map(Math.round)})`;
  scale.fillRect(x, 0, 1, 10);
}
showCurl("");
askModel();
