// What the page is made of: the run's data, numbers and text as the reader sees them, and elements.
//
// All files of this directory are one module, in the order of their names. Text of a model, a data set or a tool gets
// into the page through element() and visible() alone: as text, never as HTML.

const LIVE = document.documentElement.hasAttribute("data-live");
const MICRO = 1e-6; // unit of the log-probs in the samples, in nats

let data = JSON.parse(document.getElementById("run-data").textContent);

// ---- text

// Characters that show nothing, or that reorder what stands around them: controls, formats such as U+202E, odd spaces.
const INVISIBLE = /(?![ \n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Zs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;

/** The text with every invisible character written out: "a\u202Eb" becomes "a‹U+202E›b". */
function visible(text) {
  return String(text).replace(INVISIBLE, (c) => `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
}

/** The first `limit` characters, and how many there are if that is not all of them. */
function shortened(text, limit) {
  return text.length <= limit ? text : `${text.slice(0, limit)}… (${text.length.toLocaleString("en")} characters)`;
}

/** "1 token", "2 tokens". */
function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// ---- elements

/**
 * An element. Properties are attributes, except `class`, `on` (event listeners) and `css` (custom properties);
 * false, null and undefined leave an attribute out. Children are nodes, or strings, which become text.
 */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (key === "css")
      for (const [variable, setting] of Object.entries(value)) made.style.setProperty(variable, setting);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, visible(value));
  }
  append(made, children);
  return made;
}

/** Append nodes and strings, in lists of any depth; what is empty is left out. */
function append(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    parent.append(child instanceof Node ? child : visible(child));
  }
}

/** Put `children` in the place of all that `parent` holds. */
function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

const byId = (id) => document.getElementById(id);

/** A table: `head` is a list of texts, `rows` a list of lists; the first cell of a row is its heading. */
function table(caption, head, rows) {
  const columns = head.map((text) => element("th", { scope: "col" }, text));
  const cells = (row) => row.map((cell, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, cell));
  const lines = rows.map((row) => element("tr", {}, cells(row)));
  const parts = [
    element("caption", { class: "unseen" }, caption),
    element("thead", {}, element("tr", {}, columns)),
    element("tbody", {}, lines),
  ];
  const scroll = { class: "scroll", tabindex: 0, role: "region", "aria-label": caption };
  return element("div", scroll, element("table", {}, parts));
}

/** A link as written by the viewer, if it leads to a page and not to a script; else only its text. */
function link(text, address) {
  const safe = address && ["http:", "https:", "file:"].includes(new URL(address, document.baseURI).protocol);
  return safe ? element("a", { href: address }, text) : element("span", {}, text);
}

// ---- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Four significant digits, for reading: 0.4123, 12.35, 2,354, 1.2e-7. A dash where there is no number. */
function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value)) return size < 1e9 ? value.toLocaleString("en") : value.toExponential(2);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size < 0.1 ? 3 : 4)));
}

/** Six digits after the point, as in the files of the run; what rounds to 0 has no sign. */
function exact(value, digits = 6) {
  if (!isNumber(value)) return "–";
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

/** The same with a plus above 0: advantages and terms. */
const signed = (value, digits = 6) =>
  (isNumber(value) && Number(value.toFixed(digits)) > 0 ? "+" : "") + exact(value, digits);

const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const spread = (values) => Math.sqrt(mean(values.map((value) => (value - mean(values)) ** 2)));

/** The largest of `values`, and at least `least`; what is not finite does not count. */
const largest = (values, least) =>
  values.reduce((most, value) => (isNumber(value) && value > most ? value : most), least);

/** Ranges of steps in words: [[3, 6], [9, 9]] is "3 to 6, 9". */
const ranges = (list) => list.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(", ");

// ---- the samples of a step

const chunks = new Map(); // what has been read, by step and size: the size changes while a run writes

/** The groups of a step: inflated from the page, or fetched from the server that shows a running run. */
async function readSamples({ step, bytes }) {
  const key = `${step}:${bytes}`;
  if (!chunks.has(key)) {
    const chunk = await loadChunk(step);
    for (const group of chunk.groups) group.rows.sort(byReturn);
    chunks.set(key, chunk.groups);
  }
  return chunks.get(key);
}

async function loadChunk(step) {
  const embedded = byId(`samples-${step}`);
  if (!embedded && !LIVE) throw new Error("they are not in the page");
  if (!embedded) return (await fetchFromServer(`samples/${step}.json`)).json();
  const bytes = Uint8Array.from(atob(embedded.textContent.trim()), (character) => character.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(inflated).json();
}

async function fetchFromServer(address) {
  const answer = await fetch(address, { cache: "no-cache" }); // asks each time, and need not send what has not changed
  if (!answer.ok) throw new Error(shortened(await answer.text(), 300));
  return answer;
}

/** Highest return first; rows without one last; equal ones as they were sampled. */
function byReturn(a, b) {
  const worth = (row) => (isNumber(row.return) ? row.return : -Infinity);
  if (worth(a) !== worth(b)) return worth(b) > worth(a) ? 1 : -1;
  return a.completion_index - b.completion_index;
}
