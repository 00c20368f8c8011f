// Curves: which panels there are, and how they are drawn, read and laid over each other.

const share = { floor: 0, ceiling: 1 };
const positive = { floor: 0 };
const isEvaluation = (key) => key.startsWith("eval/");

// A panel takes the keys that match, in the order of its patterns; a key belongs to the first panel that takes it.
// `upTo` leaves out keys with larger values, `more` puts a panel among those that are shown on request.
const PANELS = [
  { title: "Accuracy", unit: "share of right answers", keys: [/^reward\/correct$/, /^eval\/\w+\/accuracy$/], ...share },
  { title: "Accuracy by kind", unit: "held-out questions, greedy", keys: [/^eval\/greedy\/accuracy_/], ...share },
  { title: "Accuracy by kind, sampled", unit: "held-out questions", keys: [/^eval\/sampled\/accuracy_/], ...share, more: true },
  { title: "Reward", unit: "mean over completions", keys: [/^reward\/total$/, /^reward\/(?!.*calls)/], reuse: /^reward\/correct$/ },
  { title: "Calls", unit: "per completion", keys: [/^reward\/.*calls/, /^completion\/.*(_calls|_searches)$/], ...positive },
  { title: "Completion length", unit: "tokens", keys: [/^completion\/length/, /^eval\/greedy\/length$/], ...positive },
  { title: "What completions do", unit: "share of completions", keys: [/^completion\/(?!truncated|turns)/], upTo: 1, ...share },
  { title: "Turns and other counts", unit: "mean per completion", keys: [/^completion\/(?!truncated)/], ...positive },
  { title: "Groups without variance", unit: "share of groups", keys: [/^group\/zero_reward_variance$/], ...share },
  { title: "Truncation", unit: "share of completions cut off", keys: [/^completion\/truncated$/], ...share },
  { title: "Loss", unit: "mean over updates", keys: [/^loss\/total$/, /^eval\/loss$/] },
  { title: "KL to the reference", unit: "nats per token", keys: [/^loss\/kl$/], ...positive },
  { title: "Entropy", unit: "nats per token", keys: [/^policy\/entropy$/], ...positive },
  { title: "Probability ratio", unit: "to the policy that sampled", keys: [/^policy\/ratio/, /^policy\/first_ratio$/], more: true },
  { title: "Clipped tokens", unit: "share of tokens without a gradient", keys: [/^policy\/clipped$/], ...positive },
  { title: "Gradient norm", unit: "before clipping", keys: [/^loss\/grad_norm$/], ...positive },
  { title: "Gradients scaled down, skipped", unit: "share, number of updates", keys: [/^loss\/(grad_clipped|skipped)$/], ...positive, more: true },
  { title: "Sampling against training", unit: "difference of log-probs", keys: [/^policy\/sampling_log_prob_difference$/], ...positive, more: true },
  { title: "Seconds by phase", unit: "seconds per step", keys: [/^time\/(?!tokens|waiting)/], ...positive },
  { title: "Tokens per second", unit: "sampled", keys: [/^time\/tokens_per_second$/], ...positive, more: true },
  { title: "Waiting for other processes", unit: "share of a step", keys: [/^time\/waiting$/], ...share, more: true },
  { title: "Memory", unit: "peak, GB", keys: [/^memory\/peak_bytes$/], scale: 1e-9, ...positive, more: true },
  { title: "Learning rate", unit: "of the optimizer", keys: [/^lr$/], ...positive, more: true },
];

const LABELS = {
  "reward/correct": "training questions",
  "eval/greedy/accuracy": "held out, greedy",
  "eval/sampled/accuracy": "held out, sampled",
  "eval/greedy/length": "held out, greedy",
  "completion/length": "all",
  "completion/length_right": "right answers",
  "completion/length_wrong": "wrong answers",
  "policy/ratio": "mean",
  "policy/first_ratio": "mean, first update",
  "policy/ratio_min": "lowest",
  "policy/ratio_max": "highest",
  "time/step": "whole step",
  "time/sample": "sampling",
  "time/reward": "rewards",
  "time/log_probs": "log-probs",
  "time/update": "updates",
};

