// The page of the laboratory: runs, their curves, and the newest answers. A worker trains; the page only shows.

const MOST_EARLIER = 3; // runs that stay in the curves beside the current one
const PATIENCE = 3000; // milliseconds that the reader's reward may take for all answers of a step
const STYLES = [["--c1", [6, 3]], ["--c2", [2, 3]], ["--c3", [8, 3, 2, 3]]]; // of these

const allSteps = []; // of the curves' horizontal axis
const isEvaluation = () => false; // no curve is of held-out questions

let run = null; // {number, name, settings, task, points: metrics of each step, until: 0 if it is paused, isOver}
const earlier = []; // runs, the newest last
let panels = [];
let newest = null; // the newest message of a step
let shown = null; // {step, groups, index}: the group in sight
let view = null; // of this group
let chosen = { by: "push", pass: "" }; // how tokens are coloured
let away = 0; // while the tab is hidden, training waits: where it was going

const say = (text, more = null) => fill(byId("message"), visible(text), more);
const listen = (id, event, handle) => byId(id).addEventListener(event, handle);

// ---- the worker

let worker = null; // of the current run
let waiting = null; // the timer of the reader's reward

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;

/** Send a message; the worker is made, and gets the policy, when it is needed. */
function send(message) {
  if (!worker) {
    const made = new Worker(URL.createObjectURL(new Blob([data.worker], { type: "text/javascript" })));
    made.onmessage = (event) => made === worker && HANDLERS[event.data.type]?.(event.data);
    made.onerror = (event) => fail(`The worker has failed: ${event.message}.`);
    made.postMessage({ type: "load", ...data.load, wasm: bytes(data.load.wasm), weights: bytes(data.load.weights) });
    worker = made;
  }
  worker.postMessage(message);
}

/** End the worker, and its weights with it: only so can a reward be stopped that does not return. */
function endWorker() {
  worker?.terminate();
  worker = null;
}

/** The reader's reward runs from now on: if it does not return, say so in the end. */
function watch(late) {
  clearTimeout(waiting);
  if (!late) return;
  waiting = setTimeout(() => {
    endWorker();
    late();
    if (run) Object.assign(run, { until: 0, isOver: true });
    refresh();
  }, PATIENCE);
}

/** Training cannot go on: say why. */
function fail(sentence) {
  watch(null);
  if (run?.until && run.points.length) send({ type: "pause" });
  if (run) Object.assign(run, { until: 0, isOver: run.isOver || !run.points.length });
  say(sentence);
  refresh();
}

const HANDLERS = {
  step(message) {
    run.points[message.step - 1] = message.metrics;
    newest = message;
    if (byId("follow").checked) showGroups(message);
    for (const panel of panels) panel.update();
    const isBroken = run.points.length >= 5 && run.points.slice(-5).every((point) => point["reward/correct"] === 0);
    if (isBroken !== run.isBroken) say((run.isBroken = isBroken) ? BROKEN : "");
    refresh(message.seconds);
  },
  paused({ step }) {
    if (step < run.until) return send({ type: "run", until: run.until }); // it has just been started
    run.until = 0;
    run.points.length = Math.min(run.points.length, step);
    for (const panel of panels) panel.update();
    refresh();
    if (!run.task || step < run.settings.steps) return;
    guide.finish(run.task);
    const back = { click: () => byId("guide-open").scrollIntoView() };
    say("", element("button", { type: "button", class: "plain", on: back }, `Back to “${run.task.entry.title}”`));
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
    const said = ok ? `An example answer gets ${short(value)}.` : `It cannot be used: ${message}`;
    byId("checked").textContent = visible(said);
  },
  error: ({ message }) => fail(message),
  checksum({ value }) {
    const verdict = value === data.checksum ? "the same" : `${value}, which should not be: please tell us`;
    byId("checksum").textContent = `This browser has computed ${verdict}.`;
  },
};
const BROKEN = "No answer of the last five steps was right. Rewind, change a setting, and go on from there; or reset.";
const SLOW = "Your reward did not return within three seconds, so it was stopped. Change it, and train from the start.";

// ---- training

/** Begin a run, in a worker of its own, and go to a step; the current run becomes an earlier one. */
function begin(settings, until = 0, task = null) {
  if (run?.points.length) earlier.push(run);
  if (earlier.length > MOST_EARLIER) earlier.shift();
  const number = Math.max(0, ...[run, ...earlier].map((one) => (one?.points.length ? one.number : 0))) + 1;
  run = { number, name: nameOf(settings), settings, task, points: [], until, isBroken: false, isOver: false };
  hideGroup();
  watch(null);
  endWorker();
  send({ type: "start", settings });
  drawPanels();
  say("");
  refresh();
}

