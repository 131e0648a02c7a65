"use strict";

const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
const BITS = 1024, NO_BITS = 65535, SURE = 65535;
const $ = (id) => document.getElementById(id);
const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

/* Numbers as the reader sees them. */
const share = (x) => (x >= 0.995 ? "1" : x < 0.005 ? "0" : x.toFixed(2).slice(1));
const percent = (p) => (p >= 0.995 ? "100" : p < 0.005 ? "0" : (100 * p).toFixed(0));
const bits = (b) => (b >= 9.95 ? b.toFixed(1) : b.toFixed(2));
const count = (n) => n.toLocaleString("en-US");
const size = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)} B` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : count(n));

const THIN = "\u202f";

/* A token, with what cannot be seen made visible. */
const WHITE = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const unseen = (c) => WHITE[c] || (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `U+${c.codePointAt(0).toString(16).toUpperCase()}`);
const spelled = (text) => escape(text).replace(/[\p{C}\p{Z}]/gu, (c) => `<i>${unseen(c)}</i>`);
const spoken = (text) => {
  if (/\S/.test(text)) return text.trim();
  const names = { " ": "space", "\n": "new line", "\t": "tab", "\r": "return" };
  const kinds = [...new Set(text)].map((c) => { const n = text.split(c).length - 1; return `${n > 1 ? n + " × " : ""}${names[c] || "white space"}`; });
  return kinds.join(", ") || "nothing";
};

function unpack([type, text]) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new TYPES[type](bytes.buffer);
}

/* One model's numbers, asked for by visit and token. */
class Model {
  constructor(packed) {
    Object.assign(this, packed);
    for (const key of ["labels", "surprisal", "predictions", "probabilities", "said", "saidProbabilities", "nextSurprisal"]) this[key] = unpack(packed[key]);
    this.alphas = packed.alphas.map(([tokens, heads, type, text]) => ({ tokens, heads, data: unpack([type, text]) }));
    this.heads = Math.max(1, ...this.alphas.map((w) => w.heads));
    this.mixes = this.sources.some((row) => row.length > 1);
    this.read = [...new Set(this.sources.flatMap((row, i) => row.filter((j) => j !== i)))].sort((a, b) => a - b);
    this.looped = this.visits.some(([, trip]) => trip > 0);
    this.halts = this.trips.some((n) => n !== this.trips[0]);
    this.ends = range(this.visits.length).filter((i) => i + 1 === this.visits.length || this.visits[i + 1][1] !== this.visits[i][1]);
    this.fixed = this.mixes && this.alphas.every((w) => w.tokens === 1);
    this.cache = {};
  }
  get length() { return this.tokens.length; }
  short(visit) { const [layer, trip] = this.visits[visit]; return this.looped ? `${trip + 1}·${layer}` : `${layer}`; }
  called(visit) { const [layer, trip] = this.visits[visit]; return this.looped ? `iteration\u00a0${trip + 1}, layer\u00a0${layer}` : `layer\u00a0${layer}`; }
  label(t) { return this.vocabulary[this.labels[t]]; }
  bits(t) { return this.surprisal[t] === NO_BITS ? NaN : this.surprisal[t] / BITS; }
  nextBits(visit, t) { const b = this.nextSurprisal[visit * this.length + t]; return b === NO_BITS ? NaN : b / BITS; }
  says(visit, t) {
    const at = (visit * this.length + t) * this.top;
    return range(this.top).map((k) => ({ entry: this.predictions[at + k], p: this.probabilities[at + k] / SURE }));
  }
  /* What it did say: with a recurrence that mixes its trips, no single visit's words. */
  spoke(t) { return { entry: this.said[t * this.top], p: this.saidProbabilities[t * this.top] / SURE }; }
  made(visit, t) { return this.visits[visit][1] < this.trips[t]; }
  final(t) { let visit = this.visits.length - 1; while (!this.made(visit, t)) visit--; return visit; }
  alpha(visit, t, head) {
    const { tokens, heads, data } = this.alphas[visit], wide = this.sources[visit].length;
    const at = ((tokens === 1 ? 0 : t) * heads + (heads === 1 ? 0 : head)) * wide;
    return range(wide).map((m) => data[at + m] / this.steps);
  }
  /* Rows of what each visit read at a token: a share for every visit, by head. */
  weights(t, head) {
    return this.sources.map((row, i) => {
      const all = new Float64Array(this.visits.length), alpha = this.alpha(i, t, head);
      row.forEach((j, m) => (all[j] = alpha[m]));
      return all;
    });
  }
  /* The same, followed down to raw values: C_l = a_l e_l + sum_j a_j C_j. */
  origins(t, head) {
    const rows = [];
    this.sources.forEach((row, i) => {
      const all = new Float64Array(this.visits.length), alpha = this.alpha(i, t, head);
      row.forEach((j, m) => { if (j === i) all[i] += alpha[m]; else rows[j].forEach((c, k) => (all[k] += alpha[m] * c)); });
      rows.push(all);
    });
    return rows;
  }
  borrowed(t) {
    let sum = 0, n = 0;
    this.sources.forEach((row, i) => {
      if (row.length < 2) return;
      if (!this.made(i, t)) return;
      const { tokens, heads, data } = this.alphas[i];
      for (let h = 0; h < heads; h++, n++) sum += 1 - data[((tokens === 1 ? 0 : t) * heads + h + 1) * row.length - 1] / this.steps;
    });
    return sum / n;
  }
  settled(t) {
    let visit = this.final(t);
    const last = this.predictions[(visit * this.length + t) * this.top];
    while (visit > 0 && this.predictions[((visit - 1) * this.length + t) * this.top] === last) visit--;
    return visit;
  }
  measure(kind) {
    const of = { surprise: (t) => this.bits(t), borrowed: (t) => this.borrowed(t), settled: (t) => this.settled(t), trips: (t) => this.trips[t] }[kind];
    return (this.cache[kind] ||= range(this.length).map(of));
  }
}

/* ---- the page ---- */

let models = [], at = 0, pinned = false, spans = [], ceiling = 1;
const chosen = { colour: "surprise", of: "0", show: "weights", head: "mean" };
const badge = (i) => (models.length > 1 ? `<span class="badge">${"AB"[i]}</span>` : "");

function show(payload) {
  models = payload.models.map((packed) => new Model(packed));
  document.body.classList.toggle("pair", models.length > 1);
  $("models").innerHTML = models.map(heading).join("");
  $("dropped").hidden = !models[0].dropped;
  $("dropped").textContent = `Shown are the first ${count(models[0].tokens.length)} of ${
    count(models[0].tokens.length + models[0].dropped)} tokens.`;
  if (!measures().some(([key]) => key === chosen.colour)) chosen.colour = "surprise";
  if (models.length === 1) chosen.of = "0";
  controls();
  const text = models[0].tokens.join("");
  $("text").classList.toggle("code", /\n[ \t]{2,}\S/.test(text));
  $("text").innerHTML = models[0].tokens.map(span).join("");
  spans = [...$("text").children];
  colour();
  averages();
  settle();
  pinned = false;
  select(startingPoint());
}

/* Next to a short text there is room for the averages, which otherwise stand below. */
function settle() {
  const short = models.length === 1 && $("text").offsetHeight < 200;
  if (short) $("page").append($("whole"));
  else $("reading").after($("whole"));
}

/* The most surprising token near the beginning: there is something to see. */
function startingPoint() {
  const early = models[0].measure("surprise").slice(0, 60);
  return early.reduce((best, b, t) => (b > (early[best] || 0) ? t : best), 0);
}

function heading(model, i) {
  const known = model.measure("surprise").filter((b) => b >= 0), layers = new Set(model.visits.map(([layer]) => layer)).size;
  const facts = [model.mechanism, `${layers} layers`, model.looped && (model.halts ? `${mean(model.trips).toFixed(2)} of ${model.ends.length} iterations` : `${model.ends.length} iterations`), `${size(model.parameters)} parameters`,
    `${count(model.length)} tokens`, model.unshown, known.length && `${bits(mean(known))} bits per token`];
  return `<li>${badge(i)}<b>${escape(model.name)}</b> <span class="soft">${facts.filter(Boolean).map((f) => escape(String(f))).join(" · ")}</span></li>`;
}

function span(text, t) {
  const inside = text ? escape(text).replace(/\n/g, "<i aria-hidden=\"true\">↵</i>\n") : "<i>·</i>";
  const label = /\S/.test(text) ? "" : ` aria-label="${escape(spoken(text || models[0].label(t)))}"`;
  return `<span class="t" role="option" id="t${t}" aria-selected="false"${label}>${inside}</span>`;
}

/* ---- colour ---- */

function measures() {
  const all = [["surprise", "Surprisal"]];
  if (models.some((m) => m.mixes && !m.fixed)) all.push(["borrowed", "Borrowed"]);
  all.push(["settled", "Settled"]);
  if (models.some((m) => m.halts)) all.push(["trips", "Iterations"]);
  return all;
}

function radios(name, title, options) {
  const one = ([value, label]) =>
    `<label><input type="radio" name="${name}" value="${value}"${chosen[name.split("-")[0]] === value ? " checked" : ""}>${escape(label)}</label>`;
  return `<fieldset aria-label="${title}">${options.map(one).join("")}</fieldset>`;
}

function controls() {
  const whose = models.length > 1 ? radios("of", "Whose", [["0", "A"], ["1", "B"], ["difference", "B − A"]]) : "";
  $("controls").innerHTML = radios("colour", "Colour tokens by", measures()) + whose + '<span class="key"></span>';
}

const MEANINGS = {
  surprise: "how unlikely the model found a token; one bit more is half as likely.",
  borrowed: "the share of a token’s values that comes from earlier layers.",
  settled: "the layer after which the guess for the next token no longer changes.",
  trips: "how often a token went through the layers before it halted.",
};

const UNITS = {
  surprise: (x) => (x ? `${x < 10 ? +x.toFixed(1) : x.toFixed(0)} bits` : "0"),
  borrowed: (x) => `${(100 * x).toFixed(0)}${THIN}%`,
  settled: (x) => models.reduce((a, b) => (b.visits.length > a.visits.length ? b : a)).called(Math.round(x)),
  trips: (x) => `${x.toFixed(0)} iteration${Math.round(x) === 1 ? "" : "s"}`,
};

/* Nearly the smallest and the largest: one outlier should not bleach the rest. */
function extent(values) {
  const known = values.filter((x) => !Number.isNaN(x)).sort((a, b) => a - b), last = known.length - 1;
  return [known[Math.ceil(0.02 * last)] || 0, known[Math.floor(0.98 * last)] || 0];
}

/* The values from which the colour rises and at which it is full. */
function scale(kind, values, apart) {
  if (apart) return [0, Math.max(...extent(values.map(Math.abs)), 1e-9)];
  if (kind === "settled") return [0, Math.max(1, ...models.map((model) => model.visits.length - 1))];
  if (kind === "trips") return [1, Math.max(2, ...models.map((model) => model.ends.length))];
  const [low, high] = extent(values);
  return kind === "surprise" ? [0, high || 1] : [low, Math.max(high, low + 0.01)];
}

function colour() {
  const kind = chosen.colour, apart = chosen.of === "difference";
  const rows = models.map((model) => model.measure(kind));
  const values = apart ? rows[0].map((a, t) => rows[1][t] - a) : rows[+chosen.of];
  const [low, high] = scale(kind, apart ? values : rows.flat(), apart);
  ceiling = scale("surprise", models.flatMap((model) => model.measure("surprise")), false)[1];
  const hue = kind === "surprise" ? "warm" : "cool";
  $("text").classList.remove("warm", "cool");
  $("text").classList.add(hue);
  spans.forEach((span, t) => {
    const x = values[t], part = ((apart ? Math.abs(x) : x) - low) / (high - low);
    span.style.setProperty("--v", Number.isNaN(x) ? 0 : Math.max(0, Math.min(1, part)).toFixed(3));
    span.classList.toggle("warm", apart && x > 0);
    span.classList.toggle("cool", apart && x < 0);
  });
  const key = document.querySelector(".key"), unit = UNITS[kind];
  key.className = `key ${apart ? "both" : hue}`;
  const ends = apart ? ["−", "+"].map((sign) => sign + (kind === "settled" ? `${high.toFixed(0)} layers` : unit(high))) : [low, high].map(unit);
  key.innerHTML = `${ends[0]} <i></i> ${ends[1]}`;
  $("meaning").innerHTML = measures().map(([one, label]) => `<span${one === kind ? ' class="now"' : ""}><b>${label}</b>: ${MEANINGS[one]}</span>`).join(" ");
}

/* ---- one token ---- */

function select(t, scroll = false) {
  spans[at]?.classList.remove("here");
  spans[at]?.setAttribute("aria-selected", "false");
  at = Math.max(0, Math.min(models[0].length - 1, t));
  spans[at].classList.add("here");
  spans[at].setAttribute("aria-selected", "true");
  $("text").setAttribute("aria-activedescendant", `t${at}`);
  if (scroll) spans[at].scrollIntoView({ block: "nearest" });
  $("token").innerHTML = `<span class="w">${spelled(models[0].tokens[at] || models[0].label(at))}</span> <small>token ${count(at + 1)} of ${count(models[0].length)}</small>`;
  $("summary").innerHTML = models.map((model, i) => `${badge(i)}${summary(model)}`).join("<br>");
  const kept = models.map((_, i) => document.querySelector(`#view-${i} .wide`)?.scrollLeft || 0);
  $("views").innerHTML = models.map((model, i) => `<div class="view" id="view-${i}">${view(model, i)}</div>`).join("");
  kept.forEach((left, i) => { const box = document.querySelector(`#view-${i} .wide`); if (box) box.scrollLeft = left; });
}