/** The name of a key in the legend of a panel. */
function labelOf(key, panel) {
  if (panel.title === "Reward" && key === "reward/correct") return "correct";
  return LABELS[key] ?? key.replace(/^.*\/(accuracy_)?/, "").replaceAll("_", " ");
}

// ---- data of the curves

/** The steps of all runs, in order, each once. */
function allSteps(runs) {
  return [...new Set(runs.flatMap((run) => run.metrics?.steps ?? []))].sort((a, b) => a - b);
}

/** A run's values of a key at `steps`; a step that has several lines (training, evaluation) shows the last of them. */
function valuesAt(run, key, steps, scale = 1) {
  const known = new Map();
  (run.metrics?.series?.[key] ?? []).forEach((value, i) => {
    if (isNumber(value)) known.set(run.metrics.steps[i], value * scale);
  });
  return steps.map((step) => known.get(step) ?? null);
}

/** What the run logged at a step, or NaN. */
const loggedAt = (run, key, step) => valuesAt(run, key, [step])[0] ?? NaN;

/** The panels that have something to show: [{...panel, steps, curves: [{key, label, run, values}]}]. */
function panelsOf(runs) {
  const steps = allSteps(runs);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.metrics?.series ?? {})))];
  const peak = (key) => largest(runs.flatMap((run) => run.metrics?.series?.[key] ?? []).map((value) => value && Math.abs(value)), -1);
  const free = new Set(keys);
  const own = (key) => ({ title: key, unit: "", more: true, keys: [new RegExp(`^${RegExp.escape?.(key) ?? key.replace(/\W/g, "\\$&")}$`)] });
  const rest = keys.filter((key) => !isEvaluation(key) && !PANELS.some((panel) => panel.keys.some((pattern) => pattern.test(key))));
  const panels = [...PANELS, ...rest.map(own)].map((panel) => {
    const fits = (pattern) => keys.filter((key) => pattern.test(key) && (free.has(key) || panel.reuse?.test(key)));
    const taken = [...new Set(panel.keys.flatMap(fits))].filter((key) => peak(key) >= 0 && peak(key) <= (panel.upTo ?? Infinity));
    taken.forEach((key) => free.delete(key));
    // what is 0 all the time tells nothing beside other curves, nor does a count of what a task never does
    const shown = taken.filter((key) => peak(key) > 0 || /truncated|policy\/clipped|variance|kl$|total$|correct$|accuracy/.test(key));
    const curves = shown.flatMap((key) =>
      runs.map((run, number) => ({ key, label: labelOf(key, panel), run: number, values: valuesAt(run, key, steps, panel.scale) })),
    );
    return { ...panel, steps, names: shown, curves: curves.filter(({ values }) => values.some(isNumber)) };
  });
  return panels.filter((panel) => panel.curves.length > 0);
}

/** A curve in a sentence, for those who do not see it. */
function describeCurve({ label, values }, steps) {
  const known = values.map((value, i) => [steps[i], value]).filter(([, value]) => isNumber(value));
  const [first, last] = [known[0], known.at(-1)];
  const sorted = [...known].sort((a, b) => a[1] - b[1]);
  const at = ([step, value]) => `${short(value)} at step ${step}`;
  if (known.length === 1) return `${label}: ${at(first)}.`;
  return `${label}: from ${at(first)} to ${at(last)}; lowest ${at(sorted[0])}, highest ${at(sorted.at(-1))}.`;
}

// ---- drawing

const printing = () => window.matchMedia("print").matches;

/** A colour of report.css: canvases do not follow the style sheet by themselves. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** One panel: a figure with its curves, a legend with values, and a table of all of them. */
class Panel {
  constructor(panel, onPoint, onChoose) {
    this.onPoint = onPoint;
    this.onChoose = onChoose;
    this.at = element("span", { class: "at" });
    this.plotPlace = element("div", {
      class: "plot",
      tabindex: 0,
      role: "slider",
      "aria-label": `${panel.title}: step`,
      "aria-describedby": `curve-${slug(panel.title)}`,
      on: { keydown: (event) => this.onKey(event), focus: () => onPoint(this.index ?? this.panel.steps.length - 1) },
    });
    this.legend = element("ul", { class: "legend" });
    this.words = element("p", { class: "note", id: `curve-${slug(panel.title)}` });
    this.values = element("div");
    this.details = element(
      "details",
      { class: "values", on: { toggle: () => this.drawTable() } },
      element("summary", {}, "Values", element("span", { class: "unseen" }, ` of ${panel.title}`)),
      this.values,
    );
    const heading = element("h3", {}, panel.title, element("span", { class: "unit" }, ` ${panel.unit}`));
    this.root = element("div", { class: "panel", "data-panel": panel.title }, heading, this.at, this.plotPlace, this.legend, this.details);
    this.words.classList.add("unseen");
    this.root.append(this.words);
    this.update(panel);
    new ResizeObserver(() => this.resize()).observe(this.plotPlace);
  }

