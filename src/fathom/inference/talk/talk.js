"use strict";

/* Everything that a model or a user wrote becomes a text node: nothing here sets innerHTML. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (name, kind, ...children) => {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
};
const bits = (b) => (b >= 9.95 ? b.toFixed(1) : b.toFixed(2));
const percent = (p) => (p >= 0.9995 ? "100" : p < 0.0005 ? "0" : (100 * p).toFixed(p < 0.0995 ? 1 : 0)) + " %";
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/* What cannot be seen, or would turn the letters after it around, is written out. */
const WHITE = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const named = (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
const pieces = (text, kept) => text.split(/([\p{C}\p{Zl}\p{Zp}])/u).filter(Boolean).map((part) =>
  (/^[\p{C}\p{Zl}\p{Zp}]$/u.test(part) && !kept.includes(part) ? make("i", "", named(part)) : part));
const shown = (text) => pieces(text, "\n\t");
const spelled = (text) => [...text].flatMap((c) => (WHITE[c] ? [make("i", "", WHITE[c])] : pieces(c, "")));

const state = { turns: [], aborter: null, at: null, colour: "surprisal", places: new Map() };
const mode = () => document.querySelector("[name=mode]:checked").value;
const LAST = () => state.turns[state.turns.length - 1];

/* ---- settings ---- */

const NUMBERS = { temperature: [0, 2], top_p: [0, 1], top_k: [-1, 2 ** 31], min_p: [0, 1], repetition_penalty: [0, 10], max_tokens: [1, 1e9], seed: [-1e15, 1e15], max_trips: [1, 1e6] };
const WHOLE = ["top_k", "max_tokens", "seed", "max_trips"];

/* What the fields say; null, with the field marked, if one is no number in its range. */
function settings() {
  const said = {};
  for (const [name, [least, most]] of Object.entries(NUMBERS)) {
    const field = $(name), text = field ? field.value.trim().replace(",", ".") : "";
    const value = Number(text), good = !text || (Number.isFinite(value) && value >= least && value <= most && (!WHOLE.includes(name) || Number.isInteger(value)));
    if (field) field.setAttribute("aria-invalid", String(!good));
    if (!good) { $("settings").open = true; field.focus(); tell(`${field.parentNode.firstChild.textContent}: a ${WHOLE.includes(name) ? "whole " : ""}number from ${least} to ${most}`, true); return null; }
    if (text) said[name] = value;
  }
  if ($("stop_text").value) said.stop = $("stop_text").value;
  return said;
}

function tell(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

/* ---- one answer ---- */

/* The parts of a stream, as they come. */
async function* parts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

function turn(role, text = "") {
  const box = make("div", `text ${state.colour}`), whole = make("div", `turn ${role}`);
  const names = { user: "You", assistant: data.name, error: "Error", text: "Text" };
  whole.append(make("b", "", names[role]), box);
  $("said").append(whole);
  const made = { role, box, whole, text, tokens: [], before: [] };
  if (text) box.append(...shown(text));
  state.turns.push(made);
  return made;
}

function body(answer, prompt, said) {
  const common = { model: data.name, stream: true, return_token_ids: true, return_trips: data.trips > 1, ...said };
  if (mode() === "continue") return ["/v1/completions", { ...common, prompt, logprobs: 5 }];
  const messages = state.turns.filter((one) => one !== answer && (one.role === "user" || one.role === "assistant")).map((one) => ({ role: one.role, content: one.text }));
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  return ["/v1/chat/completions", { ...common, messages, logprobs: true, top_logprobs: 5 }];
}

/* Tokens of a part, in one shape for both routes. */
function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((one) => ({ word: one.token, logprob: one.logprob, top: one.top_logprobs.map((x) => [x.token, x.logprob]) }));
  return logprobs.tokens.map((word, i) => ({ word, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i] || {}).sort((a, b) => b[1] - a[1]) }));
}

async function answer(prompt) {
  const said = settings();
  if (!said) return;
  const chat = mode() === "chat";
  if (chat) turn("user", prompt);
  else { state.turns = []; $("said").replaceChildren(); turn("text", prompt); }
  const mine = turn("assistant");
  if (!chat) mine.whole.firstChild.textContent = "Continued";
  $("prompt").value = chat ? "" : prompt;
  state.aborter = new AbortController();
  busy(true);
  const began = performance.now();
  let why = null;
  try {
    const [route, request] = body(mine, prompt, said);
    mine.budget = said.max_trips;
    const response = await fetch(route, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request), signal: state.aborter.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const part of parts(response)) {
      if (part.error) throw new Error(part.error.message);
      if (part.prompt_token_ids) mine.before = part.prompt_token_ids;
      for (const choice of part.choices) { why = choice.finish_reason || why; hear(mine, choice); }
    }
  } catch (error) {
    why = error.name === "AbortError" ? "stopped" : null;
    if (why === null) failed(mine, chat, prompt, error.message);
  }
  const seconds = (performance.now() - began) / 1000;
  if (why !== null) tell(`${plural(mine.tokens.length, "token")}, ${(mine.tokens.length / seconds).toFixed(1)} a second${why === "length" ? "; cut off at the most new tokens" : why === "stopped" ? "; stopped" : ""}`);
  busy(false);
}

