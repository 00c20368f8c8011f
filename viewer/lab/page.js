// The page of the laboratory: runs, their curves, and the newest answers. A worker trains; the page only shows.

const MOST_EARLIER = 3; // runs that stay in the curves beside the current one
const PATIENCE = 3000; // milliseconds that the reader's reward may take for all answers of a step
const STYLES = [{ color: "--c1", dash: [6, 3] }, { color: "--c2", dash: [2, 3] }, { color: "--c3", dash: [8, 3, 2, 3] }];

const allSteps = []; // of the curves' horizontal axis
const isEvaluation = () => false; // no curve is of held-out questions

let run = null; // {number, name, settings, task, points: metrics of each step, isBegun, isRunning, isOver}
const earlier = []; // runs, the newest last
let panels = [];
let newest = null; // the newest message of a step
let shown = null; // {step, groups, index}: the group in sight
let view = null; // of this group
let chosen = { by: "push", pass: "" }; // how tokens are coloured
let isAway = false; // training waits because the tab is hidden

const say = (text) => (byId("message").textContent = visible(text));
const listen = (id, event, handle) => byId(id).addEventListener(event, handle);

// ---- the worker

let worker = null;
let waiting = null; // the timer of the reader's reward

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;

/** Send a message; the worker is made, and gets the policy, when it is needed. */
function send(message) {
  if (!worker) {
    worker = new Worker(URL.createObjectURL(new Blob([data.worker], { type: "text/javascript" })));
    worker.onmessage = (event) => HANDLERS[event.data.type]?.(event.data);
    worker.onerror = (event) => fail(`The worker has failed: ${event.message}.`);
    worker.postMessage({ type: "load", ...data.load, wasm: bytes(data.load.wasm), weights: bytes(data.load.weights) });
  }
  worker.postMessage(message);
}

/** The reader's reward runs from now on: if it does not return, the worker is ended, and its weights with it. */
function watch(late) {
  clearTimeout(waiting);
  if (!late) return;
  waiting = setTimeout(() => {
    worker.terminate();
    worker = null;
    late();
    if (run) Object.assign(run, { isRunning: false, isOver: true });
    refresh();
  }, PATIENCE);
}

/** Training cannot go on: say why. */
function fail(sentence) {
  watch(null);
  if (run) run.isRunning = false;
  say(sentence);
  refresh();
}

const HANDLERS = {
  step(message) {
    if (!run.isBegun) return; // it is of the run before
    run.points.length = message.step - 1;
    run.points.push(message.metrics);
    newest = message;
    if (byId("follow").checked) showGroups(message);
    for (const panel of panels) panel.update();
    refresh(message.seconds);
  },
  paused({ step }) {
    run.isBegun = true; // the first answer to a start
    if (run.isRunning && step < run.settings.steps) return;
    run.isRunning = false;
    run.points.length = Math.min(run.points.length, step);
    for (const panel of panels) panel.update();
    refresh();
    if (run.task && step >= run.settings.steps) guide.finish(run.task);
  },
  after({ step, group, log_probs }) {
    if (shown?.step !== step || shown.index !== group) return;
    const places = shown.groups[group].rows.map((row) => row.completion_index);
    for (const { row } of view.rows) row.after = inMicro(log_probs[places.indexOf(row.completion_index)]);
    if (view.chosen) view.show(view.chosen);
  },
  answer({ before, now }) {
    byId("answers").hidden = false;
    fill(byId("answer-before"), before.text);
    fill(byId("answer-now"), now.text);
    byId("now-title").textContent = run?.points.length ? `after step ${run.points.length}` : "now: the same";
  },
  rewards: ({ done }) => watch(done ? null : () => say(SLOW)),
  checked({ ok, value, message }) {
    watch(null);
    byId("checked").textContent = visible(ok ? `An example answer gets ${short(value)}.` : `It cannot be used: ${message}`);
  },
  error: ({ message }) => fail(message),
  checksum({ value }) {
    const verdict = value === data.checksum ? "the same" : `${value}, which should not be: please tell us`;
    byId("checksum").textContent = `This browser has computed ${verdict}.`;
  },
};
const SLOW = "Your reward did not return within three seconds, so it was stopped. Change it, and train from the start.";