  /** Show the curves of `panel`; the plot is made anew only if other curves came. */
  update(panel) {
    const same = this.panel && JSON.stringify(this.names()) === JSON.stringify(this.names(panel));
    this.panel = panel;
    const values = [panel.steps, ...panel.curves.map((curve) => curve.values)];
    if (same) this.plot.setData(values);
    else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), values, this.plotPlace);
    }
    this.words.textContent = visible(panel.curves.map((curve) => this.named(describeCurve(curve, panel.steps), curve)).join(" "));
    if (!same) this.drawLegend();
    this.drawTable();
    this.point(this.index ?? null);
  }

  names = (panel = this.panel) => panel.curves.map(({ key, run }) => [key, run]);

  /** The text with the run's name before it, if several runs are laid over each other. */
  named = (text, { run }) => (data.runs.length > 1 ? `${data.runs[run].name}, ${text}` : text);

  colorOf = (curve) => (curve.key === "reward/total" || curve.key === "time/step" ? "--ink" : `--c${this.panel.names.indexOf(curve.key) % 8}`);

  options() {
    const { floor, ceiling } = this.panel;
    const dash = (ctx, size) => ctx.setLineDash(size);
    const axis = { stroke: () => color("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => color("--grid"), width: 1 };
    return {
      width: 300,
      height: 150,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: {
          range: (_, low, high) => {
            if (low === null) return [0, 1];
            const room = (high - low || Math.abs(high) || 1) * 0.08;
            const top = ceiling !== undefined && high <= ceiling && high > ceiling / 2 ? ceiling * 1.03 : high + room;
            return [floor !== undefined && low >= floor ? floor : low - room, top];
          },
        },
      },
      axes: [
        { ...axis, size: 26, gap: 4, space: 44, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], grid: { show: false } },
        { ...axis, size: 46, gap: 6, space: 26, grid, values: (_, splits) => splits.map(short) },
      ],
      series: [
        {},
        ...this.panel.curves.map((curve) => ({
          label: curve.label,
          stroke: () => color(this.colorOf(curve)),
          width: curve.key === "reward/total" ? 2.5 : 1.5,
          dash: curve.run ? [5, 4] : undefined,
          spanGaps: true,
          points: { show: isEvaluation(curve.key) || curve.values.filter(isNumber).length < 3, size: 6, fill: () => color("--surface") },
        })),
      ],
      hooks: {
        setCursor: [(plot) => !this.quiet && this.onPoint(plot.cursor.idx ?? null)],
        draw: [(plot) => this.markChosen(plot, dash)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.choose())],
      },
    };
  }

  /** A line at the step whose samples are shown. */
  markChosen(plot, dash) {
    const { top, height } = plot.bbox;
    if (!isNumber(Panel.chosen) || Panel.chosen < plot.scales.x.min || Panel.chosen > plot.scales.x.max) return;
    const x = Math.round(plot.valToPos(Panel.chosen, "x", true));
    plot.ctx.save();
    plot.ctx.strokeStyle = color("--muted");
    plot.ctx.lineWidth = devicePixelRatio;
    dash(plot.ctx, [2 * devicePixelRatio, 3 * devicePixelRatio]);
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
    plot.ctx.restore();
  }

  resize() {
    const width = Math.floor(this.plotPlace.clientWidth);
    if (width > 40 && width !== this.plot.width && !printing()) this.plot.setSize({ width, height: 150 });
  }

  drawLegend() {
    this.outputs = this.panel.curves.map(() => element("output", {}));
    const swatch = (curve) => element("span", { class: `swatch${curve.run ? " dashed" : ""}${isEvaluation(curve.key) ? " dotted" : ""}`, css: { "--swatch": `var(${this.colorOf(curve)})` } });
    fill(
      this.legend,
      this.panel.curves.map((curve, i) => element("li", { "data-key": curve.key, "data-run": curve.run }, swatch(curve), element("span", {}, this.named(curve.label, curve)), this.outputs[i])),
    );
  }

  /** The table is made when it is opened. */
  drawTable() {
    if (!this.details.open) return;
    const { title, steps, curves } = this.panel;
    const rows = steps.map((step, i) => [String(step), ...curves.map(({ values }) => short(values[i]))]);
    const shown = rows.filter((row) => row.slice(1).some((cell) => cell !== "–"));
    fill(this.values, table(`Values of ${title}`, ["step", ...curves.map((curve) => this.named(curve.label, curve))], shown));
  }

  /** Move the cursor to a place in `steps`; null: away, the legend then shows the last values. */
  point(index) {
    const { steps, curves } = this.panel;
    this.index = index !== null && index < steps.length ? index : null;
    const shown = this.index ?? null;
    this.quiet = true; // the hook is for the reader's own moves
    const left = shown === null ? -10 : this.plot.valToPos(steps[shown], "x");
    this.plot.setCursor({ left, top: shown === null ? -10 : 1 }, false);
    this.quiet = false;
    this.at.textContent = shown === null ? "last values" : `step ${steps[shown]}`;
    const texts = curves.map(({ values }) => short(shown === null ? values.findLast(isNumber) : values[shown]));
    this.outputs.forEach((output, i) => (output.textContent = texts[i]));
    const slider = { valuemin: steps[0], valuemax: steps.at(-1), valuenow: steps[shown ?? steps.length - 1] };
    slider.valuetext = [`step ${slider.valuenow}`, ...curves.map((curve, i) => `${this.named(curve.label, curve)} ${texts[i]}`)].join(", ");
    for (const [name, value] of Object.entries(slider)) this.plotPlace.setAttribute(`aria-${name}`, visible(value));
  }

  onKey(event) {
    const last = this.panel.steps.length - 1;
    const now = this.index ?? last;
    const moves = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageUp: now + 10, PageDown: now - 10, Home: 0, End: last };
    if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key in moves) this.onPoint(Math.min(Math.max(moves[event.key], 0), last));
    else return;
    event.preventDefault();
  }

  choose() {
    if (this.index !== null) this.onChoose(this.panel.steps[this.index]);
  }
}

