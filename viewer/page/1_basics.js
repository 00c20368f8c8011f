// The parts of the page: the run's data, elements, text and numbers as the reader sees them.
//
// All files of this directory are one module, in the order of their names. Text of a model, a data set or a tool gets
// into the page through element() and visible() alone: as text, never as HTML.

const byId = (id) => document.getElementById(id);

const VERSION = document.documentElement.dataset.version; // of the run's files, if the page comes from a server
const MICRO = 1e-6; // unit of the log-probs in the samples, in nats

const data = JSON.parse(byId("run-data").textContent);

// ---- text

// Characters that show nothing, or that reorder their neighbours: controls, formats such as U+202E, odd spaces.
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
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// ---- elements

const isThere = (value) => value !== false && value !== null && value !== undefined;

/**
 * An element. Properties are attributes, except `on` (event listeners) and `css` (custom properties); false, null and
 * undefined leave an attribute out. Children are nodes, or strings, which become text.
 */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const { on = {}, css = {}, ...attributes } = properties;
  for (const [event, listener] of Object.entries(on)) made.addEventListener(event, listener);
  for (const [variable, setting] of Object.entries(css)) made.style.setProperty(variable, setting);
  for (const [key, value] of Object.entries(attributes)) {
    if (isThere(value)) made.setAttribute(key, value === true ? "" : visible(value));
  }
  fill(made, ...children);
  return made;
}

/** Put nodes and strings, in lists of any depth, in the place of all that `parent` holds; what is empty is left out. */
function fill(parent, ...children) {
  const nodes = children.flat(Infinity).filter(isThere);
  parent.replaceChildren(...nodes.map((child) => (child instanceof Node ? child : visible(child))));
}

/** A table: `head` is a list of texts, `rows` a list of lists; the first cell of a row is its heading. */
function table(caption, head, rows) {
  const columns = head.map((text) => element("th", { scope: "col" }, text));
  const cell = (text, i) => (i ? element("td", {}, text) : element("th", { scope: "row" }, text));
  const parts = [
    element("caption", { class: "unseen" }, caption),
    element("thead", {}, element("tr", {}, columns)),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cell)))),
  ];
  const scroll = { class: "scroll", tabindex: 0, role: "region", "aria-label": caption };
  return element("div", scroll, element("table", {}, parts));
}

// ---- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Four significant digits, for reading: 0.4123, 12.35, 2,354, 1.2e-7. A dash where there is no number. */
function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return size < 1e9 ? value.toLocaleString("en") : value.toExponential(2);
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
/** The standard deviation, which divides by n - 1, as the advantages of a group do. */
const spread = (values) => Math.sqrt(sum(values.map((value) => (value - mean(values)) ** 2)) / Math.max(1, values.length - 1));

/** The largest of `values`, and at least `least`; only finite values count. */
const largest = (values, least) =>
  values.reduce((most, value) => (isNumber(value) && value > most ? value : most), least);

// ---- the samples of a step

const chunks = new Map(); // what has been read, by step

/** The groups of a step: inflated from the page, or fetched from the server of a run that goes on. */
async function readSamples(step) {
  if (!chunks.has(step)) {
    const { groups } = await (await loadSamples(step)).json();
    for (const group of groups) group.rows.sort(byReturn);
    chunks.set(step, groups);
  }
  return chunks.get(step);
}

function loadSamples(step) {
  const embedded = byId(`samples-${step}`);
  if (!embedded) return askServer(`samples/${step}.json`);
  const bytes = Uint8Array.from(atob(embedded.textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

async function askServer(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(shortened(await answer.text(), 300));
  return answer;
}

/** Highest return first; rows without one last; equal ones as they were sampled. */
function byReturn(a, b) {
  const [first, second] = [a, b].map((row) => (isNumber(row.return) ? row.return : -Infinity));
  if (first !== second) return second > first ? 1 : -1;
  return a.completion_index - b.completion_index;
}
