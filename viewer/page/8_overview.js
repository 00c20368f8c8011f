// What is said of the runs as a whole, and of the loss of a step.

// ---- the top of the page

const FLAGS = [
  ...["model", "task", "steps", "prompts_per_step", "group_size", "max_new_tokens", "lr", "kl_weight"],
  ...["epochs_per_step", "minibatch_size", "importance_cap", "steps_ahead", "push_every", "temperature", "seed"],
];
const NOT_FLAGS = ["name", "command", "sources", "about", "loss"]; // two runs always differ in these, or need not
const setting = (value) =>
  value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
const flag = (name) => `--${name.replaceAll("_", "-")}`;

function showRuns() {
  const open = [...byId("runs").querySelectorAll("details")].map((details) => details.open); // as the reader left them
  fill(byId("runs"), data.runs.map(runCard), data.runs.length > 1 && differences());
  byId("runs")
    .querySelectorAll("details")
    .forEach((details, i) => (details.open = open[i] ?? details.open));
}

function runCard(run) {
  const config = run.config ?? {};
  const summary = run.summary ?? {};
  const tile = (name, value) => element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, value));
  const change = (name, key) => {
    const [before, after] = [summary.before?.[key], summary.after?.[key]];
    return (isNumber(before) || isNumber(after)) && tile(name, `${short(before)} → ${short(after)}`);
  };
  const steps = (run.metrics?.steps ?? []).filter((step) => step > 0);
  const done = steps.length ? Math.max(...steps) : 0;
  return element(
    "section",
    { class: "run", "aria-label": `Run ${run.name}`, "data-state": run.state },
    data.runs.length > 1 && element("h2", {}, `${run.experiment}/${run.name}`),
    element(
      "dl",
      { class: "tiles" },
      tile("state", run.state),
      tile("steps", config.steps ? `${done} of ${config.steps}` : String(done)),
      change("greedy accuracy", "greedy/accuracy"),
      change("sampled accuracy", "sampled/accuracy"),
      isNumber(summary.seconds) && tile("training", duration(summary.seconds)),
      isNumber(summary.peak_memory_bytes) && tile("memory", `${short(summary.peak_memory_bytes / 1e9)} GB`),
    ),
    element(
      "p",
      { class: "facts" },
      FLAGS.filter((name) => name in config).map((name) =>
        element("span", { class: "fact" }, `${flag(name)} `, element("b", {}, setting(config[name]))),
      ),
    ),
    element(
      "p",
      { class: "note" },
      [config.commit && `commit ${config.commit}`, config.machine, config.gpu].filter(Boolean).join(" · "),
    ),
    element("details", {}, element("summary", {}, "All flags and results"), allFacts(run)),
  );
}

const duration = (seconds) =>
  seconds < 90
    ? `${short(seconds)} s`
    : seconds < 5400
      ? `${(seconds / 60).toFixed(1)} min`
      : `${(seconds / 3600).toFixed(1)} h`;

function allFacts(run) {
  const flags = Object.entries(run.config ?? {}).map(([name, value]) => [name, setting(value)]);
  const keys = [...new Set([...Object.keys(run.summary?.before ?? {}), ...Object.keys(run.summary?.after ?? {})])];
  const results = keys.map((key) => [key, short(run.summary.before?.[key]), short(run.summary.after?.[key])]);
  return element(
    "div",
    { class: "tables" },
    flags.length
      ? table(`Flags of ${run.name}`, ["flag", "value"], flags)
      : element("p", { class: "note" }, "The run has no config.json."),
    results.length
      ? table(`Evaluation of ${run.name} on held-out questions`, ["held-out questions", "before", "after"], results)
      : element("p", { class: "note" }, "The run has written no summary yet."),
  );
}

/** The flags in which the runs differ. */
function differences() {
  const [first, second] = data.runs.map((run) => run.config ?? {});
  const names = Object.keys({ ...first, ...second }).filter(
    (name) => setting(first[name]) !== setting(second[name]) && !NOT_FLAGS.includes(name),
  );
  const rows = names.map((name) => [name, setting(first[name]), setting(second[name])]);
  return element(
    "details",
    { open: true },
    element("summary", {}, `The runs differ in ${count(names.length, "flag")}`),
    table("Flags that differ", ["flag", ...data.runs.map((run) => run.name)], rows),
  );
}

