// Which panels of curves there are, and the data of each.

const isEvaluation = (key) => key.startsWith("eval/");

const share = { floor: 0, ceiling: 1 }; // of the axis, where the data stay inside
const positive = { floor: 0 };
const more = { floor: 0, more: true }; // shown on request

// A key, such as eval/greedy/accuracy_one_hop, without the part before the name that the task gave.
const nameOf = (key) => key.replace(/^.*\/(accuracy_)?/, "");
const ofQuestions = { ...share, of: (key) => data.kinds.includes(nameOf(key)) }; // the task describes questions, too

// Title, a sentence, keys, and options. A key belongs to the first panel that takes it, unless `reuse` names it; `upTo`
// leaves out keys with larger values, `scale` multiplies them.
const PANELS = [
  ["Accuracy", "Share of right answers.", /^(reward\/correct|eval\/\w+\/accuracy)$/, share],
  ["Accuracy on pairs", "Share of pairs whose chosen answer has the higher score.",
    /^(preference|eval)\/accuracy/, share],
  ["Margin", "Score of the chosen answer minus score of the rejected one, mean.", /^(preference|eval)\/margin$/, {}],
  ["Log-prob of an answer", "Of held-out pairs, sum over its tokens, in nats.", /^eval\/log_prob_/, {}],
  ["Accuracy by kind of question", "Greedy answers to held-out questions.", /^eval\/greedy\/accuracy_/, ofQuestions],
  ["Accuracy by kind of answer", "Share of right answers among the greedy answers of each kind.",
    /^eval\/greedy\/accuracy_/, share],
  ["Reward", "The total and its components, mean over completions.",
    /^reward\/(?!.*calls)/, { reuse: /^reward\/correct$/ }],
  ["Calls", "Number, or share of a completion's calls.",
    /^reward\/.*calls|^completion\/.*_(calls|searches)$/, positive],
  ["Completion length", "Tokens that the policy wrote.", /^completion\/length|^eval\/greedy\/length$/, positive],
  ["Kinds of questions asked", "Share of a step's questions; no result of training.",
    /^completion\//, { ...ofQuestions, more: true }],
  ["What completions do", "Share of completions.", /^completion\/(?!truncated|turns)/, { ...share, upTo: 1 }],
  ["Turns and other counts", "Mean number per completion.", /^completion\/(?!truncated)/, positive],
  ["Groups without variance",
    `Share of groups whose rewards are all equal${data.comparesGroups ? ": they have no policy gradient" : ""}.`,
    /^group\/zero_reward_variance$/, share],
  ["Truncation", "Share of completions cut off at the limit of tokens.", /^completion\/truncated$/, share],
  ["Loss", "Mean over the updates of a step.", /^(loss\/total|eval\/loss)$/, {}],
  ["KL to the reference", "How far the policy is from its start, in nats per token.", /^loss\/kl$/, positive],
  ["KL to the teacher", "How far the policy is from its teacher, in nats per token.", /^teacher\/kl$/, positive],
  ["Entropy", "How undecided the policy is about a token, in nats.", /^policy\/entropy$/, positive],
  ["Clipped tokens", "Share of tokens that the clip leaves without a policy gradient.", /^policy\/clipped$/, positive],
  ["Gradient norm", "Before the gradient is scaled down to --max-grad-norm.", /^loss\/grad_norm$/, positive],
  ["Importance weight", "p(token) of the trainer / p(token) of the engine, mean.",
    /^policy\/importance_weight$/, positive],
  ["Importance weight at its cap", "Share of tokens at --importance-cap.", /^policy\/importance_capped$/, share],
  ["The critic", "Share of the returns' variance that it predicts.", /^critic\/explained_variance$/, {}],
  ["Seconds by phase", "Seconds of a step and of its parts.", /^time\/(?!tokens|waiting)/, positive],
  ["Accuracy by kind of question, sampled", "Held-out questions.",
    /^eval\/sampled\/accuracy_/, { ...ofQuestions, more: true }],
  ["Accuracy by kind of answer, sampled", "Held-out questions.", /^eval\/sampled\/accuracy_/, { ...share, more: true }],
  ["Probability ratio", "p(token) in the update / p(token) when sampled.", /^policy\/(first_)?ratio/, { more: true }],
  ["Gradients scaled down, skipped", "Share of updates, and number of updates.",
    /^loss\/(grad_clipped|skipped)$/, more],
  ["Sampling against training", "Difference of the two log-probs, mean over tokens.",
    /^policy\/sampling_log_prob_difference$/, more],
  ["Sampling against training, largest", "Of all tokens of a step.",
    /^policy\/sampling_log_prob_difference_max$/, more],
  ["Tokens per second", "Sampled tokens.", /^time\/tokens_per_second$/, more],
  ["Waiting for other processes", "Share of a step.", /^time\/waiting$/, more],
  ["Memory", "The most so far, in GB.", /^memory\/peak_bytes$/, { ...more, scale: 1e-9 }],
  ["Learning rate", "Of the optimizer.", /^lr$/, more],
].map(([title, sentence, pattern, { of = () => true, ...options }]) => ({
  ...{ title, sentence, takes: (key) => pattern.test(key) && of(key) },
  ...options,
}));

// A curve that is always 0 is shown only in these panels; elsewhere it is left out.
const TELLING_ZERO = /accuracy|correct$|total$|kl$|variance|truncated|policy\/(clipped|importance_capped)/;

const LABELS = {
  "reward/correct": "training questions",
  "preference/accuracy": "training pairs",
  "preference/margin": "training pairs",
  "eval/accuracy": "held out",
  "eval/accuracy_same_style": "held out, same style",
  "eval/accuracy_same_length": "held out, same length",
  "eval/margin": "held out",
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
  return LABELS[key] ?? nameOf(key).replaceAll("_", " ");
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
  return others.map((name) => ({ title: name, sentence: "", takes: (key) => key === name, more: true }));
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