const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");

/** Put `children` into `parent`, and touch nothing if they are there already. */
function place(parent, children) {
  if (children.length !== parent.children.length || children.some((child, i) => child !== parent.children[i])) fill(parent, children);
}

/** All panels; pointing into one moves the cursor of all. */
class Curves {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.panels = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.forPaper(true));
    addEventListener("afterprint", () => this.forPaper(false));
  }

  update(runs) {
    const panels = panelsOf(runs);
    for (const panel of panels) {
      if (this.panels.has(panel.title)) this.panels.get(panel.title).update(panel);
      else this.panels.set(panel.title, new Panel(panel, (index) => this.point(index), this.onChoose));
    }
    const roots = (more) => panels.filter((panel) => Boolean(panel.more) === more).map((panel) => this.panels.get(panel.title).root);
    place(byId("panels"), panels.length ? roots(false) : [element("p", { class: "note" }, "There are no curves: the run has logged no step yet.")]);
    place(byId("more-panels"), roots(true));
    byId("more").hidden = !roots(true).length;
    byId("more-count").textContent = roots(true).length;
  }

  point = (index) => this.panels.forEach((panel) => panel.point(index));
  redraw = () => this.panels.forEach(({ plot }) => plot.redraw(false, true));

  /** The line at the chosen step. */
  mark(step) {
    Panel.chosen = step;
    this.redraw();
  }

  /** Paper has its own width, and no dark side. */
  forPaper(paper) {
    document.documentElement.classList.toggle("paper", paper);
    this.panels.forEach((panel) => (paper ? panel.plot.setSize({ width: 330, height: 130 }) : panel.resize()));
    this.redraw();
  }
}
