// Which panels of curves there are, and the data of each.

const isEvaluation = (key) => key.startsWith("eval/");

const share = { floor: 0, ceiling: 1 }; // of the axis, where the data stay inside
const positive = { floor: 0 };
const more = { floor: 0, more: true }; // shown on request

// Title, unit, keys, and options. A key belongs to the first panel that takes it, unless `reuse` names it; `upTo` leaves
// out keys with larger values, `scale` multiplies them.
const PANELS = [
  ["Accuracy", "share of right answers", /^(reward\/correct|eval\/\w+\/accuracy)$/, share],
  ["Accuracy by kind", "held-out questions, greedy", /^eval\/greedy\/accuracy_/, share],
  ["Reward", "mean over completions", /^reward\/(?!.*calls)/, { reuse: /^reward\/correct$/ }],
  ["Calls", "mean per completion", /^reward\/.*calls|^completion\/.*_(calls|searches)$/, positive],
  ["Completion length", "tokens", /^completion\/length|^eval\/greedy\/length$/, positive],
  ["What completions do", "share of completions", /^completion\/(?!truncated|turns)/, { ...share, upTo: 1 }],
  ["Turns and other counts", "mean per completion", /^completion\/(?!truncated)/, positive],
  ["Groups without variance", "share of groups", /^group\/zero_reward_variance$/, share],
  ["Truncation", "share of completions cut off", /^completion\/truncated$/, share],
  ["Loss", "mean over updates", /^(loss\/total|eval\/loss)$/, {}],
  ["KL to the reference", "nats per token", /^loss\/kl$/, positive],
  ["Entropy", "nats per token", /^policy\/entropy$/, positive],
  ["Clipped tokens", "share of tokens without a gradient", /^policy\/clipped$/, positive],
  ["Gradient norm", "before clipping", /^loss\/grad_norm$/, positive],
  ["Importance weight", "mean over tokens", /^policy\/importance_weight$/, positive],
  ["Importance weight at its cap", "share of tokens", /^policy\/importance_capped$/, share],
  ["Seconds by phase", "seconds per step", /^time\/(?!tokens|waiting)/, positive],
  ["Accuracy by kind, sampled", "held-out questions", /^eval\/sampled\/accuracy_/, { ...share, more: true }],
  ["Probability ratio", "to the policy that sampled", /^policy\/(first_)?ratio/, { more: true }],
  ["Gradients scaled down, skipped", "share, number of updates", /^loss\/(grad_clipped|skipped)$/, more],
  ["Sampling against training", "difference of log-probs", /^policy\/sampling_log_prob_difference$/, more],
  ["Sampling against training, largest", "of a token", /^policy\/sampling_log_prob_difference_max$/, more],
  ["Tokens per second", "sampled", /^time\/tokens_per_second$/, more],
  ["Waiting for other processes", "share of a step", /^time\/waiting$/, more],
  ["Memory", "peak, GB", /^memory\/peak_bytes$/, { ...more, scale: 1e-9 }],
  ["Learning rate", "of the optimizer", /^lr$/, more],
].map(([title, unit, pattern, options]) => ({ title, unit, takes: (key) => pattern.test(key), ...options }));

// What is 0 all the time tells something only here; elsewhere it is left out.
const TELLING_ZERO = /accuracy|correct$|total$|kl$|variance|truncated|policy\/(clipped|importance_capped)/;

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
  "policy/importance_weight": "mean",
  "policy/importance_capped": "at the cap",
  "policy/sampling_log_prob_difference_max": "largest",
  "time/step": "whole step",
  "time/weights": "weights into the engine",
  "time/generation": "answers of the engine",
};

/** The name of a key in the legend of a panel. */
function labelOf(key, panel) {
  if (panel.title === "Reward" && key === "reward/correct") return "correct";
  return LABELS[key] ?? key.replace(/^.*\/(accuracy_)?/, "").replaceAll("_", " ");
}

// ---- data of the curves

const { series } = data.metrics; // by key, a value or null for each line of metrics.jsonl
const allSteps = [...new Set(data.metrics.steps)].sort((a, b) => a - b);

/** The values of a key by step; a step that has several lines (training, evaluation) shows the last of them. */
function valuesOf(key, scale = 1) {
  const known = new Map();
  (series[key] ?? []).forEach((value, i) => {
    if (value !== null) known.set(data.metrics.steps[i], value * scale);
  });
  return known;
}

/** A panel of its own for each key that no panel takes. */
function ownPanels(keys) {
  const others = keys.filter((key) => !isEvaluation(key) && !PANELS.some((panel) => panel.takes(key)));
  return others.map((name) => ({ title: name, unit: "", takes: (key) => key === name, more: true }));
}

/** The panels that have something to show: [{...panel, curves: [{key, label, values}]}], a value or null by step. */
function listPanels() {
  const keys = Object.keys(series).sort((a, b) => isEvaluation(a) - isEvaluation(b)); // training first, else as logged
  const peaks = new Map(keys.map((key) => [key, largest(series[key].map((value) => Math.abs(value ?? 0)), 0)]));
  const taken = new Set();
  const panels = [...PANELS, ...ownPanels(keys)].map((panel) => {
    const free = (key) => panel.takes(key) && (!taken.has(key) || panel.reuse?.test(key));
    const own = keys.filter((key) => free(key) && peaks.get(key) <= (panel.upTo ?? Infinity));
    own.forEach((key) => taken.add(key));
    const telling = own.filter((key) => peaks.get(key) > 0 || TELLING_ZERO.test(key));
    const curves = telling.map((key) => {
      const values = valuesOf(key, panel.scale);
      return { key, label: labelOf(key, panel), values: allSteps.map((step) => values.get(step) ?? null) };
    });
    return { ...panel, curves };
  });
  return panels.filter(({ curves }) => curves.length > 0);
}
