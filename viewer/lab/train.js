// GRPO in the reader's browser: the loop of experiment_base/train.py, and of its siblings, step by step the same.
import { keyed_generator, prompts_of_step } from "./keyed.js";
import { ALGORITHMS, mean, policy_loss } from "./loss.js";
import { in_groups } from "./policy.js";
import { correct, is_reasoned } from "./rewards.js";
import { sample } from "./sampling.js";
import { PAD_ID } from "./tokenizer.js";

const SMOOTHING = 0.1; // weight of the newest step in REINFORCE's running mean
const IMPORTANCE_CAP = 2; // the largest importance weight, as in scale/engine/train.py

export const DEFAULTS = {
  algorithm: "grpo", // a key of ALGORITHMS
  prompts_per_step: 16, // Q: questions per step
  group_size: 8, // G: completions per question
  max_new_tokens: 96, // completion budget in tokens
  temperature: 1,
  epochs_per_step: 1, // passes over a rollout
  minibatch_size: null, // rows per optimizer step; null: the full rollout
  lr: 5e-5, // of AdamW
  clip_eps: 0.2,
  kl_weight: 0.02, // beta
  max_grad_norm: 1, // a longer gradient is scaled down to this norm
  lag: 0, // the completions are sampled with the weights of so many steps ago
  correction: "none", // "tis" weights each token by p / p_sampler, up to a cap; "mask" drops it beyond that
  reward: "correct", // a key of REWARDS, or "own"
  reward_source: null, // the reader's own reward
  mistake: null, // "mask", "batch", "kl_padding", "no_baseline" or "sign": one line is wrong
  seed: 0,
};

/** Complete settings: the defaults, those of the algorithm's own train.py, and what is given. */
export function settings_of(given) {
  const name = given.algorithm ?? DEFAULTS.algorithm;
  if (!Object.hasOwn(ALGORITHMS, name)) throw new Error(`There is no algorithm ${name}.`);
  const { defaults, fixed } = ALGORITHMS[name];
  const chosen = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== null));
  return { ...DEFAULTS, ...defaults, ...chosen, ...fixed };
}

export class Training {
  /**
   * `questions`: rows {question, answer}; `reward_all`: completions {text, answer, question} -> what each earns.
   *
   * The policy begins where it is; `reference` is the policy before training.
   */
  constructor(settings, policy, reference, tokenizer, questions, reward_all) {
    Object.assign(this, { settings, policy, reference, tokenizer, questions, reward_all });
    this.num_steps = 0; // that are done
    this.baseline = 0; // REINFORCE's: a running mean of earlier rewards
    this.earlier_weights = []; // before each of the last `lag` steps, the oldest first
  }

  /** One step, as in `train` of train.py. If it fails, everything is as before it. */
  train_step() {
    const { settings, policy } = this;
    const step = this.num_steps + 1;
    const algorithm = ALGORITHMS[settings.algorithm];
    const began = performance.now();

    // 1 sample: G completions of each of Q prompts
    const trajectories = this.sample_completions(step);
    const sampled = performance.now();

    // 2 reward: each completion by itself, from its text
    for (const row of trajectories) {
      Object.assign(row, this.questions[row.prompt_index]);
      row.text = this.tokenizer.decode(row.ids);
      row.rewards = { correct: correct(row.text, row.answer) };
    }
    const totals = this.reward_all(trajectories);
    trajectories.forEach((row, b) => (row.return = Math.fround(totals[b])));

    // 3 advantage: better or worse than the group, or than the baseline
    const groups = in_groups(trajectories, settings.mistake === "batch" ? trajectories.length : settings.group_size);
    for (const group of groups) {
      const returns = group.map((row) => row.return);
      const right = algorithm.advantages(returns, this.baseline);
      const advantages = settings.mistake === "no_baseline" ? returns : right;
      const sign = settings.mistake === "sign" ? -1 : 1;
      group.forEach((row, g) => (row.advantage = Math.fround(sign * advantages[g])));
    }
    const experience = collate(settings, trajectories);

    // 4 log-probs to compare with: from the old policy, and from the reference
    const old = old_log_probs(settings, policy, experience);
    const ref = settings.kl_weight > 0 ? this.reference.score(experience, settings.temperature).log_probs : null;
    experience.forEach((row, b) => {
      row.old_log_probs = old && old[b];
      row.log_probs_ref = ref && ref[b];
      row.advantages = importance_weights(settings, row).map((weight) => weight * row.trajectory.advantage);
    });

    // 5 update: one or more optimizer steps on this rollout
    const weights = settings.lag ? policy.weights.slice() : null;
    const statistics = update(settings, policy, experience, step);

    // 6 log
    const metrics = { ...rollout_metrics(trajectories), ...statistics.metrics() };
    const has_baseline = settings.algorithm === "reinforce_baseline";
    if (has_baseline) this.baseline += SMOOTHING * (metrics["reward/total"] - this.baseline);
    if (weights) this.earlier_weights = [...this.earlier_weights, weights].slice(-settings.lag);
    this.num_steps = step;
    this.newest = { step, experience };
    const seconds = { sample: (sampled - began) / 1000, update: (performance.now() - sampled) / 1000 };
    return { step, metrics, groups: this.shown_groups(experience, statistics), seconds };
  }