function summary(model) {
  const parts = [], b = model.bits(at), last = model.final(at);
  if (Number.isNaN(b)) parts.push("Nothing comes before it to predict it from.");
  else {
    const best = model.spoke(at - 1);
    const right = best.entry === model.labels[at];
    parts.push(`<b>${bits(b)} bits</b> (${chance(b)}): ${right ? "it was the best guess." : `<b class="w">${spelled(model.vocabulary[best.entry])}</b> was expected, ${percent(best.p)}${THIN}%.`}`);
  }
  if (model.mixes) parts.push(`<b>${percent(model.borrowed(at))}${THIN}%</b> of its values come from earlier layers${model.looped ? " and iterations" : ""}.`);
  if (model.looped) parts.push(`It made <b>${model.trips[at]}${model.halts ? ` of ${model.ends.length}` : ""} iterations</b>.`);
  const settled = model.settled(at);
  parts.push(`The next guess settled ${settled === last ? "only at the end" : `at ${model.called(settled)}`}.`);
  return parts.join(" ");
}

const chance = (b) => { const p = 2 ** -b; return p >= 0.01 ? `${percent(p)}${THIN}%` : `1 in ${count(Math.round(1 / p))}`; };

function view(model, i) {
  const whose = models.length > 1 ? `<p class="whose">${badge(i)}<b>${escape(model.name)}</b></p>` : "";
  const titled = (title, table) => `<div class="line"><h3>What it would say next, after ${title}</h3></div>${table}`;
  const trips = model.looped ? titled("each iteration", says(model, model.ends.filter((v) => model.made(v, at)), (v) => `${model.visits[v][1] + 1}`, "trips")) : "";
  const layers = titled("every layer", says(model, range(model.visits.length).filter((v) => model.made(v, at)), (v) => model.short(v), "layers"));
  // Side by side, what both models have comes first, so that it lines up.
  return whose + (models.length > 1 ? layers + trips + values(model, i) : values(model, i) + trips + layers);
}