function showDiagnosis() {
  const findings = data.runs.flatMap((run, number) =>
    (run.diagnosis ?? []).map((finding) => ({ ...finding, run, number })),
  );
  const item = ({ finding, sentence, steps, link: address, run, number }) =>
    element(
      "li",
      { class: "finding", "data-finding": finding },
      element("b", {}, data.runs.length > 1 ? `${run.name}: ${finding}` : finding),
      element("p", {}, sentence),
      element(
        "p",
        { class: "note" },
        "Steps ",
        (steps ?? []).map((range, i) => [
          i ? ", " : "",
          number === 0 && data.samples.steps.length
            ? element(
                "button",
                {
                  type: "button",
                  class: "plain",
                  "aria-label": `${ranges([range])}: show the samples of step ${nearest(range[0]).step}`,
                  on: { click: () => goToStep(range[0]) },
                },
                ranges([range]),
              )
            : ranges([range]),
        ]),
        " · ",
        link("what it means, and what to try", address),
      ),
    );
  const none = !allSteps(data.runs).length
    ? "The run has logged no step yet."
    : data.runs.length > 1
      ? "The runs have found nothing wrong."
      : "The run has found nothing wrong.";
  fill(
    byId("findings"),
    findings.length ? element("ul", { class: "findings" }, findings.map(item)) : element("p", {}, none),
  );
}

function showRunKey() {
  const swatch = (number) =>
    element("span", { class: `swatch${number ? " dashed" : ""}`, css: { "--swatch": "var(--ink)" } });
  fill(
    byId("run-key"),
    data.runs.length > 1 &&
      data.runs.map((run, number) => element("span", {}, swatch(number), `${run.experiment}/${run.name}`)),
  );
}

// ---- the terms of a step against the loss that was logged

function showCheck(entry) {
  const check = checkLoss(groups, loggedAt(data.runs[0], "loss/total", entry.step), entry.complete);
  const [added, said] = [check.sum, check.logged].map((value) =>
    Math.abs(value) < 1e-4 ? short(value) : exact(value),
  );
  const of = check.updates.length > 1 ? `, as a mean over its ${check.updates.length} updates,` : "";
  const all = `The terms of all tokens of this step${of} add up to ${added}`;
  const sentences = {
    equal: `${all}; the run logged a loss of ${said}: equal to 1e-5.`,
    part: `${entry.rows} of ${entry.of ?? "all"} rows were written: their terms are a part of the logged loss of ${said}.`,
    differs: `${all}, but the run logged ${said}: the terms are not those of its loss.`,
    missing: `${all}, the run logged a loss of ${said}: one of the two is not known.`,
    unknown: "The samples have no terms of the loss: an older version wrote them, or no update used them.",
  };
  const symbol = { equal: "=", differs: "≠" }[check.state] ?? "·";
  const root = byId("loss-check");
  root.dataset.state = check.state;
  root.dataset.sum = check.sum;
  root.dataset.logged = check.logged;
  const sign = element("span", { class: "symbol", "aria-hidden": "true" }, symbol);
  const verdict = element("p", { class: "verdict" }, sign, element("span", {}, sentences[check.state]));
  fill(root, verdict, check.state !== "unknown" && formula(check.updates));
}

/** What the experiment says of its loss, and the sums of this step's updates. */
function formula(updates) {
  const rows = updates.map((update) => [
    `epoch ${update.epoch}, minibatch ${update.minibatch}`,
    String(update.rows),
    signed(update.total, 8),
  ]);
  return element(
    "details",
    { class: "formula" },
    element("summary", {}, "How a token's term comes about"),
    data.runs[0].config?.loss && element("p", {}, shortened(setting(data.runs[0].config.loss), 2000)),
    element("p", { class: "note" }, "A token's push is minus the gradient of the loss with respect to its log-prob."),
    rows.length > 0 && table("Sums of this step's updates", ["update", "rows written", "sum of their terms"], rows),
  );
}
