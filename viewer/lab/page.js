// The page of the laboratory: runs, their curves, the newest answers. A worker trains; nothing else changes weights.

const MOST_EARLIER = 3; // runs that stay in the curves beside the current one
const PATIENCE = 3000; // milliseconds that the reader's reward may take for all answers of a step

const allSteps = []; // of the curves' horizontal axis
const isEvaluation = () => false; // no curve is of held-out questions

let run = null; // the current one: {number, settings, points, isRunning, isOver, task}; points: the metrics of each step
let numRuns = 0;
const earlier = []; // runs, the newest last
let panels = [];
let newest = null; // the newest message of a step
let shown = null; // {step, index, groups} of the group in sight
let view = null; // of the chosen group
let chosen = { by: "push", pass: "", row: null, token: null };
let isAway = false; // training waits because the tab is hidden
let checking = null; // of a form control: what waits for the worker's answer to a reward's text

const say = (text) => (byId("message").textContent = visible(text));

// ---- the worker

let worker = null;
let waiting = null; // the timer that ends the worker if the reader's reward does not return

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;

/** Send a message; the worker is made, and gets the policy, when it is needed. */
function send(message) {
  if (!worker) {
    worker = new Worker(URL.createObjectURL(new Blob([data.worker], { type: "text/javascript" })));
    worker.onmessage = ({ data: answer }) => HANDLERS[answer.type]?.(answer);
    worker.onerror = (event) => fail(`The worker has failed: ${event.message}.`);
    const { wasm, weights, ...load } = data.load;
    worker.postMessage({ type: "load", wasm: bytes(wasm), weights: bytes(weights), ...load });
  }
  worker.postMessage(message);
}

/** The reward's text runs from now on: if it does not come back, the worker is ended, and all its weights with it. */
function watch(isOn) {
  clearTimeout(waiting);
  if (!isOn) return;
  waiting = setTimeout(() => {
    worker.terminate();
    worker = null;
    if (checking) return checked({ ok: false, message: "it did not return within three seconds" });
    fail("Your reward did not return within three seconds, so it was stopped. Change it, and train again from the start.");
  }, PATIENCE);
}

/** Training cannot go on: say why, and offer the way back. */
function fail(sentence) {
  watch(false);
  if (run) Object.assign(run, { isRunning: false, isOver: !worker });
  say(sentence);
  refresh();
}

const HANDLERS = {
  step(message) {
    if (!run) return;
    run.points.length = message.step - 1;
    run.points.push(message.metrics);
    newest = message;
    if (byId("follow").checked) showGroups(message);
    refresh(message.seconds);
    for (const panel of panels) panel.update();
  },
  paused({ step }) {
    if (!run) return;
    run.isRunning = false;
    run.points.length = step;
    for (const panel of panels) panel.update();
    refresh();
    if (run.task && step >= run.settings.steps) guide.finish(run.task);
  },
  after({ step, group, log_probs }) {
    if (shown?.step !== step || shown.index !== group) return;
    view.rows.forEach(({ row }) => (row.after = inMicro(log_probs[shown.order.indexOf(row.completion_index)])));
    if (view.chosen) view.show(view.chosen);
  },
  answer({ before, now }) {
    byId("answers").hidden = false;
    fill(byId("answer-before"), before.text);
    fill(byId("answer-now"), now.text);
    byId("now-title").textContent = run?.points.length ? `after step ${run.points.length}` : "now, which is the same";
  },
  rewards: ({ done }) => watch(!done),
  checked,
  error: ({ message }) => fail(message),
  checksum({ value }) {
    const isSame = value === data.checksum;
    byId("checksum").textContent = isSame ? `This browser has computed the same: ${value}.` : `This browser has computed ${value}, which should not be: please tell us.`;
  },
};

// ---- training

