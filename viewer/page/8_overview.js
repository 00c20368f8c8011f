// What is said of the runs as a whole, and of the loss of a step.

// ---- the top of the page

const FLAGS = [
  "model",
  "task",
  "steps",
  "prompts_per_step",
  "group_size",
  "max_new_tokens",
  "lr",
  "kl_weight",
  "epochs_per_step",
  "minibatch_size",
  "importance_cap",
  "steps_ahead",
  "push_every",
  "temperature",
  "seed",
];
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
    (name) => setting(first[name]) !== setting(second[name]) && !["name", "command", "sources"].includes(name),
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
  const { loss } = data;
  const logged = loggedAt(data.runs[0], "loss/total", entry.step);
  const check = checkLoss(groups, loss, logged, entry.complete);
  const [added, said] = [check.sum, check.logged].map((value) =>
    Math.abs(value) < 1e-4 ? short(value) : exact(value),
  );
  const all = `The terms of all tokens of this step add up to ${added}`;
  const sentences = {
    equal: `${all}; the run logged a loss of ${said}: equal to 1e-5.`,
    part: [
      `Only ${entry.rows} of ${loss.rows} rows of this step were written.`,
      `Their terms add up to ${added}, which is a part of the loss of ${said} that the run logged.`,
    ].join(" "),
    differs: `${all}, but the run logged ${said}: its loss is not the one that this page computes.`,
    missing: `${all}, the run logged a loss of ${said}: one of the two is not known.`,
    unknown:
      "The terms in the loss are not known for this experiment: the page shows all numbers of a token except its term.",
  };
  const symbol = { equal: "=", differs: "≠" }[check.state] ?? "·";
  const root = byId("loss-check");
  root.dataset.state = check.state;
  root.dataset.sum = check.sum;
  root.dataset.logged = check.logged;
  fill(
    root,
    element(
      "p",
      { class: "verdict" },
      element("span", { class: "symbol", "aria-hidden": "true" }, symbol),
      element("span", {}, sentences[check.state]),
    ),
    loss.kind && formula(),
  );
}

const weighing = (cap) =>
  cap === 0 ? "= 1 (--importance-cap 0)" : `= min(p_old(token) / p_engine(token), ${isNumber(cap) ? cap : "its cap"})`;

/** The loss in words, with the numbers of this run and the sums of this step's updates. */
function formula() {
  const { loss } = data;
  const { updates } = stepLoss(groups, loss);
  const tokens =
    loss.kind === "drgrpo" ? `${loss.budget}, the completion budget,` : "the number of the row's sampled tokens";
  const limits = `${Number((1 - loss.clip_eps).toFixed(6))} and ${Number((1 + loss.clip_eps).toFixed(6))}`;
  const kl = loss.kl_weight > 0;
  const weighted = groups.some(({ rows }) => rows.some((row) => row.weights));
  const advantage = weighted ? "advantage × importance weight" : "advantage";
  const before = weighted ? "of the one before the first update" : "of the one that sampled";
  const steps = [
    ["ratio", `= p(token) / p_old(token): of the policy in this update, and ${before}`],
    weighted && ["importance weight", weighing(data.runs[0].config?.importance_cap)],
    ["surrogate", `= −min(ratio × ${advantage}, ratio kept between ${limits} × ${advantage})`],
    kl && ["KL", "= r − log r − 1 with r = p_reference(token) / p(token)"],
    ["term", `= ${kl ? `(surrogate + ${loss.kl_weight} × KL)` : "surrogate"} / ${tokens} / the rows of the update`],
    [
      "loss",
      `= all terms of an update added up; logged is the mean over the ${count(updatesPerStep(loss), "update")} of a step`,
    ],
  ].filter(Boolean);
  const rows = updates.map((update) => [
    `epoch ${update.epoch}, minibatch ${update.minibatch}`,
    `${update.rows} of ${rowsOfUpdate(loss, update.minibatch)}`,
    signed(update.total, 8),
  ]);
  return element(
    "details",
    { class: "formula" },
    element("summary", {}, "How a token's term comes about"),
    element(
      "dl",
      {},
      steps.map(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]),
    ),
    rows.length > 0 && table("Sums of this step's updates", ["update", "rows written", "sum of their terms"], rows),
  );
}
