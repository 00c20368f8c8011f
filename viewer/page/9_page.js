// What the reader has chosen, and news from a run that is not finished.

let chosen = { step: null, prompt: null, row: null, token: null, by: "push", pass: "" }; // also in the address
let groups = null; // of the chosen step
let view = null; // of the chosen group
let shownStep = null; // key of the samples that are shown

// ---- steps

const stepsInPage = () => data.samples?.steps ?? [];

/** The step with samples that is nearest to `step`. */
function nearest(step) {
  return stepsInPage().reduce(
    (best, entry) => (!best || Math.abs(entry.step - step) < Math.abs(best.step - step) ? entry : best),
    null,
  );
}

/** Show the samples of a step, or of the nearest one that has some, and go there. */
function goToStep(step) {
  const found = nearest(step);
  if (!found) return;
  const missing =
    found.step !== step ? `The samples of step ${step} are not in this page; step ${found.step} is the nearest.` : "";
  choose({ step: found.step, row: null, token: null }, missing);
  byId("samples").scrollIntoView({
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
  });
  byId("samples").focus({ preventScroll: true });
}

function showSteps() {
  const steps = stepsInPage();
  const { note, left_out: leftOut } = data.samples ?? {};
  const of = data.runs.length > 1 ? `Samples of ${data.runs[0].experiment}/${data.runs[0].name}. ` : "";
  const few = leftOut?.length && leftOut.length <= 12; // otherwise the list of steps shows it well enough
  const without = few ? ` Not in the page: step ${ranges(leftOut)}.` : "";
  const said = note || (steps.length ? "" : "There are no samples in this page.");
  byId("samples-note").textContent = visible(`${of}${said}${without}`);
  byId("step-bar").hidden = byId("step-view").hidden = !steps.length;
  const rows = (entry) => (entry.complete ? "all rows" : count(entry.rows, "row"));
  const options = steps.map((entry) => [String(entry.step), `${entry.step} (${rows(entry)})`]);
  const select = byId("step");
  if (options.some(([value], i) => select.options[i] && select.options[i].value !== value)) fill(select);
  options
    .slice(0, select.options.length)
    .forEach(([, text], i) => select.options[i].text !== text && (select.options[i].text = text));
  options.slice(select.options.length).forEach(([value, text]) => select.append(element("option", { value }, text)));
}

// ---- what is chosen

/** Change what is chosen; what is not named stays. The address keeps it. */
async function choose(change, status = "") {
  chosen = { ...chosen, ...change };
  const entry = stepsInPage().find(({ step }) => step === chosen.step);
  if (!entry) return;
  byId("step").value = String(entry.step);
  byId("step-status").textContent = status;
  const place = stepsInPage().indexOf(entry);
  byId("step-previous").disabled = place === 0;
  byId("step-next").disabled = place === stepsInPage().length - 1;
  const key = `${entry.step}:${entry.bytes}:${entry.rows}`;
  if (key !== shownStep) await showStep(entry, key);
  else if (groups && ("prompt" in change || "by" in change || "pass" in change)) showGroup();
  keepAddress();
}

async function showStep(entry, key) {
  shownStep = key;
  curves.mark(entry.step);
  let read;
  try {
    read = await readSamples(entry);
  } catch (error) {
    shownStep = groups = view = null;
    fill(
      byId("loss-check"),
      element("p", { class: "note" }, `The samples of step ${entry.step} cannot be read: ${error.message}.`),
    );
    fill(byId("prompt-list"));
    fill(byId("group"));
    return;
  }
  if (shownStep !== key) return; // another step was chosen in the meantime
  groups = read;
  view = null;
  showCheck(entry);
  showPrompts();
  showGroup();
}

const returnsOf = (group) => group.rows.map((row) => row.return).filter(isNumber);

/** The chosen group; by default the one whose returns differ most. */
function currentGroup() {
  const variance = (group) => (returnsOf(group).length ? spread(returnsOf(group)) : -1);
  return (
    groups.find((group) => group.prompt_index === chosen.prompt) ??
    groups.reduce((best, group) => (variance(group) > variance(best) + 1e-12 ? group : best), groups[0])
  );
}

function showPrompts() {
  const current = currentGroup();
  const most = largest(groups.flatMap(returnsOf).map(Math.abs), 1e-9);
  const rounded = (value) => short(Number(value.toFixed(3)));
  const item = (group, place) => {
    const returns = returnsOf(group);
    const bar = (value) =>
      element("i", { class: value < 0 ? "below" : "", css: { "--height": Math.abs(value) / most } });
    const flat = returns.length > 1 && Math.max(...returns) === Math.min(...returns);
    const words = flat ? "all equal" : `spread ${returns.length ? rounded(spread(returns)) : "–"}`;
    const input = element("input", {
      type: "radio",
      name: "prompt",
      value: place,
      "data-prompt": group.prompt_index,
      on: { change: () => choose({ prompt: group.prompt_index, row: null, token: null }) },
    });
    input.checked = group === current;
    return element(
      "label",
      { class: `choice${flat ? " flat" : ""}` },
      input,
      element("span", { class: "asked" }, shortened(group.question || `prompt ${group.prompt_index}`, 200)),
      element("span", { class: "bars", "aria-hidden": "true" }, returns.slice(0, 32).map(bar)),
      element("span", { class: "note" }, returns.length ? `mean ${rounded(mean(returns))}, ${words}` : "no returns"),
    );
  };
  fill(byId("prompt-list"), groups.map(item));
  const list = byId("prompt-list");
  list.scrollTop = list.children[groups.indexOf(current)].offsetTop - list.clientHeight / 3; // the list alone
}