function values(model, i) {
  if (!model.mixes) return "";
  const options = [["mean", "all heads"], ...range(model.heads).map((h) => [`${h}`, `head ${h}`])];
  const option = ([value, label]) => `<option value="${value}"${chosen.head === value ? " selected" : ""}>${label}</option>`;
  const heads = model.heads > 1 ? `<select data-name="head" aria-label="Head">${options.map(option).join("")}</select>` : "";
  const fixed = model.fixed ? '<p class="soft">This mixer’s weights are the same for every token.</p>' : "";
  const kinds = radios(`show-${i}`, "Show", [["weights", "Weights"], ["origins", "Origins"]]);
  return `<div class="line"><h3>Where its values came from</h3>${heads}${kinds}</div>${mixture(model)}${fixed}`;
}

/* Predictions: a row per visit, likeliest first, and the bits that the token which did come next would cost. */
function says(model, visits, name, kind) {
  const known = at + 1 < model.length, next = known ? model.labels[at + 1] : -1, columns = Math.min(5, model.top);
  const row = (v) => {
    const cells = model.says(v, at).slice(0, columns).map(({ entry, p }, k) => {
      const word = model.vocabulary[entry];
      return `<td class="${entry === next ? "hit" : ""}${k > 2 ? " rare" : ""}" style="--v:${p.toFixed(3)}" title="${escape(word)} ${(100 * p).toFixed(2)}${THIN}%"><div><span class="w">${spelled(word)}</span><small>${percent(p)}</small></div></td>`;
    });
    const b = model.nextBits(v, at);
    const cost = known ? `<td class="bits warm" style="--v:${Math.min(1, b / ceiling).toFixed(3)}">${bits(b)}</td>` : '<td class="bits">–</td>';
    const first = v > 0 && model.looped && kind === "layers" && model.visits[v - 1][1] !== model.visits[v][1];
    return `<tr${first ? ' class="trip"' : ""}><th scope="row"><span class="unseen">${model.called(v)}</span><span aria-hidden="true">${name(v)}</span></th>${cells.join("")}${cost}</tr>`;
  };
  const heads = range(columns).map((k) => `<th scope="col" class="${k > 2 ? "rare" : ""}">${["1st", "2nd", "3rd", "4th", "5th"][k]}</th>`).join("");
  const follows = known ? `Bits: what <b class="w">${spelled(model.tokens[at + 1] || model.label(at + 1))}</b>, which came next, would cost.` : "The text ends here.";
  const caption = kind === "layers" ? `<caption>${model.looped ? "Iteration · layer. " : ""}Numbers in %. ${follows}</caption>` : "";
  return `<div class="wide"><table class="says cool" data-kind="${kind}">${caption}<thead><tr><th scope="col">${model.looped ? "" : "layer"}</th>${heads}<th scope="col" class="bits">bits</th></tr></thead><tbody>${visits.map(row).join("")}</tbody></table></div>`;
}

