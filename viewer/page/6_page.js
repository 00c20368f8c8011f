// The reader's choices, and news from a run that is not finished.

let chosen = { step: null, prompt: null, row: null, token: null, by: "push", pass: "" }; // also in the address
let groups = null; // of the chosen step
let offered = []; // those of them with a completion that passes the filter
let view = null; // of the chosen group
let shownStep = null;

// ---- steps

const steps = data.steps; // with samples: [{step, rows, of}]; of: the rows that a complete one has, or null
const isComplete = ({ rows, of }) => rows === of;

/** The step with samples that is nearest to `step`. */
const nearest = (step) =>
  steps.reduce((best, entry) => (Math.abs(entry.step - step) < Math.abs(best.step - step) ? entry : best), steps[0]);

/** Show the samples of a step, or of the nearest one that has some, and go there. */
function goToStep(step) {
  if (!steps.length) return;
  const found = nearest(step).step;
  const missing = `The samples of step ${step} are not in this page; step ${found} is the nearest.`;
  choose({ step: found, row: null, token: null }, found === step ? "" : missing);
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("samples").scrollIntoView({ behavior: isStill ? "auto" : "smooth" });
  byId("samples").focus({ preventScroll: true });
}

/** The step that is shown at first: the first of which all rows are there; of a run that goes on the newest. */
function firstStep() {
  const first = steps.find(isComplete) ?? steps[0];
  return (VERSION ? steps.at(-1) : first).step;
}

// ---- the choices

/** Change what the reader has chosen, and show it; what is not named stays. */
function choose(change, status = "") {
  byId("step-status").textContent = status;
  remember(change);
  return show();
}