/** Begin a run with these settings; the current one becomes an earlier one. */
function begin(settings, task = null) {
  if (run?.points.length) earlier.push(run);
  earlier.splice(0, earlier.length - MOST_EARLIER);
  numRuns += 1;
  run = { number: numRuns, settings, points: [], isRunning: false, isOver: false, task };
  newest = null;
  const { steps, ...sent } = settings;
  send({ type: "start", settings: sent });
  drawPanels();
}

function go(isRunning) {
  run.isRunning = isRunning;
  const { steps } = run.settings;
  if (isRunning && run.points.length >= steps) run.settings = { ...run.settings, steps: run.points.length + 20 };
  if (run.settings.steps !== steps) drawPanels();
  send(isRunning ? { type: "run", until: run.settings.steps } : { type: "pause" });
  say("");
  refresh();
}

/** The settings of the form, if they can be used; otherwise the first fault is said, and null returned. */
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

const isSame = (one, other) => Object.keys(CONTROLS).every((name) => one[name] === other[name] || name === "steps");

/** Whether the form asks for a run other than the current one. */
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
  else run.settings = { ...run.settings, steps: settings.steps };
  go(true);
}

function oneStep() {
  const settings = wanted();
  if (!settings) return;
  if (isChanged()) begin(settings);
  send({ type: "step" });
}

function rewind() {
  const step = Number(byId("rewind-step").value);
  if (!Number.isInteger(step) || step < 0 || step > run.points.length) return say(`Rewind: give a step from 0 to ${run.points.length}.`);
  say(step ? "" : "This is the policy before training.");
  byId("progress").textContent = "Rewinding …";
  send({ type: "rewind", step });
}

/** The buttons, and the line that says where training is. */
function refresh(seconds = null) {
  const step = run?.points.length ?? 0;
  const isEnd = run && step >= run.settings.steps;
  const isNew = isChanged();
  const names = run?.isRunning ? "Pause" : !run ? "Train" : isNew ? "Train with these settings" : isEnd ? "20 more steps" : step ? "Continue" : "Train";
  byId("train").textContent = names;
  byId("one-step").disabled = Boolean(run?.isRunning);
  byId("rewind").disabled = !step || run.isRunning || run.isOver;
  byId("rewind-step").disabled = byId("rewind").disabled;
  byId("rewind-step").max = step;
  byId("reset").disabled = !run;
  if (!run) return;
  const point = run.points[step - 1];
  const { prompts_per_step, group_size, steps } = run.settings;
  const right = point && `${Math.round(point["reward/correct"] * prompts_per_step * group_size)} of ${prompts_per_step * group_size} answers right`;
  const time = seconds && `${(seconds.sample + seconds.update).toFixed(1)} s (sampling ${seconds.sample.toFixed(1)}, update ${seconds.update.toFixed(1)})`;
  byId("progress").textContent = [`Run ${run.number}: ${nameOf(run.settings)}`, `step ${step} of ${steps}`, right, time].filter(Boolean).join(" · ");
}

// ---- curves

/** Each value's mean with the values before it, `data.window` together: as in all figures of this book. */
const smoothed = (values) => values.map((_, i) => mean(values.slice(Math.max(0, i + 1 - data.window), i + 1)));

/** A panel whose curves grow. */
class LivePanel extends Panel {
  get last() {
    return run?.points.length ? run.points.length - 1 : allSteps.length - 1;
  }

  options() {
    const made = super.options();
    const highest = this.curves.findIndex(({ label }) => label.startsWith("highest"));
    const bands = highest < 0 ? [] : [{ series: [highest + 1, highest + 2], fill: () => color("--band") }];
    return { ...made, bands };
  }

  colorOf(place) {
    return this.curves[place].color;
  }

  line(curve, place) {
    return { ...super.line(curve, place), width: curve.width, dash: curve.dash, points: { show: () => curve.run === run && run.points.length < 3 } };
  }

  update() {
    for (const curve of this.curves) if (curve.run) curve.values = this.valuesOf(curve.run);
    this.plot.setData([allSteps, ...this.curves.map(({ values }) => values)]);
    this.point(this.index);
  }