/* ---- shares: what was read, or whose it is ---- */

function mixture(model) {
  const by = range(model.heads).map((h) => model[chosen.show](at, h));
  const one = chosen.head !== "mean" && +chosen.head < model.heads ? by[+chosen.head] : null;
  const value = (i, j) => (one ? one[i][j] : mean(by.map((rows) => rows[i][j])));
  const made = range(model.visits.length).filter((v) => model.made(v, at));
  return shares(model, chosen.show, value, one || model.heads === 1 ? null : (i, j) => by.map((rows) => rows[i][j]), null, made);
}

function shares(model, kind, value, heads, extra, rows = range(model.visits.length)) {
  const headers = model.read.map((j) => `<th scope="col">${model.short(j)}</th>`);
  const cell = (i, j, own) => {
    const reads = own || (j < i && (kind === "origins" ? value(i, j) > 0 : model.sources[i].includes(j)));
    if (!reads) return '<td class="none"></td>';
    const x = value(i, j), by = heads && model.sources[i].length > 1 ? heads(i, j) : null;
    const title = by ? ` title="${by.map((w, h) => `head ${h}: ${w.toFixed(3)}`).join(", ")}"` : "";
    return `<td class="${own ? "own" : ""}" style="--v:${x.toFixed(3)}"${title}>${by ? `<div><span>${share(x)}</span>${strip(by)}</div>` : share(x)}</td>`;
  };
  const row = (i) => {
    const first = i > 0 && model.visits[i - 1][1] !== model.visits[i][1];
    return `<tr${first ? ' class="trip"' : ""}><th scope="row"><span class="unseen">${model.called(i)}</span><span aria-hidden="true">${model.short(i)}</span></th>${cell(i, i, true)}${model.read.map((j) => cell(i, j, false)).join("")}${extra ? extra(i) : ""}</tr>`;
  };
  const columns = kind === "origins" ? "the layer that made the value" : "the layer whose value it read";
  const from = `${model.looped ? "Iteration · layer. " : ""}Columns: ${columns}. A row adds up to\u00a01.`;
  return `<div class="wide"><table class="grid cool" style="--n:${model.read.length + 1 + (extra ? 2 : 0)}" aria-label="${kind === "origins" ? "Whose values each layer stored" : "What each layer read"}"><thead><tr><th scope="col">${model.looped ? "" : "layer"}</th><th scope="col" class="own">own</th>${headers.join("")}${extra ? '<th scope="col" class="bar">entropy <small>bits</small></th>' : ""}</tr></thead><tbody>${rows.map(row).join("")}</tbody></table></div><p class="soft">${from}</p>`;
}