function showGroup() {
  const group = currentGroup();
  chosen.prompt = group.prompt_index;
  if (view?.group !== group) {
    view = new GroupView(group, {
      onToken: (row, token) => choose({ row, token }),
      onColor: (change) => choose(change),
    });
    fill(byId("group"), view.root);
    const radio = document.querySelector(`input[name="prompt"][value="${groups.indexOf(group)}"]`);
    if (radio) radio.checked = true;
    if (chosen.row !== null && chosen.token !== null) view.select(chosen.row, chosen.token);
  }
  view.paint(chosen);
}

// ---- the address: #step=10&prompt=7&row=3&token=12&by=kl&pass=0

function keepAddress() {
  const known = Object.entries(chosen).filter(([, value]) => value !== null && value !== "");
  const hash = `#${new URLSearchParams(known)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

function readAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  if (!named.has("step")) return {};
  const number = (name) => (named.get(name) && isNumber(Number(named.get(name))) ? Number(named.get(name)) : null);
  return {
    step: nearest(number("step") ?? 0)?.step ?? null,
    prompt: number("prompt"),
    row: number("row"),
    token: number("token"),
    by: named.get("by") ?? chosen.by,
    pass: named.get("pass") ?? "",
  };
}

/** The step that is shown at first: the first of which all rows are there; of a running run the newest. */
function firstStep() {
  const whole = stepsInPage().filter((entry) => entry.complete);
  return (LIVE ? stepsInPage().at(-1) : (whole[0] ?? stepsInPage()[0]))?.step ?? null;
}

// ---- news of a run that is not finished

let lastNews = null;

async function listen() {
  try {
    const text = await (await fetchFromServer("data.json")).text();
    if (text !== lastNews) {
      if (lastNews !== null || text !== byId("run-data").textContent) showNews(JSON.parse(text));
      lastNews = text;
    }
    const steps = allSteps(data.runs).at(-1) ?? 0;
    tell(
      data.runs[0].state === "finished"
        ? `The run is finished, at step ${steps}.`
        : `Live: step ${steps}, looked at every two seconds.`,
    );
  } catch (error) {
    const isGone = error instanceof TypeError; // of fetch
    const why = isGone ? "The server of this page does not answer" : `There is no news: ${error.message}`;
    tell(`${why}. The page shows what came last, and goes on asking.`, true);
  }
  setTimeout(listen, 2000);
}

/** New data in the place of the old, without losing what is chosen. */
function showNews(news) {
  data = news;
  showAll();
  const step = byId("follow").checked || chosen.step === null ? stepsInPage().at(-1)?.step : chosen.step;
  if (step !== undefined) choose(step === chosen.step ? {} : { step, row: null, token: null });
}

function tell(text, wrong = false) {
  const place = byId("live");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("wrong", wrong);
}

// ---- all of it

const curves = new Curves(goToStep);

function showAll() {
  showRuns();
  showDiagnosis();
  showRunKey();
  curves.update(data.runs);
  showSteps();
  fill(
    byId("foot"),
    element(
      "p",
      { class: "note" },
      "Every metric is explained in ",
      link("docs/metrics.md", data.metrics_page),
      ". The curves are drawn by uPlot (MIT).",
    ),
  );
}

function start() {
  document.title = visible(document.title); // the template writes names as they are
  for (const node of document.querySelector("h1").childNodes)
    if (node.nodeType === Node.TEXT_NODE) node.data = visible(node.data);
  showAll();
  byId("step").addEventListener("change", ({ target }) =>
    choose({ step: Number(target.value), row: null, token: null }),
  );
  const move = (by) => () => {
    const entry = stepsInPage()[stepsInPage().findIndex(({ step }) => step === chosen.step) + by];
    if (entry) choose({ step: entry.step, row: null, token: null });
  };
  byId("step-previous").addEventListener("click", move(-1));
  byId("step-next").addEventListener("click", move(1));
  addEventListener("hashchange", () => {
    const named = readAddress();
    if (named.step !== undefined) view = null;
    choose(named).then(() => groups && showGroup());
  });
  byId("follow-label").hidden = !LIVE;
  choose({ step: firstStep(), ...readAddress() });
  if (LIVE) listen();
}

start();

// For tests, and for readers with a console.
window.report = { data: () => data, chosen: () => chosen, readSamples, checkLoss, visible, short };