  valuesOf({ points }) {
    const values = smoothed(points.map((point) => point[this.key] ?? NaN));
    return allSteps.map((_, i) => (isNumber(values[i]) ? values[i] : null));
  }
}

/** The curves of a panel: the current run, the earlier ones, and the band of the committed runs. */
function curvesOf({ key, band }, isBandShown) {
  const styles = [{ color: "--c1", dash: [6, 3] }, { color: "--c2", dash: [2, 3] }, { color: "--c3", dash: [8, 3, 2, 3] }];
  const ofRun = (one, style) => ({ key, label: `run ${one.number}`, run: one, values: [], isLive: true, width: 1.5, ...style });
  const edge = (name) => ({ key, label: `${name} of five seeds`, values: allSteps.map((_, i) => band[name][i] ?? null), isLive: true, width: 0.5, color: "--muted" });
  return [
    ...(run ? [ofRun(run, { color: "--c0", width: 2.5 })] : []),
    ...earlier.map((one) => ofRun(one, styles[one.number % 3])),
    ...(isBandShown ? [edge("highest"), edge("lowest")] : []),
  ];
}

/** All panels anew: which curves they have is decided when a run begins. */
function drawPanels() {
  panels.forEach(({ plot }) => plot.destroy());
  const runs = [run, ...earlier].filter(Boolean);
  const longest = Math.max(run?.settings.steps ?? DEFAULTS.steps, ...earlier.map(({ points }) => points.length));
  allSteps.splice(0, allSteps.length, ...Array.from({ length: longest }, (_, i) => i + 1));
  const isBandShown = !run || runs.some(({ settings }) => isSame({ ...settings, seed: DEFAULTS.seed }, DEFAULTS));
  const onPoint = (index) => panels.forEach((panel) => panel.point(index));
  panels = data.panels.map((panel) => {
    const made = new LivePanel({ ...panel, curves: curvesOf(panel, isBandShown) }, { onPoint, onChoose: () => {} });
    made.key = panel.key;
    return made;
  });
  fill(byId("panels"), panels.map(({ root }) => root));
  panels.forEach((panel) => (panel.resize(), panel.update()));
  const names = runs.map((one) => `Run ${one.number}: ${nameOf(one.settings)}.`).join(" ");
  const band = isBandShown
    ? "The band goes from the lowest to the highest of five seeds that PyTorch has trained with the default settings."
    : "There is no band: it was measured with the default settings only.";
  byId("curves-note").textContent = `${names} Curves are means of ${data.window} steps. ${band}`;
}

// ---- the answers of a step

const inMicro = (values) => values && Array.from(values, (value) => value / MICRO);

/** A row of the worker as the page of a run reads it: log-probs in micro-nats, those after the sampler's as differences. */
function rowOf({ log_probs, old, ref, entropy, updates, ...row }) {
  const relative = (values) => values && inMicro(Array.from(values, (value, i) => value - log_probs[i]));
  const listed = ({ epoch, minibatch, log_probs: now, ...measurements }) => ({ epoch, minibatch, log_probs: relative(now), measurements });
  const [sampler, mask] = [inMicro(log_probs), row.ids.map(() => 1)];
  const read = { old: relative(old), ref: relative(ref), entropy: inMicro(entropy), updates: updates.map(listed) };
  return { ...row, ...read, sampler, mask, turns: null };
}

const spreadOf = ({ rows }) => (rows.length > 1 ? spread(rows.map((row) => row.return)) : 0);

/** Offer the groups of a step, and show the one whose returns differ most. */
function showGroups({ step, groups }) {
  const index = groups.reduce((best, group, i) => (spreadOf(group) > spreadOf(groups[best]) + 1e-12 ? i : best), 0);
  const option = (group, i) => element("option", { value: i }, `${group.question} (${short(Number(mean(group.rows.map((row) => row.return)).toFixed(3)))})`);
  fill(byId("question"), groups.map(option));
  byId("no-group").hidden = true;
  byId("group-view").hidden = false;
  byId("shown-step").textContent = `step ${step}; in parentheses the mean reward of each question`;
  showGroup({ step, index, groups });
}