// ---- training

/** Begin a run; the current one becomes an earlier one. `task`: of the guide. */
function begin(settings, task = null) {
  if (run?.points.length) earlier.push(run);
  if (earlier.length > MOST_EARLIER) earlier.shift();
  const number = Math.max(0, ...[run, ...earlier].map((one) => (one?.points.length ? one.number : 0))) + 1;
  run = { number, name: nameOf(settings), settings, task, points: [], isBegun: false, isRunning: false, isOver: false };
  hideGroup();
  send({ type: "start", settings });
  drawPanels();
}

/** Run or pause; a run at its end goes on for 20 steps more. */
function go(isRunning) {
  const { settings, points } = run;
  run.isRunning = isRunning;
  if (isRunning && points.length >= settings.steps) {
    run.settings = { ...settings, steps: points.length + 20 };
    drawPanels();
  }
  send(isRunning ? { type: "run", until: run.settings.steps } : { type: "pause" });
  say("");
  refresh();
}

/** The settings of the form; null, and a sentence, if they cannot be used. */
function wanted() {
  let fault = "";
  try {
    const settings = readForm();
    fault = contradiction(settings);
    if (!fault) return settings;
  } catch (error) {
    fault = error.message;
  }
  say(fault);
  return null;
}

/** Whether the form asks for another run than the current one. */
function isChanged() {
  try {
    return !run || run.isOver || !isSame(readForm(), run.settings);
  } catch {
    return true;
  }
}

function train() {
  if (run?.isRunning) return go(false);
  const settings = wanted();
  if (!settings) return;
  if (isChanged()) begin(settings);
  else if (run.points.length < settings.steps) run.settings = settings;
  go(true);
}

function oneStep() {
  const settings = wanted();
  if (!settings) return;
  if (isChanged()) begin(settings);
  say("");
  send({ type: "step" });
}

/** Change the settings of the current run from its next step on, e.g. the learning rate after a rewind. */
function goOn() {
  const settings = wanted();
  if (!settings) return;
  run.name = `${run.name}; from step ${run.points.length + 1} ${nameOf(settings)}`;
  run.settings = settings;
  send({ type: "change", settings });
  drawPanels();
  go(true);
}

function rewind() {
  const step = Number(byId("rewind-step").value);
  const last = run.points.length;
  if (!Number.isInteger(step) || step < 0 || step >= last) return say(`Rewind: give a step from 0 to ${last - 1}.`);
  say("");
  hideGroup();
  send({ type: "rewind", step });
}

/** The buttons, and the line that says where training is. */
function refresh(seconds = null) {
  const { points = [], settings, isRunning = false, isOver = true } = run ?? {};
  const step = points.length;
  const isNew = isChanged();
  let action = step ? "Continue" : "Train";
  if (run && isNew) action = "Train with these settings";
  else if (run && step >= settings.steps) action = "20 more steps";
  byId("train").textContent = isRunning ? "Pause" : action;
  byId("go-on").hidden = !step || !isNew || isRunning || isOver;
  byId("one-step").disabled = isRunning;
  for (const id of ["rewind", "rewind-step"]) byId(id).disabled = !step || isRunning || isOver;
  byId("reset").disabled = !run;
  if (!run) return;
  const rows = settings.prompts_per_step * settings.group_size;
  const right = step && `${Math.round(points[step - 1]["reward/correct"] * rows)} of ${rows} answers right`;
  const parts = [`Run ${run.number}: ${run.name}`, `step ${step} of ${settings.steps}`, right];
  if (seconds) parts.push(`${(seconds.sample + seconds.update).toFixed(1)} s`);
  byId("progress").textContent = parts.filter(Boolean).join(" · ");
}

// ---- curves