  /** G completions of each of the step's Q questions, by the policy, or by what it was `lag` steps ago. */
  sample_completions(step) {
    const { settings, questions } = this;
    const prompt_index = prompts_of_step(questions.length, settings.prompts_per_step, step, settings.seed);
    const prompts = prompt_index.map((index) => this.tokenizer.encode_prompt(questions[index].question));
    const key = [settings.seed, step]; // decides the random numbers of this step
    const { max_new_tokens, temperature } = settings;
    const [earlier] = settings.lag ? this.earlier_weights : [];
    if (earlier) (this.policy.sampler ??= this.policy.copy()).weights.set(earlier);
    const sampler = earlier ? this.policy.sampler : this.policy;
    return sample(sampler, prompts, settings.group_size, { max_new_tokens, temperature, key, prompt_index });
  }

  /** The state before the first step. */
  beginning() {
    const zeros = new Float32Array(this.policy.size);
    const { weights } = this.reference;
    return { num_steps: 0, baseline: 0, earlier_weights: [], weights, m: zeros, v: zeros, updates: 0 };
  }

  /** Everything that later steps depend on. */
  state() {
    const { num_steps, baseline, earlier_weights, policy } = this;
    const [weights, m, v] = [policy.weights, policy.m, policy.v].map((array) => array.slice());
    return { num_steps, baseline, earlier_weights, weights, m, v, updates: policy.updates };
  }

  restore({ num_steps, baseline, earlier_weights, weights, m, v, updates }) {
    Object.assign(this, { num_steps, baseline, earlier_weights, newest: null });
    Object.assign(this.policy, { updates });
    for (const [name, values] of Object.entries({ weights, m, v })) this.policy[name].set(values);
  }

  /** What the page shows of a step. */
  shown_groups(experience, statistics) {
    return in_groups(experience, this.settings.group_size).map((group) => {
      const { prompt_index, prompt } = group[0].trajectory;
      const rows = group.map(({ trajectory, old_log_probs: old, log_probs_ref: ref }) => {
        const { sampler_log_probs: log_probs, ...row } = trajectory;
        return { ...row, log_probs, old, ref, ...(statistics.rows.get(trajectory) ?? { entropy: null, updates: [] }) };
      });
      return { ...this.questions[prompt_index], prompt_index, prompt, rows };
    });
  }
}

/** Rows as training sees them: which of the tokens after the prompt count. */
function collate(settings, trajectories) {
  const longest = Math.max(...trajectories.map((row) => row.prompt.length + row.ids.length));
  return trajectories.map((trajectory) => {
    const { prompt, ids, sampler_log_probs } = trajectory;
    const row = { trajectory, prompt, ids, sampler_log_probs, action_mask: ids.map(() => 1) };
    // the mistake: the mask is shifted by one, away from the first token and onto the padding after the last
    if (settings.mistake === "mask") {
      row.action_mask = [0, ...row.action_mask].slice(0, longest - prompt.length);
      row.ids = [...ids, PAD_ID].slice(0, row.action_mask.length);
      row.sampler_log_probs = [...sampler_log_probs, 0].slice(0, row.action_mask.length);
    }
    return { ...row, num_tokens: Math.max(1, sum_of(row.action_mask)) };
  });
}

/** The log-probs of the policy that sampled the tokens; null: it is still the current one, and the ratio is 1. */
function old_log_probs(settings, policy, experience) {
  const { epochs_per_step, minibatch_size, lag, correction } = settings;
  const is_one_update = epochs_per_step === 1 && (minibatch_size ?? Infinity) >= experience.length;
  if (lag && correction !== "none") return policy.score(experience, settings.temperature).log_probs;
  return is_one_update && !lag ? null : experience.map((row) => row.sampler_log_probs);
}

