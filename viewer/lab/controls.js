// The settings that a reader can change: what they are called, what is allowed, and what to expect of each.
//
// Names and defaults are those of experiment_base/train.py, as its committed runs recorded them. `about` is shown below
// a control; an option of a menu is [label, what to expect].

const GROUPS = {
  "Algorithm": "The lines of its train.py are shown below; those that GRPO lacks are marked.",
  "Rollout": "What is sampled at each step.",
  "Update": "How the policy learns from what it sampled.",
  "Old samples": "In large systems the sampler runs behind the trainer. Here you choose by how much.",
  "Reward": "What the policy is paid for. It learns nothing else.",
  "Planted mistakes": "Errors of published code. None of them crashes.",
};

const CONTROLS = {
  algorithm: { group: "Algorithm", label: "Algorithm", options: {
    grpo: ["GRPO", "Compares each answer with the other answers to the same question. Expect 0.8 right answers at about step 30."],
    drgrpo: ["Dr. GRPO", "GRPO without two divisions. Here it reaches 0.8 a few steps sooner; where answers can ramble, wrong ones stay shorter."],
    rloo: ["RLOO", "The baseline leaves out the answer itself. Expect Dr. GRPO's curve: only the step size differs."],
    maxrl: ["MaxRL", "Questions that are rarely answered right count more. Expect hardly a difference from GRPO on easy sums."],
    gspo: ["GSPO", "One ratio for a whole answer. With one update per rollout it equals GRPO; make four epochs to see it clip most tokens."],
    cispo: ["CISPO", "Clips the weight of a token and keeps its gradient. It differs from GRPO by its ratio only after the first update of a rollout."],
    reinforce: ["REINFORCE, no baseline", "Right answers become more probable, wrong ones are left alone. With rewards of 0 and 1, expect no harm."],
    reinforce_baseline: ["REINFORCE, running mean", "Compares an answer with the mean of earlier steps. With rewards of 0 and 1, expect the same curve as without."],
  } },
  group_size: { group: "Rollout", label: "Answers to each question", least: 1, most: 32, whole: true,
    about: "More answers make a better baseline and cost more time: with 2, expect ten steps more to 0.8, at a quarter of the cost." },
  prompts_per_step: { group: "Rollout", label: "Questions per step", least: 1, most: 128, whole: true,
    about: "Fewer questions make noisier steps: with 4, expect up to eleven steps more, at a quarter of the cost." },
  max_new_tokens: { group: "Rollout", label: "Most tokens of an answer", least: 1, most: 128, whole: true,
    about: "A thought needs room: with 24 most thoughts are cut off and earn nothing; with 16 the policy learns not to think." },
  temperature: { group: "Rollout", label: "Temperature", least: 0.1, most: 3,
    about: "Higher is more varied: at 1.3 expect more slips and slower learning, at 0.6 fewer slips." },
  lr: { group: "Update", label: "Learning rate", least: 0, most: 1,
    about: "Twice the rate needs about half the steps. Four times is still stable; much more destroys the policy." },
  kl_weight: { group: "Update", label: "KL weight", least: 0, most: 10,
    about: "Holds the policy near its start: 0.02 is too weak to matter, 0.5 keeps it from thinking as often as it pays." },
  epochs_per_step: { group: "Update", label: "Epochs per rollout", least: 1, most: 8, whole: true,
    about: "Using each answer several times: with four epochs expect 0.8 at step 10 instead of 30." },
  minibatch_size: { group: "Update", label: "Answers per update", least: 1, most: 4096, whole: true, empty: "all",
    about: "Empty: all answers of a step make one update. 32 of 128 make four, and learn nearly as fast as four epochs." },
  clip_eps: { group: "Update", label: "Clip range", least: 0, most: 10, empty: "its own",
    about: "Stops a token whose ratio has moved this far. With one update per rollout nothing moves, so it does nothing. Empty: 0.2, and 3e-4 for GSPO." },
  lag: { group: "Old samples", label: "Steps that the sampler is behind", least: 0, most: 16, whole: true,
    about: "Answers come from an older policy: expect slower learning, and more with a higher learning rate." },
  correction: { group: "Old samples", label: "Correction", options: {
    none: ["by the ratio alone", "Old log-probs are the sampler's, so the ratio shows how old the answers are, and the clip drops what has moved too far."],
    tis: ["weights, cut at 2", "Each token is weighted by p(policy before the update) / p(sampler), at most 2: truncated importance sampling."],
    mask: ["leave out what differs", "Tokens whose probability differs too much between sampler and policy are not trained."],
  } },
  reward: { group: "Reward", label: "Reward", options: {
    correct: ["right answer", "1 for a right answer, 0 for a wrong one. Expect the policy to think, because thinking makes answers right."],
    short: ["right and short", "A right answer, minus a little for each character. Thinking is long: expect a struggle between the two."],
    long: ["longer is better", "Pays for length alone. Expect the reward to rise, and look at what happens to the right answers."],
    own: ["your own", "Write it below. It sees the text and the right answer, and returns a number."],
  } },
  mistake: { group: "Planted mistakes", label: "Mistake", empty: "none", options: {
    "": ["none", "The algorithm as it is."],
    mask: ["mask off by one", "The first token of an answer is not trained. It decides whether to think, so expect nothing to be learned."],
    batch: ["advantages over the whole batch", "Answers are compared with those to other questions. Expect it to work here, because all questions are alike."],
    kl_padding: ["KL averaged over padding", "The penalty becomes weaker than you set it. Use a KL weight of 0.5 to see it: the mistake learns better."],
    no_baseline: ["no baseline", "All right answers are pushed up, no wrong one down. Expect little harm while rewards are 0 and 1."],
    sign: ["wrong sign", "Climbs down instead of up. Expect the policy to unlearn what is right."],
  } },
  seed: { group: "Rollout", label: "Seed", least: 0, most: 4294967295, whole: true,
    about: "Decides which questions are asked and every random number. The same seed gives the same run, in every browser." },
  steps: { group: "Rollout", label: "Steps", least: 1, most: 1000, whole: true,
    about: "Where training stops by itself; you can go on." },
  reward_source: { group: "Reward", label: "Your reward: the body of a JavaScript function of text and answer", long: true,
    about: "It runs in this tab, without access to the network. correct(text, answer) is 1 or 0." },
};