function showGroup(next) {
  shown = { ...next, order: next.groups[next.index].rows.map((row) => row.completion_index) };
  const group = next.groups[next.index];
  byId("question").value = String(next.index);
  const rows = group.rows.map(rowOf).sort(byReturn);
  view = new GroupView({ ...group, rows }, (row, token) => {
    chosen = { ...chosen, row, token };
    byId("follow").checked = false; // what is being read must not go away
  });
  view.paint(chosen);
  if (next.step === newest?.step) send({ type: "after", group: next.index });
}

// ---- settings

/** A control and its sentence. */
function control(name) {
  const { label, about, options, least, most, whole, empty, long } = CONTROLS[name];
  const id = `setting-${name}`;
  const described = { id, name, "aria-describedby": `${id}-about` };
  const choices = () => Object.entries(options).map(([value, [text]]) => element("option", { value }, text));
  const numeric = { type: "text", inputmode: whole ? "numeric" : "decimal", placeholder: empty, title: least === undefined ? null : `from ${least} to ${most}` };
  const input = options ? element("select", described, choices()) : long ? element("textarea", { ...described, rows: 4, maxlength: 2000, spellcheck: "false" }) : element("input", { ...described, ...numeric });
  const check = long && [element("button", { type: "button", id: "check" }, "Try it on an answer"), element("span", { id: "checked", role: "status" })];
  return element("div", { class: `setting${long ? " long" : ""}` }, element("label", { for: id }, label), input, check, element("p", { class: "note", id: `${id}-about` }, about ?? ""));
}

function drawForm() {
  const group = ([title, about]) => {
    const names = Object.keys(CONTROLS).filter((name) => CONTROLS[name].group === title);
    const lines = title === "Algorithm" && element("div", { id: "lines" });
    const parts = [element("summary", {}, title), element("p", { class: "note" }, about), names.map(control), lines];
    return element("details", { open: title === "Algorithm", "data-group": title }, parts);
  };
  fill(byId("form"), Object.entries(GROUPS).map(group));
}

const inputOf = (name) => byId(`setting-${name}`);

/** The settings of the form; throws a sentence if one is not allowed. */
function readForm() {
  const settings = Object.fromEntries(Object.keys(CONTROLS).map((name) => [name, parseSetting(name, inputOf(name).value)]));
  return { ...settings, reward_source: settings.reward === "own" ? settings.reward_source : null };
}

/** Show settings in the form; groups with one that is not the default are opened. */
function fillForm(settings) {
  for (const name of Object.keys(CONTROLS)) {
    inputOf(name).value = settings[name] ?? (name === "reward_source" ? EXAMPLE_REWARD : "");
    if (settings[name] !== DEFAULTS[name]) inputOf(name).closest("details").open = true;
  }
  formChanged();
}

/** Sentences, faults and lines that follow from what the form says; the address keeps what can be used. */
function formChanged() {
  for (const name of Object.keys(CONTROLS)) {
    const { options, about } = CONTROLS[name];
    const input = inputOf(name);
    let sentence = options ? options[input.value][1] : about;
    try {
      parseSetting(name, input.value);
      input.removeAttribute("aria-invalid");
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      sentence = error.message;
    }
    byId(`setting-${name}-about`).textContent = sentence;
  }
  const isPlain = inputOf("algorithm").value.startsWith("reinforce");
  for (const name of UNUSED) inputOf(name).disabled = isPlain;
  byId("setting-reward_source").closest(".setting").hidden = inputOf("reward").value !== "own";
  const { file, lines } = data.lines[inputOf("algorithm").value];
  const marked = lines.map(([text, isNew]) => [element(isNew ? "mark" : "span", {}, text), "\n"]);
  fill(byId("lines"), element("a", { href: pageOf(data.isBook ? `${file}.html` : file) }, file), element("pre", { tabindex: 0, "aria-label": `lines of ${file}` }, element("code", {}, marked)));
  try {
    const settings = readForm();
    const used = Object.keys(CONTROLS).filter((name) => settings[name] !== DEFAULTS[name]);
    history.replaceState(null, "", `#${new URLSearchParams(used.map((name) => [name, settings[name] ?? ""]))}`);
  } catch {
    // the address keeps the last settings that can be used
  }
  refresh();
}