/** The address keeps what is chosen. */
function remember(change) {
  chosen = { ...chosen, ...change };
  const known = Object.entries(chosen).filter(([, value]) => value !== null && value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(known)}`);
  if (VERSION) byId("follow").checked = false; // what is being read must not go away
}

/** Show what is chosen. */
async function show() {
  const { step } = chosen;
  if (step !== shownStep) {
    shownStep = step;
    const place = steps.findIndex((entry) => entry.step === step);
    byId("step").value = String(step);
    byId("step-previous").disabled = place === 0;
    byId("step-next").disabled = place === steps.length - 1;
    markStep(step);
    const read = await readSamples(step).catch((error) => error);
    if (step !== shownStep) return; // another one was chosen in the meantime
    groups = read instanceof Error ? [] : read;
    view = null;
    showPrompts();
    if (groups.length) showCheck(steps[place]);
    else showVerdict("missing", `The samples of step ${step} cannot be read: ${read.message}.`);
  }
  if (offered.length) showGroup();
}

const returnsOf = (group) => group.rows.map((row) => row.return).filter(isNumber);

/** The chosen group; by default the one whose returns differ most. */
function currentGroup() {
  const variance = (group) => (returnsOf(group).length ? spread(returnsOf(group)) : -1);
  return (
    offered.find((group) => group.prompt_index === chosen.prompt) ??
    offered.reduce((best, group) => (variance(group) > variance(best) + 1e-12 ? group : best), offered[0])
  );
}

function showPrompts() {
  offered = groups.filter((group) => group.rows.some(passes));
  const [passing, all] = [groups.flatMap(({ rows }) => rows.filter(passes)), groups.flatMap(({ rows }) => rows)];
  byId("filter-status").textContent = isFiltered() ? `${passing.length} of ${count(all.length, "completion")}` : "";
  byId("group").hidden = byId("prompts").hidden = !offered.length;
  if (!offered.length) return;
  const most = largest(groups.flatMap(returnsOf).map(Math.abs), 1e-9);
  const rounded = (value) => short(Number(value.toFixed(3)));
  const bar = (value) =>
    element("i", { class: value < 0 ? "below" : "", css: { "--height": Math.abs(value) / most } });
  const item = (group) => {
    const returns = returnsOf(group);
    const isFlat = returns.length > 1 && Math.max(...returns) === Math.min(...returns);
    const words = isFlat ? "all equal" : `spread ${rounded(spread(returns))}`;
    const change = () => choose({ prompt: group.prompt_index, row: null, token: null });
    return element(
      "label",
      { class: `choice${isFlat ? " flat" : ""}` },
      element("input", { type: "radio", name: "prompt", "data-prompt": group.prompt_index, on: { change } }),
      element("span", { class: "asked" }, shortened(group.question || `prompt ${group.prompt_index}`, 200)),
      element("span", { class: "bars", "aria-hidden": "true" }, returns.slice(0, 32).map(bar)),
      element("span", { class: "note" }, returns.length ? `mean ${rounded(mean(returns))}, ${words}` : "no returns"),
    );
  };
  const list = byId("prompt-list");
  fill(list, offered.map(item));
  list.scrollTop = list.children[offered.indexOf(currentGroup())].offsetTop - list.clientHeight / 3; // the list alone
}

function showGroup() {
  const group = currentGroup();
  if (view?.group !== group) {
    view = new GroupView(group, (row, token) => remember({ prompt: group.prompt_index, row, token }));
    if (chosen.token !== null) view.select(chosen.row, chosen.token);
    offerBeside(group);
  }
  byId("prompt-list").children[offered.indexOf(group)].querySelector("input").checked = true;
  view.filter(passes);
  view.paint(chosen);
}

// ---- a filter of completions

const FILTERS = {
  "least-return": (row, value) => isNumber(row.return) && row.return >= Number(value),
  "most-return": (row, value) => isNumber(row.return) && row.return <= Number(value),
  "least-length": (row, value) => row.sampler.length >= Number(value),
  "most-length": (row, value) => row.sampler.length <= Number(value),
  end: (row, value) => row.finish_reason === value,
  text: (row, value) => allTextOf(row).toLowerCase().includes(value.toLowerCase()),
};
const filterInputs = Object.keys(FILTERS).map((name) => [name, byId(`filter-${name}`)]);
const allTextOf = (row) => [row.text, ...(row.turns ?? []).map(([, text]) => text)].join("\n");
const isFiltered = () => filterInputs.some(([, input]) => input.value !== "");
const passes = (row) => filterInputs.every(([name, { value }]) => value === "" || FILTERS[name](row, value));

function applyFilter() {
  showPrompts();
  if (offered.length) showGroup();
}

// ---- the same question at another step

function offerBeside(group) {
  const asks = ({ step, prompts }) => step !== chosen.step && prompts.includes(group.prompt_index);
  const options = steps.filter(asks).map(({ step }) => element("option", { value: step }, String(step)));
  fill(byId("beside"), element("option", { value: "" }, "none"), options);
  byId("beside-bar").hidden = !options.length;
  byId("other").hidden = true;
}

async function showBeside(value) {
  const [step, prompt] = [Number(value), view.group.prompt_index];
  byId("other").hidden = value === "";
  if (value === "") return;
  const read = await readSamples(step);
  if (byId("beside").value !== value || view.group.prompt_index !== prompt) return; // chosen in the meantime
  fill(byId("other"), otherGroup(step, read.find((group) => group.prompt_index === prompt)));
}

// ---- the terms of a step against the loss that was logged

function showCheck(entry) {
  const check = checkLoss(groups, valuesOf("loss/total").get(entry.step) ?? NaN, isComplete(entry));
  const precise = (value) => (Math.abs(value) < 1e-4 ? short(value) : exact(value));
  const [added, said] = [check.sum, check.logged].map(precise);
  const of = check.updates.length > 1 ? `, as a mean over its ${check.updates.length} updates,` : "";
  const all = `The terms of all tokens of this step${of} add up to ${added}`;
  const sentences = {
    equal: `${all}; the run logged a loss of ${said}: equal to 1e-5.`,
    part: `${entry.rows} of ${entry.of ?? "all"} rows were written: their terms are only a part of the logged loss, ${said}. Every tenth step writes all rows (others write two groups), and there the two are compared.`,
    differs: `${all}, but the run logged ${said}: the terms do not add up to its loss.`,
    missing: `${all}; the run logged a loss of ${said}: one of the two is unknown.`,
    unknown: "The samples have no terms of the loss: an older version wrote them, or no update used them.",
  };
  showVerdict(check.state, sentences[check.state]);
  Object.assign(byId("loss-check").dataset, { sum: check.sum, logged: check.logged });
  const name = ({ epoch, minibatch }) => `epoch ${epoch}, minibatch ${minibatch}`;
  const rows = check.updates.map((update) => [name(update), String(update.rows), signed(update.total, 8)]);
  const head = ["update", "rows written", "sum of their terms"];
  fill(byId("updates"), rows.length && table("Sums of this step's updates", head, rows));
}

function showVerdict(state, sentence) {
  const root = byId("loss-check");
  root.dataset.state = state;
  root.querySelector(".symbol").textContent = { equal: "=", differs: "≠" }[state] ?? "·";
  root.querySelector(".formula").hidden = state === "unknown";
  byId("verdict").textContent = visible(sentence);
}

// ---- the address: #step=10&prompt=7&row=3&token=12&by=kl&pass=0

/** What the address names; nothing if that is no step. */
function readAddress() {
  const named = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!("step" in named)) return null;
  const number = (name) => (named[name] && isNumber(Number(named[name])) ? Number(named[name]) : null);
  const places = { prompt: number("prompt"), row: number("row"), token: number("token") };
  return { step: nearest(number("step") ?? 0).step, ...places, by: named.by ?? chosen.by, pass: named.pass ?? "" };
}

/** Follow a link, such as that of a finding, or an address that the reader has changed. */
function followAddress() {
  const isLink = /^#step=(\d+)$/.exec(location.hash);
  const named = readAddress();
  view = null;
  if (isLink) goToStep(Number(isLink[1]));
  else if (named) choose(named);
}

// ---- news of a run that is not finished

/**
 * Ask again and again whether the run's files have changed; then the page is loaded anew, if the reader follows.
 *
 * When the run is over the last page, which needs no server, comes in any case; the address keeps what is chosen.
 */
async function listen() {
  try {
    const version = await (await askServer("version")).text();
    const isNew = version !== VERSION;
    if (version === "over" || (isNew && byId("follow").checked)) return location.reload();
    const now = data.finished ? "The run is finished." : "Live: looked at every two seconds.";
    byId("news").textContent = isNew ? "The run has gone on." : now;
  } catch (error) {
    const isGone = error instanceof TypeError; // of fetch
    byId("news").textContent = visible(isGone ? "The server of this page has ended; a run that has ended left its page in report.html." : error.message);
  }
  setTimeout(listen, 2000);
}

// ---- how to read this page: open until the reader has closed it once

const reading = byId("reading");
try {
  reading.open = localStorage.getItem("reading") !== "closed";
  reading.addEventListener("toggle", () => localStorage.setItem("reading", reading.open ? "open" : "closed"));
} catch {
  // a browser that keeps nothing shows it each time
}

// ---- all of it

const markStep = drawCurves(goToStep);

if (steps.length) {
  const rows = (entry) => (isComplete(entry) ? "all rows" : count(entry.rows, "row"));
  const option = (entry) => element("option", { value: entry.step }, `${entry.step} (${rows(entry)})`);
  fill(byId("step"), steps.map(option));
  const goTo = (step) => choose({ step, row: null, token: null });
  const move = (by) => () => goTo(steps[steps.findIndex(({ step }) => step === chosen.step) + by].step);
  byId("step").addEventListener("change", ({ target }) => goTo(Number(target.value)));
  byId("step-previous").addEventListener("click", move(-1));
  byId("step-next").addEventListener("click", move(1));
  byId("color").addEventListener("change", ({ target }) => choose({ by: target.value }));
  byId("pass").addEventListener("change", ({ target }) => choose({ pass: target.value }));
  byId("view").addEventListener("change", ({ target }) => (byId("group").dataset.view = target.value));
  byId("beside").addEventListener("change", ({ target }) => showBeside(target.value));
  byId("filter").addEventListener("input", applyFilter);
  byId("filter-clear").addEventListener("click", () => {
    for (const [, input] of filterInputs) input.value = "";
    applyFilter();
  });
  addEventListener("hashchange", followAddress);
  const named = readAddress();
  chosen = { ...chosen, step: firstStep(), ...named };
  if (VERSION) byId("follow").checked = !named;
  show();
}

if (VERSION) {
  byId("follow").addEventListener("change", ({ target }) => target.checked && location.replace(location.pathname));
  listen();
}

// For tests, and for readers with a console.
window.report = { data, chosen: () => chosen, checkLoss };