/* Small bars, one per head, as tall as its share. */
function strip(values) {
  const bars = values.map((w, h) => `M${h + 0.12} 1V${(1 - w).toFixed(3)}h.76V1z`).join("");
  return `<svg viewBox="0 0 ${values.length} 1" preserveAspectRatio="none" aria-hidden="true"><path d="${bars}"/></svg>`;
}

function averages() {
  const parts = models.map((model, i) => (model.mixes || model.layerWeights ? `<div class="view card" id="average-${i}">${average(model, i)}</div>` : ""));
  $("whole").hidden = !parts.some(Boolean);
  $("averages").innerHTML = parts.join("");
}

function average(model, i) {
  const parts = [];
  if (model.mixes) {
    const weights = model.meanWeights.map((row, v) => {
      const all = new Array(model.visits.length).fill(0);
      row.forEach((x, m) => (all[model.sources[v][m]] = x));
      return all;
    });
    const mixing = range(model.visits.length).filter((v) => model.sources[v].length > 1);
    const most = Math.max(...mixing.map((v) => Math.log2(model.sources[v].length)));
    const entropy = (v) => {
      if (!mixing.includes(v)) return '<td class="bar"></td>';
      const [x, limit] = [model.entropy[v], Math.log2(model.sources[v].length)];
      return `<td class="bar" style="--v:${(x / most).toFixed(3)}" title="of ${limit.toFixed(2)} at most">${x.toFixed(2)}</td>`;
    };
    const read = mean(mixing.map((v) => 1 - model.meanWeights[v].at(-1)));
    parts.push(`<div><div class="line"><h3>${badge(i)}What each layer read</h3></div>${shares(model, "weights", (v, j) => weights[v][j], null, entropy)}`);
    parts.push(`<p>Of what the ${mixing.length} mixing ${model.looped ? "visits" : "layers"} stored, <b>${percent(read)}${THIN}%</b> came from earlier layers${model.looped ? " and iterations" : ""}.</p></div>`);
    parts.push(`<div><div class="line"><h3>${badge(i)}Whose values those are</h3></div>${shares(model, "origins", (v, j) => model.meanOrigins[v][j])}</div>`);
  }
  if (model.layerWeights) parts.push(`<div><div class="line"><h3>${badge(i)}Layers × outputs they average</h3></div>${layerWeights(model)}</div>`);
  return parts.join("");
}