/** Each value's mean with the values before it, `data.window` together, as in all figures of the book. */
const smoothed = (values) => values.map((_, i) => mean(values.slice(Math.max(0, i + 1 - data.window), i + 1)));

/** A panel whose curves grow. */
class LivePanel extends Panel {
  get last() {
    return (run?.points.length || allSteps.length) - 1;
  }

  options() {
    const highest = this.curves.findIndex(({ isBand }) => isBand);
    const bands = highest < 0 ? [] : [{ series: [highest + 1, highest + 2], fill: () => color("--band") }];
    return { ...super.options(), bands };
  }

  colorOf(place) {
    return this.curves[place].color;
  }

  line(curve, place) {
    const points = { show: () => curve.run === run && run?.points.length < 3 };
    return { ...super.line(curve, place), points, width: curve.width, dash: curve.dash };
  }

  update() {
    for (const curve of this.curves.filter((each) => each.run)) {
      const values = smoothed(curve.run.points.map((point) => point[curve.key] ?? NaN));
      curve.values = allSteps.map((_, i) => (isNumber(values[i]) ? values[i] : null));
    }
    this.plot.setData([allSteps, ...this.curves.map(({ values }) => values)]);
    this.point(this.index);
  }
}

/** All panels anew: the current run, the earlier ones, and the band of the committed runs if it fits one of them. */
function drawPanels() {
  panels.forEach(({ plot }) => plot.destroy());
  const runs = [run, ...earlier].filter(Boolean);
  const longest = Math.max(run?.settings.steps ?? DEFAULTS.steps, ...earlier.map(({ points }) => points.length));
  allSteps.splice(0, allSteps.length, ...Array.from({ length: longest }, (_, i) => i + 1));
  const isFitting = ({ settings }) => isSame({ ...settings, seed: DEFAULTS.seed }, DEFAULTS);
  const isBand = !run || runs.some(isFitting);
  const onPoint = (index) => panels.forEach((panel) => panel.point(index));
  panels = data.panels.map(({ key, band, ...panel }) => {
    const ofRun = (one) => {
      const style = one === run ? { color: "--c0", width: 2.5 } : { width: 1.5, ...STYLES[one.number % 3] };
      return { key, label: `run ${one.number}`, run: one, values: [], isLive: true, ...style };
    };
    const edge = (name) => {
      const values = allSteps.map((_, i) => band[name][i] ?? null);
      return { key, label: `${name} of five seeds`, values, isBand, isLive: true, width: 0.5, color: "--muted" };
    };
    const curves = [...runs.map(ofRun), ...(isBand ? [edge("highest"), edge("lowest")] : [])];
    return new LivePanel({ ...panel, curves }, { onPoint, onChoose: () => {} });
  });
  fill(byId("panels"), panels.map(({ root }) => root));
  panels.forEach((panel) => (panel.resize(), panel.update()));
  const names = runs.map((one) => `Run ${one.number}: ${one.name}. `).join("");
  const measured = isBand
    ? "The band goes from the lowest to the highest of five seeds that PyTorch has trained with the default settings."
    : "There is no band: it was measured with the default settings only.";
  byId("curves-note").textContent = `${names}Curves are means of ${data.window} steps. ${measured}`;
}

// ---- the answers of a step

const inMicro = (values) => values && Array.from(values, (value) => value / MICRO);

/** A row as the page of a run reads it: log-probs in micro-nats, all but the sampler's as differences from these. */
function rowOf({ log_probs, old, ref, entropy, updates, ...row }) {
  const relative = (values) => values && inMicro(Array.from(values, (value, i) => value - log_probs[i]));
  const update = ({ epoch, minibatch, log_probs: ofUpdate, ...measured }) => {
    const measurements = Object.entries(measured).map(([name, values]) => [name, Array.from(values, Number)]);
    return { epoch, minibatch, log_probs: relative(ofUpdate), measurements: Object.fromEntries(measurements) };
  };
  const fixed = { mask: row.ids.map(() => 1), turns: null, sampler: inMicro(log_probs), entropy: inMicro(entropy) };
  return { ...row, ...fixed, old: relative(old), ref: relative(ref), updates: updates.map(update) };
}