/** Go on to a step; 0: pause. */
function go(until) {
  run.until = until;
  send(until ? { type: "run", until } : { type: "pause" });
  say("");
  refresh();
}

/** The settings of the form; null, and a sentence, if they cannot be used. */
function wanted() {
  try {
    const settings = readForm();
    const fault = contradiction(settings);
    if (!fault) return settings;
    say(fault);
  } catch (error) {
    say(error.message);
  }
  return null;
}

/** Whether the form asks for another run than the current one. */
const isChanged = () => !run || run.isOver || !formed() || !isSame(formed(), run.settings);

/** Train or pause; a run at its end goes on for 20 steps more. */
function train() {
  if (run?.until) return go(0);
  const settings = wanted();
  if (!settings) return;
  if (isChanged()) return begin(settings, settings.steps);
  const step = run.points.length;
  run.settings = { ...settings, steps: step < settings.steps ? settings.steps : step + 20 };
  drawPanels();
  go(run.settings.steps);
}

function oneStep() {
  const settings = wanted();
  if (!settings) return;
  if (isChanged()) begin(settings, 1);
  else go(run.points.length + 1);
}

/** Change the settings of the current run from its next step on, e.g. the learning rate after a rewind. */
function goOn() {
  const settings = wanted();
  if (!settings) return;
  run.name = `${run.name}; from step ${run.points.length + 1} ${nameOf(settings)}`;
  run.settings = settings;
  send({ type: "change", settings });
  drawPanels();
  go(Math.max(settings.steps, run.points.length + 1));
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
  const { points = [], settings, until = 0, isOver = true } = run ?? {};
  const step = points.length;
  const isNew = isChanged();
  let action = step ? "Continue" : "Train";
  if (run && isNew) action = "New run with these settings";
  else if (run && step >= settings.steps) action = "20 more steps";
  byId("train").textContent = until ? "Pause" : action;
  byId("go-on").hidden = !step || !isNew || Boolean(until) || isOver;
  byId("one-step").disabled = until;
  for (const id of ["rewind", "rewind-step"]) byId(id).disabled = !step || until || isOver;
  byId("reset").disabled = !run;
  const next = `To train: ${nameOf(formed() ?? DEFAULTS)}. A step takes one to three seconds.`;
  if (!run) return (byId("progress").textContent = next);
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
  const isBand = runs.some(({ settings }) => isSame({ ...settings, seed: DEFAULTS.seed }, DEFAULTS));
  byId("no-run").hidden = runs.length > 0;
  byId("panels").hidden = !runs.length;
  const onPoint = (index) => panels.forEach((panel) => panel.point(index));
  panels = data.panels.map(({ key, band, ...panel }) => {
    const ofRun = (one) => {
      const [stroke, dash] = one === run ? ["--c0"] : STYLES[one.number % 3];
      const style = { color: stroke, dash, width: one === run ? 2.5 : 1.5 };
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
  const band = isBand ? " The band goes from the lowest to the highest of five seeds that PyTorch has trained." : "";
  const smooth = `Each point is the mean of ${data.window} steps.`;
  byId("curves-note").textContent = runs.length ? `${names}${smooth}${band}` : "";
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
  begin(settings, settings.steps, task);
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
});
listen("form", "input", formChanged);
listen("form", "submit", (event) => event.preventDefault());
listen("defaults", "click", () => fillForm(DEFAULTS));
listen("copy", "click", async () => {
  const copied = navigator.clipboard?.writeText(location.href) ?? Promise.reject(new Error("no clipboard"));
  say(await copied.then(() => "The link is copied.", () => `The address of this page is the link: ${location.href}`));
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
  send({ type: "ask", question: byId("asked").value });
});
listen("skip", "click", (event) => {
  event.preventDefault(); // the part of the address behind # is for settings
  byId("curves").focus();
});
addEventListener("hashchange", () => fillForm(readAddress()));
document.addEventListener("visibilitychange", () => {
  const until = document.hidden ? run?.until : away;
  if (!until) return;
  away = document.hidden ? until : 0;
  go(away ? 0 : until);
  if (away) say("Training waits while this tab is hidden.");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawPanels());
if (!WebAssembly.validate(bytes(data.load.wasm))) {
  say("This browser cannot train here: it lacks WebAssembly with SIMD, which browsers have had since 2023.");
  for (const button of document.querySelectorAll("#controls button, #ask-form button")) button.disabled = true;
}

// For tests, and for readers with a console.
window.lab = { state: () => ({ run, earlier, newest, shown }), data, DEFAULTS };