/* DenseFormer: signed, learned, the same for every token. */
function layerWeights(model) {
  const rows = model.layerWeights, most = Math.max(...rows.flat().map((x) => Math.abs(x || 0)));
  const cell = (x) => (x === null ? '<td class="none"></td>' : `<td class="${x < 0 ? "minus" : ""}" style="--v:${(Math.abs(x) / most).toFixed(3)}">${x.toFixed(2).replace("-", "−")}</td>`);
  const head = ["text", ...range(rows.length)].map((name) => `<th scope="col">${name}</th>`).join("");
  const body = rows.map((row, i) => `<tr><th scope="row">${i}</th>${row.map(cell).join("")}</tr>`).join("");
  return `<div class="wide"><table class="grid cool" style="--n:${rows.length + 1}" aria-label="Layers and the outputs they average"><thead><tr><th scope="col">layer</th>${head}</tr></thead><tbody>${body}</tbody></table></div><p class="soft">What the stream becomes after each layer: learned weights, the same for every token. “text” is the embeddings.</p>`;
}

/* ---- hands ---- */

const tokenOf = (target) => { const hit = target.closest?.(".t"); return hit ? +hit.id.slice(1) : null; };
let waiting = 0;

$("text").addEventListener("pointerover", (event) => {
  const t = tokenOf(event.target);
  if (t === null || pinned || event.pointerType !== "mouse") return;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => select(t));
});