const UNUSED = ["kl_weight", "epochs_per_step", "minibatch_size", "clip_eps"]; // by REINFORCE

const EXAMPLE_REWARD = "// Pays for right answers, and a little for every 7.\nreturn correct(text, answer) + text.split(\"7\").length / 10;";

const DEFAULTS = { algorithm: "grpo", lag: 0, correction: "none", reward: "correct", reward_source: null, mistake: null,
  seed: 0, clip_eps: null, ...data.defaults };

/** The value of a setting from the text of a control or of a link; throws a sentence that says what is allowed. */
function parseSetting(name, text) {
  const { label, options, least, most, whole, empty, long } = CONTROLS[name];
  if ((empty !== undefined || long) && text.trim() === "") return null;
  if (long) {
    if (text.length <= 2000) return text;
    throw new Error(`${label}: at most 2,000 characters.`);
  }
  if (options) {
    if (Object.hasOwn(options, text)) return text;
    throw new Error(`${label}: choose one of ${Object.keys(options).filter(Boolean).join(", ")}.`);
  }
  const value = Number(text);
  if (text.trim() !== "" && value >= least && value <= most && (!whole || Number.isInteger(value))) return value;
  throw new Error(`${label}: give a ${whole ? "whole number" : "number"} from ${least} to ${most.toLocaleString("en")}.`);
}

/** What is wrong between settings that are each allowed; an empty text if nothing is. */
function contradiction({ group_size, prompts_per_step, minibatch_size, algorithm, reward, reward_source }) {
  const rows = group_size * prompts_per_step;
  const compares = !algorithm.startsWith("reinforce");
  if (compares && group_size < 2) return "With one answer to each question there is nothing to compare: give at least 2, or choose REINFORCE.";
  if (rows > 512) return `${rows} answers per step are too many for a browser tab: give at most 512.`;
  if (minibatch_size !== null && (minibatch_size % group_size || minibatch_size > rows))
    return `Answers per update: give a multiple of ${group_size}, the answers to each question, up to ${rows}.`;
  if (reward === "own" && reward_source === null) return "Write your reward into its box, or choose another one.";
  return "";
}

/** A setting as the reader sees it. */
const shownSetting = (name, value) =>
  value === null ? CONTROLS[name].empty ?? "none" : CONTROLS[name].options?.[value]?.[0] ?? String(value);

/** The settings that are not the default ones, in words; steps and the text of a reward are no part of a name. */
function nameOf(settings) {
  const names = Object.keys(CONTROLS).filter((name) => settings[name] !== DEFAULTS[name] && !["steps", "reward_source"].includes(name));
  const words = names.map((name) => (name === "algorithm" ? shownSetting(name, settings[name]) : `${CONTROLS[name].label.toLowerCase()} ${shownSetting(name, settings[name])}`));
  return words.join(", ") || "default settings";
}