/* A request that came to nothing leaves the conversation as it was, and the text in its field. */
function failed(mine, chat, prompt, message) {
  tell(message, true);
  if (mine.tokens.length) return;
  for (const one of [mine, ...(chat ? [state.turns[state.turns.length - 2]] : [])]) { one.whole.remove(); state.turns.splice(state.turns.indexOf(one), 1); }
  $("prompt").value = prompt;
}

function hear(mine, choice) {
  const delta = choice.delta || {};
  const said = delta.content || choice.text || "", text = (delta.reasoning_content || "") + said;
  const tokens = tokensOf(choice), ids = choice.token_ids || [], trips = choice.trips || [];
  mine.text += said;
  tokens.forEach((one, i) => add(mine, { ...one, id: ids[i], trips: trips[i] }));
  if (text) place(mine, text);
}

function add(mine, token) {
  const span = make("span", "t");
  span.setAttribute("role", "option");
  Object.assign(token, { span, mine, index: mine.tokens.length, bits: -token.logprob / Math.LN2, text: "" });
  span.onclick = () => select(token);
  mine.tokens.push(token);
  mine.box.append(span);
  paint(token);
  label(mine);
}

/* Text may come later than its tokens (a character of several tokens): the last one that has none yet gets it. */
function place(mine, text) {
  const open = mine.tokens.filter((one) => !one.text);
  for (const token of open) {
    if (!text) return;
    const word = token.word.startsWith("token_id:") ? "" : token.word;
    const mineText = token === open[open.length - 1] ? text : text.startsWith(word) ? word : "";
    token.text = mineText;
    text = text.slice(mineText.length);
    token.span.replaceChildren(...shown(mineText));
  }
  if (!open.length) mine.box.append(...shown(text));
}

function label(mine) {
  mine.box.tabIndex = 0;
  mine.box.setAttribute("role", "listbox");
  mine.box.setAttribute("aria-label", "Tokens. Arrow keys move, Escape closes.");
}

function paint(token) {
  const value = state.colour === "trips" ? (token.trips - 1) / Math.max(1, data.trips - 1) : Math.min(1, token.bits / 10);
  token.span.style.setProperty("--v", Number.isFinite(value) ? value.toFixed(3) : "0");
}

function busy(now) {
  $("said").setAttribute("aria-busy", String(now));
  document.body.classList.toggle("working", now);
  for (const one of state.turns) one.whole.classList.toggle("busy", now && one === LAST());
  $("stop").hidden = !now;
  $("send").disabled = now;
  if (now) tell("");
  hint();
}

/* ---- the panel ---- */

async function select(token) {
  if (state.at) { state.at.span.classList.remove("here"); state.at.span.removeAttribute("aria-selected"); }
  state.at = token;
  $("panel").hidden = !token;
  if (!token) return;
  token.span.classList.add("here");
  token.span.setAttribute("aria-selected", "true");
  token.span.scrollIntoView({ block: "nearest" });
  $("token").replaceChildren(make("span", "w", ...spelled(token.word)));
  const iterations = token.trips ? `, after ${plural(token.trips, "iteration")}` : "";
  $("summary").textContent = `${bits(token.bits)} bits: the model gave it ${percent(2 ** -token.bits)}${iterations}.`;
  const rows = token.top.map(([word, logprob]) => {
    const cell = make("td", `w${word === token.word ? " hit" : ""}`, ...spelled(word));
    cell.style.setProperty("--v", Math.exp(logprob).toFixed(3));
    return make("tr", "", cell, make("td", "n", percent(Math.exp(logprob))));
  });
  $("others").replaceChildren(make("h3", "", "Likeliest here"), make("table", "", make("tbody", "", ...rows)));
  $("back").disabled = token.index === 0;
  $("on").disabled = token.index + 1 === token.mine.tokens.length;
  await through(token);
}