/** The settings that the address names, and a sentence for what is wrong in it. */
function readAddress() {
  const [settings, faults] = [{ ...DEFAULTS }, []];
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    try {
      if (!Object.hasOwn(CONTROLS, name)) throw new Error(`There is no setting ${shortened(name, 40)}.`);
      settings[name] = parseSetting(name, text);
    } catch (error) {
      faults.push(error.message);
    }
  }
  if (faults.length) say(`The link has settings that cannot be used, and the defaults are taken instead. ${faults.join(" ")}`);
  else if (settings.reward === "own") say("This link brings a reward of its own: read its text under Settings before you train.");
  return settings;
}

// ---- the reader's reward

function checkReward() {
  checking = true;
  byId("checked").textContent = "";
  watch(true);
  send({ type: "check", source: inputOf("reward_source").value });
}

function checked({ ok, value, message }) {
  watch(false);
  checking = null;
  byId("checked").textContent = visible(ok ? `It works: an example answer gets ${short(value)}.` : `It cannot be used: ${message}.`);
}

// ---- guided experiments

const guide = new Guide((settings, task) => {
  fillForm({ ...DEFAULTS, ...settings });
  begin(wanted(), task);
  go(true);
  byId("controls").scrollIntoView({ block: "start" });
});

// ---- all of it

function listen(id, event, handle) {
  byId(id).addEventListener(event, handle);
}

drawForm();
drawPanels();
fillForm(readAddress());
byId("base-link").href = pageOf("experiment_base/README.md");
listen("train", "click", train);
listen("one-step", "click", oneStep);
listen("rewind", "click", rewind);
listen("reset", "click", () => {
  const settings = wanted();
  if (settings) begin(settings), say("The policy is the one before training again."), refresh();
});
listen("form", "input", formChanged);
listen("form", "submit", (event) => (event.preventDefault(), train()));
listen("defaults", "click", () => fillForm(DEFAULTS));
listen("copy", "click", () => {
  const done = () => say("The link is copied.");
  const notDone = () => say(`Copy the address of this page: ${location.href}`);
  (navigator.clipboard?.writeText(location.href) ?? Promise.reject()).then(done, notDone);
});
listen("check", "click", checkReward);
listen("color", "change", ({ target }) => view.paint((chosen = { ...chosen, by: target.value })));
listen("pass", "change", ({ target }) => view.paint((chosen = { ...chosen, pass: target.value })));
listen("question", "change", ({ target }) => {
  byId("follow").checked = false;
  showGroup({ ...shown, index: Number(target.value) });
});
listen("follow", "change", ({ target }) => target.checked && newest && showGroups(newest));
listen("ask-form", "submit", (event) => {
  event.preventDefault();
  const question = byId("asked").value.trim();
  if (question) send({ type: "ask", question, temperature: 0 });
});
addEventListener("hashchange", () => fillForm(readAddress()));
document.addEventListener("visibilitychange", () => {
  if (document.hidden ? run?.isRunning : isAway) {
    isAway = document.hidden;
    go(!isAway);
    say(isAway ? "Training waits while this tab is hidden." : "");
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.forEach(({ plot }) => plot.redraw(false, true)));

if (!WebAssembly.validate(bytes(data.load.wasm))) {
  say("This browser cannot train here: it lacks WebAssembly with SIMD, which all browsers since 2023 have.");
  for (const id of ["train", "one-step", "reset", "asked"]) byId(id).disabled = true;
}

// For tests, and for readers with a console.
window.lab = { state: () => ({ run, earlier, newest, shown }), data, defaults: DEFAULTS };