$("text").addEventListener("click", (event) => {
  const t = tokenOf(event.target);
  if (t === null) return;
  pinned = !(pinned && t === at);
  select(t);
});

/* The token above or below: nearest on the next line. */
function line(step) {
  const here = spans[at].getBoundingClientRect(), x = here.left + here.width / 2;
  let best = at, distance = Infinity, top = null;
  for (let t = at + step; t >= 0 && t < spans.length; t += step) {
    const box = spans[t].getClientRects()[0];
    if (!box || Math.abs(box.top - here.top) < box.height / 2) continue;
    if (top === null) top = box.top;
    if (Math.abs(box.top - top) > box.height / 2) break;
    const away = Math.abs(box.left + box.width / 2 - x);
    if (away < distance) [best, distance] = [t, away];
  }
  return best;
}

$("text").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => line(1), ArrowUp: () => line(-1),
    Home: () => 0, End: () => spans.length - 1, PageDown: () => at + 50, PageUp: () => at - 50 };
  if (event.key === "Escape") pinned = false;
  else if (moves[event.key]) { pinned = true; select(moves[event.key](), true); }
  else return;
  event.preventDefault();
});

for (const [id, step] of [["back", -1], ["on", 1]]) $(id).addEventListener("click", () => { pinned = true; select(at + step, true); });

document.addEventListener("change", (event) => {
  const name = (event.target.name || event.target.dataset.name || "").split("-")[0];
  if (!(name in chosen)) return;
  chosen[name] = event.target.value;
  if (name === "colour" || name === "of") return colour();
  const { name: full, value } = event.target;
  select(at);  // which draws the control again
  const again = full ? document.querySelector(`input[name="${full}"][value="${value}"]`) : document.querySelector('[data-name="head"]');
  again?.focus({ preventScroll: true });
});

/* ---- live ---- */

function live(endpoint, text) {
  let asked = 0, timer = 0;
  $("live").hidden = false;
  $("prompt").value = text;
  const look = async () => {
    clearTimeout(timer);
    const mine = ++asked;
    if (!$("prompt").value) return;
    $("status").textContent = "Looking …";
    try {
      const body = JSON.stringify({ text: $("prompt").value });
      const answer = await (await fetch(endpoint, { method: "POST", headers: { "Content-Type": "application/json" }, body })).json();
      if (mine !== asked) return;
      if (answer.error) throw new Error(answer.error.message || answer.error);
      show(answer);
      $("status").textContent = "";
    } catch (error) {
      if (mine === asked) $("status").textContent = error.message;
    }
  };
  $("live").addEventListener("submit", (event) => { event.preventDefault(); look(); });
  $("prompt").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(look, 600); });
}

const payload = JSON.parse($("data").textContent);
show(payload);
if (payload.live) live(payload.live, models[0].tokens.join(""));