/* After every layer: asked of the server, once for each place. */
async function through(token) {
  if (!data.lens || token.id === undefined) {
    $("lens").replaceChildren(make("p", "soft", data.lens === false ? "Start the server with --lens to see what every layer would say here." : ""));
    return;
  }
  const said = token.mine.tokens.slice(0, token.index).map((one) => one.id);
  $("lens").replaceChildren(make("p", "soft", "Looking …"));
  try {
    if (!token.seen) {
      const request = { tokens: [...token.mine.before, ...said], said: token.id, max_trips: token.mine.budget };
      const response = await fetch("/lens/place", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) });
      const found = await response.json();
      if (!response.ok) throw new Error(found.error.message);
      token.seen = found;
    }
    if (state.at === token) $("lens").replaceChildren(make("h3", "", "After every layer"), layers(token, token.seen));
  } catch (error) {
    if (state.at === token) $("lens").replaceChildren(make("p", "soft", error.message));
  }
}

function layers(token, { visits, trips }) {
  const made = visits.filter((one) => one.trip < trips), looped = visits.some((one) => one.trip > 0);
  const head = make("tr", "", make("th", "", looped ? "iter. · layer" : "layer"), make("th", "", "it would say"), make("th", "rare", "or"), make("th", "rare", "or"), make("th", "n", "bits"));
  const rows = made.map((one, i) => {
    const row = make("tr", i && made[i - 1].trip !== one.trip ? "trip" : "", make("th", "", looped ? `${one.trip + 1} · ${one.layer}` : `${one.layer}`));
    one.top.slice(0, 3).forEach(([word, p], k) => {
      const cell = make("td", `w${word === token.word ? " hit" : ""}${k ? " rare" : ""}`, ...spelled(word));
      cell.style.setProperty("--v", p.toFixed(3));
      cell.title = percent(p);
      row.append(cell);
    });
    row.append(make("td", "n", bits(one.bits)));
    return row;
  });
  return make("table", "", make("thead", "", head), make("tbody", "", ...rows));
}

function step(by) {
  const next = state.at && state.at.mine.tokens[state.at.index + by];
  if (next) select(next);
}

/* ---- what the user does ---- */

function hint() {
  const chat = mode() === "chat";
  $("hint").hidden = state.turns.length > 0;
  $("hint").textContent = chat ? "Say something. Enter sends, Shift+Enter makes a new line." : "Write the beginning of a text; the model continues it. Enter sends, Shift+Enter makes a new line.";
  $("prompt").placeholder = chat ? "Message" : "Beginning of a text";
  $("send").textContent = chat ? "Send" : "Continue";
  $("system-label").hidden = !chat;
  $("key").className = `key ${state.colour}`;
  $("key").replaceChildren(...(state.colour === "none" ? [] : state.colour === "trips" ? ["1", make("i"), `${data.trips} iterations`] : ["0", make("i"), "10 bits"]));
}

function reset() {
  if (state.aborter) state.aborter.abort();
  select(null);
  state.turns = [];
  $("said").replaceChildren();
  tell("");
  hint();
  $("prompt").focus();
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (!document.body.classList.contains("working") && (prompt.trim() || mode() === "continue")) answer(prompt);
};
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
};
$("stop").onclick = () => state.aborter.abort();
$("reset").onclick = reset;
$("back").onclick = () => step(-1);
$("on").onclick = () => step(1);
$("close").onclick = () => { const box = state.at.mine.box; select(null); box.focus(); };
for (const input of document.querySelectorAll("[name=mode]")) input.onchange = reset;
for (const input of document.querySelectorAll("[name=colour]")) input.onchange = () => {
  state.colour = input.value;
  for (const one of state.turns) { one.box.className = `text ${state.colour}`; one.tokens.forEach(paint); }
  hint();
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { if (state.at) $("close").click(); else if (!$("stop").hidden) $("stop").click(); return; }
  const box = event.target.closest && event.target.closest(".text");
  const mine = box && state.turns.find((one) => one.box === box);
  if (!mine || !mine.tokens.length) return;
  const to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (to) { event.preventDefault(); if (state.at && state.at.mine === mine) step(to); else select(mine.tokens[to > 0 ? 0 : mine.tokens.length - 1]); }
  if (event.key === "Home" || event.key === "End") { event.preventDefault(); select(mine.tokens[event.key === "Home" ? 0 : mine.tokens.length - 1]); }
});

$("by-trips").hidden = data.trips < 2;
$("facts").textContent = [`${data.context.toLocaleString("en-US")} tokens of context`, data.trips > 1 ? `up to ${plural(data.trips, "iteration")} a token` : "", data.chat ? "" : "no chat template: it continues texts"].filter(Boolean).join(" · ");
hint();