function hideGroup() {
  newest = null;
  byId("no-group").hidden = false;
  byId("group-view").hidden = true;
}

/** Offer the groups of a step, and show the one whose returns differ most. */
function showGroups({ step, groups }) {
  const spreads = groups.map(({ rows }) => spread(rows.map((row) => row.return)));
  const means = groups.map(({ rows }) => short(Number(mean(rows.map((row) => row.return)).toFixed(3))));
  const option = ({ question }, i) => element("option", { value: i }, `${question} (${means[i]})`);
  fill(byId("question"), groups.map(option));
  byId("no-group").hidden = true;
  byId("group-view").hidden = false;
  byId("shown-step").textContent = `Step ${step}. In parentheses: the mean reward of a question's answers.`;
  showGroup({ step, groups, index: Math.max(0, spreads.indexOf(largest(spreads, 0))) });
}

function showGroup(next) {
  shown = next;
  const group = next.groups[next.index];
  byId("question").value = String(next.index);
  const hold = () => (byId("follow").checked = false); // what is being read must not go away
  view = new GroupView({ ...group, rows: group.rows.map(rowOf).sort(byReturn) }, hold);
  view.paint(chosen);
  if (next.step === newest?.step) send({ type: "after", group: next.index });
}

const paint = (change) => view.paint((chosen = { ...chosen, ...change }));

// ---- all of it

const guide = new Guide((own, task) => {
  const settings = { ...DEFAULTS, ...own };
  fillForm(settings);
  begin(settings, task);
  go(true);
  byId("controls").scrollIntoView();
});
drawForm();
drawPanels();
fillForm(readAddress());
byId("base-link").href = pageOf("experiment_base/README.md");
listen("train", "click", train);
listen("go-on", "click", goOn);
listen("one-step", "click", oneStep);
listen("rewind", "click", rewind);
listen("reset", "click", () => {
  const settings = wanted();
  if (settings) begin(settings);
  refresh();
});
listen("form", "input", formChanged);
listen("form", "submit", (event) => event.preventDefault());
listen("defaults", "click", () => fillForm(DEFAULTS));
listen("copy", "click", async () => {
  const copied = navigator.clipboard?.writeText(location.href) ?? Promise.reject(new Error("no clipboard"));
  await copied.then(() => say("The link is copied."), () => say(`The link is the address of this page: ${location.href}`));
});
listen("check", "click", () => {
  byId("checked").textContent = "";
  watch(() => (byId("checked").textContent = "It cannot be used: it did not return within three seconds."));
  send({ type: "check", source: inputOf("reward_source").value });
});
listen("color", "change", ({ target }) => paint({ by: target.value }));
listen("pass", "change", ({ target }) => paint({ pass: target.value }));
listen("question", "change", ({ target }) => {
  byId("follow").checked = false;
  showGroup({ ...shown, index: Number(target.value) });
});
listen("follow", "change", ({ target }) => target.checked && newest && showGroups(newest));
listen("ask-form", "submit", (event) => {
  event.preventDefault();
  send({ type: "ask", question: byId("asked").value, temperature: 0 });
});
addEventListener("hashchange", () => fillForm(readAddress()));
document.addEventListener("visibilitychange", () => {
  if (!(document.hidden ? run?.isRunning : isAway)) return;
  isAway = document.hidden;
  go(!isAway);
  if (isAway) say("Training waits while this tab is hidden.");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawPanels());
if (!WebAssembly.validate(bytes(data.load.wasm))) {
  say("This browser cannot train here: it lacks WebAssembly with SIMD, which browsers have had since 2023.");
  for (const button of document.querySelectorAll("#controls button, #ask-form button")) button.disabled = true;
}

// For tests, and for readers with a console.
window.lab = { state: () => ({ run, earlier, newest, shown }), data, DEFAULTS };