/** What corrects a lag: each token's p / p_sampler before the update, cut at the cap, or dropped beyond it. */
function importance_weights({ lag, correction }, row) {
  if (!lag || correction === "none") return row.ids.map(() => 1);
  return row.ids.map((_, t) => {
    const weight = row.action_mask[t] ? Math.exp(row.old_log_probs[t] - row.sampler_log_probs[t]) : 1;
    if (correction === "tis") return Math.min(weight, IMPORTANCE_CAP);
    return weight > IMPORTANCE_CAP || weight < 1 / IMPORTANCE_CAP ? 0 : weight;
  });
}

/** Train on one rollout: some epochs over shuffled minibatches, one optimizer step each. */
function update(settings, policy, experience, step) {
  const statistics = new UpdateStatistics();
  for (let epoch = 0; epoch < settings.epochs_per_step; epoch++) {
    const key = [settings.seed, step, epoch]; // decides the shuffle
    minibatches(experience, settings, key).forEach((minibatch, index) => {
      policy.grad.fill(0);
      const rows = settings.kl_weight > 0 ? minibatch.rows : with_advantages(minibatch.rows);
      policy.score(rows, settings.temperature, (micro, log_probs, entropy) =>
        micro.map((row, b) => {
          const result = policy_loss(settings, log_probs[b], row, minibatch);
          statistics.add(row, entropy[b], { epoch, minibatch: index, log_probs: log_probs[b], ...result });
          return result.push.map((push) => -push);
        }),
      );
      const grad_norm = policy.grad_norm();
      const scale = Math.min(1, settings.max_grad_norm / (grad_norm + 1e-6));
      if (Number.isFinite(grad_norm)) policy.optimizer_step(settings.lr, scale); // otherwise this update is skipped
      statistics.grad_norms.push(grad_norm);
    });
  }
  return statistics;
}

/** Every row once, in shuffled minibatches of complete groups, and the counts that losses divide by. */
function minibatches(experience, { minibatch_size, group_size }, key) {
  const groups = in_groups(experience, group_size);
  const order = keyed_generator("minibatches", ...key).permutation(groups.length);
  return in_groups(order, (minibatch_size ?? experience.length) / group_size).map((part) => {
    const rows = part.flatMap((index) => groups[index]);
    const num_tokens = sum_of(rows.map(({ action_mask }) => sum_of(action_mask)));
    const width = Math.max(...rows.map((row) => row.prompt.length + row.ids.length)) - 1;
    return { rows, num_rows: rows.length, num_tokens, width };
  });
}

/** Rows without advantage have no gradient, unless there is a KL penalty. If all are such rows, one of them is kept. */
function with_advantages(rows) {
  const first = ({ trajectory: a }, { trajectory: b }) =>
    a.prompt_index - b.prompt_index || a.completion_index - b.completion_index;
  const some = rows.filter((row) => row.trajectory.advantage !== 0);
  return some.length ? some : rows.toSorted(first).slice(0, 1);
}

/** What the page shows of a step's updates; metrics as in harness/logs/statistics.py. */
class UpdateStatistics {
  rows = new Map(); // {entropy, updates} by trajectory
  grad_norms = []; // of the updates that are done
  entropies = []; // of every token in every update
  kl_of_rows = []; // before the first update: later the policy is no longer the one that sampled

  add(row, entropy, update) {
    const counted = (values) => Array.from(values).filter((_, t) => row.action_mask[t]);
    this.entropies.push(...counted(entropy));
    if (update.kl && !this.grad_norms.length) this.kl_of_rows.push(mean(counted(update.kl)));
    if (!this.rows.has(row.trajectory)) this.rows.set(row.trajectory, { entropy, updates: [] });
    this.rows.get(row.trajectory).updates.push(update);
  }

  metrics() {
    return {
      ...(this.kl_of_rows.length && { "loss/kl": mean(this.kl_of_rows) }),
      "loss/grad_norm": mean(this.grad_norms),
      "loss/skipped": this.grad_norms.filter((norm) => !Number.isFinite(norm)).length,
      "policy/entropy": mean(this.entropies),
    };
  }
}

/** Metrics of a rollout, as in harness/logs/statistics.py. */
function rollout_metrics(trajectories) {
  const mean_over_rows = (value) => mean(trajectories.map((row) => +value(row)));
  return {
    "reward/total": Math.fround(mean_over_rows((row) => row.return)),
    "reward/correct": mean_over_rows((row) => row.rewards.correct),
    "completion/reasoned": mean_over_rows((row) => is_reasoned(row.text)),
    "completion/length": mean_over_rows((row) => row.ids.length),
  };
}

const sum_of = (values) => values.reduce((sum, value) => sum + value, 0);
